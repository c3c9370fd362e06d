"""Networks made by hand, for tests of the machine and the schedule that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pbsim.config import Hardware, Source, validate
from pbsim.config.hardware import Mesh
from pbsim.hardware import Cost, Cycles, Machine, StageCycles, build_machine
from pbsim.hardware.placement import grid_cores, uniform_shape
from pbsim.network.network import Edge, Network, Operator, Stage, Work
from pbsim.optim import Recipe, UpdateRule
from pbsim.schedule import Batches

RECIPE = Recipe(batch=1, lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False)


def chain(
    stages: int,
    work: list[Work] | None = None,
    elements: int | Sequence[int] = 10,
    skips: tuple[tuple[int, int], ...] = (),
    parameters: int = 8,
    tokens: tuple[tuple[int, int], ...] = (),
) -> Network:
    """A chain of linear-like stages, value s + 1 made by stage s, with extra edges from `skips`.

    `elements` may be given per value. Edges in `tokens` need no gradient: its message has no bytes.
    """
    sizes = [elements] * (stages + 1) if isinstance(elements, int) else list(elements)
    work = work or [Work(64, 64 if s else 0, 64, 8, 8 if s else 0, 8) for s in range(stages)]
    readers: dict[int, list[int]] = {s: [s + 1] for s in range(stages - 1)}
    for source, target in skips:
        readers[source].append(target)
    shapes = tuple((size,) for size in sizes)
    made = []
    for s in range(stages):
        inputs = (s, *(source + 1 for source, target in skips if target == s))
        operator = Operator(
            kind="linear",
            name=f"layer{s}",
            inputs=inputs,
            output=s + 1,
            parameters=(f"w{s}",),
            attributes={},
            needs_input_gradient=tuple(s > 0 for _ in inputs),
            work=work[s],
            saved_elements=0,
            saves_inputs=True,
            saves_output=False,
        )
        outputs = (s + 1,) if s < stages - 1 else ()
        made.append(Stage(s, f"layer{s}", (operator,), (f"w{s}",), parameters, inputs, outputs, sizes[s], work[s]))
    edges = tuple(
        Edge(
            source,
            target,
            (source + 1,),
            sizes[source + 1],
            0 if (source, target) in tokens else sizes[source + 1],
        )
        for source in range(stages)
        for target in sorted(readers.get(source, []))
    )
    return Network(shapes, 0, stages, tuple(made), edges, {f"w{s}": (parameters,) for s in range(stages)})


def hardware(name: str = "lockstep_ideal", **changes: object) -> Hardware:
    """A shipped hardware file with keys changed; `__` stands for the dot in a key's path."""
    from pbsim.config import apply_overrides, read_source

    sources: dict[str, Source] = {"hardware": read_source(Hardware, name)}
    table = sources["hardware"].document
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = table
        for part in path:
            inner = inner[part]
        inner[last] = value
    apply_overrides([], sources)
    return validate(Hardware, sources["hardware"])


def machine(net: Network, name: str = "lockstep_ideal", rule: UpdateRule | None = None, **changes: object) -> Machine:
    return build_machine(hardware(name, **changes), net, rule or UpdateRule(RECIPE))


def with_cycles(machine: Machine, cycles: Sequence[tuple[int, int, int, int]]) -> Machine:
    """A machine whose stages' F, Bx, Bw and U take these cycles."""
    cores = (
        replace(core, cycles=StageCycles(*(Cost(Cycles(compute=count)) for count in counts)))
        for core, counts in zip(machine.cores, cycles, strict=True)
    )
    return replace(machine, cores=tuple(cores))


@dataclass(frozen=True)
class Case:
    """A network on a machine, and how many samples to run.

    `batch` samples share an update, and are drained (0: an update after every sample); `epoch` samples are an epoch.
    """

    net: Network
    machine: Machine
    samples: int
    batch: int = 0
    epoch: int = 0

    @property
    def batches(self) -> Batches:
        if not self.batch:
            return Batches(self.samples)
        return Batches(self.samples, self.batch, drained=True, epoch_samples=self.epoch)


Entry = list[int]
"""A region as a hardware file lists it: [row, col, rows, cols]."""


@st.composite
def placements(draw: st.DrawFn, stages: int) -> tuple[int, int, list[Entry]]:
    """A small mesh (rows, columns), and a rectangle on it for every stage: anywhere, some PEs left over.

    The mesh is cut in two again and again; of the pieces, in any order, each stage shrinks one.
    """
    rows, cols = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    if rows * cols < stages:
        rows, cols = 2, stages
    pieces = [[0, 0, rows, cols]]
    while len(pieces) < stages + draw(st.integers(0, 2)):
        divisible = [piece for piece in pieces if piece[2] * piece[3] > 1]
        if not divisible:
            break
        piece = draw(st.sampled_from(divisible))
        row, col, height, width = piece
        pieces.remove(piece)
        if height > 1 and (width == 1 or draw(st.booleans())):
            cut = draw(st.integers(1, height - 1))
            pieces += [[row, col, cut, width], [row + cut, col, height - cut, width]]
        else:
            cut = draw(st.integers(1, width - 1))
            pieces += [[row, col, height, cut], [row, col + cut, height, width - cut]]
    chosen = draw(st.permutations(pieces))[:stages]
    return rows, cols, [draw(shrunk(piece)) for piece in chosen]


