"""Pipelined backpropagation in dataflow timing: a core starts as soon as it has input, a credit and a free unit.

The host puts samples into stage 0's single input slot. A core's unit takes the oldest sample it can run forward or
backward, `priority` deciding between the two; what it makes goes through the output buffer onto the links. A sample
is in flight at a stage from the start of its forward to the end of its update, and credits bound how many are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import cast

import simpy

from pbsim.errors import Problem
from pbsim.hardware.fabric import Route
from pbsim.hardware.machine import Machine, MachineCore
from pbsim.hardware.memory import Category
from pbsim.schedule.timing import (
    ADMIT,
    CHOOSE,
    GRANT,
    CoreState,
    DeadlockError,
    Phase,
    Recorder,
    Timing,
    UnitCycles,
    fire,
)
from pbsim.schedule.trace import Op

Process = Generator[simpy.Event, object, None]


Message = tuple[Route, int]
"""A message on its way: its route, and the sample it belongs to."""


class DataflowFabric:
    """Carries messages over the links, in the order (ready cycle, source stage, sample, target stage)."""

    def __init__(self, model: DataflowPipeline) -> None:
        self.model, self.env, self.links = model, model.env, model.timing.links
        self.ready: list[tuple[int, int, int, Route]] = []

    def post(self, route: Route, sample: int, *, alone: bool) -> None:
        """A message has entered its core's output buffer and is ready to leave.

        `alone` promises that its core posts no other message in this cycle.
        """
        if alone and not self.ready and self.env.quiet():
            self._admit(route, sample)
            return
        if not self.ready:
            Phase(self.env, ADMIT).callbacks.append(self._admit_ready)
        self.ready.append((route.source, sample, route.target, route))

    def _admit_ready(self, _: simpy.Event) -> None:
        for _source, sample, _target, route in sorted(self.ready, key=lambda item: item[:3]):
            self._admit(route, sample)
        self.ready.clear()

    def _admit(self, route: Route, sample: int) -> None:
        now, hold = self.env.now, route.serialisation
        start = self.links.admit(route, now)
        arrival = start + hold + route.latency
        self.model.recorder.row(start, arrival, route.source, Op.SEND, sample, -1, route.target)
        if hold:
            self._later(start + hold - now, self.model.cores[route.source].output_left, (route, sample))
        self._later(arrival - now, self.model.cores[route.target].arrived, (route, sample))

    def _later(self, delay: int, action: Callable[[simpy.Event], None], message: Message) -> None:
        self.env.timeout(delay, message).callbacks.append(action)


class DataflowUnit:
    """A unit of a core: what it may run, and how its cycles are spent."""

    def __init__(self, core: DataflowCore, usage: UnitCycles, forwards: bool, backwards: bool) -> None:
        self.core, self.usage = core, usage
        self.forwards, self.backwards = forwards, backwards
        self.remaining = core.model.timing.samples
        self.asleep: simpy.Event | None = None
        self.started = False

    def run(self) -> Process:
        """The story of a unit: choose, compute, pass on, until every sample is done."""
        core, env = self.core, self.core.env
        yield Phase(env, CHOOSE)
        while self.remaining:
            choice = core.choose(self)
            if choice is None:
                yield from self.sleep()
                continue
            self.started = True
            if choice == Op.FORWARD:
                yield from core.forward(self)
                self.remaining -= not self.backwards
            else:
                yield from core.backward(self)
                self.remaining -= 1
            if not env.quiet():
                yield Phase(env, CHOOSE)
        core.model.finished(self)

    def sleep(self) -> Process:
        """Wait until something arrives; account for the wait by what is missing."""
        since = self.core.env.now
        starved = not (self.forwards and self.core.forward_ready)
        self.asleep = self.core.env.event()
        yield self.asleep
        waited = self.core.env.now - since
        if not self.started:
            self.usage.idle += waited
        elif starved:
            self.usage.stall_input += waited
        else:
            self.usage.stall_memory += waited

    def wake(self) -> None:
        """Something has changed: choose again in this cycle's last phase."""
        if self.asleep is not None:
            event, self.asleep = self.asleep, None
            fire(event, CHOOSE)


