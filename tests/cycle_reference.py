"""The machine by the rules of DESIGN.md 4 and 6, cycle by cycle: slow, plain, no code of pbsim/schedule.

Numbers (cycles of an operation, sizes of messages, credits, slots) and the cores' rectangles come from a `Machine`;
everything that follows from them is worked out here by walking through the cycles, and over the mesh PE by PE. A link
is the set of cycles in which it is taken, a unit's account is the list of what it did in each cycle, and a version is a
count of updates.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from pbsim.hardware import Machine

F, BX, BW, U, SEND, LOAD = 0, 1, 2, 3, 4, 6
NAMES = {F: "forward", BX: "input_gradient", BW: "weight_gradient", U: "update"}
WAITS = ("stall_input", "stall_memory")
LIMIT = 200_000  # cycles after which the machine is taken to be stuck

Row = tuple[int, int, int, int, int, int, int]


@dataclass
class Result:
    """What a run left.

    Attributes
    ----------
    rows : (start, end, stage, op, sample, version, target), sorted.
    cycles : of the whole run.
    units : by (core, unit), cycles by what they were spent on; only what is not zero.
    peaks : per core, the most bytes it held at the end of a cycle (dataflow only).
    stuck : whether the machine stopped before every sample was done.
    """

    rows: list[Row]
    cycles: int
    units: dict[tuple[int, str], dict[str, int]]
    peaks: list[int] = field(default_factory=list)
    stuck: bool = False


def simulate(machine: Machine, samples: int, batch: int = 0, epoch: int = 0) -> Result:
    """Run the machine in the timing that its hardware file names.

    With `batch`, fill-and-drain: one update for so many samples (fewer at the end of an `epoch`, and of the run), and
    the next samples wait for it. Without, an update after every sample.
    """
    batches = cut(samples, batch, epoch) if batch else [[sample] for sample in range(samples)]
    if machine.hardware.pipeline.timing == "lockstep":
        return _lockstep(machine, samples, batches, drained=batch > 0)
    return _Dataflow(machine, samples, batches, drained=batch > 0).run()


def cut(samples: int, batch: int, epoch: int) -> list[list[int]]:
    """The samples of each update."""
    batches: list[list[int]] = []
    for sample in range(samples):
        begins = epoch and sample % epoch == 0
        if not batches or begins or len(batches[-1]) == batch:
            batches.append([])
        batches[-1].append(sample)
    return batches


def durations(machine: Machine, stage: int) -> dict[int, int]:
    """Cycles of F, Bx, Bw and U of a stage."""
    cycles = machine.cores[stage].cycles
    operations = (cycles.forward, cycles.input_gradient, cycles.weight_gradient, cycles.update)
    return dict(zip((F, BX, BW, U), (operation.total for operation in operations), strict=True))


def account(spent: list[str]) -> dict[str, int]:
    """What a unit's cycles were spent on; waiting before its first operation and after its last is idle."""
    active = [cycle for cycle, what in enumerate(spent) if what not in WAITS]
    first, last = (active[0], active[-1]) if active else (0, -1)
    return dict(Counter(what if first <= cycle <= last else "idle" for cycle, what in enumerate(spent)))


Place = tuple[int, int]


