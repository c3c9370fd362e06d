"""How many PEs each stage gets, and what the slowest of them makes of the machine.

`balanced` cuts the mesh into bands of equal height, each stage taking whole columns of one (placement.py). For every
height it looks for the smallest *initiation interval* T, the cycles per sample of the slowest stage: at T every stage
takes the fewest PEs with which it needs at most T cycles, but no fewer than its memory needs (its *SRAM floor*), and
the bands hold them all. Of the heights it takes the one of the fastest *pace*: the longer of T and of what the busiest
link carries per sample, since a layout whose messages squeeze through a narrow crossing is worth little. Columns are
whole, so that most stages get somewhat more than they asked for; all of it is used.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pbsim.config.hardware import Hardware, Mesh
from pbsim.errors import user_error
from pbsim.hardware.core import StageLoads, stage_cycles
from pbsim.hardware.fabric import Message, wire
from pbsim.hardware.placement import (
    Region,
    band_heights,
    banded_regions,
    bands_needed,
    counted,
    fits,
    grid_cores,
    listed_regions,
    spare_regions,
    uniform_regions,
    uniform_shape,
)
from pbsim.network.network import Stage


class Intervals:
    """Cycles per sample of every stage on any number of PEs.

    Stages that ask the same of their cores (as the blocks of a residual net do) are of one *kind*, and share answers.

    Attributes
    ----------
    kind : per stage.
    kinds : one stage of each.
    """

    def __init__(self, hardware: Hardware, stages: Sequence[Stage], loads: Sequence[StageLoads]) -> None:
        self._core, self._element_bytes = hardware.core, hardware.element_bytes
        self._stages, self._loads = stages, loads
        numbers: dict[tuple[StageLoads, int, bool], int] = {}
        self.kind = [
            numbers.setdefault((load, stage.parameter_elements, stage.index == 0), len(numbers))
            for stage, load in zip(stages, loads, strict=True)
        ]
        self.kinds = [self.kind.index(kind) for kind in range(len(numbers))]
        self._mesh_pes = hardware.mesh.pes
        self._known: dict[tuple[int, int], int] = {}
        self._fewest: dict[int, list[int]] = {}
        self._targets: list[int] = []  # the keys of `_fewest`, in order

    def __len__(self) -> int:
        return len(self._stages)

    def cycles(self, stage: int, pes: int) -> int:
        """Cycles per sample of a stage."""
        key = self.kind[stage], pes
        if key not in self._known:
            cycles = stage_cycles(self._core, self._stages[stage], self._loads[stage], pes, self._element_bytes)
            self._known[key] = cycles.interval(self._core.units == "split")
        return self._known[key]

    def fewest(self, target: int) -> list[int]:
        """By kind, the fewest PEs with which a stage needs at most so many cycles, which the whole mesh's suffice for.

        They lie between those of the next longer and the next shorter target that have been asked for.
        """
        if target not in self._fewest:
            place = bisect_left(self._targets, target)
            longer, shorter = self._targets[place : place + 1], self._targets[place - 1 : place] if place else []
            least = self._fewest[longer[0]] if longer else [1] * len(self.kinds)
            most = self._fewest[shorter[0]] if shorter else [self._mesh_pes] * len(self.kinds)
            brackets = zip(self.kinds, least, most, strict=True)
            self._fewest[target] = [self._search(stage, target, low, high) for stage, low, high in brackets]
            self._targets.insert(place, target)
        return self._fewest[target]

    def _search(self, stage: int, target: int, low: int, high: int) -> int:
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.cycles(stage, middle) <= target else (middle + 1, high)
        return low


@dataclass(frozen=True)
class InitiationInterval:
    """What sets the pace of the machine, links and host apart.

    Attributes
    ----------
    cycles : per sample, of the slowest stage.
    stage : the (first) stage that takes so long.
    with_one_more_pe : what `cycles` would be if that stage alone had one more PE.
    """

    cycles: int
    stage: int
    with_one_more_pe: int


@dataclass(frozen=True)
class Allocation:
    """The core of every stage; `sram_shortfall_bytes` is what the mesh lacks to give every stage its SRAM floor."""

    regions: list[Region]
    sram_shortfall_bytes: int = 0


def allocate(
    hardware: Hardware,
    intervals: Intervals,
    needs: Sequence[int],
    messages: Sequence[Message],
    where: str,
    listed: tuple[str, str] | None = None,
) -> Allocation:
    """Give every stage its rectangle of PEs.

    Parameters
    ----------
    needs : bytes that each stage has to hold.
    messages : what the stages send each other per sample.
    where : the hardware file, for errors.
    listed : file and key of a list of regions, for errors, where it is not the hardware file's `pipeline.placement`.

    Raises
    ------
    UserError : the network does not fit, by how much; or regions that a user listed are wrong.
    """
    placement = hardware.pipeline.placement
    if isinstance(placement, list):
        place, key = listed or (where, "pipeline.placement")
        return Allocation(listed_regions(hardware.mesh, placement, len(intervals), place, key))
    if placement != "snake":
        raise user_error(where, "pipeline.placement", placement, "is a file that has not been read: see load_hardware")
    if hardware.pipeline.allocation == "uniform":
        return Allocation(_uniform(hardware, len(intervals), where))
    return _balanced(hardware, intervals, needs, messages, where)


def initiation_interval(intervals: Intervals, regions: Sequence[Region]) -> InitiationInterval:
    """The slowest stage, and what one more PE would buy there."""
    cycles = [intervals.cycles(stage, region.pes) for stage, region in enumerate(regions)]
    slowest = cycles.index(max(cycles))
    faster = intervals.cycles(slowest, regions[slowest].pes + 1)
    others = [count for stage, count in enumerate(cycles) if stage != slowest]
    return InitiationInterval(cycles[slowest], slowest, max([faster, *others]))


def _size(mesh: Mesh) -> str:
    return f"{mesh.rows} x {mesh.cols}"


def _uniform(hardware: Hardware, stages: int, where: str) -> list[Region]:
    mesh, pes = hardware.mesh, hardware.core.pes
    shape = uniform_shape(mesh, pes)
    cores = grid_cores(mesh, shape)
    if cores < stages:
        none = "" if cores else f" (no rectangle of {pes} PEs fits into it)"
        raise user_error(
            where,
            "mesh",
            _size(mesh),
            f"has {cores} cores of {pes} PEs{none}, and the network has {stages} stages: "
            f"{counted(stages - cores, 'core')} too few; {stages} cores take {stages * pes} PEs, and there are "
            f"{mesh.pes}",
        )
    return uniform_regions(mesh, shape, stages)


def _balanced(
    hardware: Hardware, intervals: Intervals, needs: Sequence[int], messages: Sequence[Message], where: str
) -> Allocation:
    mesh, stages = hardware.mesh, len(intervals)
    if stages > mesh.pes:
        raise user_error(
            where,
            "mesh",
            _size(mesh),
            f"has {mesh.pes} PEs, and the network has {stages} stages: {counted(stages - mesh.pes, 'PE')} too few",
        )
    pe_bytes = hardware.core.sram_kib * 1024
    floors = [max(1, math.ceil(need / pe_bytes)) for need in needs]
    shortfall = 0
    if not any(fits(mesh, height, floors) for height in band_heights(mesh)):
        shortfall = _shortfall(mesh, floors, needs, pe_bytes)
        if hardware.pipeline.memory == "enforce":
            rounded = "" if sum(needs) > mesh.pes * pe_bytes else " once every core is a rectangle"
            raise user_error(
                where,
                "mesh",
                _size(mesh),
                f"holds {int(mesh.pes * pe_bytes)} bytes, and the network needs {sum(needs)}: {shortfall} bytes too few"
                f'{rounded} (pipeline.memory = "enforce"; "report" would go by work alone)',
            )
        floors = [1] * stages
    return Allocation(_fastest(hardware, intervals, floors, messages), shortfall)


def _fastest(hardware: Hardware, intervals: Intervals, floors: list[int], messages: Sequence[Message]) -> list[Region]:
    """The layout of the fastest pace; of equal ones that of the highest bands."""
    mesh = hardware.mesh

    def fewest(target: int) -> list[int]:
        pes = intervals.fewest(target)
        return [max(pes[kind], floor) for kind, floor in zip(intervals.kind, floors, strict=True)]

    def smallest(height: int, low: int, high: int) -> int:
        """The smallest interval that bands of a height can reach; they can reach `high`."""
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(mesh, height, fewest(middle)) else (middle + 1, high)
        return low

    least = max(intervals.cycles(stage, mesh.pes) for stage in intervals.kinds)
    most = max(intervals.cycles(stage, floor) for stage, floor in enumerate(floors))
    fastest: tuple[int, list[Region]] | None = None
    for height in reversed(band_heights(mesh)):
        if most < least or not fits(mesh, height, fewest(most)):
            continue  # no faster than what has been found
        interval = smallest(height, least, most)
        regions = banded_regions(mesh, height, fewest(interval))
        nodes = [*regions, *spare_regions(mesh, regions)]
        pace = max(interval, wire(hardware.fabric, nodes, messages).busiest_cycles)
        if fastest is None or pace < fastest[0]:
            fastest, most = (pace, regions), min(most, pace - 1)
    assert fastest is not None
    return fastest[1]


def _shortfall(mesh: Mesh, floors: list[int], needs: Sequence[int], pe_bytes: float) -> int:
    """Bytes that the mesh lacks: all together, or where the sum would fit, in bands of the best height."""
    missing = math.ceil(sum(needs) - mesh.pes * pe_bytes)
    if missing > 0:
        return missing
    wide_enough = [height for height in band_heights(mesh) if max(floors) <= height * mesh.cols]
    lacking = [(bands_needed(mesh, h, floors) - mesh.rows // h) * h * mesh.cols for h in wide_enough]
    return math.ceil(min(lacking) * pe_bytes)
