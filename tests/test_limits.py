"""What Python hands in, and values at and beyond the edge: taken as meant, or refused by name."""

from __future__ import annotations

import re
import shutil
import tomllib
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from pbsim import UserError, load_workload, open_run, simulate
from pbsim.config import Hardware, Source, Workload, parse_method, read_source, shipped, validate
from pbsim.config.files import apply_overrides
from pbsim.datasets import extent, from_user, load
from pbsim.numerics.training import due_samples
from pbsim.optim import scale_recipe

WORKLOAD: dict[str, Any] = {
    "name": "made_up",
    "model": {"factory": "pbsim.network.zoo:mlp", "arguments": {"features": 6, "hidden": [5], "classes": 3}},
    "data": {"kind": "random", "shape": [6], "classes": 3, "train_samples": 40, "test_samples": 10},
    "training": {"batch_size": 4, "lr": 0.05, "momentum": 0.9},
}


def changed(table: str, **keys: Any) -> dict[str, Any]:
    return WORKLOAD | {table: WORKLOAD[table] | keys}


def hardware(table: str, **keys: Any) -> dict[str, Any]:
    document = read_source(Hardware, "mesh").document
    return document | ({table: document[table] | keys} if table else keys)


def timed(machine: Any = "mesh", workload: Any = WORKLOAD, **arguments: Any) -> Any:
    return simulate(machine, workload, timing_only=True, **({"samples": 5} | arguments))


# Settings and arguments


@pytest.mark.parametrize(
    ("settings", "kind", "place"),
    [
        ({"training.lr": 0.1}, "workload", "['training']['lr']"),
        ({"workload.training.lr": 0.1}, "workload", "['training']['lr']"),
        ({"data": {"kind": "random"}}, "workload", "['data']"),
        ({"core.sram_kib": 3.0}, "hardware", "['core']['sram_kib']"),
    ],
)
def test_a_key_of_a_file_among_the_settings_says_where_it_goes(settings, kind, place):
    ((key, value),) = settings.items()
    hint = f"settings: {key} = {value!r}: is a key of the {kind}, not of [run]: table = pbsim.load_{kind}(...)"
    with pytest.raises(UserError, match=re.escape(hint)) as caught:
        timed(settings=settings)
    assert f"then set table{place} and hand in the table" in str(caught.value)


def test_a_table_may_be_changed_as_the_hint_says():
    table = load_workload("digits_mlp").model_dump(exclude_none=True)
    table["training"]["lr"] = 0.25
    assert timed(workload=table).config["workload"]["training"]["lr"] == 0.25


@pytest.mark.parametrize(
    ("argument", "setting"),
    [
        ({"seed": 1}, {"seed": 2}),
        ({"seed": 0}, {"seed": 2}),  # the default, but given
        ({"method": "pb"}, {"method": "pb+sc"}),
        ({"backend": "numba"}, {"backend": "torch"}),
        ({"timing_only": False}, {"timing_only": True}),
        ({"samples": 5}, {"samples": 6}),
    ],
)
def test_a_key_that_is_given_twice_with_two_values_is_refused(argument, setting):
    ((key, one),), ((_, other),) = argument.items(), setting.items()
    message = f"settings: {key} = {other!r}: contradicts the argument {key}={one!r}; give one"
    with pytest.raises(UserError, match=re.escape(message)):
        simulate("mesh", WORKLOAD, **argument, settings=setting)


def test_a_key_that_is_given_twice_with_one_value_is_taken():
    assert timed(seed=2, settings={"seed": 2, "timing_only": True}).summary["seed"] == 2


def test_arguments_that_are_not_given_leave_the_settings_alone():
    settings = {"seed": 2, "method": "pb+sc", "backend": "torch", "timing_only": True, "samples": 4}
    run = simulate("mesh", WORKLOAD, settings=settings)
    assert settings.items() <= (run.config["run"]).items()


def test_settings_that_are_no_dictionary_are_refused():
    with pytest.raises(UserError, match=r"settings = str: should be a dictionary of keys of \[run\]"):
        timed(settings="precision=float64")


def test_set_may_not_contradict_a_flag():
    source = {"run": Source({"seed": 3}, "command line")}
    with pytest.raises(UserError, match="--set: seed = 4: contradicts command line, which has 3"):
        apply_overrides(["seed=4"], source)
    apply_overrides(["seed=3", "run.seed=3", "threads=2", "threads=1"], source)
    assert source["run"].document == {"seed": 3, "threads": 1}


