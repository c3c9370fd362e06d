"""The memory ledger: what every core holds, by category, with the highest level each has reached."""

from __future__ import annotations

from enum import IntEnum

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


class Ledger:
    """Bytes per core and category: current, and the highest level that each, each core and the machine have held.

    A level counts once a cycle is over: what leaves and what comes within one cycle do not add up. The peak of a
    total is the highest level at one time, not the sum of the categories' peaks.

    Attributes
    ----------
    current, peak, peak_cycle : by core and category; the cycle is the first at whose end the peak was held.
    core_peak, core_peak_cycle, machine_peak : of the totals.
    """

    def __init__(self, machine: Machine) -> None:
        self.current = [[0] * len(Category) for _ in machine.cores]
        self.peak = [[0] * len(Category) for _ in machine.cores]
        self.peak_cycle = [[0] * len(Category) for _ in machine.cores]
        self.core_peak = [0] * machine.stages
        self.core_peak_cycle = [0] * machine.stages
        self.machine_peak = 0
        self._core_total = [0] * machine.stages
        self._machine_total = 0
        self._cycle = 0
        self._grown: list[tuple[int, int]] = []
        for core in machine.cores:
            self.add(0, core.stage, Category.WEIGHTS, core.memory.weights)
            self.add(0, core.stage, Category.MOMENTUM, core.memory.momentum)
            self.add(0, core.stage, Category.PREVIOUS_WEIGHTS, core.memory.previous_weights)

    def add(self, cycle: int, core: int, category: int, size: int) -> None:
        """Take `size` bytes at a cycle (or give them back, where negative); cycles never go back."""
        if cycle != self._cycle:
            self.settle()
            self._cycle = cycle
        if size:
            self.current[core][category] += size
            self._core_total[core] += size
            self._machine_total += size
            if size > 0:
                self._grown.append((core, category))

    def level(self, core: int) -> int:
        """All that a core holds now."""
        return self._core_total[core]

    def settle(self) -> None:
        """The cycle is over: note the levels of what has grown in it."""
        for core, category in self._grown:
            level = self.current[core][category]
            if level > self.peak[core][category]:
                self.peak[core][category], self.peak_cycle[core][category] = level, self._cycle
            if self._core_total[core] > self.core_peak[core]:
                self.core_peak[core], self.core_peak_cycle[core] = self._core_total[core], self._cycle
        if self._machine_total > self.machine_peak:
            self.machine_peak = self._machine_total
        self._grown.clear()

    def leftovers(self) -> list[tuple[int, Category, int]]:
        """What is held beyond weights and optimizer state, or missing: empty after a drain."""
        return [
            (core, category, current[category])
            for core, current in enumerate(self.current)
            for category in Category
            if (category not in PERMANENT and current[category]) or current[category] < 0
        ]
