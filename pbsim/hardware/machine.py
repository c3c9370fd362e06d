"""The machine a network runs on: a core per stage, with its PEs, cycles, memory and messages.

Everything that the schedule needs is here as integers of cycles and bytes; nothing of it depends on the values
that flow through the network.
"""

from __future__ import annotations

from dataclasses import dataclass

from pbsim.config.hardware import Hardware
from pbsim.errors import user_error
from pbsim.hardware.core import StageCycles, StageLoads, stage_cycles, stage_loads, transfer_cycles
from pbsim.hardware.fabric import Links, Route, line_ends, line_route
from pbsim.network.network import Network
from pbsim.optim import UpdateRule


@dataclass(frozen=True)
class CoreMemory:
    """Bytes on one core, by category.

    Attributes
    ----------
    weights, momentum, previous_weights : held from the first cycle to the last.
    stash : per sample in flight.
    weight_versions : per sample in flight (weight stashing), else 0.
    gradients : from the start of Bw to the end of U.
    capacity : of the core's SRAM.
    """

    weights: int
    momentum: int
    previous_weights: int
    stash: int
    weight_versions: int
    gradients: int
    capacity: int


@dataclass(frozen=True)
class MachineCore:
    """The core of one stage."""

    stage: int
    name: str
    pes: int
    cycles: StageCycles
    memory: CoreMemory
    credits: int | None
    """Samples in flight at most; None is unbounded."""


@dataclass(frozen=True)
class Channel:
    """What one stage sends another for every sample: a message forward, and one back with the gradients."""

    source: int
    target: int
    forward: Route
    gradient: Route


@dataclass(frozen=True)
class Machine:
    """The machine, ready to be scheduled.

    `stash_weights` says whether a backward reads the version that its own forward read.
    """

    hardware: Hardware
    cores: tuple[MachineCore, ...]
    channels: tuple[Channel, ...]
    link_ends: tuple[tuple[int, int], ...]
    host_bytes: int
    host_cycles: int
    stash_weights: bool

    @property
    def stages(self) -> int:
        """Number of stages, and of cores."""
        return len(self.cores)

    @property
    def split(self) -> bool:
        """Whether forward and backward have a unit each."""
        return self.hardware.core.units == "split"

    def links(self) -> Links:
        """The fabric's links, free and unused."""
        return Links(self.link_ends)


def build_machine(hardware: Hardware, network: Network, rule: UpdateRule, where: str = "hardware") -> Machine:
    """Lay a network out on the hardware.

    Raises
    ------
    UserError : there are more stages than cores, or per-stage credits of another length.
    """
    size = hardware.element_bytes
    loads = [stage_loads(network, stage, rule) for stage in network.stages]
    pes = allocate(hardware, network, loads, where)
    credits = credits_per_stage(hardware, len(network.stages), where)
    cores = []
    for stage, load, count, credit in zip(network.stages, loads, pes, credits, strict=True):
        weights = stage.parameter_elements * size
        memory = CoreMemory(
            weights=weights,
            momentum=weights,
            previous_weights=weights if rule.keeps_previous else 0,
            stash=stage.stash_elements * size,
            weight_versions=weights if rule.stash_weights else 0,
            gradients=weights,
            capacity=int(count * hardware.core.sram_kib * 1024),
        )
        cycles = stage_cycles(hardware.core, stage, load, count, size)
        cores.append(MachineCore(stage.index, stage.name, count, cycles, memory, credit))
    channels = tuple(
        Channel(
            edge.source,
            edge.target,
            line_route(hardware.fabric, edge.source, edge.target, edge.elements * size),
            line_route(hardware.fabric, edge.target, edge.source, edge.gradient_elements * size),
        )
        for edge in network.edges
    )
    ends = line_ends(len(cores))
    host_bytes = size * _elements(network.shapes[network.input_value])
    host_cycles = transfer_cycles(host_bytes, hardware.host.bytes_per_cycle)
    return Machine(hardware, tuple(cores), channels, ends, host_bytes, host_cycles, rule.stash_weights)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def credits_per_stage(hardware: Hardware, stages: int, where: str) -> list[int | None]:
    """Samples in flight each stage may have (None: unbounded)."""
    credits = hardware.pipeline.credits
    match credits:
        case "lockstep":
            return [2 * (stages - 1 - s) + 1 for s in range(stages)]
        case "1f1b":
            return [stages - s for s in range(stages)]
        case "unbounded":
            return [None] * stages
        case int():
            return [credits] * stages
        case _:
            if len(credits) != stages:
                raise user_error(where, "pipeline.credits", credits, f"should have one entry per stage, here {stages}")
            return list(credits)


def allocate(hardware: Hardware, network: Network, loads: list[StageLoads], where: str) -> list[int]:
    """PEs per stage.

    `uniform` gives each `core.pes`. `balanced` looks for the smallest initiation interval (cycles of the slowest
    stage per sample) that the mesh's PEs can reach, and gives every stage the fewest PEs that keep up with it.
    """
    mesh, core, stages, split = hardware.mesh, hardware.core, network.stages, hardware.core.units == "split"
    if hardware.pipeline.allocation == "uniform":
        if len(stages) * core.pes > mesh.pes:
            raise user_error(
                where,
                "mesh",
                f"{mesh.rows} x {mesh.cols}",
                f"has {mesh.pes // core.pes} cores of {core.pes} PEs, and the network has {len(stages)} stages",
            )
        return [core.pes] * len(stages)
    if len(stages) > mesh.pes:
        raise user_error(
            where,
            "mesh",
            f"{mesh.rows} x {mesh.cols}",
            f"has {mesh.pes} PEs, and the network has {len(stages)} stages",
        )

    def interval(stage: int, pes: int) -> int:
        return stage_cycles(core, stages[stage], loads[stage], pes, hardware.element_bytes).interval(split)

    def fewest(stage: int, target: int) -> int:
        low, high = 1, mesh.pes
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if interval(stage, middle) <= target else (middle + 1, high)
        return low

    low = max(interval(s, mesh.pes) for s in range(len(stages)))
    high = max(interval(s, 1) for s in range(len(stages)))
    while low < high:
        middle = (low + high) // 2
        fits = sum(fewest(s, middle) for s in range(len(stages))) <= mesh.pes
        low, high = (low, middle) if fits else (middle + 1, high)
    return [fewest(s, low) for s in range(len(stages))]
