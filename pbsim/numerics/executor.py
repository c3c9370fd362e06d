# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return"
"""The numba executor: runs the operations of an order on the weights, forwards and backwards alike.

All state is flat arrays (see `pbsim.numerics.program` for what lies where); one compiled loop goes through the order
and through the operators of each stage. The loop knows no method: an order's coefficients say all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from pbsim.compilation import compiled
from pbsim.network.network import Network
from pbsim.numerics import kernels
from pbsim.numerics.backend import SampleSource, split_targets
from pbsim.numerics.denormals import flush_denormals
from pbsim.numerics.order import BACKWARD, FORWARD, UPDATE, Order
from pbsim.numerics.program import (
    BIAS,
    BIAS_SIZE,
    CODE,
    DIMENSIONS,
    GRADIENT,
    GRADIENT_ADDS,
    GRADIENT_STAGE,
    IN_OFFSET,
    IN_SIZE,
    IN_STAGE,
    NOWHERE,
    OUT_GRADIENT,
    OUT_GRADIENT_IN_FRAME,
    OUT_OFFSET,
    OUT_SIZE,
    SAVED,
    WEIGHT,
    WEIGHT_SIZE,
    Code,
    compile_network,
)
from pbsim.numerics.updates import momentum_update, predict_difference, predict_velocity
from pbsim.optim import UpdateRule

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

CONV2D, LINEAR, GROUP_NORM, RELU = int(Code.CONV2D), int(Code.LINEAR), int(Code.GROUP_NORM), int(Code.RELU)
MAX_POOL, AVG_POOL, ADD, COPY = int(Code.MAX_POOL), int(Code.AVG_POOL), int(Code.ADD), int(Code.COPY)
CROSS_ENTROPY, MSE = int(Code.CROSS_ENTROPY), int(Code.MSE)

EVALUATION_ELEMENTS = 8_000_000
"""Elements that all frames of an evaluation's batch may take together."""


# Columns of a layout, one row per stage: where its ring of frames begins, elements from one frame to the next, frames
# in the ring, and where in a frame the weights of its forward are kept (weight stashing).
BASE, STRIDE, CAPACITY, VERSION = 0, 1, 2, 3


@compiled
def _frame(layout: Ints, stage: int, sample: int) -> int:
    """Where the frame of a sample at a stage begins."""
    return layout[stage, BASE] + (sample % layout[stage, CAPACITY]) * layout[stage, STRIDE]


@compiled
def _forward(op, stage, sample, n, layout, arena, weights, labels, targets, columns):
    """One operator's forward on n samples; returns the loss (0 for operators that are none).

    `weights` are the stage's; `labels` (n,) and `targets` (n, K) are what a loss compares with.
    """
    own = _frame(layout, stage, sample)
    x_start = _frame(layout, op[IN_STAGE], sample) + op[IN_OFFSET] * n
    x = arena[x_start : x_start + op[IN_SIZE] * n]
    y = arena[own + op[OUT_OFFSET] * n : own + (op[OUT_OFFSET] + op[OUT_SIZE]) * n]
    saved = own + op[SAVED] * n
    w = weights[op[WEIGHT] : op[WEIGHT] + op[WEIGHT_SIZE]]
    b = weights[op[BIAS] : op[BIAS] + op[BIAS_SIZE]]
    d = op[DIMENSIONS:]
    code = op[CODE]
    if code == CONV2D:
        kernels.conv2d_forward(
            x.reshape(n, d[0], d[1], d[2]), w.reshape(d[3], d[0] // d[14], d[6], d[7]), b,
            y.reshape(n, d[3], d[4], d[5]), d[8], d[9], d[10], d[11], d[12], d[13], d[14], columns,
        )  # fmt: skip
    elif code == LINEAR:
        kernels.linear_forward(x.reshape(n * d[0], d[1]), w.reshape(d[2], d[1]), b, y.reshape(n * d[0], d[2]))
    elif code == GROUP_NORM:
        size = op[OUT_SIZE] * n
        kernels.group_norm_forward(
            x.reshape(n, d[0], d[1]), w, b, d[2], d[3:4].view(np.float64)[0],
            arena[saved : saved + size].reshape(n, d[0], d[1]),
            arena[saved + size : saved + size + n * d[2]].reshape(n, d[2]),
            y.reshape(n, d[0], d[1]),
        )  # fmt: skip
    elif code == RELU:
        kernels.relu_forward(x, y)
    elif code == MAX_POOL:
        kernels.max_pool2d_forward(
            x.reshape(n, d[0], d[1], d[2]), y.reshape(n, d[3], d[4], d[5]),
            arena[saved : saved + op[OUT_SIZE] * n].reshape(n, d[3], d[4], d[5]),
            d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13],
        )  # fmt: skip
    elif code == AVG_POOL:
        kernels.avg_pool2d_forward(
            x.reshape(n, d[0], d[1], d[2]), y.reshape(n, d[3], d[4], d[5]),
            d[6], d[7], d[8], d[9], d[10], d[11], d[12],
        )  # fmt: skip
    elif code == ADD:
        other = _frame(layout, op[IN_STAGE + 3], sample) + op[IN_OFFSET + 3] * n
        kernels.add_forward(x, arena[other : other + op[IN_SIZE + 3] * n], y)
    elif code == COPY:
        y[:] = x
    elif code == CROSS_ENTROPY:
        probabilities = arena[saved : saved + op[IN_SIZE] * n].reshape(n, op[IN_SIZE])
        return kernels.cross_entropy_forward(x.reshape(n, op[IN_SIZE]), labels, probabilities)
    elif code == MSE:
        return kernels.mse_forward(x.reshape(n, op[IN_SIZE]), targets)
    return 0.0


