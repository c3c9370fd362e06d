"""What the network is trained on: data sets as plain arrays, the order they are read in, and augmentation."""

from __future__ import annotations

from pbsim.datasets.arrays import from_user
from pbsim.datasets.augmentation import augment_batch
from pbsim.datasets.dataset import Dataset
from pbsim.datasets.loading import extent, find_data, load
from pbsim.datasets.order import epoch_order, sample_order
from pbsim.datasets.training import TrainingData

__all__ = [
    "Dataset",
    "TrainingData",
    "augment_batch",
    "epoch_order",
    "extent",
    "find_data",
    "from_user",
    "load",
    "sample_order",
]
