"""What a run says on a terminal at its end: a table, and where everything is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pbsim.results.figures import stage_label
from pbsim.results.place import FIGURE
from pbsim.results.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from pbsim.schedule.credits import CreditSearch


def print_run(run: Run, console: Console | None = None) -> None:
    """Print the table of a run, and where its directory and figure are."""
    console = console or Console(soft_wrap=True)
    table = Table(title=Text(_title(run), style="bold"), title_justify="left", show_header=False)
    for name, value in rows(run):
        table.add_row(Text(name), Text(value))  # as it stands: to rich, brackets in a string are markup
    console.print(table)
    console.print(f"run directory  {run.path}", highlight=False, markup=False)
    console.print(f"figure         {run.path / FIGURE}", highlight=False, markup=False)


def _title(run: Run) -> str:
    return f"{run.config['workload']['name']} on {run.config['hardware']['name']}, {run.summary['method']}"


def rows(run: Run) -> list[tuple[str, str]]:
    """Name and value of every line of the table."""
    s, clock = run.summary, run.config["hardware"]["clock_ghz"]
    lines = [("status", s["status"])]
    if not s["timing_only"]:
        undefined = "not defined for regression" if s["status"] == "finished" else "not finite"
        accuracy = undefined if s["accuracy"] is None else f"{s['accuracy']:.2%}"
        lines += [("test accuracy", accuracy), ("test loss", _number(s["loss"]))]
    bounds = ", ".join(f"{name} {cycles:,}" for name, cycles in s["bounds_cycles"].items())
    stages = run.stages.sort_values("stage")
    lines += [
        ("samples", f"{s['samples']:,}"),
        ("cycles", f"{s['cycles']:,}"),
        *_continued(s),
        ("lower bounds (cycles)", bounds),
        ("simulated time", f"{s['seconds']:.6g} s at {clock} GHz"),
        ("throughput", f"{s['samples_per_second']:,.0f} samples per simulated second"),
        ("utilization", _utilization(s)),
        ("bottleneck", s["bottleneck"]),
        ("initiation interval", _interval(s, stages.iloc[s["initiation_interval_stage"]])),
        ("peak memory", _memory(run)),
        ("fabric traffic", f"{s['noc_bytes']:,} bytes, counted on every link that they cross"),
        *_energy(run),
    ]
    if s["trace_samples"] < s["samples"]:
        lines.append(("trace kept", f"of the first {s['trace_samples']:,} samples (--trace all keeps everything)"))
    lines += [("note", note) for note in s["notes"]]
    last = len(stages) - 1
    for label, stage in dict.fromkeys([("first", 0), ("middle", last // 2), ("last", last)]):
        row = stages.iloc[stage]
        spread = f"{row['delay_min']} to {row['delay_max']}; nominal {row['delay_nominal']}"
        value = f"{row['delay_mean']:.2f} updates ({spread})  stage {stage} {stage_label(row)}"
        lines.append((f"delay of {label} stage", value))
    return lines


def _continued(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How long a step of lockstep is, and how a long run was continued without events, if it was."""
    lines = []
    if summary["step_cycles"] is not None:
        lines.append(("lockstep", f"a step of all cores takes {summary['step_cycles']:,} cycles"))
    if steady := summary["steady_state"]:
        period = f"{steady['period_samples']:,} sample{'s' * (steady['period_samples'] != 1)}"
        regime = f"periodic from sample {steady['from_sample']:,}: {period} in {steady['period_cycles']:,} cycles"
        skipped = f"timing of {steady['skipped_samples']:,} samples not simulated one by one"
        lines.append(("steady state", f"{regime}, {skipped}"))
    if estimate := summary["estimate"]:
        least, most = (estimate[f"cycles_per_sample_{name}"] for name in ("least", "most"))
        spread = f"cycles per sample between {least:,.2f} and {most:,.2f} over {estimate['windows']} windows"
        lines.append(("ESTIMATE", f"no repetition within the budget of events; {spread}"))
    return lines


def _utilization(summary: dict[str, Any]) -> str:
    """How much of the time cores work, and how much of what they could do they do."""
    cores, macs = f"cores busy {summary['utilization']:.1%}", summary["mac_utilization"]
    return cores if macs is None else f"{cores}, {macs:.1%} of their PEs' peak MACs"


def _memory(run: Run) -> str:
    """The peak of all cores together beside their SRAM, and which of them overflow."""
    s, peaks = run.summary, run.memory[run.memory["category"] == "total"].set_index("core")
    held = f"{s['peak_memory_bytes']:,} bytes on all cores together, which have {peaks['capacity_bytes'].sum():,}"
    parts = [held]
    if overflowing := s["overflowing_cores"]:
        worst = max(overflowing, key=lambda core: peaks["peak_bytes"][core] / peaks["capacity_bytes"][core])
        need, have = (peaks[f"{key}_bytes"][worst] / 1024 for key in ("peak", "capacity"))
        cores = f"over SRAM on {len(overflowing)} of {len(peaks)} cores"
        parts.append(f"{cores}, worst core {worst}: {need:,.5g} of {have:,.5g} KiB")
    if s["sram_shortfall_bytes"]:
        parts.append(f"the mesh lacks {s['sram_shortfall_bytes']:,} bytes of SRAM: PEs were shared out by work alone")
    return "; ".join(parts)