@st.composite
def shrunk(draw: st.DrawFn, piece: Entry) -> Entry:
    """A rectangle within a rectangle, as a rule the whole of it."""
    row, col, rows, cols = piece
    if draw(st.booleans()):
        return piece
    top, left = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
    return [row + top, col + left, draw(st.integers(1, rows - top)), draw(st.integers(1, cols - left))]


@st.composite
def layouts(draw: st.DrawFn, stages: int) -> dict[str, object]:
    """Keys of the hardware file: the usual line of cores, a small mesh with a snake of equal cores, or anything."""
    kind = draw(st.sampled_from(["anything", "anything", "anything", "snake", "line"]))
    if kind == "line":
        return {}
    if kind == "anything":
        rows, cols, entries = draw(placements(stages))
        return {"mesh__rows": rows, "mesh__cols": cols, "pipeline__placement": entries}
    height, width, across = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = height * -(-stages // across) + draw(st.integers(0, 2))
    keys = {"mesh__rows": rows, "mesh__cols": width * across, "core__pes": height * width}
    mesh = Mesh(rows=rows, cols=width * across)
    if grid_cores(mesh, uniform_shape(mesh, height * width)) < stages:
        return {}  # another shape of as many PEs was preferred, and is too few
    return keys


@st.composite
def cases(draw: st.DrawFn, every: bool = False, **changes: object) -> Case:
    """Small machines of every kind under pipelined backpropagation; `changes` fixes keys of the hardware file.

    With `every` also those whose memory is enforced, and fill-and-drain.

    Cycles are drawn as the hardware model gives them: only Bx of the first stage, and Bw and U of stages
    without parameters, may take none. The first stage has parameters.
    """
    stages = draw(st.integers(1, 6))
    distant = [(s, t) for s in range(stages) for t in range(s + 2, stages)]
    skips = tuple(sorted(draw(st.sets(st.sampled_from(distant), max_size=3)))) if distant else ()
    tokens = tuple(skip for skip in skips if skip[0] == 0 and draw(st.booleans()))
    sizes = draw(st.lists(st.integers(1, 8), min_size=stages + 1, max_size=stages + 1))
    cycles = []
    for stage in range(stages):
        trained = int(stage == 0 or draw(st.booleans()))
        least = (1, int(stage > 0), trained, trained)
        cycles.append(tuple(draw(st.integers(low, low + most)) for low, most in zip(least, (5, 4, 4, 2), strict=True)))
    credits = st.one_of(
        st.sampled_from(["lockstep", "1f1b", "unbounded"]),
        st.integers(1, 4),
        st.lists(st.integers(1, 4), min_size=stages, max_size=stages),
    )
    keys = {
        "pipeline__timing": st.sampled_from(["dataflow", "lockstep"]),
        "pipeline__credits": credits,
        "pipeline__priority": st.sampled_from(["backward", "forward"]),
        "pipeline__output_slots": st.integers(1, 3),
        "pipeline__memory": st.sampled_from(["report", "enforce"] if every else ["report"]),
        "core__units": st.sampled_from(["shared", "split"]),
        "fabric__link_bytes_per_cycle": st.sampled_from([1.0, 2.0, 3.0, 5.0, 16.0, float("inf")]),
        "fabric__hop_cycles": st.integers(0, 3),
        "host__bytes_per_cycle": st.sampled_from([1.0, 2.5, 6.0, float("inf")]),
    }
    table = {key: changes[key] if key in changes else draw(values) for key, values in keys.items()}
    if table["pipeline__timing"] == "lockstep":
        table["pipeline__memory"] = "report"  # in lockstep nothing can wait
    table |= draw(layouts(stages))
    net = chain(stages, elements=sizes, skips=skips, tokens=tokens)
    rule = UpdateRule(RECIPE, stash_weights=draw(st.booleans()))
    built = with_cycles(machine(net, "lockstep_ideal", rule, **table), cycles)
    if table["pipeline__memory"] == "enforce":
        built = with_spare_bytes(built, draw(st.lists(st.integers(0, 60), min_size=stages, max_size=stages)))
    if not (every and draw(st.booleans())):
        return Case(net, built, draw(st.integers(1, 8)))
    return Case(net, built, draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 6)))


def with_spare_bytes(machine: Machine, spare: Sequence[int]) -> Machine:
    """A machine whose cores hold one sample at a time, and so many bytes more."""
    cores = []
    for core, more in zip(machine.cores, spare, strict=True):
        memory = core.memory
        sent = [c.forward.size for c in machine.channels if c.source == core.stage]
        sent += [c.gradient.size for c in machine.channels if c.target == core.stage]
        received = [c.forward.size for c in machine.channels if c.target == core.stage]
        received += [c.gradient.size for c in machine.channels if c.source == core.stage]
        host = machine.host_bytes if core.stage == 0 else 0
        kept = memory.weights + memory.momentum + memory.previous_weights + memory.gradients
        capacity = kept + memory.stash + memory.weight_versions + host + sum(received) + sum(sent) + more
        cores.append(replace(core, memory=replace(memory, capacity=capacity)))
    return replace(machine, cores=tuple(cores))
