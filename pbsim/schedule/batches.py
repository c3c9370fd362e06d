"""Which samples an update belongs to, and whether the pipeline drains before the next ones enter.

Pipelined backpropagation updates after every sample and never drains: batches of one, not drained. Fill-and-drain SGD
sends the samples of a batch through the pipeline, updates every stage once, and lets the next batch's forwards at a
stage wait for that update. Batches do not reach over the end of an epoch: its last one may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pbsim.schedule.trace import IntArray


@dataclass(frozen=True)
class Batches:
    """The samples of a run, cut into the batches of its updates.

    Attributes
    ----------
    samples : of the whole run.
    size : samples per update; the last batch of an epoch, and of the run, may hold fewer.
    drained : whether a stage's forwards of a batch wait for its update of the batch before.
    epoch_samples : samples of an epoch; 0: the run is one.
    """

    samples: int
    size: int = 1
    drained: bool = False
    epoch_samples: int = 0

    def __post_init__(self) -> None:
        if self.size > 1 and not self.drained:
            raise ValueError("only drained schedules update once for several samples")

    @property
    def epoch(self) -> int:
        """Samples of an epoch."""
        return self.epoch_samples or self.samples

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-self.epoch // self.size)

    @property
    def count(self) -> int:
        """Batches of the run."""
        return self.index(self.samples - 1) + 1

    def index(self, sample: int) -> int:
        """The batch that a sample belongs to; also the version that its forward reads where batches are drained."""
        epoch, within = divmod(sample, self.epoch)
        return epoch * self.per_epoch + within // self.size

    def first(self, batch: int) -> int:
        """The first sample of a batch."""
        epoch, within = divmod(batch, self.per_epoch)
        return epoch * self.epoch + within * self.size

    def end(self, batch: int) -> int:
        """The sample behind the last one of a batch."""
        epoch_end = (batch // self.per_epoch + 1) * self.epoch
        return min(self.first(batch) + self.size, epoch_end, self.samples)

    def is_last(self, sample: int) -> bool:
        """Whether an update follows the sample's backward."""
        return self.size == 1 or sample + 1 == self.end(self.index(sample))

    def indices(self, samples: IntArray) -> IntArray:
        """`index` of an array of samples."""
        epoch, within = np.divmod(samples, self.epoch)
        return np.asarray(epoch * self.per_epoch + within // self.size)

    def firsts(self, batches: IntArray) -> IntArray:
        """`first` of an array of batches."""
        epoch, within = np.divmod(batches, self.per_epoch)
        return np.asarray(epoch * self.epoch + within * self.size)

    def lengths(self, batches: IntArray) -> IntArray:
        """Samples of each batch."""
        first, epoch_end = self.firsts(batches), (batches // self.per_epoch + 1) * self.epoch
        return np.asarray(np.minimum(np.minimum(first + self.size, epoch_end), self.samples) - first)


def whole_batches(batches: Batches, kept: int | None) -> int | None:
    """So many samples, or as many more as their last batch has."""
    return batches.end(batches.index(min(kept, batches.samples) - 1)) if kept else kept


@dataclass(frozen=True)
class Shortened:
    """A shorter run of a drained schedule, and what to add to it.

    Attributes
    ----------
    repeats : what the run between the entries of two samples adds to all counters is missing so many times.
    """

    batches: Batches
    repeats: tuple[tuple[int, int, int], ...]


BATCHES_KEPT = 5
"""Full batches that each epoch of a shortened run has at least."""
EPOCHS_KEPT = 3
"""Epochs of a shortened run, where there are more."""


def shortened(batches: Batches, kept: int) -> Shortened | None:
    """Leave full batches out of every epoch, and whole epochs, of a drained schedule; None where it is short."""
    if not batches.drained:
        return None
    full, rest = divmod(batches.epoch, batches.size)
    epochs, tail = divmod(batches.samples, batches.epoch)
    keep = min(full, max(BATCHES_KEPT, -(-kept // batches.size) + 2))
    shorter_epoch = keep * batches.size + rest
    some_epochs = min(epochs, EPOCHS_KEPT if keep < full else max(EPOCHS_KEPT, -(-kept // batches.epoch) + 2))
    full_tail, rest_tail = divmod(tail, batches.size)
    kept_tail = min(full_tail, keep if rest_tail <= rest else keep - 1)  # it must fit into a shorter epoch
    samples = some_epochs * shorter_epoch + kept_tail * batches.size + rest_tail
    if samples >= batches.samples:
        return None
    missing_batches = epochs * (full - keep) + full_tail - kept_tail
    repeats = []
    if missing_batches:
        start = (keep - 2) * batches.size
        repeats.append((start, start + batches.size, missing_batches))
    if epochs > some_epochs:
        repeats.append((shorter_epoch, 2 * shorter_epoch, epochs - some_epochs))
    return Shortened(replace(batches, samples=samples, epoch_samples=shorter_epoch), tuple(repeats))