def test_numbers_of_numpy_are_numbers(tmp_path):
    workload = changed("training", lr=np.float64(0.05), batch_size=np.int32(4), momentum=np.float32(0.5))
    workload["model"]["arguments"] = {"features": np.int64(6), "hidden": (np.int64(5),), "classes": 3}
    run = timed(hardware("mesh", rows=np.int64(16)), workload, seed=np.int64(3), samples=np.uint8(7),
                settings={"threads": np.int16(1)}, out=tmp_path / "run")  # fmt: skip
    assert (run.summary["seed"], run.summary["samples"]) == (3, 7)
    text = (tmp_path / "run" / "config.toml").read_text()
    assert tomllib.loads(text)["workload"]["training"]["lr"] == 0.05
    assert timed(epochs=np.int64(1), samples=None).summary["samples"] == 40


# Data


@pytest.mark.parametrize("name", shipped(Workload))
def test_every_shipped_workload_runs_on_made_up_samples_of_its_own_shapes(name):
    source = read_source(Workload, name)
    sources = {"workload": source}
    apply_overrides(["data.kind=random"], sources)
    data = validate(Workload, source).data
    assert None not in (data.shape, data.classes, data.train_samples, data.test_samples)
    apply_overrides(["data.train_samples=3", "data.test_samples=2"], sources)
    made = load(validate(Workload, source).data, seed=0, where=name, base=None)
    assert (made.shape, made.classes, made.train_samples, made.test_samples) == (tuple(data.shape), data.classes, 3, 2)


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn"])
def test_workloads_on_digits_say_what_the_digits_are(name):
    data = load_workload(name).data
    digits = load(data, seed=0, where=name, base=None)
    assert extent(data) == (digits.shape, digits.train_samples)
    assert (data.test_samples, data.classes) == (digits.test_samples, digits.classes)
    made_up = read_source(Workload, name).document
    made_up["data"]["kind"] = "random"
    assert simulate("mesh", made_up, samples=4).summary["status"] == "finished"


def test_random_data_are_the_same_in_pieces():
    data = validate(Workload, Source(changed("data", train_samples=700), "workload")).data
    made = load(data, seed=4, where="", base=None)
    generator = np.random.Generator(np.random.PCG64(4))
    means = generator.standard_normal((3, 6), dtype=np.float32)
    y = generator.integers(0, 3, 700)
    x = (generator.standard_normal((700, 6), dtype=np.float32) + means[y]) * np.float32(np.sqrt(0.5))
    np.testing.assert_array_equal(made.x_train, x)


@pytest.mark.parametrize("keys", [{"train_samples": 10**9, "shape": [3, 224, 224]}, {"shape": [2**31 - 1] * 3}])
def test_random_data_that_fit_in_no_memory_are_refused(keys):
    with pytest.raises(UserError, match=r"data = .*needs [\d.,]+ GB, more than there is; lower data.train_samples"):
        simulate("mesh", changed("data", **keys), samples=2)


def test_float64_of_torch_data_sets_keeps_its_bits():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 6)), rng.standard_normal((20, 3))
    given = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    dataset = from_user((given, given))
    np.testing.assert_array_equal(dataset.x_train, x)
    np.testing.assert_array_equal(dataset.y_test, y)
    arguments = {"samples": 20, "settings": {"precision": "float64"}}
    workload = WORKLOAD | {"loss": {"kind": "mse"}}
    one, other = (simulate("mesh", workload, data=data, **arguments) for data in ((given, given), (x, y, x, y)))
    np.testing.assert_array_equal(one.metrics["loss"], other.metrics["loss"])


@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy])
def test_truth_values_are_labels(of):
    x, y = np.ones((4, 6)), np.array([False, True, True, False])
    dataset = from_user((x, of(y), x, of(y)))
    assert dataset.classes == 2
    assert dataset.y_train.tolist() == [0, 1, 1, 0]
    with pytest.raises(UserError, match="x_train = bool"):
        from_user((x > 0, y, x, y))


class Faulty:
    def __init__(self, length: int, bad: int) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        if self.length < 0:
            raise OSError("no index file")
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError("img_7.png")
        return torch.ones(6), 0


