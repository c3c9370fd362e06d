"""The pipeline in dataflow timing: a core starts as soon as it has input, a credit, memory and a free unit.

The host puts samples into stage 0's single input slot. A core's unit takes the oldest sample it can run forward or
backward, `priority` deciding between the two (a drained schedule runs its forwards first); what it makes goes through
the output buffer onto the links. A sample is in flight at a stage from the start of its forward to the end of its
backward and of the update that follows, and credits bound how many are.

Where memory is enforced, whatever finds no room waits: a sample at the host and a message in its output buffer for room
in the target's input buffer, which they take from the moment they leave; a result for room in the output buffer; a
forward for room for its stash; a backward for room for the gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

import simpy
from simpy.events import EventPriority

from pbsim.hardware.fabric import Route
from pbsim.hardware.machine import Machine, MachineCore
from pbsim.hardware.memory import Category
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
    fire,
)
from pbsim.schedule.trace import Op

Process = Generator[simpy.Event, object, None]

Message = tuple[Route, int]
"""A message on its way: its route, and the sample it belongs to."""

Order = Sequence[tuple[Op, int]]
"""What a stage runs, in this order and no other: (`Op.FORWARD` or `Op.INPUT_GRADIENT` for a backward, sample)."""


class DataflowFabric:
    """Carries messages over the links, in the order (ready cycle, source stage, sample, target stage)."""

    def __init__(self, model: DataflowPipeline) -> None:
        self.model, self.env, self.links = model, model.env, model.timing.links
        self.ready: list[tuple[int, int, int, int, Route]] = []
        self._admitting = False

    def post(self, route: Route, sample: int, *, alone: bool) -> None:
        """A message has entered its core's output buffer and is ready to leave.

        `alone` promises that its core posts no other message in this cycle.
        """
        if alone and not self.ready and self.env.quiet() and self.model.cores[route.target].has_room(route.size):
            self._admit(route, sample)
            return
        self.ready.append((self.env.now, route.source, sample, route.target, route))
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
            _ready, _source, sample, target, route = message
            if self.model.cores[target].has_room(route.size):
                self._admit(route, sample)
            else:
                self.ready.append(message)

    def _admit(self, route: Route, sample: int) -> None:
        now, hold = self.env.now, route.serialisation
        start = self.links.admit(route, now)
        arrival = start + hold + route.latency
        self.model.recorder.row(start, arrival, route.source, Op.SEND, sample, -1, route.target)
        if hold:
            self._later(start + hold - now, self.model.cores[route.source].output_left, (route, sample))
        target = self.model.cores[route.target]
        if target.enforced:
            target.book(Category.INPUT_BUFFER, route.size)
        self._later(arrival - now, target.arrived, (route, sample))

    def _later(self, delay: int, action: Callable[[simpy.Event], None], message: Message) -> None:
        self.env.timeout(delay, message).callbacks.append(action)


class DataflowHost:
    """Sends the samples, one whenever stage 0's input slot is free (and, where enforced, its core has room)."""

    def __init__(self, model: DataflowPipeline) -> None:
        self.model, self.env = model, model.env
        self.samples, self.cycles, self.size = model.timing.samples, model.machine.host_cycles, model.machine.host_bytes
        self.sent = 0
        self.slot_free = True
        Phase(self.env, LOAD).callbacks.append(lambda _: self.send())

    def send(self) -> None:
        """Send the next sample, if it can be sent."""
        core = self.model.cores[0]
        if not (self.slot_free and self.sent < self.samples and core.has_room(self.size)):
            return
        self.model.recorder.row(self.env.now, self.env.now + self.cycles, 0, Op.LOAD, self.sent)
        self.slot_free = False
        if core.enforced:
            core.book(Category.INPUT_BUFFER, self.size)
        self.env.timeout(self.cycles).callbacks.append(self._arrived)

    def _arrived(self, _: simpy.Event) -> None:
        core = self.model.cores[0]
        if not core.enforced:
            core.book(Category.INPUT_BUFFER, self.size)
        self.sent += 1
        core.forward_is_ready(self.sent - 1)


