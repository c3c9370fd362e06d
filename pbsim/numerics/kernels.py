"""The operators' arithmetic: forward, input gradient and weight gradient of each, as numba kernels.

The executor replays a trace and calls these on views of one arena, so a kernel owns no memory: it reads
C-contiguous arrays of one float type, *overwrites* its outputs, and knows neither versions nor stages.
Splitting every backward into an input gradient and a weight gradient follows the hardware, where they are
separate operations that may run at different cycles; both take what the forward saved as arguments and never
recompute it.

Three conventions hold throughout. The leading axis ``n`` is the micro-batch. A missing bias or scale is an
array of size 0, so that one compiled kernel serves both cases. Sums of many terms that are not a matrix
product (statistics, loss, bias gradients) are made in float64 whatever the arrays' type, in a fixed order.

Convolutions are matrix products on `im2col` columns, one image and group at a time (Chellapilla et al. 2006):
with K = C/g KH KW and L = OH OW the weight is (O/g, K), the columns (K, L) and the output (O/g, L), all
C-contiguous, and each of the three products hands BLAS its operands as they lie, transposed by flag where
needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pbsim.compilation import compiled

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.int64]


# --------------------------------------------------------------------------------------------- flat arrays


@compiled
def _clear(target: Floats) -> None:
    """``target = 0``, (P,)."""
    for i in range(target.size):
        target[i] = 0.0


@compiled
def _copy(source: Floats, target: Floats) -> None:
    """``target = source``, both (P,)."""
    for i in range(target.size):
        target[i] = source[i]


@compiled
def _accumulate(source: Floats, target: Floats) -> None:
    """``target += source``, both (P,)."""
    for i in range(target.size):
        target[i] += source[i]


# ----------------------------------------------------------------------------------------- sums in float64


@compiled
def _sum(x: Floats) -> float:
    """Sum of x (L,) in float64: eight interleaved partial sums, which keep the adder's pipeline full."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    whole = x.size - x.size % 8
    for i in range(0, whole, 8):
        s0 += np.float64(x[i])
        s1 += np.float64(x[i + 1])
        s2 += np.float64(x[i + 2])
        s3 += np.float64(x[i + 3])
        s4 += np.float64(x[i + 4])
        s5 += np.float64(x[i + 5])
        s6 += np.float64(x[i + 6])
        s7 += np.float64(x[i + 7])
    for i in range(whole, x.size):
        s0 += np.float64(x[i])
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@compiled
def _sum_of_squares(x: Floats, mean: float) -> float:
    """Sum of (x - mean)^2 over x (L,) in float64."""
    s0 = s1 = s2 = s3 = 0.0
    whole = x.size - x.size % 4
    for i in range(0, whole, 4):
        d0 = np.float64(x[i]) - mean
        d1 = np.float64(x[i + 1]) - mean
        d2 = np.float64(x[i + 2]) - mean
        d3 = np.float64(x[i + 3]) - mean
        s0 += d0 * d0
        s1 += d1 * d1
        s2 += d2 * d2
        s3 += d3 * d3
    for i in range(whole, x.size):
        d0 = np.float64(x[i]) - mean
        s0 += d0 * d0
    return (s0 + s1) + (s2 + s3)


@compiled
def _sum_of_products(x: Floats, y: Floats) -> float:
    """Sum of x y over x, y (L,) in float64."""
    s0 = s1 = s2 = s3 = 0.0
    whole = x.size - x.size % 4
    for i in range(0, whole, 4):
        s0 += np.float64(x[i]) * np.float64(y[i])
        s1 += np.float64(x[i + 1]) * np.float64(y[i + 1])
        s2 += np.float64(x[i + 2]) * np.float64(y[i + 2])
        s3 += np.float64(x[i + 3]) * np.float64(y[i + 3])
    for i in range(whole, x.size):
        s0 += np.float64(x[i]) * np.float64(y[i])
    return (s0 + s1) + (s2 + s3)


