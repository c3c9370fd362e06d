"""When every operation happens: SimPy processes of the machine, and the trace they leave."""

from pbsim.schedule.batches import Batches
from pbsim.schedule.pipeline import row_count, run_pipeline
from pbsim.schedule.timing import DeadlockError, Timing, UnitCycles
from pbsim.schedule.trace import Chunk, Op, Trace

__all__ = ["Batches", "Chunk", "DeadlockError", "Op", "Timing", "Trace", "UnitCycles", "row_count", "run_pipeline"]
