"""Every kernel against torch autograd: float64 to 1e-10, float32 to a few units of its rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numba import njit

from pbsim.numerics import kernels
from pbsim.numerics.denormals import denormals_are_flushed, flush_denormals

TOLERANCE = {np.float64: 1e-10, np.float32: 3e-5}


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


dtypes = st.sampled_from([np.float64, np.float64, np.float32])
seeds = st.integers(0, 2**32 - 1)
micro_batches = st.integers(1, 3)


def draw_array(rng: np.random.Generator, dtype: type, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def unwritten(like: np.ndarray, *shape: int) -> np.ndarray:
    """An output as a kernel may find it: full of something that must not survive."""
    return np.full(shape, np.nan, like.dtype)


def as_torch(*arrays: np.ndarray) -> list[torch.Tensor | None]:
    """Float64 leaves; a missing bias (size 0) is None."""
    return [torch.tensor(a.astype(np.float64), requires_grad=True) if a.size else None for a in arrays]


def assert_close(measured: np.ndarray, expected: torch.Tensor | None) -> None:
    """Relative to the largest entry of the array: single entries may cancel."""
    if expected is None:
        assert measured.size == 0
        return
    reference = expected.detach().numpy()
    assert measured.shape == reference.shape
    error = np.abs(measured - reference).max()
    scale = max(np.abs(reference).max(), 1e-3)
    assert error <= TOLERANCE[measured.dtype.type] * scale


# --------------------------------------------------------------------------------------------- convolution


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    pair = st.tuples
    case = {
        "n": draw(micro_batches),
        "groups": groups,
        "inputs": groups * draw(st.integers(1, 3)),
        "outputs": groups * draw(st.integers(1, 3)),
        "size": draw(pair(st.integers(1, 9), st.integers(1, 9))),
        "kernel": draw(st.one_of(st.just((1, 1)), st.just((3, 3)), pair(st.integers(1, 4), st.integers(1, 4)))),
        "stride": draw(pair(st.integers(1, 3), st.integers(1, 3))),
        "padding": draw(pair(st.integers(0, 2), st.integers(0, 2))),
        "dilation": draw(pair(st.integers(1, 2), st.integers(1, 2))),
        "bias": draw(st.booleans()),
    }
    for axis in range(2):
        reach = case["dilation"][axis] * (case["kernel"][axis] - 1) + 1
        assume(case["size"][axis] + 2 * case["padding"][axis] >= reach)
    return case


def check_convolution(case: dict, dtype: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stride, padding, dilation, groups = (case[k] for k in ("stride", "padding", "dilation", "groups"))
    x = draw_array(rng, dtype, case["n"], case["inputs"], *case["size"])
    weight = draw_array(rng, dtype, case["outputs"], case["inputs"] // groups, *case["kernel"])
    bias = draw_array(rng, dtype, case["outputs"] if case["bias"] else 0)
    tx, tw, tb = as_torch(x, weight, bias)
    expected = F.conv2d(tx, tw, tb, stride, padding, dilation, groups)
    gy = draw_array(rng, dtype, *expected.shape)
    expected.backward(torch.tensor(gy.astype(np.float64)))

    geometry = (*stride, *padding, *dilation, groups)
    columns = unwritten(x, weight[0].size * expected[0, 0].numel())
    out, gx = unwritten(x, *expected.shape), unwritten(x, *x.shape)
    gweight, gbias = unwritten(x, *weight.shape), unwritten(x, bias.size)
    kernels.conv2d_forward(x, weight, bias, out, *geometry, columns)
    kernels.conv2d_input_gradient(gy, weight, gx, *geometry, columns)
    kernels.conv2d_weight_gradient(x, gy, gweight, gbias, *geometry, columns)
    assert_close(out, expected)
    assert_close(gx, tx.grad)
    assert_close(gweight, tw.grad)
    assert_close(gbias, tb.grad if tb is not None else None)


@examples(200)
@given(convolutions(), dtypes, seeds)
def test_convolution_equals_torch(case, dtype, seed):
    check_convolution(case, dtype, seed)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "stride", "padding", "groups"),
    [
        (16, 16, 32, 3, 1, 1, 1),
        (64, 64, 8, 3, 1, 1, 1),
        (16, 32, 32, 3, 2, 1, 1),
        (16, 32, 32, 1, 2, 0, 1),
        (16, 32, 13, 1, 1, 0, 1),
        (1, 16, 8, 3, 1, 1, 1),
        (24, 24, 11, 3, 1, 1, 24),
        (3, 16, 37, 7, 2, 3, 1),
    ],
)
def test_convolution_equals_torch_at_network_shapes(inputs, outputs, size, kernel, stride, padding, groups, dtype):
    for n in (1, 3):
        case = {
            "n": n,
            "inputs": inputs,
            "outputs": outputs,
            "groups": groups,
            "bias": True,
            "dilation": (1, 1),
        }
        case |= {"size": (size, size), "kernel": (kernel, kernel)}
        case |= {"stride": (stride, stride), "padding": (padding, padding)}
        check_convolution(case, dtype, seed=n)


def test_convolution_may_use_a_larger_scratch_and_gives_the_same_bits_again():
    rng = np.random.default_rng(0)
    x, weight = draw_array(rng, np.float32, 2, 5, 7, 6), draw_array(rng, np.float32, 4, 5, 3, 3)
    results = []
    for size in (45 * 42, 45 * 42 + 1000):
        out = unwritten(x, 2, 4, 7, 6)
        kernels.conv2d_forward(x, weight, x[:0, 0, 0, 0], out, 1, 1, 1, 1, 1, 1, 1, unwritten(x, size))
        results.append(out.tobytes())
    assert results[0] == results[1]


# -------------------------------------------------------------------------------------------------- linear


@examples(60)
@given(micro_batches, st.integers(1, 70), st.integers(1, 40), st.booleans(), dtypes, seeds)
def test_linear_equals_torch(n, inputs, outputs, has_bias, dtype, seed):
    rng = np.random.default_rng(seed)
    x, weight = draw_array(rng, dtype, n, inputs), draw_array(rng, dtype, outputs, inputs)
    bias = draw_array(rng, dtype, outputs if has_bias else 0)
    gy = draw_array(rng, dtype, n, outputs)
    tx, tw, tb = as_torch(x, weight, bias)
    expected = F.linear(tx, tw, tb)
    expected.backward(torch.tensor(gy.astype(np.float64)))
    out, gx = unwritten(x, n, outputs), unwritten(x, n, inputs)
    gweight, gbias = unwritten(x, outputs, inputs), unwritten(x, bias.size)
    kernels.linear_forward(x, weight, bias, out)
    kernels.linear_input_gradient(gy, weight, gx)
    kernels.linear_weight_gradient(x, gy, gweight, gbias)
    assert_close(out, expected)
    assert_close(gx, tx.grad)
    assert_close(gweight, tw.grad)
    assert_close(gbias, tb.grad if tb is not None else None)


# ------------------------------------------------------------------------------------- group normalization


@examples(60)
@given(
    micro_batches,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1e-5, 1e-3]),
    dtypes,
    seeds,
)
def test_group_norm_equals_torch(n, groups, per_group, length, has_weight, has_bias, eps, dtype, seed):
    assume(per_group * length >= 2)
    rng = np.random.default_rng(seed)
    channels = groups * per_group
    x = draw_array(rng, dtype, n, channels, length) * dtype(3) + dtype(1)
    weight = draw_array(rng, dtype, channels if has_weight else 0)
    bias = draw_array(rng, dtype, channels if has_bias else 0)
    gy = draw_array(rng, dtype, *x.shape)
    tx, tw, tb = as_torch(x, weight, bias)
    expected = F.group_norm(tx, groups, eps=eps)  # torch itself has no backward for a bias without a weight
    expected = expected * tw[:, None] if tw is not None else expected
    expected = expected + tb[:, None] if tb is not None else expected
    expected.backward(torch.tensor(gy.astype(np.float64)))
    out, normalised, rstd = unwritten(x, *x.shape), unwritten(x, *x.shape), unwritten(x, n, groups)
    gx, gweight, gbias = unwritten(x, *x.shape), unwritten(x, weight.size), unwritten(x, bias.size)
    kernels.group_norm_forward(x, weight, bias, groups, eps, normalised, rstd, out)
    kernels.group_norm_input_gradient(gy, normalised, rstd, weight, groups, gx)
    kernels.group_norm_weight_gradient(gy, normalised, gweight, gbias)
    assert_close(out, expected)
    assert_close(normalised, F.group_norm(tx, groups, eps=eps))
    # A group of two close values divides by little: the gradient's own scale is gy rstd, its entries cancel.
    scale = float(np.abs(rstd).max() * np.abs(gy).max() * (np.abs(weight).max() if has_weight else 1))
    assert np.abs(gx - tx.grad.numpy()).max() <= TOLERANCE[dtype] * max(scale, 1)
    assert_close(gweight, tw.grad if tw is not None else None)
    assert_close(gbias, tb.grad if tb is not None else None)


def test_group_norm_statistics_of_float32_are_made_in_float64():
    """Mean 1e4, deviation 1: one pass in float32 would lose the variance altogether."""
    x = (np.random.default_rng(0).standard_normal((1, 2, 4096)) + 1e4).astype(np.float32)
    none = np.empty(0, np.float32)
    out, normalised, rstd = unwritten(x, *x.shape), unwritten(x, *x.shape), unwritten(x, 1, 1)
    kernels.group_norm_forward(x, none, none, 1, 1e-5, normalised, rstd, out)
    expected = F.group_norm(torch.tensor(x.astype(np.float64)), 1)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_group_norm_backward_uses_the_weight_it_is_given():
    """The forward's normalised values with a later weight: torch's gradient at that weight."""
    rng = np.random.default_rng(1)
    x, gy = draw_array(rng, np.float64, 2, 4, 9), draw_array(rng, np.float64, 2, 4, 9)
    old, new, bias = (draw_array(rng, np.float64, 4) for _ in range(3))
    out, normalised, rstd, gx = (unwritten(x, *s) for s in (x.shape, x.shape, (2, 2), x.shape))
    kernels.group_norm_forward(x, old, bias, 2, 1e-5, normalised, rstd, out)
    kernels.group_norm_input_gradient(gy, normalised, rstd, new, 2, gx)
    tx, tw, tb = as_torch(x, new, bias)
    F.group_norm(tx, 2, tw, tb).backward(torch.tensor(gy))
    assert_close(gx, tx.grad)


# --------------------------------------------------------------------------------------------- elementwise


@examples(60)
@given(st.integers(1, 50), dtypes, seeds)
def test_relu_and_add_equal_torch(size, dtype, seed):
    rng = np.random.default_rng(seed)
    x, y, gy = (draw_array(rng, dtype, size) for _ in range(3))
    x[rng.random(size) < 0.2] = 0
    (tx,) = as_torch(x)
    expected = F.relu(tx)
    expected.backward(torch.tensor(gy.astype(np.float64)))
    out, gx, total = unwritten(x, size), unwritten(x, size), unwritten(x, size)
    kernels.relu_forward(x, out)
    kernels.relu_input_gradient(gy, out, gx)
    kernels.add_forward(x, y, total)
    assert_close(out, expected)
    assert_close(gx, tx.grad)
    np.testing.assert_array_equal(total, x + y)


def test_relu_passes_nan_on():
    x = np.array([np.nan, -1.0, 2.0])
    out = np.zeros(3)
    kernels.relu_forward(x, out)
    np.testing.assert_array_equal(out, [np.nan, 0.0, 2.0])


# ------------------------------------------------------------------------------------------------- pooling


@st.composite
def pools(draw):
    case = {"n": draw(micro_batches), "channels": draw(st.integers(1, 3)), "ceil_mode": draw(st.booleans())}
    for name, values in (
        ("size", st.integers(1, 10)),
        ("kernel", st.integers(1, 4)),
        ("stride", st.integers(1, 3)),
    ):
        case[name] = (draw(values), draw(values))
    case["padding"] = tuple(draw(st.integers(0, min(2, k // 2))) for k in case["kernel"])
    case["dilation"] = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    return case


def fits(case: dict, dilation: tuple[int, int]) -> bool:
    sizes = zip(case["size"], case["kernel"], case["padding"], dilation, strict=True)
    # The second condition keeps a position inside x in every window, without which torch is undefined.
    return all(s + 2 * p >= (k - 1) * d + 1 and s >= d for s, k, p, d in sizes)


@examples(150)
@given(pools(), st.booleans(), dtypes, seeds)
def test_max_pool_equals_torch(case, ties, dtype, seed):
    assume(fits(case, case["dilation"]))
    rng = np.random.default_rng(seed)
    x = draw_array(rng, dtype, case["n"], case["channels"], *case["size"])
    if ties:
        x = np.round(x)
    (tx,) = as_torch(x)
    shape = (case["kernel"], case["stride"], case["padding"], case["dilation"])
    expected, index = F.max_pool2d(tx, *shape, ceil_mode=case["ceil_mode"], return_indices=True)
    gy = draw_array(rng, dtype, *expected.shape)
    expected.backward(torch.tensor(gy.astype(np.float64)))
    out, winner, gx = unwritten(x, *expected.shape), unwritten(x, *expected.shape), unwritten(x, *x.shape)
    geometry = sum(shape, ())
    kernels.max_pool2d_forward(x, out, winner, *geometry)
    kernels.max_pool2d_input_gradient(gy, winner, gx, *geometry)
    np.testing.assert_array_equal(out, expected.detach().numpy().astype(dtype))
    assert_close(gx, tx.grad)
    _, kw, sh, sw, ph, pw, dh, dw = geometry
    rows, cols = np.arange(out.shape[2])[:, None] * sh - ph, np.arange(out.shape[3]) * sw - pw
    found = (rows + winner // kw * dh) * x.shape[3] + cols + winner % kw * dw
    np.testing.assert_array_equal(found, index.numpy())


def test_max_pool_lets_nan_win_as_torch_does():
    x = np.arange(16.0).reshape(1, 1, 4, 4)
    x[0, 0, 0, 0] = x[0, 0, 1, 1] = x[0, 0, 2, 3] = np.nan
    x[0, 0, 2:, :2] = -np.inf
    expected, index = F.max_pool2d(torch.tensor(x), 2, return_indices=True)
    out, winner = unwritten(x, 1, 1, 2, 2), unwritten(x, 1, 1, 2, 2)
    kernels.max_pool2d_forward(x, out, winner, 2, 2, 2, 2, 0, 0, 1, 1)
    np.testing.assert_array_equal(out, expected)
    corner = np.array([[0, 2], [8, 10]])
    np.testing.assert_array_equal(corner + winner[0, 0] // 2 * 4 + winner[0, 0] % 2, index[0, 0])


@examples(150)
@given(pools(), st.booleans(), dtypes, seeds)
def test_avg_pool_equals_torch(case, count_include_pad, dtype, seed):
    assume(fits(case, (1, 1)))
    rng = np.random.default_rng(seed)
    x = draw_array(rng, dtype, case["n"], case["channels"], *case["size"])
    (tx,) = as_torch(x)
    shape = (case["kernel"], case["stride"], case["padding"])
    expected = F.avg_pool2d(tx, *shape, case["ceil_mode"], count_include_pad)
    gy = draw_array(rng, dtype, *expected.shape)
    expected.backward(torch.tensor(gy.astype(np.float64)))
    out, gx = unwritten(x, *expected.shape), unwritten(x, *x.shape)
    kernels.avg_pool2d_forward(x, out, *sum(shape, ()), count_include_pad)
    kernels.avg_pool2d_input_gradient(gy, gx, *sum(shape, ()), count_include_pad)
    assert_close(out, expected)
    assert_close(gx, tx.grad)


# ---------------------------------------------------------------------------------------------------- loss


@examples(60)
@given(micro_batches, st.integers(1, 12), st.sampled_from([1.0, 30.0, 1000.0]), dtypes, seeds)
def test_cross_entropy_equals_torch(n, classes, spread, dtype, seed):
    rng = np.random.default_rng(seed)
    logits = draw_array(rng, dtype, n, classes) * dtype(spread)
    labels = rng.integers(0, classes, n)
    (tx,) = as_torch(logits)
    expected = F.cross_entropy(tx, torch.tensor(labels))
    expected.backward()
    probabilities, gx = unwritten(logits, n, classes), unwritten(logits, n, classes)
    loss = kernels.cross_entropy_forward(logits, labels, probabilities)
    kernels.cross_entropy_gradient(probabilities, labels, gx)
    assert loss == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    assert_close(probabilities, F.softmax(tx, 1))
    assert_close(gx, tx.grad)


@examples(60)
@given(micro_batches, st.integers(1, 12), dtypes, seeds)
def test_mean_squared_error_equals_torch(n, width, dtype, seed):
    rng = np.random.default_rng(seed)
    output, target = draw_array(rng, dtype, n, width), draw_array(rng, dtype, n, width)
    tx, ty = as_torch(output, target)
    expected = F.mse_loss(tx, ty)
    expected.backward()
    gx = unwritten(output, n, width)
    assert kernels.mse_forward(output, target) == pytest.approx(expected.item(), rel=1e-10)
    kernels.mse_gradient(output, target, gx)
    assert_close(gx, tx.grad)


# ----------------------------------------------------------------------------------------------- denormals


@njit
def scale_in_place(x, factor):
    for i in range(x.size):
        x[i] *= factor


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_denormals_vanish_inside_the_block_only(dtype):
    def halved_smallest():
        x = np.full(9, np.finfo(dtype).tiny, dtype)
        scale_in_place(x, dtype(0.5))
        return x

    if not torch.set_flush_denormal(False):
        pytest.skip("this processor has no flush-to-zero mode")
    assert (halved_smallest() > 0).all()
    with flush_denormals():
        assert denormals_are_flushed()
        assert (halved_smallest() == 0).all()
        with flush_denormals():
            pass
        assert denormals_are_flushed(), "a nested block must restore what it found"
    assert (halved_smallest() > 0).all()


def test_denormal_mode_is_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), flush_denormals():
        raise ZeroDivisionError
    assert not denormals_are_flushed()
