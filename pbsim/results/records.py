"""Rows of a trace gathered into one record per sample, as soon as a sample is done everywhere.

The timing plane hands out rows as they happen; checks and statistics want all that happened to one sample. Records
come in dense batches, so that both work on whole arrays and keep only the samples still in flight. The update of a
batch counts as the update of each of its samples, which are therefore complete together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pbsim.hardware import Machine
from pbsim.schedule import Batches
from pbsim.schedule.trace import EMPTY, IntArray, Op, Trace

F, BX, BW, U = (int(op) for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.UPDATE))


@dataclass(frozen=True)
class Records:
    """Complete samples, in order.

    Attributes
    ----------
    sample : (k,) global indices.
    start, end, version : (k, S, 4), by stage and operation (F, Bx, Bw, U).
    load_end : (k,) when the sample had come from the host.
    send_start, send_end : (k, C, 2), by channel and direction (forward, gradient).
    """

    sample: IntArray
    start: IntArray
    end: IntArray
    version: IntArray
    load_end: IntArray
    send_start: IntArray
    send_end: IntArray

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def delay(self) -> IntArray:
        """Measured delays (k, S): (version the update makes) - 1 - (version the forward read)."""
        return np.asarray(self.version[:, :, U] - 1 - self.version[:, :, F])


class MalformedTraceError(RuntimeError):
    """A sample does not have exactly the rows it should have, or an update is none of a batch."""


class Recorder:
    """Gathers rows until samples are complete."""

    def __init__(self, machine: Machine, batches: Batches) -> None:
        self.stages, self.channels, self.batches = machine.stages, machine.channels, batches
        compute = [(s, op, -1) for s in range(self.stages) for op in (F, BX, BW, U)]
        sends = [(c.source, int(Op.SEND), c.target) for c in machine.channels]
        gradients = [(c.target, int(Op.SEND), c.source) for c in machine.channels]
        expected = np.array([*compute, *sends, *gradients, (0, int(Op.LOAD), -1)], dtype=np.int64)
        order = np.lexsort(expected.T[::-1])
        self._pattern = expected[order]
        self._position = np.argsort(order)  # where each expected row stands once a sample's rows are sorted
        self._pending = EMPTY

    def feed(self, rows: Trace) -> Records:
        """Take rows; return the samples that are complete with them.

        Raises
        ------
        MalformedTraceError : a sample has a row twice, or one that no sample should have, or an update stands under
            another sample than the first of its batch.
        """
        pending = Trace.concatenate(self._pending, rows if self.batches.size == 1 else self._shared(rows))
        samples, inverse, counts = np.unique(pending.sample, return_inverse=True, return_counts=True)
        complete = counts >= len(self._pattern)
        done = complete[inverse]
        self._pending, finished = pending[~done], pending[done]
        order = np.lexsort((finished.target, finished.op, finished.stage, finished.sample))
        finished = finished[order]
        shape = (int(complete.sum()), len(self._pattern))
        if len(finished) != shape[0] * shape[1]:
            raise MalformedTraceError(f"samples {samples[counts > len(self._pattern)]} have too many rows")
        found = np.stack([finished.stage, finished.op, finished.target], axis=1).reshape(*shape, 3)
        wrong = (found != self._pattern).any(axis=(1, 2))
        if wrong.any():
            raise MalformedTraceError(f"samples {samples[complete][wrong]} have not exactly one row of each kind")
        return self._dense(samples[complete], finished, shape)

    def finish(self) -> None:
        """The trace has ended; raises `MalformedTraceError` if a sample is incomplete."""
        if len(self._pending):
            raise MalformedTraceError(f"samples {np.unique(self._pending.sample)} are incomplete")

    def _shared(self, rows: Trace) -> Trace:
        """The rows, with an update for every sample that shares it."""
        updates, others = rows[rows.op == U], rows[rows.op != U]
        batch = self.batches.indices(updates.sample)
        first, length = self.batches.firsts(batch), self.batches.lengths(batch)
        wrong = (updates.sample != first) | (length < 1)
        if wrong.any():
            raise MalformedTraceError(f"updates of samples {updates.sample[wrong]}, which are not the first of a batch")
        copies = updates[np.repeat(np.arange(len(updates)), length)]
        within = np.arange(len(copies)) - np.repeat(np.cumsum(length) - length, length)
        return Trace.concatenate(others, replace(copies, sample=copies.sample + within))

    def _dense(self, samples: IntArray, rows: Trace, shape: tuple[int, int]) -> Records:
        start, end, version = (
            getattr(rows, name).reshape(shape)[:, self._position] for name in ("start", "end", "version")
        )
        k, compute, channels = shape[0], 4 * self.stages, len(self.channels)

        def by_stage(values: IntArray) -> IntArray:
            return values[:, :compute].reshape(k, self.stages, 4)

        def by_channel(values: IntArray) -> IntArray:
            return np.swapaxes(values[:, compute : compute + 2 * channels].reshape(k, 2, channels), 1, 2)

        return Records(
            samples,
            by_stage(start),
            by_stage(end),
            by_stage(version),
            end[:, -1],
            by_channel(start),
            by_channel(end),
        )
