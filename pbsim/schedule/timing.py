"""What both timings of a pipeline share: the clock's phases, the recorder, units that account for their cycles.

At a cycle everything that ends or arrives comes first; then the host sends; then results enter free output slots; then
messages that became ready are admitted to the links; then each free unit chooses what to do next; and what the choices
have freed is used in the same way again. SimPy orders events of one cycle by priority, which is how these phases are
told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import simpy
from simpy.events import EventPriority

from pbsim.errors import Problem, UserError
from pbsim.hardware.fabric import Links
from pbsim.hardware.machine import Machine, MachineCore
from pbsim.hardware.memory import Category, Ledger
from pbsim.schedule.batches import Batches
from pbsim.schedule.trace import COLUMNS, Chunk, Op, Trace

LOAD = EventPriority(2)
"""After all completions and arrivals of a cycle (SimPy's NORMAL is 1): the host sends if it can."""
GRANT = EventPriority(3)
"""After that: results enter free output slots."""
ADMIT = EventPriority(4)
"""After that: messages that became ready enter the links."""
CHOOSE = EventPriority(5)
"""After that: free units choose; of two units of a core the backward one at `CHOOSE_BACKWARD`."""
CHOOSE_BACKWARD = EventPriority(6)
"""See `CHOOSE`."""
AGAIN = EventPriority(7)
"""Last of a cycle: what the choices have freed may be used."""

EVENTS_EXHAUSTED = "No scheduled events left"
"""How SimPy says that a simulation is over while it waits for an event."""


class Clock(simpy.Environment):
    """SimPy's environment, in cycles: all delays are integers, so `now` is one too."""

    if TYPE_CHECKING:
        now: int

    def quiet(self) -> bool:
        """Whether nothing else happens in this cycle: then a later phase of it may as well come now."""
        return self.peek() > self.now


class Phase(simpy.Event):
    """An event of the current cycle that comes at a given phase of it."""

    def __init__(self, env: Clock, priority: EventPriority) -> None:
        super().__init__(env)
        fire(self, priority)


def fire(event: simpy.Event, priority: EventPriority) -> None:
    """Trigger an event in a given phase of the current cycle (`Event.succeed` knows one phase only)."""
    event._ok, event._value = True, None
    event.env.schedule(event, priority)


@dataclass
class UnitCycles:
    """How one unit of one core spent the run; the fields sum to the run's cycles (checked by the audit).

    Waiting for work before a unit's first operation and after its last is `idle`; every other wait is a stall,
    named after what was missing: `stall_input` an activation, a gradient or the batch's update (in lockstep also the
    end of the step), `stall_output` a place in the output buffer, `stall_memory` a credit or room in the core's memory.
    """

    core: int
    unit: str
    forward: int = 0
    input_gradient: int = 0
    weight_gradient: int = 0
    update: int = 0
    stall_input: int = 0
    stall_output: int = 0
    stall_memory: int = 0
    idle: int = 0

    @property
    def busy(self) -> int:
        """Cycles in which the unit computed."""
        return self.forward + self.input_gradient + self.weight_gradient + self.update

    @property
    def total(self) -> int:
        """All cycles accounted for."""
        return self.busy + self.stall_input + self.stall_output + self.stall_memory + self.idle


class Recorder:
    """Collects the rows of a trace and stops the clock whenever a chunk is full."""

    def __init__(self, env: Clock, chunk_rows: int) -> None:
        self.env = env
        self.rows: list[int] = []
        self._limit = chunk_rows * len(COLUMNS)
        self._full: simpy.Event | None = None

    def row(self, start: int, end: int, stage: int, op: int, sample: int, version: int = -1, target: int = -1) -> None:
        """Record an operation, at its start."""
        self.rows.extend((start, end, stage, op, sample, version, target))
        if len(self.rows) >= self._limit and self._full is not None and not self._full.triggered:
            self._full.succeed()

    def chunks(self) -> Iterator[Chunk]:
        """Run the simulation to its end, handing out the trace in pieces."""
        while True:
            self._full = self.env.event()
            try:
                self.env.run(until=self._full)
            except RuntimeError as error:
                if not str(error).startswith(EVENTS_EXHAUSTED):
                    raise
                break
            yield self._take(self.env.now)
        yield self._take(self.env.now + 1)

    def _take(self, until: int) -> Chunk:
        rows, self.rows = self.rows, []
        return Chunk(Trace.of(rows), until)


class Delays:
    """Measured delays per stage: (version a sample's update makes) - 1 - (version its forward read), as they occur.

    Attributes
    ----------
    count, total, least, most : (2, S) int64; row 0 over forwards that read version 1 or later, row 1 over all.
    """

    def __init__(self, stages: int) -> None:
        self.count, self.total = np.zeros((2, stages), np.int64), np.zeros((2, stages), np.int64)
        self.least, self.most = np.full((2, stages), np.iinfo(np.int64).max), np.full((2, stages), -1)

    def add(self, stage: int, version: int, delay: int) -> None:
        """Count a forward that read a version."""
        for row in range(0 if version else 1, 2):
            self.count[row, stage] += 1
            self.total[row, stage] += delay
            self.least[row, stage] = min(self.least[row, stage], delay)
            self.most[row, stage] = max(self.most[row, stage], delay)

    def table(self) -> list[tuple[float, int, int]]:
        """Mean, least and most per stage, over forwards that read version 1 or later (over all, if none did)."""
        rows, stages = np.where(self.count[0] > 0, 0, 1), np.arange(self.count.shape[1])
        mean = self.total[rows, stages] / self.count[rows, stages]
        least, most = self.least[rows, stages], self.most[rows, stages]
        return [(float(a), int(b), int(c)) for a, b, c in zip(mean, least, most, strict=True)]


@dataclass(frozen=True)
class SteadyState:
    """A periodic regime, proved by the complete state of the machine seen twice (relative to now)."""

    from_sample: int
    period_samples: int
    period_cycles: int
    skipped_samples: int
    """Samples whose events were not simulated one by one."""


@dataclass(frozen=True)
class Estimate:
    """No repetition was found: how far the figures, taken from the last windows simulated, may be off."""

    simulated_samples: int
    windows: int
    cycles_per_sample_least: float
    cycles_per_sample_most: float


@dataclass
class Timing:
    """The timing plane's results, complete once the simulation has run to its end.

    Attributes
    ----------
    batches : which samples share an update.
    cycles : of the whole run, from the first sample's start to the last update's end.
    units : one entry per core, or two with split units (`forward`, `backward`).
    ledger, links : memory and fabric, with what they have held and carried.
    peak_in_flight : per stage, the most samples between the start of F and the end of the backward and its update.
    delays : measured per stage.
    step_cycles : length of a lockstep step; None in dataflow.
    all_rows : whether the trace that was handed out is the whole one.
    entered : samples that have entered stage 0 so far, where the trace does not show it.
    steady_state, estimate : how the run was continued without events, if it was.
    """

    machine: Machine
    batches: Batches
    ledger: Ledger = field(init=False)
    links: Links = field(init=False)
    units: list[UnitCycles] = field(init=False)
    peak_in_flight: list[int] = field(init=False)
    delays: Delays = field(init=False)
    cycles: int = 0
    step_cycles: int | None = None
    all_rows: bool = True
    entered: int = 0
    steady_state: SteadyState | None = None
    estimate: Estimate | None = None

    def __post_init__(self) -> None:
        names = ("forward", "backward") if self.machine.split else ("shared",)
        self.ledger = Ledger(self.machine)
        self.links = self.machine.links()
        self.units = [UnitCycles(core.stage, name) for core in self.machine.cores for name in names]
        self.peak_in_flight = [0] * self.machine.stages
        self.delays = Delays(self.machine.stages)

    @property
    def samples(self) -> int:
        """Samples of the run."""
        return self.batches.samples


class CoreState:
    """What a core keeps, in either timing: versions, samples in flight, and its entries in the memory ledger."""

    def __init__(self, env: Clock, machine: Machine, timing: Timing, core: MachineCore) -> None:
        self.env, self.stage, self.memory = env, core.stage, core.memory
        self.forward_cycles = core.cycles.forward.total
        self.input_gradient_cycles = core.cycles.input_gradient.total
        self.weight_gradient_cycles = core.cycles.weight_gradient.total
        self.update_cycles = core.cycles.update.total
        self.incoming = [c for c in machine.channels if c.target == self.stage]
        self.outgoing = [c for c in machine.channels if c.source == self.stage]
        host_bytes = machine.host_bytes if self.stage == 0 else 0
        self.activation_bytes = host_bytes + sum(c.forward.size for c in self.incoming)
        self.gradient_bytes = sum(c.gradient.size for c in self.outgoing)
        self.sample_bytes = self.memory.stash + self.memory.weight_versions
        self.version = 0
        self.done = 0
        self.in_flight = 0
        self._stash_weights = machine.stash_weights
        self._versions: dict[int, int] = {}
        self._holds_gradients = False
        self._batches = timing.batches
        self._timing, self._add = timing, timing.ledger.add

    def book(self, category: Category, size: int) -> None:
        """Take or give back memory of this core now."""
        self._add(self.env.now, self.stage, category, size)

    def begin_forward(self, sample: int) -> None:
        """A sample's input moves from the input buffer into the stash; it is in flight from now."""
        if self._stash_weights:
            self._versions[sample] = self.version
        self._timing.delays.add(self.stage, self.version, 0 if self._batches.drained else self.in_flight)
        self.in_flight += 1
        if self.in_flight > self._timing.peak_in_flight[self.stage]:
            self._timing.peak_in_flight[self.stage] = self.in_flight
        self._add(self.env.now, self.stage, Category.INPUT_BUFFER, -self.activation_bytes)
        self._book_kept(1)

    def begin_backward(self, sample: int) -> int:
        """Room for the gradient of the weights, until the update; returns the version that Bx and Bw read.

        That is the present one, or under weight stashing the forward's.
        """
        self.book(Category.GRADIENTS, self.missing_gradient_bytes)
        self._holds_gradients = True
        return self._versions.pop(sample) if self._stash_weights else self.version

    @property
    def missing_gradient_bytes(self) -> int:
        """What a backward that starts now needs: room for the gradient, unless the batch has it already."""
        return 0 if self._holds_gradients else self.memory.gradients

    def updates_after(self, sample: int) -> bool:
        """Whether an update follows the sample's backward."""
        return self._batches.is_last(sample)

    def update_row(self, sample: int) -> tuple[int, int]:
        """The sample that names the update, the first of its batch, and the version that the update makes."""
        return self._batches.first(self._batches.index(sample)), self.version + 1

    def end_backward(self, sample: int) -> None:
        """A sample has left: its stash and, after an update, the gradient and the old weights are gone."""
        if self.updates_after(sample):
            self.book(Category.GRADIENTS, -self.memory.gradients)
            self._holds_gradients = False
            self.version += 1
        self.book(Category.INPUT_BUFFER, -self.gradient_bytes)
        self._book_kept(-1)
        self.done += 1
        self.in_flight -= 1

    def _book_kept(self, samples: int) -> None:
        self.book(Category.STASH, samples * self.memory.stash)
        if self.memory.weight_versions:
            self.book(Category.WEIGHT_VERSIONS, samples * self.memory.weight_versions)


class DeadlockError(UserError):
    """The simulation cannot proceed; the message names who waits for what."""


@dataclass
class Waits:
    """What a core that cannot go on has, and what it waits for: the words of a deadlock's message.

    Attributes
    ----------
    free : bytes of its memory; says something only where memory is enforced.
    reasons : what it waits for.
    """

    stage: int
    free: int
    in_flight: int
    done: int
    backward_ready: int
    reasons: list[str] = field(default_factory=list)

    def output(self, sample: int, target: int, size: int, *, slot: bool) -> None:
        """A result waits to enter the output buffer, for room if it has a slot."""
        room = f"{size} bytes ({self.free} free)" if slot else "a slot"
        self.reasons.append(f"sample {sample} waits for {room} of the output buffer, to leave for stage {target}")

    def backward(self, sample: int, size: int) -> None:
        """A backward waits for room for the gradient of the weights."""
        self.reasons.append(f"the backward of sample {sample} waits for {size} bytes ({self.free} free)")

    def forward(self, sample: int, size: int) -> None:
        """A forward waits for room for its stash."""
        self.reasons.append(f"the forward of sample {sample} waits for {size} bytes ({self.free} free)")

    def credit(self, sample: int, credits: int) -> None:
        """A forward waits for a credit."""
        self.reasons.append(f"the forward of sample {sample} waits for one of {credits} credits")

    def message(self, sample: int, size: int, target: int, free: int) -> None:
        """A message waits for room at its target."""
        buffer = f"{size} bytes of the input buffer of core {target} ({free} free)"
        self.reasons.append(f"a message of sample {sample} waits for {buffer}")

    def ordered(self, op: Op, sample: int) -> None:
        """An order made by hand has something next that is not ready."""
        what = "the activation" if op == Op.FORWARD else "the gradient"
        self.reasons.append(f"its order has {op.label} of sample {sample} next, and waits for {what}")

    def problem(self) -> Problem:
        """The core's line of a deadlock's message; without another reason it waits for what has not come."""
        if not self.reasons:
            if self.in_flight > self.backward_ready:
                missing = f"the gradient of sample {self.done}"
            elif self.stage == 0:
                missing = f"sample {self.done} from the host"
            else:
                missing = f"the activation of sample {self.done + self.in_flight}"
            self.reasons.append(f"waits for {missing}")
        state = f"{self.in_flight} in flight, {self.done} done"
        return Problem("schedule", f"core {self.stage}", "", f"deadlock: {'; '.join(self.reasons)} ({state})")
