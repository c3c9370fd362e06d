"""Cutting a network into stages, each of which one core executes.

Four rules, chosen by a workload's `partition`:

`layer`
    A convolution or Linear starts a stage. Norm, activation, dropout, flatten and pooling join the stage
    before them, that is the stage that makes their input. A norm (and its activation) whose input has another
    reader joins the convolution after it, as in pre-activation blocks, so that the shortcut need not leave
    from inside a stage. An addition joins the stage of its main path: of its inputs, the one at the end of
    the longer chain of stages.
`residual`
    As `layer`, but an addition and a global pool are stages, and nothing joins an addition: what follows one
    joins the convolution after it, and where there is none, as between an addition and a pool, is a stage.
`module`
    Every call of a leaf module but flatten is a stage. Flatten, and operators that no leaf module makes, join
    the stage before them.
a list of module names
    Each is a stage, with all it contains; together they hold every operator, in execution order.

What would join the stage before it, at the start of a network where there is none, joins the first stage
after. The loss is a stage of its own under `module` and `residual`, and else part of the last stage.

The rules walk once through the operators. A draft of a stage may be *open*: it waits for the operator that
will own it, the next convolution that reads from it. If something else reads from it first, it is *settled*:
it joins the stage before it, or is a stage if there is none that it may join.

The stages are numbered in topological order, so that every edge goes forward.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pbsim.errors import Problem, UserError
from pbsim.network.network import Edge, Operator, Stage, Work
from pbsim.network.operators import ALIASES, STARTS_A_STAGE, Shape

RULES = ("layer", "module", "residual")

LOSS_APART = ("module", "residual")
"""Rules under which the loss is a stage of its own."""

NAME_PARTS = 5
"""Module names that a stage's name shows before it leaves out those in the middle."""


@dataclass(frozen=True)
class PlacedOperator:
    """An operator and where it stands in the model.

    Attributes
    ----------
    operator : the operator.
    path : path of the innermost module whose forward made it.
    call : key of the leaf-module call that made it, unique per call; None if no leaf module did.
    """

    operator: Operator
    path: str
    call: str | None


def cut_into_stages(
    placed: Sequence[PlacedOperator],
    loss: Operator,
    *,
    shapes: Sequence[Shape],
    needs_gradient: Sequence[bool],
    parameter_shapes: Mapping[str, Shape],
    partition: str | Sequence[str],
    module_names: Sequence[str],
    where: str,
) -> tuple[tuple[Stage, ...], tuple[Edge, ...]]:
    """Cut the operators into stages.

    Parameters
    ----------
    placed : the operators without the loss, in execution order.
    loss : the loss, which reads the model's output.
    shapes, needs_gradient : per value, its shape and whether a parameter stands upstream of it.
    parameter_shapes : by torch name.
    partition : a rule, or a list of module names.
    module_names : all names of the model, as in `named_modules()`.
    where : the workload file, for errors.

    Raises
    ------
    UserError
        With every fault of the partition.
    """
    operators = [one.operator for one in placed]
    maker = {operator.output: index for index, operator in enumerate(operators)}
    if isinstance(partition, str):
        if partition not in RULES:
            rules = ", ".join(RULES)
            raise UserError(
                Problem(where, "model.partition", partition, f"allowed are {rules}, or a list of module names")
            )
        groups = _RuleCut(placed, loss, maker, shapes, partition).groups()
        groups = _in_topological_order(groups, operators, maker, where)
        names = [_stage_name(group, placed) for group in groups]
    else:
        groups = _groups_by_name(placed, maker, partition, module_names, where)
        names = [name or "model" for name in partition]

    members = [[operators[index] for index in group] for group in groups]
    if isinstance(partition, str) and partition in LOSS_APART:
        members.append([loss])
        names.append(loss.name)
    else:
        members[-1].append(loss)
    names = _unique(names)
    _refuse_shared_parameters(members, names, where)
    return _assemble(members, names, shapes, needs_gradient, parameter_shapes)


# --- the rules ------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Draft:
    """A stage in the making.

    Attributes
    ----------
    operators : indices, in the order they joined.
    is_open : whether it still waits for the operator that owns it.
    before : of an open draft, the stage before it, if any.
    is_addition : whether it is an addition that nothing may join.
    """

    operators: list[int] = field(default_factory=list)
    is_open: bool = False
    before: _Draft | None = None
    is_addition: bool = False