class Wires:
    """The mesh, PE by PE: whose each PE is, how messages walk, and per link the cycles in which it is taken.

    A PE that is in no core belongs to a spare rectangle, which is named after its upper left PE.
    """

    def __init__(self, machine: Machine) -> None:
        mesh, fabric = machine.hardware.mesh, machine.hardware.fabric
        self.hop, self.rate = fabric.hop_cycles, fabric.link_bytes_per_cycle
        self.regions = machine.nodes[: machine.stages]
        self.owner: dict[Place, object] = {}
        for stage, region in enumerate(self.regions):
            for row in range(region.row, region.row + region.rows):
                for col in range(region.col, region.col + region.cols):
                    self.owner[row, col] = stage
        self.spare(mesh.rows, mesh.cols)
        self.wires: Counter[tuple[object, object]] = Counter()
        for (row, col), one in self.owner.items():
            for neighbour in ((row, col + 1), (row, col - 1), (row + 1, col), (row - 1, col)):
                if neighbour in self.owner:
                    self.wires[one, self.owner[neighbour]] += 1
        self.taken: dict[tuple[object, object], set[int]] = {}

    def spare(self, rows: int, cols: int) -> None:
        """Share out the PEs that are in no core: runs of a row, joined to the run above if that has the same ends."""
        above: dict[tuple[int, int], object] = {}
        for row in range(rows):
            runs: dict[tuple[int, int], object] = {}
            free = [col for col in range(cols) if (row, col) not in self.owner]
            for begin in [col for col in free if col - 1 not in free]:
                end = begin
                while end in free:
                    end += 1
                runs[begin, end] = above.get((begin, end), ("spare", row, begin))
            for (begin, end), name in runs.items():
                for col in range(begin, end):
                    self.owner[row, col] = name
            above = runs

    @cache  # noqa: B019 (a machine's wires live as long as its simulation)
    def path(self, source: int, target: int) -> tuple[list[tuple[int, object, object]], int]:
        """The crossings from owner to owner, each with the steps before it, and how many steps there are in all."""
        region = self.regions[source]
        row, col = region.row + (region.rows - 1) // 2, region.col + (region.cols - 1) // 2
        columns = [place[1] for place, owner in self.owner.items() if owner == target]
        crossings, steps = [], 0
        while self.owner[row, col] != target:
            before = self.owner[row, col]
            if col < min(columns):
                col += 1
            elif col > max(columns):
                col -= 1
            elif row < self.regions[target].row:
                row += 1
            else:
                row -= 1
            if self.owner[row, col] != before:
                crossings.append((steps, before, self.owner[row, col]))
            steps += 1
        return crossings, steps

    def serialisation(self, source: int, target: int, size: int) -> int:
        """Cycles for which a message streams: over the fewest wires that it passes."""
        path, _ = self.path(source, target)
        return math.ceil(size / (self.rate * min(self.wires[one, other] for _, one, other in path)))

    def send(self, source: int, target: int, ready: int, hold: int) -> tuple[int, int, int]:
        """Start a message as early as possible; return when it starts, has left, and has arrived."""
        path, steps = self.path(source, target)
        start = ready
        while any(self.needs(k, start, hold) & self.taken.get((one, other), set()) for k, one, other in path):
            start += 1
        for k, one, other in path:
            self.taken.setdefault((one, other), set()).update(self.needs(k, start, hold))
        return start, start + hold, start + hold + steps * self.hop

    def needs(self, steps: int, start: int, hold: int) -> set[int]:
        """The cycles in which a message that starts now takes a link that comes so many steps after its start."""
        return set(range(start + steps * self.hop, start + steps * self.hop + hold))


# --- lockstep -------------------------------------------------------------------------------------