@compiled
def _multiply(a: Floats, b: Floats, out: Floats) -> None:
    """``out = a b`` by BLAS: matrices that lie in C order, or their transposes."""
    np.dot(a, b, out)


# --------------------------------------------------------------------------------------------- convolution


@compiled
def _matrix(flat: Floats, start: int, rows: int, columns: int) -> Floats:
    """The C-contiguous (rows, columns) view of a flat array from `start` on."""
    return flat[start : start + rows * columns].reshape(rows, columns)


@compiled
def _inside(offset: int, stride: int, size: int, count: int) -> tuple[int, int]:
    """The range [low, high) of o in [0, count) for which 0 <= o stride + offset < size."""
    low = 0 if offset >= 0 else (-offset + stride - 1) // stride
    high = 0 if offset >= size else (size - 1 - offset) // stride + 1
    high = min(high, count)
    return min(low, high), high


@compiled
def _im2col(
    x: Floats,
    columns: Floats,
    kernel_h: int,
    kernel_w: int,
    out_h: int,
    out_w: int,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
) -> None:
    """``columns[(c, kh, kw), (oh, ow)] = x[c, oh sh - ph + kh dh, ow sw - pw + kw dw]``, or 0 outside x.

    Where a row of columns is as wide as a row of x and the stride is 1, one column row is the plane shifted
    as a whole, but for the margins that the shift takes from the neighbouring line; it is copied in one go.
    """
    channels, height, width = x.shape
    is_shift = sh == 1 and sw == 1 and out_w == width
    row = 0
    for c in range(channels):
        plane = x[c].reshape(-1)
        for kh in range(kernel_h):
            offset_h = kh * dh - ph
            low_h, high_h = _inside(offset_h, sh, height, out_h)
            for kw in range(kernel_w):
                offset_w = kw * dw - pw
                low_w, high_w = _inside(offset_w, sw, width, out_w)
                target = columns[row]
                row += 1
                _clear(target[: low_h * out_w])
                _clear(target[high_h * out_w :])
                if is_shift:
                    shift = offset_h * width + offset_w
                    start, stop = max(low_h * width, -shift), min(high_h * width, plane.size - shift)
                    if start < stop:
                        _copy(plane[start + shift : stop + shift], target[start:stop])
                for oh in range(low_h, high_h):
                    line = target[oh * out_w : (oh + 1) * out_w]
                    _clear(line[:low_w])
                    _clear(line[high_w:])
                    first = (oh * sh + offset_h) * width + low_w * sw + offset_w
                    if is_shift:
                        continue
                    if sw == 1:
                        _copy(plane[first : first + high_w - low_w], line[low_w:high_w])
                    else:
                        for ow in range(high_w - low_w):
                            line[np.uintp(low_w + ow)] = plane[np.uintp(first + ow * sw)]


@compiled
def _col2im(
    columns: Floats,
    gx: Floats,
    kernel_h: int,
    kernel_w: int,
    out_h: int,
    out_w: int,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
) -> None:
    """The transpose of `_im2col`: sums into gx (C/g, H, W) the column entries read from it.

    Overwrites gx, and in `columns` the entries that stand for padding.
    """
    channels, height, width = gx.shape
    is_shift = sh == 1 and sw == 1 and out_w == width
    row = 0
    for c in range(channels):
        plane = gx[c].reshape(-1)
        _clear(plane)
        for kh in range(kernel_h):
            offset_h = kh * dh - ph
            low_h, high_h = _inside(offset_h, sh, height, out_h)
            for kw in range(kernel_w):
                offset_w = kw * dw - pw
                low_w, high_w = _inside(offset_w, sw, width, out_w)
                source = columns[row]
                row += 1
                for oh in range(low_h, high_h):
                    line = source[oh * out_w : (oh + 1) * out_w]
                    first = (oh * sh + offset_h) * width + low_w * sw + offset_w
                    if is_shift:
                        _clear(line[:low_w])
                        _clear(line[high_w:])
                    elif sw == 1:
                        _accumulate(line[low_w:high_w], plane[first : first + high_w - low_w])
                    else:
                        for ow in range(high_w - low_w):
                            plane[np.uintp(first + ow * sw)] += line[np.uintp(low_w + ow)]
                if is_shift:
                    shift = offset_h * width + offset_w
                    start, stop = max(low_h * width, -shift), min(high_h * width, plane.size - shift)
                    if start < stop:
                        _accumulate(source[start:stop], plane[start + shift : stop + shift])


