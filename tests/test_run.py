"""One run and what it leaves: files, schemas, summary, determinism, evaluations, weights, and both backends."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
import tomllib
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pbsim
from pbsim import Run, UserError, open_run, simulate
from pbsim.config import Hardware, Settings, Source, Workload, read_source
from pbsim.config.workload import ConstantDecay
from pbsim.experiment import resolve, run_experiment
from pbsim.network.zoo import mlp
from pbsim.optim import LearningRate
from pbsim.optim.recipe import Recipe
from pbsim.results import terminal
from pbsim.results.metrics import MetricsStream
from pbsim.results.schemas import TABLES
from pbsim.results.writer import RunWriter

DOCUMENTATION = Path(__file__).parent.parent / "docs" / "run-directory.md"
SAMPLES = 600
LR = 1.0  # at batch 32: 600 samples are few, and have to show in the accuracy
EVERY = 0.14  # epochs of 1437 samples: due behind samples 201, 402 and (of 603.54) not any more
DUE = [201, 402]

# DESIGN.md 8
COLUMNS = {
    "stages": "stage name parameters core macs_forward macs_input_gradient macs_weight_gradient delay_nominal "
    "delay_mean delay_min delay_max",
    "operations": "stage op compute vector sram overhead total bound macs vector_operations sram_bytes "
    "mapping_efficiency",
    "cores": "core unit forward input_gradient weight_gradient update stall_input stall_output stall_memory idle total",
    "memory": "core category peak_bytes capacity_bytes",
    "nodes": "node stage row col rows cols",
    "links": "source target bytes busy_cycles utilization wires",
    "energy": "core action count picojoules",
    "metrics": "sample epoch dataset_index loss lr forward_cycle update_cycle",
    "evaluations": "sample cycle seconds split loss accuracy",
    "events": "start end core stage op sample version",
}
FLOATS = {
    "delay_mean", "utilization", "mapping_efficiency", "picojoules", "picojoules_each", "loss", "lr", "seconds",
    "accuracy",
}  # fmt: skip
TEXTS = {
    "name",
    "operators",
    "parameters",
    "unit",
    "category",
    "split",
    "op",
    "bound",
    "action",
    "source",
    "confidence",
}
SUMMARY = {
    "accuracy", "loss", "samples", "cycles", "seconds", "samples_per_second", "utilization", "bottleneck_stage",
    "peak_memory_bytes", "energy_joules", "noc_bytes", "versions", "method", "seed", "status",
}  # fmt: skip


def digits(**training: Any) -> dict[str, Any]:
    """The workload `digits_mlp` with keys of its recipe changed."""
    document = read_source(Workload, "digits_mlp").document
    return document | {"training": document["training"] | training}


def made_up(
    factory: str = "mlp", shape: tuple[int, ...] = (12,), partition: Any = "layer", classes: int = 4, **arguments: Any
) -> dict[str, Any]:
    """A small network of the zoo on random data: 40 training samples, a lively recipe."""
    return {
        "name": "made_up",
        "model": {
            "factory": f"pbsim.network.zoo:{factory}",
            "arguments": {"classes": classes} | arguments,
            "partition": partition,
        },
        "data": {
            "kind": "random",
            "shape": list(shape),
            "classes": classes,
            "train_samples": 40,
            "test_samples": 10,
        },
        "training": {
            "batch_size": 4,
            "lr": 0.05,
            "momentum": 0.9,
            "weight_decay": 1e-3,
            "decay": {"kind": "step", "at": [0.5], "factor": 0.5},
            "warmup_epochs": 0.1,
        },
    }


SMALL = made_up(features=12, hidden=[8, 6])


@dataclass
class Case:
    """The run that most tests look at: float64, so that its numbers can be held against torch's."""

    run: Run
    workload: dict[str, Any]


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    workload = digits(lr=LR, evaluate_every_epochs=EVERY)
    out = tmp_path_factory.mktemp("runs") / "deep" / "run"
    run = simulate("mesh", workload, "pb+lwpv+sc", seed=3, samples=SAMPLES, out=out, settings={"precision": "float64"})
    return Case(run, workload)


@pytest.fixture(scope="module")
def timed() -> Run:
    """The same machine and samples, timing alone, with a window of 20 samples."""
    return simulate(
        "mesh",
        digits(lr=LR, evaluate_every_epochs=EVERY),
        "pb+lwpv+sc",
        seed=3,
        samples=SAMPLES,
        timing_only=True,
        settings={"trace": "first:20"},
    )


@pytest.fixture(scope="module")
def epochs() -> Run:
    """Two epochs of 40 random samples."""
    return simulate("mesh", SMALL, epochs=2)


def bytes_of(run: Run, name: str) -> bytes:
    return (run.path / name).read_bytes()


def same_numbers(one: Run, other: Run) -> bool:
    return all(
        bytes_of(one, name) == bytes_of(other, name)
        for name in ("metrics.parquet", "initial.safetensors", "weights.safetensors")
    )


def pivot(events: pd.DataFrame, op: str, column: str) -> pd.DataFrame:
    """A column of one operation: rows are samples, columns stages."""
    return events[events["op"] == op].pivot_table(index="sample", columns="stage", values=column, aggfunc="sum")


# Files and schemas


def test_a_run_leaves_these_files(case):
    files = {str(path.relative_to(case.run.path)) for path in case.run.path.rglob("*") if path.is_file()}
    assert files == {
        "config.toml",
        "summary.json",
        *(f"{name}.parquet" for name in COLUMNS),
        "initial.safetensors",
        "weights.safetensors",
        "figures/utilization.png",
    }
    assert bytes_of(case.run, "figures/utilization.png").startswith(b"\x89PNG")


