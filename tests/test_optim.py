"""Recipes at other batch sizes, learning rates sample by sample, and the coefficients of every mitigation."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbsim import load_workload
from pbsim.config import Source, Workload, parse_method, validate
from pbsim.config.workload import Training
from pbsim.errors import UserError
from pbsim.optim import LearningRate, Recipe, UpdateRule, scale_recipe, update_rule
from pbsim.optim.recipe import step_start
from pbsim.schedule import Batches

MITIGATIONS = ["", "+sc", "+lwpv", "+lwpw", "+ws", "+lwpv+sc"]


def training(**keys: object) -> Training:
    document = {
        "name": "toy",
        "model": {"factory": "a:b"},
        "data": {"kind": "digits"},
        "training": {"batch_size": 128, "lr": 0.1, "momentum": 0.9} | keys,
    }
    return validate(Workload, Source(document, "toy")).training


def rates(total: int, epoch_samples: int | None = None, batch: int = 1, **keys: object) -> np.ndarray:
    """The learning rate of every sample of a run, with a peak of 1."""
    table = training(lr=1.0, scale=False, **keys)
    recipe = scale_recipe(table, batch)
    lr = LearningRate(recipe, total, epoch_samples or total, table.warmup_epochs, table.decay)
    return lr(np.arange(total))


def rule(method: str, momentum: float = 0.9, nesterov: bool = False) -> UpdateRule:
    return update_rule(parse_method(method), Recipe(1, 0.1, momentum, 0.0, nesterov))


def coefficients(method: str, delay: float, momentum: float = 0.9, lr: float = 0.1, nesterov: bool = False):
    found = rule(method, momentum, nesterov).coefficients(np.array([float(delay)]), np.array([lr]))
    return found.a[0], found.b[0], found.velocity_prediction[0], found.difference_prediction[0]


# Scaling to another batch size (PAPERS.md 1.2)


@pytest.mark.parametrize(
    ("reference", "batch", "momentum", "lr"),
    [
        ((128, 0.1, 0.9), 1, 0.999177210, 6.42805e-6),
        ((128, 0.1, 0.9), 8, 0.993436602, 4.10212e-4),
        ((128, 0.1, 0.9), 32, 0.974003746, 6.49906e-3),
        ((128, 0.05, 0.9), 1, 0.999177210, 3.21402e-6),
        ((256, 0.1, 0.9), 1, 0.999588520, 1.60734e-6),
        ((256, 0.1, 0.9), 32, 0.986916281, 1.63546e-3),
    ],
)
def test_recipes_scale_to_the_papers_numbers(reference, batch, momentum, lr):
    size, peak, m = reference
    recipe = scale_recipe(training(batch_size=size, lr=peak, momentum=m), batch)
    assert recipe.batch == batch
    assert recipe.momentum == pytest.approx(momentum, abs=5.1e-10)
    assert recipe.lr == pytest.approx(lr, rel=5e-6)


def test_a_recipe_at_its_own_batch_stays_as_it_is():
    recipe = scale_recipe(training(weight_decay=1e-4, nesterov=True), 128)
    assert recipe == Recipe(128, pytest.approx(0.1, rel=1e-15), 0.9, 1e-4, True)


def test_a_recipe_that_says_so_is_not_scaled():
    assert scale_recipe(training(scale=False, weight_decay=1e-4), 1) == Recipe(1, 0.1, 0.9, 1e-4, False)


def test_without_momentum_the_rate_scales_linearly():
    recipe = scale_recipe(training(momentum=0.0), 1)
    assert recipe.momentum == 0
    assert recipe.lr == pytest.approx(0.1 / 128, rel=1e-15)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(0.5, 0.99), st.integers(1, 512), st.integers(1, 512))
def test_a_samples_decay_and_total_contribution_do_not_depend_on_the_batch(momentum, reference, batch):
    """Momentum's decay per sample, m^(1/N), and each sample's whole step, lr / ((1 - m) N)."""
    recipe = scale_recipe(training(batch_size=reference, momentum=momentum), batch)
    assert recipe.momentum ** (1 / batch) == pytest.approx(momentum ** (1 / reference), rel=1e-9)
    whole_step = recipe.lr / ((1 - recipe.momentum) * batch)
    assert whole_step == pytest.approx(0.1 / ((1 - momentum) * reference), rel=1e-9)


# Decays (DESIGN.md 5.6)


@pytest.mark.parametrize(
    ("at", "total", "start"), [(0.07, 100, 7), (0.07, 50_000, 3500), (0.55, 200, 110), (0.1, 30, 3), (0.1, 1000, 100)]
)
def test_a_step_acts_at_the_exact_decimal_where_floats_would_be_off_by_one(at, total, start):
    # 0.07 * 100 is 7.000000000000001, and the double nearest to 0.1 is above it
    assert start + 1 in (math.ceil(at * total), math.ceil(Fraction(at) * total))
    assert step_start(at, total) == start
    factors = rates(total, decay={"kind": "step", "at": [at], "factor": 0.5})
    np.testing.assert_array_equal(factors, np.where(np.arange(total) >= start, 0.5, 1.0))


def test_the_rate_of_imagenet_falls_behind_epochs_30_60_and_80():
    workload = load_workload("resnet50_imagenet")
    epoch = workload.data.train_samples
    recipe = Recipe(1, 1.0, 0.9, 0.0, False)
    rate = LearningRate(recipe, workload.training.epochs * epoch, epoch, 0.0, workload.training.decay)
    last = np.array([30, 60, 80, 90]) * epoch - 1
    np.testing.assert_allclose(rate(last), [1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(rate(last[:3] + 1), [0.1, 0.01, 0.001])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 9999), st.integers(1, 10**7))
def test_a_step_starts_at_the_ceiling_of_the_exact_product(ten_thousandths, total):
    assert step_start(ten_thousandths / 10_000, total) == -(-ten_thousandths * total // 10_000)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(1e-9, 1, exclude_max=True), st.integers(1, 10**6))
def test_a_step_reads_a_fraction_as_it_is_written(fraction, total):
    exact = (Decimal(repr(fraction)) * total).to_integral_value(ROUND_CEILING)
    assert step_start(fraction, total) == exact


def test_steps_multiply_in_whatever_order_they_are_given():
    factors = rates(20, decay={"kind": "step", "at": [0.75, 0.5, 0.5], "factor": 0.1})
    np.testing.assert_allclose(factors, [1.0] * 10 + [0.01] * 5 + [0.001] * 5, rtol=1e-14)


def test_a_step_with_total_that_it_does_not_divide_starts_at_the_next_sample():
    factors = rates(7, decay={"kind": "step", "at": [0.5], "factor": 0.5})  # 3.5: from sample 4 on
    np.testing.assert_array_equal(factors, [1, 1, 1, 1, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ({"kind": "constant"}, lambda i: 1.0),
        ({"kind": "exponential", "factor": 0.5}, lambda i: 0.5 ** (i / 8)),
        ({"kind": "polynomial"}, lambda i: 1 - i / 24),
        ({"kind": "polynomial", "power": 2.0}, lambda i: (1 - i / 24) ** 2),
        ({"kind": "cosine"}, lambda i: (1 + math.cos(math.pi * i / 24)) / 2),
    ],
)
def test_smooth_decays_are_their_closed_forms(decay, expected):
    factors = rates(24, epoch_samples=8, decay=decay)
    np.testing.assert_allclose(factors, [expected(i) for i in range(24)], rtol=1e-13)


def test_rates_of_a_piece_are_those_of_the_whole():
    table = training(lr=0.3, warmup_epochs=0.5, decay={"kind": "cosine"})
    lr = LearningRate(scale_recipe(table, 1), 40, 20, table.warmup_epochs, table.decay)
    np.testing.assert_array_equal(lr(np.arange(40))[7:19], lr(np.arange(7, 19)))


# Warm-up


@pytest.mark.parametrize(
    ("warmup_epochs", "epoch_samples", "batch", "updates"),
    [(0.5, 10, 1, 5), (0.33, 10, 1, 3.3), (0.25, 10, 4, 0.625), (1.0, 10, 4, 2.5), (0.01, 10, 1, 0.1)],
)
def test_warm_up_rises_by_updates_to_one(warmup_epochs, epoch_samples, batch, updates):
    factors = rates(24, epoch_samples, batch, warmup_epochs=warmup_epochs)
    expected = [min(1.0, (i // batch + 1) / updates) for i in range(24)]
    np.testing.assert_allclose(factors, expected, rtol=1e-14)


def test_warm_up_counts_the_smaller_batch_at_an_epochs_end_as_an_update():
    # epochs of 10 in batches of 4, 4 and 2: two epochs are six updates, and 2 * 10 / 4 = 5 of them warm up
    table = training(lr=1.0, scale=False, warmup_epochs=2.0)
    factors = LearningRate(scale_recipe(table, 4), 30, 10, 2.0, table.decay)(np.arange(30))
    updates = np.repeat(np.arange(9), [4, 4, 2] * 3)
    np.testing.assert_allclose(factors, np.minimum(1, (updates + 1) / 5), rtol=1e-15)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 12))
def test_warm_up_counts_the_updates_that_the_schedule_makes(samples, size, epoch):
    table = training(lr=1.0, scale=False)
    lr = LearningRate(scale_recipe(table, size), samples, epoch, 1000.0, table.decay)
    updates = Batches(samples, size, drained=True, epoch_samples=epoch).indices(np.arange(samples))
    np.testing.assert_allclose(lr(np.arange(samples)), (updates + 1) * size / (1000 * epoch), rtol=1e-12)


def test_without_warm_up_the_first_sample_has_the_peak():
    assert rates(4)[0] == 1


def test_warm_up_multiplies_the_decay_and_the_scaled_peak():
    table = training(warmup_epochs=0.5, decay={"kind": "polynomial"})
    recipe = scale_recipe(table, 1)
    found = LearningRate(recipe, 20, 10, table.warmup_epochs, table.decay)(np.arange(20))
    expected = [recipe.lr * min(1.0, (i + 1) / 5) * (1 - i / 20) for i in range(20)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_rates_are_float64():
    assert rates(3, warmup_epochs=0.5, decay={"kind": "step", "at": [0.5], "factor": 0.1}).dtype == np.float64


# Coefficients


def test_plain_momentum_has_neither_spike_nor_prediction():
    assert coefficients("pb", delay=7) == (1, 0, 0, 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(0.0, 0.9995), st.integers(0, 400), st.integers(0, 400), st.sampled_from([1, 2, 3]))
def test_spike_compensation_catches_up_with_an_undelayed_gradient(m, delay, k, multiple):
    """a (1 - m^(k+1)) / (1-m) + b = (1 - m^(D+k+1)) / (1-m), METHODS.md 1.2."""
    a, b, *_ = coefficients(f"pb+sc={multiple}", delay, m)
    horizon = multiple * delay
    late = a * (1 - m ** (k + 1)) / (1 - m) + b
    on_time = (1 - m ** (horizon + k + 1)) / (1 - m)
    assert late == pytest.approx(on_time, rel=1e-9)


@pytest.mark.parametrize(
    ("delay", "a", "b"), [(66, 0.947123, 64.2657), (34, 0.972402, 33.5424), (336, 0.758380, 293.6599)]
)
def test_spike_compensation_has_the_papers_values_at_batch_one(delay, a, b):
    recipe = scale_recipe(training(), 1)
    found = update_rule(parse_method("pb+sc"), recipe).coefficients(np.array([float(delay)]), np.zeros(1))
    assert found.a[0] == pytest.approx(a, abs=5.1e-7)
    assert found.b[0] == pytest.approx(b, abs=5.1e-5)


@pytest.mark.parametrize("method", ["pb" + mitigation for mitigation in MITIGATIONS])
@pytest.mark.parametrize("m", [0.0, 0.9])
def test_without_delay_every_mitigation_is_plain_momentum(method, m):
    assert coefficients(method, delay=0, momentum=m) == (1, 0, 0, 0)


@pytest.mark.parametrize("m", [0.0, 0.5, 0.9, 0.9992])
def test_spike_compensation_of_one_update_is_nesterov(m):
    a, b, *_ = coefficients("pb+sc", delay=1, momentum=m)
    assert (a, b) == (m, pytest.approx(1, rel=1e-15))
    assert coefficients("pb", delay=1, momentum=m, nesterov=True)[:2] == (m, 1)


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_nesterov_does_not_ask_for_the_delay(delay):
    assert coefficients("pb", delay, nesterov=True) == (0.9, 1, 0, 0)
    assert coefficients("pb+lwpv", delay, nesterov=True) == (0.9, 1, pytest.approx(0.1 * delay), 0)


@pytest.mark.parametrize(("method", "nesterov"), [("pb+sc", False), ("pb", True)])
def test_one_late_update_steps_like_torchs_nesterov(method, nesterov):
    gradients = np.random.default_rng(0).standard_normal(8)
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=True)
    a, b, *_ = coefficients(method, delay=1, nesterov=nesterov)
    own, v = 0.0, 0.0
    for g in gradients:
        w.grad = torch.tensor([g])
        optimizer.step()
        v = 0.9 * v + g
        own -= 0.1 * (a * v + b * g)
        assert own == pytest.approx(w.item(), rel=1e-12)


@pytest.mark.parametrize(("multiple", "horizon"), [("", 6), ("=2", 12), ("=0.5", 3)])
def test_predictions_look_ahead_by_multiples_of_the_delay(multiple, horizon):
    assert coefficients(f"pb+lwpv{multiple}", delay=6, lr=0.25) == (1, 0, 0.25 * horizon, 0)
    assert coefficients(f"pb+lwpw{multiple}", delay=6, lr=0.25) == (1, 0, 0, horizon)


@pytest.mark.parametrize(("multiple", "horizon"), [("=2", 12), ("=0.5", 3)])
def test_a_multiple_of_the_spike_is_a_longer_delay(multiple, horizon):
    assert coefficients(f"pb+sc{multiple}", delay=6) == coefficients("pb+sc", delay=horizon)


def test_mitigations_combine():
    a, b, *_ = coefficients("pb+sc", delay=6)
    assert coefficients("pb+lwpv=2+sc", delay=6) == (a, b, pytest.approx(0.1 * 12), 0)
    assert coefficients("pb+sc+lwpw", delay=6) == (a, b, 0, 6)


def test_coefficients_are_per_sample():
    delays, lrs = np.array([0.0, 1.0, 4.0]), np.array([0.3, 0.2, 0.1])
    found = rule("pb+lwpv+sc").coefficients(delays, lrs)
    np.testing.assert_allclose(found.a, [1, 0.9, 0.9**4], rtol=1e-14)
    np.testing.assert_allclose(found.b, [0, 1, 1 + 0.9 + 0.81 + 0.729], rtol=1e-14)
    np.testing.assert_allclose(found.velocity_prediction, [0, 0.2, 0.4], rtol=1e-14)
    np.testing.assert_array_equal(found[1:].a, found.a[1:])


@pytest.mark.parametrize(
    ("method", "keeps_previous", "predicts", "stashes"),
    [
        ("pb", False, False, False),
        ("pb+sc", False, False, False),
        ("pb+lwpv+sc", False, True, False),
        ("pb+lwpw", True, True, False),
        ("pb+ws", False, False, True),
        ("pb+ws+lwpw", True, True, True),
    ],
)
def test_a_rule_says_what_a_stage_has_to_keep(method, keeps_previous, predicts, stashes):
    found = rule(method)
    assert (found.keeps_previous, found.predicts, found.stash_weights) == (keeps_previous, predicts, stashes)


@pytest.mark.parametrize(
    ("method", "weight_decay", "nesterov", "update", "prediction"),
    [
        ("pb", 0.0, False, 2, 0),  # v <- m v + g; w <- w - lr v
        ("pb", 1e-4, False, 3, 0),  # and g <- g + decay w
        ("pb", 1e-4, True, 4, 0),  # and the term b g
        ("pb+sc", 0.0, False, 3, 0),
        ("pb+lwpv+sc", 1e-4, False, 4, 1),  # w - p v
        ("pb+lwpw", 0.0, False, 2, 2),  # w - w_previous; w + p times that
    ],
)
def test_operations_per_weight_are_those_of_the_equations(method, weight_decay, nesterov, update, prediction):
    found = update_rule(parse_method(method), Recipe(1, 0.1, 0.9, weight_decay, nesterov))
    assert (found.update_operations, found.prediction_operations) == (update, prediction)


def test_nesterov_and_spike_compensation_exclude_each_other():
    with pytest.raises(UserError, match=r"training\.nesterov.*SC_1 is Nesterov"):
        rule("pb+sc", nesterov=True)