@compiled
def _is_matrix_product(kernel_h: int, kernel_w: int, sh: int, sw: int, ph: int, pw: int) -> bool:
    """Whether the columns of a convolution are its input: 1x1, stride 1, no padding."""
    return kernel_h == 1 and kernel_w == 1 and sh == 1 and sw == 1 and ph == 0 and pw == 0


@compiled
def conv2d_forward(
    x: Floats,
    weight: Floats,
    bias: Floats,
    out: Floats,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
    groups: int,
    columns: Floats,
) -> None:
    """``out[n, o] = bias[o] + sum_k weight[o, k] columns_n[k]``.

    Parameters
    ----------
    x : (n, C, H, W).
    weight : (O, C/g, KH, KW).
    bias : (O,) or (0,).
    out : (n, O, OH, OW), overwritten.
    sh, sw, ph, pw, dh, dw, groups : stride, padding, dilation (height, width) and g.
    columns : (at least C/g KH KW OH OW,) scratch.
    """
    n = x.shape[0]
    outputs, kernel_c, kernel_h, kernel_w = weight.shape
    out_h, out_w = out.shape[2], out.shape[3]
    k, area, o = kernel_c * kernel_h * kernel_w, out_h * out_w, outputs // groups
    pointwise = _is_matrix_product(kernel_h, kernel_w, sh, sw, ph, pw)
    flat_x, flat_w, flat_out = x.reshape(-1), weight.reshape(-1), out.reshape(-1)
    cols = _matrix(columns, 0, k, area) if not pointwise else _matrix(flat_x, 0, k, area)
    for i in range(n):
        for g in range(groups):
            if pointwise:
                cols = _matrix(flat_x, (i * groups + g) * k * area, k, area)
            else:
                image = x[i, g * kernel_c : (g + 1) * kernel_c]
                _im2col(image, cols, kernel_h, kernel_w, out_h, out_w, sh, sw, ph, pw, dh, dw)
            _multiply(
                _matrix(flat_w, g * o * k, o, k),
                cols,
                _matrix(flat_out, (i * groups + g) * o * area, o, area),
            )
        if bias.size > 0:
            for c in range(outputs):
                plane, constant = out[i, c].reshape(-1), bias[c]
                for j in range(area):
                    plane[j] += constant


@compiled
def conv2d_input_gradient(
    gy: Floats,
    weight: Floats,
    gx: Floats,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
    groups: int,
    columns: Floats,
) -> None:
    """``gx[n] = col2im(weight^T gy[n])``: gy (n, O, OH, OW), weight (O, C/g, KH, KW) -> gx (n, C, H, W).

    Stride, padding, dilation, groups and the scratch `columns` as in `conv2d_forward`.
    """
    n = gx.shape[0]
    outputs, kernel_c, kernel_h, kernel_w = weight.shape
    out_h, out_w = gy.shape[2], gy.shape[3]
    k, area, o = kernel_c * kernel_h * kernel_w, out_h * out_w, outputs // groups
    pointwise = _is_matrix_product(kernel_h, kernel_w, sh, sw, ph, pw)
    flat_gy, flat_w, flat_gx = gy.reshape(-1), weight.reshape(-1), gx.reshape(-1)
    for i in range(n):
        for g in range(groups):
            weight_t = _matrix(flat_w, g * o * k, o, k).T
            gradient = _matrix(flat_gy, (i * groups + g) * o * area, o, area)
            if pointwise:
                _multiply(weight_t, gradient, _matrix(flat_gx, (i * groups + g) * k * area, k, area))
            else:
                cols = _matrix(columns, 0, k, area)
                _multiply(weight_t, gradient, cols)
                image = gx[i, g * kernel_c : (g + 1) * kernel_c]
                _col2im(cols, image, kernel_h, kernel_w, out_h, out_w, sh, sw, ph, pw, dh, dw)


