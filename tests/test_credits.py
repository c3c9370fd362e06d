"""The fewest credits that keep the throughput: closed forms, brute force, and what a search promises of its result."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import RECIPE, cases, chain, machine, with_cycles, with_spare_bytes

import pbsim
from pbsim.config import Hardware, apply_overrides, read_source
from pbsim.errors import UserError
from pbsim.hardware import Machine
from pbsim.optim import UpdateRule
from pbsim.schedule import Batches, DeadlockError, Op, Trace, run_pipeline
from pbsim.schedule.credits import (
    ESTIMATE_TOLERANCE,
    Choice,
    Credits,
    CreditSearch,
    Laboratory,
    least_credits,
    minimum_credits,
    round_trip_cycles,
    with_credits,
)
from pbsim.schedule.steady import least_interval

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
EQUAL = (1000, 998, 1, 1)  # F = B = 1000, and nearly all of B passes before the gradient leaves


def equal_stages(stages: int, cycles: tuple[int, int, int, int] = EQUAL, **changes: object) -> Machine:
    made = machine(chain(stages), pipeline__timing="dataflow", **changes)
    return with_cycles(made, [cycles] * stages)


def pace_from_the_rows(machine: Machine, samples: int = 400) -> Fraction:
    """Cycles per sample at the last stage over the second half of a SimPy run: the model that defines the timing."""
    _, chunks = run_pipeline(machine, Batches(samples), engine="simpy")
    rows = Trace.concatenate(*(chunk.rows for chunk in chunks))
    ends = sorted(rows.end[(rows.stage == machine.stages - 1) & (rows.op == Op.UPDATE)].tolist())
    return Fraction(ends[-1] - ends[samples // 2 - 1], samples - samples // 2)


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("cycles", [EQUAL, (3, 1, 1, 1), (1, 1, 1, 1)])
def test_equal_stages_need_s_minus_s_credits_and_have_that_delay_less_one(stages, cycles):
    # a shared unit and a free fabric: a sample is S-s forwards on its way to the end and S-s backwards on its way
    # back, (S-s) (F + B) cycles in all, at F + B cycles per sample
    found = minimum_credits(equal_stages(stages, cycles))
    assert found.minimum.cycles_per_sample == found.bound_cycles == sum(cycles)
    assert found.credits == [stages - s for s in range(stages)]
    assert found.minimum.delays == tuple(stages - 1 - s for s in range(stages))
    assert found.minimum.exact
    assert found.relative_throughput(found.minimum) == 1


def test_there_the_round_trip_alone_proves_that_fewer_do_not_suffice():
    # F (S-s) + Bx (S-s) + Bw + U cycles, over F + B: more than S-s-1
    found = minimum_credits(equal_stages(5))
    assert found.round_trips == tuple(1000 * (5 - s) + 998 * (5 - s) + 2 for s in range(5))
    assert list(found.least) == found.credits == [5, 4, 3, 2, 1]
    assert found.why == ("round trip",) * 4 + ("one",)


def test_split_units_need_twice_as_many():
    # forward and backward at once: a sample every 1,000 cycles, and the same 2,000 (S-s) on the way
    found = minimum_credits(equal_stages(4, core__units="split"))
    assert found.minimum.cycles_per_sample == 1000
    assert found.credits == [8, 6, 4, 2]
    assert found.minimum.delays == (7, 5, 3, 1)


@pytest.mark.parametrize("hops", [3, 5, 100])
def test_with_a_latency_the_credits_of_lockstep_are_the_fewest(hops):
    # A core that never pauses works in turns of 1,000 cycles. What has been on its way for a few cycles comes when the
    # next turn has begun, and waits for the one after it: there and back a period more per stage, as in lockstep.
    found = minimum_credits(equal_stages(4, fabric__hop_cycles=hops))
    assert found.minimum.cycles_per_sample == 2000
    assert found.credits == [2 * (4 - 1 - s) + 1 for s in range(4)]
    assert found.minimum.delays == (6, 4, 2, 0)
    assert found.relative_throughput(found.choices["1f1b"]) < 1


def test_a_latency_as_long_as_the_work_is_covered_by_credits():
    # 2,000 cycles from a core to the next: a sample is 2 (S-1-s) 2,000 cycles longer on its way
    near, far = (minimum_credits(equal_stages(3, fabric__hop_cycles=hops)) for hops in (0, 2000))
    assert near.minimum.cycles_per_sample == far.minimum.cycles_per_sample
    assert all(more > fewer for more, fewer in zip(far.credits[:-1], near.credits[:-1], strict=True))
    assert far.least > near.least


def test_a_slow_last_stage_needs_few_credits_and_its_queue_is_never_unbounded():
    # 24 cycles per sample at the last of three stages, 6 at those before: the search does not fall for a queue that
    # grows with the run, and finds that one sample is always at the last stage if the first has two
    made = equal_stages(3, (3, 1, 1, 1), pipeline__credits="unbounded")
    made = with_cycles(made, [(3, 1, 1, 1), (3, 1, 1, 1), (10, 8, 5, 1)])
    found = minimum_credits(made)
    assert found.minimum.cycles_per_sample == 24
    assert found.credits == [2, 1, 1]
    assert all(sum(choice.credits) <= 4 * sum(found.credits) for choice in found.choices.values() if choice.exact)
    assert "the file's" not in found.choices  # unbounded is not simulated


def test_a_slow_link_is_the_bound_and_credits_reach_it():
    made = machine(
        chain(3, elements=[4, 4, 20, 4]), pipeline__timing="dataflow", fabric__link_bytes_per_cycle=1,
        fabric__hop_cycles=1, pipeline__output_slots=20,
    )  # fmt: skip
    found = minimum_credits(with_cycles(made, [(3, 1, 1, 1)] * 3))
    assert found.bound_cycles == 40  # 20 elements of 2 bytes
    assert found.minimum.cycles_per_sample == 40


def test_round_trips_take_the_longest_way():
    # 0 -> 1 -> 2 and a skip edge 0 -> 2: by stage 1 there and back
    made = machine(chain(3, skips=((0, 2),)), pipeline__timing="dataflow", fabric__hop_cycles=0)
    made = with_cycles(made, [(2, 0, 3, 1), (50, 60, 3, 1), (5, 7, 3, 1)])
    assert round_trip_cycles(made) == [2 + 50 + 5 + 7 + 60 + 0 + 4, 50 + 5 + 7 + 60 + 4, 5 + 7 + 4]
    assert least_credits([128, 126, 16], Fraction(64)) == (2, 2, 1)


# --- brute force ----------------------------------------------------------------------------------


def brute_force(machine: Machine, most: int, target: Fraction) -> set[Credits]:
    """All vectors of credits up to `most` that need no more cycles per sample."""
    laboratory = Laboratory(machine)
    vectors = product(range(1, most + 1), repeat=machine.stages)
    return {vector for vector in vectors if laboratory.keeps(laboratory.measure(vector), target)}


def smaller(one: Credits, other: Credits) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("cycles", "changes"),
    [
        ([(3, 1, 1, 1)] * 3, {}),
        ([(3, 1, 1, 1), (2, 2, 2, 1), (4, 3, 1, 1)], {}),
        ([(3, 1, 1, 1), (2, 2, 2, 1), (4, 3, 1, 1)], {"fabric__hop_cycles": 3}),
        ([(7, 0, 4, 1), (2, 2, 2, 1), (4, 3, 1, 1)], {"core__units": "split", "fabric__hop_cycles": 1}),
        ([(1, 0, 1, 1), (2, 2, 2, 1), (6, 6, 2, 1)], {"pipeline__priority": "forward"}),
        ([(5, 0, 3, 1), (5, 4, 2, 1)], {"fabric__link_bytes_per_cycle": 2.0, "pipeline__output_slots": 1}),
        ([(5, 0, 3, 1), (2, 1, 1, 1)], {"host__bytes_per_cycle": 1.0}),
    ],
)
def test_no_smaller_vector_keeps_the_throughput(cycles, changes):
    made = machine(chain(len(cycles)), pipeline__timing="dataflow", **changes)
    made = with_cycles(made, cycles)
    found = minimum_credits(made)
    assert found.reference.cycles_per_sample is not None
    most = max(found.credits) + 1
    keeping = brute_force(made, most, found.reference.cycles_per_sample)
    assert found.minimum.credits in keeping
    assert not [vector for vector in keeping if smaller(vector, found.minimum.credits)]
    assert sum(found.credits) == min(map(sum, keeping))
    fastest = min(c.cycles_per_sample for c in map(Laboratory(made).measure, keeping) if c.cycles_per_sample)
    assert fastest == found.reference.cycles_per_sample  # what the reference reaches, no credits up to `most` beat


def test_a_tolerance_buys_shorter_delays():
    made = with_cycles(equal_stages(3, fabric__hop_cycles=2), [(30, 0, 20, 1), (28, 12, 12, 1), (31, 12, 10, 1)])
    strict, loose = minimum_credits(made), minimum_credits(made, tolerance=0.5)
    assert loose.minimum.cycles_per_sample <= Fraction(3, 2) * strict.reference.cycles_per_sample
    assert sum(loose.credits) < sum(strict.credits)
    assert loose.minimum.delay_mean < strict.minimum.delay_mean
    keeping = brute_force(made, max(loose.credits) + 1, Fraction(3, 2) * strict.reference.cycles_per_sample)
    assert not [vector for vector in keeping if smaller(vector, loose.minimum.credits)]


# --- whatever the machine -------------------------------------------------------------------------


def paces(choice: Choice) -> Fraction:
    assert choice.cycles_per_sample is not None
    return choice.cycles_per_sample


def check(machine: Machine, found: CreditSearch) -> None:
    """What every search promises: the throughput is kept, and no stage can spare a credit."""
    laboratory = Laboratory(machine)
    kept = laboratory.measure(found.minimum.credits)
    assert kept == found.minimum
    assert laboratory.keeps(kept, paces(found.reference))
    assert paces(kept) >= least_interval(machine) * (1 if kept.exact else 1 - ESTIMATE_TOLERANCE)
    assert all(most <= credit for most, credit in zip(kept.in_flight, kept.credits, strict=True))
    assert all(delay <= credit - 1 for delay, credit in zip(kept.delays, kept.credits, strict=True))
    for stage, why in enumerate(found.why):
        fewer = tuple(count - (s == stage) for s, count in enumerate(kept.credits))
        if why == "one":
            assert fewer[stage] == 0
        else:  # those that the round trip rules out too
            assert why in ("round trip", "simulated", "estimated")
            assert not laboratory.keeps(laboratory.measure(fewer), paces(found.reference)), (stage, why)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(pipeline__timing="dataflow"))
def test_found_credits_keep_the_throughput_and_none_can_be_spared(case):
    check(case.machine, minimum_credits(case.machine))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(pipeline__timing="dataflow", pipeline__memory="report"))
def test_the_throughput_is_that_of_the_model_that_defines_the_timing(case):
    found = minimum_credits(case.machine)
    if found.minimum.exact:
        pace = pace_from_the_rows(with_credits(case.machine, found.minimum.credits))
        # half of 400 samples, of a period of some samples: a period may be cut at either end
        assert float(pace) == pytest.approx(float(paces(found.minimum)), rel=0.05)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(pipeline__timing="dataflow", pipeline__memory="report"), st.integers(0, 3))
def test_no_throughput_is_had_with_fewer_credits_than_the_round_trips_say(case, more):
    laboratory = Laboratory(case.machine)
    credits = tuple(1 + (s + more) % 3 for s in range(case.machine.stages))
    choice = laboratory.measure(credits)
    if choice.exact:
        least = least_credits(round_trip_cycles(case.machine), paces(choice))
        assert all(count >= needed for count, needed in zip(credits, least, strict=True))


# --- limits, memory, reports ----------------------------------------------------------------------


def test_a_search_that_is_cut_short_says_so_and_keeps_the_throughput():
    made = with_cycles(equal_stages(3), [(3, 1, 1, 1), (3, 1, 1, 1), (10, 8, 5, 1)])
    full, cut = minimum_credits(made), minimum_credits(made, event_limit=1)
    assert cut.simulations < full.simulations
    assert "open" in cut.why
    assert "the limit of 1 events was reached" in cut.notes[0]
    assert paces(cut.minimum) == paces(full.minimum)
    assert sum(cut.credits) > sum(full.credits)
    assert full.notes == ()


def test_the_choices_lie_side_by_side():
    found = minimum_credits(equal_stages(3, pipeline__credits=[4, 4, 4]))
    table = found.table.set_index("choice")
    assert list(table.index) == [
        "1f1b", "lockstep", "the file's", "minimum", "minimum + 1", "minimum + 2", "2 x minimum", "4 x minimum",
    ]  # fmt: skip
    assert table["credits"].to_dict()["minimum + 1"] == [4, 3, 2]
    assert table["delay_first"].to_dict()["lockstep"] == 4
    assert (table["relative_throughput"] == 1).all()
    assert table["delay_mean"].is_monotonic_increasing is False  # the minimum has the least of all
    assert table["delay_mean"].min() == table["delay_mean"]["minimum"] == 1
    # each of 10 inputs of 2 bytes, for as many samples as are in flight
    assert table["stash_bytes"].to_dict()["minimum"] == (3 + 2 + 1) * 20


def test_weight_stashing_counts_the_versions_that_are_kept():
    made = machine(chain(3), rule=UpdateRule(RECIPE, stash_weights=True), pipeline__timing="dataflow")
    found = minimum_credits(with_cycles(made, [EQUAL] * 3))
    assert found.minimum.stash_bytes == (3 + 2 + 1) * (20 + 8 * 2)


def test_where_memory_is_enforced_what_deadlocks_keeps_nothing():
    made = with_spare_bytes(equal_stages(3, pipeline__memory="enforce"), [0, 0, 0])
    found = minimum_credits(made)
    check(made, found)
    assert found.choices["1f1b"].cycles_per_sample is None
    assert found.relative_throughput(found.choices["1f1b"]) == 0
    assert all(found.minimum.in_flight)  # as fast as what finds room lets it be
    stuck = replace(made, cores=tuple(replace(core, memory=replace(core.memory, capacity=0)) for core in made.cores))
    with pytest.raises(DeadlockError, match="deadlock"):
        minimum_credits(stuck)


def test_lockstep_has_no_use_for_credits():
    with pytest.raises(ValueError, match="credits bound nothing"):
        minimum_credits(machine(chain(2)))


# --- from files -----------------------------------------------------------------------------------


def test_the_verb_searches_without_numbers_and_its_result_goes_into_the_file():
    found = pbsim.minimum_credits("mesh", "digits_cnn", "pb+lwpv")
    assert found.credits == [3, 2, 1]
    source = read_source(Hardware, "mesh")
    apply_overrides([f"pipeline.credits={found.credits}"], {"hardware": source})
    run = pbsim.simulate(
        source.document, "digits_cnn", "pb+lwpv", timing_only=True, samples=2000, settings={"engine": "compiled"}
    )
    assert run.config["hardware"]["pipeline"]["credits"] == found.credits
    steady = run.summary["steady_state"]
    assert Fraction(steady["period_cycles"], steady["period_samples"]) == found.minimum.cycles_per_sample
    stages = run.stages.sort_values("stage")
    assert stages["delay_mean"].tolist() == pytest.approx(list(found.minimum.delays), abs=0.01)
    stash = run.memory[run.memory["category"] == "stash"]["peak_bytes"].sum()
    assert stash == found.minimum.stash_bytes


def test_what_has_no_credits_to_search_is_refused_with_the_reason():
    with pytest.raises(UserError) as refused:
        pbsim.minimum_credits("lockstep_ideal", "digits_cnn", "sgd:4", tolerance=-1.0, event_limit=0)
    text = str(refused.value)
    for reason in ("pipeline.timing = lockstep", "whatever credits say", "sgd:4", "drains", "tolerance", "event_limit"):
        assert reason in text
