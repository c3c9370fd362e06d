"""What a backend is: something that runs an order on real weights, and evaluates them.

Two exist, the numba executor and PyTorch's autograd per stage. They share these types and nothing of their arithmetic.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pbsim.numerics.order import Order


class SampleSource(Protocol):
    """Training data in the order of the run: global samples `first` to `end`, exclusive."""

    def inputs(self, first: int, end: int) -> NDArray[Any]:
        """Inputs (end - first, ...), augmented where the workload says so."""

    def targets(self, first: int, end: int) -> NDArray[Any]:
        """Labels (end - first,) int64, or regression targets (end - first, K)."""


class Backend(Protocol):
    """Holds weights and optimizer state, and runs operations on them in a given order."""

    def run(self, order: Order, samples: SampleSource) -> NDArray[np.float64]:
        """Run operations; returns, per operation, the training loss of forwards that end in the loss (else 0)."""

    def evaluate(self, inputs: NDArray[Any], targets: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        """The mean loss over samples and the model's outputs (n, ...), on the weights as they are."""

    def parameters(self) -> dict[str, NDArray[Any]]:
        """The weights as they are, by torch name (copies)."""


def split_targets(targets: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Labels (n,) int64 and regression targets (n, K): what was not given is a zero per sample."""
    if targets.ndim == 1:
        return np.ascontiguousarray(targets, np.int64), np.zeros((len(targets), 1), dtype)
    return np.zeros(len(targets), np.int64), np.ascontiguousarray(targets, dtype)
