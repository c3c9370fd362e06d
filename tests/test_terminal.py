"""What a run says at its end: every line of the table, its progress, and the labels of its figure."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from torch import nn

import pbsim
from pbsim.config import Hardware, read_source
from pbsim.experiment import resolve, run_experiment
from pbsim.results import Run, progress, terminal
from pbsim.results.figures import PARTS, stage_label
from pbsim.results.progress import Report

NETWORK: dict[str, Any] = {
    "name": "made_up",
    "model": {"factory": "pbsim.network.zoo:mlp", "arguments": {"features": 6, "hidden": [5], "classes": 3}},
    "data": {"kind": "random", "shape": [6], "classes": 3, "train_samples": 40, "test_samples": 10},
    "training": {"batch_size": 4, "lr": 0.05, "momentum": 0.9},
}
"""Two stages: a nominal delay of 2 at the first."""


def timed(machine: Any = "mesh", samples: int = 20, workload: Any = NETWORK, **arguments: Any) -> Run:
    return pbsim.simulate(machine, workload, samples=samples, timing_only=True, **arguments)


def changed(name: str = "mesh", **tables: Mapping[str, Any]) -> dict[str, Any]:
    document = read_source(Hardware, name).document
    return document | {table: document.get(table, {}) | keys for table, keys in tables.items()}


def said(run: Run) -> dict[str, str]:
    return dict(terminal.rows(run))


def printed(run: Run, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    terminal.print_run(run, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_brackets_in_values_are_printed_as_they_are():
    text = printed(timed(changed("lockstep_ideal", **{}) | {"name": "[bold]hw[/x]"}))
    assert "the hardware file has no [energy] table" in text
    assert "made_up on [bold]hw[/x], pb" in text


# Utilization of PEs


def test_mac_utilization_is_macs_over_what_all_pes_could_do():
    run = timed(samples=50)
    per_sample = run.stages[[f"macs_{op}" for op in ("forward", "input_gradient", "weight_gradient")]].sum().sum()
    peak = run.stages["pes"].sum() * 4  # macs_per_cycle
    share = run.summary["mac_utilization"]
    assert share == pytest.approx(50 * per_sample / (peak * run.summary["cycles"]), rel=1e-12)
    assert 0 < share < 1
    assert (
        said(run)["utilization"] == f"cores busy {run.summary['utilization']:.1%}, {share:.1%} of their PEs' peak MACs"
    )


def test_split_units_have_the_datapath_twice():
    run = timed(changed(core={"units": "split"}), samples=50)
    energy = run.energy[run.energy["action"] == "mac"]["count"].sum()
    peak = 2 * 4 * run.stages["pes"].sum() * run.summary["cycles"]
    assert run.summary["mac_utilization"] == pytest.approx(energy / peak, rel=1e-12)


def test_without_a_peak_only_cores_are_said_to_be_busy():
    run = timed("lockstep_ideal")
    assert run.summary["mac_utilization"] is None
    assert said(run)["utilization"] == f"cores busy {run.summary['utilization']:.1%}"


# Memory


def test_overflowing_cores_are_counted_and_the_worst_is_named():
    run = timed(changed(core={"sram_kib": 1 / 16, "pes": 1}, pipeline={"allocation": "uniform"}))
    totals = run.memory[run.memory["category"] == "total"].set_index("core")
    worst = (totals["peak_bytes"] / totals["capacity_bytes"]).idxmax()
    memory = said(run)["peak memory"]
    assert memory.startswith(f"{run.summary['peak_memory_bytes']:,} bytes on all cores together, which have 128; ")
    need = totals["peak_bytes"][worst] / 1024
    assert f"over SRAM on 2 of 2 cores, worst core {worst}: {need:.5g} of 0.0625 KiB" in memory
    assert "over SRAM" not in said(timed())["peak memory"]


# Long runs


def test_lockstep_says_how_long_a_step_is():
    run = timed("lockstep_ideal")
    assert said(run)["lockstep"] == "a step of all cores takes 6 cycles"
    assert "lockstep" not in said(timed())


def test_a_run_continued_by_arithmetic_says_so():
    run = timed("lockstep_ideal", samples=100_000)
    steady = run.summary["steady_state"]
    regime = f"periodic from sample {steady['from_sample']}: 1 sample in 6 cycles"
    skipped = f"timing of {steady['skipped_samples']:,} samples not simulated one by one"
    assert said(run)["steady state"] == f"{regime}, {skipped}"
    assert steady["skipped_samples"] > 99_000


def test_an_estimate_is_marked(tmp_path):
    run = timed()
    run.summary["estimate"] = {
        "simulated_samples": 9, "windows": 8, "cycles_per_sample_least": 10.5, "cycles_per_sample_most": 1234.25,
    }  # fmt: skip
    expected = "no repetition within the budget of events; cycles per sample between 10.50 and 1,234.25 over 8 windows"
    assert said(run)["ESTIMATE"] == expected


@pytest.mark.parametrize(("samples", "method", "noted"), [(3, "pb", True), (4, "pb", False), (3, "sgd:2", False)])
def test_a_run_too_short_to_fill_the_pipeline_is_noted(samples, method, noted):
    run = timed(samples=samples, method=method)
    assert ("note" in said(run)) == noted
    assert [note for note in run.summary["notes"] if "fill and drain" in note] == run.summary["notes"]
    if noted:
        assert "a nominal delay of 2 updates: take at least 4" in said(run)["note"]


# Progress


@pytest.mark.parametrize("machine", ["mesh", "lockstep_ideal"])
@pytest.mark.parametrize("timing_only", [True, False])
def test_the_last_report_of_progress_is_of_the_finished_run(machine, timing_only):
    from pbsim.config import Source, Workload

    sources = {
        "hardware": read_source(Hardware, machine),
        "workload": read_source(Workload, NETWORK),
        "run": Source({"samples": 30, "timing_only": timing_only}, "settings"),
    }
    reports: list[Report] = []
    run = run_experiment(resolve(sources), None, progress=reports.append)
    assert (reports[-1].samples, reports[-1].total, reports[-1].cycles) == (30, 30, run.summary["cycles"])
    assert all(report.samples < 30 for report in reports[:-1])


def test_a_line_of_progress_promises_nothing_before_the_first_sample(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)
    with progress.LineProgress() as shown:
        shown.update(Report(0, 10, 3, float("nan")))
        shown.update(Report(5, 10, 30, 1.5))
    first, second = capsys.readouterr().err.splitlines()
    assert "nan" not in first
    assert first.startswith("0 of 10 samples")
    assert "loss 1.5000" in second
    assert second.endswith("s left")


# Figure


def legend(run: Run) -> list[str]:
    (axes,) = run.plot_utilization().axes
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_legend_lists_what_can_be_seen():
    run = timed(samples=2000)
    shares = {label: (run.cores[name] / run.cores["total"]).max() for name, (label, _) in PARTS.items()}
    assert 0 < shares["idle (fill, drain)"] < 0.004
    assert "idle (fill, drain)" not in legend(run)
    assert {"forward", "weight gradient"} <= set(legend(run))
    assert "idle (fill, drain)" in legend(timed(samples=5))
    assert PARTS["stall_memory"][0] == "stall: credit or memory"


def test_numbered_modules_are_labelled_with_their_operators():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    run = timed(model=model)
    assert list(run.stages.sort_values("stage")["name"]) == ["0+1", "2"]
    labels = [stage_label(stage) for _, stage in run.stages.sort_values("stage").iterrows()]
    assert labels == ["0+1 (linear, relu)", "2 (linear, cross_entropy)"]
    assert said(run)["delay of first stage"].endswith("  stage 0 0+1 (linear, relu)")
    (axes,) = run.plot_utilization().axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        "0: 0+1\nlinear\nrelu",
        "1: 2\nlinear\ncross_entropy",
    ]


def test_of_many_stages_the_label_is_the_first_module():
    model = nn.Sequential(*(layer for _ in range(7) for layer in (nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 3))
    (axes,) = timed(model=model).plot_utilization().axes
    assert [tick.get_text() for tick in axes.get_xticklabels()][:2] == ["0: 0 linear …", "1: 2 linear …"]
    (axes,) = timed("mesh", workload="resnet20_cifar10", samples=2).plot_utilization().axes
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels[0] == "0: stem"
    assert labels[1].endswith("norm1 …")
