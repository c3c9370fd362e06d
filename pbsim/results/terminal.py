"""What a run says on a terminal: progress while it goes on, a table at its end."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pbsim.results.place import FIGURE
from pbsim.results.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from pbsim.experiment import Report

LINE_EVERY_SECONDS = 10.0


def describe_progress(report: Report, samples_per_second: float) -> str:
    """Samples per second of the simulation itself, simulated cycles, loss."""
    loss = "" if math.isnan(report.loss) else f", loss {report.loss:.4f}"
    return f"{samples_per_second:,.0f} samples/s, {report.cycles:,} cycles{loss}"


class BarProgress:
    """A progress bar."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(), console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, state="preparing")
        self._since: float | None = None

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, report: Report) -> None:
        """Show how far the run is."""
        self._since = self._since or time.monotonic()
        rate = report.samples / max(1e-9, time.monotonic() - self._since)
        state = describe_progress(report, rate)
        self._bar.update(self._task, completed=report.samples, total=report.total, state=state)


class LineProgress:
    """Plain lines, for logs."""

    def __init__(self) -> None:
        self._since = self._last = time.monotonic()

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, report: Report) -> None:
        """Print how far the run is, every so often."""
        now = time.monotonic()
        if now - self._last < LINE_EVERY_SECONDS:
            return
        self._last = now
        elapsed = now - self._since
        left = elapsed * (report.total - report.samples) / report.samples if report.samples else math.nan
        state = describe_progress(report, report.samples / elapsed)
        print(
            f"{report.samples:,} of {report.total:,} samples, {state}, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def print_run(run: Run, console: Console | None = None) -> None:
    """Print the table of a run, and where its directory and figure are."""
    console = console or Console(soft_wrap=True)
    table = Table(title=_title(run), title_justify="left", show_header=False, title_style="bold")
    for name, value in rows(run):
        table.add_row(name, value)
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
    overflowing = s["overflowing_cores"]
    memory = f"{s['peak_memory_bytes']:,} bytes"
    if overflowing:
        memory += f"; over the SRAM of core{'s' * (len(overflowing) > 1)} {', '.join(map(str, overflowing))}"
    if s["sram_shortfall_bytes"]:
        memory += f"; the mesh lacks {s['sram_shortfall_bytes']:,} bytes of SRAM: PEs were shared out by work alone"
    stages = run.stages.sort_values("stage")
    lines += [
        ("samples", f"{s['samples']:,}"),
        ("cycles", f"{s['cycles']:,}"),
        ("lower bounds (cycles)", bounds),
        ("simulated time", f"{s['seconds']:.6g} s at {clock} GHz"),
        ("samples per second", f"{s['samples_per_second']:,.0f}"),
        ("utilization", f"{s['utilization']:.1%}"),
        ("bottleneck", s["bottleneck"]),
        ("initiation interval", _interval(s, stages.iloc[s["initiation_interval_stage"]])),
        ("peak memory", memory),
        ("fabric traffic", f"{s['noc_bytes']:,} bytes"),
        *_energy(run),
    ]
    if s["trace_samples"] < s["samples"]:
        lines.append(("trace kept", f"of the first {s['trace_samples']:,} samples (--trace all keeps everything)"))
    lines += [("note", note) for note in s["notes"]]
    last = len(stages) - 1
    for label, stage in dict.fromkeys([("first", 0), ("middle", last // 2), ("last", last)]):
        row = stages.iloc[stage]
        value = f"{row['delay_mean']:.2f} ({row['delay_min']} to {row['delay_max']}; nominal {row['delay_nominal']})"
        lines.append((f"delay of {label} stage", f"{value}  stage {stage} {row['name']}"))
    return lines


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
