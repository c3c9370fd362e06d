"""Compiled functions across processes: warm while their package's sources stay, and never older than those."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pbsim
from pbsim import compilation

PACKAGE = {
    "__init__.py": "",
    "constants.py": "STEP = 1\n",
    "inner.py": (
        "from pbsim.compilation import compiled\nfrom package.constants import STEP\n"
        "@compiled\ndef inner(x):\n    return x + STEP\n"
    ),
    "outer.py": (
        "from pbsim.compilation import compiled\nfrom package.inner import inner\n"
        "@compiled\ndef outer(x):\n    return 10 * inner(x)\n"
    ),
}
PROGRAM = "from package.outer import outer; print(outer(1), sum(outer.stats.cache_hits.values()))"


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    return folder


def result(package: Path, **variables: str) -> tuple[int, int]:
    """What a fresh process computes, and how often it found compiled code."""
    places = os.pathsep.join([str(package.parent), str(Path(pbsim.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    value, hits = done.stdout.split()
    return int(value), int(hits)


def change(package: Path, name: str, old: str, new: str) -> None:
    """Edit a source, leaving its size and its date as they were."""
    path = package / name
    before = path.stat()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("outer.py", "10 *", "30 *", 60),
        ("inner.py", "x + STEP", "x - STEP", 0),  # called by the function that is kept
        ("constants.py", "STEP = 1", "STEP = 4", 50),  # a constant of what it calls
    ],
)
def test_compiled_code_is_kept_until_a_source_of_its_package_changes(package, name, old, new, expected):
    assert result(package) == (20, 0)
    assert result(package) == (20, 1)
    change(package, name, old, new)
    assert result(package) == (expected, 0)
    assert result(package) == (expected, 1)


def test_the_same_sources_with_another_date_stay_warm(package):
    result(package)
    for path in package.glob("*.py"):
        os.utime(path, (1, 1))
    assert result(package) == (20, 1)


def test_a_users_own_folder_for_caches_is_used(package, tmp_path):
    cache = tmp_path / "cache"
    assert result(package, NUMBA_CACHE_DIR=str(cache)) == (20, 0)
    assert not (package / "__pycache__").exists()
    assert any(cache.rglob("*.nbi"))
    assert result(package, NUMBA_CACHE_DIR=str(cache)) == (20, 1)


def test_without_any_folder_that_can_be_written_functions_work_uncached(monkeypatch):
    def nowhere(self, function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compilation.FunctionCache, "__init__", nowhere)

    @compilation.compiled
    def double(x):
        return 2 * x

    assert double(3) == 6


def test_every_compiled_function_of_pbsim_is_kept_this_way():
    for path in Path(pbsim.__file__).parent.rglob("*.py"):
        if path.name != "compilation.py":
            assert not re.search(r"\bnjit\b|\bjit\(", path.read_text(encoding="utf-8")), path.name
