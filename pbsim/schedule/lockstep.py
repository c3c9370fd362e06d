"""Pipelined backpropagation in lockstep: all cores step together, and results move at step boundaries.

In step k, stage s runs the forward of sample k - s, then the backward (Bx, Bw, U) of sample k - 2(S-1) + s. All
messages of a step are sent together once the slowest core has finished, and the next step starts when the last of
them has arrived. So every stage's delay is exactly D_s = 2(S-1-s): the papers' machine. The first step starts at
cycle 0 with the first sample in stage 0's input slot.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import simpy

from pbsim.hardware.fabric import Route
from pbsim.hardware.machine import Machine, MachineCore
from pbsim.hardware.memory import Category
from pbsim.schedule.timing import CHOOSE, CoreState, Recorder, Timing, UnitCycles, fire
from pbsim.schedule.trace import Op

Process = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class StepMessage:
    """A message of a step; its start and arrival are in cycles from the moment all are sent."""

    route: Route
    start: int
    arrival: int


class LockstepPipeline:
    """The whole machine in lockstep timing; `recorder.chunks()` runs it."""

    def __init__(self, machine: Machine, timing: Timing, recorder: Recorder) -> None:
        self.machine, self.timing, self.recorder = machine, timing, recorder
        self.env = recorder.env
        self.stages, self.samples = machine.stages, timing.samples
        self.steps = timing.samples + 2 * self.stages - 2
        self.compute_cycles = max(step_compute_cycles(machine, core) for core in machine.cores)
        self._messages: dict[tuple[int, int, int, int], list[StepMessage]] = {}
        steps = self._distinct_steps()
        last_arrival = max((message.arrival for step in steps for message in self.messages(step)), default=0)
        host = machine.host_cycles if timing.samples > 1 else 0
        self.step_cycles = self.compute_cycles + max(last_arrival, host)
        timing.step_cycles = self.step_cycles
        self._boundary = self.env.event()
        timing.ledger.add(0, 0, Category.INPUT_BUFFER, machine.host_bytes)
        recorder.row(0, 0, 0, Op.LOAD, 0)
        units = iter(timing.units)
        for core in machine.cores:
            usages = [next(units) for _ in range(2 if machine.split else 1)]
            self.env.process(self._core(CoreState(self.env, machine, timing, core), usages))
        self.env.process(self._clock())

    def forward_sample(self, stage: int, step: int) -> int | None:
        """The sample whose forward a stage runs in a step."""
        sample = step - stage
        return sample if 0 <= sample < self.samples else None

    def backward_sample(self, stage: int, step: int) -> int | None:
        """The sample whose backward a stage runs in a step."""
        sample = step - 2 * (self.stages - 1) + stage
        return sample if 0 <= sample < self.samples else None

    def close(self) -> None:
        """Complete the accounts at the end."""
        self.timing.ledger.settle()

    def messages(self, step: int) -> list[StepMessage]:
        """The messages of a step, admitted to the links in the order (source stage, sample, target stage)."""
        last = self.stages - 1
        present = (  # the stages that run forward, and those that run backward, are ranges
            max(0, step - self.samples + 1),
            min(last, step),
            max(0, 2 * last - step),
            min(last, 2 * last - step + self.samples - 1),
        )
        if present not in self._messages:
            self._messages[present] = self._admitted(step)
        return self._messages[present]

    def _admitted(self, step: int) -> list[StepMessage]:
        due = []
        for channel in self.machine.channels:
            for route in (channel.forward, channel.gradient):
                sample = self._sample_sent(route, step)
                if sample is not None:
                    due.append((route.source, sample, route.target, route))
        links = self.machine.links()
        messages = []
        for *_, route in sorted(due, key=lambda item: item[:3]):
            start = links.admit(route, 0)
            messages.append(StepMessage(route, start, start + route.latency + route.serialisation))
        return messages

    def _sample_sent(self, route: Route, step: int) -> int | None:
        """The sample whose activation, or gradient, a route carries at the end of a step."""
        sample_of = self.forward_sample if route.source < route.target else self.backward_sample
        return sample_of(route.source, step)

    def _distinct_steps(self) -> list[int]:
        """Steps that between them show every set of messages: the fill, a full step, the drain."""
        fill = min(self.steps, 2 * self.stages - 1)
        return [*range(fill), *range(max(fill, self.samples - 1), self.steps)]

    def _clock(self) -> Process:
        """The story of a step: all compute, all send, everything arrives, the next step begins."""
        for step in range(self.steps):
            yield self.env.timeout(self.compute_cycles)
            now, messages = self.env.now, self.messages(step)
            for message in messages:
                self._send(message, step, now)
            if step + 1 < self.samples:
                self.recorder.row(now, now + self.machine.host_cycles, 0, Op.LOAD, step + 1)
            yield self.env.timeout(self.step_cycles - self.compute_cycles)
            arrived = self.env.now
            for message in messages:
                route = message.route
                self.timing.ledger.add(arrived, route.source, Category.OUTPUT_BUFFER, -route.size)
                self.timing.ledger.add(arrived, route.target, Category.INPUT_BUFFER, route.size)
            if step + 1 < self.samples:
                self.timing.ledger.add(arrived, 0, Category.INPUT_BUFFER, self.machine.host_bytes)
            boundary, self._boundary = self._boundary, self.env.event()
            fire(boundary, CHOOSE)
        self.timing.cycles = self.env.now

    def _send(self, message: StepMessage, step: int, now: int) -> None:
        route, sample = message.route, self._sample_sent(message.route, step)
        assert sample is not None
        start, arrival = now + message.start, now + message.arrival
        self.recorder.row(start, arrival, route.source, Op.SEND, sample, -1, route.target)
        self.timing.ledger.add(now, route.source, Category.OUTPUT_BUFFER, route.size)
        self.timing.links.carry(route)

    def _core(self, core: CoreState, usages: list[UnitCycles]) -> Process:
        """The story of a core: forward, then backward, then wait for the next step."""
        stage, row = core.stage, self.recorder.row
        together = self.machine.split and stage < self.stages - 1
        forward_usage, backward_usage = usages[0], usages[-1]
        active = {id(usage): [0, 0] for usage in usages}  # first start, last end
        for step in range(self.steps):
            begin = computed = self.env.now
            forward, backward = self.forward_sample(stage, step), self.backward_sample(stage, step)
            if forward is not None:
                core.begin_forward(forward)
                computed = begin + core.forward_cycles
                row(begin, computed, stage, Op.FORWARD, forward, core.version)
                forward_usage.forward += core.forward_cycles
                _extend(active[id(forward_usage)], begin, computed, first=forward == 0)
            if backward is not None:
                start = begin if together else computed
                gradient = start + core.input_gradient_cycles
                weights = gradient + core.weight_gradient_cycles
                end = weights + core.update_cycles
                version = core.backward_version(backward)
                row(start, gradient, stage, Op.INPUT_GRADIENT, backward, version)
                row(gradient, weights, stage, Op.WEIGHT_GRADIENT, backward, version)
                row(weights, end, stage, Op.UPDATE, backward, core.version + 1)
                yield self.env.timeout(gradient - begin)
                core.begin_weight_gradient()
                yield self.env.timeout(end - gradient)
                core.end_update()
                backward_usage.input_gradient += core.input_gradient_cycles
                backward_usage.weight_gradient += core.weight_gradient_cycles
                backward_usage.update += core.update_cycles
                _extend(active[id(backward_usage)], start, end, first=self.machine.split and backward == 0)
            yield self._boundary
        for usage in usages:
            first, last = active[id(usage)]
            usage.stall_input = last - first - usage.busy
            usage.idle = self.steps * self.step_cycles - (last - first)


def _extend(span: list[int], start: int, end: int, *, first: bool) -> None:
    if first:
        span[0] = start
    span[1] = end


def step_compute_cycles(machine: Machine, core: MachineCore) -> int:
    """How long a core computes in a step: F + Bx + Bw + U, or the longer of the two with split units."""
    return core.cycles.interval(machine.split and core.stage < machine.stages - 1)
