"""Where the cores lie: rectangles of the mesh's PEs, and the rectangles that no core uses.

`uniform`: rectangles of equal shape in a grid. `balanced`: horizontal bands of equal height across the mesh, each
stage taking whole columns of its band. Both are filled like a snake, even bands from left to right and odd ones from
right to left, so that stage s is a neighbour of s-1 and s+1. Or the rectangles are written down by the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pbsim.config.hardware import Mesh
from pbsim.errors import Problem, UserError


@dataclass(frozen=True, order=True)
class Region:
    """A rectangle of PEs: rows [row, row + rows) and columns [col, col + cols) of the mesh."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def pes(self) -> int:
        """How many PEs it has."""
        return self.rows * self.cols

    @property
    def end_row(self) -> int:
        """The first row below it."""
        return self.row + self.rows

    @property
    def end_col(self) -> int:
        """The first column to its right."""
        return self.col + self.cols

    @property
    def centre(self) -> tuple[int, int]:
        """Row and column of its middle PE (of two, the upper or left one)."""
        return self.row + (self.rows - 1) // 2, self.col + (self.cols - 1) // 2

    def contains(self, row: int, col: int) -> bool:
        """Whether a PE is in it."""
        return self.row <= row < self.end_row and self.col <= col < self.end_col

    def __str__(self) -> str:
        return f"[{self.row}, {self.col}, {self.rows}, {self.cols}]"