@compiled
def conv2d_weight_gradient(
    x: Floats,
    gy: Floats,
    gweight: Floats,
    gbias: Floats,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
    groups: int,
    columns: Floats,
) -> None:
    """``gweight = sum_n gy[n] columns_n^T``, ``gbias = sum_{n, oh, ow} gy``.

    x (n, C, H, W), gy (n, O, OH, OW) -> gweight (O, C/g, KH, KW), gbias (O,) or (0,). Stride, padding,
    dilation, groups and the scratch `columns` as in `conv2d_forward`; a micro-batch of several allocates one
    more (O/g, K) matrix.
    """
    n = x.shape[0]
    outputs, kernel_c, kernel_h, kernel_w = gweight.shape
    out_h, out_w = gy.shape[2], gy.shape[3]
    k, area, o = kernel_c * kernel_h * kernel_w, out_h * out_w, outputs // groups
    pointwise = _is_matrix_product(kernel_h, kernel_w, sh, sw, ph, pw)
    flat_x, flat_gy, flat_gw = x.reshape(-1), gy.reshape(-1), gweight.reshape(-1)
    partial = np.empty((o, k) if n > 1 else (0, 0), gweight.dtype)
    for i in range(n):
        for g in range(groups):
            if pointwise:
                cols = _matrix(flat_x, (i * groups + g) * k * area, k, area)
            else:
                cols = _matrix(columns, 0, k, area)
                image = x[i, g * kernel_c : (g + 1) * kernel_c]
                _im2col(image, cols, kernel_h, kernel_w, out_h, out_w, sh, sw, ph, pw, dh, dw)
            gradient = _matrix(flat_gy, (i * groups + g) * o * area, o, area)
            total = _matrix(flat_gw, g * o * k, o, k)
            if i == 0:
                _multiply(gradient, cols.T, total)
            else:
                _multiply(gradient, cols.T, partial)
                _accumulate(partial.reshape(-1), total.reshape(-1))
    for c in range(gbias.size):
        s = 0.0
        for i in range(n):
            s += _sum(gy[i, c].reshape(-1))
        gbias[c] = s


# -------------------------------------------------------------------------------------------------- linear


@compiled
def linear_forward(x: Floats, weight: Floats, bias: Floats, out: Floats) -> None:
    """``out = x weight^T + bias``: x (n, I), weight (O, I), bias (O,) or (0,) -> out (n, O)."""
    if x.shape[0] == 1:
        _multiply(weight, x[0], out[0])
    else:
        _multiply(x, weight.T, out)
    if bias.size > 0:
        for i in range(x.shape[0]):
            _accumulate(bias, out[i])


@compiled
def linear_input_gradient(gy: Floats, weight: Floats, gx: Floats) -> None:
    """``gx = gy weight``: gy (n, O), weight (O, I) -> gx (n, I)."""
    if gy.shape[0] == 1:
        _multiply(weight.T, gy[0], gx[0])
    else:
        _multiply(gy, weight, gx)


@compiled
def linear_weight_gradient(x: Floats, gy: Floats, gweight: Floats, gbias: Floats) -> None:
    """``gweight = gy^T x``, ``gbias = sum_n gy``: (n, I), (n, O) -> (O, I), (O,) or (0,)."""
    n, inputs = x.shape
    if n == 1:
        for o in range(gy.shape[1]):
            scale = gy[0, o]
            for i in range(inputs):
                gweight[o, i] = scale * x[0, i]
    else:
        _multiply(gy.T, x, gweight)
    for o in range(gbias.size):
        s = 0.0
        for i in range(n):
            s += np.float64(gy[i, o])
        gbias[o] = s