def _lockstep(machine: Machine, samples: int, batches: list[list[int]], *, drained: bool) -> Result:
    """In step k, stage s runs the forward of what entered in step k - s, and the backward of what entered in
    step k - 2(S-1) + s; a drained batch enters once the one before has left."""
    stages = machine.stages
    entered: dict[int, int] = {}  # the sample by the step in which it enters
    step = 0
    for batch in batches if drained else [list(range(samples))]:
        for sample in batch:
            entered[step] = sample
            step += 1
        step += 2 * stages - 2
    steps = range(step)
    last_of = {batch[-1]: batch[0] for batch in batches}  # by the last sample of an update, its first
    wires = Wires(machine)

    def forwarded(stage: int, step: int) -> int | None:
        return entered.get(step - stage)

    def backwarded(stage: int, step: int) -> int | None:
        return entered.get(step - 2 * (stages - 1) + stage)

    def messages(step: int) -> list[tuple[int, int, int, int, int]]:
        """The messages of a step: source, sample, target, start and arrival after all have been sent."""
        due = []
        for channel in machine.channels:
            sample = forwarded(channel.source, step)
            if sample is not None:
                due.append((channel.source, sample, channel.target, channel.forward.size))
            sample = backwarded(channel.target, step)
            if sample is not None:
                due.append((channel.target, sample, channel.source, channel.gradient.size))
        sent = []
        wires.taken.clear()
        for source, sample, target, size in sorted(due):
            start, _, arrival = wires.send(source, target, 0, wires.serialisation(source, target, size))
            sent.append((source, sample, target, start, arrival))
        return sent

    def together(stage: int) -> bool:
        """Whether F and B of a step run at once: the last stage's B needs its own F."""
        return machine.split and stage < stages - 1

    def computing(stage: int) -> int:
        cycles = durations(machine, stage)
        backward = cycles[BX] + cycles[BW] + cycles[U]
        return max(cycles[F], backward) if together(stage) else cycles[F] + backward

    compute = max(computing(stage) for stage in range(stages))
    arrivals = [message[-1] for step in steps for message in messages(step)]
    host = [machine.host_cycles] if samples > 1 else []
    length = compute + max([*arrivals, *host, 0])

    rows: list[Row] = [(0, 0, 0, LOAD, 0, -1, -1)]
    units = ("forward", "backward") if machine.split else ("shared",)
    spent = {(s, unit): ["stall_input"] * (length * len(steps)) for s in range(stages) for unit in units}
    operations: list[tuple[int, int, int, int, int]] = []  # start, end, stage, op, sample
    for step in steps:
        begin = step * length
        for source, sample, target, start, arrival in messages(step):
            rows.append((begin + compute + start, begin + compute + arrival, source, SEND, sample, -1, target))
        if step + 1 in entered:
            loaded = begin + compute + machine.host_cycles
            rows.append((begin + compute, loaded, 0, LOAD, entered[step + 1], -1, -1))
        for stage in range(stages):
            cycles, now = durations(machine, stage), begin
            sample = forwarded(stage, step)
            if sample is not None:
                operations.append((now, now + cycles[F], stage, F, sample))
                now += cycles[F]
            if together(stage):
                now = begin
            sample = backwarded(stage, step)
            if sample is not None:
                for op in (BX, BW):
                    operations.append((now, now + cycles[op], stage, op, sample))
                    now += cycles[op]
                if sample in last_of:
                    operations.append((now, now + cycles[U], stage, U, last_of[sample]))
    for start, end, stage, op, sample in operations:
        unit = "shared" if not machine.split else "forward" if op == F else "backward"
        spent[stage, unit][start:end] = [NAMES[op]] * (end - start)
        if machine.stash_weights and op in (BX, BW):  # a backward has the weights of its own forward
            start_of_read = next(at for at, _, s, o, i in operations if (s, o, i) == (stage, F, sample))
            version = _version(operations, start_of_read, end, stage, F, sample)
        else:
            version = _version(operations, start, end, stage, op, sample)
        rows.append((start, end, stage, op, sample, version, -1))
    return Result(sorted(rows), length * len(steps), {key: account(what) for key, what in spent.items()})


def _version(
    operations: list[tuple[int, int, int, int, int]], start: int, end: int, stage: int, op: int, sample: int
) -> int:
    """Updates that have ended by a forward's start, by the start of a sample's Bx, by an update's end."""
    if op == BW:
        start = next(at for at, _, s, o, i in operations if (s, o, i) == (stage, BX, sample))
    until = end if op == U else start
    return sum(s == stage and o == U and at <= until for _, at, s, o, _ in operations)


# --- dataflow -------------------------------------------------------------------------------------


@dataclass
class _Message:
    source: int
    sample: int
    target: int
    backward: bool
    serialisation: int
    size: int
    ready: int = -1
    left: int | None = None
    arrival: int | None = None


@dataclass
class _Unit:
    """A unit of a core: its plan is what is left of the operation that it has chosen.

    `doing` is an operation that lasts `until` a cycle, or a message that wants an output slot `since` one.
    """

    name: str
    runs_forward: bool
    runs_backward: bool
    sample: int = -1
    plan: list[int | _Message] = field(default_factory=list)
    doing: int | _Message | None = None
    until: int = -1
    since: int = -1
    spent: list[str] = field(default_factory=list)


