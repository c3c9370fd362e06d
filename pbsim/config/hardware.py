"""The hardware file: the machine a network is trained on (one class per TOML table)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pbsim.config.base import Count, Cycles, Name, NonNegative, Positive, Rate, Table

Side = Annotated[int, Field(ge=1, le=2**16)]
Clock = Annotated[Positive, Field(ge=1e-6, le=1e6)]
SramKib = Annotated[Positive, Field(le=2**20)]

DATATYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Mesh(Table):
    """The array of processing elements (PEs) that the cores are cut from."""

    rows: Side
    """Rows of PEs."""
    cols: Side
    """Columns of PEs."""

    @property
    def pes(self) -> int:
        """All PEs of the mesh."""
        return self.rows * self.cols


class VectorDatapath(Table):
    """A PE that issues vector multiply-accumulates: `ceil(MACs / (PEs * macs_per_cycle))` cycles per operator."""

    kind: Literal["vector"]
    macs_per_cycle: Count
    """MACs per cycle and PE."""
    overhead_cycles: Cycles = 0
    """Cycles to start one operator on a core."""


class UnitDatapath(Table):
    """Every stage takes the same time, whatever it computes: the machine of the papers' closed forms."""

    kind: Literal["unit"]
    forward_cycles: Count
    input_gradient_cycles: Count
    weight_gradient_cycles: Count
    update_cycles: Count


class Core(Table):
    """One core: the hardware that serves one stage."""

    pes: Count = 1
    """PEs per core under `uniform` allocation; `balanced` shares out the mesh and does not read it."""
    datapath: Annotated[VectorDatapath | UnitDatapath, Field(discriminator="kind")]
    vector_lanes: Count = 1
    """Elementwise operations per cycle and PE."""
    sram_kib: SramKib
    """SRAM per PE, in KiB."""
    sram_bytes_per_cycle: Rate
    """SRAM bandwidth per PE, reads and writes together."""
    units: Literal["shared", "split"] = "shared"
    """`shared`: one unit runs forward and backward; `split`: one unit for each."""


class Pipeline(Table):
    """How samples move through the cores."""

    timing: Literal["dataflow", "lockstep"] = "dataflow"
    credits: Literal["lockstep", "1f1b", "unbounded"] | Count | list[Count] = "lockstep"
    """Samples in flight per stage: 2(S-1-s)+1, S-s, no bound, one number for all, or one per stage (dataflow)."""
    output_slots: Count = 2
    """Messages a core's output buffer holds."""
    priority: Literal["backward", "forward"] = "backward"
    """Which operation a free shared unit takes first."""
    allocation: Literal["uniform", "balanced"] = "uniform"
    """PEs per stage: `core.pes` each, or the whole mesh shared out in proportion to work."""
    placement: Literal["snake"] = "snake"
    """Cores lie along a line that folds over the mesh: stage s is a neighbour of s-1 and s+1."""
    memory: Literal["report"] = "report"
    """`report`: overflow of a core's SRAM is reported, and nothing waits for memory."""


class Fabric(Table):
    """The links between neighbouring cores, one in each direction."""

    link_bytes_per_cycle: Rate
    hop_cycles: Cycles = 1
    """Latency of the head of a message per link."""


class Host(Table):
    """Where samples come from."""

    bytes_per_cycle: Rate


class BatchParallel(Table):
    """The same silicon used for batch-parallel training (read by the batch schedules)."""

    replicas: Literal["fit"] | Count = "fit"
    offchip_bytes_per_cycle: Rate


class EnergyEntry(Table):
    """Energy of one action, with where the figure comes from."""

    pj: NonNegative
    source: Name


class Energy(Table, extra="allow"):
    """Energy per action: a named table, or inline entries `action = { pj = ..., source = "..." }`."""

    __pydantic_extra__: dict[str, EnergyEntry]
    table: Name | None = None


class Hardware(Table):
    """A hardware file."""

    name: Name
    clock_ghz: Clock
    datatype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    """Of the hardware's bytes; the numerics have a precision of their own."""
    mesh: Mesh
    core: Core
    pipeline: Pipeline = Pipeline()
    fabric: Fabric
    host: Host
    batch_parallel: BatchParallel | None = None
    energy: Energy | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one value in the hardware's datatype."""
        return DATATYPE_BYTES[self.datatype]