class DataflowCore(CoreState):
    """A core: buffers, credits, and the operations its units run."""

    def __init__(self, model: DataflowPipeline, core: MachineCore) -> None:
        super().__init__(model.env, model.machine, model.timing, core)
        self.model, self.credits = model, core.credits
        self.backward_first = model.machine.hardware.pipeline.priority == "backward"
        self.free_slots = model.machine.hardware.pipeline.output_slots
        self.forward_ready: list[int] = []
        self.backward_ready: list[int] = []
        self._results = [channel.forward for channel in self.outgoing]
        self._passed_back = [channel.gradient for channel in self.incoming]
        self._enough_slots = len(self.incoming) + len(self.outgoing) if model.machine.split else 1
        self.waiting: list[tuple[int, int, int, Route, simpy.Event]] = []
        self._granting = False
        self.units: list[DataflowUnit] = []
        self._activations: dict[int, int] = {}
        self._gradients: dict[int, int] = {}

    def choose(self, unit: DataflowUnit) -> Op | None:
        """What a free unit does next: forward or backward of the oldest sample that can run, or nothing."""
        backward = unit.backwards and self.backward_ready
        forward = unit.forwards and self.forward_ready and (self.credits is None or self.in_flight < self.credits)
        if backward and (self.backward_first or not forward):
            return Op.INPUT_GRADIENT
        return Op.FORWARD if forward else None

    def forward(self, unit: DataflowUnit) -> Process:
        """F of the oldest ready sample: read the weights as they are, compute, pass the result on."""
        sample, now = heappop(self.forward_ready), self.env.now
        self.begin_forward(sample)
        if self.stage == 0:
            self.model.input_slot_free()
        self.model.recorder.row(now, now + self.forward_cycles, self.stage, Op.FORWARD, sample, self.version)
        yield self.env.timeout(self.forward_cycles)
        unit.usage.forward += self.forward_cycles
        if self._results:
            yield from self.emit(unit, self._results, sample)
        else:
            self._backward_is_ready(sample)

    def backward(self, unit: DataflowUnit) -> Process:
        """Bx, Bw and U of the oldest ready sample, back to back; the gradients leave at the end of Bx."""
        sample, now = heappop(self.backward_ready), self.env.now
        row, stage, usage = self.model.recorder.row, self.stage, unit.usage
        version = self.backward_version(sample)
        row(now, now + self.input_gradient_cycles, stage, Op.INPUT_GRADIENT, sample, version)
        if self.input_gradient_cycles:
            yield self.env.timeout(self.input_gradient_cycles)
        if self._passed_back:
            yield from self.emit(unit, self._passed_back, sample)
        now = self.env.now
        computed = now + self.weight_gradient_cycles
        updated = computed + self.update_cycles
        self.begin_weight_gradient()
        row(now, computed, stage, Op.WEIGHT_GRADIENT, sample, version)
        row(computed, updated, stage, Op.UPDATE, sample, self.version + 1)
        if updated > now:
            yield self.env.timeout(updated - now)
        usage.input_gradient += self.input_gradient_cycles
        usage.weight_gradient += self.weight_gradient_cycles
        usage.update += self.update_cycles
        self.end_update()
        self._wake()

    def emit(self, unit: DataflowUnit, routes: list[Route], sample: int) -> Process:
        """Put a result's messages into the output buffer, one after the other; the unit waits for a free slot.

        A message that holds no link for any cycle needs no slot. With split units the other unit may want one in the
        same cycle: unless there are enough for both, slots are granted once every completion has come.
        """
        unrivalled = self.free_slots >= self._enough_slots and not self.waiting
        for route in routes:
            if not route.serialisation:
                self.model.fabric.post(route, sample, alone=len(routes) == 1)
            elif unrivalled and self.free_slots:
                self._enter_slot(route, sample, alone=len(routes) == 1)
            else:
                since, granted = self.env.now, self.env.event()
                heappush(self.waiting, (since, sample, route.target, route, granted))
                self._grant_later()
                yield granted
                unit.usage.stall_output += self.env.now - since

    def _enter_slot(self, route: Route, sample: int, *, alone: bool) -> None:
        self.free_slots -= 1
        self.book(Category.OUTPUT_BUFFER, route.size)
        self.model.fabric.post(route, sample, alone=alone)

    def _grant_later(self) -> None:
        if self.waiting and self.free_slots and not self._granting:
            self._granting = True
            Phase(self.env, GRANT).callbacks.append(self._grant)

    def _grant(self, _: simpy.Event) -> None:
        """Give a free slot to the message that has waited longest, of those to the oldest sample's."""
        self._granting = False
        _since, sample, _target, route, granted = heappop(self.waiting)
        self._enter_slot(route, sample, alone=False)
        granted.succeed()
        self._grant_later()

    def output_left(self, event: simpy.Event) -> None:
        """A message's last byte has left, and its slot is free."""
        route, _ = cast(Message, event.value)
        self.free_slots += 1
        self.book(Category.OUTPUT_BUFFER, -route.size)
        self._grant_later()

    def arrived(self, event: simpy.Event) -> None:
        """A message has come in: a sample may have become ready."""
        route, sample = cast(Message, event.value)
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
        self._wake()

    def _backward_is_ready(self, sample: int) -> None:
        heappush(self.backward_ready, sample)
        self._wake()

    def _wake(self) -> None:
        for unit in self.units:
            unit.wake()

    def waits_for(self) -> str:
        """For a deadlock's message: what this core has, and what it waits for."""
        state = f"{self.in_flight} in flight, {self.version} updates done"
        if self.waiting:
            return f"deadlock: sample {self.waiting[0][1]} waits for an output slot ({state})"
        if self.forward_ready:
            return f"deadlock: sample {self.forward_ready[0]} waits for a credit ({state})"
        return f"deadlock: waits for an activation or a gradient ({state})"


