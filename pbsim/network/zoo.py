"""The model zoo: networks small enough to train in a simulator, and those of the source paper.

All are plain torch modules; nothing here knows of pipelines. Where a network is normalized, it is by
GroupNorm, since a batch of one has no batch statistics. Convolutions start from He's normal initialization by
fan-out [1]_, biases at 0.

References
----------
.. [1] K. He et al., "Delving Deep into Rectifiers", ICCV 2015.
.. [2] C.-Y. Fu, pytorch-vgg-cifar10, 2019: VGG for CIFAR without normalization.
.. [3] K. He et al., "Identity Mappings in Deep Residual Networks", ECCV 2016: pre-activation blocks.
.. [4] K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015.
.. [5] K. He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: bottleneck blocks. As everywhere
   since, the stride stands in the 3x3 convolution, and not in the 1x1 before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

VGG_PLANS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
}
"""Convolutions before each of the five max-pools."""

VGG_WIDTHS = (1, 2, 4, 8, 8)
"""Channels of each of the five groups, in units of the first layer's."""

BOTTLENECK_PLANS = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Bottleneck blocks at each of four map sizes."""

EXPANSION = 4
"""Channels that leave a bottleneck block, in units of those inside it."""


def mlp(features: int = 64, hidden: Sequence[int] = (64, 32), classes: int = 10) -> nn.Module:
    """Multilayer perceptron: flatten, then Linear and ReLU per hidden width, then Linear.

    Parameters
    ----------
    features : elements of one sample, of any shape.
    hidden : widths of the hidden layers.
    classes : outputs.
    """
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    width = features
    for number, next_width in enumerate(hidden, start=1):
        layers[f"linear{number}"] = nn.Linear(width, next_width)
        layers[f"relu{number}"] = nn.ReLU()
        width = next_width
    layers["classifier"] = nn.Linear(width, classes)
    return nn.Sequential(OrderedDict(layers))


def cnn(
    channels: Sequence[int] = (16, 32),
    classes: int = 10,
    in_channels: int = 1,
    size: int = 8,
    groups: int | Sequence[int] | None = None,
) -> nn.Module:
    """Convolutional network: per entry of `channels` a 3x3 convolution, GroupNorm, ReLU and 2x2 max-pool.

    Parameters
    ----------
    channels : output channels of each convolution.
    classes : outputs of the Linear at the end.
    in_channels, size : channels and height (= width) of a sample; the defaults are those of the digits.
    groups : groups of every norm, or of each; by default half its channels, which is a group size of 2.
    """
    if size >> len(channels) == 0:
        raise ValueError(f"size {size} is halved {len(channels)} times by the pools and must not vanish")
    if groups is None:
        group_counts = [max(1, width // 2) for width in channels]
    else:
        group_counts = [groups] * len(channels) if isinstance(groups, int) else list(groups)
    if len(group_counts) != len(channels):
        raise ValueError(f"groups has {len(group_counts)} entries for {len(channels)} channels")

    layers: dict[str, nn.Module] = {}
    width = in_channels
    for number, (next_width, count) in enumerate(zip(channels, group_counts, strict=True), start=1):
        layers[f"conv{number}"] = nn.Conv2d(width, next_width, 3, padding=1)
        layers[f"norm{number}"] = _norm(count, next_width)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        width = next_width
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(width * (size >> len(channels)) ** 2, classes)
    return _initialized(nn.Sequential(OrderedDict(layers)))


class VGG(nn.Module):
    """Convolutions and pools (`features`), then three Linear layers (`classifier`) [2]_."""

    def __init__(self, features: Sequence[nn.Module], classifier: Sequence[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(*classifier)

    def forward(self, x: Tensor) -> Tensor:
        """Classify a batch of images."""
        classes: Tensor = self.classifier(self.flatten(self.features(x)))
        return classes


def vgg(
    depth: int = 11,
    classes: int = 10,
    in_channels: int = 3,
    size: int = 32,
    width: int = 64,
    dropout: float = 0.0,
    hidden: int | None = None,
) -> nn.Module:
    """VGG without normalization: the source paper counts each module as a stage.

    The defaults are the net for small images [2]_. `size=224, hidden=4096, classes=1000` is the original one for
    ImageNet [4]_. (torchvision's has an average pool to 7 x 7 between the two parts, which at size 224 does nothing.)

    Parameters
    ----------
    depth : 11, 13 or 16 layers with weights.
    classes : outputs.
    in_channels, size : channels and height (= width) of a sample; five pools halve the size.
    width : channels of the first layer, 64 in the paper's net.
    dropout : p of the classifier's two Dropouts; pbsim runs only 0.
    hidden : width of the classifier's two hidden layers; by default that of the last convolution.
    """
    if depth not in VGG_PLANS:
        raise ValueError(f"depth {depth} is not one of {', '.join(map(str, VGG_PLANS))}")
    if size < 32:
        raise ValueError(f"size {size} is halved by five pools; it must be at least 32")
    features: list[nn.Module] = []
    channels = in_channels
    for repeats, factor in zip(VGG_PLANS[depth], VGG_WIDTHS, strict=True):
        for _ in range(repeats):
            features += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU()]
            channels = factor * width
        features.append(nn.MaxPool2d(2))
    hidden = channels if hidden is None else hidden
    classifier = [
        nn.Dropout(dropout),
        nn.Linear(channels * (size // 32) ** 2, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    ]
    return _initialized(VGG(features, classifier))


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each behind norm and ReLU, added to the block's input [3]_.

    Where the block changes width or size, a 1x1 convolution of the block's input (before the norm) stands in
    for it.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = _norm(groups, channels_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = _norm(groups, channels_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if channels_in != channels_out or stride != 1:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the input."""
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(x)
        residual: Tensor = self.conv1(self.relu1(self.norm1(x)))
        residual = self.conv2(self.relu2(self.norm2(residual)))
        return residual + shortcut


class ResNet(nn.Module):
    """Stem, pre-activation blocks, norm and ReLU, global average pool, Linear."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Classify a batch of images."""
        features: Tensor = self.relu(self.norm(self.blocks(self.stem(x))))
        classes: Tensor = self.classifier(self.flatten(self.pool(features)))
        return classes


def resnet_cifar(
    depth: int = 20, classes: int = 10, in_channels: int = 3, width: int = 16, group_size: int = 2
) -> nn.Module:
    """Residual network for small images, depth 6n + 2: n pre-activation blocks [3]_ at each of three widths.

    Parameters
    ----------
    depth : 20, 32, 44, 56, 110 or another 6n + 2.
    classes : outputs.
    in_channels : channels of a sample.
    width : channels of the first third; doubled twice, each time with a stride of 2.
    group_size : channels per group at the first width; wider layers keep the number of groups.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth {depth} is not 6n + 2, such as 20, 32, 44, 56 or 110")
    if group_size < 1 or width % group_size:
        raise ValueError(f"group_size {group_size} does not divide width {width}")
    groups = width // group_size
    blocks = []
    channels = width
    for third, next_channels in enumerate((width, 2 * width, 4 * width)):
        for block in range((depth - 2) // 6):
            stride = 2 if third > 0 and block == 0 else 1
            blocks.append(PreActivationBlock(channels, next_channels, stride, groups))
            channels = next_channels
    stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
    return _initialized(ResNet(stem, blocks, _norm(groups, channels), nn.Linear(channels, classes)))


class BottleneckBlock(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1, each before a norm, added to the block's input; a ReLU after every step [5]_.

    Where the block changes width or size, a 1x1 convolution and a norm of the block's input stand in for it.
    """

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int) -> None:
        super().__init__()
        channels_out = EXPANSION * channels
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm1 = _norm(groups, channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = _norm(groups, channels)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.norm3 = _norm(groups, channels_out)
        self.shortcut: nn.Module | None = None
        if channels_in != channels_out or stride != 1:
            conv = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=_norm(groups, channels_out)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Add the residual to the input.

        The residual comes first: under the rule `residual`, the ReLU behind an addition joins the first convolution
        that reads it, and the next block's shortcut then branches off behind that ReLU.
        """
        residual: Tensor = self.relu1(self.norm1(self.conv1(x)))
        residual = self.relu2(self.norm2(self.conv2(residual)))
        residual = self.norm3(self.conv3(residual))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(x)
        total: Tensor = self.relu(residual + shortcut)
        return total


class BottleneckResNet(nn.Module):
    """Stem, bottleneck blocks, global average pool, Linear."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], classifier: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Classify a batch of images."""
        classes: Tensor = self.classifier(self.flatten(self.pool(self.blocks(self.stem(x)))))
        return classes


def resnet_imagenet(
    depth: int = 50, classes: int = 1000, in_channels: int = 3, width: int = 64, groups: int = 32
) -> nn.Module:
    """Residual network for ImageNet [5]_: bottleneck blocks at four map sizes, GroupNorm in place of BatchNorm.

    A 7x7 convolution and a 3x3 max-pool, both of stride 2, stand before the blocks; the images are of any size.

    Parameters
    ----------
    depth : 50, 101 or 152 layers with weights.
    classes : outputs.
    in_channels : channels of a sample.
    width : channels of the stem, and inside the blocks of the first map size; doubled at each further one.
    groups : groups of every norm.
    """
    if depth not in BOTTLENECK_PLANS:
        raise ValueError(f"depth {depth} is not one of {', '.join(map(str, BOTTLENECK_PLANS))}")
    stem = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False),
            norm=_norm(groups, width),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1),
        )
    )
    blocks = []
    channels = width
    for size, repeats in enumerate(BOTTLENECK_PLANS[depth]):
        for block in range(repeats):
            stride = 2 if size > 0 and block == 0 else 1
            blocks.append(BottleneckBlock(channels, width << size, stride, groups))
            channels = EXPANSION * (width << size)
    return _initialized(BottleneckResNet(stem, blocks, nn.Linear(channels, classes)))


def _norm(groups: int, channels: int) -> nn.GroupNorm:
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels cannot be divided into {groups} groups")
    return nn.GroupNorm(groups, channels)


def _initialized(model: nn.Module) -> nn.Module:
    """He's normal initialization by fan-out for every convolution; all else keeps torch's defaults."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
