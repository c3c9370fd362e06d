"""Pipelined backpropagation in lockstep by plain PyTorch autograd: an independent reference for pbsim's numbers.

Nothing here comes from pbsim. In step k stage s forwards sample k - s, then backpropagates sample
k - 2(S-1) + s, then updates. A backward uses the activations that its own forward saved and the weights that are
current when it runs. Autograd saves weights by reference, so the tensors of a stage's module are only a scratch
place: the true weights live outside (`Stage.weights`) and are copied in, before each forward (perhaps predicted)
and before each backward. In-place copies matter: autograd of a Linear saves a transposed *view* of its weight,
which would go on seeing the old storage if the parameter got a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

# A batch of one has no work for two threads, and on a busy machine they wait for each other at every operator.
torch.set_num_threads(1)


@dataclass
class Stage:
    """One step of the pipeline: a module that turns named values into one named value.

    `names` maps the module's parameters (in order) to those of the whole model.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    output: str
    names: tuple[str, ...] = ()
    parameters: list[nn.Parameter] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    previous: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    version: int = 0

    def adopt(self, model: nn.Module) -> Stage:
        """Take the weights of the whole model as the starting point; v starts at 0, w_previous at w."""
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = list(self.module.parameters())
        self.names = tuple(name_of[id(parameter)] for parameter in self.parameters)
        self.weights = [parameter.detach().clone() for parameter in self.parameters]
        self.previous = [w.clone() for w in self.weights]
        self.velocity = [torch.zeros_like(w) for w in self.weights]
        return self

    def load(self, values: Sequence[Tensor]) -> None:
        """Put values into the tensors that autograd holds on to, unseen by its version counters."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(value)


class Residual(nn.Module):
    """A branch, and its addition to the skip's value."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        total: Tensor = self.branch(x) + skip
        return total


def skip_net_stages(model: nn.Module, partition: str) -> list[Stage]:
    """The stages of `models.SkipNet`, written out by hand for the two partitions that keep the loss apart or not."""
    stem = Stage(model.stem, ("x",), "stem")
    first = Stage(model.first, ("stem",), "first")
    reduce = Stage(nn.Sequential(model.reduce, model.pool, model.flatten), ("sum",), "reduce")
    hidden = Stage(nn.Sequential(model.hidden, model.relu), ("reduce",), "hidden")
    classifier = Stage(model.classifier, ("hidden",), "logits")
    if partition == "layer":
        middle = [Stage(Residual(model.second), ("first", "stem"), "sum")]
        loss = []
    else:
        middle = [
            Stage(model.second, ("first",), "second"),
            Stage(Residual(nn.Identity()), ("second", "stem"), "sum"),
        ]
        loss = [Stage(nn.Identity(), ("logits",), "output")]
    stages = [stem, first, *middle, reduce, hidden, classifier, *loss]
    return [stage.adopt(model) for stage in stages]


@dataclass(frozen=True)
class Recipe:
    """A recipe at batch n (DESIGN 5.6, 5.7): m = m_r^(n/N), lr = lr_r (1-m) n / ((1-m_r) N), times step decays."""

    lr: float
    momentum: float
    weight_decay: float
    at: tuple[float, ...]
    factor: float
    total: int

    @classmethod
    def scaled(cls, training: Mapping, total: int, size: int = 1) -> Recipe:
        """From a workload's `[training]` table with a step decay, to batches of a size."""
        batch, base = training["batch_size"], training["momentum"]
        momentum = base ** (size / batch)
        lr = training["lr"] * (1 - momentum) * size / ((1 - base) * batch)
        decay = training["decay"]
        return cls(lr, momentum, training["weight_decay"], tuple(decay["at"]), decay["factor"], total)

    def lr_at(self, sample: int) -> float:
        """A decay at fraction f acts from sample ceil(f * total) on, the product taken in exact decimals."""
        passed = sum(sample >= math.ceil(Fraction(str(f)) * self.total) for f in self.at)
        return self.lr * self.factor**passed


def sample_order(seed: int, count: int, total: int) -> np.ndarray:
    """The index into the training set of every sample of a run (DESIGN 5.1)."""
    epochs = range(math.ceil(total / count))
    permutations = [np.random.Generator(np.random.PCG64([seed, e])).permutation(count) for e in epochs]
    return np.concatenate(permutations)[:total]


