"""Mitigations of stale weights, as data: a method is a handful of coefficients, and no loop asks which one it is.

Every stage trains by (DESIGN.md 5.4, 5.5; g includes weight decay, D is the sample's delay in updates)

    forward reads   w_hat = w - p_v v + p_w (w - w_previous)
    update          v <- m v + g;   w <- w - lr (a v + b g)

====================================  ==========================================================  ==============
method                                coefficients                                                source
====================================  ==========================================================  ==============
SGDM                                  a = 1, b = 0, p_v = p_w = 0
Nesterov                              a = m, b = 1
`sc`, spike compensation              a = m^D, b = (1 - m^D) / (1 - m)                            PAPERS.md 1.4
`lwpv`, prediction by velocity        p_v = lr D                                                  PAPERS.md 1.5
`lwpw`, prediction by difference      p_w = D                                                     PAPERS.md 1.5
`ws`, weight stashing                 the backward reads the forward's weights                    PAPERS.md 1.6
====================================  ==========================================================  ==============

`sc=k`, `lwpv=k`, `lwpw=k` use k D for D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pbsim.config.method import Method
from pbsim.errors import user_error
from pbsim.optim.recipe import Recipe

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of each sample at a stage, float64 arrays of one length (see the module's equations)."""

    velocity_prediction: Array
    difference_prediction: Array
    a: Array
    b: Array

    def __getitem__(self, rows: slice) -> Coefficients:
        return Coefficients(
            self.velocity_prediction[rows], self.difference_prediction[rows], self.a[rows], self.b[rows]
        )


@dataclass(frozen=True)
class UpdateRule:
    """How a stage predicts and updates, for one method and recipe.

    Attributes
    ----------
    spike, velocity, difference : multiples of the delay that `sc`, `lwpv`, `lwpw` use; 0 where they are off.
    stash_weights : whether the backward reads the forward's weights.
    """

    recipe: Recipe
    spike: float = 0.0
    velocity: float = 0.0
    difference: float = 0.0
    stash_weights: bool = False

    @property
    def keeps_previous(self) -> bool:
        """Whether a stage must remember the weights before its last update."""
        return self.difference > 0

    @property
    def predicts(self) -> bool:
        """Whether forwards read predicted weights."""
        return self.velocity > 0 or self.difference > 0

    @property
    def update_operations(self) -> int:
        """Multiply-adds per weight of one update: 2 for v and w, 1 for weight decay, 1 for the term b g."""
        return 2 + (self.recipe.weight_decay > 0) + (self.spike > 0 or self.recipe.nesterov)

    @property
    def prediction_operations(self) -> int:
        """Operations per weight of one prediction: 1 multiply-add for velocity, 2 for a difference."""
        return (self.velocity > 0) + 2 * (self.difference > 0)

    def coefficients(self, delay: Array, lr: Array) -> Coefficients:
        """The coefficients for samples of these delays and learning rates."""
        m = self.recipe.momentum
        remaining = m ** (self.spike * delay)
        a, b = remaining, (1 - remaining) / (1 - m)
        if self.recipe.nesterov:
            a, b = np.full_like(delay, m), np.ones_like(delay)
        return Coefficients(lr * self.velocity * delay, self.difference * delay, a, b)


_SET: dict[str, Callable[[float], dict[str, float | bool]]] = {
    "sc": lambda k: {"spike": k},
    "lwpv": lambda k: {"velocity": k},
    "lwpw": lambda k: {"difference": k},
    "ws": lambda _: {"stash_weights": True},
}


def update_rule(method: Method, recipe: Recipe) -> UpdateRule:
    """The update rule of a method; raises `UserError` where recipe and method contradict each other."""
    if recipe.nesterov and "sc" in method.mitigations:
        raise user_error(
            "method",
            "training.nesterov",
            "true",
            "cannot be combined with sc: both set the spike (SC_1 is Nesterov)",
        )
    settings: dict[str, float | bool] = {}
    for name, multiple in method.mitigations.items():
        settings |= _SET[name](multiple)
    return UpdateRule(recipe, **settings)  # type: ignore[arg-type]
