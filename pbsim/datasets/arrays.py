"""Data as arrays: from an npz file, or straight from a user's program.

Both are the same four arrays, `x_train`, `y_train`, `x_test` and `y_test`, and go through the same checks:
one pass that finds everything that is wrong, then the casts.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbsim.datasets.dataset import Dataset, Floats, sizes
from pbsim.datasets.location import Source
from pbsim.errors import Problem, UserError, user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data

Array = NDArray[Any]

_UNREADABLE = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    RuntimeError,
    MemoryError,
    zlib.error,
    zipfile.BadZipFile,
)
"""What numpy raises for a damaged or pickled entry of an npz file, or for lists that make no array."""
_LABEL_MAX = 2**31 - 1
KEYS = ("x_train", "y_train", "x_test", "y_test")
SOURCE = Source(
    names=("data.npz",),
    contents="an .npz file with the arrays x_train, y_train, x_test, y_test "
    "(x: (n, C, H, W) or (n, features); y: integer labels (n,) or float targets (n, k))",
)
_USER_DATA = (
    "should be (x_train, y_train, x_test, y_test), a dict of these arrays, "
    "or a pair (train, test) of torch Datasets, with a length and (x, label) items"
)


def read_npz(path: Path, data: Data, where: str) -> Dataset:
    """Return the data set of an npz file, its values used as they stand.

    Without `data.classes` there are as many classes as the largest label of the whole file says.

    Raises
    ------
    UserError
        If the file is none, or with all that is wrong with its arrays.
    """
    try:
        file = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise user_error(where, "data.path", path, f"is not an npz file: {error}") from error
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise user_error(where, "data.path", path, f"is a single array; it should be {SOURCE.contents}")
    with file:
        dataset = _from_arrays({key: _deferred(file, key) for key in file.files}, str(path))
    train, test = sizes(data, dataset.train_samples, dataset.test_samples, where)
    return replace(
        dataset,
        x_train=dataset.x_train[:train],
        y_train=dataset.y_train[:train],
        x_test=dataset.x_test[:test],
        y_test=dataset.y_test[:test],
    )


def from_user(data: object) -> Dataset:
    """Return the data set that a program hands over.

    Parameters
    ----------
    data : (x_train, y_train, x_test, y_test), or a dict with these keys, of numpy arrays or torch tensors; or
        a pair (train, test) of torch Datasets with a length and (x, label) items; or a `Dataset`.

    Raises
    ------
    UserError
        With all that is wrong with it. A single torch Dataset is refused: nothing says what to test on.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Mapping):
        return _from_arrays({key: _constant(value) for key, value in data.items()}, "data")
    if isinstance(data, tuple | list) and len(data) == 4:
        return _from_arrays({key: _constant(value) for key, value in zip(KEYS, data, strict=True)}, "data")
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_indexable, data)):
        arrays = dict(zip(KEYS, (*_stacked(data[0], "train"), *_stacked(data[1], "test")), strict=True))
        return _from_arrays({key: _constant(value) for key, value in arrays.items()}, "data")
    if _is_indexable(data) and not isinstance(data, tuple | list | str | bytes):
        raise user_error("data", "", type(data).__name__, f"needs a test set beside the training set: {_USER_DATA}")
    given = f"{type(data).__name__} of {len(data)}" if isinstance(data, tuple | list) else type(data).__name__
    raise user_error("data", "", given, _USER_DATA)


def _is_indexable(data: object) -> bool:
    """Whether something may be a torch Dataset with a length: no array and no tensor, which have a dtype."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "dtype")


def _stacked(items: Any, name: str) -> tuple[Array, Array]:
    """Return the samples and the labels of a torch Dataset as two arrays."""
    xs: list[Array] = []
    ys: list[Array] = []
    for index in range(_length(items, name)):
        try:
            item = items[index]
        except Exception as error:
            raise _raised(f"{name}[{index}]", error) from error
        if not isinstance(item, tuple | list) or len(item) != 2 or not hasattr(item[0], "dtype"):
            raise user_error(
                "data",
                f"{name}[{index}]",
                type(item).__name__,
                "should be a pair (x, label), x a tensor or an array",
            )
        try:
            xs.append(_to_numpy(item[0]))
            ys.append(_to_numpy(item[1]))
        except _UNREADABLE as error:
            raise _raised(f"{name}[{index}]", error) from error
        if xs[-1].shape != xs[0].shape or ys[-1].shape != ys[0].shape:
            shapes, first = [xs[-1].shape, ys[-1].shape], [xs[0].shape, ys[0].shape]
            raise user_error("data", f"{name}[{index}]", f"shapes {shapes}", f"the first item has {first}")
    if not xs:
        raise user_error("data", name, "0 samples", "should have at least one")
    return np.stack(xs), np.stack(ys)


def _length(items: Any, name: str) -> int:
    try:
        return len(items)
    except Exception as error:
        raise _raised(f"len({name})", error) from error


def _raised(place: str, error: Exception) -> UserError:
    """An exception of a user's own code, which stays its cause."""
    return user_error("data", place, "", f"raised {type(error).__name__}: {error}")


