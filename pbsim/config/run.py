"""The settings of one run: what neither the hardware nor the workload says."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pbsim.config.base import Count, Table


def _is_trace(text: str) -> str:
    if text not in ("all", "none") and not re.fullmatch(r"first:[1-9]\d{0,17}", text):
        raise ValueError("Input should be 'all', 'none' or 'first:N' with N samples, at least 1")
    return text


class Settings(Table):
    """The table `[run]` of a resolved configuration."""

    method: str = "pb"
    """`schedule[:batch][+mitigation[=multiple]]...[@horizon]`, as `pb+lwpv+sc` or `sgd:32`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of initial weights, order of samples, augmentation and random data."""
    precision: Literal["float32", "float64"] = "float32"
    """Of the numerics; the hardware has a datatype of its own."""
    horizon: Literal["measured", "nominal"] = "measured"
    """Which delay the mitigations use: measured per sample, or 2(S-1-s)."""
    trace: Annotated[str, AfterValidator(_is_trace)] | None = None
    """How much of the trace is kept: `all`, `first:N` samples or `none`; by default all up to 5 million events."""
    backend: Literal["numba", "torch"] = "numba"
    """What computes the numbers: compiled kernels, or autograd stage by stage."""
    engine: Literal["auto", "simpy", "compiled"] = "auto"
    """Of the timing: the SimPy model, or the compiled engine of the same rules; by default by the length of the run."""
    samples: Count | None = None
    """Training samples of the run, over as many epochs as it takes; excludes `epochs`."""
    epochs: Count | None = None
    """Epochs of the run, by default the workload's; excludes `samples`."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of the torch backend; the numba backend runs on one and gives the same bits for any."""
    timing_only: bool = False
    """Whether the machine is simulated and nothing is trained."""
    handed_in: list[Literal["model", "data"]] = []
    """What was handed in from Python, and is therefore not in this file."""
