"""Energy: how often a machine does what, times the energy of doing it once.

============== ============ ======================================================================================
action         counted in   how often
============== ============ ======================================================================================
mac            MACs         of the operations, by the model's shapes, in the hardware's datatype
vector_op      steps        elementwise steps of the operations, prediction and update included
sram_byte      bytes        of the operations (the datapath's traffic); of every message, read on the core that sends
                            it and written on the one that gets it; of every sample that the host writes
link_byte_hop  byte-hops    bytes of a message times its steps from PE to PE, booked on the core that sends it
host_byte      bytes        of samples from the host, booked on the first core
leakage        PE-cycles    PEs of the core times the run's cycles; PEs outside the cores are taken as switched off
============== ============ ======================================================================================

Counts follow from what one operation or message costs and how often it happened: nothing is counted while the machine
is simulated. An action without an entry in the energy table costs nothing, and is named where energy is reported.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from pbsim.config.hardware import Energy, Hardware
from pbsim.hardware.machine import Machine

ACTIONS: tuple[str, ...] = tuple(name for name in Energy.model_fields if name != "table")
"""The actions that cost energy, as the hardware file names them."""

CONFIDENCE = ("src", "run", "page", "derived", "recalled", "assumed")
"""How a figure may be known, best first."""


@dataclass(frozen=True)
class Entry:
    """Energy of one action: picojoules each time, where the figure comes from, and how it is known (may be empty)."""

    pj: float
    source: str
    confidence: str


@dataclass(frozen=True)
class EnergyTable:
    """The entries in use, by action; `name` is the table's, or `inline` if the hardware file gives entries alone."""

    name: str
    entries: Mapping[str, Entry]

    def pj(self, action: str) -> float:
        """Picojoules of an action each time; 0 without an entry."""
        return self.entries[action].pj if action in self.entries else 0.0


def shipped_tables() -> dict[str, Any]:
    """The tables that come with pbsim, as their file has them."""
    return tomllib.loads(files("pbsim.hardware").joinpath("energy_tables.toml").read_text(encoding="utf-8"))


def energy_table(hardware: Hardware) -> EnergyTable | None:
    """The entries that a hardware file asks for, its inline ones in place of its table's; None without `[energy]`."""
    energy = hardware.energy
    if energy is None:
        return None
    entries = {}
    if energy.table is not None:
        for action, entry in shipped_tables()[energy.table].items():
            chosen = _at_capacity(entry, hardware.core.sram_kib) if isinstance(entry, list) else entry
            chosen = chosen if "pj" in chosen else chosen.get(hardware.datatype)
            if chosen is not None:
                entries[action] = Entry(float(chosen["pj"]), chosen["source"], chosen["confidence"])
    for action in ACTIONS:
        inline = getattr(energy, action)
        if inline is not None:
            entries[action] = Entry(inline.pj, inline.source, inline.confidence or "")
    return EnergyTable(energy.table or "inline", MappingProxyType(entries))


def _at_capacity(points: Sequence[Mapping[str, Any]], kib: float) -> Mapping[str, Any]:
    """The entry at a capacity: on the log-log line between its neighbours, that of the nearest beyond them."""
    if kib <= points[0]["kib"] or kib >= points[-1]["kib"]:
        return points[0] if kib <= points[0]["kib"] else points[-1]
    above = next(i for i, point in enumerate(points) if point["kib"] >= kib)
    low, high = points[above - 1], points[above]
    if kib == high["kib"]:
        return high
    along = math.log(kib / low["kib"]) / math.log(high["kib"] / low["kib"])
    known = max("derived", low["confidence"], high["confidence"], key=CONFIDENCE.index)
    return {
        "pj": low["pj"] * (high["pj"] / low["pj"]) ** along,
        "confidence": known,
        "source": f"for {kib:g} KiB, on a log-log line between ({low['source']}) and ({high['source']})",
    }


@dataclass(frozen=True)
class Executed:
    """How often a machine did what in a run.

    Attributes
    ----------
    operations : per stage, how many F, Bx, Bw and U.
    messages : per channel, how many forward and back.
    loads : samples that came from the host.
    cycles : of the run.
    """

    operations: tuple[tuple[int, int, int, int], ...]
    messages: tuple[tuple[int, int], ...]
    loads: int
    cycles: int


def pipelined(machine: Machine, samples: int, updates: int, cycles: int) -> Executed:
    """What a pipeline does: F, Bx, Bw and all messages once per sample, U once per update."""
    operations = ((samples, samples, samples, updates),) * machine.stages
    return Executed(operations, ((samples, samples),) * len(machine.channels), samples, cycles)


@dataclass(frozen=True)
class CoreActions:
    """How often one core did what (the module's table); bytes of its SRAM by whom they are for."""

    macs: int
    vector_ops: int
    operation_bytes: int
    message_bytes: int
    host_bytes: int
    link_byte_hops: int
    pe_cycles: int

    @property
    def counts(self) -> dict[str, int]:
        """Counts by action."""
        return {
            "mac": self.macs,
            "vector_op": self.vector_ops,
            "sram_byte": self.operation_bytes + self.message_bytes + self.host_bytes,
            "link_byte_hop": self.link_byte_hops,
            "host_byte": self.host_bytes,
            "leakage": self.pe_cycles,
        }


def count_actions(machine: Machine, executed: Executed) -> tuple[CoreActions, ...]:
    """Actions of every core."""
    message_bytes, byte_hops = [0] * machine.stages, [0] * machine.stages
    for channel, counts in zip(machine.channels, executed.messages, strict=True):
        for route, count in zip((channel.forward, channel.gradient), counts, strict=True):
            message_bytes[route.source] += count * route.size
            message_bytes[route.target] += count * route.size
            byte_hops[route.source] += count * route.size * route.steps
    cores = []
    for core, operations in zip(machine.cores, executed.operations, strict=True):
        done = list(zip(operations, core.cycles.operations, strict=True))
        cores.append(
            CoreActions(
                macs=sum(count * cost.macs for count, cost in done),
                vector_ops=sum(count * cost.vector_operations for count, cost in done),
                operation_bytes=sum(count * cost.sram_bytes for count, cost in done),
                message_bytes=message_bytes[core.stage],
                host_bytes=0 if core.stage else executed.loads * machine.host_bytes,
                link_byte_hops=byte_hops[core.stage],
                pe_cycles=core.pes * executed.cycles,
            )
        )
    return tuple(cores)


@dataclass(frozen=True)
class EnergyAccount:
    """The energy of a run: actions of every core, and what each costs."""

    table: EnergyTable
    cores: tuple[CoreActions, ...]

    def picojoules(self, core: int, action: str) -> float:
        """Energy of one action on one core."""
        return self.cores[core].counts[action] * self.table.pj(action)

    @property
    def joules_by_action(self) -> dict[str, float]:
        """Energy of every action, over all cores."""
        cores = range(len(self.cores))
        return {action: 1e-12 * math.fsum(self.picojoules(core, action) for core in cores) for action in ACTIONS}

    @property
    def joules(self) -> float:
        """Energy of the run."""
        return math.fsum(self.joules_by_action.values())

    @property
    def zero_actions(self) -> list[str]:
        """Actions that add nothing: without an entry, with one of 0 pJ, or that never happened."""
        return [action for action, joules in self.joules_by_action.items() if joules == 0]


def energy_account(machine: Machine, executed: Executed) -> EnergyAccount | None:
    """The energy of a run; None if the hardware file has no `[energy]` table."""
    table = energy_table(machine.hardware)
    return None if table is None else EnergyAccount(table, count_actions(machine, executed))