class DataflowPipeline:
    """The whole machine in dataflow timing; `recorder.chunks()` runs it."""

    def __init__(self, machine: Machine, timing: Timing, recorder: Recorder) -> None:
        self.machine, self.timing, self.recorder = machine, timing, recorder
        self.env = recorder.env
        self.fabric = DataflowFabric(self)
        self.cores = [DataflowCore(self, core) for core in machine.cores]
        self.unfinished: set[DataflowUnit] = set()
        self.finished_at: dict[DataflowUnit, int] = {}
        usages = iter(timing.units)
        for core in self.cores:
            roles = ((True, False), (False, True)) if machine.split else ((True, True),)
            core.units = [DataflowUnit(core, next(usages), *role) for role in roles]
            self.unfinished.update(core.units)
            for unit in core.units:
                self.env.process(unit.run())
        self._slot: simpy.Event = self.env.event()
        self.env.process(self._host())

    def _host(self) -> Process:
        for sample in range(self.timing.samples):
            now = self.env.now
            self.recorder.row(now, now + self.machine.host_cycles, 0, Op.LOAD, sample)
            yield self.env.timeout(self.machine.host_cycles)
            self.cores[0].book(Category.INPUT_BUFFER, self.machine.host_bytes)
            self._slot = self.env.event()
            self.cores[0].forward_is_ready(sample)
            yield self._slot

    def input_slot_free(self) -> None:
        """Stage 0 has taken the sample out of its input slot: the host may send the next."""
        self._slot.succeed()

    def finished(self, unit: DataflowUnit) -> None:
        """A unit has run its last operation."""
        self.unfinished.discard(unit)
        self.finished_at[unit] = self.env.now

    def close(self) -> None:
        """Complete the accounts at the end; raises `DeadlockError` if the machine stopped before it was done."""
        if self.unfinished:
            waiting = [core for core in self.cores if self.unfinished.intersection(core.units)]
            raise DeadlockError(Problem("schedule", f"core {core.stage}", "", core.waits_for()) for core in waiting)
        self.timing.ledger.settle()
        self.timing.cycles = max(self.finished_at.values())
        for unit, end in self.finished_at.items():
            unit.usage.idle += self.timing.cycles - end
