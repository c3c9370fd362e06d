# mypy: disable-error-code="no-untyped-def, no-any-return, no-untyped-call"
"""The rules of `pbsim.schedule.dataflow`, compiled: the same events, a few hundred nanoseconds each.

The SimPy model is the definition of timing; this engine carries long runs, and equals it row for row (a test over
random machines). It keeps the whole state of the machine in flat arrays, so that it can be compared with an earlier
one (`pbsim.schedule.steady`). A cycle is one pass of four phases, repeated until nothing more happens in it:
completions and arrivals (with the host), results into output slots, messages onto links, choices of free units.

Samples stay in order at every stage and on every route, so counts stand for sets: a stage has started so many forwards,
so many messages of a route have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pbsim.compilation import compiled, inlined
from pbsim.hardware.machine import Machine
from pbsim.hardware.memory import PERMANENT, Category
from pbsim.schedule.batches import Batches
from pbsim.schedule.timing import Waits
from pbsim.schedule.trace import COLUMNS, IntArray, Op

F, BX, BW, U = int(Op.FORWARD), int(Op.INPUT_GRADIENT), int(Op.WEIGHT_GRADIENT), int(Op.UPDATE)
SEND, LOAD = int(Op.SEND), int(Op.LOAD)

DONE, ROWS_FULL, GROW, DEADLOCK, BOUNDARY, EVENTS_SPENT = range(6)
"""Why the engine stops: the run is over; the row buffer is full; an array must grow; nothing can happen any more; the
sample that was asked for has entered stage 0; so many events have passed as were asked for."""

# Scalars of the state.
(NOW, FRESH, SENT, SLOT_FREE, HEAP, READY, ROW, EVENTS, FINISHED, WIDEST_LINK, MOST_IN_FLIGHT, MACHINE_LEVEL,
 MACHINE_PEAK, ENTERED) = range(14)  # fmt: skip
SCALARS = 14

# Parameters of the machine and the run.
(P_STAGES, P_SPLIT, P_BACKWARD_FIRST, P_SLOTS, P_ENFORCED, P_HOST_CYCLES, P_HOST_BYTES, P_STASH_WEIGHTS, P_SAMPLES,
 P_SIZE, P_DRAINED, P_EPOCH, P_STOP_SAMPLE, P_STOP_EVENTS, P_RECORD) = range(15)  # fmt: skip
PARAMETERS = 15

# Columns of a core's table.
(C_F, C_BX, C_BW, C_U, C_CREDITS, C_ACTIVATION, C_STASH, C_VERSIONS, C_GRADIENTS, C_RECEIVED, C_CAPACITY,
 C_LAST) = range(12)  # fmt: skip

# Columns of a core's state.
(S_STARTED, S_BACKWARDS, S_DONE, S_VERSION, S_SLOTS, S_HOLDS, S_LEVEL, S_FORWARD_READY, S_BACKWARD_READY, S_DIRTY,
 S_PEAK, S_PEAK_CYCLE, S_IN_FLIGHT_PEAK) = range(13)  # fmt: skip
CORE_STATE = 13

# Columns of a unit's state. A unit is idle, computes (until), or waits for an output slot (since).
(T_STATE, T_BACKWARD, T_SAMPLE, T_STEP, T_TIME, T_HELD, T_STARTED, T_REMAINING, T_FINISHED) = range(9)
UNIT_STATE = 9
IDLE, COMPUTING, WAITING, OVER = range(4)

# Columns of a unit's account.
A_F, A_BX, A_BW, A_U, A_INPUT, A_OUTPUT, A_MEMORY, A_IDLE = range(8)

# Columns of a route's table.
R_SOURCE, R_TARGET, R_SIZE, R_HOLD, R_LATENCY, R_BACKWARD = range(6)

# Kinds of events: a unit's operation ends; a message has left its core; it has arrived; the host's sample has.
E_UNIT, E_LEFT, E_ARRIVED, E_LOADED = range(4)
KIND = 1 << 40

INPUT, OUTPUT, STASH, VERSIONS, GRADIENTS = range(5)
LEVELS = (
    Category.INPUT_BUFFER,
    Category.OUTPUT_BUFFER,
    Category.STASH,
    Category.WEIGHT_VERSIONS,
    Category.GRADIENTS,
)
"""The categories of memory that change during a run, in the columns of `Engine.levels`."""


_IDLE_MATTERS = np.array([column in (T_STATE, T_HELD, T_STARTED) for column in range(T_REMAINING)], np.int64)
"""Of an idle unit, whether it is held back and has started matters for what follows; the rest is history."""


@dataclass(frozen=True)
class Plan:
    """The machine as flat tables: what never changes during a run."""

    cores: IntArray
    routes: IntArray
    results: IntArray
    result_start: IntArray
    passed_back: IntArray
    passed_back_start: IntArray
    links: IntArray
    offsets: IntArray
    link_start: IntArray
    link_count: int


def make_plan(machine: Machine) -> Plan:
    """The tables of a machine; route 2c is the forward one of channel c, and 2c + 1 that of its gradients."""
    cores, results, passed_back = [], [], []
    for core in machine.cores:
        incoming = [c for c, channel in enumerate(machine.channels) if channel.target == core.stage]
        outgoing = [c for c, channel in enumerate(machine.channels) if channel.source == core.stage]
        results.append([2 * c for c in outgoing])
        passed_back.append([2 * c + 1 for c in incoming])
        host = machine.host_bytes if core.stage == 0 else 0
        cycles, memory = core.cycles, core.memory
        row = {
            C_F: cycles.forward.total,
            C_BX: cycles.input_gradient.total,
            C_BW: cycles.weight_gradient.total,
            C_U: cycles.update.total,
            C_CREDITS: -1 if core.credits is None else core.credits,
            C_ACTIVATION: host + sum(machine.channels[c].forward.size for c in incoming),
            C_STASH: memory.stash,
            C_VERSIONS: memory.weight_versions,
            C_GRADIENTS: memory.gradients,
            C_RECEIVED: sum(machine.channels[c].gradient.size for c in outgoing),
            C_CAPACITY: memory.capacity,
            C_LAST: int(not outgoing),
        }
        cores.append([row[column] for column in range(len(row))])
    routes = [route for channel in machine.channels for route in (channel.forward, channel.gradient)]
    table = [[r.source, r.target, r.size, r.serialisation, r.latency, r.source > r.target] for r in routes]
    return Plan(
        np.array(cores, np.int64),
        np.array(table, np.int64).reshape(-1, 6),
        *_ragged(results),
        *_ragged(passed_back),
        _ragged([list(r.links) for r in routes])[0],
        _ragged([list(r.offsets) for r in routes])[0],
        _ragged([list(r.links) for r in routes])[1],
        len(machine.link_ends),
    )


def _ragged(rows: list[list[int]]) -> tuple[IntArray, IntArray]:
    """Rows of different lengths laid end to end, and where each begins."""
    start = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return np.array([value for row in rows for value in row], np.int64), start


class Engine:
    """The state of a machine, and `advance` to run it.

    Attributes
    ----------
    accounts : (S, 2, 8) cycles per core and unit, see `A_F` to `A_IDLE`; with a shared unit the second is unused.
    levels, peaks, peak_cycles : (S, 5) bytes held by `LEVELS`, most held, and since when.
    link_bytes, link_cycles : what each link has carried.
    delays : (2, S, 4) over forwards that read version 1 or later, and over all: count, sum, least, most.
    """

    def __init__(self, machine: Machine, batches: Batches, *, row_limit: int = 200_000) -> None:
        self.machine, self.batches = machine, batches
        self.plan = make_plan(machine)
        stages, routes, pipeline = machine.stages, len(self.plan.routes), machine.hardware.pipeline
        self.parameters = np.zeros(PARAMETERS, np.int64)
        for index, value in {
            P_STAGES: stages,
            P_SPLIT: machine.split,
            P_BACKWARD_FIRST: pipeline.priority == "backward" and not batches.drained,
            P_SLOTS: pipeline.output_slots,
            P_ENFORCED: pipeline.memory == "enforce",
            P_HOST_CYCLES: machine.host_cycles,
            P_HOST_BYTES: machine.host_bytes,
            P_STASH_WEIGHTS: machine.stash_weights,
            P_SAMPLES: batches.samples,
            P_SIZE: batches.size,
            P_DRAINED: batches.drained,
            P_EPOCH: batches.epoch,
            P_STOP_SAMPLE: -1,
            P_STOP_EVENTS: np.iinfo(np.int64).max,
            P_RECORD: 1,
        }.items():
            self.parameters[index] = value
        self.scalars = np.zeros(SCALARS, np.int64)
        self.scalars[FRESH] = self.scalars[SLOT_FREE] = 1
        self.core_state = np.zeros((stages, CORE_STATE), np.int64)
        self.core_state[:, S_SLOTS] = pipeline.output_slots
        self.unit_state = np.zeros((stages, 2, UNIT_STATE), np.int64)
        self.unit_state[:, :, T_REMAINING] = batches.samples
        if not machine.split:
            self.unit_state[:, 1, T_STATE] = OVER
        self.accounts = np.zeros((stages, 2, 8), np.int64)
        self.levels, self.peaks, self.peak_cycles = (np.zeros((stages, len(LEVELS)), np.int64) for _ in range(3))
        for core in machine.cores:
            held = sum(getattr(core.memory, category.label) for category in PERMANENT)
            self.core_state[core.stage, [S_LEVEL, S_PEAK]] = held
        self.scalars[MACHINE_LEVEL] = self.scalars[MACHINE_PEAK] = self.core_state[:, S_LEVEL].sum()
        self.arrived = np.zeros(routes, np.int64)
        self.link_bytes = np.zeros(self.plan.link_count, np.int64)
        self.link_cycles = np.zeros(self.plan.link_count, np.int64)
        self.delays = np.zeros((2, stages, 4), np.int64)
        self.delays[:, :, 2], self.delays[:, :, 3] = np.iinfo(np.int64).max, -1
        per_link = np.bincount(self.plan.links, minlength=1)
        self._link_margin = 3 * int(per_link.max(initial=0)) + 8
        self._margin = 16 * stages + 4 * routes + 16
        self.reserved = np.zeros((self.plan.link_count, 2 * self._link_margin, 2), np.int64)
        self.reserved_count = np.zeros(self.plan.link_count, np.int64)
        self.heap = np.zeros((4 * self._margin, 2), np.int64)
        self.ready = np.zeros((4 * self._margin, 5), np.int64)
        self.read = np.zeros((stages, 64), np.int64)
        self.rows = np.zeros((row_limit + self._margin, len(COLUMNS)), np.int64)
        self.dirty = np.zeros(stages, np.int64)

    @property
    def now(self) -> int:
        """The cycle that has been simulated last."""
        return int(self.scalars[NOW])

    @property
    def events(self) -> int:
        """Events so far."""
        return int(self.scalars[EVENTS])

    @property
    def recording(self) -> bool:
        """Whether rows are recorded."""
        return bool(self.parameters[P_RECORD])

    @recording.setter
    def recording(self, on: bool) -> None:
        self.parameters[P_RECORD] = on

    @property
    def done_everywhere(self) -> int:
        """Samples whose backward is over at every stage."""
        return int(self.core_state[:, S_DONE].min())

    def shorten(self, samples: int) -> None:
        """Let the run have so many samples less; none of them may have been sent yet."""
        self.parameters[P_SAMPLES] -= samples
        self.unit_state[:, :, T_REMAINING] -= samples

    def in_hand(self) -> Iterator[tuple[int, int, int, int]]:
        """What units have done of what they are at: core, unit, column of the account, cycles."""
        lengths = (C_BX, C_BW, C_U)
        for core, units in enumerate(self.unit_state):
            sends = self.plan.passed_back_start[core + 1] - self.plan.passed_back_start[core]
            for k, unit in enumerate(units):
                if unit[T_STATE] == WAITING:
                    yield core, k, A_OUTPUT, self.now - int(unit[T_TIME])
                elif unit[T_STATE] == COMPUTING:
                    phase = max(0, int(unit[T_STEP] - sends))
                    length = self.plan.cores[core, lengths[phase] if unit[T_BACKWARD] else C_F]
                    column = (A_BX, A_BW, A_U)[phase] if unit[T_BACKWARD] else A_F
                    yield core, k, column, int(length - (unit[T_TIME] - self.now))

    def state_hash(self, sample: int) -> int:
        """A hash of the state of a machine that is never drained; equal states have equal hashes."""
        return int(
            _state_hash(
                self.parameters, self.scalars, sample, self.core_state, self.unit_state, self.arrived,
                self.reserved, self.reserved_count, self.heap, self.ready, self.read,
            )
        )  # fmt: skip

    def state(self, sample: int) -> IntArray:
        """The complete state of the machine, relative to now and to a sample that enters."""
        now, split, version = self.now, bool(self.parameters[P_SPLIT]), self.batches.index(sample)
        cores = self.core_state[:, :S_DIRTY].copy()
        cores[:, [S_STARTED, S_BACKWARDS, S_DONE, S_FORWARD_READY, S_BACKWARD_READY]] -= sample
        cores[:, S_VERSION] -= version
        units = self.unit_state[:, : 2 if split else 1, :T_REMAINING].copy()
        units[:, :, T_SAMPLE] -= sample
        units[:, :, T_TIME] -= now
        units[units[:, :, T_STATE] == IDLE] *= _IDLE_MATTERS
        events = self.heap[: self.scalars[HEAP]] - [now, 0]
        events = events[np.lexsort(events.T)]
        taken = [self.reserved[link, :count] - now for link, count in enumerate(self.reserved_count)]
        reservations = [np.append(spans[spans[:, 1] > 0].ravel(), -1) for spans in taken]
        ready = self.ready[: self.scalars[READY]] - [now, 0, sample, 0, 0]
        host = [self.scalars[SENT] - sample, self.scalars[SLOT_FREE]]
        versions = np.empty(0, np.int64)
        if self.parameters[P_STASH_WEIGHTS]:
            started, over = self.core_state[:, S_STARTED], self.core_state[:, S_BACKWARDS]
            spans = [np.arange(a, b) for a, b in zip(over, started, strict=True)]
            read = [self.read[s, span % self.read.shape[1]] - version for s, span in enumerate(spans)]
            versions = np.concatenate(read)
        parts = [cores.ravel(), units.ravel(), events.ravel(), *reservations, ready.ravel(), host, versions]
        return np.concatenate([*parts, self.arrived - sample]).astype(np.int64)

    def waits(self) -> Iterator[Waits]:
        """What every core waits for that has not finished; the words are those of the SimPy model."""
        split, plan = bool(self.parameters[P_SPLIT]), self.plan
        for s, (core, state) in enumerate(zip(plan.cores.tolist(), self.core_state.tolist(), strict=True)):
            units = self.unit_state[s, : 2 if split else 1]
            if (units[:, T_STATE] == OVER).all():
                continue
            in_flight, free = state[S_STARTED] - state[S_DONE], core[C_CAPACITY] - state[S_LEVEL]
            ready = max(0, state[S_BACKWARD_READY] - state[S_BACKWARDS])
            waits = Waits(s, free, in_flight, state[S_DONE], ready)
            waiting = [unit for unit in units if unit[T_STATE] == WAITING]
            for unit in sorted(waiting, key=lambda unit: (unit[T_TIME], unit[T_SAMPLE]))[:1]:
                tables = (plan.results, plan.result_start, plan.passed_back, plan.passed_back_start)
                route = plan.routes[_message(s, unit, *tables)].tolist()
                waits.output(int(unit[T_SAMPLE]), route[R_TARGET], route[R_SIZE], slot=state[S_SLOTS] > 0)
            enforced, needed = bool(self.parameters[P_ENFORCED]), 0 if state[S_HOLDS] else core[C_GRADIENTS]
            growth = core[C_STASH] + core[C_VERSIONS] - core[C_ACTIVATION]
            if ready and enforced and needed > free:
                waits.backward(state[S_BACKWARDS], needed)
            if _forward_due(s, self.parameters, self.core_state):
                if enforced and growth > free:
                    waits.forward(state[S_STARTED], growth)
                elif 0 <= core[C_CREDITS] <= in_flight:
                    waits.credit(state[S_STARTED], core[C_CREDITS])
            for _, source, sample, target, route in self.ready[: self.scalars[READY]].tolist():
                if source == s:
                    left = int(plan.cores[target, C_CAPACITY] - self.core_state[target, S_LEVEL])
                    waits.message(sample, int(plan.routes[route, R_SIZE]), target, left)
            yield waits

    def take_rows(self) -> IntArray:
        """The rows recorded since the last call, (n, columns)."""
        count = int(self.scalars[ROW])
        self.scalars[ROW] = 0
        return self.rows[:count].copy()

    def advance(self, *, until_sample: int = -1, until_events: int | None = None) -> int:
        """Run until the row buffer is full, a sample enters stage 0, so many events have passed, or the run ends.

        Where it stops for a sample, the cycle in which it enters is over. Returns why it stopped.
        """
        self.parameters[P_STOP_SAMPLE] = until_sample
        self.parameters[P_STOP_EVENTS] = np.iinfo(np.int64).max if until_events is None else until_events
        plan = self.plan
        while True:
            code = _advance(
                self.parameters, self.scalars, plan.cores, plan.routes, plan.results, plan.result_start,
                plan.passed_back, plan.passed_back_start, plan.links, plan.offsets, plan.link_start,
                self.core_state, self.unit_state, self.accounts, self.levels, self.peaks, self.peak_cycles,
                self.arrived, self.link_bytes, self.link_cycles, self.delays, self.reserved, self.reserved_count,
                self.heap, self.ready, self.read, self.rows, self.dirty, self._margin, self._link_margin,
            )  # fmt: skip
            if code != GROW:
                return int(code)
            self._grow()

    def _grow(self) -> None:
        """Give the arrays that are nearly full twice the room."""
        if self.scalars[READY] + self._margin > len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        if self.scalars[HEAP] + self._margin > len(self.heap):
            self.heap = np.concatenate([self.heap, np.zeros_like(self.heap)])
        if self.scalars[READY] + self._margin > len(self.ready):
            self.ready = np.concatenate([self.ready, np.zeros_like(self.ready)])
        if self.scalars[WIDEST_LINK] + self._link_margin > self.reserved.shape[1]:
            self.reserved = np.concatenate([self.reserved, np.zeros_like(self.reserved)], axis=1)
        old = self.read.shape[1]
        if self.scalars[MOST_IN_FLIGHT] + 2 > old:
            wider = np.zeros((len(self.read), 2 * old), np.int64)
            for stage, state in enumerate(self.core_state):
                samples = np.arange(state[S_DONE], state[S_STARTED])
                wider[stage, samples % (2 * old)] = self.read[stage, samples % old]
            self.read = wider


@inlined
def _push(heap, scalars, time, what):
    """Add an event to the heap, which is ordered by time."""
    i = scalars[HEAP]
    scalars[HEAP] += 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent, 0] <= time:
            break
        heap[i, 0], heap[i, 1] = heap[parent, 0], heap[parent, 1]
        i = parent
    heap[i, 0], heap[i, 1] = time, what


@inlined
def _pop(heap, scalars):
    """Take the first event from the heap; returns what it is."""
    what = heap[0, 1]
    scalars[HEAP] -= 1
    n = scalars[HEAP]
    time, last = heap[n, 0], heap[n, 1]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1, 0] < heap[child, 0]:
            child += 1
        if heap[child, 0] >= time:
            break
        heap[i, 0], heap[i, 1] = heap[child, 0], heap[child, 1]
        i = child
    heap[i, 0], heap[i, 1] = time, last
    return what


@inlined
def _book(s, category, size, scalars, core_state, levels, dirty, dirty_count):
    """Take or give back memory of a core; returns how many cores are on the list of those that have changed."""
    levels[s, category] += size
    core_state[s, S_LEVEL] += size
    scalars[MACHINE_LEVEL] += size
    return _touch(s, core_state, dirty, dirty_count)


@inlined
def _touch(s, core_state, dirty, dirty_count):
    """Put a core on the list of those that have changed in this cycle."""
    if core_state[s, S_DIRTY] == 0:
        core_state[s, S_DIRTY] = 1
        dirty[dirty_count] = s
        return dirty_count + 1
    return dirty_count


@inlined
def _row(rows, scalars, record, start, end, stage, op, sample, version, target):
    """Record a row of the trace."""
    if record:
        i = scalars[ROW]
        rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3] = start, end, stage, op
        rows[i, 4], rows[i, 5], rows[i, 6] = sample, version, target
        scalars[ROW] = i + 1


@inlined
def _place(sample, p):
    """A sample's place in its batch."""
    return (sample % p[P_EPOCH]) % p[P_SIZE]