# ------------------------------------------------------------------------------------- group normalization


@compiled
def group_norm_forward(
    x: Floats,
    weight: Floats,
    bias: Floats,
    groups: int,
    eps: float,
    normalised: Floats,
    rstd: Floats,
    out: Floats,
) -> None:
    """``normalised = (x - mean) rstd``, ``out = weight normalised + bias``, ``rstd = 1 / sqrt(var + eps)``.

    Mean and biased variance are over the C/g channels and L positions of a group (Wu and He 2018), in
    float64, two passes.

    Parameters
    ----------
    x : (n, C, L).
    weight, bias : (C,), or (0,) for 1 and 0.
    groups, eps : g and the constant beside the variance.
    normalised, rstd, out : (n, C, L), (n, g) and (n, C, L), overwritten; the first two are for the backward.
    """
    n, channels, length = x.shape
    per_group = channels // groups
    count = per_group * length
    flat = x.reshape(-1)
    for i in range(n):
        for g in range(groups):
            start = (i * groups + g) * count
            values = flat[start : start + count]
            mean = _sum(values) / count
            scale = 1.0 / np.sqrt(_sum_of_squares(values, mean) / count + eps)
            rstd[i, g] = scale
            for c in range(g * per_group, (g + 1) * per_group):
                w = np.float64(weight[c]) if weight.size > 0 else 1.0
                b = np.float64(bias[c]) if bias.size > 0 else 0.0
                source, saved, target = x[i, c], normalised[i, c], out[i, c]
                for j in range(length):
                    value = (np.float64(source[j]) - mean) * scale
                    saved[j] = value
                    target[j] = w * value + b


@compiled
def group_norm_input_gradient(
    gy: Floats, normalised: Floats, rstd: Floats, weight: Floats, groups: int, gx: Floats
) -> None:
    """``gx = rstd (h - mean(h) - normalised mean(h normalised))`` with ``h = weight gy``, means over a group.

    gy and normalised (n, C, L), rstd (n, g), weight (C,) or (0,) -> gx (n, C, L). `normalised` and `rstd` are
    those of the sample's own forward; `weight` is whatever version the caller hands in.
    """
    n, channels, length = gy.shape
    per_group = channels // groups
    count = per_group * length
    for i in range(n):
        for g in range(groups):
            mean = 0.0
            projection = 0.0
            for c in range(g * per_group, (g + 1) * per_group):
                w = np.float64(weight[c]) if weight.size > 0 else 1.0
                mean += w * _sum(gy[i, c])
                projection += w * _sum_of_products(gy[i, c], normalised[i, c])
            mean /= count
            projection /= count
            scale = np.float64(rstd[i, g])
            for c in range(g * per_group, (g + 1) * per_group):
                w = np.float64(weight[c]) if weight.size > 0 else 1.0
                source, saved, target = gy[i, c], normalised[i, c], gx[i, c]
                for j in range(length):
                    target[j] = scale * (w * np.float64(source[j]) - mean - np.float64(saved[j]) * projection)


@compiled
def group_norm_weight_gradient(gy: Floats, normalised: Floats, gweight: Floats, gbias: Floats) -> None:
    """``gweight = sum_{n, l} gy normalised``, ``gbias = sum_{n, l} gy``: (C,), or (0,) if absent."""
    for c in range(gweight.size):
        s = 0.0
        for i in range(gy.shape[0]):
            s += _sum_of_products(gy[i, c], normalised[i, c])
        gweight[c] = s
    for c in range(gbias.size):
        s = 0.0
        for i in range(gy.shape[0]):
            s += _sum(gy[i, c])
        gbias[c] = s


# --------------------------------------------------------------------------------------------- elementwise


