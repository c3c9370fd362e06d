"""Runs an order on a backend, and stops where an evaluation is due.

An evaluation within the run takes each stage's weights as they stand when the due sample's last update ends (DESIGN.md
5.8), which is that of its batch: the order is cut behind the updates of that cycle, and goes on as if nothing had been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from pbsim.numerics.backend import Backend, SampleSource
from pbsim.numerics.order import FORWARD, UPDATE, Order
from pbsim.schedule.batches import Batches


@dataclass(frozen=True)
class Evaluation:
    """An evaluation is due: the last updates of this sample have ended at this cycle."""

    sample: int
    cycle: int


@dataclass(frozen=True)
class Progress:
    """Losses of the next samples in order; then, perhaps, an evaluation is due."""

    losses: NDArray[np.float64]
    evaluation: Evaluation | None


def due_samples(every_epochs: float, epoch_samples: int, total: int) -> Iterator[int]:
    """The samples behind which the run is evaluated, each once, the last one of all excepted."""
    every = Fraction(repr(every_epochs)) * epoch_samples
    count = 1
    while (sample := math.ceil(count * every) - 1) < total - 1:
        yield sample
        count = max(count, math.floor((sample + 1) / every)) + 1  # the first that is due behind a later sample


def train(
    orders: Iterable[Order],
    backend: Backend,
    samples: SampleSource,
    stages: int,
    batches: Batches,
    due: Iterator[int],
) -> Iterator[Progress]:
    """Run everything in order; yields between evaluations, and at least once per piece of the order."""
    waiting: list[_Due] = []
    for order in orders:
        start = 0
        for evaluation in _complete(order, stages, batches, waiting, due):
            end = behind_updates(order, evaluation.cycle)
            yield Progress(_losses(backend, order[start:end], samples, stages), evaluation)
            start = end
        yield Progress(_losses(backend, order[start:], samples, stages), None)


@dataclass
class _Due:
    """A due sample and how many stages have updated by it so far."""

    sample: int
    updates: int = 0


def _complete(
    order: Order, stages: int, batches: Batches, waiting: list[_Due], due: Iterator[int]
) -> Iterator[Evaluation]:
    """The evaluations that become due within a piece of the order; `waiting` goes from piece to piece."""
    updates = order.kind == UPDATE
    newest = int(order.sample.max(initial=-1))
    while not waiting or waiting[-1].sample <= newest:
        sample = next(due, None)
        if sample is None:
            break
        waiting.append(_Due(sample))
    for item in list(waiting):
        rows = np.flatnonzero(updates & (order.sample == batches.first(batches.index(item.sample))))
        item.updates += len(rows)
        if item.updates == stages:
            waiting.remove(item)
            yield Evaluation(item.sample, int(order.cycle[rows[-1]]))


def behind_updates(order: Order, cycle: int) -> int:
    """The row behind the updates that end at a cycle, and before whatever reads then."""
    first, last = np.searchsorted(order.cycle, [cycle, cycle + 1])
    return int(first + np.count_nonzero(order.kind[first:last] == UPDATE))


def _losses(backend: Backend, order: Order, samples: SampleSource, stages: int) -> NDArray[np.float64]:
    if not len(order):
        return np.empty(0)
    losses = backend.run(order, samples)
    return np.asarray(losses[(order.kind == FORWARD) & (order.stage == stages - 1)])