@inlined
def _is_last(sample, p):
    """Whether an update follows the sample's backward (`Batches.is_last`)."""
    if p[P_SIZE] == 1 or sample + 1 == p[P_SAMPLES] or (sample + 1) % p[P_EPOCH] == 0:
        return True
    return _place(sample, p) == p[P_SIZE] - 1


@inlined
def _forward_due(s, p, core_state):
    """Whether the inputs, and the weights, of a stage's next forward are there."""
    sample = core_state[s, S_STARTED]
    if core_state[s, S_FORWARD_READY] <= sample:
        return False
    return not p[P_DRAINED] or core_state[s, S_DONE] >= sample - _place(sample, p)


@inlined
def _backward_due(s, core_state):
    """Whether the gradients of a stage's next backward are there."""
    return core_state[s, S_BACKWARD_READY] > core_state[s, S_BACKWARDS]


@inlined
def _admit(route, ready, routes, links, offsets, link_start, reserved, reserved_count, scalars):
    """Reserve a route's links from the earliest cycle at which all are free (`Links.admit`); returns that cycle."""
    hold, first, end = routes[route, R_HOLD], link_start[route], link_start[route + 1]
    if hold == 0:
        return ready
    for i in range(first, end):
        link = links[i]
        n, past = reserved_count[link], 0
        while past < n and reserved[link, past, 1] <= ready:
            past += 1
        if past:
            for j in range(past, n):
                reserved[link, j - past, 0], reserved[link, j - past, 1] = reserved[link, j, 0], reserved[link, j, 1]
            reserved_count[link] = n - past
    start, moved = ready, True
    while moved:
        moved = False
        for i in range(first, end):
            link, offset = links[i], offsets[i]
            for j in range(reserved_count[link]):
                if reserved[link, j, 0] < start + offset + hold and start + offset < reserved[link, j, 1]:
                    start, moved = reserved[link, j, 1] - offset, True
    for i in range(first, end):
        link, begin = links[i], start + offsets[i]
        j = reserved_count[link]
        while j > 0 and reserved[link, j - 1, 0] > begin:
            reserved[link, j, 0], reserved[link, j, 1] = reserved[link, j - 1, 0], reserved[link, j - 1, 1]
            j -= 1
        reserved[link, j, 0], reserved[link, j, 1] = begin, begin + hold
        reserved_count[link] += 1
        scalars[WIDEST_LINK] = max(scalars[WIDEST_LINK], reserved_count[link])
    return start


