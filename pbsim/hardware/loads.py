"""What a stage's operations ask of a core, before any hardware: products, elementwise work, elements moved.

An operator asks in each of F, Bx and Bw for a *matrix* load, if it has MACs, and an *elementwise* load, if it has
vector operations. Elements moved are those of a core that keeps nothing from one operator to the next and fetches
nothing twice, each operand and each result once:

===  ==========================================================  =============================================
op   reads                                                       writes
===  ==========================================================  =============================================
F    inputs, parameters                                          output, what it saves for the backward
Bx   gradient of the output, first parameter (weight or scale),  gradients of the inputs that need one
     what was saved
Bw   gradient of the output, what was saved                      gradients of the parameters
U    w, v, g                                                     w, v (and w before, where LWPw needs it)
===  ==========================================================  =============================================

"What was saved" are the operator's inputs or output, where its backward needs them, and its saved elements (of an
operator with parameters, saved inputs serve Bw alone). A bias is added to, or summed from, results on their way: its
load moves the bias alone. Prediction, at the head of F, reads w and v, or w and the weights before (or all three), and
writes the predicted weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pbsim.hardware.gemm import Gemm, gemms
from pbsim.network.network import Network, Operator, Stage
from pbsim.optim import UpdateRule


@dataclass(frozen=True)
class Load:
    """What one operator asks of a core in one operation.

    Attributes
    ----------
    macs : multiply-accumulates by the model's shapes; 0 for an elementwise load.
    vector : elementwise steps; 0 for a matrix load.
    elements : operands and results, each once.
    gemms : a matrix load's products.
    """

    macs: int
    vector: int
    elements: int
    gemms: tuple[Gemm, ...] = ()


@dataclass(frozen=True)
class StageLoads:
    """The loads of a stage's four operations, in the order of its operators."""

    forward: tuple[Load, ...]
    input_gradient: tuple[Load, ...]
    weight_gradient: tuple[Load, ...]
    update: tuple[Load, ...]


def stage_loads(network: Network, stage: Stage, rule: UpdateRule) -> StageLoads:
    """What a stage's operations ask of its core under an update rule."""
    forward, input_gradient, weight_gradient, update = list[Load](), list[Load](), list[Load](), list[Load]()
    weights = stage.parameter_elements
    if weights and rule.predicts:
        moved = 2 + (rule.velocity > 0) + (rule.difference > 0)
        forward.append(Load(0, rule.prediction_operations * weights, moved * weights))
    for operator in stage.operators:
        work, products, moved_by = operator.work, gemms(network, operator), _moved(network, operator)
        bias = sum(math.prod(network.parameters[name]) for name in operator.parameters[1:])
        forward += _loads(work.macs_forward, products.forward, work.vector_forward, moved_by[0], bias)
        input_gradient += _loads(
            work.macs_input_gradient, products.input_gradient, work.vector_input_gradient, moved_by[1], 0
        )
        weight_gradient += _loads(
            work.macs_weight_gradient, products.weight_gradient, work.vector_weight_gradient, moved_by[2], bias
        )
    if weights:
        update.append(Load(0, rule.update_operations * weights, (5 + rule.keeps_previous) * weights))
    return StageLoads(tuple(forward), tuple(input_gradient), tuple(weight_gradient), tuple(update))


def _loads(macs: int, products: tuple[Gemm, ...], vector: int, elements: int, bias: int) -> list[Load]:
    """The matrix load and the elementwise load of one operation; beside MACs, elementwise work is a bias's."""
    matrix = [Load(macs, 0, elements - bias, products)] if macs else []
    elementwise = [Load(0, vector, bias if macs else elements)] if vector else []
    return matrix + elementwise


def _moved(network: Network, operator: Operator) -> tuple[int, int, int]:
    """Elements that F, Bx and Bw read and write, each once."""
    inputs = [math.prod(network.shapes[value]) for value in operator.inputs]
    output = math.prod(network.shapes[operator.output])
    parameters = [math.prod(network.parameters[name]) for name in operator.parameters]
    saved_inputs = sum(inputs) if operator.saves_inputs else 0
    saved = operator.saved_elements + (output if operator.saves_output else 0)
    gradients = sum(n for n, needed in zip(inputs, operator.needs_input_gradient, strict=True) if needed)
    forward = sum(inputs) + sum(parameters) + output + operator.saved_elements
    input_gradient = output + sum(parameters[:1]) + saved + (0 if parameters else saved_inputs) + gradients
    weight_gradient = output + saved + saved_inputs + sum(parameters)
    return forward, input_gradient, weight_gradient
