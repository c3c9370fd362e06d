"""The base recipe at another batch size, and the learning rate of every sample.

A recipe is tuned at its own batch size. Scaled to batch N it keeps the decay of momentum per sample, and each
sample's total contribution to the weights (PAPERS.md 1.2): `m = m_r^(N/N_r)`, `lr = lr_r (1-m) N / ((1-m_r) N_r)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pbsim.config.workload import (
    ConstantDecay,
    CosineDecay,
    ExponentialDecay,
    PolynomialDecay,
    StepDecay,
    Training,
)
from pbsim.errors import user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Decay

Factor = Callable[[NDArray[np.int64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters as they are used at batch `batch`.

    Attributes
    ----------
    lr : peak learning rate, before warm-up and decay.
    momentum, weight_decay : as in `torch.optim.SGD`.
    nesterov : whether the update uses Nesterov's momentum.
    """

    batch: int
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool


def scale_recipe(training: Training, batch: int) -> Recipe:
    """Scale a base recipe to another batch size (DESIGN.md 5.7), unless it says `scale = false`.

    Raises
    ------
    UserError : scaled, its momentum is nearer to 1 than any float below, or its learning rate is not finite.
    """
    lr, momentum = training.lr, training.momentum
    if training.scale:
        ratio = batch / training.batch_size
        momentum = training.momentum**ratio
        lr = training.lr * (1 - momentum) * batch / ((1 - training.momentum) * training.batch_size)
    if momentum == 1:
        problem = f"scaled from batch {training.batch_size} to {batch} it rounds to 1: nothing would ever decay"
        raise user_error("workload", "training.momentum", training.momentum, problem)
    if not math.isfinite(lr):
        problem = f"scaled from batch {training.batch_size} to {batch} it is not finite"
        raise user_error("workload", "training.lr", training.lr, problem)
    return Recipe(batch, lr, momentum, training.weight_decay, training.nesterov)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each sample (DESIGN.md 5.6): peak times warm-up times decay.

    Decay goes by samples, warm-up by the updates that samples belong to. The update of a batch has the learning rate of
    the batch's first sample, by which a trace names it.

    Attributes
    ----------
    recipe : gives the peak and the batch size N.
    total : samples of the whole run.
    epoch_samples : samples of one epoch; its last batch may be smaller than N.
    warmup_epochs : warm-up over n = warmup_epochs * epoch_samples / N updates; update i has min(1, (i+1)/n).
    decay : the base recipe's decay.
    """

    recipe: Recipe
    total: int
    epoch_samples: int
    warmup_epochs: float
    decay: Decay

    def __call__(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Learning rates at global sample indices, float64."""
        factor = decay_factor(self.decay, self.total, self.epoch_samples)(samples)
        warmup_updates = self.warmup_epochs * self.epoch_samples / self.recipe.batch
        if warmup_updates > 0:
            factor = factor * np.minimum(1.0, (self._update(samples) + 1) / warmup_updates)
        return self.recipe.lr * factor

    def _update(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which update (from 0) a sample belongs to: batches do not reach over the end of an epoch."""
        per_epoch = -(-self.epoch_samples // self.recipe.batch)
        epoch, within = np.divmod(samples, self.epoch_samples)
        return np.asarray(epoch * per_epoch + within // self.recipe.batch)


def decay_factor(decay: Decay, total: int, epoch_samples: int) -> Factor:
    """The factor of a decay at global sample indices."""
    match decay:
        case ConstantDecay():
            return lambda samples: np.ones(len(samples))
        case StepDecay(at=at, factor=factor):
            starts = np.array(sorted(step_start(f, total) for f in at), dtype=np.int64)
            powers = factor ** np.arange(len(starts) + 1, dtype=np.float64)
            return lambda samples: powers[np.searchsorted(starts, samples, side="right")]
        case ExponentialDecay(factor=factor):
            return lambda samples: factor ** (samples / epoch_samples)
        case PolynomialDecay(power=power):
            return lambda samples: (1 - samples / total) ** power
        case CosineDecay():
            return lambda samples: (1 + np.cos(np.pi * samples / total)) / 2


def step_start(fraction: float, total: int) -> int:
    """The first sample of a step at this fraction of the run: ceil(fraction * total) in exact decimals."""
    return math.ceil(Fraction(repr(fraction)) * total)