def batches(total: int, epoch: int, size: int) -> list[range]:
    """The samples of every update: as a loader without `drop_last` hands them out, epoch by epoch."""
    starts = (start for first in range(0, total, epoch) for start in range(first, min(first + epoch, total), size))
    return [range(start, min(start + size, (start // epoch + 1) * epoch, total)) for start in starts]


def spike(momentum: float, delay: float) -> tuple[float, float]:
    """The coefficients (a, b) of spike compensation (PAPERS 1.4)."""
    return momentum**delay, (1 - momentum**delay) / (1 - momentum)


def run_lockstep(
    stages: list[Stage],
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    mitigations: Mapping[str, float],
    horizon: str = "measured",
    exempt: Callable[[str], bool] = lambda name: False,
) -> np.ndarray:
    """Train on the samples (x, y) in their order; leaves the weights in the stages and returns the losses.

    `mitigations` maps `sc`, `lwpv`, `lwpw`, `ws` to the multiplier of the delay (anything for `ws`).
    """
    count, last = len(x), len(stages) - 1
    losses = np.full(count, np.nan)
    values: dict[tuple[str, int], Tensor] = {}
    errors: dict[tuple[str, int], Tensor] = {}
    saved: list[dict[int, Saved]] = [{} for _ in stages]
    for step in range(count + 2 * last):
        for s, stage in enumerate(stages):
            sample = step - s
            if 0 <= sample < count:
                delay = delay_of(stage, sample, last - s, horizon)
                used = predicted(stage, delay, recipe.lr_at(sample), mitigations)
                stage.load(used)
                given = [x[sample : sample + 1]] if s == 0 else [values[n, sample] for n in stage.inputs]
                leaves = [value.detach().requires_grad_(s > 0) for value in given]
                result = stage.module(*leaves)
                if s == last:
                    result = functional.cross_entropy(result, y[sample : sample + 1])
                    losses[sample] = result.item()
                values[stage.output, sample] = result.detach()
                saved[s][sample] = Saved(leaves if s > 0 else [], result, used, delay)
        for s, stage in enumerate(stages):
            sample = step - 2 * last + s
            if 0 <= sample < count:
                own = saved[s].pop(sample)
                stage.load(own.used if "ws" in mitigations else stage.weights)
                gradients = backpropagate(stage, own, None if s == last else errors.pop((stage.output, sample)))
                for name, gradient in zip(stage.inputs if s else (), gradients, strict=False):
                    key = (name, sample)
                    errors[key] = errors[key] + gradient if key in errors else gradient
                decays = [0.0 if exempt(name) else recipe.weight_decay for name in stage.names]
                a, b = spike(recipe.momentum, mitigations["sc"] * own.delay) if "sc" in mitigations else (1, 0)
                own_gradients = gradients[len(own.leaves) :]
                update(stage, own_gradients, decays, recipe.lr_at(sample), recipe.momentum, a, b)
    return losses


@dataclass
class Saved:
    """What a forward leaves for its backward."""

    leaves: list[Tensor]
    result: Tensor
    used: list[Tensor]
    delay: int


def delay_of(stage: Stage, sample: int, later_stages: int, horizon: str) -> int:
    """Version at the update minus version now; sample i's update is a stage's update number i (from 0)."""
    return sample - stage.version if horizon == "measured" else 2 * later_stages


def predicted(stage: Stage, delay: int, lr: float, mitigations: Mapping[str, float]) -> list[Tensor]:
    """The weights of a forward (PAPERS 1.5), in copies of their own."""
    if "lwpv" in mitigations:
        reach = lr * mitigations["lwpv"] * delay
        return [w - reach * v for w, v in zip(stage.weights, stage.velocity, strict=True)]
    if "lwpw" in mitigations:
        reach = mitigations["lwpw"] * delay
        return [w + reach * (w - before) for w, before in zip(stage.weights, stage.previous, strict=True)]
    return [w.clone() for w in stage.weights]


def backpropagate(stage: Stage, own: Saved, error: Tensor | None) -> list[Tensor]:
    """Gradients of the inputs (none in the first stage), then of the parameters."""
    wanted = [*own.leaves, *stage.parameters]
    return list(torch.autograd.grad(own.result, wanted, error)) if wanted else []


@torch.no_grad()
def update(stage: Stage, gradients: list[Tensor], decays: list[float], lr: float, m: float, a: float, b: float) -> None:
    """g += decay w;  v <- m v + g;  w <- w - lr (a v + b g)  (DESIGN 5.4)."""
    stage.previous = [w.clone() for w in stage.weights]
    for w, v, raw, decay in zip(stage.weights, stage.velocity, gradients, decays, strict=True):
        g = raw + decay * w
        v.mul_(m).add_(g)
        w.sub_(lr * (a * v + b * g))
    stage.version += 1


def final_weights(stages: Sequence[Stage]) -> dict[str, np.ndarray]:
    """The true weights under the names of the whole model."""
    return {name: w.numpy() for stage in stages for name, w in zip(stage.names, stage.weights, strict=True)}


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest |found - expected| / |expected|, where values below the mean are held against the mean."""
    expected = np.asarray(expected, dtype=np.float64)
    scale = np.maximum(np.abs(expected), np.abs(expected).mean())
    return float(np.max(np.abs(np.asarray(found, dtype=np.float64) - expected) / scale))
