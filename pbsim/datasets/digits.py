"""The 8x8 digits that come with scikit-learn: real data that need no download."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pbsim.datasets.dataset import Dataset, sizes

if TYPE_CHECKING:
    from pbsim.config.workload import Data


def load_digits(data: Data, where: str) -> Dataset:
    """Return the digits, (1, 8, 8), divided by 16 (their maximum).

    The split is fixed: 20 % of every class (360 of 1797) are the test set, drawn with `random_state` 0.

    Raises
    ------
    UserError
        If more samples are asked for than there are.
    """
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    pixels, digits = sklearn_digits(return_X_y=True)
    x = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = digits.astype(np.int64)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    train, test = sizes(data, len(x_train), len(x_test), where)
    return Dataset(x_train[:train], y_train[:train], x_test[:test], y_test[:test], classes=10)