def _to_numpy(value: Any) -> Array:
    """Return an array of a tensor, which may be on a device, require gradients, or be of type bfloat16."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        narrow = tensor.is_floating_point() and tensor.itemsize < 4  # numpy knows no bfloat16
        value = (tensor.float() if narrow else tensor).numpy()
    return np.asarray(value)


def _constant(value: object) -> Callable[[], Array]:
    return lambda: _to_numpy(value)


def _deferred(file: Mapping[str, Array], key: str) -> Callable[[], Array]:
    return lambda: _to_numpy(file[key])


def _from_arrays(given: Mapping[str, Callable[[], Array]], where: str) -> Dataset:
    """Check and cast the four arrays; `given` makes each when called, which may fail (a pickled entry)."""
    problems = [Problem(where, key, "", "is missing") for key in KEYS if key not in given]
    arrays: dict[str, Array] = {}
    for key in KEYS:
        if key in given:
            try:
                array = given[key]()
            except _UNREADABLE as error:
                problems.append(Problem(where, key, "", f"cannot be read as an array of numbers: {error}"))
                continue
            fault = _fault(array, is_input=key.startswith("x"))
            if fault:
                problems.append(Problem(where, key, f"{array.dtype} of shape {list(array.shape)}", fault))
            else:
                arrays[key] = array
    problems += _mismatches(arrays, where)
    if problems:
        raise UserError(problems)
    return _cast(arrays)


def _fault(array: Array, is_input: bool) -> str:
    """Return what is wrong with one array, or nothing."""
    if array.dtype.kind not in ("fiu" if is_input else "fiub"):
        return "should be numbers (integer or float)" + (", or truth values as labels" if not is_input else "")
    if array.size == 0:
        return "should hold at least one sample, and no dimension of 0"
    if array.dtype.kind == "f" and not np.all(np.abs(array) <= np.finfo(np.float32).max):
        return "should hold finite float32 values, no NaN or infinity"
    if is_input:
        return "should be (n, C, H, W) or (n, features)" if array.ndim < 2 else ""
    if array.ndim != (2 if array.dtype.kind == "f" else 1):
        return "should be integer labels of shape (n,) or float targets of shape (n, k)"
    if array.dtype.kind == "i" and array.min() < 0:
        return f"labels should not be negative; the least is {array.min()}"
    if array.dtype.kind in "iu" and array.max() > _LABEL_MAX:
        return f"labels should number the classes from 0; the greatest is {array.max()}"
    return ""


def _mismatches(arrays: Mapping[str, Array], where: str) -> list[Problem]:
    """Return where the arrays that are right by themselves do not belong together."""
    problems: list[Problem] = []

    def compare(one: str, other: str, what: Callable[[Array], object]) -> None:
        if one in arrays and other in arrays and what(arrays[one]) != what(arrays[other]):
            problems.append(Problem(where, other, str(what(arrays[other])), f"{one} has {what(arrays[one])}"))

    compare("x_train", "y_train", lambda array: f"{len(array)} samples")
    compare("x_test", "y_test", lambda array: f"{len(array)} samples")
    compare("x_train", "x_test", lambda array: f"samples of shape {list(array.shape[1:])}")
    compare("y_train", "y_test", lambda array: f"targets of {array.shape[1]}" if array.ndim == 2 else "labels")
    return problems


def _cast(arrays: Mapping[str, Array]) -> Dataset:
    """Return the data set of four arrays that have passed all checks."""
    x_train, x_test = (_floats(arrays[key]) for key in ("x_train", "x_test"))
    if arrays["y_train"].dtype.kind == "f":
        targets = [_floats(arrays[key]) for key in ("y_train", "y_test")]
        return Dataset(x_train, targets[0], x_test, targets[1], classes=0)
    labels = [np.ascontiguousarray(arrays[key], np.int64) for key in ("y_train", "y_test")]
    classes = int(max(labels[0].max(), labels[1].max())) + 1
    return Dataset(x_train, labels[0], x_test, labels[1], classes)


def _floats(array: Array) -> Floats:
    """Return the array in float64 if it is, else in float32: the run's precision is its own, and cast to later."""
    if array.dtype == np.float64:
        return np.ascontiguousarray(array, np.float64)
    return np.ascontiguousarray(array, np.float32)
