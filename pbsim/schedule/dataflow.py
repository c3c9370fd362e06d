"""The pipeline in dataflow timing: a core starts as soon as it has input, a credit, memory and a free unit.

The host puts samples into stage 0's single input slot. A core's unit takes the oldest sample it can run forward or
backward, `priority` deciding between the two (a drained schedule runs its forwards first); what it makes goes through
the output buffer onto the links. A sample is in flight at a stage from the start of its forward to the end of its
backward and of the update that follows, and credits bound how many are.

Where memory is enforced, whatever finds no room waits: a sample at the host and a message in its output buffer for room
in the target's input buffer, which they take from the moment they leave; a result for room in the output buffer; a
forward for room for its stash; a backward for room for the gradient of the weights.

Once a message is admitted to the links it is known when it leaves its core and when it arrives. Neither is an event:
a core looks at what is there by now when a unit of it is free, and one that sleeps sets its alarm. (Where memory is
enforced others may wait for the bytes of a message that leaves; then that is an event.)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from struct import Struct
from typing import cast

import simpy
from simpy.events import EventPriority

from pbsim.hardware.fabric import Route
from pbsim.hardware.machine import Channel, Machine, MachineCore
from pbsim.hardware.memory import NOTE, Category, Ledger
from pbsim.schedule.timing import (
    ADMIT,
    AGAIN,
    CHOOSE,
    CHOOSE_BACKWARD,
    GRANT,
    LOAD,
    CoreState,
    DeadlockError,
    Phase,
    Recorder,
    Timing,
    UnitCycles,
    Waits,
)
from pbsim.schedule.trace import ROW, Op

Process = Generator[simpy.Event, object, None]

Order = Sequence[tuple[Op, int]]
"""What a stage runs, in this order and no other: (`Op.FORWARD` or `Op.INPUT_GRADIENT` for a backward, sample)."""

F, BX, BW, U, SEND = Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.UPDATE, Op.SEND
pack = ROW.pack
three_notes = Struct(3 * NOTE.format).pack
"""A message's entry into the output buffer, its leaving and its arrival: cycle and booking of each."""

NEVER = 1 << 62
"""A cycle that no run reaches."""
AWAKE = -1
"""When a unit wakes up that does not sleep: no cycle is before that."""
NO_SAMPLE = -1
"""What is next where an order made by hand has something else next."""
UNLIMITED = 1 << 62
"""More credits, or bytes, than any run asks for."""


class Inbox:
    """What a core is sent for its forwards, or for its backwards.

    Attributes
    ----------
    parts : messages that make a sample complete.
    next, next_at : the sample that the core runs next; the cycle at which it is complete, as soon as that is known.
    unit : whom that may wake.
    """

    unit: DataflowUnit

    def __init__(self, parts: int) -> None:
        self.parts, self.next, self.next_at = parts, 0, NEVER
        self.complete_at: dict[int, int] = {}
        self._partial: dict[int, tuple[int, int]] = {}

    def comes(self, sample: int, cycle: int) -> None:
        """A part of a sample will be here at a cycle."""
        if self.parts > 1:
            seen, latest = self._partial.pop(sample, (0, 0))
            cycle = max(cycle, latest)
            if seen + 1 < self.parts:
                self._partial[sample] = seen + 1, cycle
                return
        self.complete_at[sample] = cycle
        if sample == self.next:
            self.next_at = cycle
            self.unit.wake(cycle)

    def turn_to(self, sample: int) -> None:
        """A sample comes next."""
        self.next, self.next_at = sample, self.complete_at.get(sample, NEVER)


class Lane:
    """A route between two cores: where its messages come in, and what they book.

    Attributes
    ----------
    hold : cycles that a message holds each link and its slot of the output buffer; one that holds none needs no slot.
    carried : messages so far.
    """

    def __init__(self, route: Route, source: DataflowCore, target: DataflowCore, ledger: Ledger) -> None:
        self.route, self.source, self.target = route, source, target
        self.size, self.hold, self.latency = route.size, route.serialisation, route.latency
        self.inbox = target.gradients if route.source > route.target else target.activations
        buffered = route.size if self.hold else 0
        self.enters = ledger.booking(route.source, {Category.OUTPUT_BUFFER: buffered})
        self.leaves = ledger.booking(route.source, {Category.OUTPUT_BUFFER: -buffered})
        self.arrives = ledger.booking(route.target, {Category.INPUT_BUFFER: route.size})
        self.carried = 0


