"""A run as its directory tells it: summary, tables, weights, figure."""

from __future__ import annotations

import json
import tempfile
import tomllib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbsim.errors import user_error
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

    Its tables are DataFrames, each documented in docs/run-directory.md: `stages`, `cores`, `memory`, `links`,
    `metrics`, `evaluations`, `events`.
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

        return pd.read_parquet(self.path / f"{name}.parquet")

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per stage: MACs, cycles, delays."""
        return self.table("stages")

    @cached_property
    def cores(self) -> pd.DataFrame:
        """One row per core and unit: how its cycles were spent."""
        return self.table("cores")

    @cached_property
    def memory(self) -> pd.DataFrame:
        """Peak bytes per core and category."""
        return self.table("memory")

    @cached_property
    def links(self) -> pd.DataFrame:
        """Bytes and busy cycles per link."""
        return self.table("links")

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
        module.load_state_dict(load_file(weights))
        return module

    def plot_utilization(self) -> Figure:
        """A stacked bar per core: forward, input gradient, weight gradient, update, stalls, idle."""
        from pbsim.results.figures import utilization_figure

        s = self.summary
        title = (
            f"{self.config['workload']['name']} on {self.config['hardware']['name']}, {s['method']}: "
            f"utilization {s['utilization']:.1%} over {s['cycles']:,} cycles"
        )
        return utilization_figure(self.cores, self.stages, title)


def open_run(path: str | Path) -> Run:
    """Open a run directory.

    Raises
    ------
    UserError : it is none, or lacks a file.
    """
    folder = Path(path)
    if not (folder / "summary.json").is_file():
        raise user_error(str(folder), "", "", "is not a run directory: it has no summary.json")
    try:
        json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise user_error(str(folder / "summary.json"), "", "", f"is not valid JSON: {error}") from None
    missing = [f"{name}.parquet" for name in TABLES if not (folder / f"{name}.parquet").is_file()]
    missing += [] if (folder / "config.toml").is_file() else ["config.toml"]
    if missing:
        raise user_error(str(folder), "", "", f"is not a whole run directory: it lacks {', '.join(missing)}")
    return Run(folder)


def temporary_place() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """A place for a run directory that lives as long as the returned object."""
    folder = tempfile.TemporaryDirectory(prefix="pbsim-")
    return Path(folder.name) / "run", folder
