"""Made-up data of any shape: to time a network whose data are not at hand, and still see its loss go down."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import PCG64, Generator

from pbsim.datasets.dataset import Dataset, Floats, Labels
from pbsim.errors import user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data

CLASSES = 10
TRAIN_SAMPLES = 1000
TEST_SAMPLES = 200
PIECE = 256


def make_random(data: Data, seed: int, where: str) -> Dataset:
    """Return samples of shape `data.shape`, each the mean of its class plus noise.

    x = (mean[y] + noise) / sqrt(2), with mean and noise standard normal, so x is as well. All draws come from
    `Generator(PCG64(seed))`, in this order: means, training labels, training noise, test labels, test noise.

    Raises
    ------
    UserError
        If there is no shape, or the data would not fit in this machine's memory.
    """
    if data.shape is None:
        raise user_error(where, "data.shape", "", "random data need the shape of one sample, as [3, 32, 32]")
    shape = tuple(data.shape)
    classes, train, test = (
        data.classes or CLASSES,
        data.train_samples or TRAIN_SAMPLES,
        data.test_samples or TEST_SAMPLES,
    )
    needed = (classes + train + test) * math.prod(shape) * 4
    given = f"{classes} classes, {train} and {test} samples of shape {list(shape)}"
    if needed > memory_bytes():
        problem = f"needs {needed / 1e9:,.1f} GB, more than there is; lower data.train_samples and data.test_samples"
        raise user_error(where, "data", given, problem)
    generator = Generator(PCG64(seed))
    try:
        means = generator.standard_normal((classes, *shape), dtype=np.float32)
        x_train, y_train = _draw(generator, means, train)
        x_test, y_test = _draw(generator, means, test)
    except MemoryError as error:
        raise user_error(where, "data", given, f"do not fit in memory: {error}") from None
    return Dataset(x_train, y_train, x_test, y_test, classes)


def memory_bytes() -> float:
    """Physical memory; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def _draw(generator: Generator, means: Floats, samples: int) -> tuple[Floats, Labels]:
    y = generator.integers(0, len(means), samples, dtype=np.int64)
    x = generator.standard_normal((samples, *means.shape[1:]), dtype=np.float32)
    for first in range(0, samples, PIECE):  # so that no second array of this size is needed
        x[first : first + PIECE] += means[y[first : first + PIECE]]
    x *= np.float32(np.sqrt(0.5))
    return x, y
