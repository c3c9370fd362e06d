"""Runs of any length: the compiled engine, and what a periodic regime saves it.

With bounded credits the machine's state is finite, so it repeats. The complete state (what every unit does and for how
long, what is in flight, ready, reserved and held), relative to now and to the sample that enters, is hashed whenever a
sample enters stage 0; where a hash comes back, the states themselves are compared one period later. Equal states have
equal futures as long as samples keep coming: the regime is proved, and everything that one period does is done again by
arithmetic, period after period, until only a tail is left, which is simulated.

Where memory of the states runs on without a repetition, a run whose trace nobody reads is continued from its last
windows instead, and marked as an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pbsim.hardware.machine import Machine, MachineCore
from pbsim.schedule import compiled
from pbsim.schedule.batches import Batches
from pbsim.schedule.compiled import Engine
from pbsim.schedule.lockstep import LockstepPipeline
from pbsim.schedule.timing import Clock, DeadlockError, Estimate, Recorder, SteadyState, Timing
from pbsim.schedule.trace import COLUMNS, EMPTY, Chunk, IntArray, Trace

EVENT_BUDGET = 150_000_000
"""Events after which a run whose trace nobody reads is estimated, if it has shown no repetition."""
PROGRESS_EVENTS = 2_000_000
"""Events between signs of life."""
HASHED_EVENTS = 2_000
"""Events between looks at the state, about; a look costs as much as some hundred events."""
WINDOWS = 8
"""Windows whose spread an estimate reports."""
TAIL = 4
"""Samples that are simulated behind the last period: the host has then not yet met the end."""
START, END, SAMPLE, VERSION = (COLUMNS.index(name) for name in ("start", "end", "sample", "version"))


@dataclass(frozen=True)
class Counters:
    """All that grows during a run, at one cycle; differences of two say what the cycles between have added."""

    cycle: int
    accounts: IntArray
    link_bytes: IntArray
    link_cycles: IntArray
    delays: IntArray

    @classmethod
    def of(cls, engine: Engine) -> Counters:
        """The counters of an engine that has stopped, with what its units have in hand counted so far."""
        accounts = engine.accounts.copy()
        for core, unit, column, cycles in engine.in_hand():
            accounts[core, unit, column] += cycles
        delays = engine.delays[:, :, :2].copy()
        return cls(engine.now, accounts, engine.link_bytes.copy(), engine.link_cycles.copy(), delays)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.cycle - other.cycle,
            self.accounts - other.accounts,
            self.link_bytes - other.link_bytes,
            self.link_cycles - other.link_cycles,
            self.delays - other.delays,
        )


@dataclass(frozen=True)
class Shift:
    """By how much a part of the trace lies behind the one it repeats."""

    cycles: int
    samples: int
    versions: int

    def __mul__(self, times: int) -> Shift:
        return Shift(self.cycles * times, self.samples * times, self.versions * times)

    def of(self, rows: IntArray) -> IntArray:
        """Rows moved by it."""
        if not self.cycles:
            return rows
        moved = rows.copy()
        moved[:, [START, END]] += self.cycles
        moved[:, SAMPLE] += self.samples
        moved[:, VERSION] += np.where(rows[:, VERSION] >= 0, self.versions, 0)
        return moved


class CompiledRun:
    """A run in dataflow timing on the compiled engine; `chunks()` runs it.

    Parameters
    ----------
    kept : rows are wanted of so many samples; None: of all.
    skip : whether a periodic regime is continued by arithmetic.
    """

    def __init__(
        self,
        machine: Machine,
        timing: Timing,
        chunk_rows: int,
        *,
        kept: int | None,
        skip: bool,
        event_budget: int = EVENT_BUDGET,
    ) -> None:
        self.machine, self.timing, self.skip, self.batches = machine, timing, skip, timing.batches
        self.kept = whole_batches(timing.batches, kept)
        self.event_budget = event_budget
        self.chunk_rows = chunk_rows
        self.shift = Shift(0, 0, 0)
        self.added: list[tuple[Counters, int]] = []

    def chunks(self) -> Iterator[Chunk]:
        """Run to the end, handing out the trace in pieces."""
        shorter = shortened(self.batches, self.kept) if self.skip and self.kept is not None else None
        if shorter is not None:
            yield from self._drained(shorter)
        else:
            self.engine = Engine(self.machine, self.batches, row_limit=self.chunk_rows)
            if self.skip and not self.batches.drained:
                yield from self._until_steady()
            yield from self._run(-1)
        self._fill_timing()

    def _run(self, sample: int) -> Iterator[Chunk]:
        """Run until a sample has entered (-1: to the end)."""
        while True:
            code = self.engine.advance(until_sample=sample, until_events=self.engine.events + PROGRESS_EVENTS)
            yield from self._take(final=code == compiled.DONE)
            self.timing.entered = int(self.engine.scalars[compiled.ENTERED]) + 1
            if code == compiled.EVENTS_SPENT:
                yield Chunk(EMPTY, self.engine.now + self.shift.cycles)
                continue
            if code == compiled.DEADLOCK:
                raise DeadlockError(waits.problem() for waits in self.engine.waits())
            if code != compiled.ROWS_FULL:
                return

    def _take(self, *, final: bool = False) -> Iterator[Chunk]:
        """The rows recorded so far, where they are; stop recording once nobody wants more."""
        engine = self.engine
        if not engine.recording:
            return
        if engine.scalars[compiled.ROW] or final:
            rows = self.shift.of(engine.take_rows())
            yield chunk_of(rows, engine.now + self.shift.cycles + 1)
        if self.kept is not None and engine.done_everywhere >= self.kept and not final:
            engine.recording = False
            self.timing.all_rows = False

    def _until_steady(self) -> Iterator[Chunk]:
        """Run until the regime is proved to be periodic, and continue it by arithmetic."""
        engine, samples = self.engine, self.batches.samples
        seen: dict[int, int] = {}
        checkpoints: list[tuple[int, Counters]] = []
        sample, stride = 0, max(1, HASHED_EVENTS // events_per_sample(self.machine))
        while sample < samples - TAIL:
            yield from self._run(sample)
            key = engine.state_hash(sample)
            earlier = seen.get(key)
            seen[key] = sample
            if earlier is not None and sample + 2 * (sample - earlier) + TAIL < samples:
                period = sample - earlier
                state, before = engine.state(sample), Counters.of(engine)
                yield from self._run(sample + period)
                sample += period
                if np.array_equal(engine.state(sample), state):
                    yield from self._repeat(sample, period, Counters.of(engine) - before)
                    return
            if self.kept is not None and engine.events > self.event_budget // 2:
                if not checkpoints or engine.events > self.event_budget // 2 * (1 + len(checkpoints) / WINDOWS):
                    checkpoints.append((sample, Counters.of(engine)))
                if len(checkpoints) > WINDOWS and not engine.recording:
                    self._estimate(checkpoints)
                    return
            sample += stride

    def _drained(self, shorter: Shortened) -> Iterator[Chunk]:
        """Run a shorter run of the same batches, and add those that it leaves out.

        A drained machine is in the same state whenever a batch enters: that is what is checked, for the last full
        batch of an epoch and the one before it, and for an epoch and the one before it.
        """
        self.engine = Engine(self.machine, shorter.batches, row_limit=self.chunk_rows)
        amounts = []
        for first, second, times in shorter.repeats:
            yield from self._run(first)
            state, before = self.engine.state(first), Counters.of(self.engine)
            yield from self._run(second)
            if not np.array_equal(self.engine.state(second), state):  # then nothing may be left out
                self.engine = Engine(self.machine, self.batches)
                self.engine.recording = self.timing.all_rows = False
                yield from self._run(-1)
                return
            amounts.append((Counters.of(self.engine) - before, times))
        yield from self._run(-1)
        self.added = amounts
        first, second, _ = shorter.repeats[0]
        skipped = self.batches.samples - shorter.batches.samples
        self.timing.steady_state = SteadyState(first, second - first, amounts[0][0].cycle, skipped)

    def _repeat(self, sample: int, period: int, amount: Counters) -> Iterator[Chunk]:
        """The state is what it was a period ago: let the next period stand for as many as fit."""
        engine, samples = self.engine, self.batches.samples
        if self.kept is not None:  # all rows that somebody reads come first
            while engine.recording and sample + period + TAIL < samples:
                yield from self._run(sample + period)
                sample += period
        times = (samples - sample - period - TAIL) // period
        if times <= 0:
            return
        if engine.recording:
            yield from self._copy(sample, period, amount.cycle, times)
        self.added.append((amount, times))
        engine.shorten(times * period)
        self.timing.steady_state = SteadyState(sample, period, amount.cycle, times * period)

    def _copy(self, sample: int, period: int, cycles: int, times: int) -> Iterator[Chunk]:
        """Hand out the rows of the next period, and the same rows again and again."""
        pieces = [trace_rows(chunk.rows) for chunk in self._run(sample + period)]
        rows = np.concatenate([np.empty((0, len(COLUMNS)), np.int64), *pieces])
        step, now = Shift(cycles, period, period), self.engine.now
        yield chunk_of(rows, now + 1)
        for copy in range(1, times + 1):
            yield chunk_of((step * copy).of(rows), now + copy * cycles + 1)
        self.shift = step * times

    def _estimate(self, checkpoints: list[tuple[int, Counters]]) -> None:
        """No repetition within the budget: let the last windows stand for what is to come."""
        first, last = checkpoints[0], checkpoints[-1]
        period, amount = last[0] - first[0], last[1] - first[1]
        times = (self.batches.samples - last[0] - period - TAIL) // period
        if times <= 0:
            return
        rates = [(b[1].cycle - a[1].cycle) / (b[0] - a[0]) for a, b in pairwise(checkpoints)]
        self.added.append((amount, times))
        self.engine.shorten(times * period)
        self.timing.estimate = Estimate(self.batches.samples - times * period, len(rates), min(rates), max(rates))

    def _fill_timing(self) -> None:
        """Write the engine's books, and what arithmetic has added, into the results."""
        engine, timing = self.engine, self.timing
        total = Counters.of(engine)
        end = int(engine.unit_state[:, :, compiled.T_FINISHED].max())
        cycles, accounts = end, total.accounts
        link_bytes, link_cycles, delays = total.link_bytes, total.link_cycles, total.delays
        units = 2 if self.machine.split else 1
        accounts[:, :units, compiled.A_IDLE] += end - engine.unit_state[:, :units, compiled.T_FINISHED]
        for amount, times in self.added:
            cycles += times * amount.cycle
            accounts = accounts + times * amount.accounts
            link_bytes = link_bytes + times * amount.link_bytes
            link_cycles = link_cycles + times * amount.link_cycles
            delays = delays + times * amount.delays
        timing.cycles = cycles
        for index, usage in enumerate(timing.units):
            core, unit = divmod(index, units)
            for column, name in enumerate(ACCOUNTS):
                setattr(usage, name, int(accounts[core, unit, column]))
        timing.links.bytes, timing.links.busy_cycles = link_bytes.tolist(), link_cycles.tolist()
        timing.peak_in_flight = engine.core_state[:, compiled.S_IN_FLIGHT_PEAK].tolist()
        timing.delays.count, timing.delays.total = delays[:, :, 0], delays[:, :, 1]
        timing.delays.least, timing.delays.most = engine.delays[:, :, 2].copy(), engine.delays[:, :, 3].copy()
        ledger = timing.ledger
        ledger.current, ledger.peak = engine.levels.tolist(), engine.peaks.tolist()
        ledger.peak_cycle = engine.peak_cycles.tolist()
        ledger.core_peak = engine.core_state[:, compiled.S_PEAK].tolist()
        ledger.core_peak_cycle = engine.core_state[:, compiled.S_PEAK_CYCLE].tolist()
        ledger.machine_peak = int(engine.scalars[compiled.MACHINE_PEAK])


