"""Files a user writes: what is filled in, what is refused and in which words, and that resolved files read back."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbsim.config import (
    Hardware,
    Settings,
    Source,
    Workload,
    dump_resolved,
    parse_method,
    plain,
    shipped,
    validate,
    validate_all,
)
from pbsim.config.files import read_source
from pbsim.config.hardware import Core
from pbsim.errors import Problem, UserError
from pbsim.experiment import Resolved, load_hardware, load_workload, resolve

VECTOR = {"kind": "vector", "macs_per_cycle": 4}
UNIT = {
    "kind": "unit",
    "forward_cycles": 3,
    "input_gradient_cycles": 1,
    "weight_gradient_cycles": 1,
    "update_cycles": 1,
}


def hardware(**tables: Any) -> dict[str, Any]:
    """The least hardware file, with tables or keys added."""
    core = {"datapath": VECTOR, "sram_kib": 48, "sram_bytes_per_cycle": 24}
    least: dict[str, Any] = {
        "name": "small",
        "clock_ghz": 1.0,
        "mesh": {"rows": 4, "cols": 4},
        "core": core,
        "fabric": {"link_bytes_per_cycle": 4},
        "host": {"bytes_per_cycle": 64},
    }
    return least | tables


def workload(**tables: Any) -> dict[str, Any]:
    """The least workload file, with tables or keys added."""
    least: dict[str, Any] = {
        "name": "toy",
        "model": {"factory": "pbsim.network.zoo:mlp"},
        "data": {"kind": "digits"},
        "training": {"batch_size": 32, "lr": 0.1},
    }
    return least | tables


def training(**keys: Any) -> dict[str, Any]:
    return workload(training={"batch_size": 32, "lr": 0.1} | keys)


def problems_of(kind: type, document: dict[str, Any], where: str = "file.toml") -> list[Problem]:
    with pytest.raises(UserError) as caught:
        validate(kind, Source(document, where))
    return list(caught.value.problems)


def the_problem(kind: type, document: dict[str, Any]) -> Problem:
    problems = problems_of(kind, document)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def resolved(*overrides: str, run: dict[str, Any] | None = None) -> Resolved:
    """The shipped files with `--set` overrides."""
    sources = {
        "run": Source(dict(run or {}), "command line"),
        "hardware": read_source(Hardware, "mesh"),
        "workload": read_source(Workload, "digits_mlp"),
    }
    return resolve(sources, overrides)


def refusal(*overrides: str, run: dict[str, Any] | None = None) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        resolved(*overrides, run=run)
    return list(caught.value.problems)


# Defaults (DESIGN.md 7)


def test_defaults_of_a_workload():
    table = validate(Workload, Source(workload(), "file.toml"))
    assert table.model.partition == "layer"
    assert table.model.arguments == {}
    assert table.loss.kind == "cross_entropy"
    assert table.data.augment == []
    recipe = table.training
    assert (recipe.warmup_epochs, recipe.weight_decay, recipe.momentum) == (0, 0, 0)
    assert recipe.decay.kind == "constant"
    assert recipe.scale is True
    assert recipe.optimizer == "sgd"
    assert recipe.nesterov is False
    assert recipe.exempt == []
    assert recipe.evaluate_every_epochs == 1


def test_defaults_of_hardware():
    table = validate(Hardware, Source(hardware(), "file.toml"))
    assert table.datatype == "float16"
    assert table.element_bytes == 2
    pipeline = table.pipeline
    assert (pipeline.timing, pipeline.credits, pipeline.output_slots) == ("dataflow", "lockstep", 2)
    assert (pipeline.priority, pipeline.placement, pipeline.memory) == ("backward", "snake", "report")
    assert table.core.units == "shared"
    assert table.batch_parallel is None
    assert table.energy is None


def test_defaults_of_settings():
    table = Settings()
    assert (table.method, table.seed, table.precision) == ("pb", 0, "float32")
    assert (table.horizon, table.backend) == ("measured", "numba")
    assert (table.samples, table.epochs, table.threads) == (None, None, None)
    assert table.timing_only is False


AWAITS_SYSTOLIC = pytest.mark.xfail(
    "systolic" not in str(Core.model_fields["datapath"]).lower(), reason="systolic_32 awaits its datapath", strict=True
)


@pytest.mark.parametrize(
    ("kind", "load"),
    [pytest.param(Hardware, load_hardware, marks=AWAITS_SYSTOLIC), (Workload, load_workload)],
)
def test_every_shipped_file_is_valid_and_named_after_itself(kind, load):
    names = shipped(kind)
    assert names
    assert [load(name).name for name in names] == list(names)
    assert [load(path).name for path in names.values()] == list(names)


def test_integers_stand_for_floats_and_inf_makes_a_rate_free():
    table = validate(Hardware, Source(hardware(clock_ghz=1, host={"bytes_per_cycle": math.inf}), "file.toml"))
    assert table.clock_ghz == 1.0
    assert table.host.bytes_per_cycle == math.inf


# What is refused, and in which words


CORE = {"datapath": VECTOR, "sram_kib": 48, "sram_bytes_per_cycle": 24}


@pytest.mark.parametrize(
    ("document", "key", "value", "allowed"),
    [
        (hardware(mesh={"rows": 0, "cols": 4}), "mesh.rows", "0", "greater than or equal to 1"),
        (hardware(mesh={"rows": 4, "cols": -4}), "mesh.cols", "-4", "greater than or equal to 1"),
        (hardware(mesh={"rows": 4, "cols": 2.5}), "mesh.cols", "2.5", "integer"),
        (hardware(mesh={"rows": "4", "cols": 4}), "mesh.rows", "'4'", "integer"),
        (hardware(mesh={"rows": True, "cols": 4}), "mesh.rows", "True", "integer"),
        (hardware(core=CORE | {"pes": 0}), "core.pes", "0", "greater than or equal to 1"),
        (hardware(core=CORE | {"sram_kib": 0}), "core.sram_kib", "0", "greater than 0"),
        (hardware(core=CORE | {"sram_kib": math.inf}), "core.sram_kib", "inf", "finite"),
        (hardware(core=CORE | {"units": "two"}), "core.units", "'two'", "'shared' or 'split'"),
        (hardware(clock_ghz=-0.85), "clock_ghz", "-0.85", "greater than 0"),
        (hardware(clock_ghz=math.nan), "clock_ghz", "nan", "greater than 0"),
        (hardware(datatype="float8"), "datatype", "'float8'", "'bfloat16'"),
        (hardware(host={"bytes_per_cycle": -1}), "host.bytes_per_cycle", "-1", "greater than 0"),
        (hardware(host={"bytes_per_cycle": math.nan}), "host.bytes_per_cycle", "nan", "greater than 0"),
        (hardware(fabric={"link_bytes_per_cycle": 0}), "fabric.link_bytes_per_cycle", "0", "greater than 0"),
        (
            hardware(fabric={"link_bytes_per_cycle": 4, "hop_cycles": -1}),
            "fabric.hop_cycles",
            "-1",
            "greater than or equal to 0",
        ),
        (hardware(pipeline={"timing": "lock"}), "pipeline.timing", "'lock'", "'dataflow' or 'lockstep'"),
        (hardware(pipeline={"credits": 0}), "pipeline.credits", "0", "'unbounded'"),
        (hardware(pipeline={"credits": "lots"}), "pipeline.credits", "'lots'", "'1f1b'"),
        (hardware(pipeline={"output_slots": 0}), "pipeline.output_slots", "0", "greater than or equal to 1"),
        (
            hardware(core=CORE | {"datapath": VECTOR | {"kind": "systolyc"}}),
            "core.datapath.kind",
            "'systolyc'",
            "'vector', 'systolic', 'unit'",
        ),
        (
            hardware(core=CORE | {"datapath": {"macs_per_cycle": 4}}),
            "core.datapath",
            "{'macs_per_cycle': 4}",
            "kind",
        ),
        (hardware(core=CORE | {"datapath": {"kind": "vector"}}), "core.datapath.macs_per_cycle", "", "missing"),
        (
            hardware(core=CORE | {"datapath": UNIT | {"update_cycles": 0}}),
            "core.datapath.update_cycles",
            "0",
            "greater than or equal to 1",
        ),
        (hardware(mesh={"rows": 4}), "mesh.cols", "", "missing"),
        (hardware(mesh={"rows": 4, "cols": 4, "colums": 4}), "mesh.colums", "4", "did you mean 'cols'?"),
        (hardware(cloc_ghz=1.0), "cloc_ghz", "1.0", "did you mean 'clock_ghz'?"),
        (hardware(zzz=1), "zzz", "1", "known: name, clock_ghz"),
        (
            hardware(energy={"mac": {"pj": -1, "source": "a table"}}),
            "energy.mac.pj",
            "-1",
            "greater than or equal to 0",
        ),
        (hardware(energy={"mac": {"pj": 1}}), "energy.mac.source", "", "missing"),
        (hardware(energy={"table": "45nm"}), "energy.table", "'45nm'", "'horowitz_45nm' or '7nm'"),
        (
            hardware(energy={"flop": {"pj": 1, "source": "x"}}),
            "energy.flop",
            "{'pj': 1, 'source': 'x'}",
            "unknown key; known: table, mac, vector_op, sram_byte, link_byte_hop, host_byte, leakage",
        ),
        (
            hardware(core=CORE | {"datapath": {"kind": "systolic", "rows": 8, "cols": 8, "dataflow": "rs"}}),
            "core.datapath.dataflow",
            "'rs'",
            "'os', 'ws' or 'is'",
        ),
        (
            hardware(batch_parallel={"replicas": 0, "offchip_bytes_per_cycle": 1}),
            "batch_parallel.replicas",
            "0",
            "'fit'",
        ),
    ],
)
def test_a_wrong_hardware_key_is_named_with_its_value_and_what_is_allowed(document, key, value, allowed):
    problem = the_problem(Hardware, document)
    assert (problem.where, problem.key, problem.value) == ("file.toml", key, value)
    assert allowed in problem.allowed


@pytest.mark.parametrize(
    ("document", "key", "value", "allowed"),
    [
        (training(lr=-0.1), "training.lr", "-0.1", "greater than or equal to 0"),
        (training(lr=math.nan), "training.lr", "nan", "greater than or equal to 0"),
        (training(lr=math.inf), "training.lr", "inf", "finite"),
        (training(lr="0.1"), "training.lr", "'0.1'", "number"),
        (training(momentum=1.0), "training.momentum", "1.0", "less than 1"),
        (training(momentum=math.nan), "training.momentum", "nan", "less than 1"),
        (training(momentum=-0.1), "training.momentum", "-0.1", "greater than or equal to 0"),
        (training(weight_decay=-1e-4), "training.weight_decay", "-0.0001", "greater than or equal to 0"),
        (training(batch_size=0), "training.batch_size", "0", "greater than or equal to 1"),
        (training(epochs=0), "training.epochs", "0", "greater than or equal to 1"),
        (training(epochs=1.5), "training.epochs", "1.5", "integer"),
        (training(warmup_epochs=-1), "training.warmup_epochs", "-1", "greater than or equal to 0"),
        (training(scale="no"), "training.scale", "'no'", "boolean"),
        (training(optimizer="adam"), "training.optimizer", "'adam'", "'sgd'"),
        (training(evaluate_every_epochs=0), "training.evaluate_every_epochs", "0", "greater than 0"),
        (training(momentun=0.9), "training.momentun", "0.9", "did you mean 'momentum'?"),
        (
            training(decay={"kind": "stairs"}),
            "training.decay.kind",
            "'stairs'",
            "'constant', 'step', 'exponential', 'polynomial', 'cosine'",
        ),
        (training(decay={"kind": "step", "at": [0.5]}), "training.decay.factor", "", "missing"),
        (
            training(decay={"kind": "step", "at": [0.5, 1.0], "factor": 0.1}),
            "training.decay.at[1]",
            "1.0",
            "less than 1",
        ),
        (training(decay={"kind": "exponential", "factor": 0}), "training.decay.factor", "0", "greater than 0"),
        (
            training(decay={"kind": "polynomial", "power": math.nan}),
            "training.decay.power",
            "nan",
            "greater than 0",
        ),
        (workload(data={"kind": "imagenet"}), "data.kind", "'imagenet'", "'image_folder'"),
        (workload(data={}), "data.kind", "", "missing"),
        (workload(data={"kind": "random", "shape": [3, 0]}), "data.shape[1]", "0", "greater than or equal to 1"),
        (workload(data={"kind": "digits", "augment": ["rotate"]}), "data.augment[0]", "'rotate'", "'flip'"),
        (workload(data={"kind": "digits", "augment": ["crop:0"]}), "data.augment[0]", "'crop:0'", "of 1 to 999"),
        (
            workload(data={"kind": "digits", "augment": ["flip", "flip"]}),
            "data.augment",
            "['flip', 'flip']",
            "once",
        ),
        (
            workload(data={"kind": "digits", "normalize": {"mean": [0.5], "std": [0]}}),
            "data.normalize.std[0]",
            "0",
            "greater than 0",
        ),
        (
            workload(data={"kind": "digits", "normalize": {"mean": [0.5, 0.5], "std": [1]}}),
            "data.normalize",
            "{'mean': [0.5, 0.5], 'std': [1]}",
            "one entry per channel",
        ),
        (workload(loss={"kind": "hinge"}), "loss.kind", "'hinge'", "'cross_entropy' or 'mse'"),
        (workload(model={"factory": "mlp"}), "model.factory", "'mlp'", ":"),
        (
            workload(model={"factory": "a:b", "partition": "layers"}),
            "model.partition",
            "'layers'",
            "'layer', 'module' or 'residual'",
        ),
    ],
)
def test_a_wrong_workload_key_is_named_with_its_value_and_what_is_allowed(document, key, value, allowed):
    problem = the_problem(Workload, document)
    assert (problem.where, problem.key, problem.value) == ("file.toml", key, value)
    assert allowed in problem.allowed


@pytest.mark.parametrize(
    ("run", "key", "value", "allowed"),
    [
        ({"seed": -1}, "seed", "-1", "greater than or equal to 0"),
        ({"seed": "one"}, "seed", "'one'", "integer"),
        ({"samples": 0}, "samples", "0", "greater than or equal to 1"),
        ({"epochs": 0}, "epochs", "0", "greater than or equal to 1"),
        ({"samples": 10, "epochs": 2}, "samples", "10", "excludes epochs"),
        ({"precision": "float16"}, "precision", "'float16'", "'float32' or 'float64'"),
        ({"horizon": "guessed"}, "horizon", "'guessed'", "'measured' or 'nominal'"),
        ({"backend": "jax"}, "backend", "'jax'", "'numba' or 'torch'"),
        ({"trace": "first:0"}, "trace", "'first:0'", "'first:N'"),
        ({"trace": "some"}, "trace", "'some'", "'all', 'none' or 'first:N'"),
        ({"threads": 0}, "threads", "0", "greater than or equal to 1"),
        ({"precison": "float64"}, "precison", "'float64'", "did you mean 'precision'?"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(run, key, value, allowed):
    (problem,) = refusal(run=run)
    assert (problem.where, problem.key, problem.value) == ("command line", key, value)
    assert allowed in problem.allowed


def test_all_problems_of_a_file_come_at_once():
    document = hardware(
        name=3,
        mesh={"rows": 0, "cols": -1, "depth": 3},
        fabric={},
        pipeline={"credits": "lots", "timing": "lock"},
        bogus=1,
    )
    del document["host"]
    assert {problem.key for problem in problems_of(Hardware, document)} == {
        "name",
        "mesh.rows",
        "mesh.cols",
        "mesh.depth",
        "fabric.link_bytes_per_cycle",
        "pipeline.credits",
        "pipeline.timing",
        "bogus",
        "host",
    }


def test_problems_of_all_files_and_the_method_come_in_one_message(tmp_path):
    (tmp_path / "hw.toml").write_text('name = "hw"\n[mesh]\nrows = 0\ncols = 4\n')
    (tmp_path / "wl.toml").write_text('name = "wl"\n[training]\nbatch_size = 32\nlr = -1\n')
    sources = {
        "run": Source({"seed": -1, "method": "qb+sc+xx"}, "command line"),
        "hardware": read_source(Hardware, tmp_path / "hw.toml"),
        "workload": read_source(Workload, tmp_path / "wl.toml"),
    }
    with pytest.raises(UserError) as caught:
        resolve(sources, ("bogus=3", "training.momentum=2"))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    for expected in (
        f"{tmp_path}/hw.toml: mesh.rows = 0: should be greater than or equal to 1",
        f"{tmp_path}/hw.toml: core: is missing",
        f"{tmp_path}/wl.toml: training.lr = -1: should be greater than or equal to 0",
        f"{tmp_path}/wl.toml: model: is missing",
        "command line: seed = -1: should be greater than or equal to 0",
        "--set: bogus = 3: no such key",
        "--set: training.momentum = 2: should be less than 1",
        "method = qb+sc+xx: unknown schedule 'qb'; available: pb, sgd:N",
        "method = qb+sc+xx: unknown mitigation 'xx'; available: sc, lwpv, lwpw, ws",
    ):
        assert expected in lines


def test_validate_all_reports_every_file():
    pairs = (
        (Hardware, Source(hardware(clock_ghz=0), "one.toml")),
        (Workload, Source(training(lr=-1), "two.toml")),
    )
    with pytest.raises(UserError) as caught:
        validate_all(*pairs)
    assert [problem.where for problem in caught.value.problems] == ["one.toml", "two.toml"]


def test_malformed_toml_names_file_and_line(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text('name = "x"\nclock_ghz = = 1\n')
    with pytest.raises(UserError, match=r"broken\.toml: is not valid TOML: .*line 2"):
        load_hardware(path)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(UserError, match=r"binary\.toml: is not valid TOML"):
        load_workload(path)


def test_a_missing_file_lists_what_is_shipped_and_suggests_the_nearest():
    with pytest.raises(UserError) as caught:
        load_hardware("mehs")
    message = str(caught.value)
    assert message.startswith("mehs: no such file")
    assert "did you mean 'mesh'?" in message
    assert all(name in message for name in shipped(Hardware))
    with pytest.raises(UserError, match=r"no/such\.toml: no such file"):
        load_workload("no/such.toml")


# Methods


@pytest.mark.parametrize(
    ("text", "mitigations", "horizon", "written"),
    [
        ("pb", {}, None, "pb"),
        ("pb+lwpv+sc", {"lwpv": 1.0, "sc": 1.0}, None, "pb+lwpv+sc"),
        ("pb+sc=2", {"sc": 2.0}, None, "pb+sc=2"),
        ("pb+lwpw=1.5+ws", {"lwpw": 1.5, "ws": 1.0}, None, "pb+lwpw=1.5+ws"),
        ("pb+sc=1@nominal", {"sc": 1.0}, "nominal", "pb+sc"),
        ("pb@measured", {}, "measured", "pb"),
    ],
)
def test_methods_are_read_and_written(text, mitigations, horizon, written):
    method = parse_method(text)
    assert (method.schedule, method.mitigations, method.horizon) == ("pb", mitigations, horizon)
    assert (method.batch, method.drained) == (1, False)
    assert str(method) == written


@pytest.mark.parametrize("batch", [1, 8, 1024])
def test_a_drained_schedule_is_written_with_its_batch(batch):
    method = parse_method(f"sgd:{batch}")
    assert (method.schedule, method.mitigations, method.horizon) == ("sgd", {}, None)
    assert (method.batch, method.drained) == (batch, True)
    assert str(method) == f"sgd:{batch}"
    assert parse_method(str(method)) == method


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["unknown schedule ''"]),
        ("PB", ["unknown schedule 'PB'; available: pb, sgd:N"]),
        ("pb:4", ["'pb' trains at batch one"]),
        ("legw:256", ["not built yet; available: pb"]),
        ("pb+", ["unknown mitigation ''"]),
        ("pb+sc+sc", ["'sc' stands twice"]),
        ("pb+ws=2", ["'ws' takes no value"]),
        ("pb+sc=0", ["sc= takes a positive number, not '0'"]),
        ("pb+lwpv=nan", ["lwpv= takes a positive number, not 'nan'"]),
        ("pb+sc=", ["sc= takes a positive number"]),
        ("pb+lwpv+lwpw", ["choose one"]),
        *((text, ["'sgd' is written sgd:N, with a batch of N samples"]) for text in ("sgd", "sgd:", "sgd:0", "sgd:-1")),
        *((text, ["'sgd' is written sgd:N, with a batch of N samples"]) for text in ("sgd:x", "sgd:1.5", "sgd:٣")),
        ("sgd:8+sc", ["sc mends stale weights, which 'sgd' does not have"]),
        ("sgd:8+lwpv+ws", ["lwpv mends stale weights", "ws mends stale weights"]),
        ("sgd:8@nominal", ["@ says which delay mitigations use; 'sgd' has neither"]),
        ("sgd:0+xx@later", ["sgd:N", "'xx'", "'later'"]),
        ("pb@later", ["one of measured, nominal, not 'later'"]),
        ("qb+xx+ws=1@later", ["'qb'", "'xx'", "'ws' takes no value", "'later'"]),
    ],
)
def test_a_wrong_method_is_refused_with_all_that_is_wrong_in_it(text, messages):
    with pytest.raises(UserError) as caught:
        parse_method(text)
    said = str(caught.value)
    assert len(caught.value.problems) == len(messages)
    for message in messages:
        assert message in said


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sets(st.sampled_from(["sc", "lwpv", "ws"])),
    st.decimals("0.001", "100", places=3, allow_nan=False, allow_infinity=False),
)
def test_a_written_method_reads_back_as_itself(names, multiple):
    parts = [name if name == "ws" else f"{name}={multiple}" for name in sorted(names)]
    method = parse_method("+".join(["pb", *parts]))
    assert parse_method(str(method)) == method


def test_the_methods_own_horizon_wins_over_the_setting():
    assert resolved(run={"method": "pb+sc@nominal"}).settings.horizon == "nominal"
    assert resolved(run={"method": "pb+sc@nominal", "horizon": "measured"}).settings.horizon == "nominal"
    assert resolved(run={"method": "pb+sc", "horizon": "nominal"}).method.horizon == "nominal"


# --set


def test_set_changes_hardware_workload_and_run():
    table = resolved(
        "core.pes=4",
        "pipeline.timing=lockstep",
        'pipeline.priority="forward"',
        "training.lr=0.25",
        "training.decay.factor=0.5",
        "model.arguments.hidden=[8, 8]",
        "data.shape=[64]",
        "precision=float64",
        "seed=7",
    )
    assert table.hardware.core.pes == 4
    assert table.hardware.pipeline.timing == "lockstep"
    assert table.hardware.pipeline.priority == "forward"
    assert table.workload.training.lr == 0.25
    assert table.workload.training.decay.factor == 0.5
    assert table.workload.model.arguments == {"features": 64, "hidden": [8, 8], "classes": 10}
    assert table.workload.data.shape == [64]
    assert (table.settings.precision, table.settings.seed) == ("float64", 7)


def test_set_leaves_what_it_does_not_name():
    changed, before = resolved("core.pes=4"), resolved()
    assert changed.workload == before.workload
    assert plain(changed.hardware) | {"core": {}} == plain(before.hardware) | {"core": {}}
    assert plain(changed.hardware.core) == plain(before.hardware.core) | {"pes": 4}


def test_set_does_not_change_a_dictionary_that_was_handed_in():
    given = hardware()
    sources = {
        "run": Source({}, "command line"),
        "hardware": read_source(Hardware, given),
        "workload": read_source(Workload, workload()),
    }
    assert resolve(sources, ("core.pes=4",)).hardware.core.pes == 4
    assert given == hardware()


ARRAY = {"kind": "systolic", "rows": 8, "cols": 4, "dataflow": "ws", "weights": "reload"}


@pytest.mark.parametrize("wanted", [ARRAY, UNIT, VECTOR | {"overhead_cycles": 0}], ids=lambda table: table["kind"])
@pytest.mark.parametrize("given", [ARRAY, UNIT, VECTOR | {"vector_length": 8}], ids=lambda table: table["kind"])
def test_set_may_change_the_kind_of_a_datapath(given, wanted):
    sources = {
        "run": Source({}, "command line"),
        "hardware": read_source(Hardware, hardware(core=CORE | {"datapath": given})),
        "workload": read_source(Workload, workload()),
    }
    table = resolve(sources, tuple(f"core.datapath.{key}={value}" for key, value in wanted.items()))
    left = {"vector_length": 8} if given["kind"] == wanted["kind"] == "vector" else {}
    assert plain(table.hardware.core.datapath) == wanted | left


def test_set_takes_the_last_of_two():
    assert resolved("seed=1", "seed=2").settings.seed == 2


def test_set_makes_tables_that_the_file_lacks():
    table = resolved('energy.mac={pj=1.5, source="a table"}', "data.normalize={mean=[0.5], std=[2]}")
    assert table.workload.data.normalize.std == [2.0]
    assert plain(table.hardware.energy)["mac"] == {"pj": 1.5, "source": "a table"}


def test_set_wants_a_prefix_where_a_key_is_ambiguous():
    (problem,) = refusal("name=mine")
    assert (problem.where, problem.key, problem.value) == ("--set", "name", "mine")
    assert "hardware.name, workload.name" in problem.allowed
    table = resolved("hardware.name=mine", "workload.name=yours", "run.seed=3")
    assert (table.hardware.name, table.workload.name, table.settings.seed) == ("mine", "yours", 3)


@pytest.mark.parametrize(
    ("override", "key", "value", "allowed"),
    [
        ("bogus=3", "bogus", "3", "no such key"),
        ("training.momentun=0", "training.momentun", "0", "did you mean 'training.momentum'?"),
        ("core.datapath.speed=3", "core.datapath.speed", "3", "no such key"),
        ("hardware.training.lr=0", "hardware.training.lr", "0", "no such key"),
        ("hardware=3", "hardware", "3", "no such key"),
        ("seed", "seed", "", "key.path=value"),
        ("=3", "=3", "", "key.path=value"),
        ("core.pes=0", "core.pes", "0", "greater than or equal to 1"),
        ("core.pes=four", "core.pes", "'four'", "integer"),
        ("core.pes=4.0", "core.pes", "4.0", "integer"),
        ("clock_ghz=nan", "clock_ghz", "nan", "greater than 0"),
        ("run.seed=-1", "seed", "-1", "greater than or equal to 0"),
        ("energy.table.pj=3", "energy.table.pj", "3", "no such key"),
        ("energy.macs={pj=1}", "energy.macs", "{pj=1}", "did you mean 'energy.mac'?"),
        ("model.arguments.hidden.x=3", "model.arguments.hidden.x", "3", "hidden is not a table here"),
    ],
)
def test_set_refuses_unknown_keys_and_wrong_values(override, key, value, allowed):
    (problem,) = refusal(override)
    assert (problem.where, problem.key, problem.value) == ("--set", key, value)
    assert allowed in problem.allowed


@pytest.mark.parametrize(
    "override", ["pipeline.credits=[1, 0, 1]", "data.shape=[0]", "data.normalize={mean=[1], std=[0]}"]
)
def test_a_problem_inside_an_overriding_value_is_the_overrides(override):
    assert {problem.where for problem in refusal(override)} == {"--set"}


@pytest.mark.parametrize(
    ("kind", "document", "known"),
    [
        (Hardware, hardware(core=CORE | {"datapath": VECTOR | {"overhead": 1}}), "overhead_cycles"),
        (Workload, training(decay={"kind": "cosine", "at": [0.5]}), "kind"),
    ],
)
def test_an_unknown_key_of_a_table_with_kinds_comes_with_the_known_ones(kind, document, known):
    assert known in the_problem(kind, document).allowed


def test_problems_of_several_overrides_come_together():
    assert [problem.key for problem in refusal("bogus=1", "core.pes=0", "name=x")] == ["bogus", "name", "core.pes"]


def test_paths_in_a_workload_start_at_its_file(tmp_path):
    (tmp_path / "wl.toml").write_text(
        'name = "wl"\n[model]\nfactory = "net.py:make"\n[data]\nkind = "npz"\npath = "data.npz"\n'
        "[training]\nbatch_size = 1\nlr = 0.1\n"
    )
    table = load_workload(tmp_path / "wl.toml")
    assert table.data.path == str(tmp_path / "data.npz")
    assert table.model.factory == f"{tmp_path}/net.py:make"


# Round trip through the resolved file


positive = st.floats(1e-6, 1e6)
rate = positive | st.just(math.inf)
count = st.integers(1, 10**6)
text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
fraction = st.floats(1e-6, 1 - 1e-6)


def table(required: dict[str, Any], optional: dict[str, Any] | None = None) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional or {})


datapaths = (
    table(
        {"kind": st.just("vector"), "macs_per_cycle": count},
        {"overhead_cycles": st.integers(0, 9), "vector_length": count, "sram_elements_per_mac": positive},
    )
    | table(
        {"kind": st.just("systolic"), "rows": count, "cols": count, "dataflow": st.sampled_from(["os", "ws", "is"])},
        {"weights": st.sampled_from(["resident", "reload"])},
    )
    | table({key: st.just("unit") if key == "kind" else count for key in UNIT})
)

machines = table(
    {
        "name": text,
        "clock_ghz": positive,
        "mesh": table({"rows": st.integers(1, 2**16), "cols": st.integers(1, 2**16)}),
        "core": table(
            {"datapath": datapaths, "sram_kib": positive, "sram_bytes_per_cycle": rate},
            {"pes": count, "vector_lanes": count, "units": st.sampled_from(["shared", "split"])},
        ),
        "fabric": table({"link_bytes_per_cycle": rate}, {"hop_cycles": st.integers(0, 9)}),
        "host": table({"bytes_per_cycle": rate}),
    },
    {
        "datatype": st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
        "pipeline": table(
            {},
            {
                "timing": st.sampled_from(["dataflow", "lockstep"]),
                "credits": st.sampled_from(["lockstep", "1f1b", "unbounded"]) | count | st.lists(count),
                "output_slots": count,
                "priority": st.sampled_from(["backward", "forward"]),
                "allocation": st.sampled_from(["uniform", "balanced"]),
            },
        ),
        "batch_parallel": table({"replicas": count | st.just("fit"), "offchip_bytes_per_cycle": rate}),
        "energy": table(
            {},
            {
                "table": st.sampled_from(["horowitz_45nm", "7nm"]),
                "mac": table(
                    {"pj": st.floats(0, 1e6), "source": text},
                    {"confidence": st.sampled_from(["page", "derived", "recalled"])},
                ),
            },
        ),
    },
)

decays = (
    table({"kind": st.sampled_from(["constant", "cosine"])})
    | table({"kind": st.just("step"), "at": st.lists(fraction), "factor": positive})
    | table({"kind": st.just("exponential"), "factor": positive})
    | table({"kind": st.just("polynomial")}, {"power": positive})
)
argument = st.integers(-(10**9), 10**9) | st.booleans() | text | st.floats(allow_nan=False)

tasks = table(
    {
        "name": text,
        "model": table(
            {"factory": st.just("pbsim.network.zoo:mlp")},
            {
                "arguments": st.dictionaries(text, argument | st.lists(argument)),
                "partition": st.sampled_from(["layer", "module", "residual"]) | st.lists(text),
            },
        ),
        "data": table(
            {"kind": st.sampled_from(["digits", "mnist", "cifar10", "image_folder", "npz", "random"])},
            {
                "shape": st.lists(count),
                "classes": count,
                "train_samples": count,
                "test_samples": count,
                "normalize": st.integers(1, 4).flatmap(
                    lambda n: table(
                        {
                            "mean": st.lists(st.floats(-1e3, 1e3), min_size=n, max_size=n),
                            "std": st.lists(positive, min_size=n, max_size=n),
                        }
                    )
                ),
                "augment": st.sampled_from([[], ["flip"], ["crop:4", "flip"]]),
            },
        ),
        "training": table(
            {"batch_size": count, "lr": st.floats(0, 1e6)},
            {
                "momentum": st.floats(0, 1, exclude_max=True),
                "weight_decay": st.floats(0, 1),
                "epochs": count,
                "decay": decays,
                "warmup_epochs": st.floats(0, 100),
                "scale": st.booleans(),
                "nesterov": st.booleans(),
                "exempt": st.lists(text),
                "evaluate_every_epochs": positive,
            },
        ),
    },
    {"loss": table({"kind": st.sampled_from(["cross_entropy", "mse"])})},
)

runs = table(
    {},
    {
        "method": st.sampled_from(["pb", "pb+lwpv+sc", "pb+sc=2", "sgd:1", "sgd:32"]),
        "seed": st.integers(0, 2**63 - 1),
        "precision": st.sampled_from(["float32", "float64"]),
        "horizon": st.sampled_from(["measured", "nominal"]),
        "trace": st.sampled_from(["all", "none", "first:12"]),
        "backend": st.sampled_from(["numba", "torch"]),
        "samples": count,
        "threads": st.integers(1, 1024),
        "timing_only": st.booleans(),
        "handed_in": st.sampled_from([[], ["model"], ["data"], ["model", "data"]]),
    },
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(machines, tasks, runs)
def test_a_resolved_file_reads_back_as_the_same_tables(machine, task, run):
    tables = (
        validate(Hardware, Source(machine, "hardware")),
        validate(Workload, Source(task, "workload")),
        validate(Settings, Source(run, "run")),
    )
    document = tomllib.loads(dump_resolved(*tables))
    assert set(document) == {"hardware", "workload", "run"}
    for name, kind, expected in zip(document, (Hardware, Workload, Settings), tables, strict=True):
        assert validate(kind, Source(document[name], name)) == expected
    assert document["workload"]["training"].keys() >= {"batch_size", "lr", "momentum", "decay", "scale", "epochs"}


def test_a_resolved_file_holds_the_base_recipe_unscaled():
    table = resolved()
    document = tomllib.loads(dump_resolved(table.hardware, table.workload, table.settings))
    recipe = document["workload"]["training"]
    assert (recipe["batch_size"], recipe["lr"], recipe["momentum"]) == (32, 0.1, 0.9)