@dataclass
class _Core:
    stage: int
    units: list[_Unit]
    free_slots: int
    level: int = 0  # bytes held
    peak: int = 0
    version: int = 0
    in_flight: int = 0
    done: int = 0  # samples whose backward is over
    has_gradients: bool = False
    read: dict[int, int] = field(default_factory=dict)  # by sample, the version that its Bx read
    forwards: dict[int, int] = field(default_factory=dict)  # by sample, the version that its F read
    activations: Counter[int] = field(default_factory=Counter)
    gradients: Counter[int] = field(default_factory=Counter)
    forward_ready: set[int] = field(default_factory=set)
    backward_ready: set[int] = field(default_factory=set)


class _Dataflow:
    def __init__(self, machine: Machine, samples: int, batches: list[list[int]], *, drained: bool) -> None:
        self.machine, self.samples, self.drained = machine, samples, drained
        self.enforced = machine.hardware.pipeline.memory == "enforce"
        self.batch_of = {sample: index for index, batch in enumerate(batches) for sample in batch}
        self.first_of = {sample: batch[0] for batch in batches for sample in batch}
        self.lasts = {batch[-1] for batch in batches}
        self.wires = Wires(machine)
        slots = machine.hardware.pipeline.output_slots
        self.cores = [_Core(stage, self._units(), slots) for stage in range(machine.stages)]
        for core in self.cores:
            memory = machine.cores[core.stage].memory
            core.level = memory.weights + memory.momentum + memory.previous_weights
        self.cycle = 0
        self.rows: list[Row] = []
        self.ready: list[_Message] = []  # in an output buffer, to be admitted to the links
        self.moving: list[_Message] = []  # admitted
        self.slot: int | None = None  # the sample that is in, or on its way to, stage 0's input slot
        self.loaded = 0  # samples that the host has begun to send
        self.load_end: int | None = None

    def _units(self) -> list[_Unit]:
        if self.machine.split:
            return [_Unit("forward", True, False), _Unit("backward", False, True)]
        return [_Unit("shared", True, True)]

    def run(self) -> Result:
        stuck = False
        while not stuck:
            # at a cycle all completions and arrivals come first, then output slots, then admissions, then choices
            while self.completions() or self.grants() or self.admissions() or self.choices():
                pass
            for core in self.cores:
                core.peak = max(core.peak, core.level)
            if all(core.done == self.samples for core in self.cores):
                break
            stuck = not self.anything_goes_on()
            for core in self.cores:
                for unit in core.units:
                    unit.spent.append(self.spends(core, unit))
            self.cycle += 1
            assert self.cycle < LIMIT, "the machine runs for too long"
        units = {(core.stage, unit.name): account(unit.spent) for core in self.cores for unit in core.units}
        return Result(sorted(self.rows), self.cycle, units, [core.peak for core in self.cores], stuck)

    def anything_goes_on(self) -> bool:
        """Whether something will end by itself; else nothing ever happens again."""
        computing = any(isinstance(unit.doing, int) for core in self.cores for unit in core.units)
        return computing or bool(self.moving) or self.load_end is not None

    def fits(self, core: _Core, size: int) -> bool:
        """Whether a core has room for so many bytes more; asked only where capacity is enforced."""
        return not self.enforced or core.level + size <= self.machine.cores[core.stage].memory.capacity

    def spends(self, core: _Core, unit: _Unit) -> str:
        """What a unit does in the cycle that begins now."""
        if isinstance(unit.doing, _Message):
            return "stall_output"
        if unit.doing is not None:
            return NAMES[unit.doing]
        held_back = (unit.runs_forward and self.next_forward(core) is not None) or (
            unit.runs_backward and core.backward_ready
        )
        return "stall_memory" if held_back else "stall_input"

    def next_forward(self, core: _Core) -> int | None:
        """The oldest sample whose inputs, and whose weights, are there."""
        if not core.forward_ready:
            return None
        sample = min(core.forward_ready)
        return None if self.drained and core.version < self.batch_of[sample] else sample

    # completions and arrivals

    def completions(self) -> bool:
        """Everything that ends at this cycle; whether there was anything."""
        happened = self.host()
        for message in self.moving:
            if message.left == self.cycle and message.serialisation:
                self.cores[message.source].free_slots += 1
                self.cores[message.source].level -= message.size
                message.left, happened = None, True
            if message.arrival == self.cycle:
                self.arrive(message)
                message.arrival, happened = None, True
        self.moving = [m for m in self.moving if m.left is not None or m.arrival is not None]
        for core in self.cores:
            for unit in core.units:
                if isinstance(unit.doing, int) and unit.until == self.cycle:
                    self.complete(core, unit)
                    happened = True
        return happened

    def grants(self) -> bool:
        """One free output slot of each core goes to whoever has waited longest."""
        granted = [self.fill_slot(core) for core in self.cores]  # every core's turn, whatever the others got
        return any(granted)

    def host(self) -> bool:
        """The host sends when stage 0's single input slot is free."""
        first, size = self.cores[0], self.machine.host_bytes
        if self.slot is None and self.loaded < self.samples and self.fits(first, size):
            first.level += size if self.enforced else 0
            self.slot, self.load_end = self.loaded, self.cycle + self.machine.host_cycles
            self.rows.append((self.cycle, self.load_end, 0, LOAD, self.slot, -1, -1))
            self.loaded += 1
            return True
        if self.slot is not None and self.load_end == self.cycle:
            first.level += 0 if self.enforced else size
            first.forward_ready.add(self.slot)
            self.load_end = None
            return True
        return False

    def arrive(self, message: _Message) -> None:
        """A sample is ready once all its activations, or all its gradients, are there."""
        core = self.cores[message.target]
        core.level += 0 if self.enforced else message.size
        if message.backward:
            core.gradients[message.sample] += 1
            if core.gradients[message.sample] == sum(c.source == core.stage for c in self.machine.channels):
                core.backward_ready.add(message.sample)
        else:
            core.activations[message.sample] += 1
            if core.activations[message.sample] == sum(c.target == core.stage for c in self.machine.channels):
                core.forward_ready.add(message.sample)

    def complete(self, core: _Core, unit: _Unit) -> None:
        """An operation has ended: an update writes, the loss's forward makes its own gradient; go on."""
        updates = unit.sample in self.lasts
        if unit.doing == U:
            core.version += 1
            core.level -= self.machine.cores[core.stage].memory.gradients
            core.has_gradients = False
        if unit.doing == (U if updates else BW):
            core.in_flight -= 1
            core.done += 1
            received = [c.gradient.size for c in self.machine.channels if c.source == core.stage]
            core.level -= sum(received) + self.kept_bytes(core)
        if unit.doing == F and core.stage == self.machine.stages - 1:
            core.backward_ready.add(unit.sample)
        self.next_step(core, unit)

    def kept_bytes(self, core: _Core) -> int:
        """What a core keeps of a sample between its forward and the end of its backward."""
        memory = self.machine.cores[core.stage].memory
        return memory.stash + memory.weight_versions

    def input_bytes(self, core: _Core) -> int:
        """What a core receives for a sample's forward."""
        received = [c.forward.size for c in self.machine.channels if c.target == core.stage]
        return sum(received) + (self.machine.host_bytes if core.stage == 0 else 0)

    def next_step(self, core: _Core, unit: _Unit) -> None:
        """Begin the next operation of a unit's plan, or let its next message want an output slot."""
        unit.doing = unit.plan.pop(0) if unit.plan else None
        if isinstance(unit.doing, _Message):
            unit.since = self.cycle
            if not unit.doing.serialisation:  # it holds no link for any cycle, and needs no slot
                unit.doing.ready = self.cycle
                self.ready.append(unit.doing)
                self.next_step(core, unit)
        elif unit.doing is not None:
            op, sample = unit.doing, unit.sample
            unit.until = self.cycle + durations(self.machine, core.stage)[op]
            if op == BX:
                core.read[sample] = core.forwards.pop(sample) if self.machine.stash_weights else core.version
            elif op == F:
                core.forwards[sample] = core.version
            version = {F: core.version, U: core.version + 1}.get(op, core.read.get(sample, -1))
            named = self.first_of[sample] if op == U else sample
            self.rows.append((self.cycle, unit.until, core.stage, op, named, version, -1))

    def fill_slot(self, core: _Core) -> bool:
        """Put a result into a free output slot: the one that has waited longest, then the older sample's."""
        wanting = [unit for unit in core.units if isinstance(unit.doing, _Message)]
        if not wanting or not core.free_slots:
            return False
        unit = min(wanting, key=lambda unit: (unit.since, unit.sample))
        assert isinstance(unit.doing, _Message)
        if not self.fits(core, unit.doing.size):
            return False
        core.free_slots -= 1
        core.level += unit.doing.size
        unit.doing.ready = self.cycle
        self.ready.append(unit.doing)
        self.next_step(core, unit)
        return True

    # admissions

    def admissions(self) -> bool:
        """Messages enter the links in the order of ready cycle, source stage, sample, target stage.

        With enforced capacity, those that find no room at their target wait, and take it from the moment they enter.
        """
        waiting, self.ready, admitted = self.ready, [], False
        for message in sorted(waiting, key=lambda m: (m.ready, m.source, m.sample, m.target)):
            target = self.cores[message.target]
            if not self.fits(target, message.size):
                self.ready.append(message)
                continue
            admitted = True
            target.level += message.size if self.enforced else 0
            start, message.left, message.arrival = self.wires.send(
                message.source, message.target, self.cycle, message.serialisation
            )
            if not message.serialisation:
                message.left = None  # it was in no slot
            self.rows.append((start, message.arrival, message.source, SEND, message.sample, -1, message.target))
            self.moving.append(message)
        return admitted

    # choices

    def choices(self) -> bool:
        """Each free unit chooses: per operation the oldest sample, `priority` between the two."""
        happened = False
        for core in self.cores:
            for unit in core.units:
                if unit.doing is None:
                    happened |= self.choose(core, unit)
        return happened

    def choose(self, core: _Core, unit: _Unit) -> bool:
        credits, memory = self.machine.cores[core.stage].credits, self.machine.cores[core.stage].memory
        grown = self.kept_bytes(core) - self.input_bytes(core)
        forward = self.next_forward(core) if unit.runs_forward else None
        may_forward = forward is not None and (credits is None or core.in_flight < credits) and self.fits(core, grown)
        needed = 0 if core.has_gradients else memory.gradients
        may_backward = unit.runs_backward and bool(core.backward_ready) and self.fits(core, needed)
        if may_forward and may_backward:
            may_forward = self.drained or self.machine.hardware.pipeline.priority == "forward"
        if may_forward:
            assert forward is not None
            unit.sample = forward
            core.forward_ready.remove(unit.sample)
            core.in_flight += 1
            core.level += grown
            if core.stage == 0:
                self.slot = None
            unit.plan = [F, *self.results(core.stage, unit.sample)]
        elif may_backward:
            unit.sample = min(core.backward_ready)
            core.backward_ready.remove(unit.sample)
            core.level += needed
            core.has_gradients = True
            update = [U] if unit.sample in self.lasts else []
            unit.plan = [BX, *self.gradients(core.stage, unit.sample), BW, *update]
        else:
            return False
        self.next_step(core, unit)
        return True

    def results(self, stage: int, sample: int) -> list[_Message]:
        """What a forward sends, to the nearest stage first."""
        channels = sorted((c for c in self.machine.channels if c.source == stage), key=lambda c: c.target)
        return [self.message(stage, sample, c.target, False, c.forward.size) for c in channels]

    def gradients(self, stage: int, sample: int) -> list[_Message]:
        """What a Bx sends, to the first stage first."""
        channels = sorted((c for c in self.machine.channels if c.target == stage), key=lambda c: c.source)
        return [self.message(stage, sample, c.source, True, c.gradient.size) for c in channels]

    def message(self, source: int, sample: int, target: int, backward: bool, size: int) -> _Message:
        return _Message(source, sample, target, backward, self.wires.serialisation(source, target, size), size)
