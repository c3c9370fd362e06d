"""A second program for the same run: it reads a run directory, the model and the data, and trains again.

It knows DESIGN.md and nothing of pbsim. `RunFiles` reads the directory; `check_schema`, `check_trace` and
`check_reports` hold it to what sections 4, 5 and 8 state; `replay` follows the trace op by op in plain PyTorch and
returns what the run should have computed.

Sequential nets partitioned by `layer`, the digits as data, cross-entropy, a step decay; `pb`, and `sgd:N`.

Usage: `python replay.py RUN_DIRECTORY`
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import tomllib
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

# A batch of one has no work for two threads, and on a busy machine they wait for each other at every operator.
torch.set_num_threads(1)

COLUMNS = {
    "stages": {
        "stage": "int", "name": "text", "parameters": "list", "core": "int", "macs_forward": "int",
        "macs_input_gradient": "int", "macs_weight_gradient": "int", "delay_nominal": "int", "delay_mean": "real",
        "delay_min": "int", "delay_max": "int",
    },
    "cores": {
        "core": "int", "unit": "text", "forward": "int", "input_gradient": "int", "weight_gradient": "int",
        "update": "int", "stall_input": "int", "stall_output": "int", "stall_memory": "int", "idle": "int",
        "total": "int",
    },
    "memory": {"core": "int", "category": "text", "peak_bytes": "int", "capacity_bytes": "int"},
    "links": {"source": "int", "target": "int", "bytes": "int", "busy_cycles": "int", "utilization": "real"},
    "metrics": {
        "sample": "int", "epoch": "int", "dataset_index": "int", "loss": "real", "lr": "real",
        "forward_cycle": "int", "update_cycle": "int",
    },
    "evaluations": {
        "sample": "int", "cycle": "int", "seconds": "real", "split": "text", "loss": "real", "accuracy": "real",
    },
    "events": {
        "start": "int", "end": "int", "core": "int", "stage": "int", "op": "text", "sample": "int",
        "version": "int",
    },
}  # fmt: skip
"""DESIGN 8: every table's columns, in order, and what they hold."""

SUMMARY_KEYS = (
    "accuracy", "loss", "samples", "cycles", "seconds", "samples_per_second", "utilization", "bottleneck_stage",
    "peak_memory_bytes", "energy_joules", "noc_bytes", "versions", "method", "seed", "status",
)  # fmt: skip
RUN_KEYS = ("method", "seed", "precision", "horizon", "trace", "backend")
STAGE_OPS = ("forward", "input_gradient", "weight_gradient", "update")
OPS = (*STAGE_OPS, "send", "allreduce", "load")


@dataclass
class RunFiles:
    """A run directory, read with the parquet, TOML and safetensors libraries alone."""

    path: Path
    config: dict[str, Any] = field(init=False)
    summary: dict[str, Any] = field(init=False)
    schemas: dict[str, pa.Schema] = field(init=False)
    tables: dict[str, pd.DataFrame] = field(init=False)

    def __post_init__(self) -> None:
        self.config = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        self.summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        raw = {name: pq.read_table(self.path / f"{name}.parquet") for name in COLUMNS}
        self.schemas = {name: table.schema for name, table in raw.items()}
        self.tables = {name: table.to_pandas() for name, table in raw.items()}

    @cached_property
    def samples(self) -> int:
        return len(self.tables["metrics"])

    @cached_property
    def metrics(self) -> pd.DataFrame:
        return self.tables["metrics"].sort_values("sample").reset_index(drop=True)

    @cached_property
    def stages(self) -> pd.DataFrame:
        return self.tables["stages"].sort_values("stage").reset_index(drop=True)

    @cached_property
    def mitigations(self) -> dict[str, float]:
        items = [item.partition("=") for item in self.config["run"]["method"].partition("@")[0].split("+")[1:]]
        return {name: float(value or 1) for name, _, value in items}

    @cached_property
    def horizon(self) -> str:
        return self.config["run"]["method"].partition("@")[2] or self.config["run"]["horizon"]

    @cached_property
    def batch_size(self) -> int:
        """Samples per update: N of `sgd:N`, else one."""
        schedule = self.config["run"]["method"].partition("+")[0].partition("@")[0]
        assert schedule == "pb" or schedule.startswith("sgd:"), f"this program does not know {schedule}"
        return int(schedule.partition(":")[2] or 1)

    @cached_property
    def drained(self) -> bool:
        return self.config["run"]["method"].startswith("sgd:")

    @cached_property
    def batch_of(self) -> np.ndarray:
        """The update that each sample belongs to; none reaches over the end of an epoch."""
        sample, epoch = np.arange(self.samples), len(digits()[0])
        new = (sample % epoch) % self.batch_size == 0
        return np.cumsum(new) - 1

    @cached_property
    def firsts(self) -> np.ndarray:
        """The first sample of each update."""
        return np.flatnonzero(np.diff(self.batch_of, prepend=-1))

    @cached_property
    def lasts(self) -> np.ndarray:
        """The last sample of each update."""
        return np.flatnonzero(np.diff(self.batch_of, append=len(self.firsts)))

    @cached_property
    def trace(self) -> Trace:
        return Trace.of(self.tables["events"], self.batch_of, len(self.tables["stages"]))


