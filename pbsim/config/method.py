"""A method, written `schedule[:batch][+mitigation[=value]]...[@horizon]`: how training is scheduled and corrected.

`pb+lwpv+sc` is pipelined backpropagation with linear weight prediction and spike compensation; `pb+sc=2@nominal`
doubles the horizon of spike compensation and takes it from 2(S-1-s) rather than from measured delays. `sgd:32` is
fill-and-drain SGD with 32 samples per update.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from pbsim.errors import Problem, UserError

SCHEDULES = {
    "pb": "pipelined backpropagation: batch one, update after every backward, never drained",
    "sgd:N": "fill-and-drain SGD: N samples through the pipeline, one update, drained every time",
}
"""Each as it is written; N stands for a batch size."""
PLANNED_SCHEDULES = ("1f1b", "legw", "batch", "linear")
DRAINED = ("sgd",)
"""Schedules of which no gradient is ever stale: what mends staleness is refused."""
HORIZONS = ("measured", "nominal")

MITIGATIONS = {
    "sc": "spike compensation (sc=k: horizon k times the delay)",
    "lwpv": "linear weight prediction by velocity (lwpv=k likewise)",
    "lwpw": "linear weight prediction by weight difference (lwpw=k likewise)",
    "ws": "weight stashing: the backward uses the forward's weights",
}
_WITH_VALUE = ("sc", "lwpv", "lwpw")
_WRITTEN = {written.partition(":")[0]: written for written in SCHEDULES}


@dataclass(frozen=True)
class Method:
    """A schedule plus mitigations.

    Attributes
    ----------
    schedule : a key of `SCHEDULES`, without its `:N`.
    mitigations : name to multiplier of the delay, in the order written.
    horizon : `measured`, `nominal`, or None where the run's setting decides.
    batch : samples per update.
    """

    schedule: str
    mitigations: dict[str, float]
    horizon: str | None = None
    batch: int = 1

    @property
    def drained(self) -> bool:
        """Whether every update empties the pipeline before the next samples enter."""
        return self.schedule in DRAINED

    def __str__(self) -> str:
        parts = [name if k == 1 else f"{name}={_digits(k)}" for name, k in self.mitigations.items()]
        return "+".join([_WRITTEN[self.schedule].replace("N", str(self.batch)), *parts])


def _digits(value: float) -> str:
    """A number as `parse_method` reads it: all its digits, and no exponent."""
    return format(Decimal(repr(value)), "f").removesuffix(".0")


def parse_method(text: str, where: str = "method") -> Method:
    """Read a method; raises `UserError` with everything that is wrong in it."""
    problems: list[str] = []
    body, at, horizon = text.partition("@")
    if at and horizon not in HORIZONS:
        problems.append(f"after @ stands one of {', '.join(HORIZONS)}, not {horizon!r}")
    head, *rest = body.split("+")
    schedule, colon, batch = head.partition(":")
    if schedule in PLANNED_SCHEDULES:
        problems.append(f"schedule {schedule!r} is not built yet; available: {', '.join(SCHEDULES)}")
    elif schedule not in _WRITTEN:
        problems.append(f"unknown schedule {schedule!r}; available: {', '.join(SCHEDULES)}")
    elif ":" not in _WRITTEN[schedule]:
        if colon:
            problems.append(f"{schedule!r} trains at batch one and takes no batch (:{batch})")
    elif not re.fullmatch(r"[1-9][0-9]*", batch):
        problems.append(f"{schedule!r} is written {_WRITTEN[schedule]}, with a batch of N samples, at least 1")
    mitigations: dict[str, float] = {}
    for item in rest:
        name, equals, value = item.partition("=")
        if name not in MITIGATIONS:
            problems.append(f"unknown mitigation {name!r}; available: {', '.join(MITIGATIONS)}")
        elif name in mitigations:
            problems.append(f"mitigation {name!r} stands twice")
        elif equals and name not in _WITH_VALUE:
            problems.append(f"mitigation {name!r} takes no value (={value})")
        elif equals and not (re.fullmatch(r"\d+(\.\d+)?", value) and 0 < float(value) < math.inf):
            problems.append(f"{name}= takes a positive number, not {value!r}")
        else:
            mitigations[name] = float(value) if equals else 1.0
    if {"lwpv", "lwpw"} <= mitigations.keys():
        problems.append("lwpv and lwpw are two forms of one prediction: choose one")
    if schedule in DRAINED:
        for name in mitigations:
            problems.append(f"{name} mends stale weights, which {schedule!r} does not have: it drains the pipeline")
        if horizon in HORIZONS:
            problems.append(f"@ says which delay mitigations use; {schedule!r} has neither: it drains the pipeline")
    if problems:
        raise UserError(Problem(where, "", text, problem) for problem in problems)
    return Method(schedule, mitigations, horizon or None, int(batch or 1))
