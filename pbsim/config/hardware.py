"""The hardware file: the machine a network is trained on (one class per TOML table)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

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
    """PEs that issue vector multiply-accumulates: `ceil(MACs / (PEs * macs_per_cycle))` cycles and the overhead."""

    kind: Literal["vector"]
    """This datapath."""
    macs_per_cycle: Count
    """Multiply-accumulates per cycle and PE."""
    overhead_cycles: Cycles = 0
    """Cycles to start one vector instruction."""
    vector_length: Count | None = None
    """MACs or elementwise operations that one instruction covers per PE; absent: one instruction per matrix product
    or elementwise pass, however long."""
    sram_elements_per_mac: Positive | None = None
    """Elements read and written per MAC (3: two operands and a result, streamed); never fewer than every operand and
    result once, which is what an absent key means: perfect reuse."""


class SystolicDatapath(Table):
    """PEs that are systolic arrays: `ceil(folds / PEs)` times the cycles of a fold."""

    kind: Literal["systolic"]
    """This datapath."""
    rows: Count
    """Rows of one array."""
    cols: Count
    """Columns of one array."""
    dataflow: Literal["os", "ws", "is"]
    """What holds still in the cells: outputs, weights (the K x N operand) or inputs (the M x K operand)."""
    weights: Literal["resident", "reload"] = "reload"
    """`reload`: a fold loads what holds still, in `rows` cycles; `resident`: the layer's weights are there already
    (F and Bx of `ws`; it changes nothing elsewhere)."""


class UnitDatapath(Table):
    """Every stage takes the same time, whatever it computes: the machine of the papers' closed forms."""

    kind: Literal["unit"]
    """This datapath."""
    forward_cycles: Count
    """Cycles of a stage's forward (F)."""
    input_gradient_cycles: Count
    """Cycles of its input gradient (Bx), of the first stage's too."""
    weight_gradient_cycles: Count
    """Cycles of its weight gradient (Bw), of stages without parameters too."""
    update_cycles: Count
    """Cycles of its update (U), of stages without parameters too."""


class Core(Table):
    """One core: the hardware that serves one stage."""

    pes: Count = 1
    """PEs per core. Read under `allocation = "uniform"` only: `balanced` shares out the mesh, and listed regions have
    their own sizes."""
    datapath: Annotated[VectorDatapath | SystolicDatapath | UnitDatapath, Field(discriminator="kind")]
    """What a PE computes with: a table whose `kind` decides its keys."""
    vector_lanes: Count = 1
    """Elementwise steps per cycle and PE: normalization, activations, pooling, biases, updates, predictions."""
    sram_kib: SramKib
    """SRAM per PE, in KiB; a core has that of all its PEs."""
    sram_bytes_per_cycle: Rate
    """SRAM bandwidth per PE in bytes per cycle, reads and writes together."""
    units: Literal["shared", "split"] = "shared"
    """`shared`: one unit runs forward and backward; `split`: a unit for each, both with the whole datapath, at once."""


def _is_placement(value: str | list[Any]) -> str | list[Any]:
    """Whether a placement is of some kind; its regions are judged where the network is known."""
    if isinstance(value, str) and value != "snake" and not value.endswith(".toml"):
        raise ValueError("Input should be 'snake', a file ending in .toml, or a list of [row, col, rows, cols]")
    return value


