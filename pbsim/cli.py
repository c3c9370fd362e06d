"""The command line: the verbs of `pbsim.experiment` for a shell."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbsim.errors import Problem, UserError

if TYPE_CHECKING:
    from pbsim.config import Source
    from pbsim.results.progress import Report

app = typer.Typer(
    help="Simulate hardware on which every layer has its own core, while a real network trains on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: importing rich would be most of its time
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"pbsim {version('pbsim')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    hardware: Annotated[str, typer.Argument(metavar="HARDWARE", help="A hardware file, or the name of a shipped one.")],
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A workload file, or the name of a shipped one.")],
    method: Annotated[
        str, typer.Option(help="schedule[:batch][+mitigation[=value]]..., for example pb+lwpv+sc or sgd:32.")
    ] = "pb",
    samples: Annotated[int | None, typer.Option(help="Training samples of the run (instead of epochs).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of the run; by default the workload's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and augmentation. [default: 0]")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run directory. [default: runs/HARDWARE-WORKLOAD-METHOD-SEED, with _2, _3 ... if taken]"),
    ] = None,
    timing_only: Annotated[bool, typer.Option("--timing-only", help="Simulate the machine, train nothing.")] = False,
    backend: Annotated[str | None, typer.Option(help="numba or torch. [default: numba]")] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="Trace to keep: all, first:N samples, none. [default: all up to 5 M events]"),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the torch backend.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key of hardware, workload or run."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run directory that stands at --out.")] = False,
) -> None:
    """Simulate a machine while a network trains on it, and leave a run directory."""
    from pbsim.experiment import resolve, run_experiment
    from pbsim.results.terminal import print_run

    given = {
        "method": method, "samples": samples, "epochs": epochs, "seed": seed, "timing_only": timing_only or None,
        "backend": backend, "trace": trace, "threads": threads,
    }  # fmt: skip
    resolved = resolve(_sources(hardware, workload, given), tuple(set_ or ()))
    settings = resolved.settings
    name = _file_name(resolved.hardware.name, resolved.workload.name, settings.method, str(settings.seed))
    place = out or _free(Path("runs") / name, force)
    with _progress() as progress:
        finished = run_experiment(resolved, place, force=force, progress=progress)
    try:
        print_run(finished)
    except Stopped as stopped:
        stopped.left = f"the run is in {place}"
        raise


def _sources(hardware: str, workload: str, given: dict[str, Any]) -> dict[str, Source]:
    """Both files, and the settings that were given; raises `UserError` with the problems of both files."""
    from pbsim.config import Hardware, Source, Workload, read_source

    sources = {"run": Source({k: v for k, v in given.items() if v is not None}, "command line")}
    problems: list[Problem] = []
    for name, kind, file in (("hardware", Hardware, hardware), ("workload", Workload, workload)):
        try:
            sources[name] = read_source(kind, file)
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    return sources


def _free(place: Path, force: bool) -> Path:
    """The place itself, or with a number behind its name if it is taken and may not be replaced."""
    names = chain([place], (place.with_name(f"{place.name}_{number}") for number in count(2)))
    return next(name for name in names if force or not os.path.lexists(name))


def _file_name(*parts: str) -> str:
    """A name for a directory, made of parts that a user may have written anything into.

    A colon goes without a trace: it would not go through scp, or to Windows.
    """
    return re.sub(r"[^\w.+=@-]", "_", "-".join(parts).replace(":", "")).lstrip(".")[:200]


@app.command()
def credits(
    hardware: Annotated[str, typer.Argument(metavar="HARDWARE", help="A hardware file, or the name of a shipped one.")],
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="A workload file, or the name of a shipped one.")],
    method: Annotated[str, typer.Option(help="pb[+mitigation[=value]]...: what a stage holds depends on it.")] = "pb",
    tolerance: Annotated[
        float, typer.Option(help="By which share the cycles per sample may grow; 0.02 gives up 2 % for shorter delays.")
    ] = 0.0,
    event_limit: Annotated[
        int | None, typer.Option(help="Simulated events after which the search ends. [default: 100 million]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key of hardware, workload or run."),
    ] = None,
) -> None:
    """Search the fewest credits per stage that keep the throughput, and print what delay other choices cost."""
    from rich.console import Console

    from pbsim.experiment import resolve, search_credits
    from pbsim.results.progress import SearchProgress
    from pbsim.results.terminal import print_credits

    sources = _sources(hardware, workload, {"method": method, "timing_only": True})
    resolved = resolve(sources, tuple(set_ or ()))
    with SearchProgress(Console(stderr=True)) as progress:
        found = search_credits(resolved, tolerance, event_limit, progress=progress.update)
    print_credits(found, f"{resolved.workload.name} on {resolved.hardware.name}, {resolved.settings.method}")


@app.command()
def check(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Hardware and workload files, or names of shipped ones.")
    ],
) -> None:
    """Check files: print every problem of each, or what was found to be in order."""
    from pbsim.experiment import check_file

    problems: list[Problem] = []
    for name in files:
        try:
            for line in check_file(name):
                typer.echo(f"{name}: {line}")
        except UserError as error:
            problems.extend(error.problems)
    if problems:
        raise UserError(problems)
    typer.echo(
        "not checked: whether the network is supported, fits its data and fits on the machine: "
        "pbsim run HARDWARE WORKLOAD --timing-only --samples 1"
    )


@app.command("list")
def list_() -> None:
    """List shipped hardware and workloads, schedules and mitigations."""
    from pbsim.config import MITIGATIONS, SCHEDULES, Hardware, Workload, shipped
    from pbsim.config.files import first_comment

    for title, kind in (("hardware", Hardware), ("workloads", Workload)):
        typer.echo(title)
        for name, path in shipped(kind).items():
            typer.echo(f"  {name:<18} {first_comment(path)}")
    for title, table in (("schedules", SCHEDULES), ("mitigations", MITIGATIONS)):
        typer.echo(title)
        for name, meaning in table.items():
            typer.echo(f"  {name:<18} {meaning}")


@contextmanager
def _progress() -> Iterator[Callable[[Report], None]]:
    """A progress bar on a terminal; elsewhere a plain line now and then."""
    from rich.console import Console

    from pbsim.results.progress import BarProgress, LineProgress

    console = Console(stderr=True)
    shown: Any = BarProgress(console) if console.is_terminal else LineProgress()
    with shown:
        yield shown.update


class Stopped(BaseException):
    """A signal asks the program to end; it leaves by this, so that everything on the way tidies up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.left = "no run was written"


STOP_SIGNALS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
TIDYING_SECONDS = 2.0


@contextmanager
def _stoppable() -> Iterator[None]:
    """Within the block a signal to stop raises `Stopped`; those that follow closely do not disturb the tidying up."""
    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    last = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        since, last = time.monotonic() - last, time.monotonic()
        if since > TIDYING_SECONDS:
            raise Stopped(number)

    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):  # as `nohup` and a shell's background jobs have it
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def main() -> None:
    """Entry point: what a user did wrong is printed, without a traceback, with exit status 2."""
    try:
        with _stoppable():
            app(standalone_mode=True)
    except UserError as error:
        for problem in error.problems:
            typer.echo(f"pbsim: {problem}", err=True)
        sys.exit(2)
    except Stopped as stopped:
        typer.echo(f"pbsim: {STOP_SIGNALS[signal.Signals(stopped.number).name]}; {stopped.left}", err=True)
        sys.exit(128 + stopped.number)


if __name__ == "__main__":
    main()