def test_timing_alone_leaves_no_weights(case, timed):
    names = {path.name for path in timed.path.iterdir()}
    assert names == {path.name for path in case.run.path.iterdir()} - {
        "initial.safetensors",
        "weights.safetensors",
    }


@pytest.mark.parametrize("name", COLUMNS)
def test_tables_have_the_columns_of_the_design_with_unit_and_meaning(case, name):
    schema = pq.read_schema(case.run.path / f"{name}.parquet")
    assert set(COLUMNS[name].split()) <= set(schema.names)
    assert schema.remove_metadata().equals(TABLES[name].remove_metadata())
    assert schema.metadata[b"description"]
    for field in schema:
        assert field.metadata[b"description"], field.name
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        assert field.metadata[b"unit"] or not is_number or field.name in ("loss", "lr"), field.name


@pytest.mark.parametrize("name", COLUMNS)
def test_tables_have_plain_types_and_no_nulls(case, timed, name):
    for run in (case.run, timed):
        table = pq.read_table(run.path / f"{name}.parquet")
        for field in table.schema:
            if field.name in FLOATS:
                assert field.type == pa.float64(), field.name
            elif field.name not in TEXTS:
                assert field.type == pa.int64(), field.name
            assert table.column(field.name).null_count == 0, field.name


def test_indices_count_from_zero_without_gaps(case):
    run, stages = case.run, len(case.run.stages)
    assert sorted(run.stages["stage"]) == list(range(stages))
    assert sorted(run.stages["core"]) == list(range(stages))
    assert sorted(run.cores["core"]) == list(range(stages))
    assert set(run.memory["core"]) == set(range(stages))
    assert sorted(run.metrics["sample"]) == list(range(SAMPLES))
    assert set(run.events["sample"]) == set(range(SAMPLES))
    assert set(run.events["stage"]) == set(range(stages))


# Summary


def test_the_summary_has_every_key_of_the_design(case, timed):
    for run in (case.run, timed):
        assert run.summary.keys() >= SUMMARY
        assert run.summary["versions"].keys() >= {"pbsim", "numpy", "numba", "torch"}
    assert case.run.summary["versions"]["pbsim"] == pbsim.__version__
    assert (case.run.summary["method"], case.run.summary["seed"]) == ("pb+lwpv+sc", 3)
    assert case.run.summary["status"] == timed.summary["status"] == "finished"
    assert (timed.summary["accuracy"], timed.summary["loss"]) == (None, None)


def test_the_summary_follows_from_the_tables(case):
    run, s = case.run, case.run.summary
    cores, busy = run.cores, ["forward", "input_gradient", "weight_gradient", "update"]
    assert s["samples"] == len(run.metrics) == SAMPLES
    assert s["cycles"] == run.events["end"].max()
    assert s["seconds"] == pytest.approx(s["cycles"] / 0.85e9, rel=1e-12)
    assert s["samples_per_second"] == pytest.approx(SAMPLES / s["seconds"], rel=1e-12)
    assert s["utilization"] == pytest.approx(cores[busy].sum().sum() / (len(cores) * s["cycles"]), rel=1e-12)
    assert s["bottleneck_stage"] == cores.loc[cores[busy].sum(axis=1).idxmax(), "core"]
    assert s["noc_bytes"] == run.links["bytes"].sum() > 0
    totals = run.memory[run.memory["category"] == "total"]["peak_bytes"]
    assert totals.max() < s["peak_memory_bytes"] <= totals.sum()
    last = run.evaluations.sort_values("sample").iloc[-1]
    assert (s["accuracy"], s["loss"]) == (last["accuracy"], last["loss"])
    assert s["cycles"] >= max(s["bounds_cycles"].values())


def test_the_summary_is_strict_json(case):
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    assert json.loads(bytes_of(case.run, "summary.json"), parse_constant=refuse) == case.run.summary


@pytest.mark.parametrize(
    ("units", "interval"),
    [
        ("shared", 6),  # F, Bx, Bw, U one behind the other: 3 + 1 + 1 + 1
        ("split", 3),  # F beside Bx + Bw + U: the longer of 3 and 3
    ],
)
def test_the_initiation_interval_is_that_of_the_slowest_unit(units, interval):
    machine = read_source(Hardware, "lockstep_ideal").document
    machine = machine | {"core": machine["core"] | {"units": units}}
    machine = machine | {"pipeline": machine["pipeline"] | {"timing": "dataflow"}}
    run = simulate(machine, SMALL, samples=30, timing_only=True)
    assert run.summary["initiation_interval_cycles"] == interval


def test_cores_spend_every_cycle_of_the_run_once(case):
    cores = case.run.cores
    parts = cores.drop(columns=["core", "unit", "total"])
    assert (parts.sum(axis=1) == case.run.summary["cycles"]).all()
    assert (cores["total"] == case.run.summary["cycles"]).all()
    assert set(cores["unit"]) == {"shared"}


# The trace


def test_every_sample_has_one_row_of_each_operation_at_each_stage(case):
    events = case.run.events
    counts = events.groupby(["op", "sample", "stage"], observed=True).size()
    for op in ("forward", "input_gradient", "weight_gradient", "update"):
        assert len(counts[op]) == SAMPLES * len(case.run.stages)
        assert (counts[op] == 1).all()


def test_operations_take_the_cycles_of_their_stage(case):
    for op in ("forward", "input_gradient", "weight_gradient", "update"):
        spent = pivot(case.run.events, op, "end") - pivot(case.run.events, op, "start")
        expected = case.run.stages.set_index("stage")[f"cycles_{op}"]
        assert (spent == expected).all().all()