class _RuleCut:
    """One walk through the operators under one of the three rules."""

    def __init__(
        self,
        placed: Sequence[PlacedOperator],
        loss: Operator,
        maker: Mapping[int, int],
        shapes: Sequence[Shape],
        rule: str,
    ) -> None:
        self.placed = placed
        self.shapes = shapes
        self.operators = [one.operator for one in placed]
        self.maker = maker
        self.rule = rule
        self.drafts: list[_Draft] = []
        self.draft_of: dict[int, _Draft] = {}
        self.draft_of_call: dict[str, _Draft] = {}
        self.readers = Counter(value for operator in (*self.operators, loss) for value in set(operator.inputs))

    def groups(self) -> list[list[int]]:
        """Operators of each stage, in execution order; the stages in no particular one."""
        place = self._place_by_module if self.rule == "module" else self._place_by_layer
        for index in range(len(self.operators)):
            place(index)
        for draft in list(self.drafts):
            self._settle(draft)
        return [sorted(draft.operators) for draft in self.drafts]

    def _place_by_layer(self, index: int) -> None:
        """Place an operator under `layer` or `residual`."""
        operator = self.operators[index]
        before = self._drafts_before(index)
        residual = self.rule == "residual"
        if operator.kind in STARTS_A_STAGE:
            self._start(index)
        elif residual and (operator.kind == "add" or self._is_global_pool(operator)):
            for draft in before:
                self._settle(draft)
            self._join(index, self._new_draft(is_addition=operator.kind == "add"))
        elif operator.kind == "add":
            self._join_latest(index)
        elif not before:
            self._join(index, self._new_draft(is_open=True))
        elif before[0].is_open:
            self._join(index, before[0])
        elif before[0].is_addition or (operator.kind == "group_norm" and self.readers[operator.inputs[0]] > 1):
            self._join(index, self._new_draft(is_open=True, before=before[0]))
        else:
            self._join(index, before[0])

    def _place_by_module(self, index: int) -> None:
        """Place an operator under `module`."""
        call = self.placed[index].call
        if call is not None and call in self.draft_of_call:
            self._join(index, self.draft_of_call[call])
        elif call is None or self.operators[index].kind == "flatten":
            self._join_latest(index)
        else:
            self._start(index)
            self.draft_of_call[call] = self.draft_of[index]

    def _is_global_pool(self, operator: Operator) -> bool:
        """Whether it averages over the whole of every map."""
        if operator.kind != "avg_pool2d" or operator.attributes["padding"] != (0, 0):
            return False
        kernel: Shape = operator.attributes["kernel"]
        return self.shapes[operator.inputs[0]][1:] == kernel

    def _drafts_before(self, index: int) -> list[_Draft]:
        """Drafts that make the inputs, each once; none for the model's input."""
        makers = [self.maker[value] for value in self.operators[index].inputs if value in self.maker]
        return list(dict.fromkeys(self.draft_of[maker] for maker in makers))

    def _new_draft(self, *, is_open: bool = False, before: _Draft | None = None, is_addition: bool = False) -> _Draft:
        draft = _Draft(is_open=is_open, before=before, is_addition=is_addition)
        self.drafts.append(draft)
        return draft

    def _join(self, index: int, draft: _Draft) -> None:
        draft.operators.append(index)
        self.draft_of[index] = draft

    def _start(self, index: int) -> None:
        """Let an operator own the open draft that it reads from, or a new one."""
        waiting = [draft for draft in self._drafts_before(index) if draft.is_open]
        for other in waiting[1:]:
            self._settle(other)
        draft = waiting[0] if waiting else self._new_draft()
        draft.is_open = False
        self._join(index, draft)

    def _settle(self, draft: _Draft) -> None:
        """Close an open draft that nothing owns: it joins the stage before it, or is one if it may not."""
        if not draft.is_open:
            return
        draft.is_open = False
        if draft.before is None or draft.before.is_addition:
            return
        self.drafts.remove(draft)
        for index in draft.operators:
            self._join(index, draft.before)

    def _join_latest(self, index: int) -> None:
        """Join, of the stages before, the one at the end of the longest chain of stages."""
        before = self._drafts_before(index)
        if not before:
            self._join(index, self._new_draft(is_open=True))
            return
        if len(before) > 1:
            for draft in before:
                self._settle(draft)
            before = self._drafts_before(index)
        levels = self._levels() if len(before) > 1 else {before[0]: 0}
        self._join(index, max(before, key=lambda draft: (levels[draft], max(draft.operators))))

    def _levels(self) -> dict[_Draft, int]:
        """Length of the longest chain of stages that ends in each draft.

        An addition that joins the highest of its inputs' stages never closes a cycle: a stage that reads from
        another is higher than it.
        """
        groups = [draft.operators for draft in self.drafts]
        predecessors = _predecessors(groups, self.operators, self.maker)
        levels: dict[int, int] = {}
        for number in _topological_order(groups, predecessors):
            levels[number] = 1 + max((levels[one] for one in predecessors[number]), default=0)
        return {draft: levels[number] for number, draft in enumerate(self.drafts)}