@dataclass(frozen=True)
class Trace:
    """When each op of each sample ran and which version the table says it read or made: arrays [stage, sample].

    Samples that share an update have it each.
    """

    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]
    version: dict[str, np.ndarray]

    @classmethod
    def of(cls, events: pd.DataFrame, batch_of: np.ndarray, stages: int) -> Trace:
        """Arrange the events: per stage a row of each op per sample, but of updates per batch, at its first sample."""
        samples, firsts = len(batch_of), np.flatnonzero(np.diff(batch_of, prepend=-1))
        found: dict[str, dict[str, np.ndarray]] = {"start": {}, "end": {}, "version": {}}
        for op in STAGE_OPS:
            rows = events[events["op"] == op]
            due = len(firsts) if op == "update" else samples
            assert len(rows) == due * stages, f"{len(rows)} rows of {op} instead of {due} at {stages} stages"
            assert not rows.duplicated(["stage", "sample"]).any(), f"a second row of {op} for a sample and stage"
            for column, arrays in found.items():
                array = np.full((stages, samples), -1, dtype=np.int64)
                array[rows["stage"], rows["sample"]] = rows[column]
                if op == "update":
                    assert rows["sample"].isin(firsts).all(), "an update stands under another than its first sample"
                    array = array[:, firsts[batch_of]]
                arrays[op] = array
        return cls(**found)

    @cached_property
    def backward_start(self) -> np.ndarray:
        """Bx and Bw read one version: that at the start of the earlier of the two (5.3)."""
        return np.minimum(self.start["input_gradient"], self.start["weight_gradient"])

    @cached_property
    def delays(self) -> np.ndarray:
        """D = (version its U makes) - 1 - (version its F read)."""
        return self.version["update"] - 1 - self.version["forward"]


def check_schema(run: RunFiles) -> dict[str, list[str]]:
    """Names, types and nulls of section 8; returns the columns beyond it."""
    more = {}
    for name, columns in COLUMNS.items():
        schema, table = run.schemas[name], run.tables[name]
        present = [column for column in schema.names if column in columns]
        assert present == list(columns), f"{name}.parquet: {schema.names} instead of {list(columns)}"
        more[name] = [column for column in schema.names if column not in columns]
        for column in schema.names:
            kind, held = columns.get(column), schema.field(column).type
            whole = pa.types.is_integer(held)
            assert whole == (kind == "int") or kind is None, f"{name}.{column} is {held}"
            if whole:
                assert held == pa.int64(), f"{name}.{column} is {held}"
                assert not table[column].isna().any(), f"{name}.{column} has nulls"
            if kind == "real":
                assert held == pa.float64(), f"{name}.{column} is {held}"
    assert set(run.tables["events"]["op"]) <= set(OPS)
    missing = [key for key in SUMMARY_KEYS if key not in run.summary]
    assert not missing, f"summary.json lacks {missing}"
    for library in ("pbsim", "numpy", "numba", "torch"):
        assert library in run.summary["versions"]
    return more


