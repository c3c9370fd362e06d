"""Run the timing plane: choose the timing that the hardware file asks for, and stream its trace."""

from __future__ import annotations

from collections.abc import Iterator

from pbsim.hardware.machine import Machine
from pbsim.schedule.dataflow import DataflowPipeline
from pbsim.schedule.lockstep import LockstepPipeline
from pbsim.schedule.timing import Clock, Recorder, Timing
from pbsim.schedule.trace import Chunk

TIMINGS: dict[str, type[DataflowPipeline] | type[LockstepPipeline]] = {
    "dataflow": DataflowPipeline,
    "lockstep": LockstepPipeline,
}
CHUNK_ROWS = 50_000


def run_pipeline(machine: Machine, samples: int, chunk_rows: int = CHUNK_ROWS) -> tuple[Timing, Iterator[Chunk]]:
    """Simulate pipelined backpropagation of `samples` samples.

    Returns
    -------
    timing : the results; complete once the chunks have been consumed.
    chunks : the trace, in pieces, as the simulation proceeds.

    Raises
    ------
    DeadlockError : from the chunks, if the machine stops before every sample is done.
    """
    timing = Timing(machine, samples)
    recorder = Recorder(Clock(), chunk_rows)
    model: DataflowPipeline | LockstepPipeline = TIMINGS[machine.hardware.pipeline.timing](machine, timing, recorder)

    def chunks() -> Iterator[Chunk]:
        yield from recorder.chunks()
        model.close()

    return timing, chunks()


def row_count(machine: Machine, samples: int) -> int:
    """How many rows the trace of a run has: F, Bx, Bw, U per stage, two messages per channel, a load."""
    return samples * (4 * machine.stages + 2 * len(machine.channels) + 1)