class DataflowFabric:
    """Carries messages over the links, in the order (ready cycle, source stage, sample, target stage)."""

    def __init__(self, model: DataflowPipeline) -> None:
        self.env, self.links = model.env, model.timing.links
        self.record, self.note = model.recorder.rows.extend, model.timing.ledger.notes.extend
        self.ready: list[tuple[int, int, int, int, Lane]] = []
        self._admitting = False

    def post(self, lane: Lane, sample: int) -> None:
        """A message has entered its core's output buffer and is ready to leave; a core posts them in order."""
        if not self.ready and self.env.quiet(ADMIT) and lane.target.has_room(lane.size):
            self._admit(lane, sample)
            return
        self.ready.append((self.env.now, lane.route.source, sample, lane.route.target, lane))
        self.admit_later()

    def admit_later(self) -> None:
        """Admit what is ready once results have entered the output buffers."""
        if self.ready and not self._admitting:
            self._admitting = True
            Phase(self.env, ADMIT).callbacks.append(self._admit_ready)

    def _admit_ready(self, _: simpy.Event) -> None:
        self._admitting = False
        waiting, self.ready = sorted(self.ready, key=lambda item: item[:4]), []
        for message in waiting:
            _ready, _source, sample, _target, lane = message
            if lane.target.has_room(lane.size):
                self._admit(lane, sample)
            else:
                self.ready.append(message)

    def _admit(self, lane: Lane, sample: int) -> None:
        """A message starts as soon as its links are free; from now it is known when it will have left and arrived."""
        now, route, source = self.env.now, lane.route, lane.source
        start = self.links.admit(route, now)
        left = start + lane.hold
        arrival = left + lane.latency
        self.record(pack(start, arrival, route.source, SEND, sample, -1, route.target))
        lane.carried += 1
        if source.enforced:
            lane.target.book(lane.arrives, now)
            if lane.hold:
                self.env.timeout(left - now, lane).callbacks.append(source.output_left)
        else:
            self.note(three_notes(now, lane.enters.number, left, lane.leaves.number, arrival, lane.arrives.number))
            if lane.hold:
                source.output_leaves(left)
        lane.inbox.comes(sample, arrival)


class DataflowHost:
    """Sends the samples, one whenever stage 0's input slot is free (and, where enforced, its core has room)."""

    def __init__(self, model: DataflowPipeline) -> None:
        self.core, self.env, self.recorder = model.cores[0], model.env, model.recorder
        self.samples, self.cycles, self.size = model.timing.samples, model.machine.host_cycles, model.machine.host_bytes
        self.loads = model.timing.ledger.booking(0, {Category.INPUT_BUFFER: self.size})
        self.sent = 0
        self.slot_free = True
        Phase(self.env, LOAD).callbacks.append(lambda _: self.send())

    def send(self) -> None:
        """Send the next sample, if it can be sent."""
        core, now = self.core, self.env.now
        if not (self.slot_free and self.sent < self.samples and core.has_room(self.size)):
            return
        arrival = now + self.cycles
        self.recorder.rows += pack(now, arrival, 0, Op.LOAD, self.sent, -1, -1)
        core.book(self.loads, now if core.enforced else arrival)
        core.activations.comes(self.sent, arrival)
        self.slot_free = False
        self.sent += 1


class DataflowUnit:
    """A unit of a core: what it may run, and how its cycles are spent."""

    def __init__(self, core: DataflowCore, usage: UnitCycles, forwards: bool, backwards: bool) -> None:
        self.core, self.env, self.usage = core, core.env, usage
        self.forwards, self.backwards = forwards, backwards
        self.phase: EventPriority = CHOOSE if forwards else CHOOSE_BACKWARD
        self.remaining = core.model.timing.samples
        self.started = False
        self._alarm: simpy.Event = Phase(self.env, self.phase)
        self._wakes_at = AWAKE
        if forwards:
            core.activations.unit = self
        if backwards:
            core.gradients.unit = self

    def run(self) -> Process:
        """The story of a unit: choose, compute, pass on, until every sample is done."""
        core, env = self.core, self.env
        yield self._alarm
        while self.remaining:
            op = core.choose(self)
            if op is None:
                yield from self.sleep()
                continue
            self.started = True
            if op == F:
                yield from core.forward(self, core.take(core.activations))
                self.remaining -= not self.backwards
            else:
                yield from core.backward(self, core.take(core.gradients))
                self.remaining -= 1
            if not (core.apart or env.quiet(self.phase)):
                yield Phase(env, self.phase)
        core.model.finished(self)

    def sleep(self) -> Process:
        """Wait until something arrives; account for the wait by what is missing."""
        since, held_back = self.env.now, self.core.held_back(self)
        self._wakes_at = cycle = self.core.expects(self)
        self._alarm = self.env.event() if cycle == NEVER else Phase(self.env, self.phase, cycle - since)
        yield self._alarm
        self._wakes_at = AWAKE
        waited = self.env.now - since
        if not self.started:
            self.usage.idle += waited
        elif held_back:
            self.usage.stall_memory += waited
        else:
            self.usage.stall_input += waited

    def wake(self, cycle: int) -> None:
        """Something will have changed: choose again at that cycle, whoever sleeps until a later one."""
        if cycle < self._wakes_at:
            earlier = Phase(self.env, self.phase, cycle - self.env.now)
            earlier.callbacks, self._alarm.callbacks = self._alarm.callbacks, earlier.callbacks
            self._alarm, self._wakes_at = earlier, cycle


