"""The tables of a run, from the timing plane's books, and the scalars of its summary."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from pbsim.hardware import Machine
from pbsim.hardware.core import OPERATIONS
from pbsim.hardware.datapaths import DATAPATHS
from pbsim.hardware.energy import ACTIONS, EnergyAccount
from pbsim.hardware.memory import Category
from pbsim.network.network import Network
from pbsim.schedule import Timing

Rows = list[dict[str, Any]]
NAMED_MESSAGES = 4
"""So many of the messages on a link are named."""


def stage_rows(network: Network, timing: Timing) -> Rows:
    """Rows of `stages.parquet`."""
    rows = []
    for stage, core, (mean, least, most) in zip(
        network.stages, timing.machine.cores, timing.delays.table(), strict=True
    ):
        rows.append(
            {
                "stage": stage.index,
                "name": stage.name,
                "operators": [operator.kind for operator in stage.operators],
                "parameters": list(stage.parameters),
                "core": core.stage,
                "pes": core.pes,
                "macs_forward": stage.work.macs_forward,
                "macs_input_gradient": stage.work.macs_input_gradient,
                "macs_weight_gradient": stage.work.macs_weight_gradient,
                "cycles_forward": core.cycles.forward.total,
                "cycles_input_gradient": core.cycles.input_gradient.total,
                "cycles_weight_gradient": core.cycles.weight_gradient.total,
                "cycles_update": core.cycles.update.total,
                "delay_nominal": 0 if timing.batches.drained else 2 * (len(network.stages) - 1 - stage.index),
                "delay_mean": mean,
                "delay_min": least,
                "delay_max": most,
            }
        )
    return rows


def operation_rows(timing: Timing) -> Rows:
    """Rows of `operations.parquet`."""
    core_table, rows = timing.machine.hardware.core, []
    for core in timing.machine.cores:
        peak = DATAPATHS[core_table.datapath.kind].peak_macs_per_cycle(core_table, core.pes)
        for name, cost in zip(OPERATIONS, core.cycles.operations, strict=True):
            possible = cost.cycles.compute * peak
            rows.append(
                {
                    "stage": core.stage,
                    "op": name,
                    **asdict(cost.cycles),
                    "total": cost.total,
                    "bound": cost.bound,
                    "macs": cost.macs,
                    "vector_operations": cost.vector_operations,
                    "sram_bytes": cost.sram_bytes,
                    "mapping_efficiency": cost.macs / possible if cost.macs and possible else float("nan"),
                }
            )
    return rows


def core_rows(timing: Timing) -> Rows:
    """Rows of `cores.parquet`."""
    return [{**asdict(usage), "total": usage.total} for usage in timing.units]


def memory_rows(timing: Timing) -> Rows:
    """Rows of `memory.parquet`."""
    rows = []
    for core in timing.machine.cores:
        ledger, s = timing.ledger, core.stage
        peaks = {category.label: (ledger.peak[s][category], ledger.peak_cycle[s][category]) for category in Category}
        peaks["total"] = (ledger.core_peak[s], ledger.core_peak_cycle[s])
        rows += [
            {
                "core": core.stage,
                "category": label,
                "peak_bytes": peak,
                "peak_cycle": cycle,
                "capacity_bytes": core.memory.capacity,
            }
            for label, (peak, cycle) in peaks.items()
        ]
    return rows


def node_rows(machine: Machine) -> Rows:
    """Rows of `nodes.parquet`."""
    return [
        {"node": node, "stage": node if node < machine.stages else -1, **asdict(region)}
        for node, region in enumerate(machine.nodes)
    ]


def link_rows(timing: Timing) -> Rows:
    """Rows of `links.parquet`."""
    rows = []
    for link, (size, busy) in enumerate(zip(timing.links.bytes, timing.links.busy_cycles, strict=True)):
        source, target = timing.links.ends[link]
        rows.append(
            {
                "source": source,
                "target": target,
                "bytes": size,
                "busy_cycles": busy,
                "utilization": busy / timing.cycles,
                "wires": timing.machine.link_wires[link],
            }
        )
    return rows


def energy_rows(account: EnergyAccount | None) -> Rows:
    """Rows of `energy.parquet`."""
    if account is None:
        return []
    rows = []
    for core, actions in enumerate(account.cores):
        for action in ACTIONS:
            entry = account.table.entries.get(action)
            rows.append(
                {
                    "core": core,
                    "action": action,
                    "count": actions.counts[action],
                    "picojoules": account.picojoules(core, action),
                    "picojoules_each": float("nan") if entry is None else entry.pj,
                    "source": "" if entry is None else entry.source,
                    "confidence": "" if entry is None else entry.confidence,
                }
            )
    return rows


def energy_summary(account: EnergyAccount | None) -> dict[str, Any]:
    """What `summary.json` says of energy; null where the hardware file has no energy table."""
    return {
        "energy_joules": None if account is None else account.joules,
        "energy_table": None if account is None else account.table.name,
        "energy_joules_by_action": None if account is None else account.joules_by_action,
        "energy_zero_actions": None if account is None else account.zero_actions,
    }


def utilization(timing: Timing) -> float:
    """Busy unit-cycles over all unit-cycles of the run: every core counts once, however many PEs it has."""
    return sum(usage.busy for usage in timing.units) / (timing.cycles * len(timing.units))


def mac_utilization(timing: Timing) -> float | None:
    """MACs of the run over what all PEs of the cores could do at peak in its cycles; None where there is no peak.

    Split units have the datapath twice.
    """
    machine, peak = timing.machine, 0
    core_table = machine.hardware.core
    datapath = DATAPATHS[core_table.datapath.kind]
    for core in machine.cores:
        peak += datapath.peak_macs_per_cycle(core_table, core.pes) * (2 if machine.split else 1)
    macs = sum(cost.macs for core in machine.cores for cost in core.cycles.operations)
    return timing.samples * macs / (peak * timing.cycles) if peak else None


def notes(timing: Timing) -> list[str]:
    """What to know of a run's figures: whether it was long enough for them to be those of a full pipeline."""
    delay = 0 if timing.batches.drained else 2 * (timing.machine.stages - 1)
    if timing.samples >= 2 * delay:
        return []
    return [
        f"{timing.samples} samples mostly fill and drain the pipeline, whose first stage has a nominal delay of "
        f"{delay} updates: take at least {2 * delay} for figures of a full one"
    ]


