"""Every statement of DESIGN about a run directory, held to by a program that reads only the directory."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import replay

import pbsim

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("pb", "pb+lwpv+sc", "pb+lwpw", "pb+ws")
SPLIT = {"core": {"units": "split"}}
LOCKSTEP = {"pipeline": {"timing": "lockstep"}}
CASES = {
    **{f"dataflow {method}": ("digits_cnn", {}, method, {}) for method in METHODS},
    **{f"lockstep {method}": ("digits_cnn", LOCKSTEP, method, {}) for method in METHODS},
    "split dataflow": ("digits_cnn", SPLIT, "pb+lwpv+sc", {}),
    "split lockstep": ("digits_cnn", SPLIT | LOCKSTEP, "pb+lwpw+sc", {}),
    "mlp": ("digits_mlp", {}, "pb+lwpv+sc", {}),
    "mlp unbounded credits": ("digits_mlp", {"pipeline": {"credits": "unbounded"}}, "pb+lwpw=2+sc=0.5", {}),
    "mlp 1f1b credits": ("digits_mlp", {"pipeline": {"credits": "1f1b"}}, "pb+lwpv+sc", {}),
    "mlp two credits": ("digits_mlp", {"pipeline": {"credits": 2}}, "pb+sc", {}),
    "mlp credits per stage": ("digits_mlp", {"pipeline": {"credits": [3, 1, 2]}}, "pb+lwpv", {}),
    "mlp forward first": ("digits_mlp", {"pipeline": {"priority": "forward"}} | SPLIT, "pb+ws", {}),
    "nominal": ("digits_mlp", {}, "pb+lwpv+sc@nominal", {}),
    "evaluations within": ("digits_cnn", {}, "pb", {"evaluate_every_epochs": 0.07}),
    "torch backend": ("digits_cnn", {}, "pb+lwpv+sc", {"backend": "torch"}),
    "sgd dataflow": ("digits_cnn", {}, "sgd:8", {}),
    "sgd lockstep": ("digits_cnn", LOCKSTEP, "sgd:32", {}),
    "sgd split dataflow": ("digits_cnn", SPLIT, "sgd:7", {}),
    "sgd split lockstep": ("digits_cnn", SPLIT | LOCKSTEP, "sgd:1", {}),
    "sgd unbounded credits": ("digits_mlp", {"pipeline": {"credits": "unbounded"}}, "sgd:16", {}),
    "sgd torch backend": ("digits_cnn", {}, "sgd:8", {"backend": "torch"}),
    "sgd evaluations within": ("digits_cnn", {}, "sgd:32", {"evaluate_every_epochs": 0.015}),  # 2 in some batches
    "sgd two epochs": ("digits_mlp", {}, "sgd:32", {"samples": 1500}),  # of 1437: a batch of 29 at the end of the first
}


def table(folder: str, name: str, changes: dict) -> dict:
    """A shipped file as dictionaries, with keys of its tables changed."""
    document = tomllib.loads((ROOT / folder / f"{name}.toml").read_text())
    return document | {key: document[key] | value for key, value in changes.items()}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory):
    """Runs by the name of their case, each simulated once."""

    @lru_cache
    def simulated(case: str) -> replay.RunFiles:
        workload, hardware, method, extra = CASES[case]
        training = {key: value for key, value in extra.items() if key not in ("backend", "samples")}
        place = tmp_path_factory.mktemp("replay") / "run"
        pbsim.simulate(
            table("hwconfigs", "mesh", hardware),
            table("workloads", workload, {"training": training}),
            method,
            samples=extra.get("samples", 300),
            backend=extra.get("backend", "numba"),
            settings={"precision": "float64"},
            out=place,
        )
        return replay.RunFiles(place)

    return simulated


@pytest.mark.parametrize("case", CASES)
def test_an_independent_program_computes_the_same_numbers(case: str, opened) -> None:
    found = replay.differences(opened(case))
    assert all(difference < 1e-9 for difference in found.values()), found


@pytest.mark.parametrize("case", CASES)
def test_versions_follow_from_the_order_of_reads_and_writes(case: str, opened) -> None:
    replay.check_trace(opened(case))


@pytest.mark.parametrize("case", CASES)
def test_tables_have_the_columns_and_types_of_the_design(case: str, opened) -> None:
    replay.check_schema(opened(case))


@pytest.mark.parametrize("case", CASES)
def test_reports_follow_from_the_trace(case: str, opened) -> None:
    replay.check_reports(opened(case))


@pytest.mark.parametrize("case", ["dataflow pb", "nominal"])
def test_the_resolved_configuration_has_the_promised_keys(case: str, opened) -> None:
    replay.check_config(opened(case))


def test_a_run_by_the_workloads_own_epochs_records_its_length(tmp_path: Path) -> None:
    workload = table("workloads", "digits_mlp", {"training": {"epochs": 1}, "data": {"train_samples": 40}})
    pbsim.simulate("mesh", workload, settings={"precision": "float64"}, out=tmp_path / "run")
    run = replay.RunFiles(tmp_path / "run")
    replay.check_config(run)
    assert run.samples == 40


def test_the_replay_evaluates_within_the_run(opened) -> None:
    """The cases that are to show it have rows before the last; of batches, two behind the same update."""
    assert len(opened("evaluations within").tables["evaluations"]) > 1
    assert opened("sgd evaluations within").tables["evaluations"]["cycle"].duplicated().any()


def test_the_replay_sees_a_smaller_batch_at_the_end_of_an_epoch(opened) -> None:
    lengths = np.bincount(opened("sgd two epochs").batch_of)
    assert lengths.tolist() == [32] * 44 + [29, 32, 31]
