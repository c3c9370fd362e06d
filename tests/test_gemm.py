"""The matrix products of F, Bx and Bw against an enumeration of every multiplication that a convolution makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbsim.hardware.gemm import GEMMS, Gemm, gemms, phases
from pbsim.network.network import Network, Operator
from pbsim.network.operators import OPERATORS, Site


def one_operator(kind, attributes, input_shape, parameter_shapes, needs=True) -> tuple[Network, Operator]:
    """A network of a single operator, its output's shape and work as the operator table has them."""
    entry = OPERATORS[kind]
    output = entry.shape((input_shape,), parameter_shapes, attributes)
    work = entry.work(Site((input_shape,), output, parameter_shapes, attributes, (needs,)))
    names = ("weight", "bias")[: len(parameter_shapes)]
    parameters = dict(zip(names, parameter_shapes, strict=True))
    operator = Operator(
        kind, kind, (0,), 1, names, attributes, (needs,), work, 0, saves_inputs=True, saves_output=False
    )
    return Network((input_shape, output), 0, 1, (), (), parameters), operator


@st.composite
def axes(draw: st.DrawFn) -> dict[str, int]:
    """One axis of a convolution whose kernel fits into the padded map."""
    kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    begin, end = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    least = max(1, dilation * (kernel - 1) + 1 - begin - end)
    extent = draw(st.integers(least, least + 7))
    return {
        "extent": extent,
        "kernel": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": begin,
        "padding_end": end,
    }


def convolution(rows, cols, c_in=2, c_out=3, groups=1, needs=True) -> tuple[Network, Operator]:
    attributes = {name: (rows[name], cols[name]) for name in rows if name != "extent"} | {"groups": groups}
    shape = (c_in * groups, rows["extent"], cols["extent"])
    weight = (c_out * groups, c_in, rows["kernel"], cols["kernel"])
    return one_operator("conv2d", attributes, shape, (weight,), needs)


def output_extent(axis) -> int:
    reach = axis["dilation"] * (axis["kernel"] - 1)
    return (axis["extent"] + axis["padding"] + axis["padding_end"] - reach - 1) // axis["stride"] + 1


def forward_pairs(axis) -> Iterator[tuple[int, int]]:
    """(input row, tap) of every multiplication of a forward along one axis, padding left out."""
    for out in range(output_extent(axis)):
        for tap in range(axis["kernel"]):
            row = out * axis["stride"] + tap * axis["dilation"] - axis["padding"]
            if 0 <= row < axis["extent"]:
                yield row, tap


def meeting_pairs(axis) -> Iterator[tuple[int, int]]:
    """(input row, tap) where the tap leads from the row to a row of the output's grid, or beyond its border."""
    for row in range(axis["extent"]):
        for tap in range(axis["kernel"]):
            if (row + axis["padding"] - tap * axis["dilation"]) % axis["stride"] == 0:
                yield row, tap


@settings(max_examples=200, deadline=None, derandomize=True)
@given(axes())
def test_phases_hold_exactly_the_taps_that_meet_no_inserted_zero(axis):
    keys = ("extent", "kernel", "stride", "padding", "dilation")
    found = phases(*(axis[key] for key in keys))
    meeting = list(meeting_pairs(axis))
    assert set(forward_pairs(axis)) <= set(meeting)  # every gradient of a forward's multiplication is there
    assert sum(rows * taps for rows, taps in found) == len(meeting)
    # rows that share a phase share their taps: as many rows have t taps as the phases say
    taps_of_row = Counter(row for row, _ in meeting)
    by_taps = Counter(taps_of_row.values())
    said: Counter[int] = Counter()
    for rows, taps in found:
        said[taps] += rows
    assert said == by_taps