def test_delays_of_the_stages_are_those_of_the_trace(case):
    events, stages = case.run.events, case.run.stages.set_index("stage")
    read = pivot(events, "forward", "version")
    delay = pivot(events, "update", "version") - 1 - read
    assert (delay.loc[0] == 0).all()
    counted = delay[read >= 1]
    np.testing.assert_allclose(stages["delay_mean"], counted.mean(), rtol=1e-12)
    assert (stages["delay_min"] == counted.min()).all()
    assert (stages["delay_max"] == counted.max()).all()
    assert list(stages["delay_nominal"]) == [4, 2, 0]


def test_versions_count_the_updates_that_ended_by_then(case):
    events = case.run.events
    for stage in case.run.stages["stage"]:
        rows = events[events["stage"] == stage]
        ends = np.sort(rows.loc[rows["op"] == "update", "end"])
        for op in ("forward", "input_gradient"):
            reads = rows[rows["op"] == op]
            np.testing.assert_array_equal(reads["version"], np.searchsorted(ends, reads["start"], side="right"))
    assert (events.loc[events["op"].isin(["send", "load"]), "version"] == -1).all()
    assert (events.loc[~events["op"].isin(["send"]), "target"] == -1).all()


@pytest.mark.parametrize(("trace", "kept"), [("none", 0), ("first:7", 7), ("first:1000", 40), ("all", 40), (None, 40)])
def test_the_trace_is_kept_for_as_many_samples_as_asked(trace, kept):
    run = simulate("mesh", SMALL, samples=40, settings={} if trace is None else {"trace": trace})
    assert set(run.events["sample"]) == set(range(kept))
    assert run.summary["trace_samples"] == kept
    assert len(run.metrics) == 40
    assert run.metrics["loss"].notna().all()


# Metrics


def test_metrics_say_when_the_last_stage_was_done(case):
    metrics = case.run.metrics.set_index("sample").sort_index()
    last = len(case.run.stages) - 1
    for column, op in (("forward_cycle", "forward"), ("update_cycle", "update")):
        np.testing.assert_array_equal(metrics[column], pivot(case.run.events, op, "end")[last])


def test_samples_come_in_the_order_of_the_seed(case, epochs):
    metrics = case.run.metrics.sort_values("sample")
    order = np.random.Generator(np.random.PCG64([3, 0])).permutation(1437)
    np.testing.assert_array_equal(metrics["dataset_index"], order[:SAMPLES])
    assert (metrics["epoch"] == 0).all()
    both = epochs.metrics.sort_values("sample")
    orders = [np.random.Generator(np.random.PCG64([0, epoch])).permutation(40) for epoch in (0, 1)]
    np.testing.assert_array_equal(both["dataset_index"], np.concatenate(orders))
    np.testing.assert_array_equal(both["epoch"], np.repeat([0, 1], 40))


def test_metrics_have_the_learning_rate_of_the_scaled_recipe(case):
    momentum = 0.9 ** (1 / 32)
    peak = LR * (1 - momentum) / ((1 - 0.9) * 32)
    expected = np.repeat([peak, 0.1 * peak, 0.01 * peak], [300, 150, 150])  # steps at 0.5 and 0.75
    np.testing.assert_allclose(case.run.metrics.sort_values("sample")["lr"], expected, rtol=1e-13)


def test_the_first_loss_is_that_of_the_initial_weights(case):
    x, y = digits_as_sklearn_has_them()[0]
    module = original(case.run, "initial.safetensors")
    first = case.run.metrics.set_index("sample").loc[0]
    index = int(first["dataset_index"])
    loss = torch.nn.functional.cross_entropy(module(x[index : index + 1]), y[index : index + 1])
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-12)


# Weights


def digits_as_sklearn_has_them() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Training and test set, straight from scikit-learn."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=0)
    return [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in ((x_train, y_train), (x_test, y_test))]


def original(run: Run, weights: str) -> torch.nn.Module:
    """The zoo's module with weights of a run, without pbsim's help."""
    module = mlp(features=64, hidden=[64, 32], classes=10).double()
    state = {name: torch.from_numpy(array) for name, array in load_file(run.path / weights).items()}
    module.load_state_dict(state, strict=True)
    return module


def test_weights_load_into_the_original_module_and_give_the_recorded_accuracy(case):
    x, y = digits_as_sklearn_has_them()[1]
    with torch.no_grad():
        outputs = original(case.run, "weights.safetensors")(x)
    accuracy = (outputs.argmax(dim=1) == y).double().mean().item()
    assert accuracy == pytest.approx(case.run.summary["accuracy"], rel=1e-12)
    assert accuracy > 0.4  # it has learned something: ten classes
    loss = torch.nn.functional.cross_entropy(outputs, y).item()
    assert case.run.summary["loss"] == pytest.approx(loss, rel=1e-12)


def test_the_initial_weights_are_those_of_the_seeded_factory(case):
    torch.manual_seed(3)
    module = mlp(features=64, hidden=[64, 32], classes=10).double()
    initial = load_file(case.run.path / "initial.safetensors")
    assert initial.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(initial[name], tensor.numpy())


def test_the_model_of_a_run_has_its_weights_also_after_reopening(case):
    weights = load_file(case.run.path / "weights.safetensors")
    for run in (case.run, open_run(case.run.path)):
        state = run.model.state_dict()
        assert state.keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(state[name].numpy(), array)


def test_timing_alone_has_no_model(timed):
    with pytest.raises(UserError, match="timing alone"):
        _ = timed.model