@inlined
def _settle_account(unit, account, now):
    """Book an idle unit's wait until now."""
    waited = now - unit[T_TIME]
    if not unit[T_STARTED]:
        account[A_IDLE] += waited
    elif unit[T_HELD]:
        account[A_MEMORY] += waited
    else:
        account[A_INPUT] += waited
    unit[T_TIME] = now


@compiled
def _advance(
    p, scalars, cores, routes, results, result_start, passed_back, passed_back_start, links, offsets, link_start,
    core_state, unit_state, accounts, levels, peaks, peak_cycles, arrived, link_bytes, link_cycles, delays,
    reserved, reserved_count, heap, ready, read, rows, dirty, margin, link_margin,
):  # fmt: skip
    """Simulate cycle by cycle of those in which something happens; see `Engine.advance`."""
    stages, split, enforced = p[P_STAGES], p[P_SPLIT], p[P_ENFORCED]
    units = 2 if split else 1
    while True:
        # --- is there room for whatever may happen in a cycle?
        if scalars[ROW] + margin + scalars[READY] > len(rows):
            return ROWS_FULL if scalars[ROW] else GROW
        if (
            scalars[HEAP] + margin > len(heap)
            or scalars[READY] + margin > len(ready)
            or scalars[WIDEST_LINK] + link_margin > reserved.shape[1]
            or scalars[MOST_IN_FLIGHT] + 2 > read.shape[1]
        ):
            return GROW
        if scalars[EVENTS] >= p[P_STOP_EVENTS]:
            return EVENTS_SPENT
        dirty_count = 0
        if scalars[FRESH]:
            scalars[FRESH] = 0
            for s in range(stages):
                dirty_count = _touch(s, core_state, dirty, dirty_count)
        elif scalars[HEAP] == 0:
            return DONE if scalars[FINISHED] == stages * units else DEADLOCK
        else:
            scalars[NOW] = heap[0, 0]
        now, record, entered = scalars[NOW], p[P_RECORD], False

        while True:
            happened = False
            # --- completions and arrivals; the host
            room = not enforced or core_state[0, S_LEVEL] + p[P_HOST_BYTES] <= cores[0, C_CAPACITY]
            if scalars[SLOT_FREE] and scalars[SENT] < p[P_SAMPLES] and room:
                if enforced:
                    dirty_count = _book(0, INPUT, p[P_HOST_BYTES], scalars, core_state, levels, dirty, dirty_count)
                scalars[SLOT_FREE] = 0
                _row(rows, scalars, record, now, now + p[P_HOST_CYCLES], 0, LOAD, scalars[SENT], -1, -1)
                _push(heap, scalars, now + p[P_HOST_CYCLES], E_LOADED * KIND)
                happened = True
            while scalars[HEAP] and heap[0, 0] == now:
                what = _pop(heap, scalars)
                kind, which = what // KIND, what % KIND
                scalars[EVENTS] += 1
                happened = True
                if kind == E_LOADED:
                    if not enforced:
                        dirty_count = _book(0, INPUT, p[P_HOST_BYTES], scalars, core_state, levels, dirty, dirty_count)
                    scalars[SENT] += 1
                    core_state[0, S_FORWARD_READY] = scalars[SENT]
                    dirty_count = _touch(0, core_state, dirty, dirty_count)
                elif kind == E_LEFT:
                    s = routes[which, R_SOURCE]
                    core_state[s, S_SLOTS] += 1
                    dirty_count = _book(
                        s, OUTPUT, -routes[which, R_SIZE], scalars, core_state, levels, dirty, dirty_count
                    )
                elif kind == E_ARRIVED:
                    s = routes[which, R_TARGET]
                    arrived[which] += 1
                    if not enforced:
                        size = routes[which, R_SIZE]
                        dirty_count = _book(s, INPUT, size, scalars, core_state, levels, dirty, dirty_count)
                    dirty_count = _touch(s, core_state, dirty, dirty_count)
                    complete = arrived[which]
                    if routes[which, R_BACKWARD]:
                        for i in range(result_start[s], result_start[s + 1]):
                            complete = min(complete, arrived[results[i] + 1])
                        core_state[s, S_BACKWARD_READY] = complete
                    else:
                        for i in range(passed_back_start[s], passed_back_start[s + 1]):
                            complete = min(complete, arrived[passed_back[i] - 1])
                        core_state[s, S_FORWARD_READY] = complete
                else:
                    s, k = which // 2, which % 2
                    unit, account = unit_state[s, k], accounts[s, k]
                    dirty_count = _touch(s, core_state, dirty, dirty_count)
                    sample = unit[T_SAMPLE]
                    if not unit[T_BACKWARD]:
                        account[A_F] += cores[s, C_F]
                        if cores[s, C_LAST]:
                            core_state[s, S_BACKWARD_READY] += 1
                    else:
                        sends = passed_back_start[s + 1] - passed_back_start[s]
                        updates = _is_last(sample, p)
                        over = False
                        if unit[T_STEP] == 0:
                            account[A_BX] += cores[s, C_BX]
                        elif unit[T_STEP] == sends + 1:
                            account[A_BW] += cores[s, C_BW]
                            over = not updates
                        else:
                            account[A_U] += cores[s, C_U]
                            over = True
                        if over:
                            if updates:
                                size = -cores[s, C_GRADIENTS]
                                dirty_count = _book(s, GRADIENTS, size, scalars, core_state, levels, dirty, dirty_count)
                                core_state[s, S_HOLDS] = 0
                                core_state[s, S_VERSION] += 1
                            size = -cores[s, C_RECEIVED]
                            dirty_count = _book(s, INPUT, size, scalars, core_state, levels, dirty, dirty_count)
                            size = -cores[s, C_STASH]
                            dirty_count = _book(s, STASH, size, scalars, core_state, levels, dirty, dirty_count)
                            size = -cores[s, C_VERSIONS]
                            dirty_count = _book(s, VERSIONS, size, scalars, core_state, levels, dirty, dirty_count)
                            core_state[s, S_DONE] += 1
                    unit[T_STEP] += 1
                    _go_on(
                        s, k, now, p, scalars, cores, routes, results, result_start, passed_back, passed_back_start,
                        core_state, unit, heap, ready, read, rows,
                    )  # fmt: skip
            if happened:
                continue

            # --- results into output slots: per core whoever has waited longest, then the oldest sample
            for i in range(dirty_count):
                s = dirty[i]
                if core_state[s, S_SLOTS] == 0:
                    continue
                best = -1
                for k in range(units):
                    if unit_state[s, k, T_STATE] == WAITING and (
                        best < 0
                        or unit_state[s, k, T_TIME] < unit_state[s, best, T_TIME]
                        or (
                            unit_state[s, k, T_TIME] == unit_state[s, best, T_TIME]
                            and unit_state[s, k, T_SAMPLE] < unit_state[s, best, T_SAMPLE]
                        )
                    ):
                        best = k
                if best < 0:
                    continue
                unit = unit_state[s, best]
                route = _message(s, unit, results, result_start, passed_back, passed_back_start)
                size = routes[route, R_SIZE]
                if enforced and core_state[s, S_LEVEL] + size > cores[s, C_CAPACITY]:
                    continue
                happened = True
                core_state[s, S_SLOTS] -= 1
                dirty_count = _book(s, OUTPUT, size, scalars, core_state, levels, dirty, dirty_count)
                accounts[s, best, A_OUTPUT] += now - unit[T_TIME]
                _post(route, unit[T_SAMPLE], now, routes, scalars, ready)
                unit[T_STEP] += 1
                _go_on(
                    s, best, now, p, scalars, cores, routes, results, result_start, passed_back, passed_back_start,
                    core_state, unit, heap, ready, read, rows,
                )  # fmt: skip
            if happened:
                continue

            # --- messages onto links, in the order (ready cycle, source stage, sample, target stage)
            if scalars[READY]:
                kept = 0
                for i in range(scalars[READY]):
                    route, sample = ready[i, 4], ready[i, 2]
                    target, size = routes[route, R_TARGET], routes[route, R_SIZE]
                    if enforced and core_state[target, S_LEVEL] + size > cores[target, C_CAPACITY]:
                        ready[kept] = ready[i]
                        kept += 1
                        continue
                    happened = True
                    if enforced:
                        dirty_count = _book(target, INPUT, size, scalars, core_state, levels, dirty, dirty_count)
                    start = _admit(route, now, routes, links, offsets, link_start, reserved, reserved_count, scalars)
                    hold = routes[route, R_HOLD]
                    for j in range(link_start[route], link_start[route + 1]):
                        link_bytes[links[j]] += size
                        link_cycles[links[j]] += hold
                    arrival = start + hold + routes[route, R_LATENCY]
                    _row(rows, scalars, record, start, arrival, routes[route, R_SOURCE], SEND, sample, -1, target)
                    if hold:
                        _push(heap, scalars, start + hold, E_LEFT * KIND + route)
                    _push(heap, scalars, arrival, E_ARRIVED * KIND + route)
                scalars[READY] = kept
            if happened:
                continue

            # --- choices of free units
            for i in range(dirty_count):
                s = dirty[i]
                for k in range(units):
                    unit = unit_state[s, k]
                    if unit[T_STATE] != IDLE:
                        continue
                    forward = (not split or k == 0) and _forward_due(s, p, core_state)
                    backward = (not split or k == 1) and _backward_due(s, core_state)
                    needed = 0 if core_state[s, S_HOLDS] else cores[s, C_GRADIENTS]
                    growth = cores[s, C_STASH] + cores[s, C_VERSIONS] - cores[s, C_ACTIVATION]
                    in_flight = core_state[s, S_STARTED] - core_state[s, S_DONE]
                    if forward and 0 <= cores[s, C_CREDITS] <= in_flight:
                        forward = False
                    if enforced:
                        free = cores[s, C_CAPACITY] - core_state[s, S_LEVEL]
                        forward = forward and growth <= free
                        backward = backward and needed <= free
                    if forward and backward:
                        forward = not p[P_BACKWARD_FIRST]
                        backward = not forward
                    if not (forward or backward):
                        continue
                    happened = True
                    _settle_account(unit, accounts[s, k], now)
                    unit[T_STARTED], unit[T_STEP], unit[T_HELD] = 1, 0, 0
                    if forward:
                        sample = core_state[s, S_STARTED]
                        version = core_state[s, S_VERSION]
                        delay = 0 if p[P_DRAINED] else in_flight
                        for row in range(2):
                            if row == 1 or version >= 1:
                                entry = delays[row, s]
                                entry[0] += 1
                                entry[1] += delay
                                entry[2] = min(entry[2], delay)
                                entry[3] = max(entry[3], delay)
                        read[s, sample % read.shape[1]] = version
                        core_state[s, S_STARTED] += 1
                        core_state[s, S_IN_FLIGHT_PEAK] = max(core_state[s, S_IN_FLIGHT_PEAK], in_flight + 1)
                        scalars[MOST_IN_FLIGHT] = max(scalars[MOST_IN_FLIGHT], in_flight + 1)
                        size = -cores[s, C_ACTIVATION]
                        dirty_count = _book(s, INPUT, size, scalars, core_state, levels, dirty, dirty_count)
                        size = cores[s, C_STASH]
                        dirty_count = _book(s, STASH, size, scalars, core_state, levels, dirty, dirty_count)
                        size = cores[s, C_VERSIONS]
                        dirty_count = _book(s, VERSIONS, size, scalars, core_state, levels, dirty, dirty_count)
                        if s == 0:
                            scalars[SLOT_FREE] = 1
                            scalars[ENTERED] = sample
                            entered = entered or sample == p[P_STOP_SAMPLE]
                    else:
                        sample = core_state[s, S_BACKWARDS]
                        core_state[s, S_BACKWARDS] += 1
                        core_state[s, S_HOLDS] = 1
                        dirty_count = _book(s, GRADIENTS, needed, scalars, core_state, levels, dirty, dirty_count)
                    unit[T_BACKWARD], unit[T_SAMPLE] = backward, sample
                    _go_on(
                        s, k, now, p, scalars, cores, routes, results, result_start, passed_back, passed_back_start,
                        core_state, unit, heap, ready, read, rows,
                    )  # fmt: skip
            if not happened:
                break

        # --- the cycle is over
        for i in range(dirty_count):
            s = dirty[i]
            core_state[s, S_DIRTY] = 0
            for category in range(levels.shape[1]):
                if levels[s, category] > peaks[s, category]:
                    peaks[s, category], peak_cycles[s, category] = levels[s, category], now
            if core_state[s, S_LEVEL] > core_state[s, S_PEAK]:
                core_state[s, S_PEAK], core_state[s, S_PEAK_CYCLE] = core_state[s, S_LEVEL], now
            for k in range(units):
                unit = unit_state[s, k]
                if unit[T_STATE] == IDLE:
                    _settle_account(unit, accounts[s, k], now)
                    forward = (not split or k == 0) and _forward_due(s, p, core_state)
                    unit[T_HELD] = forward or ((not split or k == 1) and _backward_due(s, core_state))
        scalars[MACHINE_PEAK] = max(scalars[MACHINE_PEAK], scalars[MACHINE_LEVEL])
        if entered:
            for s in range(stages):
                for k in range(units):
                    if unit_state[s, k, T_STATE] == IDLE:
                        _settle_account(unit_state[s, k], accounts[s, k], now)
            return BOUNDARY