class Pipeline(Table):
    """How samples move through the cores."""

    timing: Literal["dataflow", "lockstep"] = "dataflow"
    """`dataflow`: a core starts as soon as it has input, a credit and a free unit; `lockstep`: all cores step together,
    and results move at the ends of steps, which gives delays of exactly 2(S-1-s)."""
    credits: Literal["lockstep", "1f1b", "unbounded"] | Count | list[Count] = "lockstep"
    """Samples in flight per stage s of S at most: `lockstep` 2(S-1-s)+1, `1f1b` S-s, `unbounded`, one number for all,
    or a list of one per stage. Read in `dataflow` only: in `lockstep` they follow from the steps."""
    output_slots: Count = 2
    """Messages a core's output buffer holds; a unit whose result finds no slot waits (`dataflow`)."""
    priority: Literal["backward", "forward"] = "backward"
    """Which operation a free shared unit takes first (`dataflow` under `pb`; drained schedules run forwards first)."""
    allocation: Literal["uniform", "balanced"] = "uniform"
    """PEs per stage: `core.pes` each, or the whole mesh shared out by work and memory."""
    placement: Annotated[str | list[Any], AfterValidator(_is_placement)] = "snake"
    """`snake`: cores lie along a line that folds over the mesh, stage s a neighbour of s-1 and s+1. Or every stage's
    rectangle of PEs in order, `[[row, col, rows, cols], ...]`: their areas are the stages' PEs, and `allocation` is not
    asked. Or a TOML file that holds such a list as `regions`, its path relative to this file."""
    memory: Literal["report", "enforce"] = "report"
    """`report`: overflow of a core's SRAM is reported; `enforce`: whatever finds no room waits (lockstep: an error)."""


class Fabric(Table):
    """The links between neighbouring cores, one in each direction."""

    link_bytes_per_cycle: Rate
    """Bytes per cycle between two neighbouring PEs, in each direction; where cores touch along more PEs, as many times
    that."""
    hop_cycles: Cycles = 1
    """Cycles that the head of a message takes from PE to PE."""


class Host(Table):
    """Where samples come from."""

    bytes_per_cycle: Rate
    """Bytes per cycle from the host into the core of stage 0."""


class BatchParallel(Table):
    """The same silicon used for batch-parallel training. Not read yet: no batch schedule is built."""

    replicas: Literal["fit"] | Count = "fit"
    """Copies of the network: as many as fit, or a number. Not read yet."""
    offchip_bytes_per_cycle: Rate
    """Bytes per cycle to memory off the chip. Not read yet."""


class EnergyEntry(Table):
    """Energy of one action, with where the figure comes from."""

    pj: NonNegative
    """Picojoules each time."""
    source: Name
    """Where the figure comes from, in words."""
    confidence: Literal["src", "run", "page", "derived", "recalled", "assumed"] | None = None
    """How the figure is known: read in a project's own file, measured, read in a page, arithmetic on such figures, from
    memory, or set without a source."""


class Energy(Table):
    """Energy per action: a named table, whose entries inline ones `action = { pj = ..., source = "..." }` replace.

    An action without an entry costs nothing, and the run lists it by name.
    """

    table: Literal["horowitz_45nm", "7nm"] | None = None
    """A table that comes with pbsim (`pbsim/hardware/energy_tables.toml`)."""
    mac: EnergyEntry | None = None
    """One multiply-accumulate in the hardware's datatype."""
    vector_op: EnergyEntry | None = None
    """One elementwise step of a vector lane in the hardware's datatype."""
    sram_byte: EnergyEntry | None = None
    """One byte read from or written to a PE's SRAM."""
    link_byte_hop: EnergyEntry | None = None
    """One byte for one step from PE to PE, its router included."""
    host_byte: EnergyEntry | None = None
    """One byte from the host, off chip."""
    leakage: EnergyEntry | None = None
    """One PE for one cycle, whether it works or not."""


class Hardware(Table):
    """A hardware file."""

    name: Name
    """Of the machine, in titles and directory names."""
    clock_ghz: Clock
    """Clock in GHz: turns cycles into seconds, and nothing else."""
    datatype: Literal["float16", "bfloat16", "float32", "float64"] = "float16"
    """What a value is on the hardware: for bytes, SRAM traffic and energy. The numerics have a precision of their own
    (`run.precision`)."""
    mesh: Mesh
    """The PEs."""
    core: Core
    """What a PE is, and how many a core has."""
    pipeline: Pipeline = Pipeline()
    """Timing, buffers and layout."""
    fabric: Fabric
    """The links."""
    host: Host
    """The source of samples."""
    batch_parallel: BatchParallel | None = None
    """Not read yet."""
    energy: Energy | None = None
    """Energy per action; absent: energy is not counted."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one value in the hardware's datatype."""
        return DATATYPE_BYTES[self.datatype]