class LongLockstep:
    """A long run in lockstep, which is periodic from the start; `chunks()` runs it.

    A shorter run goes through the SimPy model: long enough for a full step, or for full batches. Every further step
    (batch) does what its last full one does, so that the books follow from the number of samples and of steps. Where
    the whole trace is wanted, the full step's rows are repeated in their place.
    """

    def __init__(self, machine: Machine, timing: Timing, chunk_rows: int, *, kept: int | None) -> None:
        self.machine, self.timing, self.chunk_rows = machine, timing, chunk_rows
        self.kept = whole_batches(timing.batches, kept)
        self.full_step = 4 * machine.stages  # from then on even stashed versions are those of full steps
        batches = timing.batches
        if batches.drained:
            shorter = shortened(batches, batches.samples if self.kept is None else self.kept)
            self.shorter = batches if shorter is None else shorter.batches
        else:
            first = self.full_step + 2 if self.kept is None else max(self.full_step + 2, self.kept + self.full_step)
            self.shorter = replace(batches, samples=min(batches.samples, first))

    def chunks(self) -> Iterator[Chunk]:
        """Run to the end, handing out the trace in pieces."""
        short = Timing(self.machine, self.shorter)
        model = LockstepPipeline(self.machine, short, Recorder(Clock(), self.chunk_rows))
        missing = self.timing.samples - self.shorter.samples
        if missing and self.kept is None:
            yield from self._repeated(model, missing)
        else:
            yield from model.recorder.chunks()
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
        rows = np.concatenate([trace_rows(chunk.rows) for chunk in model.recorder.chunks()])
        before = rows[:, START] < begin
        within = ~before & (rows[:, START] < begin + length)
        step, pattern = Shift(length, 1, 1), rows[within]
        yield chunk_of(rows[before], begin)
        block = max(1, self.chunk_rows // len(pattern))
        for first in range(0, missing + 1, block):
            copies = range(first, min(first + block, missing + 1))
            pieces = [(step * copy).of(pattern) for copy in copies]
            yield chunk_of(np.concatenate(pieces), begin + copies[-1] * length + length)
        rest = (step * missing).of(rows[~before & ~within])
        yield chunk_of(rest, int(rest[:, END].max()) + 1)

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


@dataclass(frozen=True)
class Shortened:
    """A shorter run of a drained schedule, and what to add to it.

    Attributes
    ----------
    repeats : what the run between the entries of two samples adds to all counters is missing so many times.
    """

    batches: Batches
    repeats: tuple[tuple[int, int, int], ...]


BATCHES_KEPT = 5
"""Full batches that each epoch of a shortened run has at least."""
EPOCHS_KEPT = 3
"""Epochs of a shortened run, where there are more."""


def shortened(batches: Batches, kept: int) -> Shortened | None:
    """Leave full batches out of every epoch, and whole epochs, of a drained schedule; None where it is short."""
    if not batches.drained:
        return None
    full, rest = divmod(batches.epoch, batches.size)
    epochs, tail = divmod(batches.samples, batches.epoch)
    keep = min(full, max(BATCHES_KEPT, -(-kept // batches.size) + 2))
    shorter_epoch = keep * batches.size + rest
    some_epochs = min(epochs, EPOCHS_KEPT if keep < full else max(EPOCHS_KEPT, -(-kept // batches.epoch) + 2))
    full_tail, rest_tail = divmod(tail, batches.size)
    kept_tail = min(full_tail, keep)
    samples = some_epochs * shorter_epoch + kept_tail * batches.size + rest_tail
    if samples >= batches.samples:
        return None
    missing_batches = epochs * (full - keep) + full_tail - kept_tail
    repeats = []
    if missing_batches:
        start = (keep - 2) * batches.size
        repeats.append((start, start + batches.size, missing_batches))
    if epochs > some_epochs:
        repeats.append((shorter_epoch, 2 * shorter_epoch, epochs - some_epochs))
    return Shortened(replace(batches, samples=samples, epoch_samples=shorter_epoch), tuple(repeats))


ACCOUNTS = (
    "forward",
    "input_gradient",
    "weight_gradient",
    "update",
    "stall_input",
    "stall_output",
    "stall_memory",
    "idle",
)
"""The columns of an engine's accounts, as `UnitCycles` names them."""


def events_per_sample(machine: Machine) -> int:
    """Events of one sample: the ends of its operations, the leaving and arriving of its messages."""
    return 4 * machine.stages + 4 * len(machine.channels) + 1


def whole_batches(batches: Batches, kept: int | None) -> int | None:
    """So many samples, or as many more as their last batch has."""
    return batches.end(batches.index(min(kept, batches.samples) - 1)) if kept else kept


def chunk_of(rows: IntArray, until: int) -> Chunk:
    """A chunk of rows laid out as `COLUMNS`."""
    return Chunk(Trace(*(np.ascontiguousarray(column) for column in rows.T)), until)


def trace_rows(trace: Trace) -> IntArray:
    """The rows of a trace as one array, (n, columns)."""
    return np.stack([getattr(trace, name) for name in COLUMNS], axis=1)
