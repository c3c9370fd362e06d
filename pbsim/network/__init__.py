"""What is trained: a torch module, captured as operators on values and cut into the stages of a pipeline.

`build_model` calls the factory that a workload names (`build_shapes` without memory for its weights),
`capture_network` turns its module into a `Network`, and `operator_function` gives the torch call that an
operator is. torch is imported by the first call, not by this package.
"""

from __future__ import annotations

from pbsim.network.capture import capture_network
from pbsim.network.factory import build_model, build_shapes
from pbsim.network.network import Edge, Network, Operator, Stage, Work
from pbsim.network.operators import OPERATORS, operator_function

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
    "operator_function",
]
