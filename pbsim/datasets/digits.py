"""The 8x8 digits that come with scikit-learn: real data that need no download.

Importing scikit-learn takes longer than training on its digits. So the images are read from the file that it installs,
and the split, which `train_test_split(test_size=0.2, stratify=..., random_state=0)` makes, is kept in
`digits_split.txt`; a test holds both against scikit-learn's own functions.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pbsim.datasets.dataset import Dataset, sizes
from pbsim.errors import user_error

if TYPE_CHECKING:
    from pbsim.config.workload import Data

TRAIN_SAMPLES = 1437
SPLIT = Path(__file__).with_name("digits_split.txt")


def load_digits(data: Data, where: str) -> Dataset:
    """Return the digits, (1, 8, 8), divided by 16 (their maximum).

    The split is fixed: 20 % of every class (360 of 1797) are the test set, drawn with `random_state` 0.

    Raises
    ------
    UserError
        If scikit-learn is not there, or more samples are asked for than there are.
    """
    table = np.loadtxt(_file(where), delimiter=",", dtype=np.int64)  # 64 pixels and the digit, per row
    rows = np.loadtxt(SPLIT, dtype=np.int64)
    x = (table[rows, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = table[rows, -1]
    available = TRAIN_SAMPLES, len(rows) - TRAIN_SAMPLES
    train, test = sizes(data, *available, where)
    x_test, y_test = x[TRAIN_SAMPLES:], y[TRAIN_SAMPLES:]
    return Dataset(x[:train], y[:train], x_test[:test], y_test[:test], classes=10)


def _file(where: str) -> Path:
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    if not folders:
        raise user_error(where, "data.kind", "digits", "comes with scikit-learn, which is not installed")
    return Path(folders[0]) / "datasets" / "data" / "digits.csv.gz"
