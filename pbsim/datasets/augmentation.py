"""Random crops and flips that depend on nothing but seed, epoch and sample.

Every sample of every epoch has a generator of its own, so the result is the same in whatever order, batch or
thread samples are augmented.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from pbsim.datasets.dataset import Floats


def augment_batch(
    x: Floats, augment: Sequence[str], seed: int, epochs: NDArray[np.int64], indices: NDArray[np.int64]
) -> Floats:
    """Return randomly cropped and flipped samples.

    The draws of a sample come from `g = Generator(PCG64([seed, epoch, dataset_index]))`, in this order
    whatever the order of `augment`, each made only if its augmentation is listed:

    1. ``crop:p``: ``row = g.integers(0, 2 * p + 1)``, then ``column = g.integers(0, 2 * p + 1)``;
    2. ``flip``: ``flipped = g.random() < 0.5``.

    The sample is padded with p zeros on all four sides, `padded[:, row : row + H, column : column + W]` is
    cut out, and if flipped, mirrored left to right (the W axis is reversed). The zeros are zeros of `x` as it
    is: after normalization.

    Parameters
    ----------
    x : float32 (k, C, H, W) the samples; not modified.
    augment : at most one of ``"crop:p"``, p at least 1, and at most one of ``"flip"``.
    seed : the run's seed.
    epochs : int (k,) the epoch each sample is read in.
    indices : int (k,) the dataset index of each sample.

    Returns
    -------
    (k, C, H, W), of the type of `x`.
    """
    if not augment:
        return x.copy()
    padding = next((int(name.removeprefix("crop:")) for name in augment if name.startswith("crop:")), 0)
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    result = np.empty_like(x)
    for sample, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
        generator = Generator(PCG64([seed, epoch, index]))
        row = column = 0
        if padding:
            row, column = (int(generator.integers(0, 2 * padding + 1)) for _ in range(2))
        cut = padded[sample, :, row : row + height, column : column + width]
        flipped = "flip" in augment and generator.random() < 0.5
        result[sample] = cut[:, :, ::-1] if flipped else cut
    return result
