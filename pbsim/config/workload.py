"""The workload file: the network, its data, and the base recipe it is trained with."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from pbsim.config.base import Count, Finite, Fraction, Name, NonNegative, Positive, Table


def _is_factory(text: str) -> str:
    if not re.fullmatch(r".+:[A-Za-z_]\w*", text):
        raise ValueError("Input should be 'module:function' or 'path/to/file.py:function'")
    return text


class Model(Table):
    """The network."""

    factory: Annotated[str, AfterValidator(_is_factory)]
    """`module:function` or `path/to/file.py:function`, which returns a `torch.nn.Module`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    partition: Literal["layer", "module", "residual"] | list[str] = "layer"
    """How the network is cut into stages: by a rule, or a list of module names as in `named_modules()`, in execution
    order, each a stage with all it contains, together holding every operator."""


class Normalize(Table):
    """Per-channel normalization: `(x - mean) / std`."""

    mean: list[Finite]
    """One entry per channel (axis 1)."""
    std: list[Positive]
    """Likewise."""

    @model_validator(mode="after")
    def _same_length(self) -> Normalize:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError("mean and std should have one entry per channel each")
        return self


def _is_augmentation(text: str) -> str:
    if text != "flip" and not re.fullmatch(r"crop:[1-9]\d{0,2}", text):
        raise ValueError("Input should be 'flip' or 'crop:PADDING' with a padding of 1 to 999")
    return text


class Data(Table):
    """The data set."""

    kind: Literal["digits", "mnist", "cifar10", "image_folder", "npz", "random"]
    """What the data are, see below."""
    path: str | None = None
    """A folder or file, relative to the workload file; without it, `$PBSIM_DATA` is searched. Not for `digits` and
    `random`."""
    shape: list[Count] | None = None
    """Shape of one sample: needed for `random`, and with `train_samples` all that timing alone needs of data."""
    classes: Count | None = None
    """How many classes labels have; by default the largest label + 1 (`random`: 10)."""
    train_samples: Count | None = None
    """How many training samples to use: the first so many (of `random`: to make up, by default 1000)."""
    test_samples: Count | None = None
    """How many test samples likewise (of `random` by default 200)."""
    normalize: Normalize | None = None
    """Per channel (x - mean) / std, after pixels have been scaled to [0, 1] (digits divide by 16)."""
    augment: list[Annotated[str, AfterValidator(_is_augmentation)]] = []
    """`crop:PADDING` and `flip`, once each, for training samples of shape (C, H, W)."""

    @field_validator("augment")
    @classmethod
    def _once_each(cls, augment: list[str]) -> list[str]:
        if len({item.partition(":")[0] for item in augment}) < len(augment):
            raise ValueError("Input should name each augmentation once")
        return augment


class Loss(Table):
    """The loss, averaged over what travels together."""

    kind: Literal["cross_entropy", "mse"] = "cross_entropy"
    """`cross_entropy` takes integer labels; `mse` float targets, one per output, or labels, which become one-hot
    vectors. Both are means: over samples, and `mse` over outputs too."""


class ConstantDecay(Table):
    """The learning rate stays."""

    kind: Literal["constant"] = "constant"
    """This decay, the default."""


class StepDecay(Table):
    """Multiply by `factor` from sample ceil(f * total) on, for every f in `at`; steps multiply."""

    kind: Literal["step"]
    """This decay."""
    at: list[Fraction]
    """Fractions of the run."""
    factor: Positive
    """At each of them."""


class ExponentialDecay(Table):
    """Multiply by factor^(sample / samples of an epoch): a smooth decay by `factor` per epoch."""

    kind: Literal["exponential"]
    """This decay."""
    factor: Positive
    """Per epoch."""


class PolynomialDecay(Table):
    """Multiply by (1 - sample / total)^power."""

    kind: Literal["polynomial"]
    """This decay."""
    power: Positive = 1.0
    """1 is linear."""


class CosineDecay(Table):
    """Multiply by (1 + cos(pi * sample / total)) / 2."""

    kind: Literal["cosine"]
    """This decay."""


Decay = Annotated[
    ConstantDecay | StepDecay | ExponentialDecay | PolynomialDecay | CosineDecay, Field(discriminator="kind")
]


class Training(Table):
    """The base recipe, at its own batch size."""

    batch_size: Count
    """The batch N_r that lr and momentum were tuned for; not the batch of the run, which is the method's."""
    lr: NonNegative
    """Peak learning rate at batch N_r, averaged gradients, and outside of the momentum buffer, as in torch."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Per update at batch N_r."""
    weight_decay: NonNegative = 0.0
    """Added to the gradient times the weight, as in `torch.optim.SGD`; never scaled."""
    epochs: Count = 1
    """Length of a run that is given neither `samples` nor `epochs`."""
    decay: Decay = ConstantDecay()
    """Of the learning rate over the run: a table whose `kind` decides its keys."""
    warmup_epochs: NonNegative = 0.0
    """Epochs over which the learning rate rises from 0, update by update."""
    scale: bool = True
    """Whether lr and momentum are scaled to the method's batch, see below, or used as they stand."""
    optimizer: Literal["sgd"] = "sgd"
    """SGD with momentum; there is no other yet."""
    nesterov: bool = False
    """Nesterov's momentum; excludes `sc`, which sets the same coefficients."""
    exempt: list[Name] = []
    """Parameters without weight decay, as shell patterns of torch names (`*.bias`)."""
    evaluate_every_epochs: Positive = 1.0
    """How often the test set is evaluated within the run, in epochs; after the last sample it always is."""


class Workload(Table):
    """A workload file."""

    name: Name
    """Of the workload, in titles and directory names."""
    model: Model
    """The network, and how it is cut into stages."""
    data: Data
    """What it is trained and tested on."""
    loss: Loss = Loss()
    """What is minimized."""
    training: Training
    """The base recipe."""