@inlined
def _message(s, unit, results, result_start, passed_back, passed_back_start):
    """The route of the message that a unit's plan has next."""
    if unit[T_BACKWARD]:
        return passed_back[passed_back_start[s] + unit[T_STEP] - 1]
    return results[result_start[s] + unit[T_STEP] - 1]


@inlined
def _post(route, sample, now, routes, scalars, ready):
    """Put a message among those that are ready, which are kept in the order in which they are admitted."""
    source, target = routes[route, R_SOURCE], routes[route, R_TARGET]
    i = scalars[READY]
    scalars[READY] += 1
    while i > 0:
        before = ready[i - 1]
        if before[0] < now or (before[0] == now and (before[1], before[2], before[3]) <= (source, sample, target)):
            break
        ready[i] = before
        i -= 1
    ready[i, 0], ready[i, 1], ready[i, 2], ready[i, 3], ready[i, 4] = now, source, sample, target, route


@inlined
def _go_on(
    s, k, now, p, scalars, cores, routes, results, result_start, passed_back, passed_back_start,
    core_state, unit, heap, ready, read, rows,
):  # fmt: skip
    """Begin what a unit's plan has next: F and its messages; or Bx, its messages, Bw and perhaps U."""
    record, sample = p[P_RECORD], unit[T_SAMPLE]
    backward = unit[T_BACKWARD]
    starts = passed_back_start if backward else result_start
    sends = starts[s + 1] - starts[s]
    while True:
        step = unit[T_STEP]
        if 1 <= step <= sends:
            route = _message(s, unit, results, result_start, passed_back, passed_back_start)
            if routes[route, R_HOLD] == 0:  # it holds no link for any cycle, and needs no slot
                _post(route, sample, now, routes, scalars, ready)
                unit[T_STEP] += 1
                continue
            unit[T_STATE], unit[T_TIME] = WAITING, now
            return
        if not backward:
            if step == 0:
                length, op, named, version = cores[s, C_F], F, sample, core_state[s, S_VERSION]
            else:
                break
        elif step == 0 or step == sends + 1:
            length, op = (cores[s, C_BX], BX) if step == 0 else (cores[s, C_BW], BW)
            named = sample
            version = read[s, sample % read.shape[1]] if p[P_STASH_WEIGHTS] else core_state[s, S_VERSION]
        elif step == sends + 2 and _is_last(sample, p):
            length, op, named, version = cores[s, C_U], U, sample - _place(sample, p), core_state[s, S_VERSION] + 1
        else:
            break
        _row(rows, scalars, record, now, now + length, s, op, named, version, -1)
        unit[T_STATE], unit[T_TIME] = COMPUTING, now + length
        _push(heap, scalars, now + length, E_UNIT * KIND + 2 * s + k)
        return
    # the plan is done
    unit[T_STATE], unit[T_TIME], unit[T_HELD] = IDLE, now, 0
    if backward or (p[P_SPLIT] and k == 0):
        unit[T_REMAINING] -= 1
        if unit[T_REMAINING] == 0:
            unit[T_STATE], unit[T_FINISHED] = OVER, now
            scalars[FINISHED] += 1


