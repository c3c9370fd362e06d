"""From a torch module to a network: export the module, read its graph, add the loss, cut it into stages.

`torch.export` records the ATen calls of one training forward on a batch of two samples. Two, because a batch of
one would hide which dimension is the batch's; the dimension is then dropped, and all shapes are those of one
sample. Nothing is computed, and no memory is taken: the module may be of any size, and on torch's meta device.
What does not contribute to the output is dropped as well. Everything that cannot be simulated is collected, so
that a user sees all of it at once.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbsim.errors import Problem, UserError, user_error
from pbsim.network.factory import TORCH
from pbsim.network.network import Network, Operator
from pbsim.network.operators import (
    LOSSES,
    OPERATORS,
    READERS,
    BufferRef,
    Call,
    ParameterRef,
    Read,
    Shape,
    Site,
    UnsupportedError,
    ValueRef,
    refusal,
)
from pbsim.network.partition import PlacedOperator, cut_into_stages

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram
    from torch.fx import Node

BATCH = 2
"""Rows of the captured batch."""

MESSAGE_LENGTH = 240
"""Characters that are shown of what torch says."""


def capture_network(
    module: nn.Module, sample_shape: tuple[int, ...], *, partition: str | list[str], loss: str, where: str
) -> Network:
    """Capture a module and cut it into stages.

    Parameters
    ----------
    module : the model, captured in training mode; it is left as it is.
    sample_shape : shape of one sample, without batch dimension.
    partition : "layer", "module", "residual", or names of modules, each a stage (see
        `pbsim.network.partition`).
    loss : "cross_entropy" (for an output of shape (classes,)) or "mse".
    where : the workload file, for errors.

    Returns
    -------
    Network
        Its last operator is the loss, named "loss".

    Raises
    ------
    UserError
        With every operator that is not supported, or every fault of the partition.
    """
    if loss not in LOSSES:
        raise user_error(where, "loss.kind", loss, f"allowed are {', '.join(LOSSES)}")
    program = _export(module, tuple(sample_shape), where)
    output = _single_output(program, where)
    reading = _GraphReading(module, program)
    for node in _live_nodes(program, output):
        reading.read(node)
    reading.problems += _hidden_mutations(program, reading)
    if reading.problems:
        raise UserError(Problem(where, f"model.factory at {place}", "", reason) for place, reason in reading.problems)
    return reading.finish(output, partition, loss, where)


def _export(module: nn.Module, sample_shape: Shape, where: str) -> ExportedProgram:
    """Record one training forward; torch's log and warnings are silenced, its reason is given in one line.

    Tensors that the forward makes itself are on the meta device where the module is.
    """
    import torch

    first = next(module.parameters(), None)
    if first is None:
        raise user_error(where, "model.factory", "", "the model has no parameters, so there is nothing to train")
    if first.is_inference():
        raise user_error(
            where,
            "model.factory",
            "",
            "the model was made under torch.inference_mode(): torch cannot trace its gradients",
        )
    sample = torch.empty(BATCH, *sample_shape, dtype=first.dtype, device=first.device)  # its values are never read
    device = first.device if first.is_meta else nullcontext()
    try:
        with TORCH, torch.inference_mode(False), _quiet(), _training(module), device:
            return torch.export.export(module, (sample,), strict=False)
    except Exception as error:
        reason = _reason(error)
        raise user_error(
            where,
            "model.factory",
            "",
            f"the model cannot be captured on samples of shape {sample_shape}: {reason}",
        ) from error


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Put a module into training mode, and each of its modules back into its own mode at the end."""
    modes = [(member, member.training) for member in module.modules()]
    module.train()
    try:
        yield
    finally:
        for member, mode in modes:
            member.training = mode


@contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _reason(error: Exception) -> str:
    """What an export failure says, short enough for one line."""
    name = type(error).__name__
    if "DataDependent" in name or "data-dependent" in str(error):
        return "its control flow depends on data (an if, a loop or a shape that reads values of a tensor)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{name}: {lines[0][:MESSAGE_LENGTH]}" if lines else name


def _single_output(program: ExportedProgram, where: str) -> Node:
    """The node of the model's output, which must be one tensor with a batch dimension."""
    from torch.fx import Node
    from torch.utils import _pytree as pytree

    names = program.graph_signature.user_outputs
    structure = program.call_spec.out_spec
    marker = object()
    single = len(names) == 1 and structure is not None and pytree.tree_unflatten([marker], structure) is marker
    nodes = {node.name: node for node in program.graph.nodes}
    output = nodes.get(str(names[0])) if single else None
    if not isinstance(output, Node) or _node_shape(output) is None:
        raise user_error(where, "model.factory", "", "the output of the model must be a single tensor")
    shape = _node_shape(output)
    if not shape or shape[0] != BATCH:
        raise user_error(
            where,
            "model.factory",
            "",
            f"the output of the model has no batch dimension: a batch of {BATCH} makes the shape {shape}",
        )
    if output.op != "call_function":
        raise user_error(where, "model.factory", "", "the output of the model is its input or a parameter")
    return output