@settings(max_examples=200, deadline=None, derandomize=True)
@given(axes(), axes(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_products_of_a_convolution_are_its_multiplications(rows, cols, c_in, c_out, groups):
    found = gemms(*convolution(rows, cols, c_in, c_out, groups))
    positions = output_extent(rows) * output_extent(cols)
    channels = c_in * c_out * groups
    # F and Bw: every output position with every tap, padding included
    taps = rows["kernel"] * cols["kernel"]
    assert sum(gemm.macs for gemm in found.forward) == positions * taps * channels
    assert sum(gemm.macs for gemm in found.weight_gradient) == positions * taps * channels
    # Bx: every input position with every tap that meets it, along both axes
    meetings = len(list(meeting_pairs(rows))) * len(list(meeting_pairs(cols)))
    assert sum(gemm.macs for gemm in found.input_gradient) == meetings * channels
    assert {gemm.count for gemm in (*found.forward, *found.input_gradient, *found.weight_gradient)} == {groups}
    assert len(found.input_gradient) <= rows["stride"] * cols["stride"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(axes(), axes())
def test_with_stride_one_bx_is_the_one_product_of_the_table(rows, cols):
    rows, cols = rows | {"stride": 1}, cols | {"stride": 1}
    (found,) = gemms(*convolution(rows, cols, 2, 3)).input_gradient
    inputs, taps = rows["extent"] * cols["extent"], rows["kernel"] * cols["kernel"]
    assert found == Gemm(inputs, taps * 3, 2, weights=True)


def test_a_grouped_dilated_rectangular_convolution_by_hand():
    # 4 to 6 channels in two groups; 9 x 8 map, 3 x 2 kernel, stride 1 x 1, dilation 2 x 1, padding 2 above and below
    rows = {"extent": 9, "kernel": 3, "stride": 1, "dilation": 2, "padding": 2, "padding_end": 2}
    cols = {"extent": 8, "kernel": 2, "stride": 1, "dilation": 1, "padding": 0, "padding_end": 0}
    network, operator = convolution(rows, cols, 2, 3, groups=2)
    assert network.shapes[1] == (6, 9, 7)
    found = gemms(network, operator)
    assert found.forward == (Gemm(m=63, k=6 * 2, n=3, count=2, weights=True),)
    assert found.input_gradient == (Gemm(m=72, k=6 * 3, n=2, count=2, weights=True),)
    assert found.weight_gradient == (Gemm(m=6 * 2, k=63, n=3, count=2),)


def test_bx_of_a_strided_convolution_is_a_product_per_phase():
    # 8 x 8, kernel 3, stride 2, padding 1: even rows (i + 1 odd) have tap 1; odd rows (i + 1 even) have taps 0 and 2
    axis = {"extent": 8, "kernel": 3, "stride": 2, "dilation": 1, "padding": 1, "padding_end": 1}
    found = gemms(*convolution(axis, axis, c_in=5, c_out=7)).input_gradient
    assert phases(8, 3, 2, 1, 1) == [(4, 2), (4, 1)]
    assert [(gemm.m, gemm.k, gemm.n) for gemm in found] == [(16, 4 * 7, 5), (16, 2 * 7, 5), (16, 2 * 7, 5), (16, 7, 5)]
    # 16 inputs of each phase with 4 + 2 + 2 + 1 = 9 taps: a ninth of them each meets one, against 64 * 9 with the zeros
    assert sum(gemm.macs for gemm in found) == 16 * 9 * 35


def test_phases_without_taps_contribute_nothing():
    # a 1 x 1 kernel with stride 2 reads every second row and column: the others have no gradient
    axis = {"extent": 6, "kernel": 1, "stride": 2, "dilation": 1, "padding": 0, "padding_end": 0}
    assert phases(6, 1, 2, 0, 1) == [(3, 1)]
    assert gemms(*convolution(axis, axis, 4, 8)).input_gradient == (Gemm(9, 8, 4, weights=True),)
    # dilation 2 and stride 2: all taps share one phase
    assert phases(6, 3, 2, 1, 2) == [(3, 3)]


@pytest.mark.parametrize(("shape", "positions"), [((7,), 1), ((5, 7), 5), ((3, 5, 7), 15)])
def test_a_linear_layer_multiplies_all_its_positions(shape, positions):
    network, operator = one_operator("linear", {}, (7,), ((11, 7),))
    network = replace(network, shapes=(shape, (*shape[:-1], 11)))
    found = gemms(network, operator)
    assert found.forward == (Gemm(positions, 7, 11, weights=True),)
    assert found.input_gradient == (Gemm(positions, 11, 7, weights=True),)
    assert found.weight_gradient == (Gemm(7, positions, 11),)


def test_bx_is_absent_where_nothing_upstream_needs_it():
    axis = {"extent": 6, "kernel": 3, "stride": 1, "dilation": 1, "padding": 1, "padding_end": 1}
    found = gemms(*convolution(axis, axis, needs=False))
    assert found.forward
    assert found.weight_gradient
    assert not found.input_gradient


def test_every_kind_with_macs_has_products_and_no_other():
    shapes = {"linear": ((6,), ((4, 6),), {})}
    axis = {"kernel": (1, 1), "stride": (1, 1), "dilation": (1, 1), "padding": (0, 0), "padding_end": (0, 0)}
    shapes["conv2d"] = ((2, 4, 4), ((3, 2, 1, 1),), {**axis, "groups": 1})
    pool = {
        "kernel": (2, 2),
        "stride": (2, 2),
        "padding": (0, 0),
        "dilation": (1, 1),
        "ceil_mode": False,
        "count_include_pad": True,
    }
    shapes["max_pool2d"] = shapes["avg_pool2d"] = ((2, 4, 4), (), pool)
    shapes["group_norm"] = ((4, 2, 2), (), {"groups": 2, "eps": 1e-5})
    for kind in OPERATORS:
        network, operator = one_operator(kind, *_in_order(shapes.get(kind, ((6,), (), {}))))
        assert (operator.work.macs_forward > 0) == (kind in GEMMS), kind
        assert sum(gemm.macs for gemm in gemms(network, operator).forward) == operator.work.macs_forward, kind


def _in_order(entry):
    shape, parameters, attributes = entry
    return attributes, shape, parameters
