"""Messages on the mesh: which links they take and when, how fast they stream, and what a narrow link does to a run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Case, cases, chain, machine, with_cycles
from test_schedule import ends, period, run

from pbsim.config import Hardware, read_source
from pbsim.experiment import simulate
from pbsim.hardware import Machine, Route
from pbsim.network.network import Work
from pbsim.results.audit import Audit, audited
from pbsim.results.tables import bottleneck
from pbsim.schedule import Batches, run_pipeline
from pbsim.schedule.trace import Op

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
U = int(Op.UPDATE)


def placed(rows: int, cols: int, entries: list[list[int]], **changes: object) -> Machine:
    """A chain of stages of 10 elements, 20 bytes, on cores at given places; 2 cycles per hop, 4 bytes per cycle."""
    keys = {
        "mesh__rows": rows,
        "mesh__cols": cols,
        "pipeline__placement": entries,
        "fabric__hop_cycles": 2,
        "fabric__link_bytes_per_cycle": 4,
    }
    net = changes.pop("net", None) or chain(len(entries))
    return machine(net, **(keys | changes))


def path(made: Machine, route: Route) -> list[tuple[int, int, int, int]]:
    """A route's links: source node, target node, wires, cycles after the start at which it is taken."""
    return [
        (*made.link_ends[link], made.link_wires[link], offset)
        for link, offset in zip(route.links, route.offsets, strict=True)
    ]


# --- routes by hand -------------------------------------------------------------------------------


def test_between_cores_of_one_pe_the_kth_link_is_taken_after_k_hops():
    # a b c
    # f e d    the message from a to d goes right along the row, then down: a b c d
    entries = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 2, 1, 1], [1, 2, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]
    made = placed(2, 3, entries, net=chain(6, skips=((0, 3),)))
    skip = next(channel for channel in made.channels if channel.target - channel.source > 1)
    assert path(made, skip.forward) == [(0, 1, 1, 0), (1, 2, 1, 2), (2, 3, 1, 4)]
    assert (skip.forward.latency, skip.forward.serialisation) == (6, 5)
    assert path(made, skip.gradient) == [(3, 4, 1, 0), (4, 5, 1, 2), (5, 0, 1, 4)]  # left along its own row, then up
    neighbours = [channel for channel in made.channels if channel is not skip]
    assert all(path(made, c.forward) == [(c.source, c.target, 1, 0)] for c in neighbours)
    assert len(made.link_ends) == 11  # there and back between neighbours, and from f to a for the gradient
    assert (5, 0) in made.link_ends
    assert (0, 5) not in made.link_ends


def test_wires_across_a_common_edge_carry_a_message_together():
    # 0 0 0 1     0 is 3 x 3, 1 is 2 x 1: two wires, 8 bytes per cycle, 20 bytes in 3 cycles. From the centre (1, 1) of
    # 0 0 0 1     0 the column of 1 is two steps away, and the second is the crossing: taken 2 cycles after the start,
    # 0 0 0 .     the head is there after 4. From 1's centre (0, 3) the first step is the crossing.
    made = placed(3, 4, [[0, 0, 3, 3], [0, 3, 2, 1]])
    channel = made.channels[0]
    assert path(made, channel.forward) == [(0, 1, 2, 2)]
    assert (channel.forward.latency, channel.forward.serialisation) == (4, 3)
    assert path(made, channel.gradient) == [(1, 0, 2, 0)]
    assert (channel.gradient.latency, channel.gradient.serialisation) == (2, 3)


def test_a_message_that_turns_streams_at_the_rate_of_its_narrowest_link():
    # 0 0 0 0 . .    spare: 3 at (0, 4), 2 x 2; 4 at (2, 0), 2 x 3; 5 is 2's right neighbour at (2, 5), 2 x 1
    # 0 0 0 0 . .    0 to 1 (rows 2 and 3, columns 3 and 4): from the centre (0, 1) right to column 3, within 0, then
    # . . . 1 1 .    down through the common edge, which is one wire wide (column 3)
    # . . . 1 1 .
    made = placed(4, 6, [[0, 0, 2, 4], [2, 3, 2, 2]])
    channel = made.channels[0]
    assert [(n.row, n.col, n.rows, n.cols) for n in made.nodes[2:]] == [(0, 4, 2, 2), (2, 0, 2, 3), (2, 5, 2, 1)]
    # steps: 1 > 2 > 3 along the row, (0, 3) > (1, 3) > (2, 3): three before the crossing
    assert path(made, channel.forward) == [(0, 1, 1, 3 * 2)]
    assert (channel.forward.latency, channel.forward.serialisation) == (4 * 2, 5)
    # back: (2, 3) is the centre of 1, in a column of 0; the first step up is the crossing
    assert path(made, channel.gradient) == [(1, 0, 1, 0)]


