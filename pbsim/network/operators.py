"""The operators that a captured network may hold: one entry of `OPERATORS` per kind, and all about it there.

An entry knows how its ATen calls are read (`readers`), which shape it must make (`shape`), what one sample of
it costs (`work`), what its backward needs from its forward (`saves_inputs`, `saves_output`, `saved`), and
which torch function it is (`function`). A new operator is a new entry here; capture and partition do not name
kinds otherwise than by the roles in `STARTS_A_STAGE` and `ALIASES`.

Work of one sample
------------------
Matrix-like operators count multiply-accumulates (MACs), forward F, input gradient Bx and weight gradient Bw
alike:

===========  =================================================================
conv2d       O * OH * OW * (C / groups) * KH * KW
linear       I * O
===========  =================================================================

All others count elementwise steps; n is the number of output elements, k = KH * KW, K the elements a loss
reads:

==============  =========================================  =============  =======================
kind            F                                          Bx             Bw
==============  =========================================  =============  =======================
bias            n                                          0              n
group_norm      3n, and n more if affine (mean, variance,  5n             n per affine parameter,
                normalize, affine)                                        so 2n
relu            n                                          n              0
max_pool2d      k n                                        n              0
avg_pool2d      k n                                        k n            0
add             n                                          0              0
flatten         0                                          0              0
identity        0                                          0              0
cross_entropy   3K (exponentials, sum, logarithm)          2K             0
mse             2K                                         K              0
==============  =========================================  =============  =======================

Bx is 0 everywhere where no parameter stands upstream of the input: nobody would read that gradient.

Attributes by kind (pairs are (height, width))
----------------------------------------------
* conv2d: `kernel`, `stride`, `padding`, `padding_end`, `dilation` (pairs), `groups`. `padding` stands above
  and left of the map, `padding_end` below and right; they differ only where `padding="same"` meets an even
  extent.
* group_norm: `groups`, `eps`.
* max_pool2d: `kernel`, `stride`, `padding`, `dilation` (pairs), `ceil_mode`.
* avg_pool2d: `kernel`, `stride`, `padding` (pairs), `ceil_mode`, `count_include_pad`.
* linear, relu, flatten, identity, add, cross_entropy, mse: none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pbsim.network.network import Operator, Work

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Pair = tuple[int, int]
Attributes = Mapping[str, Any]
TorchFunction = Callable[["list[Tensor]", "list[Tensor]"], "Tensor"]


class UnsupportedError(Exception):
    """Why a call cannot be captured; capture adds where it stands."""


@dataclass(frozen=True)
class ValueRef:
    """An argument that is a value: a tensor with one row per sample. `shape` is that of one sample."""

    index: int
    shape: Shape


@dataclass(frozen=True)
class ParameterRef:
    """An argument that is a trained parameter, by its torch name."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class BufferRef:
    """An argument that is a buffer or a constant of the model."""

    name: str


@dataclass(frozen=True)
class Call:
    """An ATen call as a reader sees it.

    Attributes
    ----------
    arguments : by the names of the ATen schema, defaults filled in; tensors as references.
    output : shape of what it makes, batch dimension included.
    batch : rows of the captured batch.
    """

    arguments: Mapping[str, Any]
    output: Shape
    batch: int

    def values(self, *names: str) -> tuple[ValueRef, ...]:
        """The arguments that must be values."""
        found = []
        for name in names:
            argument = self.arguments[name]
            if isinstance(argument, BufferRef):
                raise UnsupportedError(
                    f"it reads the buffer or constant {argument.name!r}; only parameters are held on cores"
                )
            if isinstance(argument, ParameterRef):
                raise UnsupportedError(
                    f"it reads the parameter {argument.name!r} in place of a value; only Conv2d, Linear and "
                    "GroupNorm have parameters"
                )
            if not isinstance(argument, ValueRef):
                raise UnsupportedError(f"its operand {argument!r} is not a tensor of the network")
            found.append(argument)
        return tuple(found)

    def parameters(self, *names: str) -> tuple[ParameterRef, ...]:
        """The arguments that must be parameters, without those that are None."""
        present = [(name, self.arguments[name]) for name in names if self.arguments[name] is not None]
        for name, argument in present:
            if not isinstance(argument, ParameterRef):
                raise UnsupportedError(f"its {name} is computed or constant; it must be a parameter of the model")
        return tuple(argument for _, argument in present)


