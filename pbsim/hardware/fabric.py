"""The links between cores: which ones a message crosses, and when it may start.

Cores lie along a line, stage s beside s-1 and s+1, with one link in each direction between neighbours. A message
from stage s to stage t crosses the |t - s| links between them. It starts at the earliest cycle t at which each link
k of its path is free during [t + k*hop, t + k*hop + serialisation), and has arrived at t + hops*hop + serialisation.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from pbsim.config.hardware import Fabric
from pbsim.hardware.core import transfer_cycles


@dataclass(frozen=True)
class Route:
    """The way of a message from one stage to another, the same for every sample.

    A message that starts at cycle t holds its k-th link during [t + offsets[k], t + offsets[k] + serialisation), has
    left its core at t + serialisation, and has arrived at t + latency + serialisation.

    Attributes
    ----------
    size : bytes; a message of none is a token that only takes the latency.
    links : numbers of the links it crosses, in order.
    offsets : cycles from its start until its head is at each link.
    latency : cycles from its start until its head is at the target.
    serialisation : cycles that it holds each link.
    """

    source: int
    target: int
    size: int
    links: tuple[int, ...]
    offsets: tuple[int, ...]
    latency: int
    serialisation: int


def line_ends(cores: int) -> tuple[tuple[int, int], ...]:
    """The cores that each link of a line leads from and to: link 2s goes from s to s+1, link 2s+1 from s+1 to s."""
    return tuple(ends for core in range(cores - 1) for ends in ((core, core + 1), (core + 1, core)))


def line_route(fabric: Fabric, source: int, target: int, size: int) -> Route:
    """The route along a line of cores."""
    if source < target:
        links = tuple(2 * core for core in range(source, target))
    else:
        links = tuple(2 * core + 1 for core in range(source - 1, target - 1, -1))
    offsets = tuple(k * fabric.hop_cycles for k in range(len(links)))
    serialisation = transfer_cycles(size, fabric.link_bytes_per_cycle)
    return Route(source, target, size, links, offsets, len(links) * fabric.hop_cycles, serialisation)


class Links:
    """All links of the fabric, with their reservations and what they have carried.

    Attributes
    ----------
    ends : per directed link, the nodes it leads from and to.
    bytes, busy_cycles : per directed link, so far.
    """

    def __init__(self, ends: Sequence[tuple[int, int]]) -> None:
        self.ends = ends
        self.bytes = [0] * len(ends)
        self.busy_cycles = [0] * len(ends)
        self._reserved: list[list[tuple[int, int]]] = [[] for _ in ends]

    def admit(self, route: Route, ready: int) -> int:
        """Reserve a route for a message that is ready now; return the cycle at which it starts.

        Messages are to be admitted in the order of their ready cycles: reservations that ended before are
        forgotten.
        """
        start, hold = ready, route.serialisation
        if hold:
            start = self._earliest(route, ready)
            for link, offset in zip(route.links, route.offsets, strict=True):
                insort(self._reserved[link], (start + offset, start + offset + hold))
        self.carry(route)
        return start

    def carry(self, route: Route) -> None:
        """Count a message of a route."""
        for link in route.links:
            self.bytes[link] += route.size
            self.busy_cycles[link] += route.serialisation

    def _earliest(self, route: Route, ready: int) -> int:
        for link in route.links:
            reserved = self._reserved[link]
            while reserved and reserved[0][1] <= ready:
                reserved.pop(0)
        start, hold, moved = ready, route.serialisation, True
        while moved:
            moved = False
            for link, offset in zip(route.links, route.offsets, strict=True):
                for begin, end in self._reserved[link]:
                    if begin < start + offset + hold and start + offset < end:
                        start, moved = end - offset, True
        return start
