"""CIFAR-10 in its official binary version: records of a label byte and 3 x 32 x 32 pixel bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pbsim.datasets.dataset import Dataset, Labels, Pixels, sizes, to_unit_range
from pbsim.datasets.location import Source
from pbsim.errors import user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data

_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32
_CLASSES = 10

SOURCE = Source(
    names=(_FOLDER, "cifar10"),
    contents=f"the files of cifar-10-binary.tar.gz: {', '.join(_TRAIN + _TEST)}",
    images=True,
)


def read_cifar10(path: Path, data: Data, where: str) -> Dataset:
    """Return CIFAR-10, (3, 32, 32) in [0, 1], from `path` or its subfolder cifar-10-batches-bin.

    Raises
    ------
    UserError
        If files are missing, or are not whole records with labels 0 to 9.
    """
    folder = path / _FOLDER if (path / _FOLDER).is_dir() else path
    missing = [name for name in _TRAIN + _TEST if not (folder / name).is_file()]
    if missing:
        raise user_error(
            where,
            "data.path",
            folder,
            f"lacks {', '.join(missing)}; the folder should hold {SOURCE.contents}",
        )
    x_train, y_train = _read_batches(folder, _TRAIN)
    x_test, y_test = _read_batches(folder, _TEST)
    train, test = sizes(data, len(x_train), len(x_test), where)
    return Dataset(
        to_unit_range(x_train[:train]),
        y_train[:train],
        to_unit_range(x_test[:test]),
        y_test[:test],
        _CLASSES,
    )


def _read_batches(folder: Path, names: tuple[str, ...]) -> tuple[Pixels, Labels]:
    records = np.concatenate([_read_batch(folder / name) for name in names])
    return records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].astype(np.int64)


def _read_batch(file: Path) -> Pixels:
    """Return the records of one file, (n, 3073)."""
    try:
        content = np.fromfile(file, np.uint8)
    except OSError as error:
        raise user_error(str(file), "", "", f"cannot be read: {error}") from error
    if content.size == 0 or content.size % _RECORD_BYTES:
        raise user_error(
            str(file), "length", f"{content.size} bytes", f"should be records of {_RECORD_BYTES} bytes each"
        )
    records = content.reshape(-1, _RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= _CLASSES)
    if wrong.size:
        raise user_error(str(file), f"label of record {wrong[0]}", records[wrong[0], 0], "should be 0 to 9")
    return records
