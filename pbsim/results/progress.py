"""How far a run is, and how that is shown while it goes on."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_SECONDS = 10.0
SURE_FRACTION = 0.02
"""Of a run, before which nothing is said about the time left."""


@dataclass(frozen=True)
class Report:
    """How far a run is: for whoever shows its progress."""

    samples: int
    total: int
    cycles: int
    loss: float
    """Mean training loss of the latest samples; NaN before the first."""


def describe_progress(report: Report, samples_per_second: float) -> str:
    """Samples per second of real time, simulated cycles, loss."""
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


class SearchProgress:
    """What a search is at: one line that changes on a terminal, elsewhere a plain one now and then."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("preparing") if console.is_terminal else None
        self._last = time.monotonic()

    def __enter__(self) -> SearchProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, simulations: int, what: str) -> None:
        """Show how many simulations there were, and what the search is at."""
        line = f"{simulations:,} simulations, {what}"
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() - self._last >= LINE_EVERY_SECONDS:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)


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
        state = describe_progress(report, report.samples / elapsed)
        left = ""
        if report.samples >= report.total * SURE_FRACTION:  # before, a run that becomes periodic may end at any time
            left = f", {elapsed * (report.total - report.samples) / report.samples:.0f} s left"
        print(f"{report.samples:,} of {report.total:,} samples, {state}{left}", file=sys.stderr, flush=True)
