"""Where run directories go: nothing that is not a run is ever removed, and no finished run is lost."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pbsim import Run, UserError, open_run
from pbsim.config import Hardware, Source, Workload, read_source
from pbsim.experiment import resolve, run_experiment
from pbsim.results import place as place_module
from pbsim.results import writer as writer_module
from pbsim.results.place import find_place
from pbsim.results.schemas import METRICS
from pbsim.results.writer import RunWriter

WORKLOAD = {
    "name": "made_up",
    "model": {"factory": "pbsim.network.zoo:mlp", "arguments": {"features": 6, "hidden": [4], "classes": 3}},
    "data": {"kind": "random", "shape": [6], "classes": 3, "train_samples": 40, "test_samples": 10},
    "training": {"batch_size": 4, "lr": 0.05},
}


def run(out: Path | str, *, force: bool = False, samples: int = 10, during: Callable[[], object] = lambda: None) -> Run:
    """A run with timing alone; `during` is called while it goes on."""
    sources = {
        "run": Source({"samples": samples, "timing_only": True}, "settings"),
        "hardware": read_source(Hardware, "mesh"),
        "workload": read_source(Workload, WORKLOAD),
    }
    return run_experiment(resolve(sources), out, force=force, progress=lambda report: during())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def old(tmp_path) -> Path:
    """A run directory that stands there already."""
    run(tmp_path / "run")
    return tmp_path / "run"


# Before the run


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("out", [".", "..", "../run", "figures/..", "../.."])
def test_the_current_directory_or_a_parent_of_it_is_never_replaced(old, monkeypatch, out, force):
    monkeypatch.chdir(old)
    before = names(old)
    with pytest.raises(UserError, match="is the current directory, or contains it"):
        run(out, force=force)
    assert names(old) == before
    assert names(old.parent) == {"run"}
    assert open_run(old).summary["samples"] == 10


def test_a_place_within_the_current_run_directory_is_a_place_as_any_other(old, monkeypatch):
    monkeypatch.chdir(old)
    run("inner", samples=20)
    assert open_run(old / "inner").summary["samples"] == 20
    assert open_run(old).summary["samples"] == 10


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("target", ["run", "nowhere"])
def test_a_symbolic_link_is_refused_before_the_run(old, tmp_path, force, target):
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="link: is a symbolic link; name the directory itself"):
        run(tmp_path / "link", force=force, during=lambda: pytest.fail("the run has begun"))
    assert names(tmp_path) == {"run", "link"}


def test_a_link_on_the_way_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run(tmp_path / "link" / "run")
    assert names(tmp_path / "real") == {"run"}


def test_force_leaves_a_folder_with_files_that_no_run_writes(old):
    for stray in ("notes.txt", "figures/mine.png", "deeper/and/deeper.txt"):
        (old / stray).parent.mkdir(parents=True, exist_ok=True)
        (old / stray).write_text("mine")
        with pytest.raises(UserError, match=f"holds {stray}, which no run writes, and is not replaced even with"):
            run(old, force=True)
        assert (old / stray).read_text() == "mine"
        (old / stray).unlink()
        if stray.startswith("deeper"):
            shutil.rmtree(old / "deeper")
    assert run(old, force=True, samples=20).summary["samples"] == 20


@pytest.mark.parametrize(
    "files",
    [
        {"summary.json": "{}"},
        {"summary.json": "{}", "config.toml": ""},
        {"summary.json": "[]", "config.toml": "[run]\n[hardware]\n[workload]\n"},
        {"summary.json": "not json", "config.toml": "[run]\n[hardware]\n[workload]\n"},
        {"summary.json": '{"accuracy": 1}', "config.toml": "[run]\n[hardware]\n[workload]\n"},
        {"config.toml": "[run]\n[hardware]\n[workload]\n"},
    ],
)
def test_force_takes_for_a_run_directory_only_what_has_the_files_of_one(tmp_path, files):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(UserError, match="is not a run directory, and is not replaced even with --force"):
        run(folder, force=True)
    assert names(folder) == set(files)


def test_force_does_not_follow_a_link_inside_a_run_directory(old, tmp_path):
    (tmp_path / "album").mkdir()
    shutil.rmtree(old / "figures")
    (old / "figures").symlink_to(tmp_path / "album")
    with pytest.raises(UserError, match="holds figures, which no run writes"):
        run(old, force=True)


def test_a_place_that_no_file_system_knows_is_a_users_error(tmp_path):
    for name in ("a\0b", "n" * 300):
        with pytest.raises(UserError, match="cannot be written"):
            run(tmp_path / name)
    assert names(tmp_path) == set()


# At the end of the run


def something_appears(path: Path, kind: str) -> None:
    if kind == "file":
        path.write_text("precious")
    elif kind == "link":
        path.symlink_to(path.parent)
    else:
        path.mkdir()
        if kind == "folder":
            (path / "thesis.tex").write_text("precious")


def once(action: Callable[[], object]) -> Callable[[], None]:
    pending = [action]

    def call() -> None:
        if pending:
            pending.pop()()

    return call


@pytest.mark.parametrize("kind", ["file", "link", "folder", "empty folder"])
def test_what_appears_at_the_place_during_a_run_is_left_and_the_run_kept_beside_it(tmp_path, kind):
    out = tmp_path / "run"
    with pytest.raises(UserError, match=r"run: was free before the run.*; the finished run is in .*run-1$"):
        run(out, samples=20, during=once(lambda: something_appears(out, kind)))
    assert names(tmp_path) == {"run", "run-1"}
    assert open_run(tmp_path / "run-1").summary["samples"] == 20
    if kind == "file":
        assert out.read_text() == "precious"
    elif kind == "link":
        assert out.is_symlink()
    else:
        assert names(out) == ({"thesis.tex"} if kind == "folder" else set())


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_force_replaces_nothing_that_appears_during_a_run_and_is_no_run(tmp_path, kind):
    out = tmp_path / "run"
    with pytest.raises(UserError, match=r"the finished run is in .*run-1$"):
        run(out, samples=20, force=True, during=once(lambda: something_appears(out, kind)))
    assert names(tmp_path) == {"run", "run-1"}
    assert open_run(tmp_path / "run-1").summary["samples"] == 20


def test_of_two_runs_to_one_place_the_second_is_kept_under_another_name(tmp_path):
    out = tmp_path / "run"
    (tmp_path / "run-1").write_text("taken, too")
    with pytest.raises(UserError, match=re.escape(f"the finished run is in {tmp_path / 'run-2'}")):
        run(out, samples=20, during=once(lambda: run(out, samples=10)))
    assert open_run(out).summary["samples"] == 10
    assert open_run(tmp_path / "run-2").summary["samples"] == 20
    assert names(tmp_path) == {"run", "run-1", "run-2"}


def test_force_replaces_a_run_that_appears_during_a_run(tmp_path):
    out = tmp_path / "run"
    run(out, samples=20, force=True, during=once(lambda: run(out, samples=10)))
    assert open_run(out).summary["samples"] == 20
    assert names(tmp_path) == {"run"}


def test_with_force_the_old_run_stays_until_the_new_one_can_take_its_place(old, tmp_path, monkeypatch):
    claim, calls = place_module._claim, []

    def second_fails(folder: Path, path: Path) -> bool:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return claim(folder, path)

    monkeypatch.setattr(place_module, "_claim", second_fails)
    with pytest.raises(UserError, match=r"No space left on device; the finished run is in .*run-1$"):
        run(old, force=True, samples=20)
    assert open_run(old).summary["samples"] == 10
    assert open_run(tmp_path / "run-1").summary["samples"] == 20
    assert names(tmp_path) == {"run", "run-1"}


def test_a_run_that_can_be_moved_nowhere_stays_where_it_is_and_says_where(tmp_path, monkeypatch):
    def fail(*_: object) -> bool:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(place_module, "_claim", fail)
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", samples=20)
    (hidden,) = tmp_path.iterdir()
    assert str(caught.value).endswith(f"cannot be written: Permission denied; the finished run is in {hidden}")
    assert open_run(hidden).summary["samples"] == 20


def test_a_run_that_fails_leaves_no_folders_that_were_made_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(RunWriter, "figure", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "some" / "where" / "run")
    assert names(tmp_path) == set()


def test_a_folder_is_removed_also_where_its_tables_cannot_be_closed(tmp_path, monkeypatch):
    def full(self: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module.RowGroups, "close", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "run")
    assert names(tmp_path) == set()


# Tables that grow


@pytest.mark.parametrize("pieces", [[1000], [1] * 7 + [500, 493], [64, 64, 872], [0, 999, 0, 1]])
def test_the_bytes_of_metrics_depend_on_their_rows_alone(tmp_path, monkeypatch, pieces):
    monkeypatch.setattr(writer_module, "ROW_GROUP", 64)

    def written(name: str, pieces: list[int]) -> bytes:
        with RunWriter(find_place(tmp_path / name, force=False), 0) as writer:
            start = 0
            for rows in pieces:
                index = np.arange(start, start + rows)
                writer.metrics({column: index.astype(METRICS.field(column).type.to_pandas_dtype())
                                for column in METRICS.names})  # fmt: skip
                start += rows
            writer._close()
            file = pq.ParquetFile(writer.folder / "metrics.parquet")
            assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [64] * 15 + [40]
            return (writer.folder / "metrics.parquet").read_bytes()

    assert written("pieces", pieces) == written("whole", [1000])


def test_the_umask_does_not_hide_a_run_directory(old):
    assert os.stat(old).st_mode & 0o777 == 0o755
