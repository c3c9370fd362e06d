"""The links between cores: which ones a message crosses, and when it may start.

Cores lie along a line, stage s beside s-1 and s+1, with one link in each direction between neighbours. A message
from stage s to stage t crosses the |t - s| links between them. It starts at the earliest cycle t at which each link
k of its path is free during [t + k*hop, t + k*hop + serialisation), and has arrived at t + hops*hop + serialisation.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from pbsim.config.hardware import Fabric
from pbsim.hardware.core import transfer_cycles


class Links:
    """All links of a line of cores, with their reservations and what they have carried.

    Attributes
    ----------
    bytes, busy_cycles : per directed link, so far; link 2s goes from s to s+1, link 2s+1 from s+1 to s.
    """

    def __init__(self, fabric: Fabric, cores: int) -> None:
        self.fabric = fabric
        self.hop_cycles = fabric.hop_cycles
        self.bytes = [0] * (2 * (cores - 1))
        self.busy_cycles = [0] * (2 * (cores - 1))
        self._reserved: list[list[tuple[int, int]]] = [[] for _ in self.bytes]

    @staticmethod
    def path(source: int, target: int) -> tuple[int, ...]:
        """The links from one core to another, in order."""
        if source < target:
            return tuple(2 * core for core in range(source, target))
        return tuple(2 * core + 1 for core in range(source - 1, target - 1, -1))

    @staticmethod
    def ends(link: int) -> tuple[int, int]:
        """The cores a link leads from and to."""
        core, backward = divmod(link, 2)
        return (core + 1, core) if backward else (core, core + 1)

    def serialisation(self, size_bytes: int) -> int:
        """Cycles that a message holds each link of its path."""
        return transfer_cycles(size_bytes, self.fabric.link_bytes_per_cycle)

    def admit(self, path: Sequence[int], ready: int, serialisation: int, size_bytes: int) -> int:
        """Reserve a path for a message that is ready now; return the cycle at which it starts.

        Messages are to be admitted in the order of their ready cycles: reservations that ended before are
        forgotten.
        """
        start = ready
        if serialisation:
            start = self._earliest(path, ready, serialisation)
            for k, link in enumerate(path):
                at = start + k * self.hop_cycles
                insort(self._reserved[link], (at, at + serialisation))
        for link in path:
            self.bytes[link] += size_bytes
            self.busy_cycles[link] += serialisation
        return start

    def _earliest(self, path: Sequence[int], ready: int, serialisation: int) -> int:
        for link in path:
            reserved = self._reserved[link]
            while reserved and reserved[0][1] <= ready:
                reserved.pop(0)
        start, moved = ready, True
        while moved:
            moved = False
            for k, link in enumerate(path):
                if not self._reserved[link]:
                    continue
                offset = k * self.hop_cycles
                for begin, end in self._reserved[link]:
                    if begin < start + offset + serialisation and start + offset < end:
                        start, moved = end - offset, True
        return start
