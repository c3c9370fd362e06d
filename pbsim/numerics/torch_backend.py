"""The PyTorch backend: the same semantics through autograd, one graph per stage and sample.

Autograd saves the tensors that a backward needs. Those that are a stage's weights must not be frozen there: a
backward uses the weights current at its start (or, under weight stashing, its forward's). Hooks on saved tensors
recognise weights by their storage, keep only which one it was, and hand out the version that is due; activations are
kept as they are. Versions are so chosen here, in one place, and never by in-place writes behind autograd's back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pbsim.network.network import Network, Stage
from pbsim.network.operators import operator_function
from pbsim.numerics.backend import SampleSource
from pbsim.numerics.denormals import flush_denormals
from pbsim.numerics.order import BACKWARD, FORWARD, Order
from pbsim.optim import UpdateRule

EVALUATION_BATCH = 256
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": torch.nn.functional.cross_entropy,
    "mse": torch.nn.functional.mse_loss,
}


@dataclass(frozen=True)
class WeightReference:
    """In place of a saved weight: which parameter, and how it was viewed."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class StagePass:
    """What a sample's forward left at a stage: leaves and results of its autograd graph, gradients so far."""

    inputs: dict[int, Tensor]
    parameters: dict[str, Tensor]
    results: dict[int, Tensor]
    versions: Mapping[str, Tensor]
    gradients: dict[int, Tensor]


