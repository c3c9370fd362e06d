"""The machine a network runs on: a core per stage, with its PEs, cycles, memory and messages.

Everything that the schedule needs is here as integers of cycles and bytes; nothing of it depends on the values
that flow through the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pbsim.config.hardware import Hardware
from pbsim.errors import user_error
from pbsim.hardware.allocation import InitiationInterval, Intervals, allocate, initiation_interval
from pbsim.hardware.core import StageCycles, stage_cycles, stage_loads, transfer_cycles
from pbsim.hardware.fabric import Links, Route, wire
from pbsim.hardware.placement import Region, spare_regions
from pbsim.network.network import Edge, Network, Stage
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

    Attributes
    ----------
    nodes : the fabric's rectangles of PEs: core s is node s, behind them are the spare ones that no core uses.
    link_ends, link_wires : per directed link, the nodes it leads from and to, and the PE-to-PE links it bundles.
    stash_weights : whether a backward reads the version that its own forward read.
    interval : the slowest stage as the machine was laid out.
    sram_shortfall_bytes : what the mesh lacks to give every stage the memory it needs (`balanced` alone asks).
    """

    hardware: Hardware
    cores: tuple[MachineCore, ...]
    channels: tuple[Channel, ...]
    nodes: tuple[Region, ...]
    link_ends: tuple[tuple[int, int], ...]
    link_wires: tuple[int, ...]
    host_bytes: int
    host_cycles: int
    stash_weights: bool
    interval: InitiationInterval
    sram_shortfall_bytes: int

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


def build_machine(
    hardware: Hardware,
    network: Network,
    rule: UpdateRule,
    where: str = "hardware",
    listed: tuple[str, str] | None = None,
) -> Machine:
    """Lay a network out on the hardware.

    Parameters
    ----------
    where : the hardware file, for errors.
    listed : file and key of the list of regions, for errors, where they come from a file of their own.

    Raises
    ------
    UserError : the network does not fit, listed regions are wrong, or per-stage credits have another length.
    """
    size, stages = hardware.element_bytes, network.stages
    loads = [stage_loads(network, stage, rule) for stage in stages]
    credits = credits_per_stage(hardware, len(stages), where)
    host_bytes = size * _elements(network.shapes[network.input_value])
    memories = [_memory(stage, rule, size) for stage in stages]
    buffers = buffer_bytes(hardware, network.edges, host_bytes, len(stages))
    needs = [
        required_bytes(memory, samples) + buffer
        for memory, samples, buffer in zip(memories, expected_samples(hardware, credits), buffers, strict=True)
    ]
    messages = [
        message
        for edge in network.edges
        for message in (
            (edge.source, edge.target, edge.elements * size),
            (edge.target, edge.source, edge.gradient_elements * size),
        )
    ]
    intervals = Intervals(hardware, stages, loads)
    allocation = allocate(hardware, intervals, needs, messages, where, listed)
    cores = []
    for stage, load, memory, region, credit in zip(stages, loads, memories, allocation.regions, credits, strict=True):
        cycles = stage_cycles(hardware.core, stage, load, region.pes, size)
        memory = replace(memory, capacity=int(region.pes * hardware.core.sram_kib * 1024))
        cores.append(MachineCore(stage.index, stage.name, region.pes, cycles, memory, credit))
    wiring = wire(hardware.fabric, [*allocation.regions, *spare_regions(hardware.mesh, allocation.regions)], messages)
    pairs = zip(wiring.routes[::2], wiring.routes[1::2], strict=True)
    channels = tuple(Channel(forward.source, forward.target, forward, gradient) for forward, gradient in pairs)
    return Machine(
        hardware,
        tuple(cores),
        channels,
        wiring.nodes,
        wiring.ends,
        wiring.wires,
        host_bytes,
        transfer_cycles(host_bytes, hardware.host.bytes_per_cycle),
        rule.stash_weights,
        initiation_interval(intervals, allocation.regions),
        allocation.sram_shortfall_bytes,
    )


def _memory(stage: Stage, rule: UpdateRule, element_bytes: int) -> CoreMemory:
    """What a stage holds, on a core without capacity yet."""
    weights = stage.parameter_elements * element_bytes
    return CoreMemory(
        weights=weights,
        momentum=weights,
        previous_weights=weights if rule.keeps_previous else 0,
        stash=stage.stash_elements * element_bytes,
        weight_versions=weights if rule.stash_weights else 0,
        gradients=weights,
        capacity=0,
    )


def required_bytes(memory: CoreMemory, samples: int) -> int:
    """Bytes that a stage holds with so many samples in flight, buffers apart."""
    permanent = memory.weights + memory.momentum + memory.previous_weights
    return permanent + memory.gradients + samples * (memory.stash + memory.weight_versions)


def expected_samples(hardware: Hardware, credits: list[int | None]) -> list[int]:
    """Samples in flight that memory is to be found for: the credits, or those of lockstep where nothing bounds them."""
    lockstep = [2 * (len(credits) - 1 - s) + 1 for s in range(len(credits))]
    if hardware.pipeline.timing == "lockstep":
        return lockstep
    return [due if credit is None else credit for credit, due in zip(credits, lockstep, strict=True)]


def buffer_bytes(hardware: Hardware, edges: Sequence[Edge], host_bytes: int, stages: int) -> list[int]:
    """Bytes of input and output buffers that a stage is to have, by stage.

    In: one message of every channel, and of a skip edge as many as it passes stages, since they wait for the longer
    way. Out: `output_slots` of the largest message; in lockstep one of every channel, since all are sent together.
    """
    size, lockstep = hardware.element_bytes, hardware.pipeline.timing == "lockstep"
    inside, outgoing = [host_bytes] + [0] * (stages - 1), [[0] for _ in range(stages)]
    for edge in edges:
        distance, forward, gradient = edge.target - edge.source, edge.elements * size, edge.gradient_elements * size
        inside[edge.target] += distance * forward
        inside[edge.source] += distance * gradient
        outgoing[edge.source].append(forward)
        outgoing[edge.target].append(gradient)
    slots = hardware.pipeline.output_slots
    out = [sum(sizes) if lockstep else slots * max(sizes) for sizes in outgoing]
    return [i + o for i, o in zip(inside, out, strict=True)]


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
