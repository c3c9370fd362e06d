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
from simpy.core import BoundClass
from simpy.events import EventPriority

from pbsim.errors import Problem, UserError
from pbsim.hardware.fabric import Links
from pbsim.hardware.machine import Machine, MachineCore
from pbsim.hardware.memory import NOTE, Booking, Category, Ledger
from pbsim.schedule.batches import Batches
from pbsim.schedule.trace import COLUMNS, ROW, Chunk, Op

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

WORTH_SETTLING = 100_000
"""Notes of the ledger from which on it is settled while a run goes on."""

EVENTS_EXHAUSTED = "No scheduled events left"
"""How SimPy says that a simulation is over while it waits for an event."""


class Clock(simpy.Environment):
    """SimPy's environment, in cycles: all delays are integers, so `now` is one too.

    SimPy binds `timeout` and `event` early in environments of its own class only, and `now` is a property of it; they
    are needed several times per step.
    """

    if TYPE_CHECKING:
        now: int
    else:
        __slots__ = ("_now",)
        timeout = BoundClass(simpy.Timeout)
        event = BoundClass(simpy.Event)

    def quiet(self, phase: EventPriority) -> bool:
        """Whether nothing more happens in this cycle before a phase of it: then that may as well begin now."""
        queue = self._queue
        return not queue or queue[0] >= (self._now, phase)


if not TYPE_CHECKING:
    Clock.now = Clock._now  # the slot itself


class Phase(simpy.Event):
    """An event that comes at a given phase of a cycle: of this one, or of one so many cycles later."""

    def __init__(self, env: Clock, priority: EventPriority, delay: int = 0) -> None:
        self.env, self.callbacks = env, []
        self._ok, self._value = True, None
        env.schedule(self, priority, delay)


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
    """Collects the rows of a trace and stops the clock when a chunk is full.

    Attributes
    ----------
    rows : packed by `ROW`, the values of `COLUMNS`; each row comes at its start or before.
    """

    def __init__(self, env: Clock, timing: Timing, chunk_rows: int) -> None:
        self.env, self.timing = env, timing
        self.rows = bytearray()
        self._limit = chunk_rows * ROW.size
        self._full = env.event()

    def cut_if_full(self) -> None:
        """Stop the clock in this cycle if there is a chunk; to be called now and then."""
        if len(self.rows) >= self._limit and not self._full.triggered:
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
        rows = np.frombuffer(bytes(self.rows), np.int64).reshape(-1, len(COLUMNS))
        self.rows.clear()
        self.timing.settle(until)
        return Chunk.of(rows, until)


class Delays:
    """Measured delays per stage: (version a sample's update makes) - 1 - (version its forward read), as they occur.

    Attributes
    ----------
    count, total, least, most : (2, S) int64; row 0 over forwards that read version 1 or later, row 1 over all.
    notes : forwards not counted yet: stage, version read and delay of each, one after the other.
    """

    def __init__(self, stages: int) -> None:
        self.notes: list[int] = []
        self.count, self.total = np.zeros((2, stages), np.int64), np.zeros((2, stages), np.int64)
        self.least, self.most = np.full((2, stages), np.iinfo(np.int64).max), np.full((2, stages), -1)

    def settle(self) -> None:
        """Count what has been noted."""
        noted = np.array(self.notes, np.int64).reshape(-1, 3)
        self.notes.clear()
        for row, (stage, _, delay) in enumerate((noted[noted[:, 1] > 0].T, noted.T)):
            np.add.at(self.count[row], stage, 1)
            np.add.at(self.total[row], stage, delay)
            np.minimum.at(self.least[row], stage, delay)
            np.maximum.at(self.most[row], stage, delay)

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

    def settle(self, before: int | None = None) -> None:
        """Work out what has only been noted so far, of all cycles before this one; if they are worth it, or of all."""
        if before is None or len(self.ledger.notes) >= WORTH_SETTLING * NOTE.size:
            self.ledger.settle(before)
            self.delays.settle()