class TorchBackend:
    """Trains a network by PyTorch, stage by stage; parameters as for `NumbaBackend`."""

    def __init__(
        self,
        network: Network,
        parameters: Mapping[str, NDArray[Any]],
        rule: UpdateRule,
        decay: Mapping[str, float],
        precision: str,
    ) -> None:
        self.network, self.rule, self.decay = network, rule, decay
        self.dtype = getattr(torch, precision)
        self.weights = {name: torch.tensor(parameters[name], dtype=self.dtype) for name in network.parameters}
        self.velocity = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.previous = {name: w.clone() for name, w in self.weights.items()} if rule.keeps_previous else {}
        self.passes: dict[tuple[int, int], StagePass] = {}
        self.gradients: dict[str, Tensor] = {}

    def run(self, order: Order, samples: SampleSource) -> NDArray[np.float64]:
        """Run operations; returns, per operation, the training loss of forwards that end in the loss (else 0)."""
        losses = np.zeros(len(order))
        with flush_denormals():
            for i in range(len(order)):
                stage, sample = self.network.stages[order.stage[i]], int(order.sample[i])
                if order.kind[i] == FORWARD:
                    weights = self._forward_weights(stage, order, i)
                    losses[i] = self._forward(stage, sample, weights, samples)
                elif order.kind[i] == BACKWARD:
                    self._backward(stage, sample, float(order.weight[i]))
                else:
                    self._update(stage, order, i)
        return losses

    def evaluate(self, inputs: NDArray[Any], targets: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        """The mean loss over samples and the model's outputs (n, ...), on the weights as they are."""
        total, outputs = 0.0, []
        with torch.no_grad(), flush_denormals():
            for start in range(0, len(inputs), EVALUATION_BATCH):
                x = torch.tensor(inputs[start : start + EVALUATION_BATCH], dtype=self.dtype)
                wanted = self._targets(targets[start : start + EVALUATION_BATCH])
                values = {self.network.input_value: x}
                for stage in self.network.stages:
                    loss = self._operators(stage, values, self.weights, wanted)
                assert loss is not None  # the last stage holds it
                total += float(loss) * len(x)
                outputs.append(values[self.network.output_value].reshape(len(x), -1).numpy())
        return total / len(inputs), np.concatenate(outputs)

    def parameters(self) -> dict[str, NDArray[Any]]:
        """The weights as they are, by torch name (copies)."""
        return {name: weight.numpy().copy() for name, weight in self.weights.items()}

    def _targets(self, targets: NDArray[Any]) -> Tensor:
        return torch.tensor(targets, dtype=torch.int64 if targets.ndim == 1 else self.dtype)

    def _forward_weights(self, stage: Stage, order: Order, i: int) -> dict[str, Tensor]:
        """The weights that a forward reads: predicted ones where the coefficients say so."""
        by_velocity = float(order.coefficients.velocity_prediction[i])
        by_difference = float(order.coefficients.difference_prediction[i])
        weights = {name: self.weights[name] for name in stage.parameters}
        if by_difference:
            return {name: w + by_difference * (w - self.previous[name]) for name, w in weights.items()}
        if by_velocity:
            return {name: w - by_velocity * self.velocity[name] for name, w in weights.items()}
        return weights

    def _forward(self, stage: Stage, sample: int, weights: dict[str, Tensor], samples: SampleSource) -> float:
        """One sample's forward at a stage, with a graph of its own."""
        inputs = {value: self._input(value, sample, samples) for value in stage.inputs}
        parameters = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        values = dict(inputs)
        target = self._targets(samples.targets(sample, sample + 1)) if self._holds_loss(stage) else None
        kept = StagePass(inputs, parameters, {}, dict(weights), {})
        self.passes[stage.index, sample] = kept
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*self._hooks(kept)):
            loss = self._operators(stage, values, parameters, target)
        kept.results = {value: values[value] for value in stage.outputs}
        if loss is None:
            return 0.0
        kept.results[LOSS] = loss
        return float(loss.detach().double())

    def _input(self, value: int, sample: int, samples: SampleSource) -> Tensor:
        if value == self.network.input_value and (0, sample) not in self.passes:
            return torch.tensor(samples.inputs(sample, sample + 1), dtype=self.dtype)
        result = self.passes[self._maker(value), sample].results[value]
        return result.detach().requires_grad_(result.requires_grad)

    def _maker(self, value: int) -> int:
        return next(stage.index for stage in self.network.stages if value in stage.outputs)

    def _holds_loss(self, stage: Stage) -> bool:
        return stage.operators[-1].kind in LOSSES

    def _operators(
        self, stage: Stage, values: dict[int, Tensor], weights: Mapping[str, Tensor], target: Tensor | None
    ) -> Tensor | None:
        """Run a stage's operators on `values`, in place; returns the loss if the stage holds it."""
        loss = None
        for operator in stage.operators:
            inputs = [values[value] for value in operator.inputs]
            if operator.kind in LOSSES:
                assert target is not None
                loss = LOSSES[operator.kind](inputs[0].flatten(1), target)  # targets are flat: (n, K), or labels
            else:
                function = operator_function(operator)
                values[operator.output] = function(inputs, [weights[name] for name in operator.parameters])
        return loss

    def _hooks(self, kept: StagePass) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Keep references to weights instead of weights; hand out the version that is due at the backward."""
        storages = {w.untyped_storage().data_ptr(): name for name, w in kept.parameters.items()}

        def pack(tensor: Tensor) -> Tensor | WeightReference:
            name = storages.get(tensor.untyped_storage().data_ptr())
            if name is None:
                return tensor
            return WeightReference(name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: Tensor | WeightReference) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            weight = kept.versions[saved.name] if self.rule.stash_weights else self.weights[saved.name]
            return weight.as_strided(saved.size, saved.stride, saved.offset)

        return pack, unpack

    def _backward(self, stage: Stage, sample: int, weight: float) -> None:
        """Both gradients of one sample at a stage: to the stages before, and into the mean of its batch's update."""
        kept = self.passes.pop((stage.index, sample))
        results = [value for value, result in kept.results.items() if result.requires_grad]
        wanted = [tensor for tensor in (*kept.inputs.values(), *kept.parameters.values()) if tensor.requires_grad]
        if not wanted or not results:
            return
        incoming = [None if value == LOSS else kept.gradients[value] for value in results]
        found = torch.autograd.grad([kept.results[value] for value in results], wanted, incoming)
        gradients = iter(found)
        for value, tensor in kept.inputs.items():
            if tensor.requires_grad:
                before = self.passes[self._maker(value), sample].gradients
                gradient = next(gradients)
                before[value] = before[value] + gradient if value in before else gradient
        for name, gradient in zip(kept.parameters, gradients, strict=True):
            part = gradient if weight == 1 else weight * gradient
            self.gradients[name] = self.gradients[name] + part if name in self.gradients else part

    def _update(self, stage: Stage, order: Order, i: int) -> None:
        """v <- m v + g; w <- w - lr (a v + b g), with g including weight decay (DESIGN.md 5.4)."""
        m, lr = self.rule.recipe.momentum, float(order.lr[i])
        a, b = float(order.coefficients.a[i]), float(order.coefficients.b[i])
        for name in stage.parameters:
            weight = self.weights[name]
            gradient = self.gradients.pop(name) + self.decay[name] * weight
            self.velocity[name] = m * self.velocity[name] + gradient
            if self.rule.keeps_previous:
                self.previous[name] = weight
            self.weights[name] = weight - lr * (a * self.velocity[name] + b * gradient)


LOSS = -1
"""In place of a value: the loss."""
