"""The memory ledger: what every core holds, by category, with the highest level each has reached."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pbsim.compilation import compiled
from pbsim.hardware.machine import Machine

IntArray = NDArray[np.int64]


class Category(IntEnum):
    """What memory is used for."""

    WEIGHTS = 0
    MOMENTUM = 1
    PREVIOUS_WEIGHTS = 2
    WEIGHT_VERSIONS = 3
    STASH = 4
    INPUT_BUFFER = 5
    OUTPUT_BUFFER = 6
    GRADIENTS = 7

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name.lower()


NOTE = Struct("2q")
"""A note of a `Ledger`: two 64-bit numbers."""

PERMANENT = (Category.WEIGHTS, Category.MOMENTUM, Category.PREVIOUS_WEIGHTS)


class Booking(NamedTuple):
    """What some step of a core takes and gives back at once: its number in the ledger, and bytes in all."""

    number: int
    size: int


class Ledger:
    """Bytes per core and category: current, and the highest level that each, each core and the machine have held.

    A level counts once a cycle is over: what leaves and what comes within one cycle do not add up. The peak of a
    total is the highest level at one time, not the sum of the categories' peaks.

    Steps take and give back the same bytes for every sample, so they are agreed on once (`booking`). During a run the
    ledger only notes which came at which cycle, in any order; `settle` works out the levels.

    Attributes
    ----------
    notes : bookings that are not settled yet: packed by `NOTE`, the cycle and the booking's number.
    current, peak, peak_cycle : by core and category, as settled; the cycle is the first at whose end the peak was held.
    core_peak, core_peak_cycle, machine_peak : of the totals.
    """

    def __init__(self, machine: Machine) -> None:
        held = [[0] * len(Category) for _ in machine.cores]
        for core in machine.cores:
            for category in PERMANENT:
                held[core.stage][category] = getattr(core.memory, category.label)
        self.current, self.peak = held, [list(levels) for levels in held]
        self.peak_cycle = [[0] * len(Category) for _ in machine.cores]
        self.core_peak = [sum(levels) for levels in held]
        self.core_peak_cycle = [0] * machine.stages
        self.machine_peak = sum(self.core_peak)
        self.notes = bytearray()
        self._bookings: dict[tuple[int, tuple[int, ...]], Booking] = {}

    def booking(self, core: int, sizes: Mapping[Category, int]) -> Booking:
        """Agree on bytes that a core takes (or gives back, where negative) together."""
        row = tuple(sizes.get(category, 0) for category in Category)
        return self._bookings.setdefault((core, row), Booking(len(self._bookings), sum(row)))

    def note(self, cycle: int, booking: Booking) -> None:
        """A booking comes at a cycle."""
        self.notes += NOTE.pack(cycle, booking.number)

    def add(self, cycle: int, core: int, category: Category, size: int) -> None:
        """Take bytes of one category at a cycle, or give them back."""
        self.note(cycle, self.booking(core, {category: size}))

    def settle(self, before: int | None = None) -> None:
        """Work out the levels at the end of every cycle before this one, or of all: nothing else comes for them."""
        notes = np.frombuffer(bytes(self.notes), np.int64).reshape(-1, 2)
        over = notes[:, 0] < (np.iinfo(np.int64).max if before is None else before)
        self.notes[:] = notes[~over].tobytes()
        cycle, number = notes[over].T
        if not len(cycle):
            return
        order = np.argsort(cycle, kind="stable")
        cores, sizes = (np.array(column, np.int64) for column in zip(*self._bookings, strict=True))
        tables = (self.current, self.peak, self.peak_cycle, self.core_peak, self.core_peak_cycle)
        arrays = [np.array(table, np.int64) for table in tables]
        highest = _levels(cycle[order], number[order], cores, sizes, *arrays)
        self.current, self.peak, self.peak_cycle, self.core_peak, self.core_peak_cycle = (a.tolist() for a in arrays)
        self.machine_peak = max(self.machine_peak, int(highest))

    def leftovers(self) -> list[tuple[int, Category, int]]:
        """What is held beyond weights and optimizer state, or missing: empty after a drain."""
        self.settle()
        return [
            (core, category, current[category])
            for core, current in enumerate(self.current)
            for category in Category
            if (category not in PERMANENT and current[category]) or current[category] < 0
        ]


@compiled
def _levels(
    cycle: IntArray,
    number: IntArray,
    core_of: IntArray,
    sizes: IntArray,
    current: IntArray,
    peak: IntArray,
    peak_cycle: IntArray,
    core_peak: IntArray,
    core_peak_cycle: IntArray,
) -> int:
    """Carry out bookings that are sorted by cycle, and note what is held at the end of each; returns the most in all.

    Booking n changes what core core_of[n] holds by sizes[n, categories]; of current, peak and peak_cycle see `Ledger`.
    """
    total, machine, highest, first = current.sum(axis=1), current.sum(), 0, 0
    for i in range(len(cycle)):
        core, size = core_of[number[i]], sizes[number[i]]
        for category in range(len(size)):
            current[core, category] += size[category]
            total[core] += size[category]
            machine += size[category]
        if i + 1 < len(cycle) and cycle[i + 1] == cycle[i]:
            continue
        for k in range(first, i + 1):
            core = core_of[number[k]]
            for category in range(len(size)):
                if current[core, category] > peak[core, category]:
                    peak[core, category], peak_cycle[core, category] = current[core, category], cycle[i]
            if total[core] > core_peak[core]:
                core_peak[core], core_peak_cycle[core] = total[core], cycle[i]
        highest = max(highest, machine)
        first = i + 1
    return highest
