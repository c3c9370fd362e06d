"""The order in which training reads samples: a fresh permutation every epoch (DESIGN.md 5.1).

Training counts samples globally: sample g is sample g mod n of epoch g div n. The order depends on seed and
epoch alone, so any part of it can be had without the parts before.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.random import PCG64, Generator

from pbsim.datasets.dataset import Labels


def epoch_order(seed: int, epoch: int, n: int) -> Labels:
    """Return the permutation of `n` samples in an epoch: `Generator(PCG64([seed, epoch])).permutation(n)`.

    Returns
    -------
    int64 (n,)
    """
    return Generator(PCG64([seed, epoch])).permutation(n).astype(np.int64, copy=False)


def sample_order(seed: int, n: int, first: int, count: int) -> Labels:
    """Return the dataset index of the global samples `first` to `first + count - 1`, across epochs.

    Parameters
    ----------
    n : samples of an epoch, at least 1.
    first : global index of the first sample, counted from the start of training.
    count : number of samples; may span epochs.

    Returns
    -------
    int64 (count,)
    """
    last = first + count
    parts = [
        _cached_order(seed, epoch, n)[max(first - epoch * n, 0) : last - epoch * n]
        for epoch in range(first // n, -(-last // n))
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


_cached_order = lru_cache(maxsize=2)(epoch_order)  # training reads an epoch in many small pieces
