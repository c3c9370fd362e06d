"""What the operations of a stage cost on its core: F, Bx, Bw, U, term by term.

An operation is the sum over the loads that its operators ask for (`pbsim.hardware.loads`), each by the closed forms of
the core's datapath (`pbsim.hardware.datapaths`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pbsim.config.hardware import Core
from pbsim.hardware.cycles import Cost, Cycles, ceil_div, transfer_cycles
from pbsim.hardware.datapaths import DATAPATHS
from pbsim.hardware.loads import Load, StageLoads, stage_loads
from pbsim.network.network import Stage

__all__ = [
    "OPERATIONS",
    "Cost",
    "Cycles",
    "Load",
    "StageCycles",
    "StageLoads",
    "ceil_div",
    "stage_cycles",
    "stage_loads",
    "transfer_cycles",
]

OPERATIONS = ("forward", "input_gradient", "weight_gradient", "update")
"""The operations of a stage, in the order of a step; they are the fields of `StageLoads` and `StageCycles`."""


@dataclass(frozen=True)
class StageCycles:
    """What a stage's four operations cost."""

    forward: Cost
    input_gradient: Cost
    weight_gradient: Cost
    update: Cost

    @property
    def operations(self) -> tuple[Cost, Cost, Cost, Cost]:
        """All four, in the order of `OPERATIONS`."""
        return self.forward, self.input_gradient, self.weight_gradient, self.update

    @property
    def backward(self) -> int:
        """Cycles of Bx + Bw + U."""
        return self.input_gradient.total + self.weight_gradient.total + self.update.total

    def interval(self, split: bool) -> int:
        """Cycles between samples when nothing else holds the stage up: F + Bx + Bw + U, split the longer unit's."""
        return max(self.forward.total, self.backward) if split else self.forward.total + self.backward


def stage_cycles(core: Core, stage: Stage, loads: StageLoads, pes: int, element_bytes: int) -> StageCycles:
    """What a stage's operations cost on `pes` PEs.

    F lasts at least one cycle, and so do Bx of every stage but the first, and Bw and U of a stage with
    parameters; the rest may take none (DESIGN.md 5.2). A backward as a whole takes at least one, so that it reads the
    version before its own update.
    """
    datapath, trained = DATAPATHS[core.datapath.kind], int(stage.parameter_elements > 0)
    least = (1, int(stage.index > 0 or not trained), trained, trained)
    return StageCycles(
        *(
            datapath.cost(core, operation, getattr(loads, operation), pes, element_bytes).at_least(minimum)
            for operation, minimum in zip(OPERATIONS, least, strict=True)
        )
    )