class DataflowCore(CoreState):
    """A core: buffers, credits, and the operations its units run.

    Attributes
    ----------
    apart : whether nothing that others do reaches the core within a cycle; then it need not wait for them to choose.
    """

    def __init__(self, model: DataflowPipeline, core: MachineCore, order: Order | None) -> None:
        super().__init__(model.env, model.machine, model.timing, core)
        pipeline = model.machine.hardware.pipeline
        self.model, self.record, self.post = model, model.recorder.rows.extend, model.fabric.post
        self.enforced = pipeline.memory == "enforce"
        self.capacity = core.memory.capacity if self.enforced else UNLIMITED
        self.credits = UNLIMITED if core.credits is None else core.credits
        self.backward_first = pipeline.priority == "backward" and not self._drained
        self._cut_if_full = model.recorder.cut_if_full
        self._awaits_updates = self._drained and order is None
        self.free_slots = pipeline.output_slots
        self.activations = Inbox(parts=max(1, len(self.incoming)))
        self.gradients = Inbox(parts=max(1, len(self.outgoing)))
        self.order = list(reversed(order)) if order is not None else None
        self._follow_order()
        self.results: list[Lane] = []
        self.passed_back: list[Lane] = []
        self.units: list[DataflowUnit] = []
        self.waiting: list[tuple[int, int, int, Lane, simpy.Event]] = []
        self.apart = False
        self._leaving: list[int] = []
        self._enough_slots = len(self.incoming) + len(self.outgoing) if model.machine.split else 1

    def has_room(self, size: int) -> bool:
        """Whether the core's memory has room for so much more."""
        return self.held + size <= self.capacity

    def choose(self, unit: DataflowUnit) -> Op | None:
        """What a free unit does next: forward or backward of the oldest sample that can run, or nothing."""
        now, room = self.env.now, self.capacity - self.held
        backward = unit.backwards and self.gradients.next_at <= now and self.missing_gradient_bytes <= room
        forward = unit.forwards and not (backward and self.backward_first) and self._forward_due(now)
        if forward and self.in_flight < self.credits and self.forward_begins.size <= room:
            return F
        return BX if backward else None

    def held_back(self, unit: DataflowUnit) -> bool:
        """Whether a unit that has chosen nothing has all it needs but a credit or memory."""
        now = self.env.now
        return (unit.forwards and self._forward_due(now)) or (unit.backwards and self.gradients.next_at <= now)

    def expects(self, unit: DataflowUnit) -> int:
        """When the next sample that a unit waits for will be complete, as far as is known."""
        now, cycle = self.env.now, NEVER
        if unit.forwards and now < self.activations.next_at:
            cycle = self.activations.next_at
        if unit.backwards and now < self.gradients.next_at < cycle:
            cycle = self.gradients.next_at
        return cycle

    def _forward_due(self, now: int) -> bool:
        """Whether the inputs, and the weights, of the next forward are there."""
        if self.activations.next_at > now:
            return False
        return not self._awaits_updates or self.version >= self._batches.index(self.activations.next)

    def take(self, inbox: Inbox) -> int:
        """The sample that is next, for a unit to run."""
        sample = inbox.next
        del inbox.complete_at[sample]
        if self.order is None:
            inbox.turn_to(sample + 1)
        else:
            self.order.pop()
            self._follow_order()
            self.wake()
        return sample

    def _follow_order(self) -> None:
        """Let what is next in an order made by hand be next, and nothing else."""
        if self.order is not None:
            op, sample = self.order[-1] if self.order else (None, NO_SAMPLE)
            self.activations.turn_to(sample if op == F else NO_SAMPLE)
            self.gradients.turn_to(sample if op == BX else NO_SAMPLE)

    def forward(self, unit: DataflowUnit, sample: int) -> Process:
        """F of a sample: read the weights as they are, compute, pass the result on."""
        now, cycles = self.env.now, self.forward_cycles
        self.begin_forward(sample, now)
        if self.stage == 0:
            self.model.host.slot_free = True
        if self.enforced:
            self.wake()  # the core's other unit is the first to use what this has freed
            self.model.freed(self, AGAIN)
        elif self.stage == 0:
            self.model.host.send()
        self.record(pack(now, now + cycles, self.stage, F, sample, self.version, -1))
        yield self.env.timeout(cycles)
        unit.usage.forward += cycles
        if not self.results:
            self.gradients.comes(sample, now + cycles)
        elif rest := self.send(self.results, sample):
            yield from self.send_later(unit, rest, sample)

    def backward(self, unit: DataflowUnit, sample: int) -> Process:
        """Bx, Bw and, where one is due, U of a sample, back to back; the gradients leave at the end of Bx."""
        now, stage, record, usage = self.env.now, self.stage, self.record, unit.usage
        version = self.begin_backward(sample, now)
        record(pack(now, now + self.input_gradient_cycles, stage, BX, sample, version, -1))
        if self.input_gradient_cycles:
            yield self.env.timeout(self.input_gradient_cycles)
        if self.passed_back and (rest := self.send(self.passed_back, sample)):
            yield from self.send_later(unit, rest, sample)
        now = self.env.now
        end = computed = now + self.weight_gradient_cycles
        record(pack(now, computed, stage, BW, sample, version, -1))
        updates = self.updates_after(sample)
        if updates:
            end += self.update_cycles
            first, made = self.update_row(sample)
            record(pack(computed, end, stage, U, first, made, -1))
        self._cut_if_full()
        if end > now:
            yield self.env.timeout(end - now)
        usage.input_gradient += self.input_gradient_cycles
        usage.weight_gradient += self.weight_gradient_cycles
        usage.update += end - computed
        self.end_backward(end, updated=updates)
        if self.enforced:
            self.model.freed(self, LOAD)
        if len(self.units) > 1:
            self.wake()

    def send(self, lanes: Sequence[Lane], sample: int) -> Sequence[Lane]:
        """Put a result's messages into the output buffer, one after the other; returns those that wait for a slot.

        With split units the other unit may want one in the same cycle: unless there are enough for both, slots are
        granted once every completion has come.
        """
        self._reclaim_slots(self.env.now)
        unrivalled = self.free_slots >= self._enough_slots and not self.waiting and not self.enforced
        for index, lane in enumerate(lanes):
            if lane.hold:
                if not (unrivalled and self.free_slots):
                    return lanes[index:]
                self.free_slots -= 1
            self.post(lane, sample)
        return ()

    def send_later(self, unit: DataflowUnit, lanes: Sequence[Lane], sample: int) -> Process:
        """Put messages into the output buffer as it has free slots; the unit waits."""
        for lane in lanes:
            if not lane.hold:
                self.post(lane, sample)
                continue
            since, granted = self.env.now, self.env.event()
            heappush(self.waiting, (since, sample, lane.route.target, lane, granted))
            self.grant_later()
            yield granted
            unit.usage.stall_output += self.env.now - since

    def output_leaves(self, cycle: int) -> None:
        """A slot will be free at a cycle, when the last byte of a message has left."""
        heappush(self._leaving, cycle)
        if self.waiting:
            self.grant_later()

    def output_left(self, event: simpy.Event) -> None:
        """Where memory is enforced: the last byte of a message has left, and others may wait for its room."""
        lane = cast(Lane, event.value)
        self.free_slots += 1
        self.book(lane.leaves, self.env.now)
        self.grant_later()
        self.model.freed(self, LOAD)

    def _reclaim_slots(self, now: int) -> None:
        """Slots of messages that have left by now are free."""
        while self._leaving and self._leaving[0] <= now:
            heappop(self._leaving)
            self.free_slots += 1

    def grant_later(self) -> None:
        """Give a slot to what waits for one: once every completion of the cycle in which there is one has come."""
        now = self.env.now
        self._reclaim_slots(now)
        if not self.waiting or not self.has_room(self.waiting[0][3].size):
            return
        if self.free_slots:
            Phase(self.env, GRANT).callbacks.append(self._grant)
        elif self._leaving:
            Phase(self.env, GRANT, self._leaving[0] - now).callbacks.append(self._grant)

    def _grant(self, _: simpy.Event) -> None:
        """Give a free slot to the message that has waited longest, of those to the oldest sample's."""
        self._reclaim_slots(self.env.now)
        if not (self.waiting and self.free_slots and self.has_room(self.waiting[0][3].size)):
            return
        _since, sample, _target, lane, granted = heappop(self.waiting)
        self.free_slots -= 1
        if self.enforced:
            self.book(lane.enters, self.env.now)
        granted.succeed()
        self.grant_later()
        self.post(lane, sample)

    def wake(self) -> None:
        """Let units that sleep choose again in this cycle."""
        for unit in self.units:
            unit.wake(self.env.now)

    def waits(self) -> Waits:
        """For a deadlock's message: what this core has, and what it waits for."""
        ready, now = self.gradients.complete_at, self.env.now
        waits = Waits(self.stage, self.capacity - self.held, self.in_flight, self.done, len(ready))
        if self.waiting:
            _since, sample, target, lane, _granted = self.waiting[0]
            waits.output(sample, target, lane.size, slot=self.free_slots > 0)
        if ready and not self.has_room(self.missing_gradient_bytes):
            waits.backward(min(ready), self.missing_gradient_bytes)
        if self._forward_due(now) and not self.has_room(self.forward_begins.size):
            waits.forward(self.activations.next, self.forward_begins.size)
        elif self._forward_due(now) and self.in_flight >= self.credits:
            waits.credit(self.activations.next, self.credits)
        for _ready, source, sample, target, lane in self.model.fabric.ready:
            if source == self.stage:
                waits.message(sample, lane.size, target, lane.target.capacity - lane.target.held)
        if self.order:
            waits.ordered(*self.order[-1])
        return waits