def test_pes_that_no_core_uses_pass_messages_on():
    # 0 0 . .    node 2 is the spare rectangle (0, 2), 2 x 2; node 3 the rest of the lower rows at (2, 0), 2 x 2
    # 0 0 . .    from (0, 0): right along the row through 2 until column 2, then down into 1
    # . . 1 1
    # . . 1 1
    made = placed(4, 4, [[0, 0, 2, 2], [2, 2, 2, 2]])
    forward, gradient = made.channels[0].forward, made.channels[0].gradient
    assert path(made, forward) == [(0, 2, 2, 1 * 2), (2, 1, 2, 3 * 2)]
    assert forward.latency == 4 * 2  # (0,0) (0,1) | (0,2) (1,2) | (2,2)
    # from 1's centre (2, 2): left to column 1 through the spare node 3, then up
    assert path(made, gradient) == [(1, 3, 2, 0), (3, 0, 2, 1 * 2)]
    assert gradient.latency == 2 * 2


def test_the_route_is_x_first_from_the_nearest_column():
    # 0 2 2    there along the top and down the right, back along the bottom and up the left
    # 3 3 3
    # 4 4 1
    made = placed(3, 3, [[0, 0, 1, 1], [2, 2, 1, 1]])
    forward, gradient = made.channels[0].forward, made.channels[0].gradient
    assert path(made, forward) == [(0, 2, 1, 0), (2, 3, 2, 2 * 2), (3, 1, 1, 3 * 2)]
    assert path(made, gradient) == [(1, 4, 1, 0), (4, 3, 2, 2 * 2), (3, 0, 1, 3 * 2)]
    assert forward.latency == gradient.latency == 4 * 2


def test_a_message_without_bytes_has_the_latency_alone():
    made = placed(1, 3, [[0, 0, 1, 1], [0, 1, 1, 1], [0, 2, 1, 1]], net=chain(3, skips=((0, 2),), tokens=((0, 2),)))
    token = next(c.gradient for c in made.channels if c.target == 2 and c.source == 0)
    assert (token.size, token.serialisation, token.latency) == (0, 0, 4)


# --- routes in general ----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases())
def test_routes_lead_where_they_should_and_are_as_long_as_the_walk(case):
    made = case.machine
    hop, rate = made.hardware.fabric.hop_cycles, made.hardware.fabric.link_bytes_per_cycle
    for route in (route for channel in made.channels for route in (channel.forward, channel.gradient)):
        links = [made.link_ends[link] for link in route.links]
        assert (links[0][0], links[-1][1]) == (route.source, route.target)
        assert all(before[1] == after[0] for before, after in pairwise(links))
        here, there = made.nodes[route.source], made.nodes[route.target]
        row, col = here.centre
        steps = max(there.row - row, row - there.end_row + 1, 0) + max(there.col - col, col - there.end_col + 1, 0)
        assert route.latency == hop * steps
        assert all(earlier <= later for earlier, later in pairwise((*route.offsets, route.latency)))
        narrowest = min(made.link_wires[link] for link in route.links)
        assert route.serialisation == math.ceil(route.size / (rate * narrowest))
    on_routes = {link for c in made.channels for route in (c.forward, c.gradient) for link in route.links}
    assert on_routes == set(range(len(made.link_ends)))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(), st.integers(1, 60))
def test_the_audit_passes_on_any_placement(case, chunk_rows):
    timing, chunks = run_pipeline(case.machine, Batches(case.samples), chunk_rows)
    audit = Audit(case.machine, case.net, timing)
    for _ in audited(chunks, audit):
        pass
    audit.finish()
    routes = [route for c in case.machine.channels for route in (c.forward, c.gradient)]
    assert sum(timing.links.bytes) == case.samples * sum(route.size * len(route.links) for route in routes)


# --- bounds ---------------------------------------------------------------------------------------


