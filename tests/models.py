"""Model factories for the tests: small nets with every kind of edge that a pipeline can have."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class SkipNet(nn.Module):
    """Convolution, GroupNorm, ReLU; a residual over two convolutions; a strided one; two Linear layers.

    Partitioned by `layer` these are six stages: stem, first, second (with the addition), reduce, hidden,
    classifier. Partitioned by `residual` they are eight, two of them (addition, loss) without parameters.
    """

    def __init__(self, in_channels: int, size: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = _unit(in_channels, channels)
        self.first = _unit(channels, channels)
        self.second = nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                norm=nn.GroupNorm(channels // 2, channels),
            )
        )
        self.reduce = _unit(channels, channels, stride=2)
        self.pool = nn.MaxPool2d(2, stride=1)
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(channels * (size // 2 - 1) ** 2, 12)
        self.relu = nn.ReLU()
        self.classifier = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.second(self.first(x)) + x
        x = self.flatten(self.pool(self.reduce(x)))
        classes: Tensor = self.classifier(self.relu(self.hidden(x)))
        return classes


def _unit(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1),
            norm=nn.GroupNorm(channels_out // 2, channels_out),
            relu=nn.ReLU(),
        )
    )


class Whole(nn.Module):
    """A module inside another, so that a partition can name all of it as its only stage."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.body(x)
        return classes


def skip_net(in_channels: int = 2, size: int = 6, channels: int = 6, classes: int = 4) -> nn.Module:
    """A net with a skip edge."""
    return SkipNet(in_channels, size, channels, classes)


def whole_skip_net(in_channels: int = 2, size: int = 6, channels: int = 6, classes: int = 4) -> nn.Module:
    """The net with a skip edge, all of it under the one name `body`."""
    return Whole(SkipNet(in_channels, size, channels, classes))


def single_linear(features: int = 72, classes: int = 4) -> nn.Module:
    """Softmax regression: one stage when partitioned by `layer`."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=nn.Linear(features, classes)))
