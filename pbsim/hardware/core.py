"""How many cycles one operation of a stage takes on its core, term by term.

Per operator of a stage, on P PEs (a simple model, one closed form per term):

    compute   ceil(MACs / (P * macs_per_cycle))
    vector    ceil(vector operations / (P * vector_lanes))
    sram      what is left of ceil(bytes / (P * sram_bytes_per_cycle)) beyond compute + vector, every operand and
              result moved once
    overhead  overhead_cycles, where the operator does anything at all

and an operation (F, Bx, Bw, U) of a stage is the sum over its operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pbsim.config.hardware import Core, UnitDatapath, VectorDatapath
from pbsim.network.network import Network, Operator, Stage
from pbsim.optim import UpdateRule


@dataclass(frozen=True)
class Cycles:
    """A number of cycles as the sum of its terms."""

    compute: int = 0
    vector: int = 0
    sram: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """All terms together."""
        return self.compute + self.vector + self.sram + self.overhead

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            self.compute + other.compute,
            self.vector + other.vector,
            self.sram + other.sram,
            self.overhead + other.overhead,
        )

    def at_least(self, minimum: int) -> Cycles:
        """The same, padded with overhead to a minimum."""
        return self + Cycles(overhead=max(0, minimum - self.total))


@dataclass(frozen=True)
class Load:
    """What one operator asks of a core in one operation: MACs, vector operations, elements moved."""

    macs: int
    vector: int
    elements: int


@dataclass(frozen=True)
class StageLoads:
    """The loads of a stage's four operations, one per operator that does something."""

    forward: tuple[Load, ...]
    input_gradient: tuple[Load, ...]
    weight_gradient: tuple[Load, ...]
    update: tuple[Load, ...]


@dataclass(frozen=True)
class StageCycles:
    """The cycles of a stage's four operations."""

    forward: Cycles
    input_gradient: Cycles
    weight_gradient: Cycles
    update: Cycles

    @property
    def backward(self) -> int:
        """Bx + Bw + U."""
        return self.input_gradient.total + self.weight_gradient.total + self.update.total

    def interval(self, split: bool) -> int:
        """Cycles between samples when nothing else holds the stage up: F + Bx + Bw + U, split the longer unit's."""
        return max(self.forward.total, self.backward) if split else self.forward.total + self.backward


def stage_loads(network: Network, stage: Stage, rule: UpdateRule) -> StageLoads:
    """What a stage's operations ask of its core under an update rule."""
    forward, input_gradient, weight_gradient = [], [], []
    for operator in stage.operators:
        inputs = sum(math.prod(network.shapes[value]) for value in operator.inputs)
        output = math.prod(network.shapes[operator.output])
        weights = _parameter_elements(network, operator)
        moved = inputs + output + weights
        work = operator.work
        forward.append(Load(work.macs_forward, work.vector_forward, moved))
        input_gradient.append(Load(work.macs_input_gradient, work.vector_input_gradient, moved))
        weight_gradient.append(Load(work.macs_weight_gradient, work.vector_weight_gradient, moved))
    elements = stage.parameter_elements
    if rule.predicts and elements:
        forward.insert(0, Load(0, rule.prediction_operations * elements, 3 * elements))
    update = [Load(0, rule.update_operations * elements, 5 * elements)] if elements else []
    return StageLoads(_busy(forward), _busy(input_gradient), _busy(weight_gradient), tuple(update))


def _parameter_elements(network: Network, operator: Operator) -> int:
    return sum(math.prod(network.parameters[name]) for name in operator.parameters)


def _busy(loads: list[Load]) -> tuple[Load, ...]:
    return tuple(load for load in loads if load.macs or load.vector)


def stage_cycles(core: Core, stage: Stage, loads: StageLoads, pes: int, element_bytes: int) -> StageCycles:
    """The cycles of a stage's operations on `pes` PEs.

    F lasts at least one cycle, and so do Bx of every stage but the first, and Bw and U of a stage with
    parameters; the rest may take none (DESIGN.md 5.2). A backward as a whole takes at least one, so that it reads the
    version before its own update.
    """
    cycles = DATAPATHS[core.datapath.kind](core, loads, pes, element_bytes)
    trained = 1 if stage.parameter_elements else 0
    return StageCycles(
        cycles.forward.at_least(1),
        cycles.input_gradient.at_least(1 if stage.index or not trained else 0),
        cycles.weight_gradient.at_least(trained),
        cycles.update.at_least(trained),
    )


def _vector_cycles(core: Core, loads: StageLoads, pes: int, element_bytes: int) -> StageCycles:
    datapath = core.datapath
    assert isinstance(datapath, VectorDatapath)

    def one(load: Load) -> Cycles:
        compute = ceil_div(load.macs, pes * datapath.macs_per_cycle)
        vector = ceil_div(load.vector, pes * core.vector_lanes)
        sram = transfer_cycles(load.elements * element_bytes, pes * core.sram_bytes_per_cycle)
        return Cycles(compute, vector, max(0, sram - compute - vector), datapath.overhead_cycles)

    def total(group: tuple[Load, ...]) -> Cycles:
        return sum((one(load) for load in group), start=Cycles())

    return StageCycles(
        total(loads.forward), total(loads.input_gradient), total(loads.weight_gradient), total(loads.update)
    )


def _unit_cycles(core: Core, loads: StageLoads, pes: int, element_bytes: int) -> StageCycles:
    datapath = core.datapath
    assert isinstance(datapath, UnitDatapath)
    return StageCycles(
        Cycles(datapath.forward_cycles),
        Cycles(datapath.input_gradient_cycles),
        Cycles(datapath.weight_gradient_cycles),
        Cycles(datapath.update_cycles),
    )


DATAPATHS: dict[str, Callable[[Core, StageLoads, int, int], StageCycles]] = {
    "vector": _vector_cycles,
    "unit": _unit_cycles,
}


def ceil_div(amount: int, per_cycle: int) -> int:
    """Whole cycles for an amount at an integer rate."""
    return -(-amount // per_cycle)


def transfer_cycles(amount_bytes: int, bytes_per_cycle: float) -> int:
    """Whole cycles to move bytes at a rate; none at an infinite rate."""
    return math.ceil(amount_bytes / bytes_per_cycle)
