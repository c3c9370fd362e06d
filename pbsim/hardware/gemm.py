"""Matrix products that an operator's F, Bx and Bw are for one sample (im2col; HARDWARE.md 1.6).

A product is (M x K) times (K x N), `count` times over for the groups of a convolution. Cin, Cout are per group,
positions are the vectors that a Linear layer works through (1, unless its samples have further dimensions):

=======  =============================  ==================  ==================  ====
product  of                             M                   K                   N
=======  =============================  ==================  ==================  ====
F        conv2d                         OH OW               kh kw Cin           Cout
Bx       conv2d, stride 1               H W                 kh kw Cout          Cin
Bw       conv2d                         kh kw Cin           OH OW               Cout
F        linear                         positions           in                  out
Bx       linear                         positions           out                 in
Bw       linear                         in                  positions           out
=======  =============================  ==================  ==================  ====

Phases. Bx of a convolution with stride s is a convolution over the output's gradient with s - 1 zeros between its
rows. They are never multiplied: input row i takes its gradient from output row o by tap t only where
i + padding = o s + t d (d the dilation), so that the rows of one *phase* r = (i + padding) mod s share the taps with
t d mod s = r. Each phase of rows with each phase of columns is a product of its own, with M its inputs and K its taps
times Cout. A phase without taps has no gradient and no product. Stride 1 has one phase, with all rows and all taps.

Zeros that remain: taps beyond the border of a map are multiplied, the padding in F and Bw, and in Bx what lies beyond
the output's gradient, as a dense product of these shapes does. For that reason M K N of Bx may differ from the MACs of
`Work`, which counts in Bx what F multiplies, once each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pbsim.network.network import Network, Operator


@dataclass(frozen=True)
class Gemm:
    """`count` products of (m x k) by (k x n); `weights` says whether the k x n operand is the layer's weights."""

    m: int
    k: int
    n: int
    count: int = 1
    weights: bool = False

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all of them."""
        return self.count * self.m * self.k * self.n


@dataclass(frozen=True)
class Gemms:
    """The products of an operator's F, Bx and Bw; Bx has none where nothing upstream needs its result."""

    forward: tuple[Gemm, ...] = ()
    input_gradient: tuple[Gemm, ...] = ()
    weight_gradient: tuple[Gemm, ...] = ()


def phases(extent: int, kernel: int, stride: int, padding: int, dilation: int) -> list[tuple[int, int]]:
    """Along one axis, rows of the input and taps of the kernel of every phase that has both, in order of the phase."""
    found = []
    for phase in range(stride):
        rows = sum((row + padding) % stride == phase for row in range(extent))
        taps = sum(tap * dilation % stride == phase for tap in range(kernel))
        if rows and taps:
            found.append((rows, taps))
    return found


def _conv2d(network: Network, operator: Operator) -> Gemms:
    channels, height, width = network.shapes[operator.inputs[0]]
    outputs, *output_extents = network.shapes[operator.output]
    a, positions = operator.attributes, math.prod(output_extents)
    groups = a["groups"]
    taps, c_in, c_out = math.prod(a["kernel"]), channels // groups, outputs // groups
    rows, cols = (
        phases(extent, a["kernel"][axis], a["stride"][axis], a["padding"][axis], a["dilation"][axis])
        for axis, extent in enumerate((height, width))
    )
    return Gemms(
        (Gemm(positions, taps * c_in, c_out, groups, weights=True),),
        tuple(Gemm(h * w, kh * kw * c_out, c_in, groups, weights=True) for h, kh in rows for w, kw in cols),
        (Gemm(taps * c_in, positions, c_out, groups),),
    )


def _linear(network: Network, operator: Operator) -> Gemms:
    *positions, inputs = network.shapes[operator.inputs[0]]
    outputs, count = network.shapes[operator.output][-1], math.prod(positions)
    return Gemms(
        (Gemm(count, inputs, outputs, weights=True),),
        (Gemm(count, outputs, inputs, weights=True),),
        (Gemm(inputs, count, outputs),),
    )


GEMMS: Mapping[str, Callable[[Network, Operator], Gemms]] = MappingProxyType({"conv2d": _conv2d, "linear": _linear})
"""By kind of operator, its products; every kind that has MACs is here."""


def gemms(network: Network, operator: Operator) -> Gemms:
    """The products of an operator: none for one without MACs."""
    work = operator.work
    if not (work.macs_forward or work.macs_input_gradient or work.macs_weight_gradient):
        return Gemms()
    found = GEMMS[operator.kind](network, operator)
    return Gemms(
        found.forward if work.macs_forward else (),
        found.input_gradient if work.macs_input_gradient else (),
        found.weight_gradient if work.macs_weight_gradient else (),
    )