class DataflowUnit:
    """A unit of a core: what it may run, and how its cycles are spent."""

    def __init__(self, core: DataflowCore, usage: UnitCycles, forwards: bool, backwards: bool) -> None:
        self.core, self.usage = core, usage
        self.forwards, self.backwards = forwards, backwards
        self.phase: EventPriority = CHOOSE if forwards else CHOOSE_BACKWARD
        self.remaining = core.model.timing.samples
        self.asleep: simpy.Event | None = None
        self.started = False

    def run(self) -> Process:
        """The story of a unit: choose, compute, pass on, until every sample is done."""
        core, env = self.core, self.core.env
        yield Phase(env, self.phase)
        while self.remaining:
            choice = core.choose(self)
            if choice is None:
                yield from self.sleep()
                continue
            self.started = True
            op, sample = choice
            if op == Op.FORWARD:
                yield from core.forward(self, sample)
                self.remaining -= not self.backwards
            else:
                yield from core.backward(self, sample)
                self.remaining -= 1
            if not env.quiet():
                yield Phase(env, self.phase)
        core.model.finished(self)

    def sleep(self) -> Process:
        """Wait until something arrives; account for the wait by what is missing."""
        since, held_back = self.core.env.now, self.core.held_back(self)
        self.asleep = self.core.env.event()
        yield self.asleep
        waited = self.core.env.now - since
        if not self.started:
            self.usage.idle += waited
        elif held_back:
            self.usage.stall_memory += waited
        else:
            self.usage.stall_input += waited

    def wake(self) -> None:
        """Something has changed: choose again in this cycle."""
        if self.asleep is not None:
            event, self.asleep = self.asleep, None
            fire(event, self.phase)