@pytest.mark.parametrize(
    ("dataset", "message", "cause"),
    [
        (Faulty(3, 2), "data: train[2]: raised KeyError: 'img_7.png'", KeyError),
        (Faulty(-1, 0), "data: len(train): raised OSError: no index file", OSError),
    ],
)
def test_what_goes_wrong_in_a_users_data_set_is_said_with_its_cause(dataset, message, cause):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        simulate("mesh", WORKLOAD, samples=2, data=(dataset, Faulty(2, 9)))
    assert isinstance(caught.value.__cause__, cause)


# Evaluations


@pytest.mark.parametrize("every", [1e-7, 0.001, 0.024, 0.025, 0.26, 1, 3, 1e-300])
def test_every_sample_is_evaluated_once_at_most(every):
    due = list(due_samples(every, 40, 100))
    assert due == sorted(set(due))
    assert all(0 <= sample < 99 for sample in due)
    if every * 40 <= 1:
        assert due == list(range(99))


def test_an_evaluation_behind_every_sample_ends():
    run = simulate("mesh", changed("training", evaluate_every_epochs=1e-7), samples=12)
    assert list(run.evaluations["sample"]) == list(range(12))


# Values beyond the edge


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (hardware("fabric", link_bytes_per_cycle=1e-300), "fabric.link_bytes_per_cycle = 1e-300: should be at least"),
        (hardware("host", bytes_per_cycle=5e-324), "host.bytes_per_cycle = 5e-324: should be at least"),
        (hardware("core", sram_bytes_per_cycle=1e-9), "core.sram_bytes_per_cycle = 1e-09: should be at least"),
        (hardware("fabric", hop_cycles=10**30), "fabric.hop_cycles"),
        (hardware("core", sram_kib=1e300), "core.sram_kib"),
        (hardware("", clock_ghz=1e300), "clock_ghz"),
        (hardware("", clock_ghz=5e-324), "clock_ghz"),
        (hardware("mesh", rows=10**20), "mesh.rows"),
        (hardware("pipeline", output_slots=2**70), "pipeline.output_slots"),
    ],
)
def test_numbers_that_no_count_of_cycles_holds_are_refused(machine, message):
    with pytest.raises(UserError, match=re.escape(message)):
        timed(machine)


def test_the_largest_and_smallest_values_run_to_their_end():
    slow = hardware("fabric", link_bytes_per_cycle=1e-6, hop_cycles=2**31 - 1)
    slow |= {"host": {"bytes_per_cycle": 1e-6}, "clock_ghz": 1e-6}
    slow["core"] = slow["core"] | {"sram_kib": 2.0**20, "sram_bytes_per_cycle": 1e-6}
    run = timed(slow)
    assert run.summary["cycles"] == run.cores["total"].max() > 2**31
    assert np.isfinite(run.summary["seconds"])
    assert timed(hardware("mesh", rows=2**16, cols=2**16)).summary["samples"] == 5


def test_a_run_of_more_cycles_than_int64_holds_is_refused():
    unit = {"kind": "unit"} | {
        f"{name}_cycles": 2**31 - 1 for name in ("forward", "input_gradient", "weight_gradient", "update")
    }
    with pytest.raises(UserError, match=r"samples may take .* cycles, too many to count in int64"):
        timed(hardware("core", datapath=unit), samples=2**31 - 1)


@pytest.mark.parametrize("threads", [1025, 100_000])
def test_more_threads_than_any_machine_has_are_refused(threads):
    with pytest.raises(UserError, match=f"threads = {threads}: should be less than or equal to 1024"):
        timed(settings={"threads": threads})


@pytest.mark.parametrize("trace", ["first:" + "9" * 20, "first:" + "9" * 5000])
def test_a_window_of_absurd_length_is_refused(trace):
    with pytest.raises(UserError, match="trace"):
        timed(settings={"trace": trace})


def test_an_integer_of_thousands_of_digits_in_a_file_is_a_users_error(tmp_path):
    (tmp_path / "hw.toml").write_text(f"clock_ghz = {'9' * 5000}\n")
    with pytest.raises(UserError, match=r"hw\.toml: is not valid TOML"):
        timed(str(tmp_path / "hw.toml"))


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_multiple_that_is_no_finite_number_is_refused(digits):
    with pytest.raises(UserError, match="sc= takes a positive number"):
        parse_method(f"pb+sc={'9' * digits}")