@compiled
def relu_forward(x: Floats, out: Floats) -> None:
    """``out = max(x, 0)``, NaN stays NaN; both (P,)."""
    for i in range(x.size):
        out[i] = 0.0 if x[i] <= 0.0 else x[i]


@compiled
def relu_input_gradient(gy: Floats, out: Floats, gx: Floats) -> None:
    """``gx = gy where out > 0, else 0``; all (P,)."""
    for i in range(gy.size):
        gx[i] = gy[i] if out[i] > 0.0 else 0.0


@compiled
def add_forward(a: Floats, b: Floats, out: Floats) -> None:
    """``out = a + b``; all (P,). Its gradient is the identity to both."""
    for i in range(a.size):
        out[i] = a[i] + b[i]


# ------------------------------------------------------------------------------------------------- pooling


@compiled
def max_pool2d_forward(
    x: Floats,
    out: Floats,
    winner: Floats,
    kh: int,
    kw: int,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
) -> None:
    """``out[n, c, oh, ow]`` = the greatest value of the window that lies inside x; `winner` = its place.

    As in torch: the first of equals in scan order, NaN beats every number, a later NaN an earlier one. Ceil
    mode is in out's shape; windows may overhang.

    Parameters
    ----------
    x : (n, C, H, W).
    out : (n, C, OH, OW), overwritten.
    winner : (n, C, OH, OW), overwritten with the position i kw + j in the window, -1 if none is inside x.
    kh, kw, sh, sw, ph, pw, dh, dw : window, stride, padding and dilation.
    """
    n, channels, height, width = x.shape
    out_h, out_w = out.shape[2], out.shape[3]
    for b in range(n):
        for c in range(channels):
            plane = x[b, c]
            for oh in range(out_h):
                top = oh * sh - ph
                for ow in range(out_w):
                    left = ow * sw - pw
                    best = -np.inf
                    where = -1
                    for i in range(kh):
                        ih = top + i * dh
                        if ih < 0 or ih >= height:
                            continue
                        for j in range(kw):
                            iw = left + j * dw
                            if iw < 0 or iw >= width:
                                continue
                            value = np.float64(plane[ih, iw])
                            if where < 0 or value > best or np.isnan(value):
                                best = value
                                where = i * kw + j
                    out[b, c, oh, ow] = best
                    winner[b, c, oh, ow] = where


@compiled
def max_pool2d_input_gradient(
    gy: Floats,
    winner: Floats,
    gx: Floats,
    kh: int,
    kw: int,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
) -> None:
    """``gx[n, c, position of the winner] += gy[n, c, oh, ow]``: (n, C, OH, OW) -> (n, C, H, W)."""
    n, channels, out_h, out_w = gy.shape
    for b in range(n):
        for c in range(channels):
            plane = gx[b, c]
            _clear(plane.reshape(-1))
            for oh in range(out_h):
                for ow in range(out_w):
                    where = int(winner[b, c, oh, ow])
                    if where >= 0:
                        i, j = where // kw, where % kw
                        plane[oh * sh - ph + i * dh, ow * sw - pw + j * dw] += gy[b, c, oh, ow]


@compiled
def _pool_range(o: int, kernel: int, stride: int, padding: int, size: int) -> tuple[int, int, int]:
    """A window along one axis: its range inside [0, size), and its length clipped to the padded input."""
    start = o * stride - padding
    stop = min(start + kernel, size + padding)
    return max(start, 0), min(stop, size), stop - start


