"""The datapaths that a core may have: how many cycles, and how much SRAM traffic, a load takes on each.

`DATAPATHS` is where a datapath registers, under the `kind` of its table in the hardware file (`pbsim.config.hardware`).
All of them pass the one conformance test in `tests/test_datapaths.py`. On P PEs:

vector
    Every PE issues vector multiply-accumulates.

    ========  =============================================================================================
    compute   ceil(MACs / (P macs_per_cycle))
    vector    ceil(vector operations / (P vector_lanes))
    overhead  instructions * overhead_cycles; a matrix load takes an instruction per product, an elementwise load
              takes one, and both take ceil(MACs or operations / (P vector_length)) where that is more
    traffic   operands and results once, or sram_elements_per_mac * MACs where that is more
    ========  =============================================================================================

systolic
    Every PE is an array of R rows by C columns, and products are cut into folds of its size. With (Sr, Sc, T) the
    extents along rows, columns and time of a product M x K x N (HARDWARE.md 1.1; SCALE-Sim's, exactly),

    ========  ==  ==  ==  ================  ============================================================
    dataflow  Sr  Sc  T   cycles of a fold  SRAM elements of a product, with r = ceil(Sr/R), c = ceil(Sc/C)
    ========  ==  ==  ==  ================  ============================================================
    os        M   N   K   T + R + C - 2     M K c + K N r streamed, M N results
    ws        K   N   M   T + 2R + C - 2    K N loaded, M K c streamed, M N (2r - 1) partial sums
    is        K   M   N   T + 2R + C - 2    K M loaded, K N c streamed, M N (2r - 1) partial sums
    ========  ==  ==  ==  ================  ============================================================

    compute = sum over products of ceil(r c count / P) * cycles of a fold: folds are shared out over the arrays, and
    each drains before the next begins. Partial sums of r folds along K are written r times and read back r - 1 times.
    Elementwise loads run on the vector lanes, as above, without overhead.

    `weights = "resident"` leaves the layer's weights in the cells, which then keep those of every fold they serve: the
    R cycles and the traffic of loading are gone where the operand held still is the weights, in F and Bx of `ws`. It
    changes nothing elsewhere: Bw of `ws` holds the output's gradient, `is` inputs or gradients, `os` nothing.

unit
    Every operation takes its fixed cycles, whatever it computes.

What the SRAM adds is the same for all but `unit`: what is left of ceil(bytes / (P sram_bytes_per_cycle)) beyond
compute + vector of the same load.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from pbsim.config.hardware import Core, SystolicDatapath, UnitDatapath, VectorDatapath
from pbsim.hardware.cycles import Cost, Cycles, ceil_div, transfer_cycles
from pbsim.hardware.gemm import Gemm
from pbsim.hardware.loads import Load


class Demand(NamedTuple):
    """What a load takes on a datapath: cycles of its terms, and elements read from and written to SRAM."""

    compute: int
    vector: int
    overhead: int
    elements: int


class Datapath(ABC):
    """A datapath: it says what a load demands; cycles of the SRAM and sums over loads follow."""

    @abstractmethod
    def demand(self, core: Core, load: Load, pes: int) -> Demand:
        """What a load takes on `pes` PEs."""

    @abstractmethod
    def peak_macs_per_cycle(self, core: Core, pes: int) -> int:
        """The most MACs that `pes` PEs issue in a cycle; 0 if there is no such number."""

    def cost(self, core: Core, operation: str, loads: tuple[Load, ...], pes: int, element_bytes: int) -> Cost:
        """What an operation takes: the sum over its loads, one after the other.

        `operation` is `forward`, `input_gradient`, `weight_gradient` or `update`.
        """
        compute = vector = sram = overhead = traffic = macs = operations = 0
        compute_bound = vector_bound = sram_bound = 0
        rate = pes * core.sram_bytes_per_cycle
        for load in loads:
            one = self.demand(core, load, pes)
            moved = one.elements * element_bytes
            busy = one.compute + one.vector
            waiting = max(0, transfer_cycles(moved, rate) - busy)
            if waiting:
                sram_bound += busy + waiting
            else:
                compute_bound, vector_bound = compute_bound + one.compute, vector_bound + one.vector
            compute, vector, sram = compute + one.compute, vector + one.vector, sram + waiting
            overhead, traffic = overhead + one.overhead, traffic + moved
            macs, operations = macs + load.macs, operations + load.vector
        return Cost(
            Cycles(compute, vector, sram, overhead),
            Cycles(compute_bound, vector_bound, sram_bound, overhead),
            macs,
            operations,
            traffic,
        )


class Vector(Datapath):
    """Vector multiply-accumulates on every PE."""

    def demand(self, core: Core, load: Load, pes: int) -> Demand:
        """Closed forms of the module's table."""
        datapath = core.datapath
        assert isinstance(datapath, VectorDatapath)
        compute = ceil_div(load.macs, pes * datapath.macs_per_cycle)
        vector = ceil_div(load.vector, pes * core.vector_lanes)
        instructions = max(1, len(load.gemms))
        if datapath.vector_length is not None:
            instructions = max(instructions, ceil_div(load.macs + load.vector, pes * datapath.vector_length))
        elements = load.elements
        if datapath.sram_elements_per_mac is not None:
            elements = max(elements, math.ceil(datapath.sram_elements_per_mac * load.macs))
        return Demand(compute, vector, instructions * datapath.overhead_cycles, elements)

    def peak_macs_per_cycle(self, core: Core, pes: int) -> int:
        """P macs_per_cycle."""
        assert isinstance(core.datapath, VectorDatapath)
        return pes * core.datapath.macs_per_cycle


