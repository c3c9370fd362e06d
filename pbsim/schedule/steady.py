"""Runs of any length: the compiled engine, and what a periodic regime saves it.

With bounded credits the machine's state is finite, so it repeats. The complete state (what every unit does and for how
long, what is in flight, ready, reserved and held), relative to now and to the sample that enters, is hashed as samples
enter stage 0; where a hash comes back, the states themselves are compared until they are equal again. Equal states have
equal futures as long as samples keep coming: the regime is proved, and everything that one period does is done again by
arithmetic, period after period, until only a tail is left, which is simulated.

Buffers can take millions of samples to fill where stages are nearly equal. A run whose trace nobody reads is then
continued at the pace of its last windows instead, and marked as an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pbsim.hardware.fabric import Route
from pbsim.hardware.machine import Machine
from pbsim.schedule import compiled
from pbsim.schedule.batches import Shortened, shortened, whole_batches
from pbsim.schedule.compiled import Engine
from pbsim.schedule.timing import DeadlockError, Estimate, SteadyState, Timing
from pbsim.schedule.trace import COLUMNS, EMPTY, Chunk, IntArray, Shift

EVENT_BUDGET = 60_000_000
"""Events after which a run whose trace nobody reads is estimated, if it has shown no repetition."""
PROGRESS_EVENTS = 2_000_000
"""Events between signs of life."""
HASHED_EVENTS = 2_000
"""Events between looks at the state, about; a look costs as much as some hundred events."""
COPIED_ROWS = 2_000_000
"""The most rows of a period that are kept to be repeated; longer ones are simulated again."""
WINDOWS = 8
"""Windows whose spread an estimate reports."""
TAIL = 4
"""Samples that are simulated behind the last period: the host has then not yet met the end."""


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
        self.tail = (0, 0)

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
            yield Chunk.of(rows, engine.now + self.shift.cycles + 1)
        if self.kept is not None and engine.done_everywhere >= self.kept and not final:
            engine.recording = False
            self.timing.all_rows = False

    def _until_steady(self) -> Iterator[Chunk]:
        """Run until the regime is proved to be periodic, and continue it by arithmetic."""
        engine, samples = self.engine, self.batches.samples
        seen: dict[int, int] = {}
        windows: list[Counters] = []
        sample, stride = 0, max(1, HASHED_EVENTS // events_per_sample(self.machine))
        while sample < samples - TAIL:
            yield from self._run(sample)
            key = engine.state_hash(sample)
            earlier = seen.get(key)
            seen[key] = sample
            if earlier is not None and sample + 2 * (sample - earlier) + TAIL < samples:
                state, before, start = engine.state(sample), Counters.of(engine), sample
                while sample < start + (start - earlier):  # the period divides this distance
                    sample += 1
                    yield from self._run(sample)
                    if engine.state_hash(sample) == key and np.array_equal(engine.state(sample), state):
                        yield from self._repeat(sample, sample - start, Counters.of(engine) - before)
                        return
            if self.kept is not None and engine.events > self.event_budget * (0.5 + 0.5 * len(windows) / WINDOWS):
                windows.append(Counters.of(engine))
                if len(windows) > WINDOWS and not engine.recording:
                    self._estimate(windows)
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
        sample = shorter.repeats[-1][1]
        while self.engine.recording and sample + 1 < shorter.batches.samples:  # hand out what is wanted
            sample += 1
            yield from self._run(sample)
        self.engine.recording = self.timing.all_rows = False
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
        if times <= 0 or (engine.recording and period * events_per_sample(self.machine) > COPIED_ROWS):
            return
        if engine.recording:
            yield from self._copy(sample, period, amount.cycle, times)
        self.added.append((amount, times))
        self.tail = (engine.now, times * amount.cycle)
        engine.shorten(times * period)
        self.timing.steady_state = SteadyState(sample, period, amount.cycle, times * period)

    def _copy(self, sample: int, period: int, cycles: int, times: int) -> Iterator[Chunk]:
        """Hand out the rows of the next period, and the same rows again and again."""
        pieces = [chunk.rows.rows for chunk in self._run(sample + period)]
        rows = np.concatenate([np.empty((0, len(COLUMNS)), np.int64), *pieces])
        step, now = Shift(cycles, period, period), self.engine.now
        yield Chunk.of(rows, now + 1)
        block = max(1, self.chunk_rows // max(1, len(rows)))
        for first in range(1, times + 1, block):
            copies = range(first, min(first + block, times + 1))
            yield Chunk.of(np.concatenate([(step * copy).of(rows) for copy in copies]), now + copies[-1] * cycles + 1)
        self.shift = step * times

    def _estimate(self, marks: list[Counters]) -> None:
        """No repetition within the budget: leave out what has not entered yet, at the pace of the last windows.

        That pace is the slowest stage's, and at least what the busiest unit, link and the host need for a sample. What
        units do and links carry follows from the number of samples; how they wait is as in the last windows.
        """
        engine = self.engine
        missing = self.batches.samples - int(engine.scalars[compiled.SENT]) - TAIL
        if missing <= 0:
            return
        paces = [self._pace(b - a) for a, b in pairwise(marks)]
        seen = marks[-1] - marks[0]
        cycles = math.ceil(missing * max(self._pace(seen), least_interval(self.machine)))
        engine.shorten(missing)
        self.timing.estimate = Estimate(self.batches.samples - missing, WINDOWS, min(paces), max(paces))
        self.added.append((self._at_pace(seen, missing, cycles), 1))

    def _pace(self, seen: Counters) -> float:
        """Cycles per sample of the unit that has done the least of its work, in samples, between two moments."""
        work = self.engine.plan.cores[:, [compiled.C_F, compiled.C_BX, compiled.C_BW, compiled.C_U]]
        done = seen.accounts[:, :, compiled.A_F : compiled.A_U + 1].sum(axis=2)
        by_unit = (work[:, :1], work[:, 1:]) if self.machine.split else (work,)
        due = np.stack([operations.sum(axis=1) for operations in by_unit], axis=1)
        done = done[:, : due.shape[1]]
        working = (due > 0) & (done > 0)
        return float((seen.cycle * due[working] / done[working]).max(initial=0.0))

    def _at_pace(self, seen: Counters, samples: int, cycles: int) -> Counters:
        """What so many samples add to the counters in so many cycles, if units wait as they were seen to."""
        plan, accounts = self.engine.plan, np.zeros_like(seen.accounts)
        split = self.machine.split
        for core, row in enumerate(plan.cores):
            work = samples * row[[compiled.C_F, compiled.C_BX, compiled.C_BW, compiled.C_U]]
            for unit, columns in enumerate(([0], [1, 2, 3]) if split else ([0, 1, 2, 3],)):
                accounts[core, unit, columns] = work[columns]
                waits = slice(compiled.A_INPUT, compiled.A_IDLE)
                accounts[core, unit, waits] = shares(
                    cycles - int(work[columns].sum()), seen.accounts[core, unit, waits]
                )
        link_bytes, link_cycles = np.zeros_like(seen.link_bytes), np.zeros_like(seen.link_cycles)
        for route in routes_of(self.machine):
            link_bytes[list(route.links)] += samples * route.size
            link_cycles[list(route.links)] += samples * route.serialisation
        delays = np.zeros_like(seen.delays)
        delays[:, :, 0] = np.where(seen.delays[:, :, 0] > 0, samples, 0)
        mean = seen.delays[:, :, 1] / np.maximum(1, seen.delays[:, :, 0])
        delays[:, :, 1] = np.rint(samples * mean)
        return Counters(cycles, accounts, link_bytes, link_cycles, delays)

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
        ledger.settle()
        for column, category in enumerate(compiled.LEVELS):
            for core in range(self.machine.stages):
                ledger.current[core][category] = int(engine.levels[core, column])
                ledger.peak[core][category] = int(engine.peaks[core, column])
                ledger.peak_cycle[core][category] = self._true_cycle(engine.peak_cycles[core, column])
        ledger.core_peak = engine.core_state[:, compiled.S_PEAK].tolist()
        ledger.core_peak_cycle = [self._true_cycle(cycle) for cycle in engine.core_state[:, compiled.S_PEAK_CYCLE]]
        ledger.machine_peak = int(engine.scalars[compiled.MACHINE_PEAK])

    def _true_cycle(self, cycle: int) -> int:
        """A cycle of the engine in the whole run: the tail comes behind the periods that were left out."""
        begin, skipped = self.tail
        return int(cycle) + (skipped if cycle > begin else 0)


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


def routes_of(machine: Machine) -> list[Route]:
    """The routes of a machine's messages, each of which every sample takes once."""
    return [route for channel in machine.channels for route in (channel.forward, channel.gradient)]


def least_interval(machine: Machine) -> int:
    """Cycles per sample that the busiest unit, the busiest link and the host need."""
    links = np.zeros(len(machine.link_ends), np.int64)
    for route in routes_of(machine):
        links[list(route.links)] += route.serialisation
    units = max(core.cycles.interval(machine.split) for core in machine.cores)
    return max(units, int(links.max(initial=0)), machine.host_cycles)


def shares(total: int, weights: IntArray) -> list[int]:
    """Share out a whole number in proportion to weights; the first gets it where all are zero, and what is left."""
    weights = np.maximum(weights, 0)
    parts = [total * int(weight) // max(1, int(weights.sum())) for weight in weights]
    parts[0] += total - sum(parts)
    return parts


def events_per_sample(machine: Machine) -> int:
    """Events of one sample: the ends of its operations, the leaving and arriving of its messages."""
    return 4 * machine.stages + 4 * len(machine.channels) + 1
