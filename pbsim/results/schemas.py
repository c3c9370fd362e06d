"""The tables of a run directory: columns with type, unit and meaning, which travel in each file's own metadata."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str


I64, F64, TEXT = pa.int64(), pa.float64(), pa.string()


def _schema(description: str, *columns: Column) -> pa.Schema:
    fields = [
        pa.field(c.name, c.type, nullable=False, metadata={"unit": c.unit, "description": c.meaning}) for c in columns
    ]
    return pa.schema(fields, metadata={"description": description})


STAGES = _schema(
    "one row per stage",
    Column("stage", I64, "index", "position in topological order, from 0"),
    Column("name", TEXT, "", "module path of what the stage contains"),
    Column("operators", pa.list_(TEXT), "", "kinds of its operators, in execution order"),
    Column("parameters", pa.list_(TEXT), "", "torch names of its parameters"),
    Column("core", I64, "index", "the core that serves it"),
    Column("pes", I64, "PEs", "processing elements of that core"),
    Column("macs_forward", I64, "MACs per sample", "multiply-accumulates of F"),
    Column("macs_input_gradient", I64, "MACs per sample", "multiply-accumulates of Bx"),
    Column("macs_weight_gradient", I64, "MACs per sample", "multiply-accumulates of Bw"),
    Column("cycles_forward", I64, "cycles per sample", "length of F"),
    Column("cycles_input_gradient", I64, "cycles per sample", "length of Bx"),
    Column("cycles_weight_gradient", I64, "cycles per sample", "length of Bw"),
    Column("cycles_update", I64, "cycles per update", "length of U"),
    Column("delay_nominal", I64, "updates", "2(S-1-s); 0 where the schedule drains the pipeline"),
    Column("delay_mean", F64, "updates", "measured, over samples whose forward read version >= 1 (all, if none)"),
    Column("delay_min", I64, "updates", "measured, likewise"),
    Column("delay_max", I64, "updates", "measured, likewise"),
)

OPERATIONS = _schema(
    "one row per stage and operation: its cycles term by term, for one sample; compute ... overhead sum to total",
    Column("stage", I64, "index", "stage"),
    Column("op", TEXT, "", "forward, input_gradient, weight_gradient, update"),
    Column("compute", I64, "cycles per sample", "MACs are issued"),
    Column("vector", I64, "cycles per sample", "the vector lanes work"),
    Column("sram", I64, "cycles per sample", "the SRAM moves what is left beyond compute and vector, by operator"),
    Column("overhead", I64, "cycles per sample", "instructions start, or the operation fills its least length"),
    Column("total", I64, "cycles per sample", "length of the operation"),
    Column(
        "bound", TEXT, "", "what most of its cycles are due to: compute, vector, sram, overhead; none if it has none"
    ),
    Column("macs", I64, "MACs per sample", "multiply-accumulates"),
    Column("vector_operations", I64, "steps per sample", "elementwise steps"),
    Column("sram_bytes", I64, "bytes per sample", "read from and written to the core's SRAM"),
    Column("mapping_efficiency", F64, "fraction", "MACs / (compute * peak MACs per cycle); NaN without MACs or peak"),
)

CORES = _schema(
    "one row per core and unit; forward ... idle sum to total, the run's cycles",
    Column("core", I64, "index", "core"),
    Column("unit", TEXT, "", "shared, or forward and backward"),
    Column("forward", I64, "cycles", "busy with F"),
    Column("input_gradient", I64, "cycles", "busy with Bx"),
    Column("weight_gradient", I64, "cycles", "busy with Bw"),
    Column("update", I64, "cycles", "busy with U"),
    Column(
        "stall_input",
        I64,
        "cycles",
        "waiting for an activation, a gradient or a batch's update (lockstep: for the step to end)",
    ),
    Column("stall_output", I64, "cycles", "waiting for a slot of the output buffer"),
    Column("stall_memory", I64, "cycles", "waiting for a credit, or for room in memory where it is enforced"),
    Column("idle", I64, "cycles", "before the unit's first operation and after its last"),
    Column("total", I64, "cycles", "the run's cycles"),
)

MEMORY = _schema(
    "one row per core and category; category total is the highest level of the sum at one time",
    Column("core", I64, "index", "core"),
    Column("category", TEXT, "", "what the memory is used for; total for all together"),
    Column("peak_bytes", I64, "bytes", "highest level during the run"),
    Column("peak_cycle", I64, "cycle", "the first at whose end it was held"),
    Column("capacity_bytes", I64, "bytes", "SRAM of the core"),
)

NODES = _schema(
    "one row per node of the fabric: a rectangle of PEs, of a core or spare",
    Column("node", I64, "index", "node: the cores first, then the spare rectangles that no core uses"),
    Column("stage", I64, "index", "the stage whose core it is; -1 for a spare one"),
    Column("row", I64, "index", "its first row on the mesh"),
    Column("col", I64, "index", "its first column"),
    Column("rows", I64, "PEs", "how many rows it has"),
    Column("cols", I64, "PEs", "how many columns it has"),
)

LINKS = _schema(
    "one row per directed link between neighbouring nodes that is on the way of some message",
    Column("source", I64, "index", "node it leads from"),
    Column("target", I64, "index", "node it leads to"),
    Column("bytes", I64, "bytes", "carried during the run"),
    Column("busy_cycles", I64, "cycles", "held by a message"),
    Column("utilization", F64, "fraction", "busy_cycles / the run's cycles"),
    Column("wires", I64, "wires", "PE-to-PE links that it bundles, each of link_bytes_per_cycle"),
)

ENERGY = _schema(
    "one row per core and action; picojoules are count * picojoules_each; empty without an energy table",
    Column("core", I64, "index", "core"),
    Column("action", TEXT, "", "mac, vector_op, sram_byte, link_byte_hop, host_byte, leakage"),
    Column("count", I64, "actions", "how often the core did it during the run"),
    Column("picojoules", F64, "pJ", "energy of these actions; 0 without an entry"),
    Column("picojoules_each", F64, "pJ", "the table's entry; NaN if it has none"),
    Column("source", TEXT, "", "where the entry comes from; empty if there is none"),
    Column("confidence", TEXT, "", "src, run, page, derived, recalled, assumed; empty if not stated"),
)

METRICS = _schema(
    "one row per training sample",
    Column("sample", I64, "index", "global index over all epochs"),
    Column("epoch", I64, "index", "epoch it belongs to"),
    Column("dataset_index", I64, "index", "which training sample of the data set it is"),
    Column("loss", F64, "", "of its own training forward; NaN with timing alone"),
    Column("lr", F64, "", "learning rate at this sample; a batch's update has that of its first"),
    Column("forward_cycle", I64, "cycle", "end of the last stage's F"),
    Column("update_cycle", I64, "cycle", "end of the last stage's U of this sample or its batch"),
)

EVALUATIONS = _schema(
    "one row per evaluation",
    Column("sample", I64, "index", "the last training sample before it"),
    Column("cycle", I64, "cycle", "when that sample's last update ended (after the last sample: the run's end)"),
    Column("seconds", F64, "s", "cycle / clock"),
    Column("split", TEXT, "", "test"),
    Column("loss", F64, "", "mean over the split"),
    Column(
        "accuracy",
        F64,
        "fraction",
        "of the split classified rightly; NaN for regression, and where the loss is not finite",
    ),
)

EVENTS = _schema(
    "the trace or its window: one row per operation or message; half-open intervals of cycles",
    Column("start", I64, "cycle", "start"),
    Column("end", I64, "cycle", "end (of a message: arrival)"),
    Column("core", I64, "index", "core (of a message: its source)"),
    Column("stage", I64, "index", "stage (of a message: its source)"),
    Column(
        "op",
        pa.dictionary(pa.int8(), TEXT),
        "",
        "forward, input_gradient, weight_gradient, update, send, load",
    ),
    Column("sample", I64, "index", "global index; of the update of a batch: that of its first sample"),
    Column("version", I64, "updates", "F: updates before it; Bx, Bw: version read; U: updates after it; else -1"),
    Column("target", I64, "index", "of a message: the stage it goes to; else -1"),
)

TABLES = {
    "stages": STAGES,
    "operations": OPERATIONS,
    "cores": CORES,
    "memory": MEMORY,
    "nodes": NODES,
    "links": LINKS,
    "energy": ENERGY,
    "metrics": METRICS,
    "evaluations": EVALUATIONS,
    "events": EVENTS,
}
