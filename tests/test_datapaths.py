"""Every registered datapath keeps to the same rules; closed forms of each, against hand counts and brute force."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import RECIPE
from systolic_reference import multiply

from pbsim.config import hardware as tables
from pbsim.config.hardware import Core
from pbsim.hardware.core import OPERATIONS, stage_cycles, stage_loads
from pbsim.hardware.cycles import Cost, Cycles
from pbsim.hardware.datapaths import DATAPATHS, Folds, fold
from pbsim.hardware.gemm import Gemm
from pbsim.hardware.loads import Load
from pbsim.network import capture_network
from pbsim.optim import UpdateRule

EXAMPLES = {
    "vector": [
        {"macs_per_cycle": 4},
        {"macs_per_cycle": 4, "overhead_cycles": 3},
        {"macs_per_cycle": 3, "overhead_cycles": 2, "vector_length": 16, "sram_elements_per_mac": 3.0},
    ],
    "systolic": [
        {"rows": 4, "cols": 8, "dataflow": dataflow, "weights": weights}
        for dataflow in ("os", "ws", "is")
        for weights in ("resident", "reload")
    ],
    "unit": [{"forward_cycles": 3, "input_gradient_cycles": 1, "weight_gradient_cycles": 2, "update_cycles": 1}],
}
"""Tables of every registered datapath: those of a new one come here, and it is tested as all others are."""

FIXED = {"unit"}
"""Datapaths whose cycles do not depend on the work."""

CASES = [pytest.param(kind, table, id=f"{kind}{n}") for kind in EXAMPLES for n, table in enumerate(EXAMPLES[kind])]


def core(kind: str, sram_bytes_per_cycle: float = 24.0, vector_lanes: int = 4, **table: object) -> Core:
    datapath = {"kind": kind, **table}
    return Core.model_validate(
        {"datapath": datapath, "vector_lanes": vector_lanes, "sram_kib": 48.0,
         "sram_bytes_per_cycle": sram_bytes_per_cycle}
    )  # fmt: skip


@pytest.fixture(scope="module")
def nets():
    """Networks with strides, skips, norms, pools and a loss, cut in two ways."""
    return [
        capture_network(models.skip_net(), (2, 6, 6), partition=partition, loss="cross_entropy", where="models")
        for partition in ("layer", "residual")
    ]


RULES = [UpdateRule(RECIPE), UpdateRule(RECIPE, spike=1.0, velocity=1.0, difference=1.0)]

extents = st.integers(1, 40)
products = st.builds(Gemm, extents, extents, extents, st.integers(1, 3), st.booleans())
matrix_loads = st.lists(products, min_size=1, max_size=3).map(
    lambda gemms: Load(sum(gemm.macs for gemm in gemms), 0, sum(g.m * g.k + g.k * g.n + g.m * g.n for g in gemms),
                       tuple(gemms))
)  # fmt: skip
elementwise_loads = st.builds(Load, st.just(0), st.integers(1, 5000), st.integers(0, 5000))
some_loads = st.lists(matrix_loads | elementwise_loads, max_size=4).map(tuple)


# --- what every datapath keeps to ----------------------------------------------------------------------


def test_every_datapath_is_registered_configured_and_tested():
    union = get_args(Core.model_fields["datapath"].annotation)
    kinds = {get_args(table.model_fields["kind"].annotation)[0] for table in union}
    assert kinds == set(DATAPATHS) == set(EXAMPLES)


def check(cost: Cost, loads: tuple[Load, ...]) -> None:
    """Terms are integers that add up, and the operation's work is that of its loads."""
    for cycles in (cost.cycles, cost.bound_by):
        terms = (cycles.compute, cycles.vector, cycles.sram, cycles.overhead)
        assert all(type(term) is int and term >= 0 for term in terms)
        assert sum(terms) == cycles.total == cost.total
    assert cost.macs == sum(load.macs for load in loads)
    assert cost.vector_operations == sum(load.vector for load in loads)
    assert all(type(count) is int and count >= 0 for count in (cost.macs, cost.vector_operations, cost.sram_bytes))
    assert (cost.bound == "none") == (cost.total == 0)
    assert cost.bound in ("compute", "vector", "sram", "overhead", "none")