# --- a list of names ------------------------------------------------------------------------------


def _is_within(path: str, module: str) -> bool:
    return module == "" or path == module or path.startswith(module + ".")


def _groups_by_name(
    placed: Sequence[PlacedOperator],
    maker: Mapping[int, int],
    names: Sequence[str],
    module_names: Sequence[str],
    where: str,
) -> list[list[int]]:
    """Operators under each name; refuses all faults of the list at once."""
    groups = [[index for index, one in enumerate(placed) if _is_within(one.path, name)] for name in names]
    faults = _faults_of_names(names, module_names, groups)
    held = {index for group in groups for index in group}
    left = list(dict.fromkeys(one.operator.name for index, one in enumerate(placed) if index not in held))
    if left:
        faults.append(("", f"these operators are in none of the modules listed: {', '.join(left)}"))
    if not faults:
        faults = _faults_of_order(names, groups, [one.operator for one in placed], maker)
    if faults:
        raise UserError(Problem(where, "model.partition", name, fault) for name, fault in faults)
    return groups


def _faults_of_names(
    names: Sequence[str], module_names: Sequence[str], groups: Sequence[Sequence[int]]
) -> list[tuple[str, str]]:
    """Names that are unknown, double, nested or empty of operators."""
    if not names:
        return [("[]", "the list must hold at least one module name")]
    faults = []
    for position, (name, group) in enumerate(zip(names, groups, strict=True)):
        if name not in module_names:
            near = difflib.get_close_matches(name, module_names, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else "; names are those of named_modules()"
            faults.append((name, f"the model has no such module{hint}"))
            continue
        if name in names[:position]:
            faults.append((name, "it is listed twice"))
        faults += [
            (name, f"it lies within {outer!r}, which is listed too")
            for outer in dict.fromkeys(names)
            if outer != name and outer in module_names and _is_within(name, outer)
        ]
        if not group:
            faults.append((name, "it holds no operator that contributes to the output; leave it out"))
    return faults


def _faults_of_order(
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    operators: Sequence[Operator],
    maker: Mapping[int, int],
) -> list[tuple[str, str]]:
    """Stages that stand before one they read from, or in a cycle with it."""
    predecessors = _predecessors(groups, operators, maker)
    if len(_topological_order(groups, predecessors)) < len(groups):
        return [("", _cycle_message([names[number] for number in _cycle(groups, predecessors)]))]
    return [
        (names[number], f"it reads from {names[other]!r}, which must stand before it in the list")
        for number in range(len(groups))
        for other in sorted(predecessors[number])
        if other > number
    ]


# --- order ----------------------------------------------------------------------------------------


def _predecessors(
    groups: Sequence[Sequence[int]], operators: Sequence[Operator], maker: Mapping[int, int]
) -> list[set[int]]:
    """Per group, the other groups it reads from."""
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    found: list[set[int]] = []
    for number, group in enumerate(groups):
        makers = (maker[value] for index in group for value in operators[index].inputs if value in maker)
        found.append({group_of[one] for one in makers if one in group_of} - {number})
    return found


def _topological_order(groups: Sequence[Sequence[int]], predecessors: Sequence[set[int]]) -> list[int]:
    """Numbers of the groups, each after those it reads from, else by first operator; none behind a cycle."""
    waits_for = [len(before) for before in predecessors]
    followers: list[list[int]] = [[] for _ in groups]
    for number, before in enumerate(predecessors):
        for one in before:
            followers[one].append(number)
    ready = [(min(groups[number]), number) for number, count in enumerate(waits_for) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for follower in followers[number]:
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                heapq.heappush(ready, (min(groups[follower]), follower))
    return order


def _cycle(groups: Sequence[Sequence[int]], predecessors: Sequence[set[int]]) -> list[int]:
    """Numbers of the groups of one cycle, in the direction in which values flow."""
    ordered = set(_topological_order(groups, predecessors))
    walk = [next(number for number in range(len(groups)) if number not in ordered)]
    while True:
        before = min(one for one in predecessors[walk[-1]] if one not in ordered)
        if before in walk:
            return walk[walk.index(before) :][::-1]
        walk.append(before)


def _cycle_message(names: Sequence[str]) -> str:
    chain = " -> ".join([*names, names[0]])
    return f"the stages {chain} pass values in a cycle, but values must go forward only; make one stage of them"


def _in_topological_order(
    groups: Sequence[Sequence[int]], operators: Sequence[Operator], maker: Mapping[int, int], where: str
) -> list[list[int]]:
    predecessors = _predecessors(groups, operators, maker)
    order = _topological_order(groups, predecessors)
    if len(order) < len(groups):
        names = [operators[min(groups[number])].name for number in _cycle(groups, predecessors)]
        raise UserError(Problem(where, "model.partition", "", _cycle_message(names)))
    return [list(groups[number]) for number in order]


# --- names ----------------------------------------------------------------------------------------


def _stage_name(group: Sequence[int], placed: Sequence[PlacedOperator]) -> str:
    """Path of the module that is exactly this group, else its names joined by `+` behind a common path."""
    common = _common_path([placed[index].path.split(".") for index in group])
    inside = [index for index, one in enumerate(placed) if _is_within(one.path, ".".join(common))]
    if common != [""] and common and inside == list(group):
        return ".".join(common)
    names = [name.split(".") for name in dict.fromkeys(placed[index].operator.name for index in group)]
    parents = _common_path([name[:-1] for name in names])
    parts = [".".join(name[len(parents) :]) for name in names]
    if len(parts) > NAME_PARTS:
        parts = [*parts[: NAME_PARTS - 2], "...", parts[-1]]
    return ".".join([*parents, "+".join(parts)])


def _common_path(paths: Sequence[Sequence[str]]) -> list[str]:
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def _unique(names: Sequence[str]) -> list[str]:
    """Names with `@2`, `@3` ... behind all but the first of those that are equal."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}@{seen[name]}")
    return unique


# --- stages and edges -----------------------------------------------------------------------------


def _refuse_shared_parameters(members: Sequence[Sequence[Operator]], names: Sequence[str], where: str) -> None:
    """A parameter has one reader: the gradients of several would meet on no core, or be summed by none."""
    readers: dict[str, list[str]] = {}
    for stage, operators in zip(names, members, strict=True):
        for operator in operators:
            for parameter in operator.parameters:
                readers.setdefault(parameter, []).append(f"{operator.name} (stage {stage})")
    problems = [
        Problem(
            where,
            "model.factory",
            "",
            f"the parameter {parameter!r} is shared by {' and '.join(found)}; give each operator its own",
        )
        for parameter, found in readers.items()
        if len(found) > 1
    ]
    if problems:
        raise UserError(problems)


def _assemble(
    members: Sequence[Sequence[Operator]],
    names: Sequence[str],
    shapes: Sequence[Shape],
    needs_gradient: Sequence[bool],
    parameter_shapes: Mapping[str, Shape],
) -> tuple[tuple[Stage, ...], tuple[Edge, ...]]:
    """Stages and edges of grouped and ordered operators; value 0 comes from the host into stage 0."""
    source = {operator.output: number for number, operators in enumerate(members) for operator in operators}
    source[0] = 0
    passed: dict[tuple[int, int], set[int]] = {}
    for number, operators in enumerate(members):
        for value in (value for operator in operators for value in operator.inputs):
            if source[value] != number:
                passed.setdefault((source[value], number), set()).add(value)

    edges = []
    for (start, end), values in sorted(passed.items()):
        elements = {value: math.prod(shapes[value]) for value in sorted(values)}
        edges.append(
            Edge(
                source=start,
                target=end,
                values=tuple(elements),
                elements=sum(elements.values()),
                gradient_elements=sum(count for value, count in elements.items() if needs_gradient[value]),
            )
        )

    stages = []
    for number, (name, operators) in enumerate(zip(names, members, strict=True)):
        received = {value for edge in edges if edge.target == number for value in edge.values}
        sent = {value for edge in edges if edge.source == number for value in edge.values}
        parameters = tuple(dict.fromkeys(name for operator in operators for name in operator.parameters))
        stages.append(
            Stage(
                index=number,
                name=name,
                operators=tuple(operators),
                parameters=parameters,
                parameter_elements=sum(math.prod(parameter_shapes[parameter]) for parameter in parameters),
                inputs=(0,) if number == 0 else tuple(sorted(received)),
                outputs=tuple(sorted(sent)),
                stash_elements=_stash_elements(operators, shapes),
                work=sum((operator.work for operator in operators), Work()),
            )
        )
    return tuple(stages), tuple(edges)


def _stash_elements(operators: Sequence[Operator], shapes: Sequence[Shape]) -> int:
    """Elements kept from forward to backward: each tensor once, however many names it has in this stage."""
    storage: dict[int, int] = {}
    for operator in operators:
        if operator.kind in ALIASES:
            storage[operator.output] = storage.get(operator.inputs[0], operator.inputs[0])
    kept = [value for operator in operators if operator.saves_inputs for value in operator.inputs]
    kept += [operator.output for operator in operators if operator.saves_output]
    distinct = {storage.get(value, value) for value in kept}
    tensors = sum(math.prod(shapes[value]) for value in distinct)
    return tensors + sum(operator.saved_elements for operator in operators)
