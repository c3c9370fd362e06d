"""A network as the hardware sees it: operators on values, cut into stages that pass values along edges.

A *value* is one tensor per sample (its shape has no batch dimension). An *operator* reads values and makes one.
A *stage* is a run of operators that one core executes; where a stage reads a value that another one made, there
is an *edge* between them, and on the machine a message: the value forwards, its gradient backwards. The model's
input is value 0; it belongs to stage 0, which also passes it on if a later stage reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """What one operator costs for one sample, apart from any hardware.

    MACs are multiply-accumulates of the matrix-like operators; vector operations are elementwise steps (one per
    element and pass), for normalization, activations, pooling, bias and loss.
    """

    macs_forward: int = 0
    macs_input_gradient: int = 0
    macs_weight_gradient: int = 0
    vector_forward: int = 0
    vector_input_gradient: int = 0
    vector_weight_gradient: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Operator:
    """One operator of the captured network.

    Attributes
    ----------
    kind : a key of `pbsim.network.operators.OPERATORS`.
    name : where it stands in the model (module path as in `named_modules()`, or the graph node's name).
    inputs : the values it reads; the loss reads the model's output only (labels come from the host).
    output : the value it makes.
    parameters : torch names of its parameters, weight before bias; only those that exist.
    attributes : what else defines it (kernel, stride, padding, dilation, groups, eps ...).
    needs_input_gradient : per input, whether any parameter stands upstream of it.
    saved_elements : elements it keeps for its backward beyond its inputs and output.
    saves_inputs, saves_output : whether its backward needs its inputs, or its output.
    """

    kind: str
    name: str
    inputs: tuple[int, ...]
    output: int
    parameters: tuple[str, ...]
    attributes: Mapping[str, Any]
    needs_input_gradient: tuple[bool, ...]
    work: Work
    saved_elements: int
    saves_inputs: bool
    saves_output: bool


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes
    ----------
    index : position in topological order, from 0.
    name : module path of what it contains, joined by `+` where several modules are in it.
    operators : in execution order.
    parameters : torch names of its parameters, in the order the operators name them, each once.
    parameter_elements : how many weights these are.
    inputs : values that other stages (or the host) made and this one reads, in order.
    outputs : values that this stage made (or got from the host) and later stages read.
    stash_elements : elements one sample keeps here from its forward to its backward, each distinct tensor once.
    work : the sum over its operators.
    """

    index: int
    name: str
    operators: tuple[Operator, ...]
    parameters: tuple[str, ...]
    parameter_elements: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stash_elements: int
    work: Work


@dataclass(frozen=True)
class Edge:
    """What a stage passes to a later one: a message forward per sample, and one back with the gradients.

    `gradient_elements` leaves out values that need no gradient (the model's input, passed on by stage 0).
    """

    source: int
    target: int
    values: tuple[int, ...]
    elements: int
    gradient_elements: int


@dataclass(frozen=True)
class Network:
    """A captured and partitioned network.

    Attributes
    ----------
    shapes : per value, its shape for one sample.
    input_value, output_value : the model's input (always 0) and its output, which the loss reads.
    stages, edges : see there; edges in order of (source, target).
    parameters : shape of every trained parameter by its torch name.
    """

    shapes: tuple[tuple[int, ...], ...]
    input_value: int
    output_value: int
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    parameters: Mapping[str, tuple[int, ...]]