def bottleneck(timing: Timing) -> tuple[int, str]:
    """The busiest core's stage, and in words the busiest resource of all: a core, a link or the host."""
    busiest = max(timing.units, key=lambda usage: usage.busy)
    core = timing.machine.cores[busiest.core]
    unit = "" if busiest.unit == "shared" else f" ({busiest.unit} unit)"
    found = [(busiest.busy, f"core of stage {core.stage} {core.name!r}{unit}")]
    if timing.links.busy_cycles:
        link = max(range(len(timing.links.busy_cycles)), key=timing.links.busy_cycles.__getitem__)
        found.append((timing.links.busy_cycles[link], link_name(timing.machine, link)))
    found.append((timing.samples * timing.machine.host_cycles, "host"))
    busy, name = max(found, key=lambda item: item[0])
    return core.stage, f"{name}, busy {busy / timing.cycles:.1%} of the run"


def link_name(machine: Machine, link: int) -> str:
    """A link in words: its ends, its width, and whose messages take it."""
    source, target = (_node_name(machine, node) for node in machine.link_ends[link])
    wires = machine.link_wires[link]
    routes = (route for channel in machine.channels for route in (channel.forward, channel.gradient))
    messages = [f"{route.source}>{route.target}" for route in routes if link in route.links]
    more = f" and {len(messages) - NAMED_MESSAGES} more" if len(messages) > NAMED_MESSAGES else ""
    carried = f"messages {', '.join(messages[:NAMED_MESSAGES])}{more}"
    return f"link from {source} to {target} ({wires} wire{'s' * (wires > 1)}, {carried})"


def _node_name(machine: Machine, node: int) -> str:
    return f"core {node}" if node < machine.stages else f"spare node {node} at {machine.nodes[node]}"


def overflows(timing: Timing) -> list[int]:
    """Cores whose memory has outgrown their SRAM."""
    peaks = zip(timing.machine.cores, timing.ledger.core_peak, strict=True)
    return [core.stage for core, peak in peaks if peak > core.memory.capacity]


def timing_summary(timing: Timing) -> dict[str, Any]:
    """The scalars of `summary.json` that the timing plane knows."""
    seconds = timing.cycles / (timing.machine.hardware.clock_ghz * 1e9)
    stage, name = bottleneck(timing)
    interval = timing.machine.interval
    return {
        "samples": timing.samples,
        "cycles": timing.cycles,
        "seconds": seconds,
        "samples_per_second": timing.samples / seconds,
        "utilization": utilization(timing),
        "mac_utilization": mac_utilization(timing),
        "bottleneck_stage": stage,
        "bottleneck": name,
        "initiation_interval_cycles": interval.cycles,
        "initiation_interval_stage": interval.stage,
        "initiation_interval_with_one_more_pe_cycles": interval.with_one_more_pe,
        "step_cycles": timing.step_cycles,
        "steady_state": asdict(timing.steady_state) if timing.steady_state else None,
        "estimate": asdict(timing.estimate) if timing.estimate else None,
        "peak_memory_bytes": timing.ledger.machine_peak,
        "overflowing_cores": overflows(timing),
        "sram_shortfall_bytes": timing.machine.sram_shortfall_bytes,
        "noc_bytes": sum(timing.links.bytes),
    }


def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    packages = ("pbsim", "numpy", "numba", "torch")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