class DataflowPipeline:
    """The whole machine in dataflow timing; `recorder.chunks()` runs it.

    Parameters
    ----------
    orders : per stage what it runs, made by hand; by default each stage chooses.
    """

    def __init__(
        self, machine: Machine, timing: Timing, recorder: Recorder, orders: Sequence[Order] | None = None
    ) -> None:
        self.machine, self.timing, self.recorder = machine, timing, recorder
        self.env = recorder.env
        self.fabric = DataflowFabric(self)
        self.cores = [
            DataflowCore(self, core, None if orders is None else orders[core.stage]) for core in machine.cores
        ]
        self.lanes = [lane for channel in machine.channels for lane in self._lanes(channel)]
        for core in self.cores:
            core.results.sort(key=lambda lane: lane.route.target)
            core.passed_back.sort(key=lambda lane: lane.route.target)
            comes_later = all(lane.hold + lane.latency for lane in self.lanes if lane.target is core)
            core.apart = comes_later and not core.enforced and not machine.split
        self.unfinished: set[DataflowUnit] = set()
        self.finished_at: dict[DataflowUnit, int] = {}
        self._freed: dict[EventPriority, list[DataflowCore]] = {}
        usages = iter(timing.units)
        for core in self.cores:
            roles = ((True, False), (False, True)) if machine.split else ((True, True),)
            core.units = [DataflowUnit(core, next(usages), *role) for role in roles]
            self.unfinished.update(core.units)
            for unit in core.units:
                self.env.process(unit.run())
        self.host = DataflowHost(self)

    def _lanes(self, channel: Channel) -> tuple[Lane, Lane]:
        """The two directions of a channel, at the cores that use them."""
        source, target, ledger = self.cores[channel.source], self.cores[channel.target], self.timing.ledger
        forward = Lane(channel.forward, source, target, ledger)
        gradient = Lane(channel.gradient, target, source, ledger)
        source.results.append(forward)
        target.passed_back.append(gradient)
        return forward, gradient

    def freed(self, core: DataflowCore, phase: EventPriority) -> None:
        """Memory of a core, or stage 0's input slot, has become free: at that phase, let what waits for it go on."""
        if phase not in self._freed:
            self._freed[phase] = []
            Phase(self.env, phase).callbacks.append(lambda _: self._use_freed(phase))
        self._freed[phase].append(core)

    def _use_freed(self, phase: EventPriority) -> None:
        cores = dict.fromkeys(self._freed.pop(phase))
        self.host.send()
        for core in cores:
            core.grant_later()
            core.wake()
        self.fabric.admit_later()

    def finished(self, unit: DataflowUnit) -> None:
        """A unit has run its last operation."""
        self.unfinished.discard(unit)
        self.finished_at[unit] = self.env.now

    def close(self) -> None:
        """Complete the accounts at the end; raises `DeadlockError` if the machine stopped before it was done."""
        if self.unfinished:
            waiting = [core for core in self.cores if self.unfinished.intersection(core.units)]
            raise DeadlockError(core.waits().problem() for core in waiting)
        for lane in self.lanes:
            self.timing.links.carry(lane.route, lane.carried)
        self.timing.settle()
        self.timing.cycles = max(self.finished_at.values())
        for unit, end in self.finished_at.items():
            unit.usage.idle += self.timing.cycles - end