def check_config(run: RunFiles) -> None:
    """The tables and keys that section 9 promises."""
    assert set(run.config) == {"hardware", "workload", "run"}
    missing = [key for key in RUN_KEYS if key not in run.config["run"]]
    assert not missing, f"config.toml: [run] lacks {missing}"
    assert {"samples", "epochs"} & run.config["run"].keys(), "config.toml: [run] has neither samples nor epochs"


def check_trace(run: RunFiles) -> None:
    """Counts, cores, causal order, units, and versions by the rule of reads and writes (5.2, 5.3)."""
    trace, events = run.trace, run.tables["events"]
    core_of = run.stages["core"].to_numpy()
    work = events[events["op"].isin(STAGE_OPS)]
    assert (work["core"].to_numpy() == core_of[work["stage"]]).all(), "an op ran on another stage's core"
    assert (events["start"] <= events["end"]).all()
    assert (events["start"] >= 0).all()
    for op in ("forward", "update"):
        assert (trace.end[op] > trace.start[op]).all(), f"{op} of a stage with parameters takes no time"
    stages = len(core_of)
    for s in range(stages):
        for op in STAGE_OPS:
            starts = trace.start[op][s][run.firsts if op == "update" else slice(None)]
            assert (np.diff(starts) > 0).all(), f"samples overtake each other in {op} of stage {s}"
        assert (trace.end["forward"][s] <= trace.backward_start[s]).all()
        assert (trace.start["update"][s] >= trace.end["weight_gradient"][s]).all()
        if s:
            assert (trace.start["forward"][s] >= trace.end["forward"][s - 1]).all()
            assert (trace.backward_start[s - 1] >= trace.end["input_gradient"][s]).all()
        # A write at cycle c is seen by every read at cycle c or later.
        writes = np.sort(trace.end["update"][s][run.firsts])
        reads = np.searchsorted(writes, trace.start["forward"][s], side="right")
        np.testing.assert_array_equal(trace.version["forward"][s], reads, f"forward, stage {s}")
        np.testing.assert_array_equal(trace.version["update"][s], run.batch_of + 1, f"update, stage {s}")
        if run.drained:
            np.testing.assert_array_equal(trace.version["forward"][s], run.batch_of, f"stage {s} does not drain")
        reads = np.searchsorted(writes, trace.backward_start[s], side="right")
        if "ws" in run.mitigations:
            reads = trace.version["forward"][s]
        for op in ("input_gradient", "weight_gradient"):
            np.testing.assert_array_equal(trace.version[op][s], reads, f"{op}, stage {s}")
    check_units(run)
    check_in_flight(run)
    if run.config["hardware"]["pipeline"]["timing"] == "lockstep":
        check_lockstep(run)


def check_units(run: RunFiles) -> None:
    """No unit does two things at once; a shared core has one unit, a split one has two."""
    work = run.tables["events"][run.tables["events"]["op"].isin(STAGE_OPS)]
    split = run.config["hardware"]["core"]["units"] == "split"
    unit = np.where((work["op"] == "forward") & split, "forward", "backward" if split else "shared")
    for (core, name), rows in work.groupby([work["core"], unit]):
        rows = rows[rows["start"] < rows["end"]].sort_values("start")
        assert (rows["start"].to_numpy()[1:] >= rows["end"].to_numpy()[:-1]).all(), f"core {core} {name} overlaps"


def check_in_flight(run: RunFiles) -> None:
    """F starts only while fewer than `credits` samples are between the start of F and the end of U (4).

    Within a batch no U follows the backward: there a sample leaves at the end of Bw.
    """
    stages, trace = len(run.stages), run.trace
    pipeline = run.config["hardware"]["pipeline"]
    rules = {"lockstep": lambda s: 2 * (stages - 1 - s) + 1, "1f1b": lambda s: stages - s}
    credits = pipeline["credits"] if pipeline["timing"] == "dataflow" else "lockstep"
    if credits == "unbounded":
        return
    for s in range(stages):
        allowed = rules[credits](s) if isinstance(credits, str) else np.broadcast_to(credits, stages)[s]
        left = trace.end["weight_gradient"][s].copy()
        left[run.lasts] = trace.end["update"][s][run.lasts]
        in_flight = np.arange(run.samples) - np.searchsorted(left, trace.start["forward"][s], side="right")
        assert (in_flight < allowed).all(), f"stage {s} forwards with {in_flight.max()} in flight of {allowed}"


