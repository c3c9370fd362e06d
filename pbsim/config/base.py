"""What every table of a user's file has in common: strict types, no unknown keys, docstrings as descriptions."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LEAST_RATE = 1e-6
"""Per cycle: a value takes at most a million cycles."""


class Table(BaseModel):
    """A TOML table: frozen, strict (no `"16"` for 16), and no key that is not listed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def _is_number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("Input should be a number, not nan")
    return value


def _is_finite(value: float) -> float:
    if math.isinf(value):
        raise ValueError("Input should be finite")
    return value


def _is_rate(value: float) -> float:
    if value < LEAST_RATE:
        raise ValueError(f"Input should be at least {LEAST_RATE}")
    return value


def _is_name(value: str) -> str:
    if not value:
        raise ValueError("Input should not be empty")
    return value


Name = Annotated[str, AfterValidator(_is_name)]

MOST = 2**31 - 1
"""The largest number that a file may give, so that cycles and bytes made of a few such numbers are still int64."""

Count = Annotated[int, Field(ge=1, le=MOST)]
"""A number of things there is at least one of."""

Cycles = Annotated[int, Field(ge=0, le=MOST)]
"""A length of time, which may be none."""

Rate = Annotated[float, Field(gt=0), AfterValidator(_is_number), AfterValidator(_is_rate)]
"""Something per cycle; `inf` makes it free."""

Positive = Annotated[float, Field(gt=0), AfterValidator(_is_number), AfterValidator(_is_finite)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_is_number), AfterValidator(_is_finite)]
Finite = Annotated[float, AfterValidator(_is_number), AfterValidator(_is_finite)]
Fraction = Annotated[float, Field(gt=0, lt=1), AfterValidator(_is_number)]
