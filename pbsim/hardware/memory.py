"""The memory ledger: what every core holds, by category, with the highest level each has reached."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pbsim.hardware.machine import Machine


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
    notes : cycle and number of bookings that are not settled yet, one after the other.
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
        self.notes: list[int] = []
        self._bookings: dict[tuple[int, tuple[int, ...]], Booking] = {}

    def booking(self, core: int, sizes: Mapping[Category, int]) -> Booking:
        """Agree on bytes that a core takes (or gives back, where negative) together."""
        row = tuple(sizes.get(category, 0) for category in Category)
        return self._bookings.setdefault((core, row), Booking(len(self._bookings), sum(row)))

    def add(self, cycle: int, core: int, category: Category, size: int) -> None:
        """Take bytes of one category at a cycle, or give them back."""
        self.notes.extend((cycle, self.booking(core, {category: size}).number))

    def settle(self, before: int | None = None) -> None:
        """Work out the levels at the end of every cycle before this one, or of all: nothing else comes for them."""
        cycle, number = np.array(self.notes, np.int64).reshape(-1, 2).T
        over = np.full(len(cycle), True) if before is None else cycle < before
        self.notes[:] = np.stack([cycle[~over], number[~over]], axis=1).ravel().tolist()
        if not over.any():
            return
        order = np.argsort(cycle[over], kind="stable")
        cycle, number = cycle[over][order], number[over][order]
        cores = np.array([core for core, _ in self._bookings])[number]
        sizes = np.array([row for _, row in self._bookings])[number]
        machine = sum(map(sum, self.current)) + np.cumsum(sizes.sum(axis=1))
        self.machine_peak = max(self.machine_peak, int(machine[_ends(cycle)].max()))
        by_core = np.argsort(cores, kind="stable")
        for rows in np.split(by_core, _ends(cores[by_core])[:-1] + 1):
            self._settle_core(int(cores[rows[0]]), cycle[rows], sizes[rows])

    def _settle_core(self, core: int, cycle: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        ends = _ends(cycle)
        levels = (self.current[core] + np.cumsum(sizes, axis=0))[ends]
        self.current[core] = levels[-1].tolist()
        for category, at in enumerate(levels.argmax(axis=0)):  # the first of equal ones
            if levels[at, category] > self.peak[core][category]:
                self.peak[core][category] = int(levels[at, category])
                self.peak_cycle[core][category] = int(cycle[ends[at]])
        totals = levels.sum(axis=1)
        at = totals.argmax()
        if totals[at] > self.core_peak[core]:
            self.core_peak[core], self.core_peak_cycle[core] = int(totals[at]), int(cycle[ends[at]])

    def leftovers(self) -> list[tuple[int, Category, int]]:
        """What is held beyond weights and optimizer state, or missing: empty after a drain."""
        self.settle()
        return [
            (core, category, current[category])
            for core, current in enumerate(self.current)
            for category in Category
            if (category not in PERMANENT and current[category]) or current[category] < 0
        ]


def _ends(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in a sorted array the last one of each value is."""
    return np.flatnonzero(np.append(values[1:] != values[:-1], True))
