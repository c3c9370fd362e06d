"""MNIST, and the IDX format its files are in.

An IDX file is a magic number (two zero bytes, the element type, the number of dimensions), the dimensions as
big-endian 32-bit integers, and the elements. Only unsigned bytes (type 8) occur in MNIST.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pbsim.datasets.dataset import Dataset, Labels, Pixels, sizes, to_unit_range
from pbsim.datasets.location import Source
from pbsim.errors import user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data

_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_UNSIGNED_BYTE = 8

SOURCE = Source(
    names=("mnist", "MNIST/raw"), contents=f"the files {', '.join(_NAMES)}, as they are or compressed (.gz)"
)


def read_idx(path: Path) -> Pixels:
    """Return the array of unsigned bytes in an IDX file; a name that ends in .gz is decompressed.

    Raises
    ------
    UserError
        If the magic number is another, or the length is not what the dimensions say.
    """
    content = _content(path)
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or content[3] == 0:
        found = f"0x{content[:4].hex()}" if content else "nothing"
        raise user_error(
            str(path), "magic number", found, "should be 0x000008NN, an IDX file of bytes with NN dimensions"
        )
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise user_error(
            str(path),
            "length",
            f"{len(content)} bytes",
            f"truncated: its header alone should be {header} bytes",
        )
    shape = tuple(int(size) for size in np.frombuffer(content[4:header], ">u4"))
    expected = header + math.prod(shape)
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "too long"
        raise user_error(
            str(path),
            "length",
            f"{len(content)} bytes",
            f"{fault}: dimensions {list(shape)} make {expected} bytes",
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise user_error(str(path), "", "", f"cannot be read: {error}") from error


def read_mnist(folder: Path, data: Data, where: str) -> Dataset:
    """Return the data set of the four IDX files in `folder`: images (1, H, W) in [0, 1].

    Labels are below `data.classes`, 10 if not given.

    Raises
    ------
    UserError
        If files are missing or malformed, or images and labels do not belong together.
    """
    files = {name: _existing(folder, name) for name in _NAMES}
    missing = [f"{name}[.gz]" for name, file in files.items() if file is None]
    if missing:
        raise user_error(
            where,
            "data.path",
            folder,
            f"lacks {', '.join(missing)}; the folder should hold {SOURCE.contents}",
        )
    train_images, train_labels, test_images, test_labels = (file for file in files.values() if file)
    classes = data.classes or 10
    x_train, y_train = _read_pair(train_images, train_labels, classes)
    x_test, y_test = _read_pair(test_images, test_labels, classes)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise user_error(
            str(test_images), "dimensions", list(x_test.shape), f"{train_images} has {list(x_train.shape)}"
        )
    train, test = sizes(data, len(x_train), len(x_test), where)
    return Dataset(
        to_unit_range(x_train[:train, None]),
        y_train[:train],
        to_unit_range(x_test[:test, None]),
        y_test[:test],
        classes,
    )


def _existing(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_pair(image_file: Path, label_file: Path, classes: int) -> tuple[Pixels, Labels]:
    images, labels = read_idx(image_file), read_idx(label_file)
    for file, array, dimensions in ((image_file, images, 3), (label_file, labels, 1)):
        if array.ndim != dimensions or array.size == 0:
            raise user_error(str(file), "dimensions", list(array.shape), f"should be {dimensions}, none of them 0")
    if len(images) != len(labels):
        raise user_error(str(label_file), "dimensions", list(labels.shape), f"{image_file} has {len(images)} images")
    if labels.max() >= classes:
        raise user_error(str(label_file), "labels", labels.max(), f"should be below {classes}")
    return images, labels.astype(np.int64)
