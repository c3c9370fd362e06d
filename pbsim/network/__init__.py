"""What is trained: a torch module, captured as operators on values and cut into the stages of a pipeline.

`build_model` calls the factory that a workload names (`build_shapes` without memory for its weights; `find_factory`
only looks it up),
`capture_network` turns its module into a `Network`, `operator_function` gives the torch call that an operator is,
and `state_arrays` and its kin read and change what a module holds. torch is imported by the first call, not by this
package.
"""

from __future__ import annotations

from pbsim.network.capture import capture_network
from pbsim.network.factory import build_model, build_shapes, find_factory
from pbsim.network.network import Edge, Network, Operator, Stage, Work
from pbsim.network.operators import OPERATORS, operator_function
from pbsim.network.state import check_trainable, load_parameters, state_arrays, trained_arrays

__all__ = [
    "OPERATORS",
    "Edge",
    "Network",
    "Operator",
    "Stage",
    "Work",
    "build_model",
    "build_shapes",
    "capture_network",
    "check_trainable",
    "find_factory",
    "load_parameters",
    "operator_function",
    "state_arrays",
    "trained_arrays",
]