@pytest.mark.parametrize("text", ["pb+sc=100000000000000000000", "pb+sc=0.00000012", "pb+lwpv=2.5", "pb+sc"])
def test_a_method_reads_back_as_it_is_written(text):
    method = parse_method(text)
    assert parse_method(str(method)) == method


def test_a_momentum_that_scales_to_one_is_refused():
    table = validate(Workload, Source(changed("training", momentum=0.99, batch_size=2**31 - 1), "workload"))
    assert scale_recipe(table.training, 1).momentum < 1
    with pytest.raises(
        UserError, match=r"training\.momentum = 0\.9999999999: scaled from batch 2147483647 to 1 it rounds"
    ):
        timed(workload=changed("training", momentum=0.9999999999, batch_size=2**31 - 1))


def test_a_learning_rate_that_scales_to_infinity_is_refused():
    table = validate(Workload, Source(changed("training", lr=1e308, batch_size=1), "workload"))
    with pytest.raises(UserError, match=r"training\.lr = 1e\+308: scaled from batch 1 to 1000 it is not finite"):
        scale_recipe(table.training, 1000)


# Broken run directories


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return simulate("mesh", WORKLOAD, samples=5, out=tmp_path_factory.mktemp("runs") / "run").path


CONFIG = "[hardware]\n[workload]\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", b"[]", "should be a table of keys, not a list"),
        ("summary.json", b"null", "should be a table of keys, not a NoneType"),
        ("summary.json", b"{}", "lacks cycles, method"),
        ("summary.json", b"\xff\xfe", "is not valid JSON"),
        ("summary.json", b"{", "is not valid JSON"),
        ("config.toml", b"", "lacks hardware, run, workload"),
        ("config.toml", CONFIG.encode(), "lacks run"),
        ("config.toml", b"= 3", "is not valid TOML"),
        ("config.toml", b"\xff\xfe", "is not valid TOML"),
        *((f"{table}.parquet", b"PAR1", "cannot be read") for table in ("events", "metrics", "stages")),
        ("cores.parquet", b"", "cannot be read"),
        ("weights.safetensors", b"", "cannot be read"),
        ("initial.safetensors", b"\xff" * 100, "cannot be read"),
    ],
)
def test_a_broken_file_of_a_run_directory_is_named_with_its_problem(whole, tmp_path, name, content, message):
    broken = copy(whole, tmp_path)
    (broken / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{broken / name}: {message}")) as caught:
        open_run(broken)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", ["events.parquet", "metrics.parquet", "weights.safetensors", "initial.safetensors"])
def test_a_file_that_was_cut_short_is_named(whole, tmp_path, name):
    broken = copy(whole, tmp_path)
    content = (broken / name).read_bytes()
    (broken / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=re.escape(f"{broken / name}: cannot be read")):
        open_run(broken)


def test_all_broken_files_are_named_together(whole, tmp_path):
    broken = copy(whole, tmp_path)
    for name in ("config.toml", "links.parquet", "weights.safetensors"):
        (broken / name).write_bytes(b"")
    with pytest.raises(UserError) as caught:
        open_run(broken)
    assert [problem.where for problem in caught.value.problems] == [
        str(broken / name) for name in ("config.toml", "links.parquet", "weights.safetensors")
    ]


def test_a_table_of_other_columns_and_missing_weights_are_named(whole, tmp_path):
    broken = copy(whole, tmp_path)
    (broken / "links.parquet").write_bytes((broken / "memory.parquet").read_bytes())
    with pytest.raises(UserError, match=r"links\.parquet: lacks the columns source, target"):
        open_run(broken)
    (broken / "weights.safetensors").unlink()
    with pytest.raises(UserError, match=r"is not a whole run directory: it lacks weights\.safetensors"):
        open_run(broken)


def test_a_table_that_breaks_within_is_named_when_it_is_read(whole, tmp_path):
    broken = copy(whole, tmp_path)
    content = bytearray((broken / "metrics.parquet").read_bytes())
    content[4:200] = bytes(196)
    (broken / "metrics.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.parquet: cannot be read"):
        _ = open_run(broken).metrics


def copy(whole: Any, folder: Any) -> Any:
    return shutil.copytree(whole, folder / "broken")