def _energy(run: Run) -> list[tuple[str, str]]:
    """Energy with its largest contributors, and the actions that add none, with the reason."""
    s = run.summary
    if s["energy_joules"] is None:
        return [("energy", "not counted: the hardware file has no [energy] table")]
    lines = [("energy", f"{s['energy_joules']:.4g} J by {s['energy_table']}")]
    if s["energy_joules"]:
        by_action = sorted(s["energy_joules_by_action"].items(), key=lambda item: -item[1])
        shares = [f"{action} {joules / s['energy_joules']:.1%}" for action, joules in by_action if joules]
        by_core = run.energy.groupby("core")["picojoules"].sum()
        core = by_core.index.to_list()[int(by_core.to_numpy().argmax())]
        name = run.stages.set_index("core")["name"][core]
        most = f"most on core {core} {name!r}, {by_core.max() / by_core.sum():.1%}"
        lines.append(("energy goes to", f"{', '.join(shares)}; {most}"))
    zero = [f"{action} ({_why_zero(run, action)})" for action in s["energy_zero_actions"]]
    return [*lines, ("energy counts as 0", ", ".join(zero))] if zero else lines


def _why_zero(run: Run, action: str) -> str:
    """Why an action adds no energy."""
    rows = run.energy[run.energy["action"] == action]
    if rows["picojoules_each"].isna().any():
        return "no entry"
    return "0 pJ" if rows["count"].sum() else "did not happen"


def _interval(summary: dict[str, Any], stage: pd.Series[Any]) -> str:
    """The cores' pace, the stage that sets it, and what one more PE there would buy."""
    cycles, better = (summary[f"initiation_interval_{key}"] for key in ("cycles", "with_one_more_pe_cycles"))
    gain = f"{better:,} with one more PE there" if better < cycles else "one more PE there would not shorten it"
    pes = f"{stage['pes']:,} PE{'' if stage['pes'] == 1 else 's'}"
    return f"{cycles:,} cycles: stage {stage['stage']} {stage['name']!r} on {pes}; {gain}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def print_credits(search: CreditSearch, title: str, console: Console | None = None) -> None:
    """Print what a search of credits has found: choices side by side, how sure it is, and a line for the file."""
    console = console or Console(soft_wrap=True)
    console.print(Text(f"credits of {title}", style="bold"))
    for line in [*_aligned(choice_rows(search)), *credit_lines(search)]:
        console.print(Text(line))


def choice_rows(search: CreditSearch) -> list[list[str]]:
    """The table of choices, with its heading."""
    last = len(search.minimum.credits) - 1
    places = list(dict.fromkeys([0, last // 2, last]))
    stages = [f"stage {stage}" for stage in places]
    rows = [["", "credits", "cycles/sample", "throughput", "mean delay", *stages, "stash bytes"]]
    for name, choice in search.choices.items():
        throughput = f"{'' if choice.exact else '~'}{search.relative_throughput(choice):.2%}"
        delays = [choice.delay_mean, *(choice.delays[stage] for stage in places)] if choice.delays else []
        cells = [f"{delay:.2f}" for delay in delays] or ["-"] * (1 + len(places))
        rows.append([name, f"{sum(choice.credits):,}", choice.pace, throughput, *cells, f"{choice.stash_bytes:,}"])
    return rows


def _aligned(rows: list[list[str]]) -> list[str]:
    """Lines of columns: the first to the left, numbers to the right, as wide as they need be on any terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


_WHY = {
    "one": "a stage needs one",
    "round trip": "the round trip alone needs them",
    "simulated": "simulated: slower",
    "estimated": "simulated: slower, as an estimate",
    "open": "not known",
}


def credit_lines(search: CreditSearch) -> list[str]:
    """What stands below the table of choices."""
    counts = [(search.why.count(why), meaning) for why, meaning in _WHY.items()]
    allowed = f"; {search.tolerance:.2%} more is allowed" if search.tolerance else ""
    needed = f"the busiest unit, link or host needs {search.bound_cycles:,}{allowed}"
    lines = [
        "delays are means over samples, in updates; ~ marks estimates, where the machine's state did not come back",
        f"reference: {search.reference.pace} cycles per sample; {needed}",
        "one credit less is too few, by stages: " + "; ".join(f"{n} {meaning}" for n, meaning in counts if n),
        f"{search.simulations:,} simulations, {search.events:,} events",
        *(f"note: {note}" for note in search.notes),
    ]
    return [*lines, f"credits = {search.credits}"]