@pytest.mark.parametrize(("kind", "table"), CASES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(some_loads, st.sampled_from(OPERATIONS), st.integers(1, 50), st.sampled_from([1, 2, 4]))
def test_terms_add_up_and_more_never_costs_more(kind, table, loads, operation, pes, element_bytes):
    datapath, here = DATAPATHS[kind], core(kind, **table)
    cost = datapath.cost(here, operation, loads, pes, element_bytes)
    check(cost, loads)
    assert datapath.cost(here, operation, loads, pes, element_bytes) == cost
    if kind not in FIXED:
        assert (cost.total > 0) == bool(loads)  # no work, no cycles; and work takes some
        assert (cost.sram_bytes > 0) == any(load.elements for load in loads)
        # MACs never exceed what the cycles of computing could have issued
        assert cost.macs <= cost.cycles.compute * datapath.peak_macs_per_cycle(here, pes)
        # the SRAM moves no more than its bandwidth
        assert cost.sram_bytes <= (cost.total - cost.cycles.overhead) * pes * here.sram_bytes_per_cycle
    for more in (pes + 1, 2 * pes):
        faster = datapath.cost(here, operation, loads, more, element_bytes)
        assert faster.total <= cost.total
        assert faster.sram_bytes == cost.sram_bytes
    wider = here.model_copy(update={"sram_bytes_per_cycle": 2 * here.sram_bytes_per_cycle})
    assert datapath.cost(wider, operation, loads, pes, element_bytes).total <= cost.total
    fewer = datapath.cost(here, operation, loads[1:], pes, element_bytes)
    assert fewer.total <= cost.total


@pytest.mark.parametrize(("kind", "table"), CASES)
@pytest.mark.parametrize("rule", RULES, ids=["sgdm", "pb+lwpv+lwpw+sc"])
def test_operations_of_a_network_keep_to_their_least_length(kind, table, rule, nets):
    for net in nets:
        for stage in net.stages:
            loads = stage_loads(net, stage, rule)
            costs = stage_cycles(core(kind, **table), stage, loads, 3, 2)
            for operation, cost in zip(OPERATIONS, costs.operations, strict=True):
                check(cost, getattr(loads, operation))
            trained = int(bool(stage.parameters))
            assert costs.forward.total >= 1
            assert costs.input_gradient.total >= int(stage.index > 0)
            assert costs.weight_gradient.total >= trained
            assert costs.update.total >= trained
            assert costs.backward >= 1
            assert costs.forward.macs == stage.work.macs_forward
            assert costs.input_gradient.macs == stage.work.macs_input_gradient
            assert costs.weight_gradient.macs == stage.work.macs_weight_gradient
            if kind not in FIXED and not trained:
                assert costs.weight_gradient.total == costs.update.total == 0


def test_costs_of_a_stage_are_padded_with_overhead(nets):
    classifier = nets[0].stages[-1]
    empty = replace(stage_loads(nets[0], classifier, RULES[0]), update=())
    costs = stage_cycles(core("vector", macs_per_cycle=4), classifier, empty, 1, 2)
    assert costs.update == Cost(Cycles(overhead=1), Cycles(overhead=1))
    assert costs.update.bound == "overhead"


# --- vector --------------------------------------------------------------------------------------------

# (6 x 10) x (10 x 5) = 300 MACs; 60 + 50 + 30 = 140 elements = 280 bytes in float16
PRODUCT = Load(300, 0, 140, (Gemm(6, 10, 5),))


def vector(load: Load, pes: int = 1, sram: float = 24.0, **table: object) -> Cost:
    here = core("vector", sram, **{"macs_per_cycle": 4, **table})
    return DATAPATHS["vector"].cost(here, "forward", (load,), pes, 2)


@pytest.mark.parametrize(
    ("pes", "table", "cycles", "bytes_moved"),
    [
        (1, {}, Cycles(compute=75), 280),  # 300 MACs, 4 a cycle; 280 bytes take 12 cycles of these
        (7, {}, Cycles(compute=11), 280),  # 300 / 28 = 10.7
        (1, {"overhead_cycles": 5}, Cycles(compute=75, overhead=5), 280),  # one product, one instruction
        # 32 MACs an instruction: 300 / 32 = 9.4, ten instructions; on two PEs 300 / 64 = 4.7, five
        (1, {"overhead_cycles": 5, "vector_length": 32}, Cycles(compute=75, overhead=50), 280),
        (2, {"overhead_cycles": 5, "vector_length": 32}, Cycles(compute=38, overhead=25), 280),
        # two reads and a write per MAC: 900 elements, 1800 bytes = 24 a cycle, just what the SRAM gives
        (1, {"sram_elements_per_mac": 3}, Cycles(compute=75), 1800),
        (1, {"sram_elements_per_mac": 4}, Cycles(compute=75, sram=25), 2400),  # 2400 / 24 = 100
        (1, {"sram_elements_per_mac": 0.1}, Cycles(compute=75), 280),  # never fewer than once each
    ],
)
def test_a_product_on_vector_pes(pes, table, cycles, bytes_moved):
    cost = vector(PRODUCT, pes, **table)
    assert cost.cycles == cycles
    assert cost.sram_bytes == bytes_moved


def test_a_product_per_phase_is_an_instruction_each():
    strided = replace(PRODUCT, gemms=(Gemm(6, 10, 2), Gemm(6, 10, 2), Gemm(6, 10, 1)))
    assert vector(strided, overhead_cycles=5).cycles == Cycles(compute=75, overhead=15)
    grouped = replace(PRODUCT, gemms=(Gemm(6, 5, 5, count=2),))
    assert vector(grouped, overhead_cycles=5).cycles == Cycles(compute=75, overhead=5)


def test_an_elementwise_pass_on_vector_lanes():
    # 1000 steps on 2 x 4 lanes = 125; 800 elements = 1600 bytes at 2 x 24 = 34 cycles of these
    one = Load(0, 1000, 800)
    assert vector(one, 2, overhead_cycles=5).cycles == Cycles(vector=125, overhead=5)
    assert vector(one, 2, overhead_cycles=5, vector_length=100).cycles == Cycles(vector=125, overhead=25)
    narrow = vector(one, 2, sram=4.0)  # 1600 bytes at 2 x 4 = 200 cycles, 75 beyond the lanes' 125
    assert narrow.cycles == Cycles(vector=125, sram=75)
    assert narrow.bound_by == Cycles(sram=200)
    assert narrow.bound == "sram"


def test_an_sram_bound_operation_takes_the_time_of_its_traffic():
    cost = vector(PRODUCT, sram=2.0)
    assert cost.total == 140  # 280 bytes, 2 a cycle
    assert cost.bound == "sram"


def test_an_infinite_sram_adds_nothing():
    assert vector(PRODUCT, sram=float("inf"), sram_elements_per_mac=9).cycles == Cycles(compute=75)


# --- systolic ------------------------------------------------------------------------------------------


def array(rows: int, cols: int, dataflow: str, weights: str = "reload") -> tables.SystolicDatapath:
    return tables.SystolicDatapath(kind="systolic", rows=rows, cols=cols, dataflow=dataflow, weights=weights)


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.tuples(*[st.integers(1, 11)] * 3), st.integers(1, 5), st.integers(1, 5))
def test_folds_equal_an_array_simulated_cell_by_cell(dataflow, shape, rows, cols):
    m, k, n = shape
    rng = np.random.default_rng(m + 12 * k + 144 * n)
    a, b = rng.integers(-9, 10, (m, k)).astype(float), rng.integers(-9, 10, (k, n)).astype(float)
    run = multiply(a, b, rows, cols, dataflow)
    np.testing.assert_array_equal(run.product, a @ b)
    found = fold(array(rows, cols, dataflow), Gemm(m, k, n, weights=True))
    assert run.folds == found.count
    assert run.cycles == found.count * found.cycles
    assert run.accesses == found.elements


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.tuples(*[st.integers(1, 11)] * 3), st.integers(1, 5), st.integers(1, 5))
def test_resident_weights_equal_an_array_that_loads_nothing(shape, rows, cols):
    m, k, n = shape
    run = multiply(np.ones((m, k)), np.ones((k, n)), rows, cols, "ws", load=False)
    found = fold(array(rows, cols, "ws", "resident"), Gemm(m, k, n, weights=True))
    assert run.cycles == found.count * found.cycles
    assert run.accesses == found.elements