@dataclass(frozen=True)
class Read:
    """One operator that a reader found in a call; of several, each reads what the one before made."""

    kind: str
    inputs: tuple[ValueRef, ...] = ()
    parameters: tuple[ParameterRef, ...] = ()
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """An operator in its place, as `work` and `saved` see it: shapes of one sample."""

    inputs: tuple[Shape, ...]
    output: Shape
    parameters: tuple[Shape, ...]
    attributes: Attributes
    needs_input_gradient: tuple[bool, ...]

    @property
    def elements(self) -> int:
        """Elements of the output."""
        return math.prod(self.output)

    @property
    def needs(self) -> int:
        """1 if some input needs a gradient, else 0."""
        return int(any(self.needs_input_gradient))


Reader = Callable[[Call], "tuple[Read, ...]"]


@dataclass(frozen=True)
class OperatorKind:
    """Everything about one kind of operator.

    Attributes
    ----------
    readers : by ATen name, what reads a call of it; raises `UnsupportedError`.
    shape : from input shapes, parameter shapes and attributes, the shape of the output.
    work : what one sample costs.
    function : from the attributes, the torch call on a batch of any size; None for a loss.
    saves_inputs, saves_output : whether the backward, where there is one, needs inputs or output.
    saved : elements the backward needs beyond these.
    """

    readers: Mapping[str, Reader]
    shape: Callable[[tuple[Shape, ...], tuple[Shape, ...], Attributes], Shape]
    work: Callable[[Site], Work]
    function: Callable[[Attributes], TorchFunction] | None
    saves_inputs: bool = False
    saves_output: bool = False
    saved: Callable[[Site], int] = lambda site: 0


