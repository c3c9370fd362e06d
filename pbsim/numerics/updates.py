"""How a stage's weights move, and how a forward guesses where they will be.

A mitigation of delay is two coefficients and a horizon, not a code path: spike compensation is the pair ``(a,
b) = (m^D, (1 - m^D) / (1 - m))``, plain momentum ``(1, 0)``, Nesterov ``(m, 1)``; linear weight prediction is
a horizon ``T``. All arrays are one-dimensional and hold all parameters of one stage.

Every element is computed in float64 from the stored values and rounded once per stored result, without fused
multiply-adds, so that plain numpy in float64 gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbsim.compilation import compiled

Floats = NDArray[np.floating[Any]]


@compiled
def momentum_update(
    w: Floats, v: Floats, g: Floats, previous: Floats, decay: Floats, m: float, lr: float, a: float, b: float
) -> None:
    """One update of a stage, in place; the learning rate stands outside the buffer (PyTorch's convention).

    ``g' = g + decay w;  v <- m v + g';  previous <- w;  w <- w - lr (a v + b g')``

    Parameters
    ----------
    w, v, g : (P,) weights, velocity (both overwritten) and the gradient, mean over the micro-batch.
    previous : (P,) receives the weights before this update, or (0,) where nothing needs them.
    decay : (P,) weight decay of each parameter element, or (0,) for none.
    m, lr, a, b : momentum, learning rate, and the coefficients of velocity and gradient.

    Notes
    -----
    The weights see the new velocity before it is rounded to the arrays' type.
    """
    has_decay = decay.size > 0
    if previous.size > 0:
        for i in range(w.size):
            previous[i] = w[i]
    if has_decay:
        for i in range(w.size):
            weight = np.float64(w[i])
            gradient = np.float64(g[i]) + np.float64(decay[i]) * weight
            velocity = m * np.float64(v[i]) + gradient
            v[i] = velocity
            w[i] = weight - lr * (a * velocity + b * gradient)
    else:
        for i in range(w.size):
            gradient = np.float64(g[i])
            velocity = m * np.float64(v[i]) + gradient
            v[i] = velocity
            w[i] = np.float64(w[i]) - lr * (a * velocity + b * gradient)


@compiled
def predict_velocity(w: Floats, v: Floats, lr_times_horizon: float, out: Floats) -> None:
    """LWPv, weights after T more steps of the present velocity: ``out = w - (lr T) v``; all (P,)."""
    for i in range(w.size):
        out[i] = np.float64(w[i]) - lr_times_horizon * np.float64(v[i])


@compiled
def predict_difference(w: Floats, previous: Floats, horizon: float, out: Floats) -> None:
    """LWPw, weights after T more steps like the last one: ``out = w + T (w - previous)``; all (P,)."""
    for i in range(w.size):
        weight = np.float64(w[i])
        out[i] = weight + horizon * (weight - np.float64(previous[i]))
