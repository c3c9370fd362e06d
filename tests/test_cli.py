"""The command line: what it prints, what it leaves, and that what a user did wrong is said without a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import pbsim as pbsim_package
from pbsim import cli, open_run
from pbsim.config import MITIGATIONS, SCHEDULES, Hardware, Workload, shipped

UNCHECKED = (
    "not checked: whether the network is supported, fits its data and fits on the machine: "
    "pbsim run HARDWARE WORKLOAD --timing-only --samples 1"
)
BROKEN_HARDWARE = 'name = "hw"\nclock_ghz = -1\n[mesh]\nrows = 0\ncols = 4\ncolour = "red"\n'
BROKEN_WORKLOAD = (
    'name = "wl"\n[model]\nfactory = "a:b"\n[data]\nkind = "digits"\n[training]\nbatch_size = 0\nlr = 0.1\n'
)


@dataclass
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture
def pbsim(monkeypatch, capsys, tmp_path):
    """Call the entry point as the shell does, in an empty directory."""

    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["pbsim", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return call


def refused(outcome: Outcome, *messages: str) -> None:
    """Exit status 2, the messages on stderr, nothing on stdout, and no traceback."""
    assert outcome.status == 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    for message in messages:
        assert message in outcome.err


# run, end to end


def test_run_prints_a_table_and_where_everything_is(pbsim, tmp_path):
    outcome = pbsim("run", "mesh", "digits_mlp", "--method", "pb+lwpv+sc", "--samples", "50", "--out", "here/run")
    assert outcome.status == 0
    run = open_run(tmp_path / "here" / "run")
    summary = run.summary
    first = run.stages.sort_values("stage").iloc[0]
    lines = outcome.out.splitlines()
    assert "digits_mlp on mesh, pb+lwpv+sc" in lines[0]
    for name, value in (
        ("status", "finished"),
        ("test accuracy", f"{summary['accuracy']:.2%}"),
        ("test loss", f"{summary['loss']:.4f}"),
        ("samples", "50"),
        ("cycles", f"{summary['cycles']:,}"),
        ("simulated time", "s at 0.85 GHz"),
        ("throughput", f"{summary['samples_per_second']:,.0f} samples per simulated second"),
        (
            "utilization",
            f"cores busy {summary['utilization']:.1%}, {summary['mac_utilization']:.1%} of their PEs' peak MACs",
        ),
        ("bottleneck", "'flatten+linear1+relu1'"),
        ("peak memory", f"{summary['peak_memory_bytes']:,} bytes"),
        ("initiation interval", f"{summary['initiation_interval_cycles']:,} cycles: stage 0 "),
        ("energy", f"{summary['energy_joules']:.4g} J by horowitz_45nm"),
        ("energy goes to", "sram_byte"),
        ("energy counts as 0", "leakage (no entry)"),
        (
            "delay of first stage",
            f"{first['delay_mean']:.2f} updates ({first['delay_min']} to {first['delay_max']}; nominal 4)",
        ),
        ("delay of middle stage", "nominal 2"),
        ("delay of last stage", "0.00 updates (0 to 0; nominal 0)"),
    ):
        assert any(name in line and value in line for line in lines), (name, value, outcome.out)
    assert lines[-2].split()[-1] == "here/run"
    assert lines[-1].split()[-1] == "here/run/figures/utilization.png"
    assert Path(lines[-1].split()[-1]).is_file()


def test_run_from_a_shell(tmp_path):
    command = [sys.executable, "-m", "pbsim.cli", "run", "mesh", "digits_mlp", "--samples", "20", "--seed", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place = tmp_path / "runs" / "mesh-digits_mlp-pb-4"
    assert "runs/mesh-digits_mlp-pb-4" in done.stdout
    summary = json.loads((place / "summary.json").read_text())
    assert (summary["samples"], summary["seed"], summary["status"]) == (20, 4, "finished")
    assert "\x1b" not in done.stdout + done.stderr  # plain text where no terminal is


def test_run_takes_a_drained_schedule_with_its_batch(pbsim, tmp_path):
    outcome = pbsim("run", "mesh", "digits_mlp", "--method", "sgd:8", "--samples", "50", "--seed", "2")
    assert outcome.status == 0
    assert "digits_mlp on mesh, sgd:8" in outcome.out
    run = open_run(tmp_path / "runs" / "mesh-digits_mlp-sgd8-2")  # no colon in a path
    assert (run.summary["method"], run.summary["status"]) == ("sgd:8", "finished")
    assert run.config["run"]["method"] == "sgd:8"
    updates = run.events.query("op == 'update' and stage == 0").sort_values("sample")
    assert list(updates["sample"]) == [0, 8, 16, 24, 32, 40, 48]
    assert list(updates["version"]) == [1, 2, 3, 4, 5, 6, 7]
    assert (run.stages[["delay_nominal", "delay_mean", "delay_min", "delay_max"]] == 0).all(axis=None)
    lines = [line for line in outcome.out.splitlines() if "delay of first stage" in line]
    assert "0.00 updates (0 to 0; nominal 0)" in lines[0]


def test_set_reaches_hardware_workload_and_run(pbsim, tmp_path):
    outcome = pbsim(
        *("run", "mesh", "digits_mlp", "--samples", "10", "--out", "run", "--trace", "first:3"),
        *("--set", "core.vector_lanes=8", "--set", "pipeline.timing=lockstep"),
        *("--set", "model.arguments.hidden=[8]", "--set", "precision=float64", "--set", "run.seed=9"),
    )
    assert outcome.status == 0
    run = open_run(tmp_path / "run")
    assert run.config["hardware"]["core"]["vector_lanes"] == 8
    assert run.config["hardware"]["pipeline"]["timing"] == "lockstep"
    assert run.config["workload"]["model"]["arguments"]["hidden"] == [8]
    assert (run.config["run"]["precision"], run.summary["seed"]) == ("float64", 9)
    assert set(run.events["sample"]) == {0, 1, 2}
    assert list(run.stages["delay_max"]) == [2, 0]


def test_data_may_be_set_to_random(pbsim, tmp_path):
    setting = ("--set", "data.kind=random", "--set", "data.shape=[1, 8, 8]")
    assert pbsim("run", "mesh", "digits_mlp", "--samples", "10", "--out", "run", *setting).status == 0
    assert open_run(tmp_path / "run").config["workload"]["data"]["kind"] == "random"


def test_timing_only_trains_nothing_and_says_so(pbsim, tmp_path):
    outcome = pbsim("run", "mesh", "digits_mlp", "--samples", "50", "--timing-only", "--out", "run")
    assert outcome.status == 0
    assert "accuracy" not in outcome.out
    assert "cycles" in outcome.out
    run = open_run(tmp_path / "run")
    assert run.summary["timing_only"] is True
    assert run.summary["accuracy"] is None
    assert run.metrics["loss"].isna().all()
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_run_asks_before_it_replaces(pbsim, tmp_path):
    arguments = ("run", "mesh", "digits_mlp", "--timing-only", "--out", "run")
    assert pbsim(*arguments, "--samples", "10").status == 0
    refused(pbsim(*arguments, "--samples", "20"), "pbsim: run: exists already", "--force")
    assert open_run(tmp_path / "run").summary["samples"] == 10
    assert pbsim(*arguments, "--samples", "20", "--force").status == 0
    assert open_run(tmp_path / "run").summary["samples"] == 20


def test_without_out_a_taken_name_gets_a_number(pbsim, tmp_path):
    arguments = ("run", "mesh", "digits_mlp", "--timing-only", "--samples")
    for samples in (10, 20, 30):
        assert pbsim(*arguments, samples).status == 0
    names = ("mesh-digits_mlp-pb-0", "mesh-digits_mlp-pb-0_2", "mesh-digits_mlp-pb-0_3")
    assert [open_run(tmp_path / "runs" / name).summary["samples"] for name in names] == [10, 20, 30]
    assert pbsim(*arguments, 40, "--force").status == 0
    assert open_run(tmp_path / "runs" / names[0]).summary["samples"] == 40


def test_force_does_not_replace_what_is_no_run_directory(pbsim, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").write_text("keep me")
    outcome = pbsim("run", "mesh", "digits_mlp", "--samples", "10", "--out", "notes", "--force")
    refused(outcome, "pbsim: notes: is not a run directory")
    assert (tmp_path / "notes" / "note.txt").read_text() == "keep me"


# run, refused


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("mehs", "digits_mpl"), ["mehs: no such file", "'mesh'", "digits_mpl: no such file", "'digits_mlp'"]),
        (("mesh", "digits_mlp", "--method", "pb+xx"), ["method = pb+xx: unknown mitigation 'xx'; available: sc"]),
        (("mesh", "digits_mlp", "--method", "legw:256"), ["not built yet; available: pb"]),
        (("mesh", "digits_mlp", "--method", "sgd"), ["method = sgd: 'sgd' is written sgd:N"]),
        (("mesh", "digits_mlp", "--method", "sgd:8+lwpv"), ["lwpv mends stale weights, which 'sgd' does not have"]),
        (("mesh", "digits_mlp", "--samples", "0"), ["command line: samples = 0: should be greater than or equal to 1"]),
        (("mesh", "digits_mlp", "--samples", "5", "--epochs", "1"), ["samples = 5: excludes epochs"]),
        (("mesh", "digits_mlp", "--seed", "-1"), ["seed = -1"]),
        (("mesh", "digits_mlp", "--backend", "jax"), ["backend = 'jax': should be 'numba' or 'torch'"]),
        (("mesh", "digits_mlp", "--trace", "some"), ["trace = 'some': should be 'all', 'none' or 'first:N'"]),
        (("mesh", "digits_mlp", "--threads", "0"), ["threads = 0"]),
        (
            ("mesh", "digits_mlp", "--set", "name=x"),
            ["--set: name = x: stands in more than one place", "hardware.name"],
        ),
        (
            ("mesh", "digits_mlp", "--set", "core.pes=0", "--set", "training.lr=nan", "--set", "bogus=1"),
            ["--set: core.pes = 0", "--set: training.lr = nan", "--set: bogus = 1: no such key"],
        ),
        (
            ("mesh", "digits_mlp", "--set", "mesh.rows=1", "--set", "mesh.cols=2"),
            ["has 2 PEs, and the network has 3 stages"],
        ),
        (
            ("mesh", "digits_mlp", "--set", "model.factory=torch.nn:Nope"),
            ["model.factory = torch.nn:Nope", "no function"],
        ),
        (
            ("mesh", "digits_mlp", "--set", "data.kind=npz", "--set", "data.path=/not/there.npz"),
            ["data.path", "/not/there.npz"],
        ),
        (("mesh", "digits_mlp", "--set", 'training.exempt=["nope*"]'), ["training.exempt", "linear1.weight"]),
        (("mesh", "digits_mlp", "--samples", "many"), ["--samples", "valid integer"]),
        (("mesh",), ["Missing argument", "WORKLOAD"]),
        (("mesh", "digits_mlp", "--colour", "red"), ["--colour"]),
    ],
)
def test_a_users_error_ends_with_status_2_and_leaves_nothing(pbsim, tmp_path, arguments, messages):
    refused(pbsim("run", *arguments, "--out", "run"), *messages)
    assert list(tmp_path.iterdir()) == []


def test_problems_of_both_files_come_together(pbsim, tmp_path):
    (tmp_path / "hw.toml").write_text(BROKEN_HARDWARE)
    (tmp_path / "wl.toml").write_text(BROKEN_WORKLOAD)
    outcome = pbsim("run", "hw.toml", "wl.toml", "--method", "qb", "--set", "bogus=1")
    refused(
        outcome,
        "pbsim: hw.toml: clock_ghz = -1: should be greater than 0",
        "pbsim: hw.toml: mesh.rows = 0: should be greater than or equal to 1",
        "pbsim: hw.toml: mesh.colour = 'red': unknown key",
        "pbsim: hw.toml: core: is missing",
        "pbsim: wl.toml: training.batch_size = 0: should be greater than or equal to 1",
        "pbsim: --set: bogus = 1: no such key",
        "pbsim: method = qb: unknown schedule 'qb'",
    )
    assert all(line.startswith("pbsim: ") for line in outcome.err.splitlines())


def test_a_users_error_from_a_shell_has_no_traceback(tmp_path):
    (tmp_path / "hw.toml").write_text("name = \n")
    command = [sys.executable, "-m", "pbsim.cli", "run", "hw.toml", "digits_mlp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pbsim: hw.toml: is not valid TOML")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


# run, stopped


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_run_that_is_stopped_leaves_nothing_and_says_so(tmp_path, number, status, said):
    command = [sys.executable, "-m", "pbsim.cli", "run", "mesh", "digits_mlp", "--timing-only"]
    command += ["--samples", "1000000", "--out", "deep/run"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("deep/.run.*/events.parquet")):
            assert running.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == status
    assert err == f"pbsim: {said}; no run was written\n"
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_signals_are_afterwards_as_they_were(pbsim):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert pbsim("list").status == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# The run directory's name


@pytest.mark.parametrize("name", ["../../evil", "/evil", "..", ".hidden", "a/b", "x" * 300, "a\\nb"])
def test_a_name_in_a_file_does_not_lead_out_of_the_runs(pbsim, tmp_path, name):
    outcome = pbsim(
        *("run", "mesh", "digits_mlp", "--samples", "5", "--timing-only", "--set", f'hardware.name="{name}"')
    )
    assert outcome.status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    (place,) = (tmp_path / "runs").iterdir()
    assert (place / "summary.json").is_file()
    assert not place.name.startswith(".")


# credits


def test_credits_prints_choices_side_by_side_and_a_line_for_the_file(pbsim, tmp_path):
    outcome = pbsim("credits", "mesh", "digits_cnn", "--set", "fabric.hop_cycles=20")
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "credits of digits_cnn on mesh, pb"
    heading = ["credits", "cycles/sample", "throughput", "mean", "delay", "stage", "0", "stage", "1", "stage", "2"]
    assert lines[1].split() == [*heading, "stash", "bytes"]
    names = ["1f1b", "lockstep", "minimum", "minimum + 1", "minimum + 2", "2 x minimum", "4 x minimum"]
    assert [line[:11].rstrip() for line in lines[2 : 2 + len(names)]] == names
    minimum = lines[4].split()
    assert minimum[3] == "100.00%"
    assert any(line.startswith("one credit less is too few") for line in lines)
    key, _, credits = lines[-1].partition(" = ")
    assert key == "credits"
    assert int(minimum[1]) == sum(json.loads(credits))
    # what it prints goes into the file, and is then one of the choices
    again = pbsim("credits", "mesh", "digits_cnn", "--set", "fabric.hop_cycles=20", "--set", f"pipeline.{lines[-1]}")
    assert again.status == 0
    assert again.out.splitlines()[-1] == lines[-1]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


def test_credits_trades_throughput_for_delay_within_its_tolerance(pbsim):
    strict, loose = (
        pbsim("credits", "mesh", "digits_cnn", "--method", "pb+ws", "--tolerance", share).out.splitlines()
        for share in ("0", "0.5")
    )
    assert "50.00% more is allowed" in next(line for line in loose if line.startswith("reference: "))
    assert sum(json.loads(loose[-1].split(" = ")[1])) < sum(json.loads(strict[-1].split(" = ")[1]))


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("lockstep_ideal", "digits_cnn"), ["pipeline.timing = lockstep", "whatever credits say: use dataflow"]),
        (("mesh", "digits_cnn", "--method", "sgd:8"), ["method = sgd:8", "drains the pipeline at every update"]),
        (("mesh", "digits_cnn", "--tolerance", "-0.1"), ["tolerance = -0.1", "a share from 0"]),
        (("mesh", "digits_cnn", "--tolerance", "nan"), ["tolerance = nan"]),
        (("mesh", "digits_cnn", "--event-limit", "0"), ["event_limit = 0"]),
        (("nowhere", "nothing"), ["nowhere: no such file", "nothing: no such file"]),
    ],
)
def test_credits_refuses_what_has_none_to_search(pbsim, arguments, messages):
    refused(pbsim("credits", *arguments), *messages)


# check and list


def test_check_says_what_a_file_is(pbsim):
    outcome = pbsim("check", "mesh", "digits_cnn")
    assert outcome.status == 0
    assert outcome.out.splitlines() == [
        "mesh: hardware 'mesh': keys and values are valid",
        "mesh: note: energy horowitz_45nm has no entry for leakage (float16): 0 pJ",
        "digits_cnn: workload 'digits_cnn': keys and values are valid",
        "digits_cnn: pbsim.network.zoo:cnn is there and takes its arguments",
        UNCHECKED,
    ]


def test_check_looks_up_energy_factory_and_data(pbsim, tmp_path, monkeypatch):
    monkeypatch.setenv("PBSIM_DATA", str(tmp_path))
    lines = pbsim("check", "lockstep_ideal", "resnet20_cifar10").out.splitlines()
    assert "lockstep_ideal: note: no [energy] table: energy is not counted" in lines
    missing = [line for line in lines if line.startswith("resnet20_cifar10: warning: no data here: ")]
    assert "--set data.kind=image_folder --set data.path=PATH" in missing[0]
    (tmp_path / "cifar10").mkdir()
    lines = pbsim("check", "resnet20_cifar10").out.splitlines()
    assert f"resnet20_cifar10: data at {tmp_path / 'cifar10'} (not read)" in lines

    text = shipped(Workload)["digits_mlp"].read_text()
    (tmp_path / "mine.toml").write_text(text.replace("pbsim.network.zoo:mlp", "mine.py:net"))
    refused(pbsim("check", "mine.toml"), "mine.toml: model.factory = mine.py:net: there is no file")
    (tmp_path / "mine.py").write_text("def net(width): ...")
    outcome = pbsim("check", "mine.toml")
    refused(outcome, "mine.toml: model.arguments = {'features': 64", "the factory is mine.py:net(width)")
    (tmp_path / "mine.py").write_text("def net(**sizes): raise RuntimeError")  # looked up, not called
    assert pbsim("check", "mine.toml").status == 0

    machine = shipped(Hardware)["mesh"].read_text()
    (tmp_path / "hw.toml").write_text(machine.replace("horowitz_45nm", "horowitz"))
    refused(pbsim("check", "hw.toml"), "hw.toml: energy.table = 'horowitz': should be 'horowitz_45nm' or '7nm'")
    (tmp_path / "hw.toml").write_text(machine.replace("float16", "float64"))
    assert "no entry for mac, vector_op, leakage (float64): 0 pJ" in pbsim("check", "hw.toml").out


def test_check_reports_every_problem_of_every_file(pbsim, tmp_path):
    (tmp_path / "hw.toml").write_text(BROKEN_HARDWARE)
    (tmp_path / "wl.toml").write_text(BROKEN_WORKLOAD)
    (tmp_path / "torn.toml").write_text("[mesh\n")
    (tmp_path / "other.toml").write_text("colour = 1\n")
    outcome = pbsim("check", "hw.toml", "mesh", "wl.toml", "torn.toml", "other.toml", "nothing")
    assert outcome.status == 2
    assert outcome.out.splitlines()[0] == "mesh: hardware 'mesh': keys and values are valid"
    assert UNCHECKED not in outcome.out
    for message in (
        "hw.toml: clock_ghz = -1",
        "hw.toml: mesh.rows = 0",
        "hw.toml: mesh.colour = 'red'",
        "wl.toml: training.batch_size = 0",
        "torn.toml: is not valid TOML",
        "other.toml: is neither a hardware file",
        "nothing: no such file",
    ):
        assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_list_names_everything_that_is_shipped_with_a_word_on_each(pbsim):
    outcome = pbsim("list")
    assert outcome.status == 0
    described = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines() if line.startswith("  ")}
    assert described.keys() == {*shipped(Hardware), *shipped(Workload), *SCHEDULES, *MITIGATIONS}
    assert all(described.values())


# Quick to answer


def test_help_loads_nothing_heavy():
    program = (
        "import sys; sys.argv = ['pbsim', '--help']\n"
        "from pbsim.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print('status', end.code, file=sys.stderr)\n"
        "heavy = {'torch', 'numba', 'matplotlib', 'pandas', 'sklearn', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["status 0", "[]"]
    for command in ("run", "credits", "check", "list"):
        assert command in done.stdout


def test_version_and_short_help(pbsim):
    outcome = pbsim("--version")
    assert (outcome.status, outcome.out) == (0, f"pbsim {pbsim_package.__version__}\n")
    assert pbsim("-h").out == pbsim("--help").out
    assert pbsim("run", "-h").out == pbsim("run", "--help").out


def test_the_help_of_run_names_every_flag(pbsim):
    outcome = pbsim("run", "--help")
    assert outcome.status == 0
    for flag in (
        *("--method", "--samples", "--epochs", "--seed", "--out", "--timing-only"),
        *("--backend", "--trace", "--threads", "--set", "--force"),
    ):
        assert flag in outcome.out
