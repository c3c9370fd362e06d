"""The links between cores: which ones a message crosses, and when it may start.

The mesh's PEs each have a wire to and from their four neighbours. The *nodes* of the fabric are rectangles of PEs: the
cores, and those that no core uses. A *link* leads from a node to a neighbouring one and bundles the wires across their
common edge: its rate is `wires * link_bytes_per_cycle`.

A message walks XY from PE to PE: from the centre of its source along the row until it is in a column of its target,
then along that column until it is inside, in `hop_cycles` per step. Where the walk passes from one node to the next it
takes their link, `offset` cycles after its start: `hop_cycles` for every step before. It streams at the rate of the
narrowest link on its way and holds each of them so long (its *serialisation*): it starts at the earliest cycle t at
which every link is free during [t + offset, t + offset + serialisation), and has arrived at t + steps * hop_cycles +
serialisation. Between cores of one PE a step is a link: the k-th is taken at t + k * hop_cycles.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pbsim.config.hardware import Fabric
from pbsim.hardware.core import transfer_cycles
from pbsim.hardware.placement import Region


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
    steps : steps from PE to PE that it takes.
    latency : cycles from its start until its head is at the target.
    serialisation : cycles that it holds each link.
    """

    source: int
    target: int
    size: int
    links: tuple[int, ...]
    offsets: tuple[int, ...]
    steps: int
    latency: int
    serialisation: int

    @cached_property
    def crossings(self) -> tuple[tuple[int, int], ...]:
        """Each link with its offset."""
        return tuple(zip(self.links, self.offsets, strict=True))


@dataclass(frozen=True)
class Wiring:
    """The links that messages use, and every message's route.

    Attributes
    ----------
    nodes : rectangles of PEs: the cores, then those that no core uses, which only pass messages on.
    ends : per directed link, the nodes it leads from and to; in their order.
    wires : per directed link, how many PE-to-PE links it bundles.
    routes : one per message, as they were given.
    """

    nodes: tuple[Region, ...]
    ends: tuple[tuple[int, int], ...]
    wires: tuple[int, ...]
    routes: tuple[Route, ...]

    @property
    def busiest_cycles(self) -> int:
        """For how long one of each message holds the busiest link."""
        busy = [0] * len(self.ends)
        for route in self.routes:
            for link in route.links:
                busy[link] += route.serialisation
        return max(busy, default=0)


Message = tuple[int, int, int]
"""Source stage, target stage, bytes."""


def wire(fabric: Fabric, nodes: Sequence[Region], messages: Sequence[Message]) -> Wiring:
    """Find the route of every message, and number the links that are on some route."""
    walks = [walk(nodes, source, target) for source, target, _ in messages]
    ends = sorted({crossing.ends for crossings, _ in walks for crossing in crossings})
    number = {pair: link for link, pair in enumerate(ends)}
    wires = [common_edge(nodes[source], nodes[target]) for source, target in ends]
    routes = []
    for (source, target, size), (crossings, steps) in zip(messages, walks, strict=True):
        links = tuple(number[crossing.ends] for crossing in crossings)
        routes.append(
            Route(
                source,
                target,
                size,
                links,
                offsets=tuple(fabric.hop_cycles * crossing.steps for crossing in crossings),
                steps=steps,
                latency=fabric.hop_cycles * steps,
                serialisation=transfer_cycles(size, fabric.link_bytes_per_cycle * min(wires[link] for link in links)),
            )
        )
    return Wiring(tuple(nodes), tuple(ends), tuple(wires), tuple(routes))


@dataclass(frozen=True)
class Crossing:
    """Where a walk passes from one node to the next, and how many steps it has made before."""

    ends: tuple[int, int]
    steps: int


def walk(nodes: Sequence[Region], source: int, target: int) -> tuple[list[Crossing], int]:
    """The way of a message, XY: its crossings from node to node, and the steps from PE to PE that it takes in all.

    From the source's centre along its row, until in a column of the target; then along that column, until inside.
    """
    goal, (row, col) = nodes[target], nodes[source].centre
    node, steps, crossings = source, 0, []
    while node != target:
        here = nodes[node]
        if not goal.col <= col < goal.end_col:
            ahead = 1 if col < goal.col else -1
            inside = here.end_col - 1 - col if ahead > 0 else col - here.col
            turn = goal.col - col if ahead > 0 else col - (goal.end_col - 1)
            straight = min(turn, inside + 1)
            col += ahead * straight
        else:
            ahead = 1 if row < goal.row else -1
            inside = here.end_row - 1 - row if ahead > 0 else row - here.row
            straight = inside + 1
            row += ahead * straight
        if straight > inside:
            following = next(index for index, region in enumerate(nodes) if region.contains(row, col))
            crossings.append(Crossing((node, following), steps + inside))
            node = following
        steps += straight
    return crossings, steps


def common_edge(one: Region, other: Region) -> int:
    """The length of the edge that two neighbours share, in PEs."""
    rows = min(one.end_row, other.end_row) - max(one.row, other.row)
    cols = min(one.end_col, other.end_col) - max(one.col, other.col)
    return max(rows, cols)  # of rectangles that touch along an edge one is positive, the other zero


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
        self._free_at = [0] * len(ends)
        self._reserved: list[list[tuple[int, int]]] = [[] for _ in ends]

    def admit(self, route: Route, ready: int) -> int:
        """Reserve a route for a message that is ready now; return the cycle at which it starts.

        Messages are to be admitted in the order of their ready cycles: reservations that ended before are
        forgotten.
        """
        start, hold = ready, route.serialisation
        if not hold:
            return start
        free = True
        for link, offset in route.crossings:
            reserved = self._reserved[link]
            while reserved and reserved[0][1] <= ready:
                reserved.pop(0)
            if reserved and reserved[-1][1] > ready + offset:
                free = False
        if not free:
            start = self._earliest(route, ready)
        for link, offset in route.crossings:
            insort(self._reserved[link], (start + offset, start + offset + hold))
        return start

    def carry(self, route: Route, messages: int = 1) -> None:
        """Count messages of a route."""
        for link in route.links:
            self.bytes[link] += messages * route.size
            self.busy_cycles[link] += messages * route.serialisation

    def _earliest(self, route: Route, ready: int) -> int:
        start, hold, moved = ready, route.serialisation, True
        while moved:
            moved = False
            for link, offset in route.crossings:
                for begin, end in self._reserved[link]:
                    if begin < start + offset + hold and start + offset < end:
                        start, moved = end - offset, True
        return start
