"""The place of a run directory: what may stand there before, and how a finished run gets there.

A run takes hours, and much may happen to its place in the meantime. So a place is checked before the run, to refuse
early what cannot be done, and again when the run is put there, by operations of the file system that fail rather than
remove: nothing is ever removed but, with force, a run directory.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pbsim.errors import UserError, user_error
from pbsim.results.schemas import TABLES

FIGURE = "figures/utilization.png"
WEIGHTS = ("initial.safetensors", "weights.safetensors")
FILES = {"config.toml", "summary.json", *(f"{name}.parquet" for name in TABLES), *WEIGHTS, FIGURE}
"""All that a run may leave in its directory."""
SUMMARY_KEYS = {"method", "seed", "status", "samples", "cycles", "timing_only", "versions"}
CONFIG_KEYS = {"hardware", "workload", "run"}
"""What tells these files of a run from another program's."""


@dataclass(frozen=True)
class Place:
    """Where a run directory goes.

    Attributes
    ----------
    given : as the user named it.
    path : absolute, and without symbolic links.
    force : whether a run directory that stands there is replaced.
    """

    given: Path
    path: Path
    force: bool

    def error(self, problem: str) -> UserError:
        """What is wrong with the place."""
        return user_error(str(self.given), "", "", problem)


def find_place(given: Path, force: bool) -> Place:
    """A place for a run that is about to start.

    Raises
    ------
    UserError : what stands there is not replaced, or nothing can be put there.
    """
    try:
        named = given.name not in ("", "..")
        path = given.parent.resolve() / given.name if named else given.resolve()
        place = Place(given, path, force)
        problem = _obstacle(place)
    except (OSError, ValueError, RuntimeError) as error:  # no current directory, no such name, a loop of links
        raise user_error(str(given), "", "", f"cannot be written: {error}") from None
    if problem:
        raise place.error(problem)
    return place


def publish(folder: Path, place: Place) -> None:
    """Put a finished run directory in its place.

    Raises
    ------
    UserError : its place has been taken meanwhile; it says under what other name the run is instead.
    """
    try:
        problem = _put(folder, place)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    if problem:
        raise place.error(f"{problem}; the finished run is in {_keep(folder, place)}")


def _obstacle(place: Place) -> str:
    """Why nothing can be put at a place, or nothing."""
    path = place.path
    if path.is_symlink():
        return "is a symbolic link; name the directory itself"
    if not path.exists():
        return ""
    here = Path.cwd().resolve()
    if path == here or path in here.parents:
        return "is the current directory, or contains it; name another"
    if not place.force:
        return "exists already; name another directory, or remove this one (on the command line --force replaces it)"
    stranger = foreign(path)
    return f"{stranger}, and is not replaced even with --force" if stranger else ""


def _put(folder: Path, place: Place) -> str:
    """Move a folder to its place; returns why it is not there, or nothing."""
    if _claim(folder, place.path):
        return ""
    if problem := _obstacle(place):
        return f"was free before the run, and now {problem.partition(';')[0]}" if not place.force else problem
    if not place.force:
        return "was taken for a moment as the run ended"
    aside = Path(tempfile.mkdtemp(prefix=_prefix(place.path), dir=place.path.parent))
    old, claimed = aside / "old", False
    os.rename(place.path, old)
    try:
        claimed = _claim(folder, place.path)
    except BaseException:
        with suppress(OSError):  # the new one is there already
            os.rename(old, place.path)
        raise
    finally:
        if place.path.exists():
            shutil.rmtree(aside, ignore_errors=True)
    return "" if claimed else "was taken by another run just now"


def _claim(folder: Path, path: Path) -> bool:
    """Move a folder to a name, unless something has that name; another process cannot come between."""
    try:
        path.mkdir()  # fails if there is anything; to rename onto an existing name might replace it
    except FileExistsError:
        return False
    try:
        os.replace(folder, path)  # an empty directory gives way to another, one with anything in it does not
    except BaseException:
        with suppress(OSError):  # it holds the folder already
            path.rmdir()
        raise
    return True


def _keep(folder: Path, place: Place) -> Path:
    """Move a finished run to a free name beside its place; leave it where it is if that fails."""
    with suppress(OSError):
        for number in count(1):
            name = f"{place.path.name}-{number}"
            if _claim(folder, place.path.with_name(name)):
                return place.given.with_name(name)
    return folder


def _prefix(path: Path) -> str:
    """How the names of hidden folders beside a place begin."""
    return f".{path.name[:100]}."


def make_folder(place: Place) -> tuple[Path, list[Path]]:
    """A hidden folder beside a place, in which a run directory is made; and the parents that had to be made for it."""
    parent = place.path.parent
    made = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_prefix(place.path), dir=parent)), made
    except (OSError, ValueError) as error:  # ValueError: no file may have such a name
        remove_empty(made)
        raise place.error(f"cannot be written: {getattr(error, 'strerror', error)}") from None


def remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, as far as they are there and empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def foreign(path: Path) -> str:
    """Why something is not a run directory, or not only one; empty if it is one, or an empty directory."""
    if not path.is_dir():
        return "is not a run directory"
    files = sorted(_files(path))
    if not files:
        return ""
    if not (_has_keys(path / "summary.json", json.loads, SUMMARY_KEYS)
            and _has_keys(path / "config.toml", tomllib.loads, CONFIG_KEYS)):  # fmt: skip
        return "is not a run directory"
    strange = [name for name in files if name not in FILES]
    return f"holds {strange[0]}, which no run writes" if strange else ""


def _files(path: Path) -> Iterator[str]:
    """All that is in a directory, relative to it; directories only where they are empty or links."""
    for folder, directories, files in os.walk(path):
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        if folder != str(path) and not directories and not files:
            yield Path(folder).relative_to(path).as_posix()
        for name in (*files, *links):
            yield (Path(folder) / name).relative_to(path).as_posix()


def _has_keys(path: Path, parse: Any, keys: set[str]) -> bool:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and keys <= content.keys()
