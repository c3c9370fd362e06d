"""From the trace to the order of the numbers: which weights each forward reads, and what each update multiplies.

The semantics (DESIGN.md 5.2, 5.3): forwards and backwards read the weights at their start, updates write at their
end, and a write at a cycle is seen by every read at that cycle or later. So a forward takes effect at its start, a
backward (both gradients read one version) at the earlier of its starts, an update at its end; at one cycle updates come
first. A sample's delay at a stage, (version its update makes) - 1 - (version its forward read), lies in the forward's
future: the order is released only up to forwards whose update is known, so the numbers trail the timing.

Where several samples share an update, it stands under the first of them, has that sample's learning rate, and ends the
delay of each. Each backward says what its gradient weighs in the update: 1/n in a batch of n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pbsim.optim import Coefficients, LearningRate, UpdateRule
from pbsim.schedule.batches import Batches
from pbsim.schedule.trace import EMPTY, Chunk, IntArray, Op, Trace

FORWARD, BACKWARD, UPDATE = 0, 1, 2
_KINDS = np.array([FORWARD, BACKWARD, BACKWARD, UPDATE], dtype=np.int64)  # by `Op`
UNKNOWN = -1


@dataclass(frozen=True)
class Order:
    """Operations in the order of their effect; arrays of one length.

    Attributes
    ----------
    kind : `FORWARD`, `BACKWARD` or `UPDATE`.
    stage, sample : of each operation; an update has the first sample of its batch.
    cycle : when it takes effect.
    delay : measured delay of the sample at the stage (`UNKNOWN` for backwards, which need none).
    lr : learning rate of the sample.
    weight : of a backward's gradient in the mean that its batch's update applies.
    coefficients : of prediction (forwards) and update (updates), see `pbsim.optim.mitigation`.
    """

    kind: IntArray
    stage: IntArray
    sample: IntArray
    cycle: IntArray
    delay: IntArray
    lr: NDArray[np.float64]
    weight: NDArray[np.float64]
    coefficients: Coefficients

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, rows: slice) -> Order:
        pieces = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return Order(**pieces, coefficients=self.coefficients[rows])


_ARRAYS = ("kind", "stage", "sample", "cycle", "delay", "lr", "weight")


@dataclass(frozen=True)
class Horizon:
    """Which delay the mitigations use: each sample's own, or 2(S-1-s) where `nominal`."""

    stages: int
    nominal: bool

    def of(self, stage: IntArray, delay: IntArray) -> NDArray[np.float64]:
        """The delay to use for samples of a measured delay at these stages."""
        return np.asarray(2 * (self.stages - 1 - stage) if self.nominal else delay, dtype=np.float64)


def orders(
    chunks: Iterable[Chunk], rule: UpdateRule, lr: LearningRate, horizon: Horizon, batches: Batches
) -> Iterator[Order]:
    """Turn a trace into the order of the numbers, piece by piece."""
    pending, delay = EMPTY, np.empty(0, dtype=np.int64)
    for chunk in chunks:
        new = chunk.rows[(chunk.rows.op <= Op.UPDATE) & (chunk.rows.op != Op.WEIGHT_GRADIENT)]
        pending = Trace.concatenate(pending, new)
        delay = np.concatenate([delay, np.full(len(new), UNKNOWN)])
        measure_delays(pending, delay, horizon.stages, batches)
        ready = _ready(pending, delay, chunk.until)
        if ready.any():
            yield _order(pending[ready], delay[ready], rule, lr, horizon, batches)
        pending, delay = pending[~ready], delay[~ready]
    if len(pending):
        raise RuntimeError(f"the trace ends with {len(pending)} operations that cannot be ordered")


def measure_delays(trace: Trace, delay: IntArray, stages: int, batches: Batches) -> None:
    """Write the delay of every forward and its batch's update that the trace has both of, where still `UNKNOWN`.

    The delay is (version the update makes) - 1 - (version the forward read).
    """
    forwards = np.flatnonzero((trace.op == Op.FORWARD) & (delay == UNKNOWN))
    updates = np.flatnonzero(trace.op == Op.UPDATE)
    if not len(updates):
        return
    keys = batches.indices(trace.sample) * stages + trace.stage
    updates = updates[np.argsort(keys[updates])]
    at = np.minimum(np.searchsorted(keys[updates], keys[forwards]), len(updates) - 1)
    there = keys[updates[at]] == keys[forwards]
    forwards, updates = forwards[there], updates[at[there]]
    measured = trace.version[updates] - 1 - trace.version[forwards]
    delay[forwards] = measured
    delay[updates] = measured


def effect_cycle(trace: Trace) -> IntArray:
    """When each operation takes effect: an update at its end, everything else at its start."""
    return np.where(trace.op == Op.UPDATE, trace.end, trace.start)


def _ready(trace: Trace, delay: IntArray, until: int) -> NDArray[np.bool_]:
    """Which operations come before everything that is still to come, and before forwards of unknown delay."""
    unknown = (trace.op == Op.FORWARD) & (delay == UNKNOWN)
    if unknown.any():
        until = min(until, int(trace.start[unknown].min()))
    return effect_cycle(trace) < until


def _order(
    trace: Trace, delay: IntArray, rule: UpdateRule, lr: LearningRate, horizon: Horizon, batches: Batches
) -> Order:
    """Sort operations by their effect; a backward is represented by its input gradient's row."""
    update = trace.op == Op.UPDATE
    cycle = effect_cycle(trace)
    rows = np.lexsort((trace.sample, trace.stage, ~update, cycle))  # at one cycle, writes come before reads
    trace, delay = trace[rows], delay[rows]
    rates = lr(trace.sample)
    return Order(
        kind=_KINDS[trace.op],
        stage=trace.stage,
        sample=trace.sample,
        cycle=cycle[rows],
        delay=delay,
        lr=rates,
        weight=1 / batches.lengths(batches.indices(trace.sample)),
        coefficients=rule.coefficients(horizon.of(trace.stage, np.maximum(delay, 0)), rates),
    )