@compiled
def avg_pool2d_forward(
    x: Floats, out: Floats, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, count_include_pad: bool
) -> None:
    """``out[n, c, oh, ow] = sum(window inside x) / divisor``: x (n, C, H, W) -> out (n, C, OH, OW).

    The divisor is torch's: the number of positions inside the padded input if `count_include_pad`, else
    inside x.
    """
    n, channels, height, width = x.shape
    out_h, out_w = out.shape[2], out.shape[3]
    for b in range(n):
        for c in range(channels):
            plane = x[b, c]
            for oh in range(out_h):
                top, bottom, padded_h = _pool_range(oh, kh, sh, ph, height)
                for ow in range(out_w):
                    left, right, padded_w = _pool_range(ow, kw, sw, pw, width)
                    s = 0.0
                    for ih in range(top, bottom):
                        for iw in range(left, right):
                            s += np.float64(plane[ih, iw])
                    inside = max(bottom - top, 0) * max(right - left, 0)
                    divisor = padded_h * padded_w if count_include_pad else inside
                    out[b, c, oh, ow] = s / divisor if inside > 0 else 0.0


@compiled
def avg_pool2d_input_gradient(
    gy: Floats, gx: Floats, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, count_include_pad: bool
) -> None:
    """``gx[n, c, window inside x] += gy[n, c, oh, ow] / divisor``: gy (n, C, OH, OW) -> gx (n, C, H, W)."""
    n, channels, height, width = gx.shape
    out_h, out_w = gy.shape[2], gy.shape[3]
    for b in range(n):
        for c in range(channels):
            plane = gx[b, c]
            _clear(plane.reshape(-1))
            for oh in range(out_h):
                top, bottom, padded_h = _pool_range(oh, kh, sh, ph, height)
                for ow in range(out_w):
                    left, right, padded_w = _pool_range(ow, kw, sw, pw, width)
                    inside = max(bottom - top, 0) * max(right - left, 0)
                    if inside == 0:
                        continue
                    divisor = padded_h * padded_w if count_include_pad else inside
                    share = np.float64(gy[b, c, oh, ow]) / divisor
                    for ih in range(top, bottom):
                        for iw in range(left, right):
                            plane[ih, iw] += share


# ---------------------------------------------------------------------------------------------------- loss


@compiled
def cross_entropy_forward(logits: Floats, labels: Labels, probabilities: Floats) -> float:
    """``loss = mean_n(logsumexp(logits[n]) - logits[n, label])``, returned in float64.

    logits (n, K), labels (n,) int64 -> probabilities (n, K) = softmax(logits), overwritten, for the gradient.
    """
    n, classes = logits.shape
    loss = 0.0
    for i in range(n):
        largest = -np.inf
        for k in range(classes):
            largest = max(largest, np.float64(logits[i, k]))
        total = 0.0
        for k in range(classes):
            total += np.exp(np.float64(logits[i, k]) - largest)
        log_total = np.log(total)
        for k in range(classes):
            probabilities[i, k] = np.exp(np.float64(logits[i, k]) - largest - log_total)
        loss += log_total - (np.float64(logits[i, labels[i]]) - largest)
    return float(loss / n)


@compiled
def cross_entropy_gradient(probabilities: Floats, labels: Labels, gx: Floats) -> None:
    """``gx = (probabilities - onehot(labels)) / n``: (n, K), (n,) -> (n, K)."""
    n, classes = probabilities.shape
    for i in range(n):
        for k in range(classes):
            onehot = 1.0 if k == labels[i] else 0.0
            gx[i, k] = (np.float64(probabilities[i, k]) - onehot) / n


@compiled
def mse_forward(output: Floats, target: Floats) -> float:
    """``loss = mean((output - target)^2)`` over all n K elements, returned in float64."""
    n, width = output.shape
    s = 0.0
    for i in range(n):
        for k in range(width):
            difference = np.float64(output[i, k]) - np.float64(target[i, k])
            s += difference * difference
    return float(s / (n * width))


@compiled
def mse_gradient(output: Floats, target: Floats, gx: Floats) -> None:
    """``gx = 2 (output - target) / (n K)``: all (n, K)."""
    n, width = output.shape
    for i in range(n):
        for k in range(width):
            gx[i, k] = 2.0 * (np.float64(output[i, k]) - np.float64(target[i, k])) / (n * width)
