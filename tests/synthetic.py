"""Networks made by hand, for tests of the machine and the schedule that need no model."""

from __future__ import annotations

from pbsim.config import Hardware, Source, validate
from pbsim.hardware import Machine, build_machine
from pbsim.network.network import Edge, Network, Operator, Stage, Work
from pbsim.optim import Recipe, UpdateRule

RECIPE = Recipe(batch=1, lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=False)


def chain(
    stages: int,
    work: list[Work] | None = None,
    elements: int = 10,
    skips: tuple[tuple[int, int], ...] = (),
    parameters: int = 8,
) -> Network:
    """A chain of linear-like stages, value s + 1 made by stage s, with extra edges from `skips`."""
    work = work or [Work(64, 64 if s else 0, 64, 8, 8 if s else 0, 8) for s in range(stages)]
    readers: dict[int, list[int]] = {s: [s + 1] for s in range(stages - 1)}
    for source, target in skips:
        readers[source].append(target)
    shapes = tuple((elements,) for _ in range(stages + 1))
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
        made.append(
            Stage(s, f"layer{s}", (operator,), (f"w{s}",), parameters, inputs, outputs, elements, work[s])
        )
    edges = tuple(
        Edge(source, target, (source + 1,), elements, elements)
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
