"""A run as its directory tells it: summary, tables, weights, figure."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbsim.errors import Problem, UserError, user_error
from pbsim.results.place import CONFIG_KEYS, SUMMARY_KEYS, WEIGHTS
from pbsim.results.schemas import TABLES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn


class Run:
    """One run: all figures come from its directory.

    Attributes
    ----------
    path : the run directory.
    summary : scalars of the run, as in `summary.json`.

    Its tables are DataFrames, each documented in docs/run-directory.md: `stages`, `operations`, `cores`, `memory`,
    `nodes`, `links`, `energy`, `metrics`, `evaluations`, `events`.
    """

    def __init__(self, path: Path, model: nn.Module | None = None, keep: object = None) -> None:
        self.path = path
        self.summary: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        self._model, self._keep = model, keep

    def __repr__(self) -> str:
        what = f"{self.config['hardware']['name']} {self.config['workload']['name']} {self.summary['method']}"
        return f"<Run {what}: {self.summary['status']}, {self.summary['samples']} samples, {self.path}>"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, with the tables `hardware`, `workload` and `run`."""
        return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))

    def table(self, name: str) -> pd.DataFrame:
        """Read one table."""
        import pandas as pd

        path = self.path / f"{name}.parquet"
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise user_error(str(path), "", "", f"cannot be read: {_line(error)}") from error

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per stage: MACs, cycles, delays."""
        return self.table("stages")

    @cached_property
    def operations(self) -> pd.DataFrame:
        """One row per stage and operation: its cycles term by term, MACs, SRAM bytes."""
        return self.table("operations")

    @cached_property
    def cores(self) -> pd.DataFrame:
        """One row per core and unit: how its cycles were spent."""
        return self.table("cores")

    @cached_property
    def memory(self) -> pd.DataFrame:
        """Peak bytes per core and category."""
        return self.table("memory")

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """Where every core lies on the mesh, and what is left of it."""
        return self.table("nodes")

    @cached_property
    def links(self) -> pd.DataFrame:
        """Bytes and busy cycles per link."""
        return self.table("links")

    @cached_property
    def energy(self) -> pd.DataFrame:
        """Actions and their energy per core; empty if the hardware has no energy table."""
        return self.table("energy")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per training sample: loss, learning rate, cycles."""
        return self.table("metrics")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation: loss and accuracy on the test set."""
        return self.table("evaluations")

    @cached_property
    def events(self) -> pd.DataFrame:
        """The trace, or its window."""
        return self.table("events")

    @property
    def model(self) -> nn.Module:
        """The trained module: the very one that was handed in, or one built anew with the trained weights.

        Raises
        ------
        UserError : the run was of timing alone, or its module was handed in and is not at hand any more.
        """
        if self._model is None:
            self._model = self._rebuild()
        return self._model

    def _rebuild(self) -> nn.Module:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from pbsim.network import build_model

        weights = self.path / "weights.safetensors"
        if not weights.is_file():
            why = ": the run was of timing alone" if self.summary["timing_only"] else ""
            raise user_error(str(self.path), "weights.safetensors", "", f"is not there{why}")
        settings, model = self.config["run"], self.config["workload"]["model"]
        if "model" in settings["handed_in"]:
            raise user_error(
                str(self.path), "run.handed_in", settings["handed_in"],
                "the module was handed in from Python: load weights.safetensors into one of its kind yourself",
            )  # fmt: skip
        module = build_model(
            model["factory"],
            model.get("arguments", {}),
            base=None,
            where=str(self.path),
            seed=settings["seed"],
        )
        module = module.to(getattr(torch, settings["precision"]))
        try:
            module.load_state_dict(load_file(weights))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise user_error(str(weights), "", "", f"do not fit the model: {_line(error)}") from error
        return module

    def plot_utilization(self) -> Figure:
        """A stacked bar per core: forward, input gradient, weight gradient, update, stalls, idle."""
        from pbsim.results.figures import utilization_figure

        s = self.summary
        title = (
            f"{self.config['workload']['name']} on {self.config['hardware']['name']}, {s['method']}: "
            f"cores busy {s['utilization']:.1%} of {s['cycles']:,} cycles"
        )
        return utilization_figure(self.cores, self.stages, title)


def open_run(path: str | Path) -> Run:
    """Open a run directory.

    Raises
    ------
    UserError : it is none, lacks a file, or has files that cannot be read; it names each of them.
    """
    folder = Path(path)
    if not (folder / "summary.json").is_file():
        raise user_error(str(folder), "", "", "is not a run directory: it has no summary.json")
    texts = [
        _with_keys(folder / "summary.json", "JSON", json.loads, SUMMARY_KEYS),
        _with_keys(folder / "config.toml", "TOML", tomllib.loads, CONFIG_KEYS),
    ]
    weights = [] if texts[0].content.get("timing_only") else WEIGHTS
    files = [*(f"{name}.parquet" for name in TABLES), "config.toml", *weights]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise user_error(str(folder), "", "", f"is not a whole run directory: it lacks {', '.join(missing)}")
    problems = {text.path: text.problem for text in texts}
    problems |= {path: _table_problem(path, name) for name in TABLES for path in [folder / f"{name}.parquet"]}
    problems |= {path: _weights_problem(path) for name in weights for path in [folder / name]}
    found = [Problem(str(path), "", "", problem) for path, problem in problems.items() if problem]
    if found:
        raise UserError(found)
    return Run(folder)


@dataclass(frozen=True)
class _Text:
    """A file of keys as it was read, and what is wrong with it."""

    path: Path
    content: Mapping[str, Any]
    problem: str = ""


def _with_keys(path: Path, kind: str, parse: Callable[[str], Any], keys: set[str]) -> _Text:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        return _Text(path, {}, f"cannot be read: {error.strerror}")
    except ValueError as error:
        return _Text(path, {}, f"is not valid {kind}: {error}")
    if not isinstance(content, dict):
        return _Text(path, {}, f"should be a table of keys, not a {type(content).__name__}")
    missing = sorted(keys - content.keys())
    return _Text(path, content, f"lacks {', '.join(missing)}" if missing else "")


def _table_problem(path: Path, name: str) -> str:
    import pyarrow.parquet as pq

    try:
        columns = pq.read_schema(path).names
    except (OSError, ValueError) as error:
        return f"cannot be read: {_line(error)}"
    missing = [column for column in TABLES[name].names if column not in columns]
    return f"lacks the columns {', '.join(missing)}" if missing else ""


def _weights_problem(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):
            return ""
    except (OSError, SafetensorError) as error:
        return f"cannot be read: {_line(error)}"


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def temporary_place() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """A place for a run directory that lives as long as the returned object."""
    folder = tempfile.TemporaryDirectory(prefix="pbsim-")
    return Path(folder.name) / "run", folder
