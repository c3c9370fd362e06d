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
    Column("parameters", pa.list_(TEXT), "", "torch names of its parameters"),
    Column("core", I64, "index", "the core that serves it"),
    Column("pes", I64, "PEs", "processing elements of that core"),
    Column("macs_forward", I64, "MACs per sample", "multiply-accumulates of F"),
    Column("macs_input_gradient", I64, "MACs per sample", "multiply-accumulates of Bx"),
    Column("macs_weight_gradient", I64, "MACs per sample", "multiply-accumulates of Bw"),
    Column("cycles_forward", I64, "cycles per sample", "length of F"),
    Column("cycles_input_gradient", I64, "cycles per sample", "length of Bx"),
    Column("cycles_weight_gradient", I64, "cycles per sample", "length of Bw"),
    Column("cycles_update", I64, "cycles per sample", "length of U"),
    Column("delay_nominal", I64, "updates", "2(S-1-s)"),
    Column("delay_mean", F64, "updates", "measured, over samples whose forward read version >= 1 (all, if none)"),
    Column("delay_min", I64, "updates", "measured, likewise"),
    Column("delay_max", I64, "updates", "measured, likewise"),
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
        "waiting for an activation or a gradient (lockstep: for the step to end)",
    ),
    Column("stall_output", I64, "cycles", "waiting for a slot of the output buffer"),
    Column("stall_memory", I64, "cycles", "waiting for a credit"),
    Column("idle", I64, "cycles", "before the unit's first operation and after its last"),
    Column("total", I64, "cycles", "the run's cycles"),
)

MEMORY = _schema(
    "one row per core and category; category total is the highest level of the sum at one time",
    Column("core", I64, "index", "core"),
    Column("category", TEXT, "", "what the memory is used for; total for all together"),
    Column("peak_bytes", I64, "bytes", "highest level during the run"),
    Column("capacity_bytes", I64, "bytes", "SRAM of the core"),
)

LINKS = _schema(
    "one row per directed link between neighbouring cores",
    Column("source", I64, "index", "core it leads from"),
    Column("target", I64, "index", "core it leads to"),
    Column("bytes", I64, "bytes", "carried during the run"),
    Column("busy_cycles", I64, "cycles", "held by a message"),
    Column("utilization", F64, "fraction", "busy_cycles / the run's cycles"),
)

METRICS = _schema(
    "one row per training sample",
    Column("sample", I64, "index", "global index over all epochs"),
    Column("epoch", I64, "index", "epoch it belongs to"),
    Column("dataset_index", I64, "index", "which training sample of the data set it is"),
    Column("loss", F64, "", "of its own training forward; NaN with timing alone"),
    Column("lr", F64, "", "learning rate at this sample"),
    Column("forward_cycle", I64, "cycle", "end of the last stage's F"),
    Column("update_cycle", I64, "cycle", "end of the last stage's U"),
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
    Column("sample", I64, "index", "global index"),
    Column("version", I64, "updates", "F: updates before it; Bx, Bw: version read; U: updates after it; else -1"),
    Column("target", I64, "index", "of a message: the stage it goes to; else -1"),
)

TABLES = {
    "stages": STAGES,
    "cores": CORES,
    "memory": MEMORY,
    "links": LINKS,
    "metrics": METRICS,
    "evaluations": EVALUATIONS,
    "events": EVENTS,
}