# Determinism


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    one, two = (simulate("mesh", digits(), "pb+lwpv+sc", seed=5, samples=100) for _ in range(2))
    assert same_numbers(one, two)
    assert one.summary == two.summary
    other = simulate("mesh", digits(), "pb+lwpv+sc", seed=6, samples=100)
    assert bytes_of(one, "weights.safetensors") != bytes_of(other, "weights.safetensors")
    assert bytes_of(one, "initial.safetensors") != bytes_of(other, "initial.safetensors")


def test_threads_do_not_change_a_bit():
    one, two = (simulate("mesh", SMALL, samples=60, settings={"threads": threads}) for threads in (1, 2))
    assert same_numbers(one, two)


def test_the_resolved_configuration_runs_again_to_the_same_bytes(case):
    config = open_run(case.run.path).config
    again = simulate(config["hardware"], config["workload"], settings=config["run"])
    assert same_numbers(case.run, again)
    assert again.config == config
    assert bytes_of(again, "config.toml") == bytes_of(case.run, "config.toml")


def test_a_multiple_with_many_digits_survives_in_the_configuration():
    run = simulate("mesh", SMALL, "pb+sc=1.23456789", samples=10)
    assert run.config["run"]["method"] == "pb+sc=1.23456789"


@pytest.mark.parametrize(
    "key",
    [
        "method",
        "seed",
        "precision",
        "horizon",
        "backend",
        "trace",
    ],
)
def test_the_resolved_run_table_has_the_keys_of_the_design(epochs, key):
    assert key in epochs.config["run"]


def test_the_resolved_run_table_says_how_long_the_run_was():
    run = simulate("mesh", SMALL)
    assert run.config["run"].get("epochs") == 1 or run.config["run"].get("samples") == 40


# Timing alone


def test_timing_alone_gives_the_same_cycles(case, timed):
    changed = {"accuracy", "loss", "timing_only", "trace_samples", "precision"}
    for key in case.run.summary.keys() - changed:
        assert timed.summary[key] == case.run.summary[key], key
    for name in ("stages", "cores", "memory", "nodes", "links"):
        pd.testing.assert_frame_equal(timed.table(name), case.run.table(name))


@pytest.mark.parametrize("hardware", ["mesh", "lockstep_ideal"])
def test_timing_alone_gives_the_same_cycles_where_batches_drain(hardware):
    # two epochs of 40 samples in batches of 16, 16 and 8
    whole, timed = (simulate(hardware, SMALL, "sgd:16", epochs=2, timing_only=only) for only in (False, True))
    changed = {"accuracy", "loss", "timing_only"}
    for key in whole.summary.keys() - changed:
        assert timed.summary[key] == whole.summary[key], key
    for name in ("stages", "cores", "memory", "links", "events"):
        pd.testing.assert_frame_equal(timed.table(name), whole.table(name))
    pd.testing.assert_frame_equal(timed.metrics.drop(columns="loss"), whole.metrics.drop(columns="loss"))
    updates = whole.events[(whole.events["op"] == "update") & (whole.events["stage"] == 2)].set_index("sample")
    assert sorted(updates.index) == [0, 16, 32, 40, 56, 72]
    metrics = whole.metrics.set_index("sample").sort_index()
    expected = np.repeat(updates["end"].sort_index().to_numpy(), [16, 16, 8] * 2)
    np.testing.assert_array_equal(metrics["update_cycle"], expected)


def test_the_resolved_configuration_of_a_drained_run_runs_again_to_the_same_bytes():
    first = simulate("mesh", SMALL, "sgd:16", samples=70)
    config = first.config
    again = simulate(config["hardware"], config["workload"], settings=config["run"])
    assert again.summary["method"] == "sgd:16"
    assert same_numbers(first, again)


def test_an_evaluation_sees_the_update_of_the_due_samples_batch():
    # batches end behind samples 15, 31 and 39: due behind 9, 19, 29 and 39, the weights are those of 15, 31, 31 and 39
    often = SMALL | {"training": SMALL["training"] | {"evaluate_every_epochs": 0.25}}
    run = simulate("mesh", often, "sgd:16", epochs=2)
    found = run.evaluations.set_index("sample").sort_index()
    ends = pivot(run.events, "update", "end").max(axis=1)
    assert list(found.index) == list(range(9, 80, 10))
    np.testing.assert_array_equal(found["cycle"][:4], ends[[0, 16, 16, 32]])
    assert found.loc[19, "loss"] == found.loc[29, "loss"]
    assert found["loss"].nunique() == 6
    plain = simulate("mesh", SMALL, "sgd:16", epochs=2)
    assert bytes_of(plain, "weights.safetensors") == bytes_of(run, "weights.safetensors")


def test_timing_alone_writes_the_window_with_nan_for_the_loss(case, timed):
    metrics = timed.metrics.sort_values("sample")
    assert list(metrics["sample"]) == list(range(20))
    assert metrics["loss"].isna().all()
    with_numbers = case.run.metrics.sort_values("sample").head(20)
    pd.testing.assert_frame_equal(metrics.drop(columns="loss"), with_numbers.drop(columns="loss"))
    events = case.run.events
    window = events[events["sample"] < 20].sort_values(["sample", "stage", "op", "target"])
    found = timed.events.sort_values(["sample", "stage", "op", "target"])
    pd.testing.assert_frame_equal(found.reset_index(drop=True), window.reset_index(drop=True))
    assert len(timed.evaluations) == 0