def _pair(value: int | Sequence[int]) -> Pair:
    """Read an ATen size argument, which may be one number for both directions."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return (numbers[0], numbers[-1])


def _same_shape(inputs: tuple[Shape, ...], parameters: tuple[Shape, ...], attributes: Attributes) -> Shape:
    return inputs[0]


def _scalar(inputs: tuple[Shape, ...], parameters: tuple[Shape, ...], attributes: Attributes) -> Shape:
    return ()


def _no_work(site: Site) -> Work:
    return Work()


def _matrix_work(macs: int, site: Site) -> Work:
    """Work of a matrix-like operator: the same MACs three times, and the bias, if any, elementwise."""
    bias = site.elements if len(site.parameters) == 2 else 0
    return Work(
        macs_forward=macs,
        macs_input_gradient=macs * site.needs,
        macs_weight_gradient=macs,
        vector_forward=bias,
        vector_weight_gradient=bias,
    )


# --- linear ---------------------------------------------------------------------------------------


def _read_linear(call: Call) -> tuple[Read, ...]:
    (value,) = call.values("input")
    if len(value.shape) != 1:
        raise UnsupportedError(f"Linear over a sample of shape {value.shape}; flatten it to one dimension first")
    return (Read("linear", (value,), call.parameters("weight", "bias")),)


def _linear_work(site: Site) -> Work:
    return _matrix_work(math.prod(site.parameters[0]), site)


def _linear_function(attributes: Attributes) -> TorchFunction:
    from torch.nn import functional as F

    return lambda inputs, parameters: F.linear(inputs[0], *parameters)


# --- conv2d ---------------------------------------------------------------------------------------


def _read_conv2d(call: Call) -> tuple[Read, ...]:
    (value,) = call.values("input")
    if len(value.shape) != 3:
        raise UnsupportedError("a convolution needs samples of shape (channels, height, width)")
    parameters = call.parameters("weight", "bias")
    kernel = _pair(parameters[0].shape[2:])
    dilation = _pair(call.arguments["dilation"])
    begin, end = _conv_padding(call.arguments["padding"], kernel, dilation)
    attributes = {
        "kernel": kernel,
        "stride": _pair(call.arguments["stride"]),
        "padding": begin,
        "padding_end": end,
        "dilation": dilation,
        "groups": int(call.arguments["groups"]),
    }
    return (Read("conv2d", (value,), parameters, attributes),)


def _conv_padding(padding: str | int | Sequence[int], kernel: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """Padding before and after the map; "same" puts the odd row or column after it, as torch does."""
    if padding == "valid":
        return (0, 0), (0, 0)
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return (total[0] // 2, total[1] // 2), (total[0] - total[0] // 2, total[1] - total[1] // 2)
    return _pair(padding), _pair(padding)


def _conv_shape(inputs: tuple[Shape, ...], parameters: tuple[Shape, ...], attributes: Attributes) -> Shape:
    extents = []
    for axis in (0, 1):
        padded = inputs[0][1 + axis] + attributes["padding"][axis] + attributes["padding_end"][axis]
        reach = attributes["dilation"][axis] * (attributes["kernel"][axis] - 1)
        extents.append((padded - reach - 1) // attributes["stride"][axis] + 1)
    return (parameters[0][0], *extents)


def _conv_work(site: Site) -> Work:
    return _matrix_work(site.elements * math.prod(site.parameters[0][1:]), site)


def _conv_function(attributes: Attributes) -> TorchFunction:
    from torch.nn import functional as F

    (top, left), (bottom, right) = attributes["padding"], attributes["padding_end"]
    symmetric = (top, left) == (bottom, right)

    def run(inputs: list[Tensor], parameters: list[Tensor]) -> Tensor:
        padded = inputs[0] if symmetric else F.pad(inputs[0], (left, right, top, bottom))
        bias = parameters[1] if len(parameters) == 2 else None
        return F.conv2d(
            padded,
            parameters[0],
            bias,
            stride=attributes["stride"],
            padding=(top, left) if symmetric else 0,
            dilation=attributes["dilation"],
            groups=attributes["groups"],
        )

    return run


# --- group_norm -----------------------------------------------------------------------------------


def _read_group_norm(call: Call) -> tuple[Read, ...]:
    (value,) = call.values("input")
    groups = int(call.arguments["num_groups"])
    parameters = call.parameters("weight", "bias")
    if len(parameters) == 1:
        raise UnsupportedError("GroupNorm with only one of weight and bias; use both or neither (affine=False)")
    if math.prod(value.shape) == groups:
        raise UnsupportedError(
            f"GroupNorm has one value per group ({groups} groups over a sample of shape {value.shape}), "
            "so its output is constant; use fewer groups"
        )
    attributes = {"groups": groups, "eps": float(call.arguments["eps"])}
    return (Read("group_norm", (value,), parameters, attributes),)


def _group_norm_work(site: Site) -> Work:
    affine = len(site.parameters)
    return Work(
        vector_forward=(4 if affine else 3) * site.elements,
        vector_input_gradient=5 * site.elements * site.needs,
        vector_weight_gradient=affine * site.elements,
    )


def _group_norm_function(attributes: Attributes) -> TorchFunction:
    import torch

    def run(inputs: list[Tensor], parameters: list[Tensor]) -> Tensor:
        weight, bias = parameters if parameters else (None, None)
        return torch.group_norm(inputs[0], attributes["groups"], weight, bias, attributes["eps"])

    return run


# --- relu -----------------------------------------------------------------------------------------


def _read_relu(call: Call) -> tuple[Read, ...]:
    return (Read("relu", call.values("self")),)


def _relu_work(site: Site) -> Work:
    return Work(vector_forward=site.elements, vector_input_gradient=site.elements * site.needs)


def _relu_function(attributes: Attributes) -> TorchFunction:
    from torch.nn import functional as F

    return lambda inputs, parameters: F.relu(inputs[0])


# --- pooling --------------------------------------------------------------------------------------


def _window(call: Call) -> dict[str, Any]:
    """What max and average pooling share; a stride that is not given is the kernel."""
    return {
        "kernel": _pair(call.arguments["kernel_size"]),
        "stride": _pair(call.arguments["stride"] or call.arguments["kernel_size"]),
        "padding": _pair(call.arguments["padding"]),
        "ceil_mode": bool(call.arguments["ceil_mode"]),
    }


def _map(call: Call) -> tuple[ValueRef, ...]:
    values = call.values("self")
    if len(values[0].shape) != 3:
        raise UnsupportedError("pooling needs samples of shape (channels, height, width)")
    return values


def _read_max_pool2d(call: Call) -> tuple[Read, ...]:
    attributes = {**_window(call), "dilation": _pair(call.arguments["dilation"])}
    return (Read("max_pool2d", _map(call), attributes=attributes),)


def _read_avg_pool2d(call: Call) -> tuple[Read, ...]:
    if call.arguments["divisor_override"] is not None:
        raise UnsupportedError("average pooling with divisor_override; leave it out")
    attributes = {**_window(call), "count_include_pad": bool(call.arguments["count_include_pad"])}
    return (Read("avg_pool2d", _map(call), attributes=attributes),)


def _mean_over(kernel: Pair) -> Attributes:
    """Attributes of an average pool whose windows tile the map."""
    return {
        "kernel": kernel,
        "stride": kernel,
        "padding": (0, 0),
        "ceil_mode": False,
        "count_include_pad": True,
    }


def _read_adaptive_avg_pool2d(call: Call) -> tuple[Read, ...]:
    values = _map(call)
    height, width = values[0].shape[1:]
    rows, cols = _pair(call.arguments["output_size"])
    if height % rows or width % cols:
        raise UnsupportedError(
            f"adaptive average pooling from {height} x {width} to {rows} x {cols}, which must divide it"
        )
    return (Read("avg_pool2d", values, attributes=_mean_over((height // rows, width // cols))),)


def _read_mean(call: Call) -> tuple[Read, ...]:
    values = call.values("self")
    rank = len(values[0].shape) + 1
    dims = {dim % rank for dim in call.arguments["dim"] or ()}
    if rank != 4 or dims != {2, 3} or call.arguments["dtype"] is not None:
        raise UnsupportedError("a mean other than over height and width, dimensions (2, 3)")
    pool = Read("avg_pool2d", values, attributes=_mean_over(_pair(values[0].shape[1:])))
    return (pool,) if call.arguments["keepdim"] else (pool, Read("flatten"))


def _pool_shape(inputs: tuple[Shape, ...], parameters: tuple[Shape, ...], attributes: Attributes) -> Shape:
    dilation = attributes.get("dilation", (1, 1))
    extents = []
    for axis in (0, 1):
        extent, stride, padding = inputs[0][1 + axis], attributes["stride"][axis], attributes["padding"][axis]
        span = extent + 2 * padding - dilation[axis] * (attributes["kernel"][axis] - 1) - 1
        count = -(-span // stride) + 1 if attributes["ceil_mode"] else span // stride + 1
        if attributes["ceil_mode"] and (count - 1) * stride >= extent + padding:
            count -= 1  # torch: the last window must begin inside the map or its left padding
        extents.append(count)
    return (inputs[0][0], *extents)


def _max_pool_work(site: Site) -> Work:
    window = math.prod(site.attributes["kernel"])
    return Work(vector_forward=window * site.elements, vector_input_gradient=site.elements * site.needs)


def _avg_pool_work(site: Site) -> Work:
    steps = math.prod(site.attributes["kernel"]) * site.elements
    return Work(vector_forward=steps, vector_input_gradient=steps * site.needs)


def _max_pool_function(attributes: Attributes) -> TorchFunction:
    from torch.nn import functional as F

    def run(inputs: list[Tensor], parameters: list[Tensor]) -> Tensor:
        return F.max_pool2d(
            inputs[0],
            attributes["kernel"],
            attributes["stride"],
            attributes["padding"],
            attributes["dilation"],
            attributes["ceil_mode"],
        )

    return run


def _avg_pool_function(attributes: Attributes) -> TorchFunction:
    from torch.nn import functional as F

    def run(inputs: list[Tensor], parameters: list[Tensor]) -> Tensor:
        return F.avg_pool2d(
            inputs[0],
            attributes["kernel"],
            attributes["stride"],
            attributes["padding"],
            attributes["ceil_mode"],
            attributes["count_include_pad"],
        )

    return run


# --- flatten, identity, add -----------------------------------------------------------------------


def _read_reshape(call: Call) -> tuple[Read, ...]:
    """A view that keeps the batch dimension and flattens all others, or one that changes nothing."""
    values = call.values("self")
    if call.output == (call.batch, math.prod(values[0].shape)):
        return (Read("flatten", values),)
    if call.output == (call.batch, *values[0].shape):
        return (Read("identity", values),)
    raise UnsupportedError(
        f"a reshape of samples of shape {values[0].shape} to a batch of shape {call.output}; the only one "
        "supported keeps the batch dimension and flattens everything else"
    )


def _flat_shape(inputs: tuple[Shape, ...], parameters: tuple[Shape, ...], attributes: Attributes) -> Shape:
    return (math.prod(inputs[0]),)


def _flatten_function(attributes: Attributes) -> TorchFunction:
    return lambda inputs, parameters: inputs[0].flatten(1)


def _read_dropout(call: Call) -> tuple[Read, ...]:
    if call.arguments["train"] and call.arguments["p"] > 0:
        raise UnsupportedError(f"Dropout with p = {call.arguments['p']}: only p = 0 is supported")
    return (Read("identity", call.values("input")),)


def _read_copy(call: Call) -> tuple[Read, ...]:
    return (Read("identity", call.values("self")),)


def _identity_function(attributes: Attributes) -> TorchFunction:
    return lambda inputs, parameters: inputs[0]


def _read_add(call: Call) -> tuple[Read, ...]:
    values = call.values("self", "other")
    if values[0].shape != values[1].shape:
        raise UnsupportedError(f"an addition of different shapes, {values[0].shape} and {values[1].shape}")
    if call.arguments["alpha"] != 1:
        raise UnsupportedError(f"an addition with alpha = {call.arguments['alpha']}; only alpha = 1 is supported")
    return (Read("add", values),)


def _add_work(site: Site) -> Work:
    return Work(vector_forward=site.elements)


def _add_function(attributes: Attributes) -> TorchFunction:
    return lambda inputs, parameters: inputs[0] + inputs[1]


# --- losses: appended by capture, never read from a graph -----------------------------------------


def _cross_entropy_work(site: Site) -> Work:
    classes = math.prod(site.inputs[0])
    return Work(vector_forward=3 * classes, vector_input_gradient=2 * classes * site.needs)


def _mse_work(site: Site) -> Work:
    elements = math.prod(site.inputs[0])
    return Work(vector_forward=2 * elements, vector_input_gradient=elements * site.needs)


OPERATORS: Mapping[str, OperatorKind] = MappingProxyType(
    {
        "linear": OperatorKind(
            readers={"aten.linear.default": _read_linear},
            shape=lambda inputs, parameters, attributes: (parameters[0][0],),
            work=_linear_work,
            function=_linear_function,
            saves_inputs=True,
        ),
        "conv2d": OperatorKind(
            readers={"aten.conv2d.default": _read_conv2d, "aten.conv2d.padding": _read_conv2d},
            shape=_conv_shape,
            work=_conv_work,
            function=_conv_function,
            saves_inputs=True,
        ),
        "group_norm": OperatorKind(
            readers={"aten.group_norm.default": _read_group_norm},
            shape=_same_shape,
            work=_group_norm_work,
            function=_group_norm_function,
            saved=lambda site: site.elements + int(site.attributes["groups"]),  # normalized values, 1 / deviation
        ),
        "relu": OperatorKind(
            readers={"aten.relu.default": _read_relu, "aten.relu_.default": _read_relu},
            shape=_same_shape,
            work=_relu_work,
            function=_relu_function,
            saves_output=True,
        ),
        "max_pool2d": OperatorKind(
            readers={"aten.max_pool2d.default": _read_max_pool2d},
            shape=_pool_shape,
            work=_max_pool_work,
            function=_max_pool_function,
            saved=lambda site: site.elements,  # where each maximum stood
        ),
        "avg_pool2d": OperatorKind(
            readers={
                "aten.avg_pool2d.default": _read_avg_pool2d,
                "aten.adaptive_avg_pool2d.default": _read_adaptive_avg_pool2d,
                "aten.mean.dim": _read_mean,
            },
            shape=_pool_shape,
            work=_avg_pool_work,
            function=_avg_pool_function,
        ),
        "flatten": OperatorKind(
            readers={
                "aten.flatten.using_ints": _read_reshape,
                "aten.view.default": _read_reshape,
                "aten.reshape.default": _read_reshape,
                "aten.squeeze.default": _read_reshape,
                "aten.squeeze.dim": _read_reshape,
                "aten.squeeze.dims": _read_reshape,
            },
            shape=_flat_shape,
            work=_no_work,
            function=_flatten_function,
        ),
        "identity": OperatorKind(
            readers={
                "aten.dropout.default": _read_dropout,
                "aten.dropout_.default": _read_dropout,
                "aten.feature_dropout.default": _read_dropout,
                "aten.feature_dropout_.default": _read_dropout,
                "aten.clone.default": _read_copy,
                "aten.contiguous.default": _read_copy,
            },
            shape=_same_shape,
            work=_no_work,
            function=_identity_function,
        ),
        "add": OperatorKind(
            readers={"aten.add.Tensor": _read_add, "aten.add_.Tensor": _read_add},
            shape=_same_shape,
            work=_add_work,
            function=_add_function,
        ),
        "cross_entropy": OperatorKind(
            readers={},
            shape=_scalar,
            work=_cross_entropy_work,
            function=None,
            saved=lambda site: math.prod(site.inputs[0]),  # the probabilities
        ),
        "mse": OperatorKind(
            readers={},
            shape=_scalar,
            work=_mse_work,
            function=None,
            saves_inputs=True,
        ),
    }
)

READERS: Mapping[str, Reader] = MappingProxyType(
    {target: reader for kind in OPERATORS.values() for target, reader in kind.readers.items()}
)

LOSSES = tuple(name for name, kind in OPERATORS.items() if kind.function is None)

STARTS_A_STAGE = frozenset({"conv2d", "linear"})
"""Kinds that a stage is built around."""

ALIASES = frozenset({"flatten", "identity"})
"""Kinds whose output is their input's storage, under another shape or name."""

