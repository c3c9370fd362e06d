"""From the `[data]` table of a workload to a `Dataset`: one reader per kind, then what all kinds share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pbsim.datasets import arrays, cifar, idx, image_folder
from pbsim.datasets.dataset import Dataset, Floats
from pbsim.datasets.digits import load_digits
from pbsim.datasets.location import Source, find
from pbsim.datasets.synthetic import TRAIN_SAMPLES, make_random
from pbsim.errors import Problem, UserError, user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data, Normalize

_READERS: dict[str, tuple[Source, Callable[[Path, Data, str], Dataset]]] = {
    "mnist": (idx.SOURCE, idx.read_mnist),
    "cifar10": (cifar.SOURCE, cifar.read_cifar10),
    "image_folder": (image_folder.SOURCE, image_folder.read_image_folder),
    "npz": (arrays.SOURCE, arrays.read_npz),
}


def load(data: Data, *, seed: int, where: str, base: Path | None) -> Dataset:
    """Load the data set a workload asks for.

    `train_samples` and `test_samples` take the first so many in file order, of an image folder in turn from
    every class. `normalize` comes last: after pixels have been scaled to [0, 1].

    Parameters
    ----------
    data : the workload's `[data]` table.
    seed : what `random` data are generated from; other kinds do not read it.
    where : name of the workload file, for errors.
    base : folder that a relative `path` starts from; None for the working directory.

    Raises
    ------
    UserError
        If data are missing or malformed, or do not fit `shape`, `classes`, `normalize` or `augment`.
    """
    dataset = _read(data, seed, where, base)
    _check(dataset, data, where)
    if data.normalize is not None:
        dataset = replace(
            dataset,
            x_train=_normalized(dataset.x_train, data.normalize),
            x_test=_normalized(dataset.x_test, data.normalize),
        )
    return dataset if data.classes is None else replace(dataset, classes=data.classes)


def extent(data: Data) -> tuple[tuple[int, ...], int] | None:
    """Shape of a sample and number of training samples as the workload gives them; None if it leaves that to its data.

    This is all that timing alone needs of data.
    """
    samples = data.train_samples
    if samples is None and data.kind == "random":
        samples = TRAIN_SAMPLES
    return None if data.shape is None or samples is None else (tuple(data.shape), samples)


def find_data(data: Data, *, where: str, base: Path | None) -> Path | None:
    """Where the files of a workload's data are, None if its kind has none; raises `UserError` if they are not there."""
    return find(_READERS[data.kind][0], data.path, base, where) if data.kind in _READERS else None


def _read(data: Data, seed: int, where: str, base: Path | None) -> Dataset:
    if data.kind in _READERS:
        source, read = _READERS[data.kind]
        return read(find(source, data.path, base, where), data, where)
    if data.path is not None:
        raise user_error(where, "data.path", data.path, f"{data.kind} data are in no file; leave it out")
    return load_digits(data, where) if data.kind == "digits" else make_random(data, seed, where)


def _check(dataset: Dataset, data: Data, where: str) -> None:
    """Refuse data that contradict what the workload says of them, naming all contradictions."""
    problems: list[Problem] = []

    def wrong(key: str, value: object, allowed: str) -> None:
        problems.append(Problem(where, f"data.{key}", str(value), allowed))

    if data.shape is not None and tuple(data.shape) != dataset.shape:
        wrong("shape", list(data.shape), f"the samples have shape {list(dataset.shape)}")
    if data.classes is not None and dataset.classes == 0:
        wrong("classes", data.classes, "the data are regression targets; leave it out")
    elif data.classes is not None and data.classes < dataset.classes:
        wrong("classes", data.classes, f"should be at least {dataset.classes}, the classes of the data")
    if data.normalize is not None:
        channels = dataset.shape[0]
        given = max(len(data.normalize.mean), len(data.normalize.std))
        if not len(data.normalize.mean) == len(data.normalize.std) == channels:
            wrong("normalize", f"{given} channels", f"should have one mean and std for each of {channels}")
    if data.augment and len(dataset.shape) != 3:
        wrong("augment", data.augment, f"needs samples of shape (C, H, W), not {list(dataset.shape)}")
    if problems:
        raise UserError(problems)


def _normalized(x: Floats, normalize: Normalize) -> Floats:
    """Return (x - mean) / std, per channel (axis 1), in the type of x."""
    per_channel = (-1, *(1,) * (x.ndim - 2))
    mean = np.asarray(normalize.mean, dtype=x.dtype).reshape(per_channel)
    std = np.asarray(normalize.std, dtype=x.dtype).reshape(per_channel)
    return np.asarray((x - mean) / std)
