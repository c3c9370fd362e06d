"""Figures of a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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
    "stall_memory": ("stall: credit or memory", "#7f2f2f"),
    "idle": ("idle (fill, drain)", "#e8e8e8"),
}
NAMED_BARS = 40
"""Up to this many stages a bar is labelled with its stage's name."""
WRAPPED_BARS = 6
"""Up to this many stages the label names every module of the stage."""
VISIBLE_PERCENT = 0.4
"""Of a bar's height: two pixels. Parts that are less of every bar are not in the legend."""


def utilization_figure(cores: pd.DataFrame, stages: pd.DataFrame, title: str) -> Figure:
    """A stacked bar per core (two with split units): how its cycles were spent, in percent of the run."""
    from matplotlib.figure import Figure

    count = len(stages)
    figure = Figure(figsize=(min(16.0, max(8.0, 3.5 + 0.42 * count)), 5.4), layout="constrained")
    axes = figure.add_subplot()
    units = list(dict.fromkeys(cores["unit"]))
    width = 0.8 / len(units)
    for position, unit in enumerate(units):
        rows = cores[cores["unit"] == unit].sort_values("core")
        at = rows["core"].to_numpy() + (position - (len(units) - 1) / 2) * width
        _stack(axes, at, rows, width * (0.94 if len(units) > 1 else 1.0), labelled=position == 0)
    busy = cores[["forward", "input_gradient", "weight_gradient", "update"]].to_numpy().sum()
    mean = 100 * busy / cores["total"].to_numpy().sum()
    axes.axhline(mean, color="black", linewidth=1.0, linestyle="--", label=f"mean utilization, {mean:.1f} %")
    axes.set_ylim(0, 100)
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_ylabel("cycles of the run (%)")
    _name_cores(axes, stages, units)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    largest = {label: 100 * (cores[name] / cores["total"]).max() for name, (label, _) in PARTS.items()}
    entries = [
        (handle, label)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if largest.get(label, 100.0) >= VISIBLE_PERCENT
    ]
    line, *bars = entries
    handles, labels = zip(line, *reversed(bars), strict=True)
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
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
    axes.set_xlabel(f"core{suffix}")
    if len(stages) > NAMED_BARS:
        return
    rows = [stage for _, stage in stages.iterrows()]
    if len(rows) <= WRAPPED_BARS:
        labels = [f"{stage['stage']}: " + "\n".join(_shortened(_parts(stage))) for stage in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=9)
    else:
        labels = [f"{stage['stage']}: " + " ".join(_first(stage)) for stage in rows]
        axes.set_xticks(range(len(rows)), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)


def stage_label(stage: pd.Series[Any]) -> str:
    """A stage's name; where it only has numbers, as in a `torch.nn.Sequential`, with the kinds of its operators."""
    return str(stage["name"]) + (f" ({', '.join(stage['operators'])})" if _is_numbers(stage) else "")


def _is_numbers(stage: pd.Series[Any]) -> bool:
    return not re.search("[A-Za-z]", stage["name"])


def _parts(stage: pd.Series[Any]) -> list[str]:
    """The modules of a stage; where their names are numbers, these together and the kinds of the operators."""
    return [stage["name"], *stage["operators"]] if _is_numbers(stage) else str(stage["name"]).split("+")


def _shortened(parts: list[str]) -> list[str]:
    """A list whose middle is left out if it is long."""
    return parts if len(parts) <= 4 else [*parts[:2], "…", parts[-1]]


def _first(stage: pd.Series[Any]) -> list[str]:
    """The first module of a stage (by number, and what it is), and a mark where there are more."""
    parts = _parts(stage)
    if _is_numbers(stage):
        parts = [f"{stage['name'].partition('+')[0]} {parts[1]}", *parts[2:]]
    return parts[:1] + ["…"] * (len(parts) > 1)
