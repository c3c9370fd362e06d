"""A data set is four arrays and a number of classes.

Every kind of data, whatever its files look like, ends up as one `Dataset` in torch's layout, so nothing after
this package knows where samples came from. The helpers here are what the readers of all kinds share: pixels
to [0, 1], and how many samples to take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pbsim.errors import Problem, UserError

if TYPE_CHECKING:
    from pbsim.config.workload import Data

Floats: TypeAlias = NDArray[np.floating[Any]]
Labels: TypeAlias = NDArray[np.int64]
Pixels: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class Dataset:
    """Training and test samples.

    Attributes
    ----------
    x_train, x_test : float32 (float64 where the user's arrays are) (n, C, H, W) or (n, features), or any other shape.
    y_train, y_test : int64 (n,) labels in [0, classes), or float (n, k) regression targets.
    classes : number of classes; 0 for regression.
    """

    x_train: Floats
    y_train: Labels | Floats
    x_test: Floats
    y_test: Labels | Floats
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.x_train.shape[1:]

    @property
    def train_samples(self) -> int:
        """Number of training samples."""
        return len(self.x_train)

    @property
    def test_samples(self) -> int:
        """Number of test samples."""
        return len(self.x_test)


def to_unit_range(pixels: Pixels) -> Floats:
    """Scale 8-bit pixels to [0, 1]: `pixels / 255`, in float32."""
    return np.divide(pixels, np.float32(255), dtype=np.float32)


def sizes(data: Data, train_available: int, test_available: int, where: str) -> tuple[int, int]:
    """How many training and test samples to take: what the user asks for, else all.

    Raises
    ------
    UserError
        If more are asked for than there are.
    """
    train = train_available if data.train_samples is None else data.train_samples
    test = test_available if data.test_samples is None else data.test_samples
    asked = (("train_samples", train, train_available), ("test_samples", test, test_available))
    problems = [
        Problem(where, f"data.{key}", str(count), f"should be at most {available}, all there are")
        for key, count, available in asked
        if count > available
    ]
    if problems:
        raise UserError(problems)
    return train, test
