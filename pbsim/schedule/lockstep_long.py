"""Long runs in lockstep, which is periodic from the start: a few steps on the SimPy model, the rest by arithmetic.

Every further step does what the last full one does (every further batch, where batches are drained), so that the books
follow from the number of samples and of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pbsim.hardware.machine import Machine, MachineCore
from pbsim.schedule.batches import shortened, whole_batches
from pbsim.schedule.lockstep import LockstepPipeline
from pbsim.schedule.timing import Clock, Recorder, SteadyState, Timing
from pbsim.schedule.trace import Chunk, Shift


class LongLockstep:
    """A long run in lockstep, which is periodic from the start; `chunks()` runs it.

    A shorter run goes through the SimPy model: long enough for a full step, or for full batches. Rows of further
    samples, where they are wanted, are those of the full step, repeated.
    """

    def __init__(self, machine: Machine, timing: Timing, chunk_rows: int, *, kept: int | None) -> None:
        self.machine, self.timing, self.chunk_rows = machine, timing, chunk_rows
        self.kept = whole_batches(timing.batches, kept)
        # a step in which, and before which, all stages work; stashed versions become those of full steps later
        self.full_step = (4 if machine.stash_weights else 2) * machine.stages
        batches = timing.batches
        if batches.drained:
            shorter = shortened(batches, batches.samples if self.kept is None else self.kept)
            self.shorter = batches if shorter is None else shorter.batches
        else:
            self.shorter = replace(batches, samples=min(batches.samples, self.full_step + 2))

    def chunks(self) -> Iterator[Chunk]:
        """Run to the end, handing out the trace in pieces."""
        short = Timing(self.machine, self.shorter)
        model = LockstepPipeline(self.machine, short, Recorder(Clock(), short, self.chunk_rows))
        missing = self.timing.samples - self.shorter.samples
        if missing and not self.shorter.drained:
            yield from self._repeated(model, missing)
        else:  # only the rows that are wanted are sure to be those of the long run
            for chunk in model.recorder.chunks():
                wanted = chunk.rows.sample < (self.timing.samples if self.kept is None else self.kept)
                yield Chunk(chunk.rows[wanted], chunk.until)
        model.close()
        self._fill_timing(short, LockstepPipeline.steps_of(self.machine, self.timing.batches))
        self.timing.all_rows = not missing or self.kept is None
        if missing:
            period = self.shorter.size
            steps = 1 if not self.shorter.drained else period + 2 * self.machine.stages - 2
            cycles = steps * model.step_cycles
            self.timing.steady_state = SteadyState(self.shorter.samples - period, period, cycles, missing)

    def _repeated(self, model: LockstepPipeline, missing: int) -> Iterator[Chunk]:
        """The rows of the shorter run, with those of a full step again and again for the missing samples."""
        length = model.step_cycles
        begin = self.full_step * length
        rows = np.concatenate([chunk.rows.rows for chunk in model.recorder.chunks()])
        before = rows[:, 0] < begin
        within = ~before & (rows[:, 0] < begin + length)
        step, pattern = Shift(length, 1, 1), rows[within]
        yield Chunk.of(rows[before], begin)
        block = max(1, self.chunk_rows // len(pattern))
        repeats = missing + 1 if self.kept is None else min(missing + 1, self.kept + 1)
        for first in range(0, repeats, block):
            copies = range(first, min(first + block, repeats))
            pieces = [(step * copy).of(pattern) for copy in copies]
            yield Chunk.of(np.concatenate(pieces), begin + copies[-1] * length + length)
        if repeats <= missing:
            return
        rest = (step * missing).of(rows[~before & ~within])
        yield Chunk.of(rest, int(rest[:, 1].max()) + 1)

    def _fill_timing(self, short: Timing, steps: int) -> None:
        """Write the books of the long run: waiting before the first and after the last operation stays what it is."""
        timing, batches = self.timing, self.timing.batches
        assert short.step_cycles is not None
        timing.step_cycles, timing.cycles = short.step_cycles, steps * short.step_cycles
        for core, usage, seen in zip(self._cores(), timing.units, short.units, strict=True):
            cycles = core.cycles
            if seen.forward:
                usage.forward = batches.samples * cycles.forward.total
            if usage.unit != "forward":
                usage.input_gradient = batches.samples * cycles.input_gradient.total
                usage.weight_gradient = batches.samples * cycles.weight_gradient.total
                usage.update = batches.count * cycles.update.total
            usage.idle = seen.idle
            usage.stall_input = timing.cycles - usage.busy - usage.idle
        for channel in self.machine.channels:
            for route in (channel.forward, channel.gradient):
                for link in route.links:
                    timing.links.bytes[link] += batches.samples * route.size
                    timing.links.busy_cycles[link] += batches.samples * route.serialisation
        timing.ledger, timing.peak_in_flight = short.ledger, short.peak_in_flight
        self._fill_delays(short)

    def _cores(self) -> list[MachineCore]:
        return [core for core in self.machine.cores for _ in range(2 if self.machine.split else 1)]

    def _fill_delays(self, short: Timing) -> None:
        """Every further sample has the delay of the shorter run's last."""
        delays, missing = self.timing.delays, self.timing.samples - self.shorter.samples
        nominal = 2 * (self.machine.stages - 1 - np.arange(self.machine.stages))
        each = np.zeros_like(nominal) if self.shorter.drained else nominal
        delays.count, delays.total = short.delays.count + missing, short.delays.total + missing * each
        delays.least, delays.most = short.delays.least, short.delays.most