def lockstep_entries(run: RunFiles) -> np.ndarray:
    """The step in which each sample enters: one per step, and behind each batch 2S - 2 in which it drains."""
    return np.arange(run.samples) + run.drained * run.batch_of * (2 * len(run.stages) - 2)


def check_lockstep(run: RunFiles) -> None:
    """Stage s forwards sample i s steps after it entered; one length of step.

    Undrained it reads version max(0, i - 2(S-1-s)).
    """
    stages, trace = len(run.stages), run.trace
    step = trace.start["forward"] - trace.start["forward"][0, 0]
    index = lockstep_entries(run)
    length = step[1, 0]
    for s in range(stages):
        np.testing.assert_array_equal(step[s], (index + s) * length, f"forward steps of stage {s}")
        if not run.drained:
            np.testing.assert_array_equal(trace.version["forward"][s], np.maximum(0, index - 2 * (stages - 1 - s)))
        backward = trace.start["forward"][0, 0] + (index + 2 * (stages - 1) - s) * length
        assert (trace.backward_start[s] >= backward).all()
        assert (trace.end["weight_gradient"][s] <= backward + length).all()
        assert (trace.end["update"][s] <= backward + length)[run.lasts].all()


def check_reports(run: RunFiles) -> None:
    """Everything that the tables say about each other: order, lr, delays, core time, summary."""
    events, metrics, trace, stages = run.tables["events"], run.metrics, run.trace, len(run.stages)
    cycles = int(events["end"].max())
    if run.config["hardware"]["pipeline"]["timing"] == "lockstep":
        # every step has the same length, drain included: the run ends with its last step, whatever runs in it
        length = int(trace.start["forward"][1, 0] - trace.start["forward"][0, 0])
        steps = int(lockstep_entries(run)[-1]) + 2 * stages - 1
        assert cycles <= steps * length < cycles + length
        cycles = steps * length
    np.testing.assert_array_equal(metrics["sample"], np.arange(run.samples))
    images = len(digits()[0])
    np.testing.assert_array_equal(metrics["epoch"], np.arange(run.samples) // images)
    order = sample_order(run.config["run"]["seed"], images, run.samples)
    np.testing.assert_array_equal(metrics["dataset_index"], order)
    np.testing.assert_allclose(metrics["lr"], Recipe.of(run).lr, rtol=1e-13)
    np.testing.assert_array_equal(metrics["forward_cycle"], trace.end["forward"][-1])
    np.testing.assert_array_equal(metrics["update_cycle"], trace.end["update"][-1])

    for s, row in run.stages.iterrows():
        delays = trace.delays[s]
        running = trace.version["forward"][s] >= 1
        delays = delays[running] if running.any() else delays
        assert row["delay_nominal"] == (0 if run.drained else 2 * (stages - 1 - s))
        assert (row["delay_min"], row["delay_max"]) == (delays.min(), delays.max()), f"delays of stage {s}"
        assert math.isclose(row["delay_mean"], delays.mean(), rel_tol=1e-12), f"mean delay of stage {s}"

    cores = run.tables["cores"]
    parts = list(COLUMNS["cores"])[2:-1]
    assert (cores[parts].sum(axis=1) == cycles).all(), "a core's times do not sum to the run's cycles"
    assert (cores["total"] == cycles).all()
    assert (cores[parts] >= 0).all(axis=None)
    units = {"shared"} if run.config["hardware"]["core"]["units"] == "shared" else {"forward", "backward"}
    assert set(cores["unit"]) == units
    assert len(cores) == len(units) * stages
    events = events.assign(duration=events["end"] - events["start"])
    busy = events[events["op"].isin(STAGE_OPS)].groupby(["core", "op"], observed=True)["duration"].sum()
    for core, rows in cores.groupby("core"):
        for op in STAGE_OPS:
            assert rows[op].sum() == busy[core, op], f"{op} on core {core}"

    links = run.tables["links"]
    np.testing.assert_allclose(links["utilization"], links["busy_cycles"] / cycles, rtol=1e-12)
    check_summary(run, cycles)


def check_summary(run: RunFiles, cycles: int) -> None:
    """The scalars of summary.json, as far as the tables give them."""
    summary, cores, last = run.summary, run.tables["cores"], run.tables["evaluations"].iloc[-1]
    seconds = cycles / (run.config["hardware"]["clock_ghz"] * 1e9)
    busy = cores[list(STAGE_OPS)].to_numpy().sum()
    assert summary["samples"] == run.samples
    assert summary["cycles"] == cycles
    assert math.isclose(summary["seconds"], seconds, rel_tol=1e-12)
    assert math.isclose(summary["samples_per_second"], run.samples / seconds, rel_tol=1e-12)
    assert math.isclose(summary["utilization"], busy / cores["total"].sum(), rel_tol=1e-12)
    assert summary["noc_bytes"] == run.tables["links"]["bytes"].sum()
    assert summary["accuracy"] == last["accuracy"]
    assert summary["loss"] == last["loss"]
    assert last["cycle"] == cycles
    assert last["sample"] == run.samples - 1
    np.testing.assert_allclose(
        run.tables["evaluations"]["seconds"] / run.tables["evaluations"]["cycle"], seconds / cycles, rtol=1e-12
    )
    assert summary["method"] == run.config["run"]["method"]
    assert summary["seed"] == run.config["run"]["seed"]
    assert summary["status"] == "finished"
    by_core = cores.groupby("core")[list(STAGE_OPS)].sum().sum(axis=1)
    slowest = run.stages.loc[run.stages["core"] == by_core.idxmax(), "stage"].iloc[0]
    if set(cores["unit"]) == {"shared"}:  # with split units it is a unit that limits, not a core
        assert summary["bottleneck_stage"] == slowest


@dataclass(frozen=True)
class Recipe:
    """The base recipe at the method's batch (5.6, 5.7): `lr` of every sample, momentum and weight decay."""

    lr: np.ndarray
    momentum: float
    weight_decay: float

    @classmethod
    def of(cls, run: RunFiles) -> Recipe:
        """From the `[workload.training]` table."""
        training = run.config["workload"]["training"]
        batch, base = training["batch_size"], training["momentum"]
        momentum, lr = base, training["lr"]
        if training["scale"]:
            momentum = base ** (run.batch_size / batch)
            lr *= (1 - momentum) * run.batch_size / ((1 - base) * batch)
        assert not training["nesterov"]
        assert not training["exempt"]
        assert training["warmup_epochs"] == 0
        decay = training["decay"]
        assert decay["kind"] == "step"
        factors = np.ones(run.samples)
        for at in decay["at"]:  # the fraction as it is written in decimal: 0.07 * 500 is 35, not a bit more
            factors[math.ceil(Fraction(str(at)) * run.samples) :] *= decay["factor"]
        return cls(lr * factors, momentum, training["weight_decay"])


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """scikit-learn's digits as (n, 1, 8, 8) in [0, 1], split 80 to 20 with every class in proportion."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8) / 16
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return x_train, y_train, x_test, y_test


def sample_order(seed: int, count: int, total: int) -> np.ndarray:
    """`dataset_index` of every sample (5.1)."""
    epochs = [
        np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)
        for epoch in range(math.ceil(total / count))
    ]
    return np.concatenate(epochs)[:total]


def build_model(run: RunFiles) -> nn.Module:
    """Call the factory as 5.9 says: in float32, torch seeded just before, then cast."""
    model = run.config["workload"]["model"]
    place, _, name = model["factory"].rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("replayed_model", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    torch.manual_seed(run.config["run"]["seed"])
    built: nn.Module = getattr(module, name)(**model.get("arguments", {}))
    return built.to(getattr(torch, run.config["run"]["precision"]))


class ReplayedStage:
    """The leaf modules of one stage, and its weights as they stand.

    The parameters in the modules are only what autograd looks at: values are copied into them before a forward and
    again before its backward, so that a backward meets the activations of then and the weights of now.
    """

    def __init__(self, modules: list[nn.Module], names: list[str], model: nn.Module) -> None:
        self.module = nn.Sequential(*modules)
        parameters = dict(model.named_parameters())
        self.names = names
        self.parameters = [parameters[name] for name in names]
        self.weights = [p.detach().clone() for p in self.parameters]
        self.previous = self.weights
        self.velocity = [torch.zeros_like(w) for w in self.weights]

    def load(self, values: list[Tensor]) -> None:
        """Copy in place, unseen by autograd's version counters."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data.copy_(value)

    def predicted(self, delay: int, lr: float, mitigations: dict[str, float]) -> list[Tensor]:
        """The weights that a forward uses (5.5), as they are now."""
        if "lwpv" in mitigations:
            reach = lr * mitigations["lwpv"] * delay
            return [w - reach * v for w, v in zip(self.weights, self.velocity, strict=True)]
        if "lwpw" in mitigations:
            reach = mitigations["lwpw"] * delay
            return [w + reach * (w - before) for w, before in zip(self.weights, self.previous, strict=True)]
        return self.weights

    def update(self, gradients: list[Tensor], lr: float, recipe: Recipe, a: float, b: float) -> None:
        """5.4, into new tensors: forwards in flight may still hold the old ones."""
        self.previous = self.weights
        gradients = [g + recipe.weight_decay * w for g, w in zip(gradients, self.weights, strict=True)]
        self.velocity = [recipe.momentum * v + g for v, g in zip(self.velocity, gradients, strict=True)]
        moves = [a * v + b * g for v, g in zip(self.velocity, gradients, strict=True)]
        self.weights = [w - lr * move for w, move in zip(self.weights, moves, strict=True)]


def stages_of(run: RunFiles, model: nn.Module) -> list[ReplayedStage]:
    """Leaf modules in order; those without parameters join the stage before them (or the first)."""
    stage_of = {name: s for s, names in enumerate(run.stages["parameters"]) for name in names}
    assert set(stage_of) == {name for name, _ in model.named_parameters()}
    modules: list[list[nn.Module]] = [[] for _ in range(len(run.stages))]
    current = 0
    for path, module in model.named_modules():
        if not list(module.children()):
            owners = {stage_of[f"{path}.{name}"] for name, _ in module.named_parameters()}
            assert len(owners) <= 1
            assert not owners or min(owners) in (current, current + 1)
            current = owners.pop() if owners else current
            modules[current].append(module)
    names = [list(names) for names in run.stages["parameters"]]
    return [ReplayedStage(m, n, model) for m, n in zip(modules, names, strict=True)]


@dataclass
class Replayed:
    """What the run should have computed: `evaluations` are (sample, loss, accuracy)."""

    losses: np.ndarray
    weights: dict[str, Tensor]
    evaluations: list[tuple[int, float, float]]


def replay(run: RunFiles) -> Replayed:
    """Train again, op by op in the order of the trace."""
    precision = getattr(torch, run.config["run"]["precision"])
    x, y, x_test, y_test = (torch.from_numpy(a) for a in digits())
    index = torch.from_numpy(run.metrics["dataset_index"].to_numpy().copy())
    x, y, x_test = x[index].to(precision), y[index], x_test.to(precision)
    model, recipe, trace, mitigations = build_model(run), Recipe.of(run), run.trace, run.mitigations
    for name, stored in load_file(run.path / "initial.safetensors").items():
        assert torch.equal(stored, model.state_dict()[name]), f"initial {name}"
    stages = stages_of(run, model)
    last = len(stages) - 1
    nominal = np.array([[2 * (last - s)] * run.samples for s in range(last + 1)])
    delays = trace.delays if run.horizon == "measured" else nominal
    losses = np.full(run.samples, np.nan)
    values: dict[tuple[int, int], Tensor] = {}
    errors: dict[tuple[int, int], Tensor] = {}
    saved: dict[tuple[int, int], tuple[list[Tensor], Tensor, list[Tensor]]] = {}
    gradients: dict[tuple[int, int], list[Tensor]] = {}

    def forward(s: int, i: int) -> None:
        stage = stages[s]
        used = stage.predicted(int(delays[s, i]), recipe.lr[i], mitigations)
        stage.load(used)
        value = values.pop((s - 1, i)).requires_grad_() if s else x[i : i + 1]
        result = stage.module(value)
        if s == last:
            result = functional.cross_entropy(result, y[i : i + 1])
            losses[i] = result.item()
        else:
            values[s, i] = result.detach().clone()
        saved[s, i] = ([value] if s else [], result, used)

    def backward(s: int, i: int) -> None:
        inputs, result, used = saved.pop((s, i))
        stage = stages[s]
        stage.load(used if "ws" in mitigations else stage.weights)
        error = None if s == last else errors.pop((s, i))
        found = list(torch.autograd.grad(result, inputs + stage.parameters, error))
        if s:
            errors[s - 1, i] = found.pop(0)
        gradients[s, i] = found

    def mean_gradient(s: int, i: int) -> list[Tensor]:
        members = np.flatnonzero(run.batch_of == run.batch_of[i])
        parts = [gradients.pop((s, int(member))) for member in members]
        return [torch.stack(values).mean(dim=0) for values in zip(*parts, strict=True)]

    def update(s: int, i: int) -> None:
        a, b = 1.0, 0.0
        if "sc" in mitigations:
            power = recipe.momentum ** (mitigations["sc"] * int(delays[s, i]))
            a, b = power, (1 - power) / (1 - recipe.momentum)
        stages[s].update(mean_gradient(s, i), recipe.lr[i], recipe, a, b)

    def evaluate(sample: int) -> tuple[int, float, float]:
        for stage in stages:
            stage.load(stage.weights)
        with torch.no_grad():
            outputs = model(x_test)
        loss = functional.cross_entropy(outputs, y_test).item()
        return sample, loss, (outputs.argmax(dim=1) == y_test).double().mean().item()

    evaluations = run.tables["evaluations"].sort_values(["cycle", "sample"])
    pending = list(zip(evaluations["sample"][:-1], evaluations["cycle"][:-1], strict=True))
    for sample, cycle in pending:
        assert cycle == trace.end["update"][:, sample].max(), "an evaluation is due when its sample is learnt"
    writes = ((trace.end["update"][s, i], 0, s, i, update) for s in range(last + 1) for i in run.firsts)
    reads = ((cycle, 2, s, i, forward) for (s, i), cycle in np.ndenumerate(trace.start["forward"]))
    backs = ((cycle, 2, s, i, backward) for (s, i), cycle in np.ndenumerate(trace.backward_start))
    looks = ((cycle, 1, 0, sample, None) for sample, cycle in pending)
    results = []
    for _, _, s, i, action in sorted([*writes, *reads, *backs, *looks], key=lambda item: item[:4]):
        if action is None:
            results.append(evaluate(int(i)))
        else:
            action(s, i)
    results.append(evaluate(run.samples - 1))
    weights = {name: w for stage in stages for name, w in zip(stage.names, stage.weights, strict=True)}
    return Replayed(losses, weights, results)


def relative_difference(found: Any, expected: Any) -> float:
    """Largest |found - expected| / |expected|, where values below the mean are held against the mean."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    scale = np.maximum(np.abs(expected), np.abs(expected).mean())
    return float(np.max(np.abs(found - expected) / scale))


def differences(run: RunFiles) -> dict[str, float]:
    """Largest relative difference of the run from its replay."""
    again = replay(run)
    stored = load_file(run.path / "weights.safetensors")
    assert stored.keys() == again.weights.keys()
    evaluations = run.tables["evaluations"].sort_values(["cycle", "sample"])
    assert list(evaluations["sample"]) == [sample for sample, _, _ in again.evaluations]
    return {
        "losses": relative_difference(run.metrics["loss"], again.losses),
        "weights": max(relative_difference(stored[name], w) for name, w in again.weights.items()),
        "evaluation losses": relative_difference(evaluations["loss"], [e[1] for e in again.evaluations]),
        "accuracies": relative_difference(evaluations["accuracy"], [e[2] for e in again.evaluations]),
    }


if __name__ == "__main__":
    opened = RunFiles(Path(sys.argv[1]))
    print("columns beyond DESIGN 8:", {k: v for k, v in check_schema(opened).items() if v})
    failures = []
    for check in (check_config, check_trace, check_reports):
        try:
            check(opened)
        except AssertionError as error:
            failures.append(f"{check.__name__}: {error}")
    print("\n".join(failures) or "all checks hold")
    print(differences(opened))