def test_timing_alone_without_a_trace_writes_no_metrics():
    run = simulate("mesh", SMALL, samples=40, timing_only=True, settings={"trace": "none"})
    assert (len(run.metrics), len(run.events)) == (0, 0)
    assert run.summary["samples"] == 40


def test_timing_alone_needs_no_data_where_the_workload_gives_their_shape():
    workload = SMALL | {"data": {"kind": "npz", "path": "not/there.npz", "shape": [12], "train_samples": 40}}
    assert simulate("mesh", workload, timing_only=True).summary["samples"] == 40


def test_timing_alone_needs_no_random_data_of_a_given_shape(monkeypatch):
    monkeypatch.setattr("pbsim.datasets.synthetic.Generator", None)
    run = simulate("mesh", SMALL | {"data": {"kind": "random", "shape": [12]}}, samples=5, timing_only=True)
    assert run.summary["samples"] == 5


def test_timing_alone_takes_no_memory_for_weights():
    # A million by a million weights, 4 TB, and as much again for momentum and gradients.
    huge = made_up(features=12, hidden=[1_000_000, 1_000_000])
    run = simulate("mesh", huge, samples=8, timing_only=True)
    assert run.summary["notes"] == []
    assert run.stages["macs_forward"].max() == 10**12
    memory = run.memory[run.memory["category"] == "weights"]
    assert memory["peak_bytes"].sum() == 2 * (13 * 10**6 + (10**6 + 1) * 10**6 + 4 * (10**6 + 1))
    with pytest.raises(UserError, match=r"model\.arguments = .*memory"):
        simulate("mesh", huge, samples=3)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from Linux")
def test_timing_alone_of_imagenet_networks_takes_as_little_memory_as_of_digits():
    program = """
from pathlib import Path
from pbsim import simulate

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024

for workload in ("digits_mlp", "resnet50_imagenet", "vgg16_imagenet"):
    run = simulate("mesh", workload, samples=5, timing_only=True, settings={"trace": "none"})
    print(peak(), len(run.stages))
"""
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    (digits, _), (resnet, resnet_stages), (vgg, vgg_stages) = (map(float, line.split()) for line in out.splitlines())
    assert (resnet_stages, vgg_stages) == (73, 39)
    assert resnet - digits < 50  # MiB; its weights alone are 97
    assert vgg - digits < 50  # 528


FACTORY_THAT_READS = """
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(12, 4))
    model.largest = model[0].weight.max().item()
    return model
"""


def test_timing_alone_says_where_weights_are_in_memory_after_all(tmp_path, case, timed):
    (tmp_path / "model.py").write_text(FACTORY_THAT_READS)
    workload = SMALL | {"model": {"factory": f"{tmp_path / 'model.py'}:build"}}
    run = simulate("mesh", workload, samples=4, timing_only=True)
    (note,) = run.summary["notes"]
    assert "are in memory" in note
    assert "Tensor.item() cannot be called on meta tensors" in note
    assert ("note", note) in terminal.rows(run)
    assert case.run.summary["notes"] == timed.summary["notes"] == []


def test_timing_alone_leaves_a_module_that_is_handed_in_as_it_is():
    model = mlp(12, [8], 4).double().eval()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    run = simulate("mesh", SMALL, samples=10, timing_only=True, model=model)
    assert run.stages["macs_forward"].tolist() == [12 * 8, 8 * 4]
    after = model.state_dict(keep_vars=True)
    for name, (value, copy) in before.items():
        assert after[name] is value
        assert value.dtype == torch.float64
        assert torch.equal(value, copy)
    assert not any(member.training for member in model.modules())


def test_a_module_on_the_meta_device_is_timed_and_not_trained():
    with torch.device("meta"):
        model = mlp(12, [8], 4)
    assert simulate("mesh", SMALL, samples=10, timing_only=True, model=model).summary["samples"] == 10
    with pytest.raises(UserError, match="model = on the meta device: has no weights to train; time it alone"):
        simulate("mesh", SMALL, samples=10, model=model)


def test_timing_alone_keeps_nothing_of_samples_behind_the_window():
    class Writer:
        samples = 0

        def metrics(self, columns: Any) -> None:
            self.samples += len(columns["sample"])

    total, epoch = 90 * 1_281_167, 1000
    rate = LearningRate(Recipe(1, 0.1, 0.9, 0.0, False), total, epoch, 0.0, ConstantDecay())
    writer = Writer()
    stream = MetricsStream(writer, rate, 0, epoch, 150)
    records = SimpleNamespace(end=np.zeros((100, 2, 4), np.int64))
    for _ in range(3):
        stream.timed(records)
    tracemalloc.start()
    try:
        for _ in range(1000):
            stream.timed(records)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert writer.samples == 150
    assert held < 10_000  # bytes; the cycles of 100,000 samples are 1.6 million


def test_a_run_leaves_torchs_generator_as_it_was():
    torch.manual_seed(9)
    expected = torch.rand(3)
    for timing_only in (False, True):
        torch.manual_seed(9)
        simulate("mesh", SMALL, samples=4, timing_only=timing_only)
        assert torch.equal(torch.rand(3), expected)


# Evaluations


def test_evaluations_come_behind_the_last_update_of_the_due_sample(case):
    found = case.run.evaluations.set_index("sample").sort_index()
    assert list(found.index) == [*DUE, SAMPLES - 1]
    ends = pivot(case.run.events, "update", "end").max(axis=1)
    np.testing.assert_array_equal(found["cycle"], ends[found.index])
    assert found.loc[SAMPLES - 1, "cycle"] == case.run.summary["cycles"]
    np.testing.assert_allclose(found["seconds"], found["cycle"] / 0.85e9, rtol=1e-12)
    assert set(found["split"]) == {"test"}


