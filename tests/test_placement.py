"""Where cores lie and how many PEs they get: shapes, snakes, bands, floors, and what is said where it does not fit."""

from __future__ import annotations

import tomllib
from itertools import combinations, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import RECIPE, chain, hardware, machine, placements

from pbsim.config import Hardware, Source, Workload, read_source, validate, with_regions
from pbsim.config.hardware import Mesh
from pbsim.errors import UserError
from pbsim.experiment import load_hardware, resolve, simulate
from pbsim.hardware import Machine, Region, allocation, build_machine
from pbsim.hardware.core import stage_cycles, stage_loads
from pbsim.hardware.placement import (
    band_heights,
    banded_regions,
    fits,
    grid_cores,
    listed_regions,
    spare_regions,
    uniform_regions,
    uniform_shape,
)
from pbsim.network.network import Network, Work
from pbsim.optim import UpdateRule
from pbsim.results.tables import overflows
from pbsim.schedule import Batches, run_pipeline

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

meshes = st.builds(Mesh, rows=st.integers(1, 12), cols=st.integers(1, 12))


def places(region: Region) -> set[tuple[int, int]]:
    """The PEs of a rectangle."""
    return {(region.row + r, region.col + c) for r in range(region.rows) for c in range(region.cols)}


def adjacent(one: Region, other: Region) -> bool:
    """Whether some PE of one is beside a PE of the other."""
    near = {(r + dr, c + dc) for r, c in places(one) for dr, dc in ((0, 1), (0, -1), (1, 0), (-1, 0))}
    return bool(near & places(other))


def check_layout(mesh: Mesh, regions: list[Region]) -> None:
    """Cores do not overlap, lie on the mesh, and follow each other; spare rectangles hold exactly the rest."""
    everything = [*regions, *spare_regions(mesh, regions)]
    assert all(not places(a) & places(b) for a, b in combinations(everything, 2))
    assert set().union(*map(places, everything)) == places(Region(0, 0, mesh.rows, mesh.cols))


# --- uniform --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "cols", "pes", "shape", "cores"),
    [
        (16, 16, 16, (4, 4), 16),  # as many as 2 x 8 or 16 x 1, and square
        (16, 16, 8, (2, 4), 32),  # 4 x 2 is as square: wide comes first
        (4, 6, 8, (4, 2), 3),  # 2 x 4: two of them
        (3, 10, 6, (3, 2), 5),  # 2 x 3: three; 1 x 6: three
        (16, 16, 13, (1, 13), 16),
        (16, 16, 17, (0, 0), 0),
        (2, 2, 5, (0, 0), 0),
    ],
)
def test_a_uniform_core_has_the_shape_of_which_most_fit(rows, cols, pes, shape, cores):
    mesh = Mesh(rows=rows, cols=cols)
    assert uniform_shape(mesh, pes) == shape
    assert grid_cores(mesh, shape) == cores


@settings(max_examples=100, deadline=None, derandomize=True)
@given(meshes, st.integers(1, 20))
def test_uniform_cores_follow_each_other_like_a_snake(mesh, pes):
    shape = uniform_shape(mesh, pes)
    cores = grid_cores(mesh, shape)
    if not cores:
        return
    regions = uniform_regions(mesh, shape, cores)
    assert all(region.pes == pes for region in regions)
    assert all(adjacent(a, b) for a, b in pairwise(regions))
    check_layout(mesh, regions)


def test_uniform_cores_by_hand():
    # 5 x 6 PEs in cores of 2 x 2: three in a row, back in the next; the last row of PEs is left over
    regions = uniform_regions(Mesh(rows=5, cols=6), (2, 2), 5)
    assert regions == [Region(*r, 2, 2) for r in ((0, 0), (0, 2), (0, 4), (2, 4), (2, 2))]
    assert spare_regions(Mesh(rows=5, cols=6), regions) == [Region(2, 0, 2, 2), Region(4, 0, 1, 6)]


def test_too_many_stages_for_uniform_cores_say_by_how_much():
    with pytest.raises(UserError) as caught:
        machine(chain(5), mesh__rows=4, mesh__cols=4, core__pes=4)
    assert "has 4 cores of 4 PEs, and the network has 5 stages: 1 core too few" in str(caught.value)
    assert "5 cores take 20 PEs, and there are 16" in str(caught.value)
    with pytest.raises(UserError, match=r"has 0 cores of 17 PEs \(no rectangle of 17 PEs fits into it\)"):
        machine(chain(1), core__pes=17)