class DataflowCore(CoreState):
    """A core: buffers, credits, and the operations its units run."""

    def __init__(self, model: DataflowPipeline, core: MachineCore, order: Order | None) -> None:
        super().__init__(model.env, model.machine, model.timing, core)
        self.model, self.credits = model, core.credits
        self.enforced, self.capacity = model.machine.hardware.pipeline.memory == "enforce", core.memory.capacity
        self.drained = model.timing.batches.drained
        self.backward_first = model.machine.hardware.pipeline.priority == "backward" and not self.drained
        self.order = list(reversed(order)) if order is not None else None
        self.free_slots = model.machine.hardware.pipeline.output_slots
        self.forward_ready: list[int] = []
        self.backward_ready: list[int] = []
        self._forward_growth = self.sample_bytes - self.activation_bytes
        self._results = [channel.forward for channel in self.outgoing]
        self._passed_back = [channel.gradient for channel in self.incoming]
        self._enough_slots = len(self.incoming) + len(self.outgoing) if model.machine.split else 1
        self.waiting: list[tuple[int, int, int, Route, simpy.Event]] = []
        self._granting = False
        self.units: list[DataflowUnit] = []
        self._activations: dict[int, int] = {}
        self._gradients: dict[int, int] = {}

    def has_room(self, size: int) -> bool:
        """Whether the core's memory has room for so much more; always, where capacity is not enforced."""
        return not self.enforced or self.model.timing.ledger.level(self.stage) + size <= self.capacity

    def choose(self, unit: DataflowUnit) -> tuple[Op, int] | None:
        """What a free unit does next: forward or backward of the oldest sample that can run, or nothing."""
        backward = self._next_backward() if unit.backwards else None
        if backward is not None and not self.has_room(self.missing_gradient_bytes):
            backward = None
        forward = self._next_forward() if unit.forwards and (backward is None or not self.backward_first) else None
        if forward is not None and self._may_forward():
            return Op.FORWARD, self._take(self.forward_ready, forward)
        return None if backward is None else (Op.INPUT_GRADIENT, self._take(self.backward_ready, backward))

    def held_back(self, unit: DataflowUnit) -> bool:
        """Whether a unit that has chosen nothing has all it needs but a credit or memory."""
        forward = unit.forwards and self._next_forward() is not None
        return forward or (unit.backwards and self._next_backward() is not None)

    def _next_forward(self) -> int | None:
        """The oldest sample whose inputs, and whose weights, are there."""
        if not self.forward_ready:
            return None
        sample = self.forward_ready[0]
        if self.order is not None:
            return self._ordered(Op.FORWARD, self.forward_ready)
        return None if self.drained and self.version < self._batches.index(sample) else sample

    def _next_backward(self) -> int | None:
        if not self.backward_ready:
            return None
        return self.backward_ready[0] if self.order is None else self._ordered(Op.INPUT_GRADIENT, self.backward_ready)

    def _ordered(self, op: Op, ready: list[int]) -> int | None:
        """The sample that stands next in an order made by hand, if it is this operation's and ready."""
        due = self.order[-1] if self.order else None
        return due[1] if due is not None and due[0] == op and due[1] in ready else None

    def _may_forward(self) -> bool:
        return (self.credits is None or self.in_flight < self.credits) and self.has_room(self._forward_growth)

    def _take(self, ready: list[int], sample: int) -> int:
        if self.order is None:
            return heappop(ready)
        self.order.pop()
        ready.remove(sample)
        heapify(ready)
        return sample

    def forward(self, unit: DataflowUnit, sample: int) -> Process:
        """F of a sample: read the weights as they are, compute, pass the result on."""
        now = self.env.now
        self.begin_forward(sample)
        if self.stage == 0:
            self.model.host.slot_free = True
        if self.enforced:
            self.model.freed(self, AGAIN)
        elif self.stage == 0:
            self.model.host.send()
        self.model.recorder.row(now, now + self.forward_cycles, self.stage, Op.FORWARD, sample, self.version)
        yield self.env.timeout(self.forward_cycles)
        unit.usage.forward += self.forward_cycles
        if self._results:
            yield from self.emit(unit, self._results, sample)
        else:
            self._backward_is_ready(sample)

    def backward(self, unit: DataflowUnit, sample: int) -> Process:
        """Bx, Bw and, where one is due, U of a sample, back to back; the gradients leave at the end of Bx."""
        now = self.env.now
        row, stage, usage = self.model.recorder.row, self.stage, unit.usage
        version = self.begin_backward(sample)
        row(now, now + self.input_gradient_cycles, stage, Op.INPUT_GRADIENT, sample, version)
        if self.input_gradient_cycles:
            yield self.env.timeout(self.input_gradient_cycles)
        if self._passed_back:
            yield from self.emit(unit, self._passed_back, sample)
        now = self.env.now
        computed = updated = now + self.weight_gradient_cycles
        row(now, computed, stage, Op.WEIGHT_GRADIENT, sample, version)
        if self.updates_after(sample):
            updated += self.update_cycles
            first, made = self.update_row(sample)
            row(computed, updated, stage, Op.UPDATE, first, made)
        if updated > now:
            yield self.env.timeout(updated - now)
        usage.input_gradient += self.input_gradient_cycles
        usage.weight_gradient += self.weight_gradient_cycles
        usage.update += updated - computed
        self.end_backward(sample)
        if self.enforced:
            self.model.freed(self, LOAD)
        self.wake()

    def emit(self, unit: DataflowUnit, routes: list[Route], sample: int) -> Process:
        """Put a result's messages into the output buffer, one after the other; the unit waits for a free slot.

        A message that holds no link for any cycle needs no slot. With split units the other unit may want one in the
        same cycle: unless there are enough for both, slots are granted once every completion has come.
        """
        unrivalled = self.free_slots >= self._enough_slots and not self.waiting and not self.enforced
        for route in routes:
            if not route.serialisation:
                self.model.fabric.post(route, sample, alone=len(routes) == 1)
            elif unrivalled and self.free_slots:
                self._enter_slot(route, sample, alone=len(routes) == 1)
            else:
                since, granted = self.env.now, self.env.event()
                heappush(self.waiting, (since, sample, route.target, route, granted))
                self.grant_later()
                yield granted
                unit.usage.stall_output += self.env.now - since

    def _enter_slot(self, route: Route, sample: int, *, alone: bool) -> None:
        self.free_slots -= 1
        self.book(Category.OUTPUT_BUFFER, route.size)
        self.model.fabric.post(route, sample, alone=alone)

    def grant_later(self) -> None:
        """Give free output slots to what waits for them, once every completion of this cycle has come."""
        if self.waiting and self.free_slots and self.has_room(self.waiting[0][3].size) and not self._granting:
            self._granting = True
            Phase(self.env, GRANT).callbacks.append(self._grant)

    def _grant(self, _: simpy.Event) -> None:
        """Give a free slot to the message that has waited longest, of those to the oldest sample's."""
        self._granting = False
        if not self.has_room(self.waiting[0][3].size):
            return
        _since, sample, _target, route, granted = heappop(self.waiting)
        self._enter_slot(route, sample, alone=False)
        granted.succeed()
        self.grant_later()

    def output_left(self, event: simpy.Event) -> None:
        """A message's last byte has left, and its slot is free."""
        route, _ = cast(Message, event.value)
        self.free_slots += 1
        self.book(Category.OUTPUT_BUFFER, -route.size)
        self.grant_later()
        if self.enforced:
            self.model.freed(self, LOAD)

    def arrived(self, event: simpy.Event) -> None:
        """A message has come in: a sample may have become ready."""
        route, sample = cast(Message, event.value)
        if not self.enforced:
            self.book(Category.INPUT_BUFFER, route.size)
        if route.source > self.stage:
            if self._complete(self._gradients, sample, len(self.outgoing)):
                self._backward_is_ready(sample)
        elif self._complete(self._activations, sample, len(self.incoming)):
            self.forward_is_ready(sample)

    @staticmethod
    def _complete(counts: dict[int, int], sample: int, needed: int) -> bool:
        if needed == 1:
            return True
        count = counts.pop(sample, 0) + 1
        if count < needed:
            counts[sample] = count
        return count == needed

    def forward_is_ready(self, sample: int) -> None:
        """All inputs of a sample are here."""
        heappush(self.forward_ready, sample)
        self.wake()

    def _backward_is_ready(self, sample: int) -> None:
        heappush(self.backward_ready, sample)
        self.wake()

    def wake(self) -> None:
        """Let units that sleep choose again."""
        for unit in self.units:
            unit.wake()

    def waits(self) -> Waits:
        """For a deadlock's message: what this core has, and what it waits for."""
        ledger, ready = self.model.timing.ledger, len(self.backward_ready)
        waits = Waits(self.stage, self.capacity - ledger.level(self.stage), self.in_flight, self.done, ready)
        if self.waiting:
            _since, sample, target, route, _granted = self.waiting[0]
            waits.output(sample, target, route.size, slot=self.free_slots > 0)
        if self.backward_ready and not self.has_room(self.missing_gradient_bytes):
            waits.backward(self.backward_ready[0], self.missing_gradient_bytes)
        forward = self._next_forward()
        if forward is not None and not self.has_room(self._forward_growth):
            waits.forward(forward, self._forward_growth)
        elif forward is not None and self.credits is not None and not self._may_forward():
            waits.credit(forward, self.credits)
        for _ready, source, sample, target, route in self.model.fabric.ready:
            if source == self.stage:
                there = self.model.cores[target]
                waits.message(sample, route.size, target, there.capacity - ledger.level(target))
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
        self.timing.ledger.settle()
        self.timing.cycles = max(self.finished_at.values())
        for unit, end in self.finished_at.items():
            unit.usage.idle += self.timing.cycles - end
