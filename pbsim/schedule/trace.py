"""The trace: what the timing plane hands to the numeric plane, and to whoever looks at a run.

A row is one operation of one sample at one stage (or one message): integer cycles, half-open. Rows come in chunks
while the simulation runs, so that neither plane ever holds a whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Op(IntEnum):
    """The operations of a trace; `label` is their name in `events.parquet`."""

    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2
    UPDATE = 3
    SEND = 4
    ALLREDUCE = 5
    LOAD = 6

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name.lower()


COMPUTE = (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.UPDATE)
ROW = Struct("7q")
"""A row as bytes: the values of `COLUMNS`."""
COLUMNS = ("start", "end", "stage", "op", "sample", "version", "target")
_START, _END, _SAMPLE, _VERSION = (COLUMNS.index(name) for name in ("start", "end", "sample", "version"))


@dataclass(frozen=True)
class Trace:
    """Rows of a trace, one int64 array per column.

    Attributes
    ----------
    start, end : cycles.
    stage : which stage (and core); for a message, its source; for a load from the host, the stage that gets it.
    op : an `Op`.
    sample : global index.
    version : for F the updates before it, for Bx and Bw the version read, for U the updates after it; else -1.
    target : for a message the stage it goes to; else -1.
    """

    start: IntArray
    end: IntArray
    stage: IntArray
    op: IntArray
    sample: IntArray
    version: IntArray
    target: IntArray

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, rows: NDArray[np.bool_] | IntArray | slice) -> Trace:
        return Trace(*(getattr(self, name)[rows] for name in COLUMNS))

    @classmethod
    def of(cls, rows: list[int]) -> Trace:
        """A trace from rows laid end to end."""
        table = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    @classmethod
    def concatenate(cls, *parts: Trace) -> Trace:
        """Rows of several traces, one after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS))

    @property
    def rows(self) -> IntArray:
        """All columns side by side, (n, columns)."""
        return np.stack([getattr(self, name) for name in COLUMNS], axis=1)

    def __str__(self) -> str:
        """A compact form for tests and messages: stage, letter, sample, @version, [start, end)."""
        letters = {Op.FORWARD: "F", Op.INPUT_GRADIENT: "I", Op.WEIGHT_GRADIENT: "W", Op.UPDATE: "U"}
        lines = []
        for row in np.lexsort((self.op, self.stage, self.start)):
            op = Op(self.op[row])
            what = letters.get(op, op.label)
            where = f">{self.target[row]}" if op is Op.SEND else f"@{self.version[row]}"
            lines.append(f"{self.stage[row]}{what}{self.sample[row]}{where} [{self.start[row]}, {self.end[row]})")
        return "\n".join(lines)


EMPTY = Trace.of([])


@dataclass(frozen=True)
class Chunk:
    """A piece of the trace.

    Attributes
    ----------
    rows : in no particular order.
    until : every row that starts before this cycle has been handed out by now.
    """

    rows: Trace
    until: int

    @classmethod
    def of(cls, rows: IntArray, until: int) -> Chunk:
        """A chunk of rows laid out as `COLUMNS`."""
        return cls(Trace(*(np.ascontiguousarray(column) for column in rows.T)), until)


@dataclass(frozen=True)
class Shift:
    """By how much a part of the trace lies behind the one it repeats."""

    cycles: int
    samples: int
    versions: int

    def __mul__(self, times: int) -> Shift:
        return Shift(self.cycles * times, self.samples * times, self.versions * times)

    def of(self, rows: IntArray) -> IntArray:
        """Rows moved by it."""
        if not self.cycles:
            return rows
        moved = rows.copy()
        moved[:, [_START, _END]] += self.cycles
        moved[:, _SAMPLE] += self.samples
        moved[:, _VERSION] += np.where(rows[:, _VERSION] >= 0, self.versions, 0)
        return moved