# --- bands ----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(meshes, st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_bands_hold_at_least_what_each_stage_asked_for(mesh, pes):
    for height in band_heights(mesh):
        if not fits(mesh, height, pes):
            continue
        regions = banded_regions(mesh, height, pes)
        assert all(region.pes >= count and region.rows == height for region, count in zip(regions, pes, strict=True))
        assert all(adjacent(a, b) for a, b in pairwise(regions))
        check_layout(mesh, regions)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(meshes, st.data())
def test_what_fits_still_fits_with_fewer_pes(mesh, data):
    pes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=10))
    fewer = [data.draw(st.integers(1, count)) for count in pes]
    for height in band_heights(mesh):
        assert fits(mesh, height, fewer) or not fits(mesh, height, pes)


def test_bands_by_hand():
    # bands of 2 rows: stages take 2, 2, 1, 3, 1 of 5 columns. The third fills the first band; the fourth opens the
    # second from the right; the last column of the last band is left over, and so is the fifth row
    mesh = Mesh(rows=5, cols=5)
    regions = banded_regions(mesh, 2, [4, 3, 2, 6, 1])
    assert regions == [
        Region(0, 0, 2, 2), Region(0, 2, 2, 2), Region(0, 4, 2, 1), Region(2, 2, 2, 3), Region(2, 1, 2, 1),
    ]  # fmt: skip
    assert spare_regions(mesh, regions) == [Region(2, 0, 2, 1), Region(4, 0, 1, 5)]
    # of 4 columns the third stage gets two, as the fourth needs three
    assert banded_regions(Mesh(rows=4, cols=4), 2, [4, 2, 6])[1] == Region(0, 2, 2, 2)


# --- balanced -------------------------------------------------------------------------------------

works = st.builds(lambda macs, vector: Work(macs, macs, macs, vector, vector, vector), *2 * [st.integers(0, 400)])


@st.composite
def networks(draw: st.DrawFn, most: int = 6) -> Network:
    stages = draw(st.integers(1, most))
    distant = [(s, t) for s in range(stages) for t in range(s + 2, stages)]
    return chain(
        stages,
        work=[draw(works) for _ in range(stages)],
        elements=draw(st.lists(st.integers(1, 60), min_size=stages + 1, max_size=stages + 1)),
        skips=tuple(sorted(draw(st.sets(st.sampled_from(distant), max_size=2)))) if distant else (),
        parameters=draw(st.integers(1, 200)),
    )


def laid_out(net: Network, **changes: object) -> Machine:
    """A network on a small mesh with plenty of memory, PEs shared out; keys changed."""
    return machine(net, "mesh", **({"mesh__rows": 5, "mesh__cols": 6, "core__sram_kib": 1e6} | changes))


def cycles_per_sample(net: Network, table: Hardware, stage: int, pes: int) -> int:
    loads = stage_loads(net, net.stages[stage], UpdateRule(RECIPE))
    return stage_cycles(table.core, net.stages[stage], loads, pes, table.element_bytes).interval(False)


def next_fit(widths: list[int], cols: int) -> int | None:
    """How many bands of so many columns the widths fill; None if one is too wide."""
    bands: list[int] = []
    for width in widths:
        if width > cols:
            return None
        if not bands or bands[-1] + width > cols:
            bands.append(0)
        bands[-1] += width
    return len(bands)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(networks(), st.sampled_from([(5, 6), (1, 7), (4, 2), (3, 3)]))