def test_evaluations_within_the_run_do_not_change_it():
    seldom, often = (
        simulate("mesh", SMALL | {"training": SMALL["training"] | {"evaluate_every_epochs": every}}, epochs=2)
        for every in (1, 0.25)
    )
    assert list(seldom.evaluations["sample"]) == [39, 79]
    assert list(often.evaluations["sample"]) == list(range(9, 80, 10))
    pd.testing.assert_frame_equal(seldom.metrics, often.metrics, check_exact=True)
    assert bytes_of(seldom, "weights.safetensors") == bytes_of(often, "weights.safetensors")
    at = [run.evaluations.set_index("sample").loc[39, "loss"] for run in (seldom, often)]
    assert at[0] == at[1]
    assert often.evaluations["loss"].nunique() == 8


def test_an_evaluation_within_the_run_sees_the_weights_of_its_time():
    """A last stage updates first: behind sample 9 it has had 10 updates, or more where it runs ahead."""
    workload = SMALL | {"training": SMALL["training"] | {"evaluate_every_epochs": 0.25}}
    workload["training"].pop("decay")  # so that a shorter run has the same rates
    workload["training"].pop("warmup_epochs")
    machine = read_source(Hardware, "mesh").document
    machine = machine | {"pipeline": machine["pipeline"] | {"credits": 1}}  # one in flight: nothing runs ahead
    short, whole = (simulate(machine, workload, samples=samples) for samples in (10, 40))
    within = whole.evaluations.set_index("sample").loc[9]
    assert within["loss"] == pytest.approx(short.summary["loss"], rel=1e-12)


# Handing in a module and data


def arrays(seed: int = 0, samples: int = 30) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples + 10, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
    return x[:samples], y[:samples], x[samples:], y[samples:]


def module() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def as_tuple() -> Any:
    return arrays()


def as_dictionary() -> Any:
    return dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays(), strict=True))


def as_datasets() -> Any:
    x_train, y_train, x_test, y_test = map(torch.from_numpy, arrays())
    return torch.utils.data.TensorDataset(x_train, y_train), torch.utils.data.TensorDataset(x_test, y_test)


@pytest.fixture(scope="module")
def handed_in() -> tuple[torch.nn.Module, Run]:
    own = module()
    return own, simulate("mesh", "digits_mlp", epochs=2, model=own, data=arrays())


@pytest.mark.parametrize("given", [as_dictionary, as_datasets])
def test_data_may_be_arrays_or_torch_data_sets(handed_in, given: Callable[[], Any]):
    run = simulate("mesh", "digits_mlp", epochs=2, model=module(), data=given())
    assert same_numbers(run, handed_in[1])


def test_a_module_that_is_handed_in_is_trained_itself(handed_in):
    own, run = handed_in
    assert run.model is own
    assert run.config["run"]["handed_in"] == ["model", "data"]
    assert run.summary["samples"] == 60
    initial, weights = (load_file(run.path / f"{name}.safetensors") for name in ("initial", "weights"))
    for name, tensor in module().state_dict().items():
        np.testing.assert_array_equal(initial[name], tensor.numpy())
        np.testing.assert_array_equal(weights[name], own.state_dict()[name].numpy())
        assert not np.array_equal(weights[name], initial[name])
    x, y = (torch.from_numpy(array) for array in arrays()[2:])
    accuracy = (own(x).argmax(dim=1) == y).double().mean().item()
    assert run.summary["accuracy"] == pytest.approx(accuracy, rel=1e-12)


def test_a_module_that_was_handed_in_cannot_be_built_again(handed_in):
    run = open_run(handed_in[1].path)
    with pytest.raises(UserError, match="handed in from Python"):
        _ = run.model
    with pytest.raises(UserError, match="needs its model and data handed in again"):
        simulate(run.config["hardware"], run.config["workload"], settings=run.config["run"])


def test_data_that_were_handed_in_are_asked_for_again():
    with pytest.raises(UserError, match="needs its data handed in again"):
        simulate("mesh", SMALL, samples=5, settings={"handed_in": ["data"]})