def uniform_shape(mesh: Mesh, pes: int) -> tuple[int, int]:
    """Rows and columns of cores of exactly `pes` PEs: the shape of which most fit, then the most square, then wide.

    (0, 0) where no such rectangle fits.
    """
    shapes = [(rows, pes // rows) for rows in range(1, min(pes, mesh.rows) + 1) if pes % rows == 0]
    fitting = [shape for shape in shapes if shape[1] <= mesh.cols]

    def preference(shape: tuple[int, int]) -> tuple[int, int, int]:
        rows, cols = shape
        return grid_cores(mesh, shape), -abs(rows - cols), cols

    return max(fitting, key=preference, default=(0, 0))


def grid_cores(mesh: Mesh, shape: tuple[int, int]) -> int:
    """How many cores of a shape the mesh holds."""
    rows, cols = shape
    return (mesh.rows // rows) * (mesh.cols // cols) if rows else 0


def uniform_regions(mesh: Mesh, shape: tuple[int, int], count: int) -> list[Region]:
    """A grid of equal cores, filled like a snake."""
    rows, cols = shape
    across = mesh.cols // cols
    regions = []
    for core in range(count):
        band, place = divmod(core, across)
        place = place if band % 2 == 0 else across - 1 - place
        regions.append(Region(band * rows, place * cols, rows, cols))
    return regions


def band_heights(mesh: Mesh) -> list[int]:
    """The heights of bands worth trying: for every number of bands the greatest."""
    return sorted({mesh.rows // bands for bands in range(1, mesh.rows + 1)})


def bands_needed(mesh: Mesh, height: int, pes: Sequence[int]) -> int:
    """How many bands of a height the stages fill.

    A stage takes ceil(PEs / height) columns, and opens the next band where it does not fit into what is left of the
    current one (next-fit: fewer PEs never need more bands). No stage may be wider than the mesh.
    """
    bands, used = 1, 0
    for count in pes:
        width = -(-count // height)
        used += width
        if used > mesh.cols:
            bands, used = bands + 1, width
    return bands


def fits(mesh: Mesh, height: int, pes: Sequence[int]) -> bool:
    """Whether the mesh holds stages of so many PEs in bands of a height."""
    return (
        sum(pes) <= mesh.pes
        and max(pes) <= height * mesh.cols
        and bands_needed(mesh, height, pes) <= mesh.rows // height
    )


def banded_regions(mesh: Mesh, height: int, pes: Sequence[int]) -> list[Region]:
    """Stages in bands, filled like a snake; the last stage of a band takes what is left of it, so none has a gap."""
    bands: list[list[int]] = [[]]
    for count in pes:
        width = -(-count // height)
        if sum(bands[-1]) + width > mesh.cols:
            bands[-1][-1] += mesh.cols - sum(bands[-1])
            bands.append([])
        bands[-1].append(width)
    regions = []
    for band, widths in enumerate(bands):
        begin = 0
        for width in widths:
            col = begin if band % 2 == 0 else mesh.cols - begin - width
            regions.append(Region(band * height, col, height, width))
            begin += width
    return regions


def listed_regions(mesh: Mesh, entries: Sequence[Any], stages: int, where: str, key: str) -> list[Region]:
    """The rectangles that a user wrote down, `[row, col, rows, cols]` for each stage in order.

    Raises
    ------
    UserError : every entry that is malformed, outside of the mesh (by how much) or on another one, and a wrong count.
    """
    problems = []
    regions: dict[int, Region] = {}
    for index, entry in enumerate(entries):
        if not _is_region(entry):
            shape = "should be [row, col, rows, cols]: whole numbers, row and col from 0, rows and cols from 1"
            problems.append(Problem(where, f"{key}[{index}]", repr(entry), shape))
            continue
        region = regions[index] = Region(*entry)
        beyond = _beyond(mesh, region)
        if beyond:
            outside = f"reaches {beyond} beyond the mesh of {mesh.rows} x {mesh.cols} PEs"
            problems.append(Problem(where, f"{key}[{index}]", str(region), outside))
        other = next((i for i in regions if i != index and _shared_pes(regions[i], region)), None)
        if other is not None:
            overlap = (
                f"overlaps {key}[{other}] = {regions[other]} on {counted(_shared_pes(regions[other], region), 'PE')}"
            )
            problems.append(Problem(where, f"{key}[{index}]", str(region), overlap))
    if len(entries) != stages:
        count = f"should be one for each of the network's {stages} stages: {_difference(len(entries), stages)}"
        problems.append(Problem(where, key, counted(len(entries), "region"), count))
    if problems:
        raise UserError(problems)
    return list(regions.values())


def _is_region(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and all(type(number) is int and number >= least for number, least in zip(entry, (0, 0, 1, 1), strict=True))
    )


def _beyond(mesh: Mesh, region: Region) -> str:
    rows, cols = max(0, region.end_row - mesh.rows), max(0, region.end_col - mesh.cols)
    return " and ".join(counted(count, unit) for count, unit in ((rows, "row"), (cols, "column")) if count)


def counted(count: int, noun: str) -> str:
    """A number of things in words."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _shared_pes(one: Region, other: Region) -> int:
    rows = min(one.end_row, other.end_row) - max(one.row, other.row)
    cols = min(one.end_col, other.end_col) - max(one.col, other.col)
    return max(0, rows) * max(0, cols)


def _difference(given: int, wanted: int) -> str:
    return f"{given - wanted} too many" if given > wanted else f"{wanted - given} missing"


def spare_regions(mesh: Mesh, cores: Sequence[Region]) -> list[Region]:
    """The PEs that no core uses, as rectangles from the top down and from left to right.

    Every row's free runs of columns; a run that lies below one of the same columns joins it.
    """
    spares = []
    growing: dict[tuple[int, int], int] = {}  # by columns, the row at which a spare rectangle began
    edges = sorted({0, mesh.rows, *(edge for core in cores for edge in (core.row, core.end_row))})
    for row in edges[:-1]:  # between edges all rows look alike
        runs = _free_runs(mesh, [core for core in cores if core.row <= row < core.end_row])
        spares += [_column(begin, row, run) for run, begin in growing.items() if run not in runs]
        growing = {run: growing.get(run, row) for run in runs}
    spares += [_column(begin, mesh.rows, run) for run, begin in growing.items()]
    return sorted(spares)


def _free_runs(mesh: Mesh, cores: Sequence[Region]) -> list[tuple[int, int]]:
    """The runs of columns [begin, end) between the cores of a row."""
    taken = [(-1, 0), *sorted((core.col, core.end_col) for core in cores), (mesh.cols, mesh.cols)]
    return [(end, begin) for (_, end), (begin, _) in pairwise(taken) if begin > end]


def _column(begin_row: int, end_row: int, run: tuple[int, int]) -> Region:
    begin, end = run
    return Region(begin_row, begin, end_row - begin_row, end - begin)