def test_with_free_links_balanced_allocation_reaches_the_smallest_interval_that_any_bands_can(net, size):
    rows, cols = size
    made = laid_out(net, mesh__rows=rows, mesh__cols=cols, fabric__link_bytes_per_cycle=float("inf"))
    stages = range(len(net.stages))
    table = [[cycles_per_sample(net, made.hardware, s, p) for p in range(1, rows * cols + 1)] for s in stages]

    def reachable(target: int, height: int) -> bool:
        fewest = [next((p for p, cycles in enumerate(row, 1) if cycles <= target), None) for row in table]
        if None in fewest:
            return False
        bands = next_fit([-(-p // height) for p in fewest], cols)
        return bands is not None and bands * height <= rows

    targets = sorted({cycles for row in table for cycles in row})
    best = next(t for t in targets if any(reachable(t, height) for height in range(1, rows + 1)))
    assert made.interval.cycles == best == max(core.cycles.interval(False) for core in made.cores)


def test_a_layout_with_wide_crossings_is_preferred_to_one_with_a_slightly_shorter_interval():
    # 6 x 5 PEs for three stages of equal work: in one band of six rows the first two get 2 columns = 12 PEs, the last
    # one 6, and links are six wires wide. With free links two or three bands, 10 PEs for everyone, are faster; but
    # then two stages meet at a corner.
    work = [Work(240, 240, 240)] * 3
    sizes = {"mesh__rows": 6, "mesh__cols": 5, "core__sram_bytes_per_cycle": float("inf")}
    net = chain(3, work=work, elements=400, parameters=1)
    free = laid_out(net, fabric__link_bytes_per_cycle=float("inf"), **sizes)
    narrow = laid_out(net, fabric__link_bytes_per_cycle=4, **sizes)
    assert free.interval.cycles < narrow.interval.cycles
    assert min(free.link_wires) < min(narrow.link_wires) == 6
    per_sample = max(route.serialisation for c in narrow.channels for route in (c.forward, c.gradient))
    assert per_sample == -(-800 // (4 * 6))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(networks())
def test_one_more_pe_buys_what_is_said(net):
    made = laid_out(net)
    cycles = [cycles_per_sample(net, made.hardware, core.stage, core.pes) for core in made.cores]
    slowest = made.interval.stage
    assert cycles[slowest] == made.interval.cycles == max(cycles)
    cycles[slowest] = cycles_per_sample(net, made.hardware, slowest, made.cores[slowest].pes + 1)
    assert made.interval.with_one_more_pe == max(cycles) <= made.interval.cycles


def test_one_more_pe_by_hand():
    # 3 stages in one row of 6 PEs, free memory traffic, no overhead, 64 MACs each for F, Bx, Bw (4 per cycle and PE),
    # 8 elementwise operations each (4 lanes), and those of the update of 8 weights. On 2 PEs: 3 (8 + 1) cycles and the
    # update's; the first stage has no Bx, so that the second is the slowest
    net = chain(3)
    datapath = {"kind": "vector", "macs_per_cycle": 4}
    keys = {"mesh__rows": 1, "mesh__cols": 6, "core__sram_bytes_per_cycle": float("inf"), "core__datapath": datapath}
    made = laid_out(net, **keys)
    assert [core.pes for core in made.cores] == [2, 2, 2]
    update = UpdateRule(RECIPE).update_operations
    two = 3 * (64 // 8 + 8 // 8) + -(-8 * update // 8)
    assert (made.interval.stage, made.interval.cycles) == (1, two)
    assert made.interval.with_one_more_pe == two  # stage 2 is as slow
    # of two stages the second is the slowest alone: on 3 PEs 3 (6 + 1) and the update's; the first takes 2 (8 + 1)
    made = laid_out(chain(2), **(keys | {"mesh__cols": 4}))
    assert [core.pes for core in made.cores] == [2, 2]
    three = 3 * (-(-64 // 12) + -(-8 // 12)) + -(-8 * update // 12)
    assert made.interval.with_one_more_pe == max(three, 2 * (8 + 1) + -(-8 * update // 8)) < two


def test_a_net_of_more_stages_than_pes_says_how_many_are_missing():
    with pytest.raises(UserError, match="2 x 2: has 4 PEs, and the network has 6 stages: 2 PEs too few"):
        laid_out(chain(6), mesh__rows=2, mesh__cols=2)


def test_many_different_stages_on_a_wafer_are_asked_for_their_cycles_a_bounded_number_of_times(monkeypatch):
    asked = 0

    def counted(*arguments):
        nonlocal asked
        asked += 1
        return stage_cycles(*arguments)

    monkeypatch.setattr(allocation, "stage_cycles", counted)
    work = [Work(*3 * [100_000 + 57_000 * s], *3 * [2_000 + 1_100 * s]) for s in range(100)]
    laid_out(chain(100, work=work, elements=5000), mesh__rows=750, mesh__cols=994)
    assert asked < 100_000
    asked = 0
    laid_out(chain(100, work=work[:1] * 100, elements=5000), mesh__rows=750, mesh__cols=994)
    assert asked < 6_000  # stages of one kind share the answers


# --- memory ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(networks(), st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from(["lockstep", "dataflow"]), st.booleans())
def test_where_floors_fit_every_core_has_the_memory_that_lockstep_uses(net, sram_kib, timing, stash_weights):
    rule = UpdateRule(RECIPE, stash_weights=stash_weights)
    keys = {"core__sram_kib": sram_kib, "pipeline__timing": timing, "mesh__rows": 5, "mesh__cols": 6}
    made = machine(net, "mesh", rule, **keys)
    needed = sum(core.memory.weights for core in made.cores)
    assert made.sram_shortfall_bytes > 0 or needed <= 30 * sram_kib * 1024
    if timing == "lockstep" and not made.sram_shortfall_bytes:
        result, chunks = run_pipeline(made, Batches(3 * len(net.stages)))
        assert list(chunks)
        assert overflows(result) == []


def test_the_floor_by_hand():
    # stage 0 of 2: 8 weights of 2 bytes, thrice (momentum, gradient); 3 samples of 20 bytes of stash; in: a sample and
    # a gradient of 20 bytes; out: 2 slots of 20 bytes. 188 bytes on PEs of 64 bytes: 3; stage 1: 48 + 20 + 20 + 40
    keys = {"mesh__rows": 1, "core__sram_kib": 1 / 16, "pipeline__credits": "unbounded"}
    made = laid_out(chain(2), mesh__cols=5, **keys)
    assert made.sram_shortfall_bytes == 0
    assert [core.pes for core in made.cores] == [3, 2]
    with pytest.raises(UserError) as caught:
        laid_out(chain(2), mesh__cols=4, pipeline__memory="enforce", **keys)
    assert "1 x 4: holds 256 bytes, and the network needs 316: 60 bytes too few" in str(caught.value)
    reported = laid_out(chain(2), mesh__cols=4, **keys)
    assert reported.sram_shortfall_bytes == 60
    assert [core.pes for core in reported.cores] == [2, 2]  # by work alone


def test_a_shortfall_that_comes_from_rounding_to_rectangles_is_said_so():
    # 3 x 3 PEs of 64 bytes hold 576; three stages of 2 + 4 + 3 PEs, but in one band they take 1 + 2 + 1 columns
    keys = {"mesh__rows": 3, "mesh__cols": 3, "core__sram_kib": 1 / 16, "pipeline__credits": [1, 1, 1]}
    net = chain(3, elements=[3, 18, 20, 1], parameters=1)
    with pytest.raises(UserError) as caught:
        laid_out(net, pipeline__memory="enforce", **keys)
    assert "too few once every core is a rectangle" in str(caught.value)


def test_a_shortfall_is_in_the_summary_and_on_the_terminal():
    from pbsim.results.terminal import rows

    table = read_source(Hardware, "mesh").document
    table = table | {"core": table["core"] | {"sram_kib": 0.25}, "mesh": {"rows": 2, "cols": 3}}
    run = simulate(table, "digits_mlp", samples=5, timing_only=True)
    lacking = run.summary["sram_shortfall_bytes"]
    assert lacking > 0
    assert (
        f"the mesh lacks {lacking:,} bytes of SRAM: PEs were shared out by work alone" in dict(rows(run))["peak memory"]
    )


def test_the_interval_its_stage_and_its_price_are_in_the_summary_and_on_the_terminal():
    from pbsim.results.terminal import rows

    run = simulate("mesh", "digits_mlp", samples=5, timing_only=True)
    s = run.summary
    stage = run.stages.set_index("stage").loc[s["initiation_interval_stage"]]
    cycles = stage[[f"cycles_{op}" for op in ("forward", "input_gradient", "weight_gradient", "update")]].sum()
    assert cycles == s["initiation_interval_cycles"] >= s["initiation_interval_with_one_more_pe_cycles"]
    said = dict(rows(run))["initiation interval"]
    assert said.startswith(f"{cycles:,} cycles: stage {stage.name} {stage['name']!r} on {stage['pes']} PEs; ")
    assert "one more PE there" in said
    areas = run.nodes[run.nodes["stage"] >= 0].set_index("stage")
    assert (areas["rows"] * areas["cols"]).tolist() == run.stages.set_index("stage")["pes"].tolist()
    assert (run.nodes["rows"] * run.nodes["cols"]).sum() == 16 * 16


# --- listed regions -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(st.integers(1, 6).flatmap(lambda stages: st.tuples(st.just(stages), placements(stages))))
def test_listed_regions_are_the_cores_and_the_rest_is_spare(drawn):
    stages, (rows, cols, entries) = drawn
    made = machine(chain(stages), mesh__rows=rows, mesh__cols=cols, pipeline__placement=entries)
    assert [[r.row, r.col, r.rows, r.cols] for r in made.nodes[:stages]] == entries
    assert [core.pes for core in made.cores] == [entry[2] * entry[3] for entry in entries]
    check_layout(made.hardware.mesh, list(made.nodes[:stages]))


def test_all_that_is_wrong_with_listed_regions_is_said_at_once():
    entries = [[0, 0, 2, 2], [1, 1, 2, 2], [3, 3, 3, 2], "all", [0, -1, 1, 1], [2, 0, 1], [0, 3, 1, 0], [0, 3, 1, True]]
    with pytest.raises(UserError) as caught:
        listed_regions(Mesh(rows=4, cols=4), entries, 9, "regions.toml", "regions")
    shape = "should be [row, col, rows, cols]: whole numbers, row and col from 0, rows and cols from 1"
    assert [str(problem) for problem in caught.value.problems] == [
        "regions.toml: regions[1] = [1, 1, 2, 2]: overlaps regions[0] = [0, 0, 2, 2] on 1 PE",
        "regions.toml: regions[2] = [3, 3, 3, 2]: reaches 2 rows and 1 column beyond the mesh of 4 x 4 PEs",
        f"regions.toml: regions[3] = 'all': {shape}",
        f"regions.toml: regions[4] = [0, -1, 1, 1]: {shape}",
        f"regions.toml: regions[5] = [2, 0, 1]: {shape}",
        f"regions.toml: regions[6] = [0, 3, 1, 0]: {shape}",
        f"regions.toml: regions[7] = [0, 3, 1, True]: {shape}",
        "regions.toml: regions = 8 regions: should be one for each of the network's 9 stages: 1 missing",
    ]


FILES = {"hardware": (Hardware, "mesh"), "workload": (Workload, "digits_mlp")}
REGIONS = [[0, 0, 4, 4], [0, 4, 4, 2], [4, 0, 2, 6]]


@pytest.fixture
def placed(tmp_path):
    """A hardware file whose placement stands in a file beside it."""
    text = (tmp_path / "hw.toml", tmp_path / "regions.toml")
    document = read_source(Hardware, "mesh").document
    document = document | {"pipeline": document["pipeline"] | {"placement": "regions.toml"}}
    import tomli_w

    text[0].write_text(tomli_w.dumps(document))
    text[1].write_text(f"regions = {REGIONS}\n")
    return text[0]


def test_a_file_of_regions_is_relative_to_the_hardware_file_and_stands_in_the_resolved_one(placed):
    assert load_hardware(placed).pipeline.placement == REGIONS
    run = simulate(placed, "digits_mlp", samples=5, timing_only=True)
    assert run.nodes.head(3)[["row", "col", "rows", "cols"]].to_numpy().tolist() == REGIONS
    config = tomllib.loads((run.path / "config.toml").read_text())
    assert config["hardware"]["pipeline"]["placement"] == REGIONS
    placed.with_name("regions.toml").unlink()
    again = simulate(config["hardware"], config["workload"], settings=config["run"])
    assert again.summary == run.summary


def problems(placed, regions: str) -> list[str]:
    placed.with_name("regions.toml").write_text(regions)
    with pytest.raises(UserError) as caught:
        simulate(placed, "digits_mlp", samples=5, timing_only=True)
    return [str(problem).replace(str(placed.parent), "...") for problem in caught.value.problems]


def test_problems_name_the_file_of_regions(placed):
    wrong = problems(placed, "regions = [[0, 0, 4, 4], [0, 3, 1, 1]]")
    assert [problem.partition(": should")[0] for problem in wrong] == [
        ".../regions.toml: regions[1] = [0, 3, 1, 1]: overlaps regions[0] = [0, 0, 4, 4] on 1 PE",
        ".../regions.toml: regions = 2 regions",
    ]
    assert problems(placed, "cores = 3") == [
        ".../regions.toml: cores = 3: unknown key; known: regions",
        ".../regions.toml: regions: should be a list with [row, col, rows, cols] per stage",
    ]
    assert problems(placed, "regions = [")[0].startswith(".../regions.toml: is not valid TOML")
    placed.with_name("regions.toml").unlink()
    with pytest.raises(UserError, match=r"regions\.toml: cannot be read"):
        load_hardware(placed)


def test_placement_by_set_is_relative_to_the_shell_and_may_be_a_list(placed, monkeypatch):
    monkeypatch.chdir(placed.parent)
    for value in ("regions.toml", str(REGIONS)):
        sources = {name: read_source(*what) for name, what in FILES.items()} | {"run": Source({}, "command line")}
        assert resolve(sources, (f"pipeline.placement={value}",)).hardware.pipeline.placement == REGIONS


def test_what_is_no_placement_is_refused_in_words():
    document = read_source(Hardware, "mesh").document
    for value in ("spiral", 3, True):
        wrong = document | {"pipeline": document["pipeline"] | {"placement": value}}
        with pytest.raises(UserError, match=r"hw: pipeline\.placement = ") as caught:
            validate(Hardware, with_regions(Source(wrong, "hw")))
        assert len(caught.value.problems) == 1
    assert "list" in str(caught.value)


def test_a_file_of_regions_that_nobody_has_read_is_not_taken_for_a_snake():
    table = hardware(pipeline__placement="regions.toml")
    with pytest.raises(UserError, match="has not been read"):
        build_machine(table, chain(2), UpdateRule(RECIPE))
