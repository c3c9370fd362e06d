"""Training data as a run reads them: in the order of its epochs, augmented where the workload says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pbsim.datasets.augmentation import augment_batch
from pbsim.datasets.dataset import Dataset, Floats, Labels
from pbsim.datasets.order import sample_order


class TrainingData:
    """Samples by their global index over all epochs.

    Parameters
    ----------
    dataset : the data.
    augment : as in the workload's `[data]` table.
    seed : of the order and of augmentation.
    """

    def __init__(self, dataset: Dataset, augment: Sequence[str], seed: int) -> None:
        self.dataset, self.augment, self.seed = dataset, augment, seed

    def indices(self, first: int, end: int) -> NDArray[np.int64]:
        """Dataset indices of global samples `first` to `end`, exclusive."""
        return sample_order(self.seed, self.dataset.train_samples, first, end - first)

    def inputs(self, first: int, end: int) -> Floats:
        """Inputs of these samples, (end - first, ...)."""
        indices = self.indices(first, end)
        x = self.dataset.x_train[indices]
        if not self.augment:
            return x
        epochs = np.arange(first, end) // self.dataset.train_samples
        return augment_batch(x, self.augment, self.seed, epochs, indices)

    def targets(self, first: int, end: int) -> Labels | Floats:
        """Labels or regression targets of these samples."""
        return self.dataset.y_train[self.indices(first, end)]
