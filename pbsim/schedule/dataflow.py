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
from pbsim.hardware.machine import Channel, Machine, MachineCore
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


class Message:
    """A message on its way: which channel, which direction, which sample."""

    __slots__ = ("backward", "channel", "path", "sample", "serialisation", "size", "source", "target")

    def __init__(self, channel: Channel, backward: bool, sample: int) -> None:
        self.channel, self.backward, self.sample = channel, backward, sample
        if backward:
            self.source, self.target = channel.target, channel.source
            self.size, self.serialisation, self.path = (
                channel.gradient_bytes,
                channel.gradient_serialisation,
                channel.gradient_path,
            )
        else:
            self.source, self.target = channel.source, channel.target
            self.size, self.serialisation, self.path = (
                channel.forward_bytes,
                channel.forward_serialisation,
                channel.forward_path,
            )


class DataflowFabric:
    """Carries messages over the links, in the order (ready cycle, source stage, sample, target stage)."""

    def __init__(self, model: DataflowPipeline) -> None:
        self.model, self.env, self.links = model, model.env, model.timing.links
        self.ready: list[tuple[int, int, int, Message]] = []

    def post(self, message: Message) -> None:
        """A message has entered its core's output buffer and is ready to leave."""
        if not self.ready:
            Phase(self.env, ADMIT).callbacks.append(self._admit)
        self.ready.append((message.source, message.sample, message.target, message))

    def _admit(self, _: simpy.Event) -> None:
        now = self.env.now
        self.ready.sort(key=lambda item: item[:3])
        for source, sample, target, message in self.ready:
            start = self.links.admit(message.path, now, message.serialisation, message.size)
            left = start + message.serialisation
            arrival = left + len(message.path) * self.links.hop_cycles
            self.model.recorder.row(start, arrival, source, Op.SEND, sample, -1, target)
            if message.serialisation:
                self._later(left - now, self._leave, message)
            self._later(arrival - now, self._arrive, message)
        self.ready.clear()

    def _later(self, delay: int, action: Callable[[simpy.Event], None], message: Message) -> None:
        self.env.timeout(delay, message).callbacks.append(action)

    def _leave(self, event: simpy.Event) -> None:
        message = cast(Message, event.value)
        self.model.cores[message.source].output_left(message)

    def _arrive(self, event: simpy.Event) -> None:
        message = cast(Message, event.value)
        self.model.cores[message.target].arrived(message)


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
        self.waiting: list[tuple[int, int, int, Message, simpy.Event]] = []
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
        self.begin_forward()
        if self.stage == 0:
            self.model.input_slot_free()
        self.model.recorder.row(now, now + self.forward_cycles, self.stage, Op.FORWARD, sample, self.version)
        yield self.env.timeout(self.forward_cycles)
        unit.usage.forward += self.forward_cycles
        yield from self.emit(unit, self.outgoing, False, sample)
        if not self.outgoing:
            self._backward_is_ready(sample)

    def backward(self, unit: DataflowUnit) -> Process:
        """Bx, Bw and U of the oldest ready sample, back to back; the gradients leave at the end of Bx."""
        sample, now = heappop(self.backward_ready), self.env.now
        row, stage, usage = self.model.recorder.row, self.stage, unit.usage
        row(now, now + self.input_gradient_cycles, stage, Op.INPUT_GRADIENT, sample, self.version)
        if self.input_gradient_cycles:
            yield self.env.timeout(self.input_gradient_cycles)
        yield from self.emit(unit, self.incoming, True, sample)
        now = self.env.now
        computed = now + self.weight_gradient_cycles
        updated = computed + self.update_cycles
        self.begin_weight_gradient()
        row(now, computed, stage, Op.WEIGHT_GRADIENT, sample, self.version)
        row(computed, updated, stage, Op.UPDATE, sample, self.version + 1)
        if updated > now:
            yield self.env.timeout(updated - now)
        usage.input_gradient += self.input_gradient_cycles
        usage.weight_gradient += self.weight_gradient_cycles
        usage.update += self.update_cycles
        self.end_update()
        self._wake()

    def emit(self, unit: DataflowUnit, channels: list[Channel], backward: bool, sample: int) -> Process:
        """Put a result's messages into the output buffer, one after the other; the unit waits for a free slot.

        A message that holds no link for any cycle needs no slot. With split units the other unit may want one in the
        same cycle: unless there are enough for both, slots are granted once every completion has come.
        """
        enough = 1 if len(self.units) == 1 else len(self.incoming) + len(self.outgoing)
        unrivalled = self.free_slots >= enough and not self.waiting
        for channel in channels:
            message = Message(channel, backward, sample)
            if not message.serialisation:
                self.model.fabric.post(message)
            elif unrivalled and self.free_slots:
                self._enter_slot(message)
            else:
                since, granted = self.env.now, self.env.event()
                heappush(self.waiting, (since, sample, message.target, message, granted))
                self._grant_later()
                yield granted
                unit.usage.stall_output += self.env.now - since

    def _enter_slot(self, message: Message) -> None:
        self.free_slots -= 1
        self.book(Category.OUTPUT_BUFFER, message.size)
        self.model.fabric.post(message)

    def _grant_later(self) -> None:
        if self.waiting and self.free_slots and not self._granting:
            self._granting = True
            Phase(self.env, GRANT).callbacks.append(self._grant)

    def _grant(self, _: simpy.Event) -> None:
        """Give a free slot to the message that has waited longest, of those to the oldest sample's."""
        self._granting = False
        *_since_sample_target, message, granted = heappop(self.waiting)
        self._enter_slot(message)
        granted.succeed()
        self._grant_later()

    def output_left(self, message: Message) -> None:
        """A message's last byte has left, and its slot is free."""
        self.free_slots += 1
        self.book(Category.OUTPUT_BUFFER, -message.size)
        self._grant_later()

    def arrived(self, message: Message) -> None:
        """A message has come in: a sample may have become ready."""
        self.book(Category.INPUT_BUFFER, message.size)
        if message.backward:
            if self._complete(self._gradients, message.sample, len(self.outgoing)):
                self._backward_is_ready(message.sample)
        elif self._complete(self._activations, message.sample, len(self.incoming)):
            self.forward_is_ready(message.sample)

    @staticmethod
    def _complete(counts: dict[int, int], sample: int, needed: int) -> bool:
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