@dataclass(frozen=True)
class Folds:
    """How a product is folded onto arrays.

    Attributes
    ----------
    count : folds of all its repetitions.
    cycles : of one fold, until its last result has left.
    elements : read from and written to SRAM over all folds.
    """

    count: int
    cycles: int
    elements: int


def fold(datapath: SystolicDatapath, gemm: Gemm) -> Folds:
    """Fold a product onto arrays (the module's table)."""
    rows, cols, (m, k, n) = datapath.rows, datapath.cols, (gemm.m, gemm.k, gemm.n)
    fill = rows + cols - 2
    if datapath.dataflow == "os":
        r, c = ceil_div(m, rows), ceil_div(n, cols)
        return Folds(gemm.count * r * c, k + fill, gemm.count * (m * k * c + k * n * r + m * n))
    in_time, across = (m, n) if datapath.dataflow == "ws" else (n, m)
    resident = datapath.dataflow == "ws" and datapath.weights == "resident" and gemm.weights
    r, c = ceil_div(k, rows), ceil_div(across, cols)
    loaded = 0 if resident else k * across
    cycles = in_time + fill + (0 if resident else rows)
    return Folds(gemm.count * r * c, cycles, gemm.count * (loaded + in_time * k * c + m * n * (2 * r - 1)))


class Systolic(Datapath):
    """A systolic array in every PE."""

    def demand(self, core: Core, load: Load, pes: int) -> Demand:
        """Folds of the load's products, shared out over the arrays; elementwise loads on the vector lanes."""
        datapath = core.datapath
        assert isinstance(datapath, SystolicDatapath)
        if not load.gemms:
            return Demand(0, ceil_div(load.vector, pes * core.vector_lanes), 0, load.elements)
        folded = [fold(datapath, gemm) for gemm in load.gemms]
        compute = sum(ceil_div(folds.count, pes) * folds.cycles for folds in folded)
        return Demand(compute, 0, 0, sum(folds.elements for folds in folded))

    def peak_macs_per_cycle(self, core: Core, pes: int) -> int:
        """P R C."""
        assert isinstance(core.datapath, SystolicDatapath)
        return pes * core.datapath.rows * core.datapath.cols


class Unit(Datapath):
    """Fixed cycles per operation: no term but compute."""

    def demand(self, core: Core, load: Load, pes: int) -> Demand:
        """Operands and results once; the cycles are the operation's, not the load's."""
        return Demand(0, 0, 0, load.elements)

    def peak_macs_per_cycle(self, core: Core, pes: int) -> int:
        """There is none."""
        return 0

    def cost(self, core: Core, operation: str, loads: tuple[Load, ...], pes: int, element_bytes: int) -> Cost:
        """The operation's fixed cycles."""
        assert isinstance(core.datapath, UnitDatapath)
        cycles = Cycles(compute=getattr(core.datapath, f"{operation}_cycles"))
        macs, operations = sum(load.macs for load in loads), sum(load.vector for load in loads)
        return Cost(cycles, cycles, macs, operations, element_bytes * sum(load.elements for load in loads))


DATAPATHS: Mapping[str, Datapath] = MappingProxyType({"vector": Vector(), "systolic": Systolic(), "unit": Unit()})
"""By the kind in the hardware file; a new datapath is a table there and an entry here."""