@compiled
def _mix(h, value):
    """Stir a value into a hash (the finalizer of splitmix64)."""
    z = (h ^ np.uint64(value)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def _state_hash(
    p, scalars, sample, core_state, unit_state, arrived, reserved, reserved_count, heap, ready, read
):  # fmt: skip
    """A hash of what `Engine.state` holds."""
    now, h = scalars[NOW], np.uint64(0)
    for s in range(p[P_STAGES]):
        for column in range(S_DIRTY):
            value = core_state[s, column]
            if column not in (S_SLOTS, S_HOLDS, S_LEVEL):
                value -= sample
            h = _mix(h, value)
        for k in range(2 if p[P_SPLIT] else 1):
            unit = unit_state[s, k]
            h = _mix(_mix(_mix(h, unit[T_STATE]), unit[T_HELD]), unit[T_STARTED])
            if unit[T_STATE] != IDLE:
                h = _mix(_mix(h, unit[T_BACKWARD]), unit[T_SAMPLE] - sample)
                h = _mix(_mix(h, unit[T_STEP]), unit[T_TIME] - now)
        if p[P_STASH_WEIGHTS]:
            for i in range(core_state[s, S_BACKWARDS], core_state[s, S_STARTED]):
                h = _mix(h, read[s, i % read.shape[1]] - sample)
    events = np.uint64(0)  # their order in the heap carries no meaning
    for i in range(scalars[HEAP]):
        events += _mix(_mix(np.uint64(1), heap[i, 0] - now), heap[i, 1])
    h = _mix(h, events)
    for link in range(len(reserved_count)):
        for i in range(reserved_count[link]):
            if reserved[link, i, 1] > now:
                h = _mix(_mix(_mix(h, link), reserved[link, i, 0] - now), reserved[link, i, 1] - now)
    for i in range(scalars[READY]):
        h = _mix(_mix(_mix(h, ready[i, 0] - now), ready[i, 2] - sample), ready[i, 4])
    for route in range(len(arrived)):
        h = _mix(h, arrived[route] - sample)
    return _mix(_mix(h, scalars[SENT] - sample), scalars[SLOT_FREE])
