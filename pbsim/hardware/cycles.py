"""Cycles as the sum of their terms, and what an operation costs besides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cycles:
    """A number of cycles as the sum of its terms.

    Attributes
    ----------
    compute : in which MACs are issued (on a systolic array: from the first operand to the last result).
    vector : in which the vector lanes work.
    sram : that the SRAM needs beyond these, where operands do not arrive fast enough.
    overhead : of starting instructions, and what fills an operation up to its least length.
    """

    compute: int = 0
    vector: int = 0
    sram: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        """All terms together."""
        return self.compute + self.vector + self.sram + self.overhead

    @property
    def largest(self) -> str:
        """The name of the largest term, the first of equals; `none` if there are no cycles."""
        terms = {"compute": self.compute, "vector": self.vector, "sram": self.sram, "overhead": self.overhead}
        return max(terms, key=terms.__getitem__) if self.total else "none"


@dataclass(frozen=True)
class Cost:
    """What one operation of a stage costs for one sample.

    Attributes
    ----------
    cycles : how long it takes, term by term.
    bound_by : the same cycles by what sets their number: all cycles of an operator whose SRAM traffic outlasts its
        arithmetic count as `sram`.
    macs, vector_operations : what it computes.
    sram_bytes : what it reads and writes.
    """

    cycles: Cycles = Cycles()
    bound_by: Cycles = Cycles()
    macs: int = 0
    vector_operations: int = 0
    sram_bytes: int = 0

    @property
    def total(self) -> int:
        """Its cycles."""
        return self.cycles.total

    @property
    def bound(self) -> str:
        """What most of its cycles are due to: compute, vector, sram or overhead; `none` if it takes none."""
        return self.bound_by.largest

    def at_least(self, minimum: int) -> Cost:
        """The same, padded with overhead to a minimum of cycles."""
        missing = minimum - self.total
        if missing <= 0:
            return self
        cycles, bound_by = (replace(c, overhead=c.overhead + missing) for c in (self.cycles, self.bound_by))
        return replace(self, cycles=cycles, bound_by=bound_by)


def ceil_div(amount: int, per_cycle: int) -> int:
    """Whole cycles for an amount at an integer rate."""
    return -(-amount // per_cycle)


def transfer_cycles(amount_bytes: int, bytes_per_cycle: float) -> int:
    """Whole cycles to move bytes at a rate; none at an infinite rate."""
    return math.ceil(amount_bytes / bytes_per_cycle)
