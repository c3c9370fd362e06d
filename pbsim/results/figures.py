"""Figures of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {
    "forward": ("forward", "#3366aa"),
    "input_gradient": ("input gradient", "#e08a1e"),
    "weight_gradient": ("weight gradient", "#4c9f50"),
    "update": ("update", "#8c5fb0"),
    "stall_input": ("stall: input", "#d9a9a9"),
    "stall_output": ("stall: output", "#c25b5b"),
    "stall_memory": ("stall: memory", "#7f2f2f"),
    "idle": ("idle (fill, drain)", "#e8e8e8"),
}
NAMED_BARS = 24
"""Up to this many stages a bar is labelled with its stage's name."""


def utilization_figure(cores: pd.DataFrame, stages: pd.DataFrame, title: str) -> Figure:
    """A stacked bar per core (two with split units): how its cycles were spent, in percent of the run."""
    from matplotlib.figure import Figure

    count = len(stages)
    figure = Figure(figsize=(min(16.0, max(7.0, 2.5 + 0.42 * count)), 5.2), layout="constrained")
    axes = figure.add_subplot()
    units = list(dict.fromkeys(cores["unit"]))
    width = 0.8 / len(units)
    for position, unit in enumerate(units):
        rows = cores[cores["unit"] == unit].sort_values("core")
        at = rows["core"].to_numpy() + (position - (len(units) - 1) / 2) * width
        _stack(axes, at, rows, width * (0.94 if len(units) > 1 else 1.0), labelled=position == 0)
    busy = cores[["forward", "input_gradient", "weight_gradient", "update"]].to_numpy().sum()
    mean = 100 * busy / cores["total"].to_numpy().sum()
    axes.axhline(mean, color="black", linewidth=1.0, linestyle="--")
    axes.text(1.005, mean, f"mean\n{mean:.1f} %", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.set_ylim(0, 100)
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_ylabel("cycles of the run (%)")
    _name_cores(axes, stages, units)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    used = [name for name in PARTS if cores[name].to_numpy().any()]
    handles, labels = axes.get_legend_handles_labels()
    chosen = [(h, text) for h, text in zip(handles, labels, strict=True) if text in {PARTS[n][0] for n in used}]
    figure.legend(*zip(*reversed(chosen), strict=True), loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _stack(axes: Axes, at: np.ndarray, rows: pd.DataFrame, width: float, *, labelled: bool) -> None:
    bottom = np.zeros(len(rows))
    total = rows["total"].to_numpy()
    for name, (label, color) in PARTS.items():
        share = 100 * rows[name].to_numpy() / total
        axes.bar(at, share, width, bottom, color=color, label=label if labelled else None, linewidth=0)
        bottom = bottom + share


def _name_cores(axes: Axes, stages: pd.DataFrame, units: list[str]) -> None:
    suffix = " (left bar: forward unit, right bar: backward unit)" if len(units) > 1 else ""
    if len(stages) <= NAMED_BARS:
        labels = [f"{row.stage}: {_short(str(row.name_))}" for row in stages.rename(columns={"name": "name_"}).itertuples()]
        rotate = len(stages) > 6 or max(map(len, labels)) > 14
        axes.set_xticks(range(len(stages)), labels, rotation=40 if rotate else 0, ha="right" if rotate else "center")
        axes.set_xlabel(f"core: stage{suffix}")
    else:
        axes.set_xlabel(f"core{suffix}")


def _short(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
