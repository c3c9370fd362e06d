"""The network as the numba executor runs it: one row of integers per operator, and where everything lies.

*Weights* of all stages lie in one flat array, a stage's parameters side by side, and velocity, gradients and
predicted weights in arrays of the same layout.

A *frame* holds what one sample has at one stage, from its forward to its backward: the values that the stage's
operators make (stage 0 also has the model's input), what operators save for their backward, and the gradients of
values that other stages read. A stage keeps frames for the samples in flight, in a ring. A later stage reads its
inputs right from the frame of the stage that made them, and adds its input gradients there: that frame outlives both,
since its own backward comes after theirs. All offsets are elements per sample; a frame of n samples is n times as long.

A value's gradient lies in the frame where other stages read the value, else in scratch memory, which a backward uses
and leaves. One with a single reader is overwritten by it; others start at zero and are added to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbsim.network.network import Network, Operator, Stage

IntTable = NDArray[np.int64]


class Code(IntEnum):
    """Operator codes of the executor."""

    CONV2D = 0
    LINEAR = 1
    GROUP_NORM = 2
    RELU = 3
    MAX_POOL = 4
    AVG_POOL = 5
    ADD = 6
    COPY = 7
    CROSS_ENTROPY = 8
    MSE = 9


CODES = {
    "conv2d": Code.CONV2D,
    "linear": Code.LINEAR,
    "group_norm": Code.GROUP_NORM,
    "relu": Code.RELU,
    "max_pool2d": Code.MAX_POOL,
    "avg_pool2d": Code.AVG_POOL,
    "add": Code.ADD,
    "flatten": Code.COPY,
    "identity": Code.COPY,
    "cross_entropy": Code.CROSS_ENTROPY,
    "mse": Code.MSE,
}

# Columns of the operator table.
CODE = 0
IN_STAGE, IN_OFFSET, IN_SIZE = 1, 2, 3  # of the first input; the second follows three columns later
OUT_OFFSET, OUT_SIZE = 7, 8  # in the stage's own frame
SAVED = 9  # offset of what the operator saves, in the frame
WEIGHT, WEIGHT_SIZE, BIAS, BIAS_SIZE = 10, 11, 12, 13  # within the stage's parameters
OUT_GRADIENT, OUT_GRADIENT_IN_FRAME = 14, 15
GRADIENT, GRADIENT_STAGE, GRADIENT_ADDS = (
    16,
    17,
    18,
)  # of the first input; the second follows three columns later
DIMENSIONS = 22  # see `_dimensions`
WIDTH = 44

NOWHERE = -1
"""GRADIENT of an input whose gradient nobody needs; GRADIENT_STAGE of one that lies in scratch memory."""


@dataclass(frozen=True)
class Program:
    """A compiled network; all sizes in elements.

    Attributes
    ----------
    operators : (operators, WIDTH) int64, in execution order.
    stage_operators : (stages + 1,) rows of each stage: from [s] to [s + 1].
    stage_weights : (stages + 1,) parameters of each stage in the flat arrays.
    frame_sizes : (stages,) elements of a frame of one sample.
    zeroed : (stages, 2) the part of a frame, offset and size, in which gradients are summed: zero at the forward.
    scratch_zeroed, scratch_size : the part of the scratch memory that is zero when a backward starts, and all of it.
    largest_value : elements of the largest value, for gradients on their way to a sum.
    columns_size : scratch for im2col.
    input_size, output_stage, output_offset, output_size : where the model's input and output are.
    slices : torch name to (offset, shape) in the flat arrays.
    """

    operators: IntTable
    stage_operators: IntTable
    stage_weights: IntTable
    frame_sizes: IntTable
    zeroed: IntTable
    scratch_zeroed: int
    scratch_size: int
    largest_value: int
    columns_size: int
    input_size: int
    output_stage: int
    output_offset: int
    output_size: int
    slices: Mapping[str, tuple[int, tuple[int, ...]]]

    @property
    def weights_size(self) -> int:
        """All parameters of the network."""
        return int(self.stage_weights[-1])


def compile_network(network: Network) -> Program:
    """Lay a network out for the executor."""
    return _Compiler(network).program()


class _Compiler:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.sizes = [math.prod(shape) for shape in network.shapes]
        self.owner = {network.input_value: 0}
        self.writers: dict[int, int] = dict.fromkeys(range(len(self.sizes)), 0)
        self.read_elsewhere: set[int] = set()
        for stage in network.stages:
            for operator in stage.operators:
                self.owner[operator.output] = stage.index
        for stage in network.stages:
            for operator in stage.operators:
                for value, needed in zip(operator.inputs, operator.needs_input_gradient, strict=True):
                    self.writers[value] += needed
                    if self.owner[value] != stage.index:
                        self.read_elsewhere.add(value)
        self.offset: dict[int, int] = {}
        self.gradient: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.slices: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.scratch_zeroed = self.scratch_size = 0

    def program(self) -> Program:
        network = self.network
        weights, frames, zeroed = [0], [], []
        for stage in network.stages:
            weights.append(self._place_weights(stage, weights[-1]))
            frame, summed = self._place_frame(stage)
            frames.append(frame)
            zeroed.append(summed)
        self._place_scratch()
        rows = [self._row(stage, operator) for stage in network.stages for operator in stage.operators]
        counts = np.cumsum([0, *(len(stage.operators) for stage in network.stages)])
        output = network.output_value
        return Program(
            operators=np.array(rows, dtype=np.int64),
            stage_operators=counts.astype(np.int64),
            stage_weights=np.array(weights, dtype=np.int64),
            frame_sizes=np.array(frames, dtype=np.int64),
            zeroed=np.array(zeroed, dtype=np.int64),
            scratch_zeroed=self.scratch_zeroed,
            scratch_size=self.scratch_size,
            largest_value=max(self.sizes),
            columns_size=max(self._columns(operator) for stage in network.stages for operator in stage.operators),
            input_size=self.sizes[network.input_value],
            output_stage=self.owner[output],
            output_offset=self.offset[output],
            output_size=self.sizes[output],
            slices=self.slices,
        )

    def _place_weights(self, stage: Stage, start: int) -> int:
        for name in stage.parameters:
            shape = tuple(self.network.parameters[name])
            self.slices[name] = (start, shape)
            start += math.prod(shape)
        return start

    def _place_frame(self, stage: Stage) -> tuple[int, tuple[int, int]]:
        end = 0
        if stage.index == 0:
            self.offset[self.network.input_value], end = end, end + self.sizes[self.network.input_value]
        for operator in stage.operators:
            self.offset[operator.output], end = end, end + self.sizes[operator.output]
            self.saved[operator.output], end = end, end + operator.saved_elements
        gradients = [v for v in stage.outputs if self.writers[v]]
        summed = [v for v in gradients if self.writers[v] > 1]
        start = end
        for value in summed + [v for v in gradients if self.writers[v] == 1]:
            self.gradient[value], end = end, end + self.sizes[value]
        return end, (start, sum(self.sizes[v] for v in summed))

    def _place_scratch(self) -> None:
        for stage in self.network.stages:
            local = [
                o.output for o in stage.operators if o.output not in self.read_elsewhere and self.writers[o.output]
            ]
            summed = [v for v in local if self.writers[v] > 1]
            end = 0
            for value in summed:
                self.gradient[value], end = end, end + self.sizes[value]
            self.scratch_zeroed = max(self.scratch_zeroed, end)
            for value in (v for v in local if self.writers[v] == 1):
                self.gradient[value], end = end, end + self.sizes[value]
            self.scratch_size = max(self.scratch_size, end)

    def _row(self, stage: Stage, operator: Operator) -> list[int]:
        row = [0] * WIDTH
        row[CODE] = CODES[operator.kind]
        for k, value in enumerate(operator.inputs):
            row[IN_STAGE + 3 * k] = self.owner[value]
            row[IN_OFFSET + 3 * k] = self.offset[value]
            row[IN_SIZE + 3 * k] = self.sizes[value]
            row[GRADIENT + 3 * k] = self.gradient[value] if operator.needs_input_gradient[k] else NOWHERE
            row[GRADIENT_STAGE + 3 * k] = self.owner[value] if value in self.read_elsewhere else NOWHERE
            row[GRADIENT_ADDS + 3 * k] = self.writers[value] > 1
        output = operator.output
        row[OUT_OFFSET], row[OUT_SIZE], row[SAVED] = (
            self.offset[output],
            self.sizes[output],
            self.saved[output],
        )
        row[OUT_GRADIENT] = self.gradient.get(output, 0)
        row[OUT_GRADIENT_IN_FRAME] = output in self.read_elsewhere
        if operator.parameters:
            first = self.slices[stage.parameters[0]][0]
            for column, name in zip((WEIGHT, BIAS), operator.parameters, strict=False):
                start, shape = self.slices[name]
                row[column], row[column + 1] = start - first, math.prod(shape)
        dimensions = _DIMENSIONS[CODES[operator.kind]](operator, self.network)
        row[DIMENSIONS : DIMENSIONS + len(dimensions)] = dimensions
        return row

    def _columns(self, operator: Operator) -> int:
        if operator.kind != "conv2d":
            return 1
        channels, kernel = self.network.shapes[operator.inputs[0]][0], operator.attributes["kernel"]
        _, out_h, out_w = self.network.shapes[operator.output]
        return int(channels // operator.attributes["groups"] * kernel[0] * kernel[1] * out_h * out_w)


def _maps(operator: Operator, network: Network) -> list[int]:
    return [*network.shapes[operator.inputs[0]], *network.shapes[operator.output]]


def _conv(operator: Operator, network: Network) -> list[int]:
    a = operator.attributes
    return [*_maps(operator, network), *a["kernel"], *a["stride"], *a["padding"], *a["dilation"], a["groups"]]


def _max_pool(operator: Operator, network: Network) -> list[int]:
    a = operator.attributes
    return [*_maps(operator, network), *a["kernel"], *a["stride"], *a["padding"], *a["dilation"]]


def _avg_pool(operator: Operator, network: Network) -> list[int]:
    a = operator.attributes
    return [*_maps(operator, network), *a["kernel"], *a["stride"], *a["padding"], int(a["count_include_pad"])]


def _group_norm(operator: Operator, network: Network) -> list[int]:
    """Channels, elements per channel, groups; eps travels as the bits of its float64."""
    channels, *extents = network.shapes[operator.inputs[0]]
    eps = np.float64(operator.attributes["eps"]).view(np.int64)
    return [channels, math.prod(extents), operator.attributes["groups"], int(eps)]


def _features(operator: Operator, network: Network) -> list[int]:
    """Rows per sample, and features in and out (a linear layer may act on more than one row of a sample)."""
    shape_in = network.shapes[operator.inputs[0]]
    shape_out = network.shapes[operator.output]
    return [math.prod(shape_in[:-1]), shape_in[-1], shape_out[-1] if shape_out else 1]


def _none(operator: Operator, network: Network) -> list[int]:
    return []


_DIMENSIONS: dict[Code, Callable[[Operator, Network], list[Any]]] = {
    Code.CONV2D: _conv,
    Code.MAX_POOL: _max_pool,
    Code.AVG_POOL: _avg_pool,
    Code.GROUP_NORM: _group_norm,
    Code.LINEAR: _features,
    Code.RELU: _none,
    Code.ADD: _none,
    Code.COPY: _none,
    Code.CROSS_ENTROPY: _features,
    Code.MSE: _features,
}
