"""Per-sample metrics, written as soon as both planes have said their part of a sample.

Cycles come from the timing plane, losses from the numeric plane, which trails it by a pipeline depth: what has come
from one and not yet from the other waits here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pbsim.datasets import sample_order
from pbsim.optim import LearningRate
from pbsim.results.records import F, Records, U
from pbsim.results.writer import RunWriter


class MetricsStream:
    """Joins cycles and losses of samples, in order, and hands them to the writer.

    Parameters
    ----------
    window : with timing alone, how many samples are written, with a NaN for their loss; None with numerics.
    """

    def __init__(self, writer: RunWriter, lr: LearningRate, seed: int, epoch_samples: int, window: int | None) -> None:
        self.writer, self.lr, self.seed, self.epoch_samples, self.window = (
            writer,
            lr,
            seed,
            epoch_samples,
            window,
        )
        self.diverged = False
        self._written = 0
        self._cycles = np.empty((0, 2), np.int64)
        self._losses = np.empty(0)

    def timed(self, records: Records) -> None:
        """Samples that the timing plane has completed; they come in order."""
        cycles = np.stack([records.end[:, -1, F], records.end[:, -1, U]], axis=1)
        if self.window is not None:
            cycles = cycles[: self.window - self._written]  # nobody waits for those behind the window
            self._losses = np.full(len(cycles), np.nan)
        self._cycles = np.concatenate([self._cycles, cycles])
        self._write()

    def trained(self, losses: NDArray[np.float64]) -> None:
        """Losses of the next samples."""
        self.diverged = self.diverged or not bool(np.isfinite(losses).all())
        self._losses = np.concatenate([self._losses, losses])
        self._write()

    def _write(self) -> None:
        count = min(len(self._cycles), len(self._losses))
        if not count:
            return
        sample = np.arange(self._written, self._written + count)
        self.writer.metrics(
            {
                "sample": sample,
                "epoch": sample // self.epoch_samples,
                "dataset_index": sample_order(self.seed, self.epoch_samples, self._written, count),
                "loss": self._losses[:count],
                "lr": self.lr(sample),
                "forward_cycle": self._cycles[:count, 0],
                "update_cycle": self._cycles[:count, 1],
            }
        )
        self._written += count
        self._cycles, self._losses = self._cycles[count:], self._losses[count:]
