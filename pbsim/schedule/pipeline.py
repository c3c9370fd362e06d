"""Run the timing plane: choose the timing that the hardware file asks for, and stream its trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pbsim.hardware.machine import Machine
from pbsim.schedule.batches import Batches
from pbsim.schedule.dataflow import DataflowPipeline, Order
from pbsim.schedule.lockstep import LockstepPipeline
from pbsim.schedule.lockstep_long import LongLockstep
from pbsim.schedule.steady import CompiledRun
from pbsim.schedule.timing import Clock, Recorder, Timing
from pbsim.schedule.trace import Chunk

CHUNK_ROWS = 50_000
SIMPY_ROWS = 100_000
"""Runs of up to so many rows go through the SimPy model, longer ones through the compiled engine of the same rules."""

Engine = Literal["auto", "simpy", "compiled"]


def run_pipeline(
    machine: Machine,
    batches: Batches,
    chunk_rows: int = CHUNK_ROWS,
    *,
    engine: Engine = "auto",
    kept: int | None = None,
    skip: bool = True,
    orders: Sequence[Order] | None = None,
) -> tuple[Timing, Iterator[Chunk]]:
    """Simulate the machine on the samples of a run.

    Parameters
    ----------
    engine : `simpy`, the model that defines the timing; `compiled`, the same rules event for event (in lockstep: fewer
        steps, and arithmetic); `auto` chooses by the length of the run.
    kept : how many samples the trace is wanted of; None: of all. Rows beyond may be left out.
    skip : whether a periodic regime may be continued by arithmetic.
    orders : per stage what it runs, made by hand (dataflow on the SimPy model only).

    Returns
    -------
    timing : the results; complete once the chunks have been consumed.
    chunks : the trace, in pieces, as the simulation proceeds.

    Raises
    ------
    DeadlockError : from the chunks, if the machine stops before every sample is done.
    UserError : from the chunks, if lockstep needs more memory than there is and this is enforced.
    """
    timing = Timing(machine, batches)
    short = row_count(machine, batches) <= SIMPY_ROWS
    lockstep = machine.hardware.pipeline.timing == "lockstep"
    if orders is None and (engine == "compiled" or (engine == "auto" and not short)):
        if not lockstep:
            return timing, CompiledRun(machine, timing, chunk_rows, kept=kept, skip=skip).chunks()
        if skip:
            return timing, LongLockstep(machine, timing, chunk_rows, kept=kept).chunks()
    recorder = Recorder(Clock(), timing, chunk_rows)
    model: DataflowPipeline | LockstepPipeline
    if lockstep:
        model = LockstepPipeline(machine, timing, recorder)
    else:
        model = DataflowPipeline(machine, timing, recorder, orders)

    def chunks() -> Iterator[Chunk]:
        yield from recorder.chunks()
        model.close()

    return timing, chunks()


def row_count(machine: Machine, batches: Batches) -> int:
    """How many rows the trace of a run has: F, Bx, Bw per stage, two messages per channel, a load; U per batch."""
    per_sample = 3 * machine.stages + 2 * len(machine.channels) + 1
    return batches.samples * per_sample + batches.count * machine.stages
