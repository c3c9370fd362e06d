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
    """Bytes per core and category: current and peak, with the peak of each core's and the machine's total.

    The total's peaks are the highest level at one time, not the sum of the categories' peaks.
    """

    def __init__(self, machine: Machine) -> None:
        self.current = [[0] * len(Category) for _ in machine.cores]
        self.peak = [[0] * len(Category) for _ in machine.cores]
        self.core_total = [0] * machine.stages
        self.core_peak = [0] * machine.stages
        self.machine_total = 0
        self.machine_peak = 0
        for core in machine.cores:
            self.add(core.stage, Category.WEIGHTS, core.memory.weights)
            self.add(core.stage, Category.MOMENTUM, core.memory.momentum)
            self.add(core.stage, Category.PREVIOUS_WEIGHTS, core.memory.previous_weights)

    def add(self, core: int, category: int, size: int) -> None:
        """Take `size` bytes (or give them back, where negative)."""
        current = self.current[core]
        level = current[category] = current[category] + size
        total = self.core_total[core] = self.core_total[core] + size
        self.machine_total += size
        if size > 0:
            if level > self.peak[core][category]:
                self.peak[core][category] = level
            if total > self.core_peak[core]:
                self.core_peak[core] = total
            if self.machine_total > self.machine_peak:
                self.machine_peak = self.machine_total

    def leftovers(self) -> list[tuple[int, Category, int]]:
        """What is held beyond weights and optimizer state, or missing: empty after a drain."""
        return [
            (core, category, current[category])
            for core, current in enumerate(self.current)
            for category in Category
            if (category not in PERMANENT and current[category]) or current[category] < 0
        ]
