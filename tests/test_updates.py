"""Updates and predictions: closed forms, torch's SGD, golden trajectories, and SC as LWPv."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbsim.numerics.updates import momentum_update, predict_difference, predict_velocity

NONE = np.empty(0)


def spike_compensation(momentum: float, delay: int) -> tuple[float, float]:
    return momentum**delay, (1 - momentum**delay) / (1 - momentum)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(1, 40),
    st.sampled_from([np.float64, np.float32]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_update_is_its_equation_rounded_once(size, dtype, keeps_previous, has_decay, seed):
    rng = np.random.default_rng(seed)
    w, v, g, decay = (rng.standard_normal(size).astype(dtype) for _ in range(4))
    if not has_decay:
        decay = decay[:0]
    previous = np.full(size if keeps_previous else 0, np.nan, dtype)
    before = w.copy()
    m, lr, a, b = 0.9, 0.03, 0.7, 1.3
    w64, v64, g64 = (x.astype(np.float64) for x in (w, v, g))
    g64 = g64 + decay.astype(np.float64) * w64 if has_decay else g64
    v64 = m * v64 + g64
    momentum_update(w, v, g, previous, decay, m, lr, a, b)
    np.testing.assert_array_equal(v, v64.astype(dtype))
    np.testing.assert_array_equal(w, (w64 - lr * (a * v64 + b * g64)).astype(dtype))
    if keeps_previous:
        np.testing.assert_array_equal(previous, before)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_predictions_are_their_equations_rounded_once(dtype):
    rng = np.random.default_rng(0)
    w, other = (rng.standard_normal(33).astype(dtype) for _ in range(2))
    w64, other64 = w.astype(np.float64), other.astype(np.float64)
    out = np.full(33, np.nan, dtype)
    predict_velocity(w, other, 0.3, out)
    np.testing.assert_array_equal(out, (w64 - 0.3 * other64).astype(dtype))
    predict_difference(w, other, 4.0, out)
    np.testing.assert_array_equal(out, (w64 + 4.0 * (w64 - other64)).astype(dtype))


def test_constant_gradient_from_rest_has_the_geometric_closed_form():
    """v_k = (1 - m^k)/(1 - m), so w_k = -lr sum_i v_i = -lr/(1-m) (k - m (1 - m^k)/(1 - m))."""
    w, v, m, lr = np.zeros(1), np.zeros(1), 0.9, 0.1
    for k in range(1, 30):
        momentum_update(w, v, np.ones(1), NONE, NONE, m, lr, 1.0, 0.0)
        series = (1 - m**k) / (1 - m)
        assert v[0] == pytest.approx(series, rel=1e-13)
        assert w[0] == pytest.approx(-lr / (1 - m) * (k - m * series), rel=1e-12)


def test_learning_rate_stands_outside_the_buffer():
    """METHODS.md 1.4: g = 1, m = 0.9, lr 0.1 then 0.01 leads to -0.119 (inside the buffer: -0.200)."""
    w, v = np.zeros(1), np.zeros(1)
    for lr in (0.1, 0.01):
        momentum_update(w, v, np.ones(1), NONE, NONE, 0.9, lr, 1.0, 0.0)
    assert w[0] == pytest.approx(-0.119, abs=1e-15)


def test_predictions_by_velocity_and_by_difference_part_when_the_learning_rate_drops():
    """METHODS.md 1.4: 20 unit gradients at lr 0.1, then 0.01: .0878 against .878 per unit of horizon."""
    w, v, previous, out = np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1)
    for _ in range(20):
        momentum_update(w, v, np.ones(1), previous, NONE, 0.9, 0.1, 1.0, 0.0)
    predict_velocity(w, v, 0.01, out)
    assert w[0] - out[0] == pytest.approx(0.0878, abs=5e-5)
    predict_difference(w, previous, 1.0, out)
    assert w[0] - out[0] == pytest.approx(0.878, abs=5e-4)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 1e-6)])
def test_update_equals_torch_sgd(nesterov, weight_decay, dtype, tolerance):
    """Nesterov is (a, b) = (m, 1), which is also spike compensation for a delay of one."""
    rng = np.random.default_rng(3)
    m, lr = 0.9, 0.05
    w, v = rng.standard_normal(17).astype(dtype), np.zeros(17, dtype)
    decay = np.full(17 if weight_decay else 0, weight_decay, dtype)
    parameter = torch.nn.Parameter(torch.tensor(w))
    optimizer = torch.optim.SGD([parameter], lr, momentum=m, weight_decay=weight_decay, nesterov=nesterov)
    a, b = spike_compensation(m, 1) if nesterov else (1.0, 0.0)
    for _ in range(12):
        g = rng.standard_normal(17).astype(dtype)
        parameter.grad = torch.tensor(g)
        optimizer.step()
        momentum_update(w, v, g, w[:0], decay, m, lr, a, b)
        np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=tolerance, atol=tolerance)


def test_weight_decay_may_differ_by_element():
    w, v = np.array([2.0, 2.0]), np.zeros(2)
    momentum_update(w, v, np.zeros(2), NONE, np.array([0.0, 0.5]), 0.9, 0.1, 1.0, 0.0)
    np.testing.assert_allclose(w, [2.0, 1.9], rtol=1e-15)


@pytest.mark.parametrize("delay", [0, 1, 2, 7])
def test_spike_compensation_catches_up_with_what_came_late(delay):
    """One impulse, D updates late: afterwards w is where it would be had the impulse come in time."""
    m, lr = 0.9, 0.1
    late, late_v, on_time, on_time_v = (np.zeros(1) for _ in range(4))
    a, b = spike_compensation(m, delay)
    for k in range(delay + 10):
        impulse = np.array([1.0])
        momentum_update(on_time, on_time_v, impulse * (k == 0), NONE, NONE, m, lr, 1.0, 0.0)
        momentum_update(late, late_v, impulse * (k == delay), NONE, NONE, m, lr, a, b)
        if k >= delay:
            assert late[0] == pytest.approx(on_time[0], rel=1e-13)


def train_delayed(
    gradient: Callable[[float], float],
    steps: int,
    *,
    delay: int,
    momentum: float,
    rates: Callable[[int], float],
    compensate: bool = False,
    predict: str = "none",
    horizon: float | None = None,
) -> tuple[list[float], list[float]]:
    """One weight from 1 under a fixed delay: sample k's forward reads version max(0, k - delay).

    Returns the weights after each update, and the same as a forward at that rate would see them. A prediction
    uses the learning rate of the sample being forwarded, as an update that of the sample whose gradient it
    applies.
    """
    w, v, previous = np.ones(1), np.zeros(1), np.ones(1)
    a, b = spike_compensation(momentum, delay) if compensate else (1.0, 0.0)
    reach = float(delay) if horizon is None else horizon

    def forward_weight(version: tuple[np.ndarray, np.ndarray, np.ndarray], rate: float) -> float:
        w, v, previous = version
        out = w.copy()
        if predict == "velocity":
            predict_velocity(w, v, rate * reach, out)
        elif predict == "difference":
            predict_difference(w, previous, reach, out)
        return float(out[0])

    versions = [(w.copy(), v.copy(), previous.copy())]
    weights, predicted = [], []
    for k in range(steps):
        g = np.array([gradient(forward_weight(versions[max(0, k - delay)], rates(k)))])
        momentum_update(w, v, g, previous, NONE, momentum, rates(k), a, b)
        versions.append((w.copy(), v.copy(), previous.copy()))
        weights.append(float(w[0]))
        predicted.append(forward_weight(versions[-1], rates(k)))
    return weights, predicted


GOLDEN = {
    ("none", False): [0.9, 0.71, 0.439, 0.1051, -0.26641, -0.644669, -0.995612, -1.28482],
    ("none", True): [0.729, 0.3851, -0.02441, -0.419528, -0.754837, -0.984148, -1.081011, -1.035365],
    ("velocity", False): [0.9, 0.71, 0.439, 0.1251, -0.19041, -0.464069, -0.660092, -0.75437],
    ("difference", False): [0.9, 0.71, 0.439, 0.1251, -0.19041, -0.464069, -0.660092, -0.75437],
    ("velocity", True): [0.729, 0.3851, -0.02441, -0.365328, -0.583077, -0.624682, -0.499114, -0.247009],
    ("difference", True): [0.729, 0.3851, -0.02441, -0.272646, -0.38205, -0.303705, -0.168991, -0.016435],
}


@pytest.mark.parametrize(("predict", "compensate"), GOLDEN)
def test_golden_trajectories_of_delay_two(predict, compensate):
    """METHODS.md 1.2: L = w^2/2 from w = 1, m = 0.9, lr = 0.1, D = 2."""
    weights, _ = train_delayed(
        lambda w: w, 8, delay=2, momentum=0.9, rates=lambda k: 0.1, compensate=compensate, predict=predict
    )
    np.testing.assert_allclose(weights, GOLDEN[predict, compensate], atol=5.1e-7)


@pytest.mark.parametrize(
    ("predict", "expected"),
    [
        ("none", [-0.453059, -0.47599, -0.485676, -0.48929]),
        ("velocity", [-0.396371, -0.416244, -0.423965, -0.425799]),
    ],
)
def test_golden_trajectories_when_the_learning_rate_drops(predict, expected):
    """METHODS.md 1.4: lr 0.1 for four updates, then 0.01, D = 2, with spike compensation; updates 5 to 8."""
    weights, _ = train_delayed(
        lambda w: w,
        8,
        delay=2,
        momentum=0.9,
        rates=lambda k: 0.1 if k < 4 else 0.01,
        compensate=True,
        predict=predict,
    )
    np.testing.assert_allclose(weights[4:], expected, atol=5.1e-7)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_spike_compensation_is_velocity_prediction_seen_in_the_predicted_weights(delay):
    """PAPERS.md 1.9.1, any gradient: SC_D is LWPv of horizon m (1 - m^D)/(1 - m) = m + ... + m^D."""

    def gradient(w: float) -> float:
        return float(np.sin(3 * w) + w**3 - 0.5)

    m = 0.8
    horizon = m * (1 - m**delay) / (1 - m)
    assert horizon == pytest.approx(sum(m**i for i in range(1, delay + 1)))
    common = {"delay": delay, "momentum": m, "rates": lambda k: 0.02}
    compensated, _ = train_delayed(gradient, 60, compensate=True, **common)
    weights, predicted = train_delayed(gradient, 60, predict="velocity", horizon=horizon, **common)
    np.testing.assert_allclose(predicted, compensated, rtol=1e-12, atol=1e-13)
    assert np.abs(np.subtract(weights, compensated)).max() > 1e-3, "only the predicted weights agree"
