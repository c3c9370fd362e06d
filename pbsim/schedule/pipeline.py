"""Run the timing plane: choose the timing that the hardware file asks for, and stream its trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pbsim.hardware.machine import Machine
from pbsim.schedule.batches import Batches
from pbsim.schedule.dataflow import DataflowPipeline, Order
from pbsim.schedule.lockstep import LockstepPipeline
from pbsim.schedule.timing import Clock, Recorder, Timing
from pbsim.schedule.trace import Chunk

CHUNK_ROWS = 50_000


def run_pipeline(
    machine: Machine, batches: Batches, chunk_rows: int = CHUNK_ROWS, orders: Sequence[Order] | None = None
) -> tuple[Timing, Iterator[Chunk]]:
    """Simulate the machine on the samples of a run.

    Parameters
    ----------
    orders : per stage what it runs, made by hand (dataflow only); by default each stage chooses for itself.

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
    recorder = Recorder(Clock(), chunk_rows)
    model: DataflowPipeline | LockstepPipeline
    if machine.hardware.pipeline.timing == "lockstep":
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