def _node_shape(node: Node) -> Shape | None:
    """Shape of the tensor a node makes, batch dimension included; None where it makes something else."""
    made = node.meta.get("val")
    shape = getattr(made, "shape", None)
    return None if shape is None else tuple(int(extent) for extent in shape)


def _live_nodes(program: ExportedProgram, output: Node) -> list[Node]:
    """The nodes that the output depends on, in execution order."""
    live = {output}
    for node in reversed(program.graph.nodes):
        if node in live:
            live.update(node.all_input_nodes)
    return [node for node in program.graph.nodes if node in live]


def _target(node: Node) -> str:
    """ATen name of a call, such as "aten.conv2d.default"."""
    return str(node.target) if hasattr(node.target, "_schema") else getattr(node.target, "__name__", str(node.target))


def _module_call(node: Node) -> tuple[str, str]:
    """Key of the innermost module call that a node belongs to (unique per call), and that module's path."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    key, (path, _) = list(stack.items())[-1]
    return str(key), str(path)


def _source_line(node: Node) -> str:
    """Where in the user's code, outside of torch, a node was made: "model.py:12", or empty."""
    import torch

    library = str(Path(torch.__file__).parent)
    found = ""
    for line in (node.meta.get("stack_trace") or "").splitlines():
        text = line.strip()
        if text.startswith('File "') and library not in text:
            file, _, rest = text[len('File "') :].partition('", line ')
            found = f"{Path(file).name}:{rest.split(',')[0]}"
    return found


def _place(node: Node) -> str:
    """Where an operator stands: module path, ATen name, source line."""
    _, path = _module_call(node)
    facts = ", ".join(fact for fact in (_target(node), _source_line(node)) if fact)
    return f"{path or 'the model itself'} ({facts})"


def _bound_arguments(node: Node, refer: Callable[[Node], Any]) -> dict[str, Any]:
    """Arguments of a call by the names of its ATen schema, with defaults; nodes become references."""
    from torch.fx import Node

    schema = node.target._schema.arguments  # type: ignore[union-attr]
    bound = {argument.name: argument.default_value if argument.has_default_value() else None for argument in schema}
    bound.update(zip((argument.name for argument in schema), node.args, strict=False))
    bound.update(node.kwargs)
    return {name: refer(value) if isinstance(value, Node) else value for name, value in bound.items()}