def test_regression_has_a_loss_and_no_accuracy():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 6)), rng.standard_normal((30, 3))
    workload = SMALL | {"loss": {"kind": "mse"}}
    run = simulate("mesh", workload, model=module(), data=(x, y, x, y), samples=30, settings={"precision": "float64"})
    assert run.summary["accuracy"] is None
    assert run.evaluations["accuracy"].isna().all()
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(run.model(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert run.summary["loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.ones((3, 6)),), "data = tuple of 1"),
        ((np.ones((3, 6)), np.zeros(2, int), np.ones((3, 6)), np.zeros(3, int)), "x_train has 3 samples"),
        ((np.ones((3, 6)), np.array([0, 1, 7]), np.ones((3, 6)), np.zeros(3, int)), "too few for the 8 classes"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, message):
    with pytest.raises(UserError, match=re.escape(message)):
        simulate("mesh", "digits_mlp", samples=3, model=module(), data=data)


# Opening


def test_a_run_is_opened_with_all_its_tables(case):
    run = open_run(str(case.run.path))
    assert run.summary == case.run.summary
    for name in COLUMNS:
        pd.testing.assert_frame_equal(getattr(run, name), case.run.table(name))
    assert "digits_mlp" in repr(run)
    assert len(run.plot_utilization().axes[0].patches) >= 4 * len(run.cores)


def test_what_is_no_run_directory_is_refused(tmp_path, case):
    with pytest.raises(UserError, match=r"nowhere: is not a run directory"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no summary\.json"):
        open_run(tmp_path)
    for name in ("summary.json", "stages.parquet"):
        (tmp_path / name).write_bytes(bytes_of(case.run, name))
    with pytest.raises(UserError, match=r"lacks operations\.parquet, cores\.parquet, .*events\.parquet, config\.toml"):
        open_run(tmp_path)


# Writing


def experiment(out: Path, *, force: bool = False, samples: int = 10) -> Run:
    sources = {
        "run": Source({"samples": samples}, "settings"),
        "hardware": read_source(Hardware, "mesh"),
        "workload": read_source(Workload, SMALL),
    }
    return run_experiment(resolve(sources), out, force=force)


def test_a_place_that_is_taken_is_refused_and_left_alone(tmp_path):
    out = tmp_path / "run"
    experiment(out)
    before = (out / "summary.json").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        experiment(out, samples=20)
    with pytest.raises(UserError, match="exists already; name another directory, or remove this one"):
        simulate("mesh", SMALL, samples=20, out=out)
    assert (out / "summary.json").read_bytes() == before


def test_force_replaces_a_run_directory_wholly(tmp_path):
    out = tmp_path / "run"
    experiment(out)
    (out / "figures" / "utilization.png").write_text("from the run before")
    assert experiment(out, force=True, samples=20).summary["samples"] == 20
    assert bytes_of(open_run(out), "figures/utilization.png").startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_force_replaces_nothing_but_run_directories(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    file = tmp_path / "file"
    file.write_text("a file")
    for place in (precious, file):
        with pytest.raises(UserError, match="not replaced even with --force"):
            experiment(place, force=True)
    assert (precious / "thesis.tex").read_text() == "years of work"
    assert file.read_text() == "a file"


@pytest.mark.parametrize("breaks", ["figure", "table", "weights", "events"])
def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch, breaks):
    def fail(*_: Any) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(RunWriter, breaks, fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        experiment(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_the_one_it_would_have_replaced(tmp_path, monkeypatch):
    out = tmp_path / "run"
    experiment(out)
    monkeypatch.setattr(RunWriter, "figure", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        experiment(out, force=True, samples=20)
    assert open_run(out).summary["samples"] == 10
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_stands_under_the_name_while_a_run_goes_on(tmp_path):
    out = tmp_path / "run"
    sources = {
        "run": Source({"samples": 10}, "settings"),
        "hardware": read_source(Hardware, "mesh"),
        "workload": read_source(Workload, SMALL),
    }
    seen: list[bool] = []
    run_experiment(resolve(sources), out, progress=lambda report: seen.append(out.exists()))
    assert seen
    assert not any(seen)
    assert out.is_dir()


def test_a_place_that_cannot_be_made_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=r"file/run: cannot be written"):
        experiment(tmp_path / "file" / "run")


# What goes wrong while running


def test_a_run_that_diverges_says_so():
    run = simulate("mesh", SMALL | {"training": SMALL["training"] | {"lr": 1e30}}, samples=40)
    assert run.summary["status"] == "diverged"
    assert run.summary["loss"] is None
    assert not np.isfinite(run.metrics["loss"]).all()
    assert len(run.metrics) == 40
    assert run.summary["cycles"] == simulate("mesh", SMALL, samples=40, timing_only=True).summary["cycles"]


def test_more_stages_than_cores_are_refused():
    machine = read_source(Hardware, "mesh").document | {"mesh": {"rows": 1, "cols": 2}}
    with pytest.raises(UserError, match=r"mesh = 1 x 2: has 2 PEs, and the network has 3 stages"):
        simulate(machine, SMALL)


def test_credits_for_another_number_of_stages_are_refused():
    machine = read_source(Hardware, "mesh").document | {"pipeline": {"credits": [1, 1]}}
    with pytest.raises(UserError, match=r"pipeline\.credits = \[1, 1\]: should have one entry per stage, here 3"):
        simulate(machine, SMALL)


def test_a_seed_that_torch_does_not_take_is_a_users_error():
    with pytest.raises(UserError, match="seed = 18446744073709551616: should be less than"):
        simulate("mesh", SMALL, samples=1, seed=2**64)


# Both backends


@pytest.mark.parametrize(
    ("workload", "samples", "stages"),
    [
        (made_up("mlp", (12,), features=12, hidden=[8, 6]), 40, 3),
        (made_up("cnn", (1, 8, 8), channels=[4, 6]), 40, 3),
        (made_up("vgg", (3, 32, 32), "module", depth=11, width=2), 20, 29),
        (made_up("resnet_cifar", (3, 8, 8), "residual", depth=20, width=4), 20, 34),
        (made_up("mlp", (12,), features=12, hidden=[]), 40, 1),
    ],
    ids=["mlp", "cnn", "vgg11", "resnet20", "one stage"],
)
@pytest.mark.parametrize("method", ["pb+lwpv+sc", "sgd:6"])
def test_both_backends_compute_the_same_losses(workload, samples, stages, method):
    machine = read_source(Hardware, "mesh").document
    machine |= {"pipeline": {"credits": 3}, "core": machine["core"] | {"pes": 4}}  # so that updates are soon read
    settings = {"precision": "float64", "threads": 1}
    runs = [
        simulate(machine, workload, method, samples=samples, backend=backend, settings=settings)
        for backend in ("numba", "torch")
    ]
    assert (runs[0].events.query("op == 'forward' and sample == 19")["version"] > 0).all()
    assert all(len(run.stages) == stages for run in runs)
    losses, others = (run.metrics.sort_values("sample")["loss"] for run in runs)
    np.testing.assert_allclose(losses, others, rtol=1e-9)
    assert losses.nunique() == samples
    weights, other_weights = (load_file(run.path / "weights.safetensors") for run in runs)
    for name, array in weights.items():
        np.testing.assert_allclose(array, other_weights[name], rtol=1e-9, atol=1e-12)
    assert runs[0].summary["cycles"] == runs[1].summary["cycles"]
    assert runs[0].summary["loss"] == pytest.approx(runs[1].summary["loss"], rel=1e-9)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("method", ["pb", "pb+lwpw+sc"])
def test_one_stage_trains_as_torchs_sgd_does(backend, method):
    """S = 1 has no delay, so that every mitigation is plain SGD at batch one."""
    workload = made_up("mlp", (12,), features=12, hidden=[])
    run = simulate("mesh", workload, method, samples=80, backend=backend, settings={"precision": "float64"})
    assert len(run.stages) == 1
    net = mlp(features=12, hidden=[], classes=4).double()
    initial = load_file(run.path / "initial.safetensors")
    net.load_state_dict({name: torch.from_numpy(array) for name, array in initial.items()})
    momentum = 0.9**0.25
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=momentum, weight_decay=1e-3)
    x, y = random_data(shape=(12,), classes=4, samples=40)
    metrics = run.metrics.sort_values("sample")
    for sample, (index, loss) in enumerate(zip(metrics["dataset_index"], metrics["loss"], strict=True)):
        peak = 0.05 * (1 - momentum) / ((1 - 0.9) * 4)
        factor = (0.5 if sample >= 40 else 1.0) * min(1.0, (sample + 1) / 4)
        optimizer.param_groups[0]["lr"] = peak * factor
        optimizer.zero_grad()
        own = torch.nn.functional.cross_entropy(net(x[index : index + 1]), y[index : index + 1])
        assert loss == pytest.approx(own.item(), rel=1e-9)
        own.backward()
        optimizer.step()
    weights = load_file(run.path / "weights.safetensors")
    for name, tensor in net.state_dict().items():
        np.testing.assert_allclose(weights[name], tensor.numpy(), rtol=1e-9)


def random_data(shape: tuple[int, ...], classes: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The training set of `random` data with seed 0."""
    rng = np.random.Generator(np.random.PCG64(0))
    means = rng.standard_normal((classes, *shape), dtype=np.float32)
    y = rng.integers(0, classes, samples)
    x = (rng.standard_normal((samples, *shape), dtype=np.float32) + means[y]) * np.float32(math.sqrt(0.5))
    return torch.from_numpy(x).double(), torch.from_numpy(y)


# Documentation


def section(title: str) -> dict[str, list[str]]:
    """The rows of the tables in one section of the documentation, by their first cell."""
    text = DOCUMENTATION.read_text(encoding="utf-8")
    body = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert body, f"no section {title!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body[1].splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows}


TYPES = {pa.int64(): "int64", pa.float64(): "float64", pa.string(): "string", pa.list_(pa.string()): "list of strings"}


@pytest.mark.parametrize("name", TABLES)
def test_every_column_is_documented_with_type_unit_and_meaning(name):
    documented = section(f"{name}.parquet")
    assert documented.keys() - {"column", "---"} == set(TABLES[name].names)
    for field in TABLES[name]:
        kind, unit, meaning = documented[field.name]
        assert kind == TYPES.get(field.type, "string (dictionary)"), field.name
        assert unit == field.metadata[b"unit"].decode(), field.name
        assert meaning == field.metadata[b"description"].decode(), field.name


def dotted(table: dict[str, Any], prefix: str = "") -> list[str]:
    nested = [
        [f"{prefix}{key}", *dotted(v, f"{prefix}{key}.")] if isinstance(v, dict) else [f"{prefix}{key}"]
        for key, v in table.items()
    ]
    return list(itertools.chain(*nested))


def test_every_key_of_the_summary_is_documented(case):
    documented = section("summary.json")
    empty = tuple(f"{key}." for key, value in case.run.summary.items() if value is None)
    expected = {key for key in documented if not key.startswith(empty)} - {"key", "---"}
    assert expected == set(dotted(case.run.summary))
    assert all(meaning for _, meaning in documented.values())


def test_every_key_of_the_resolved_configuration_is_documented(case):
    documented = section("config.toml")
    assert set(Settings.model_fields) <= documented.keys()
    known = tomllib.loads(bytes_of(case.run, "config.toml").decode())
    for table in ("hardware", "workload"):
        for key, value in known[table].items():
            cell = documented[f"[{table}.{key}]" if isinstance(value, dict) else f"[{table}]"][0]
            for name in value if isinstance(value, dict) else [key]:
                assert f"`{name}`" in cell, f"{table}.{key}.{name}"


def test_every_file_of_a_run_is_documented(case):
    text = DOCUMENTATION.read_text(encoding="utf-8")
    for path in case.run.path.rglob("*"):
        assert path.is_dir() or f"`{path.relative_to(case.run.path)}`" in text


def test_the_example_of_the_documentation_runs(case, monkeypatch, capsys):
    text = DOCUMENTATION.read_text(encoding="utf-8")
    example = re.search(r"## Reading it\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert example
    place = case.run.path.with_name("parent")
    (place / "runs").mkdir(parents=True)
    (place / "runs" / "demo").symlink_to(case.run.path, target_is_directory=True)
    monkeypatch.chdir(place)
    exec(compile(example[1], "example", "exec"), {})
    assert str(case.run.summary["cycles"]) in capsys.readouterr().out
