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
    """How the network is cut into stages."""


class Normalize(Table):
    """Per-channel normalization: `(x - mean) / std`."""

    mean: list[Finite]
    std: list[Positive]

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
    path: str | None = None
    """Relative to the workload file; without it, `$PBSIM_DATA` is searched."""
    shape: list[Count] | None = None
    """Shape of one sample, for `random` and for timing alone."""
    classes: Count | None = None
    train_samples: Count | None = None
    """How many training samples to use (or to make up, for `random`)."""
    test_samples: Count | None = None
    normalize: Normalize | None = None
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


class ConstantDecay(Table):
    """The learning rate stays."""

    kind: Literal["constant"] = "constant"


class StepDecay(Table):
    """Multiply by `factor` from sample ceil(f * total) on, for every f in `at`; steps multiply."""

    kind: Literal["step"]
    at: list[Fraction]
    factor: Positive


class ExponentialDecay(Table):
    """Multiply by factor^(sample / samples of an epoch): a smooth decay by `factor` per epoch."""

    kind: Literal["exponential"]
    factor: Positive


class PolynomialDecay(Table):
    """Multiply by (1 - sample / total)^power."""

    kind: Literal["polynomial"]
    power: Positive = 1.0


class CosineDecay(Table):
    """Multiply by (1 + cos(pi * sample / total)) / 2."""

    kind: Literal["cosine"]


Decay = Annotated[
    ConstantDecay | StepDecay | ExponentialDecay | PolynomialDecay | CosineDecay, Field(discriminator="kind")
]


class Training(Table):
    """The base recipe, at its own batch size."""

    batch_size: Count
    lr: NonNegative
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    epochs: Count = 1
    decay: Decay = ConstantDecay()
    warmup_epochs: NonNegative = 0.0
    scale: bool = True
    """Whether lr and momentum are scaled to the method's batch (DESIGN.md 5.7), or used as they stand."""
    optimizer: Literal["sgd"] = "sgd"
    nesterov: bool = False
    exempt: list[Name] = []
    """Parameters without weight decay, as shell patterns of torch names (`*.bias`)."""
    evaluate_every_epochs: Positive = 1.0
    """How often the test set is evaluated within the run; after the last sample it always is."""


class Workload(Table):
    """A workload file."""

    name: Name
    model: Model
    data: Data
    loss: Loss = Loss()
    training: Training