@pytest.mark.parametrize(
    ("dataflow", "weights", "resident"),
    [("ws", True, True), ("ws", False, False), ("is", True, False), ("os", True, False)],
)
def test_resident_weights_matter_only_where_weights_hold_still(dataflow, weights, resident):
    product = Gemm(10, 20, 30, weights=weights)
    kept, loaded = (fold(array(8, 4, dataflow, mode), product) for mode in ("resident", "reload"))
    # 3 x 8 folds lose 8 cycles of loading each, and the 20 x 30 weights are not read
    assert kept == (replace(loaded, cycles=loaded.cycles - 8, elements=loaded.elements - 600) if resident else loaded)


@pytest.mark.parametrize(
    ("size", "dataflow", "cycles"),
    # SCALE-Sim 3.0.0 on a 32 x 32 array reports each less one, the index of the last cycle (HARDWARE.md 1.1)
    [(64, "os", 504), (64, "ws", 632), (64, "is", 632), (256, "os", 20352), (256, "ws", 22400), (256, "is", 22400)],
)
def test_cycles_of_square_products(size, dataflow, cycles):
    found = fold(array(32, 32, dataflow), Gemm(size, size, size))
    assert found.count * found.cycles == cycles


def test_a_linear_layer_at_batch_one_uses_an_array_badly():
    # M = 1: a fold of 32 x 32 MACs takes 1 + 2 * 32 + 32 - 2 = 95 cycles, 1.05 % of the array; 63 with resident weights
    product = Gemm(1, 32, 32, weights=True)
    assert fold(array(32, 32, "ws"), product) == Folds(1, 95, 32 * 32 + 32 + 32)
    assert fold(array(32, 32, "ws", "resident"), product) == Folds(1, 63, 32 + 32)