def test_a_narrow_crossing_sets_the_period_and_is_named():
    # 0 0 1 1    0 and 1 share two wires, 1 and 2 one: 2 lies below the last column
    # 0 0 1 1    40 bytes at 2 bytes per cycle and wire: 10 cycles from 0 to 1, 20 from 1 to 2; a core computes for 6
    # . . . 2
    entries = [[0, 0, 2, 2], [0, 2, 2, 2], [2, 3, 1, 1]]
    keys = {"pipeline__timing": "dataflow", "pipeline__credits": 20, "fabric__link_bytes_per_cycle": 2}
    keys["pipeline__output_slots"] = 20  # so that no unit waits for the link
    made = placed(3, 4, entries, net=chain(3, elements=[4, 20, 20, 4]), **keys)
    timing, rows = run(made, 60)
    assert period(rows, stage=2) == 20
    assert 60 * 20 <= timing.cycles < 64 * 20
    stage, name = bottleneck(timing)
    assert name.startswith("link from core 1 to core 2 (1 wire, messages 1>2), busy 9")
    assert stage in (0, 1, 2)


def test_messages_that_share_a_link_share_its_time():
    # 0 1 2 in a row: the skip from 0 to 2 takes the links of 0>1 and of 1>2; 20 bytes each, 10 cycles, so 20 per sample
    keys = {"pipeline__timing": "dataflow", "pipeline__credits": 20, "fabric__link_bytes_per_cycle": 2}
    entries = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 2, 1, 1]]
    made = placed(1, 3, entries, net=chain(3, skips=((0, 2),)), **keys)
    timing, rows = run(made, 60)
    assert max(timing.links.busy_cycles) == 60 * 20
    assert period(rows) >= 20
    assert "messages 0>1, 0>2)" in bottleneck(timing)[1] or "messages 0>2, 1>2)" in bottleneck(timing)[1]


def test_halving_the_bottleneck_links_bandwidth_slows_a_run_and_names_the_link():
    # compute-bound at 64 bytes per cycle; the link is the bottleneck from where its messages take longer than a core
    table = read_source(Hardware, "mesh").document
    runs = []
    for rate in (64.0, 0.05, 0.025):
        changed = table | {"fabric": table["fabric"] | {"link_bytes_per_cycle": rate}}
        runs.append(simulate(changed, "digits_mlp", samples=40, timing_only=True).summary)
    fast, slow, slower = runs
    assert fast["bottleneck"].startswith("core of stage ")
    assert slow["bottleneck"].startswith("link from core ")
    assert slower["bottleneck"].startswith("link from core ")
    assert fast["cycles"] < slow["cycles"] < 0.6 * slower["cycles"]
    assert slower["cycles"] >= slower["bounds_cycles"]["link"] > slower["bounds_cycles"]["compute"]


def test_a_spare_node_is_named_with_its_place():
    made = placed(4, 4, [[0, 0, 2, 2], [2, 2, 2, 2]], pipeline__timing="dataflow", fabric__link_bytes_per_cycle=0.1)
    timing, _ = run(made, 5)
    assert bottleneck(timing)[1].startswith("link from core 0 to spare node 2 at [0, 2, 2, 2] (2 wires, messages 0>1)")


def work_per_sample(made: Machine) -> int:
    """Cycles that the busiest unit, link or the host is held per sample."""
    busy = [0] * len(made.link_ends)
    for route in (route for channel in made.channels for route in (channel.forward, channel.gradient)):
        for link in route.links:
            busy[link] += route.serialisation
    return max([core.cycles.interval(made.split) for core in made.cores] + busy + [made.host_cycles])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(pipeline__timing="dataflow"))
def test_in_dataflow_no_period_beats_the_busiest_resource(case):
    # Of n samples' work on the busiest resource, that of the samples in flight may lie outside of the window between
    # two updates: at most the host's, and the credits' or (unbounded) all
    samples = 60
    timing, rows = run(case.machine, samples)
    slack = max(timing.peak_in_flight) + 1
    work = work_per_sample(case.machine)
    assert timing.cycles >= (samples - 1) * work  # the host begins at cycle 0, and the last sample is its 60th
    for stage in range(case.machine.stages):
        updates = ends(rows, stage, U)
        assert updates[-1] - updates[10] >= (samples - 11 - slack) * work


@st.composite
def chains(draw: st.DrawFn) -> Case:
    """Chains on cores of any shape side by side, with many credits and slots, in dataflow."""
    stages = draw(st.integers(2, 5))
    rows = draw(st.integers(1, 4))
    widths = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    entries, col = [], 0
    for width in widths:
        entries.append([0, col, draw(st.integers(1, rows)), width])
        col += width
    sizes = draw(st.lists(st.integers(1, 20), min_size=stages + 1, max_size=stages + 1))
    net = chain(stages, elements=sizes)
    made = machine(
        net, mesh__rows=rows, mesh__cols=col, pipeline__placement=entries, pipeline__timing="dataflow",
        pipeline__credits=16, pipeline__output_slots=20, fabric__link_bytes_per_cycle=draw(st.sampled_from([1.0, 2.0])),
        fabric__hop_cycles=draw(st.integers(0, 2)),
    )  # fmt: skip
    cycles = [tuple(draw(st.integers(1, 9)) for _ in range(4)) for _ in range(stages)]
    return Case(net, with_cycles(made, cycles), 240)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(chains())