REFUSALS: Mapping[str, str] = MappingProxyType(
    {
        "aten.batch_norm": "BatchNorm has no meaning at batch one; use GroupNorm",
        "aten.instance_norm": "InstanceNorm is not supported; use GroupNorm with one group per channel",
        "aten.alpha_dropout": "AlphaDropout is not supported; leave it out",
        "aten.detach": "detach cuts the gradient, which the pipeline always sends back",
    }
)
"""What to say of unsupported operators that are likely, by the beginning of their ATen name."""


def refusal(target: str) -> str:
    """Why an operator without a reader is not supported, and what to use instead."""
    for beginning, reason in REFUSALS.items():
        if target.startswith(beginning):
            return reason
    return "this operator is not supported; supported are " + ", ".join(
        name for name in OPERATORS if name not in LOSSES
    )


def operator_function(op: Operator) -> TorchFunction:
    """Give the torch call that an operator is.

    Parameters
    ----------
    op : any operator but a loss, whose labels no operator knows.

    Returns
    -------
    Callable
        From its inputs, each (n, *shape of the value) for any n, and its parameters in the order of
        `op.parameters`, to its output; differentiable by autograd.

    Raises
    ------
    ValueError
        For a loss.
    """
    function = OPERATORS[op.kind].function
    if function is None:
        raise ValueError(f"{op.kind} is a loss: it has no function of its inputs alone")
    return function(op.attributes)