@compiled
def _input_gradient(op, k, stage, sample, n, layout, arena, weights, labels, targets, gy, gx, columns):
    """The gradient of an operator's k-th input, written to gx; `gy` is that of its output."""
    own = _frame(layout, stage, sample)
    x_start = _frame(layout, op[IN_STAGE], sample) + op[IN_OFFSET] * n
    y_start, saved = own + op[OUT_OFFSET] * n, own + op[SAVED] * n
    w = weights[op[WEIGHT] : op[WEIGHT] + op[WEIGHT_SIZE]]
    d = op[DIMENSIONS:]
    code = op[CODE]
    if code == CONV2D:
        kernels.conv2d_input_gradient(
            gy.reshape(n, d[3], d[4], d[5]), w.reshape(d[3], d[0] // d[14], d[6], d[7]),
            gx.reshape(n, d[0], d[1], d[2]), d[8], d[9], d[10], d[11], d[12], d[13], d[14], columns,
        )  # fmt: skip
    elif code == LINEAR:
        kernels.linear_input_gradient(gy.reshape(n * d[0], d[2]), w.reshape(d[2], d[1]), gx.reshape(n * d[0], d[1]))
    elif code == GROUP_NORM:
        size = op[OUT_SIZE] * n
        kernels.group_norm_input_gradient(
            gy.reshape(n, d[0], d[1]), arena[saved : saved + size].reshape(n, d[0], d[1]),
            arena[saved + size : saved + size + n * d[2]].reshape(n, d[2]), w, d[2], gx.reshape(n, d[0], d[1]),
        )  # fmt: skip
    elif code == RELU:
        kernels.relu_input_gradient(gy, arena[y_start : y_start + op[OUT_SIZE] * n], gx)
    elif code == MAX_POOL:
        kernels.max_pool2d_input_gradient(
            gy.reshape(n, d[3], d[4], d[5]), arena[saved : saved + op[OUT_SIZE] * n].reshape(n, d[3], d[4], d[5]),
            gx.reshape(n, d[0], d[1], d[2]), d[6], d[7], d[8], d[9], d[10], d[11], d[12], d[13],
        )  # fmt: skip
    elif code == AVG_POOL:
        kernels.avg_pool2d_input_gradient(
            gy.reshape(n, d[3], d[4], d[5]), gx.reshape(n, d[0], d[1], d[2]),
            d[6], d[7], d[8], d[9], d[10], d[11], d[12],
        )  # fmt: skip
    elif code in (ADD, COPY):
        gx[:] = gy
    elif code == CROSS_ENTROPY:
        probabilities = arena[saved : saved + op[IN_SIZE] * n].reshape(n, op[IN_SIZE])
        kernels.cross_entropy_gradient(probabilities, labels, gx.reshape(n, op[IN_SIZE]))
    elif code == MSE:
        x = arena[x_start : x_start + op[IN_SIZE] * n]
        kernels.mse_gradient(x.reshape(n, op[IN_SIZE]), targets, gx.reshape(n, op[IN_SIZE]))


@compiled
def _weight_gradient(op, stage, sample, n, layout, arena, gradients, gy, columns):
    """The gradients of an operator's parameters, written to the stage's `gradients`."""
    own = _frame(layout, stage, sample)
    x_start = _frame(layout, op[IN_STAGE], sample) + op[IN_OFFSET] * n
    x = arena[x_start : x_start + op[IN_SIZE] * n]
    gw = gradients[op[WEIGHT] : op[WEIGHT] + op[WEIGHT_SIZE]]
    gb = gradients[op[BIAS] : op[BIAS] + op[BIAS_SIZE]]
    d = op[DIMENSIONS:]
    code = op[CODE]
    if code == CONV2D:
        kernels.conv2d_weight_gradient(
            x.reshape(n, d[0], d[1], d[2]), gy.reshape(n, d[3], d[4], d[5]),
            gw.reshape(d[3], d[0] // d[14], d[6], d[7]), gb,
            d[8], d[9], d[10], d[11], d[12], d[13], d[14], columns,
        )  # fmt: skip
    elif code == LINEAR:
        kernels.linear_weight_gradient(
            x.reshape(n * d[0], d[1]), gy.reshape(n * d[0], d[2]), gw.reshape(d[2], d[1]), gb
        )
    elif code == GROUP_NORM:
        normalised = own + op[SAVED] * n
        kernels.group_norm_weight_gradient(
            gy.reshape(n, d[0], d[1]),
            arena[normalised : normalised + op[OUT_SIZE] * n].reshape(n, d[0], d[1]), gw, gb,
        )  # fmt: skip


@compiled
def _backward(op, stage, sample, n, layout, arena, weights, gradients, labels, targets, scratch, temporary, columns):
    """One operator's backward: its input gradients to where they are summed, its weight gradients in place."""
    if op[OUT_GRADIENT_IN_FRAME]:
        start = _frame(layout, stage, sample) + op[OUT_GRADIENT] * n
        gy = arena[start : start + op[OUT_SIZE] * n]
    else:
        gy = scratch[op[OUT_GRADIENT] * n : (op[OUT_GRADIENT] + op[OUT_SIZE]) * n]
    for k in range(2):
        at, size = op[GRADIENT + 3 * k], op[IN_SIZE + 3 * k] * n
        if at == NOWHERE or size == 0:
            continue
        if op[GRADIENT_STAGE + 3 * k] == NOWHERE:
            gx = scratch[at * n : at * n + size]
        else:
            start = _frame(layout, op[GRADIENT_STAGE + 3 * k], sample) + at * n
            gx = arena[start : start + size]
        target = temporary[:size] if op[GRADIENT_ADDS + 3 * k] else gx
        _input_gradient(op, k, stage, sample, n, layout, arena, weights, labels, targets, gy, target, columns)
        if op[GRADIENT_ADDS + 3 * k]:
            for i in range(size):
                gx[i] += target[i]
    if op[WEIGHT_SIZE]:
        _weight_gradient(op, stage, sample, n, layout, arena, gradients, gy, columns)


@compiled
def _run(
    kind, stage, sample, velocity_prediction, difference_prediction, a, b, lr, weight, momentum,
    inputs, first_input, labels, targets, first_label,
    operators, stage_operators, stage_weights, zeroed, scratch_zeroed, n, layout, arena,
    weights, velocity, previous, gradients, mean, predicted, decay, stash_weights, scratch, temporary, columns, losses,
):  # fmt: skip
    """Run operations in order; `losses` receives, per operation, the loss of forwards that end in it.

    Updates apply `gradients`, what the last backward has left; or, unless it is empty, `mean`, to which each backward
    adds its gradient times its weight, and which every update leaves at zero.
    """
    for i in range(len(kind)):
        s, sample_i = stage[i], sample[i]
        w0, w1 = stage_weights[s], stage_weights[s + 1]
        first, last = stage_operators[s], stage_operators[s + 1]
        own = _frame(layout, s, sample_i)
        kept = own + layout[s, VERSION]
        label = max(0, min(sample_i - first_label, len(labels) - 1))
        if kind[i] == FORWARD:
            if s == 0:
                arena[own : own + inputs.shape[1]] = inputs[sample_i - first_input]
            source = weights[w0:w1]
            if difference_prediction[i] != 0.0:
                source = predicted[: w1 - w0]
                predict_difference(weights[w0:w1], previous[w0:w1], difference_prediction[i], source)
            elif velocity_prediction[i] != 0.0:
                source = predicted[: w1 - w0]
                predict_velocity(weights[w0:w1], velocity[w0:w1], velocity_prediction[i], source)
            if stash_weights:
                arena[kept : kept + w1 - w0] = source
            arena[own + zeroed[s, 0] * n : own + (zeroed[s, 0] + zeroed[s, 1]) * n] = 0.0
            for row in range(first, last):
                losses[i] += _forward(
                    operators[row], s, sample_i, n, layout, arena, source,
                    labels[label : label + 1], targets[label : label + 1], columns,
                )  # fmt: skip
        elif kind[i] == BACKWARD:
            source = arena[kept : kept + w1 - w0] if stash_weights else weights[w0:w1]
            scratch[: scratch_zeroed * n] = 0.0
            for row in range(last - 1, first - 1, -1):
                _backward(
                    operators[row], s, sample_i, n, layout, arena, source, gradients[w0:w1],
                    labels[label : label + 1], targets[label : label + 1], scratch, temporary, columns,
                )  # fmt: skip
            if len(mean):
                for p in range(w0, w1):
                    mean[p] += weight[i] * np.float64(gradients[p])
        elif w1 > w0:
            gradient = mean if len(mean) else gradients
            momentum_update(
                weights[w0:w1], velocity[w0:w1], gradient[w0:w1],
                previous[w0:w1] if len(previous) else previous, decay[w0:w1] if len(decay) else decay,
                momentum, lr[i], a[i], b[i],
            )  # fmt: skip
            if len(mean):
                mean[w0:w1] = 0.0


@compiled
def _evaluate(n, inputs, labels, targets, operators, stage_operators, stage_weights, layout, arena, weights, columns):
    """Forward n samples through all stages on the weights as they are; returns the mean loss."""
    start = _frame(layout, 0, 0)
    arena[start : start + inputs.size] = inputs
    loss = 0.0
    for s in range(len(stage_operators) - 1):
        source = weights[stage_weights[s] : stage_weights[s + 1]]
        for row in range(stage_operators[s], stage_operators[s + 1]):
            loss += _forward(operators[row], s, 0, n, layout, arena, source, labels, targets, columns)
    return loss


@compiled
def _spans(kind, stage, sample, left, spans):
    """Per stage, the most frames in use; `left` counts its backwards so far. False if one is out of order."""
    for i in range(len(kind)):
        s = stage[i]
        if kind[i] == FORWARD:
            spans[s] = max(spans[s], sample[i] - left[s] + 1)
        elif kind[i] == BACKWARD:
            if sample[i] != left[s]:
                return False
            left[s] += 1
    return True


class NumbaBackend:
    """Trains a network on one thread, by compiled kernels.

    Parameters
    ----------
    network : what is trained.
    parameters : initial values by torch name.
    rule : gives momentum, whether weights are stashed or the previous ones kept, and whether updates are of batches.
    decay : weight decay per parameter by torch name.
    precision : `float32` or `float64`.
    """

    def __init__(
        self,
        network: Network,
        parameters: Mapping[str, NDArray[Any]],
        rule: UpdateRule,
        decay: Mapping[str, float],
        precision: str,
    ) -> None:
        self.program = compile_network(network)
        self.rule = rule
        self.stages = len(network.stages)
        self.dtype = np.dtype(precision)
        size = self.program.weights_size
        self.weights = np.zeros(size, self.dtype)
        self.velocity = np.zeros(size, self.dtype)
        self.gradients = np.zeros(size, self.dtype)
        self.mean = np.zeros(size if rule.recipe.batch > 1 else 0, self.dtype)
        self.predicted = np.zeros(size, self.dtype)
        self.decay = np.zeros(size if any(decay.values()) else 0, np.float64)
        for name, (start, shape) in self.program.slices.items():
            span = slice(start, start + int(np.prod(shape)))
            self.weights[span] = parameters[name].ravel()
            if len(self.decay):
                self.decay[span] = decay[name]
        self.previous = self.weights.copy() if rule.keeps_previous else np.zeros(0, self.dtype)
        self.left = np.zeros(self.stages, np.int64)
        self.started = np.zeros(self.stages, np.int64)
        self.layout = self._layout(np.ones(self.stages, np.int64), 1, stash=rule.stash_weights)
        self.arena = np.zeros(_size(self.layout), self.dtype)
        self.scratch = np.zeros(self.program.scratch_size, self.dtype)
        self.temporary = np.zeros(self.program.largest_value, self.dtype)
        self.columns = np.zeros(self.program.columns_size, self.dtype)
        importlib.import_module("scipy.linalg.cython_blas")  # numba's dot is this BLAS: it must be loaded to be limited
        self._blas = ThreadpoolController()

    def run(self, order: Order, samples: SampleSource) -> NDArray[np.float64]:
        """Run operations; returns, per operation, the training loss of forwards that end in the loss (else 0)."""
        program, coefficients = self.program, order.coefficients
        self._make_room(order)
        forward = order.kind == FORWARD
        first_input, inputs = _window(samples.inputs, order.sample[forward & (order.stage == 0)])
        in_loss = order.sample[(order.kind != UPDATE) & (order.stage == self.stages - 1)]
        first_label, targets = _window(samples.targets, in_loss)
        labels, targets = split_targets(targets, self.dtype)
        losses = np.zeros(len(order))
        with self._blas.limit(limits=1, user_api="blas"), flush_denormals():
            _run(
                order.kind, order.stage, order.sample,
                coefficients.velocity_prediction, coefficients.difference_prediction, coefficients.a,
                coefficients.b, order.lr, order.weight, self.rule.recipe.momentum,
                np.ascontiguousarray(inputs.reshape(len(inputs), program.input_size), self.dtype), first_input,
                labels, targets, first_label,
                program.operators, program.stage_operators, program.stage_weights, program.zeroed,
                program.scratch_zeroed, 1, self.layout, self.arena,
                self.weights, self.velocity, self.previous, self.gradients, self.mean, self.predicted, self.decay,
                self.rule.stash_weights, self.scratch, self.temporary, self.columns, losses,
            )  # fmt: skip
        return losses

    def evaluate(self, inputs: NDArray[Any], targets: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        """The mean loss over samples and the model's outputs (n, ...), on the weights as they are."""
        program = self.program
        batch = int(np.clip(EVALUATION_ELEMENTS // program.frame_sizes.sum(), 1, len(inputs)))
        layout = self._layout(np.ones(self.stages, np.int64), batch, stash=False)
        arena = np.zeros(_size(layout), self.dtype)
        total, outputs = 0.0, []
        with self._blas.limit(limits=1, user_api="blas"), flush_denormals():
            for start in range(0, len(inputs), batch):
                x = np.ascontiguousarray(inputs[start : start + batch], self.dtype)
                labels, wanted = split_targets(targets[start : start + batch], self.dtype)
                loss = _evaluate(
                    len(x), x.ravel(), labels, wanted, program.operators, program.stage_operators,
                    program.stage_weights, layout, arena, self.weights, self.columns,
                )  # fmt: skip
                total += loss * len(x)
                at = layout[program.output_stage, BASE] + program.output_offset * len(x)
                outputs.append(arena[at : at + program.output_size * len(x)].reshape(len(x), -1).copy())
        return total / len(inputs), np.concatenate(outputs)

    def parameters(self) -> dict[str, NDArray[Any]]:
        """The weights as they are, by torch name (copies)."""
        return {
            name: self.weights[start : start + int(np.prod(shape))].reshape(shape).copy()
            for name, (start, shape) in self.program.slices.items()
        }

    def _layout(self, capacity: Ints, n: int, *, stash: bool) -> Ints:
        layout = np.zeros((self.stages, 4), np.int64)
        layout[:, VERSION] = self.program.frame_sizes * n
        layout[:, STRIDE] = layout[:, VERSION] + (np.diff(self.program.stage_weights) if stash else 0)
        layout[:, CAPACITY] = capacity
        layout[1:, BASE] = np.cumsum(layout[:, STRIDE] * capacity)[:-1]
        return layout

    def _make_room(self, order: Order) -> None:
        """Give every stage as many frames as samples are there at once, moving those that are.

        A sample needs its frame from its forward to its backward, its update does not.
        """
        left, spans = self.left.copy(), np.zeros(self.stages, np.int64)
        if not _spans(order.kind, order.stage, order.sample, self.left, spans):
            raise RuntimeError("a stage runs the backwards of its samples out of order")
        if (spans > self.layout[:, CAPACITY]).any():
            old, arena = self.layout, self.arena
            capacity = np.where(spans > old[:, CAPACITY], np.maximum(spans, 2 * old[:, CAPACITY]), old[:, CAPACITY])
            self.layout = self._layout(capacity, 1, stash=self.rule.stash_weights)
            self.arena = np.zeros(_size(self.layout), self.dtype)
            for stage, stride in enumerate(old[:, STRIDE]):
                for sample in range(left[stage], self.started[stage]):
                    source, target = _frame(old, stage, sample), _frame(self.layout, stage, sample)
                    self.arena[target : target + stride] = arena[source : source + stride]
        forward = order.kind == FORWARD
        np.maximum.at(self.started, order.stage[forward], order.sample[forward] + 1)


def _size(layout: Ints) -> int:
    return int((layout[:, STRIDE] * layout[:, CAPACITY]).sum())


def _window(fetch: Callable[[int, int], NDArray[Any]], samples: Ints) -> tuple[int, NDArray[Any]]:
    """What is needed for samples: the first of them, and the data from there to the last."""
    first, end = (int(samples.min()), int(samples.max()) + 1) if len(samples) else (0, 1)
    return first, fetch(first, end)