def test_in_dataflow_chains_with_enough_credits_reach_the_busiest_resource(case):
    _, rows = run(case.machine, case.samples)
    for stage in (0, case.machine.stages - 1):
        assert period(rows, stage) == pytest.approx(work_per_sample(case.machine), rel=0.03)


# --- monotone in lockstep -------------------------------------------------------------------------


@st.composite
def vector_machines(draw: st.DrawFn) -> tuple[dict[str, object], dict[str, object]]:
    """Arguments of a network, and keys of a hardware file: vector cores of equal size, in lockstep."""
    stages = draw(st.integers(1, 7))
    distant = [(s, t) for s in range(stages) for t in range(s + 2, stages)]
    amounts = st.integers(0, 300)
    net = {
        "stages": stages,
        "skips": tuple(sorted(draw(st.sets(st.sampled_from(distant), max_size=3)))) if distant else (),
        "elements": draw(st.lists(st.integers(1, 60), min_size=stages + 1, max_size=stages + 1)),
        "work": [Work(*draw(st.tuples(*6 * [amounts]))) for _ in range(stages)],
    }
    pes = draw(st.sampled_from([1, 2, 4, 6]))
    keys = {
        "mesh__rows": 8,
        "mesh__cols": draw(st.integers(6, 9)),
        "core__pes": pes,
        "core__units": draw(st.sampled_from(["shared", "split"])),
        "core__sram_bytes_per_cycle": draw(st.sampled_from([1.0, 8.0, float("inf")])),
        "pipeline__timing": "lockstep",
        "pipeline__allocation": "uniform",
        "fabric__link_bytes_per_cycle": draw(st.sampled_from([0.5, 1.0, 3.0])),
        "fabric__hop_cycles": draw(st.integers(0, 4)),
    }
    return net, keys


def lockstep_cycles(net: dict, keys: dict) -> int:
    return cycles_of(machine(chain(**net), "mesh", **keys))


def cycles_of(machine: Machine, samples: int = 4) -> int:
    timing, chunks = run_pipeline(machine, Batches(samples))
    assert sum(len(chunk.rows) for chunk in chunks)
    return timing.cycles


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(vector_machines(), st.sampled_from(["fabric__link_bytes_per_cycle", "core__sram_bytes_per_cycle"]))
def test_in_lockstep_twice_the_bandwidth_is_never_slower(drawn, key):
    net, keys = drawn
    assert lockstep_cycles(net, keys | {key: 2 * keys[key]}) <= lockstep_cycles(net, keys)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(vector_machines())
def test_in_lockstep_twice_the_pes_on_unchanged_routes_are_never_slower(drawn):
    net, keys = drawn
    made = machine(chain(**net), "mesh", **keys)
    more = machine(chain(**net), "mesh", **keys | {"core__pes": 2 * keys["core__pes"], "mesh__rows": 16})
    cores = tuple(replace(core, cycles=larger.cycles) for core, larger in zip(made.cores, more.cores, strict=True))
    assert cycles_of(replace(made, cores=cores)) <= cycles_of(made)


def test_in_dataflow_a_faster_fabric_may_be_slower():
    # Graham's anomaly of list scheduling: on twice as fast links messages come in another order, and a core that takes
    # the oldest work it has at that moment now takes the worse one first. Two equal runs by the rules, not an error.
    net = chain(3, elements=[1, 3, 1, 1], skips=((0, 2),))
    keys = {"pipeline__timing": "dataflow", "pipeline__credits": "1f1b", "pipeline__output_slots": 1}
    keys |= {"mesh__rows": 3, "mesh__cols": 2, "core__pes": 2, "fabric__hop_cycles": 0}
    work = [(1, 0, 1, 1), (1, 1, 2, 3), (1, 1, 0, 0)]
    machines = [with_cycles(machine(net, **keys, fabric__link_bytes_per_cycle=rate), work) for rate in (1.0, 2.0)]
    assert [run(made, 40)[0].cycles for made in machines] == [332, 384]