class _GraphReading:
    """The state of reading a graph: what each node stands for, the operators so far, and what is wrong."""

    def __init__(self, module: nn.Module, program: ExportedProgram) -> None:
        signature = program.graph_signature
        self.module = module
        self.modules = dict(module.named_modules())
        own_paths = {id(member): path for path, member in self.modules.items()}
        self.own_path = {path: own_paths[id(member)] for path, member in module.named_modules(remove_duplicate=False)}
        self.references: dict[Node, ValueRef | ParameterRef | BufferRef] = {}
        self.shapes: list[Shape] = []
        self.needs_gradient: list[bool] = []
        self.placed: list[PlacedOperator] = []
        self.problems: list[tuple[str, str]] = []
        self.parameter_shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}

        own_names = {id(parameter): name for name, parameter in module.named_parameters()}
        for node in program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in signature.user_inputs:
                shape = _node_shape(node)
                assert shape is not None
                self.references[node] = self._new_value(shape[1:], needs_gradient=False)
            elif node.name in signature.inputs_to_parameters:
                # A tied parameter has several names; `named_parameters()` gives the one that optimizers see.
                parameter = module.get_parameter(signature.inputs_to_parameters[node.name])
                self.references[node] = ParameterRef(own_names[id(parameter)], tuple(parameter.shape))
            else:
                constants = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
                self.references[node] = BufferRef(constants.get(node.name, node.name))

    def _new_value(self, shape: Shape, *, needs_gradient: bool) -> ValueRef:
        self.shapes.append(shape)
        self.needs_gradient.append(needs_gradient)
        return ValueRef(len(self.shapes) - 1, shape)

    def read(self, node: Node) -> None:
        """Add the operators of a node, or what is wrong with it."""
        if node.op != "call_function":
            return  # placeholders have their references already
        shape = _node_shape(node)
        try:
            self.references[node] = self._operators_of(node, shape)
        except UnsupportedError as error:
            # Read on as if it were a value, so that the problems behind it are seen too.
            self.references[node] = self._new_value((shape or ())[1:], needs_gradient=True)
            if _target(node) != "getitem":  # the call that made the tuple is itself reported
                self.problems.append((_place(node), str(error)))

    def _operators_of(self, node: Node, shape: Shape | None) -> ValueRef:
        reader = READERS.get(_target(node))
        if reader is None or shape is None:
            raise UnsupportedError(refusal(_target(node)))
        if not shape or shape[0] != BATCH:
            raise UnsupportedError(f"its output has no batch dimension: a batch of {BATCH} makes the shape {shape}")
        call = Call(_bound_arguments(node, lambda operand: self.references.get(operand)), shape, BATCH)
        made: tuple[ValueRef, ...] = ()
        for read in reader(call):
            made = (self._add(node, read, read.inputs or made),)
        if made[0].shape != shape[1:]:
            raise UnsupportedError(f"its output has the shape {shape[1:]} where {made[0].shape} was expected")
        return made[0]

    def _add(self, node: Node, read: Read, inputs: tuple[ValueRef, ...]) -> ValueRef:
        """Append one operator and the value it makes."""
        key, path = _module_call(node)
        path = self.own_path.get(path, path)  # a module under two names goes by the one of `named_modules()`
        in_leaf = path in self.modules and not any(self.modules[path].children())
        name = path if in_leaf and path else f"{path}.{node.name}".lstrip(".")
        for parameter in read.parameters:
            if not self.module.get_parameter(parameter.name).requires_grad:
                raise UnsupportedError(f"its parameter {parameter.name!r} is frozen; every parameter is trained here")
        operator, shape = self._operator(read.kind, name, inputs, read.parameters, read.attributes)
        self.placed.append(PlacedOperator(operator, path, key if in_leaf else None))
        return self._new_value(shape, needs_gradient=any(operator.needs_input_gradient) or bool(operator.parameters))

    def _operator(
        self,
        kind_name: str,
        name: str,
        inputs: tuple[ValueRef, ...],
        parameters: tuple[ParameterRef, ...],
        attributes: Mapping[str, Any],
    ) -> tuple[Operator, Shape]:
        kind = OPERATORS[kind_name]
        input_shapes = tuple(value.shape for value in inputs)
        parameter_shapes = tuple(parameter.shape for parameter in parameters)
        shape = kind.shape(input_shapes, parameter_shapes, attributes)
        needs = tuple(self.needs_gradient[value.index] for value in inputs)
        site = Site(input_shapes, shape, parameter_shapes, attributes, needs)
        has_backward = any(needs) or bool(parameters)
        operator = Operator(
            kind=kind_name,
            name=name,
            inputs=tuple(value.index for value in inputs),
            output=len(self.shapes),
            parameters=tuple(parameter.name for parameter in parameters),
            attributes=dict(attributes),
            needs_input_gradient=needs,
            work=kind.work(site),
            saved_elements=kind.saved(site) if has_backward else 0,
            saves_inputs=kind.saves_inputs and has_backward,
            saves_output=kind.saves_output and has_backward,
        )
        return operator, shape

    def finish(self, output: Node, partition: str | list[str], loss: str, where: str) -> Network:
        """Append the loss and cut the whole into stages."""
        prediction = self.references[output]
        assert isinstance(prediction, ValueRef)
        if not self.needs_gradient[prediction.index]:
            raise user_error(where, "model.factory", "", "no parameter contributes to the output of the model")
        if loss == "cross_entropy" and len(prediction.shape) != 1:
            raise user_error(
                where,
                "loss.kind",
                loss,
                f"the output of the model must be one score per class, not of shape {prediction.shape}",
            )
        loss_operator, loss_shape = self._operator(loss, "loss", (prediction,), (), {})
        self._new_value(loss_shape, needs_gradient=True)
        stages, edges = cut_into_stages(
            self.placed,
            loss_operator,
            shapes=self.shapes,
            needs_gradient=self.needs_gradient,
            parameter_shapes=self.parameter_shapes,
            partition=partition,
            module_names=list(self.modules),
            where=where,
        )
        used = [name for stage in stages for name in stage.parameters]
        return Network(
            shapes=tuple(self.shapes),
            input_value=0,
            output_value=prediction.index,
            stages=stages,
            edges=edges,
            parameters={name: self.parameter_shapes[name] for name in used},
        )


def _hidden_mutations(program: ExportedProgram, reading: _GraphReading) -> list[tuple[str, str]]:
    """Find in-place operators that change a tensor which is read afterwards under another name.

    The graph names the changed tensor by its new node where Python used the same variable, so such reads are
    right as they stand. A view made earlier keeps its old node: values that are pure, as here, would miss the
    change.
    """
    nodes = list(program.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    storage: dict[Node, Node] = {}
    for node in nodes:
        shares = node.op == "call_function" and _may_share_storage(_target(node)) and node.all_input_nodes
        storage[node] = storage[node.all_input_nodes[0]] if shares else node

    problems = []
    for node in nodes:
        if node.op != "call_function" or not _is_in_place(_target(node)) or not node.all_input_nodes:
            continue
        earlier = (other for other in nodes[: order[node]] if storage[other] is storage[node])
        if any(order[user] > order[node] for other in earlier for user in other.users):
            reason = "it changes in place a tensor that is read afterwards under another name"
            problems.append((_place(node), reason))
    return problems


def _is_in_place(target: str) -> bool:
    parts = target.split(".")
    return len(parts) == 3 and parts[1].endswith("_") and not parts[1].startswith("_")


def _may_share_storage(target: str) -> bool:
    """Whether the output of a call is its first input, or may be a view of it."""
    kind = next((name for name, entry in OPERATORS.items() if target in entry.readers), "")
    return _is_in_place(target) or kind in ("flatten", "identity")
