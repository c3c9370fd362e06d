"""The pipeline in lockstep: all cores step together, and results move at step boundaries.

In step k, stage s runs the forward of the sample that entered in step k - s, then the backward (Bx, Bw, U) of the one
that entered in step k - 2(S-1) + s. Samples enter one per step; in a drained schedule every stage updates once behind a
batch, and the next batch enters once it has left. All messages of a step are sent together once the slowest core has
finished, and the next step starts when the last of them has arrived. So under pipelined backpropagation every stage's
delay is exactly D_s = 2(S-1-s): the papers' machine. The first step starts at cycle 0 with the first sample in stage
0's input slot.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import simpy

from pbsim.errors import Problem, UserError
from pbsim.hardware.fabric import Route
from pbsim.hardware.machine import Machine, MachineCore
from pbsim.hardware.memory import Booking, Category
from pbsim.schedule.batches import Batches
from pbsim.schedule.timing import CHOOSE, CoreState, Phase, Recorder, Timing, UnitCycles
from pbsim.schedule.trace import ROW, Op

Process = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class StepMessage:
    """A message of a step; its start and arrival are in cycles from the moment all are sent.

    It is in its core's output buffer (`sent`, `left`) until the step is over, and then in its target's input buffer.
    """

    route: Route
    start: int
    arrival: int
    sent: Booking
    left: Booking
    arrived: Booking


class LockstepPipeline:
    """The whole machine in lockstep timing; `recorder.chunks()` runs it."""

    def __init__(self, machine: Machine, timing: Timing, recorder: Recorder) -> None:
        self.machine, self.timing, self.recorder = machine, timing, recorder
        self.env = recorder.env
        self.stages, self.batches = machine.stages, timing.batches
        self.steps = self.steps_of(machine, timing.batches)
        self.compute_cycles = max(step_compute_cycles(machine, core) for core in machine.cores)
        self._messages: dict[tuple[bool, ...], list[StepMessage]] = {}
        arrivals = (message.arrival for step in self._distinct_steps() for message in self.messages(step))
        last_arrival = max(arrivals, default=0)
        host = machine.host_cycles if timing.samples > 1 else 0
        self.step_cycles = self.compute_cycles + max(last_arrival, host)
        timing.step_cycles = self.step_cycles
        self._boundary = self.env.event()
        self._loaded = timing.ledger.booking(0, {Category.INPUT_BUFFER: machine.host_bytes})
        self.timing.ledger.note(0, self._loaded)
        recorder.rows += ROW.pack(0, 0, 0, Op.LOAD, 0, -1, -1)
        units = iter(timing.units)
        for core in machine.cores:
            usages = [next(units) for _ in range(2 if machine.split else 1)]
            self.env.process(self._core(CoreState(self.env, machine, timing, core), usages))
        self.env.process(self._clock())

    def entering(self, step: int) -> int | None:
        """The sample that enters stage 0 in a step."""
        if step < 0:
            return None
        if not self.batches.drained:
            return step if step < self.batches.samples else None
        drain, batches = 2 * self.stages - 2, self.batches
        epoch, within = divmod(step, batches.epoch + batches.per_epoch * drain)
        batch, place = divmod(within, batches.size + drain)
        sample = epoch * batches.epoch + batch * batches.size + place
        end = min((epoch + 1) * batches.epoch, batches.samples)
        return sample if place < batches.size and sample < end else None

    @staticmethod
    def steps_of(machine: Machine, batches: Batches) -> int:
        """The steps of a run."""
        return _entry(batches, machine.stages, batches.samples - 1) + 2 * machine.stages - 1

    def forward_sample(self, stage: int, step: int) -> int | None:
        """The sample whose forward a stage runs in a step."""
        return self.entering(step - stage)

    def backward_sample(self, stage: int, step: int) -> int | None:
        """The sample whose backward a stage runs in a step."""
        return self.entering(step - 2 * (self.stages - 1) + stage)

    def close(self) -> None:
        """Complete the accounts at the end; raises `UserError` where memory is enforced and was not enough."""
        self.timing.settle()
        if self.machine.hardware.pipeline.memory == "enforce":
            peaks = zip(self.machine.cores, self.timing.ledger.core_peak, strict=True)
            over = [(core, peak) for core, peak in peaks if peak > core.memory.capacity]
            if over:
                raise UserError(_overflow(core, peak) for core, peak in over)

    def messages(self, step: int) -> list[StepMessage]:
        """The messages of a step, admitted to the links in the order (source stage, sample, target stage)."""
        entered = tuple(self.entering(step - age) is not None for age in range(2 * self.stages - 1))
        if entered not in self._messages:
            self._messages[entered] = self._admitted(step)
        return self._messages[entered]

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
            arrival = start + route.latency + route.serialisation
            buffered = [
                self.timing.ledger.booking(core, {category: size})
                for core, category, size in (
                    (route.source, Category.OUTPUT_BUFFER, route.size),
                    (route.source, Category.OUTPUT_BUFFER, -route.size),
                    (route.target, Category.INPUT_BUFFER, route.size),
                )
            ]
            messages.append(StepMessage(route, start, arrival, *buffered))
        return messages

    def _sample_sent(self, route: Route, step: int) -> int | None:
        """The sample whose activation, or gradient, a route carries at the end of a step."""
        sample_of = self.forward_sample if route.source < route.target else self.backward_sample
        return sample_of(route.source, step)

    def _distinct_steps(self) -> Iterator[int]:
        """Steps that between them show every set of messages.

        These are the fill, a full step and the drain of the run, or of batches of each length.
        """
        batches, lengths = self.batches, {self.batches.samples: 0}
        if batches.drained:
            last = batches.count - 1
            candidates = dict.fromkeys(b for b in (0, batches.per_epoch - 1, last) if b <= last)
            lengths = {
                batches.end(b) - batches.first(b): _entry(batches, self.stages, batches.first(b)) for b in candidates
            }
        for length, base in lengths.items():
            count = length + 2 * self.stages - 2
            fill = min(count, 2 * self.stages - 1)
            yield from range(base, base + fill)
            yield from range(base + max(fill, length - 1), base + count)

    def _clock(self) -> Process:
        """The story of a step: all compute, all send, everything arrives, the next step begins."""
        for step in range(self.steps):
            yield self.env.timeout(self.compute_cycles)
            now, messages = self.env.now, self.messages(step)
            for message in messages:
                self._send(message, step, now)
            entering = self.entering(step + 1)
            if entering is not None:
                self.recorder.rows += ROW.pack(now, now + self.machine.host_cycles, 0, Op.LOAD, entering, -1, -1)
            self.recorder.cut_if_full()
            yield self.env.timeout(self.step_cycles - self.compute_cycles)
            arrived = self.env.now
            for message in messages:
                self.timing.ledger.note(arrived, message.left)
                self.timing.ledger.note(arrived, message.arrived)
            if entering is not None:
                self.timing.ledger.note(arrived, self._loaded)
            yield Phase(self.env, CHOOSE)  # once the last core has come to wait for it, even where it ends just now
            boundary, self._boundary = self._boundary, self.env.event()
            boundary.succeed()
        self.timing.cycles = self.env.now

    def _send(self, message: StepMessage, step: int, now: int) -> None:
        route, sample = message.route, self._sample_sent(message.route, step)
        assert sample is not None
        start, arrival = now + message.start, now + message.arrival
        self.recorder.rows += ROW.pack(start, arrival, route.source, Op.SEND, sample, -1, route.target)
        self.timing.ledger.note(now, message.sent)
        self.timing.links.carry(route)

    def _core(self, core: CoreState, usages: list[UnitCycles]) -> Process:
        """The story of a core: forward, then backward, then wait for the next step."""
        stage, rows = core.stage, self.recorder.rows
        together = self.machine.split and stage < self.stages - 1
        forward_usage, backward_usage = usages[0], usages[-1]
        active = {id(usage): [0, 0] for usage in usages}  # first start, last end
        for step in range(self.steps):
            begin = computed = self.env.now
            forward, backward = self.forward_sample(stage, step), self.backward_sample(stage, step)
            if forward is not None:
                core.begin_forward(forward, begin)
                computed = begin + core.forward_cycles
                rows += ROW.pack(begin, computed, stage, Op.FORWARD, forward, core.version, -1)
                forward_usage.forward += core.forward_cycles
                _extend(active[id(forward_usage)], begin, computed, first=forward == 0)
            if backward is not None:
                start = begin if together else computed
                gradient = start + core.input_gradient_cycles
                end = weights = gradient + core.weight_gradient_cycles
                if start > begin:
                    yield self.env.timeout(start - begin)
                version = core.begin_backward(backward, start)
                rows += ROW.pack(start, gradient, stage, Op.INPUT_GRADIENT, backward, version, -1)
                rows += ROW.pack(gradient, weights, stage, Op.WEIGHT_GRADIENT, backward, version, -1)
                updated = core.updates_after(backward)
                if updated:
                    end += core.update_cycles
                    first, made = core.update_row(backward)
                    rows += ROW.pack(weights, end, stage, Op.UPDATE, first, made, -1)
                yield self.env.timeout(end - start)
                core.end_backward(end, updated=updated)
                backward_usage.input_gradient += core.input_gradient_cycles
                backward_usage.weight_gradient += core.weight_gradient_cycles
                backward_usage.update += end - weights
                _extend(active[id(backward_usage)], start, end, first=self.machine.split and backward == 0)
            yield self._boundary
        for usage in usages:
            first, last = active[id(usage)]
            usage.stall_input = last - first - usage.busy
            usage.idle = self.steps * self.step_cycles - (last - first)


def _entry(batches: Batches, stages: int, sample: int) -> int:
    """The step in which a sample enters: the inverse of `LockstepPipeline.entering`."""
    return sample + batches.index(sample) * (2 * stages - 2) * batches.drained


def _extend(span: list[int], start: int, end: int, *, first: bool) -> None:
    if first:
        span[0] = start
    span[1] = end


def _overflow(core: MachineCore, peak: int) -> Problem:
    capacity = core.memory.capacity
    missing = f"has {capacity} bytes of SRAM and needs {peak}, {peak - capacity} more; in lockstep nothing can wait"
    return Problem("hardware", f"core {core.stage} ({core.name})", "", missing)


def step_compute_cycles(machine: Machine, core: MachineCore) -> int:
    """How long a core computes in a step: F + Bx + Bw + U, or the longer of the two with split units."""
    return core.cycles.interval(machine.split and core.stage < machine.stages - 1)