class CoreState:
    """What a core keeps, in either timing: versions, samples in flight, and its entries in the memory ledger.

    Attributes
    ----------
    held : bytes of its memory in use, as far as they have been booked.
    """

    def __init__(self, env: Clock, machine: Machine, timing: Timing, core: MachineCore) -> None:
        self.env, self.stage, self.memory = env, core.stage, core.memory
        self.forward_cycles = core.cycles.forward.total
        self.input_gradient_cycles = core.cycles.input_gradient.total
        self.weight_gradient_cycles = core.cycles.weight_gradient.total
        self.update_cycles = core.cycles.update.total
        self.incoming = [c for c in machine.channels if c.target == self.stage]
        self.outgoing = [c for c in machine.channels if c.source == self.stage]
        self.version = 0
        self.done = 0
        self.in_flight = 0
        self.held = sum(timing.ledger.current[self.stage])
        self._stash_weights = machine.stash_weights
        self._versions: dict[int, int] = {}
        self._holds_gradients = False
        self._batches, self._drained = timing.batches, timing.batches.drained
        self._updates_always = timing.batches.size == 1
        self._peaks, self._note_delay = timing.peak_in_flight, timing.delays.notes.extend
        self._note = timing.ledger.notes.extend
        self._agree_on_bookings(machine, timing.ledger)

    def _agree_on_bookings(self, machine: Machine, ledger: Ledger) -> None:
        """A forward moves the input into the stash; a backward needs room for the gradient of the weights until the
        update, and leaves nothing of its sample behind.
        """
        host_bytes = machine.host_bytes if self.stage == 0 else 0
        kept = {Category.STASH: self.memory.stash, Category.WEIGHT_VERSIONS: self.memory.weight_versions}
        gone = {category: -size for category, size in kept.items()}
        gone[Category.INPUT_BUFFER] = -sum(c.gradient.size for c in self.outgoing)
        activation_bytes = host_bytes + sum(c.forward.size for c in self.incoming)
        self.forward_begins = ledger.booking(self.stage, {Category.INPUT_BUFFER: -activation_bytes} | kept)
        self.backward_begins = ledger.booking(self.stage, {Category.GRADIENTS: self.memory.gradients})
        self.backward_ends = ledger.booking(self.stage, gone)
        self.update_ends = ledger.booking(self.stage, gone | {Category.GRADIENTS: -self.memory.gradients})

    def book(self, booking: Booking, cycle: int) -> None:
        """Take or give back memory of this core at a cycle."""
        self._note(NOTE.pack(cycle, booking.number))
        self.held += booking.size

    def begin_forward(self, sample: int, now: int) -> None:
        """A sample's input moves from the input buffer into the stash; it is in flight from now."""
        if self._stash_weights:
            self._versions[sample] = self.version
        self._note_delay((self.stage, self.version, 0 if self._drained else self.in_flight))
        self.in_flight += 1
        if self.in_flight > self._peaks[self.stage]:
            self._peaks[self.stage] = self.in_flight
        self.book(self.forward_begins, now)

    def begin_backward(self, sample: int, now: int) -> int:
        """Room for the gradient of the weights, until the update; returns the version that Bx and Bw read.

        That is the present one, or under weight stashing the forward's.
        """
        if not self._holds_gradients:
            self.book(self.backward_begins, now)
            self._holds_gradients = True
        return self._versions.pop(sample) if self._stash_weights else self.version

    @property
    def missing_gradient_bytes(self) -> int:
        """What a backward that starts now needs: room for the gradient, unless the batch has it already."""
        return 0 if self._holds_gradients else self.memory.gradients

    def updates_after(self, sample: int) -> bool:
        """Whether an update follows the sample's backward."""
        return self._updates_always or self._batches.is_last(sample)

    def update_row(self, sample: int) -> tuple[int, int]:
        """The sample that names the update, the first of its batch, and the version that the update makes."""
        first = sample if self._updates_always else self._batches.first(self._batches.index(sample))
        return first, self.version + 1

    def end_backward(self, now: int, *, updated: bool) -> None:
        """A sample has left: its stash and, after an update, the gradient and the old weights are gone."""
        if updated:
            self.book(self.update_ends, now)
            self._holds_gradients = False
            self.version += 1
        else:
            self.book(self.backward_ends, now)
        self.done += 1
        self.in_flight -= 1


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