@pytest.mark.parametrize(("pes", "compute"), [(1, 8 * 26), (2, 4 * 26), (3, 3 * 26), (7, 2 * 26), (8, 26), (99, 26)])
def test_folds_are_shared_out_over_the_arrays(pes, compute):
    # (16 x 16) x (16 x 16) on 8 x 4 arrays, os: 2 x 4 = 8 folds of 16 + 8 + 4 - 2 = 26 cycles
    here = core("systolic", float("inf"), rows=8, cols=4, dataflow="os")
    load = Load(16**3, 0, 3 * 256, (Gemm(16, 16, 16),))
    cost = DATAPATHS["systolic"].cost(here, "forward", (load,), pes, 2)
    assert cost.cycles == Cycles(compute=compute)
    # 256 operands from the left 4 times, 256 from above 2 times, 256 results; 2 bytes each
    assert cost.sram_bytes == 2 * (4 * 256 + 2 * 256 + 256)


def test_an_array_waits_for_its_sram():
    # as above: 3584 bytes at 8 a cycle take 448 cycles, 240 beyond the 208 of one array
    here = core("systolic", 8.0, rows=8, cols=4, dataflow="os")
    load = Load(16**3, 0, 3 * 256, (Gemm(16, 16, 16),))
    cost = DATAPATHS["systolic"].cost(here, "forward", (load,), 1, 2)
    assert cost.cycles == Cycles(compute=208, sram=240)
    assert cost.bound == "sram"


def test_elementwise_work_of_a_systolic_core_runs_on_its_lanes():
    here = core("systolic", rows=8, cols=4, dataflow="ws")
    assert DATAPATHS["systolic"].cost(here, "forward", (Load(0, 1000, 0),), 2, 2).cycles == Cycles(vector=125)
