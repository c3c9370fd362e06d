"""Flush-to-zero around numeric work, so that vanishing numbers do not cost a hundred cycles each.

Momentum buffers of weights without gradient decay geometrically, and saturated probabilities underflow: both
end in denormals, which most processors handle in microcode. The processor's flush-to-zero and
denormals-are-zero bits belong to a thread, and everything that runs on it obeys them: numba kernels, BLAS,
numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


def denormals_are_flushed() -> bool:
    """Whether the calling thread turns denormal results into zeros; found by making one."""
    return bool((np.full(1, _SMALLEST_NORMAL, np.float32) * np.float32(0.5))[0] == 0)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Within the block the calling thread flushes denormals to zero; afterwards it does what it did before.

    Where the processor has no such mode, nothing changes.
    """
    import torch

    before = denormals_are_flushed()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
