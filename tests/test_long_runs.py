"""Long runs: the compiled engine is the SimPy model event for event, and arithmetic changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from synthetic import RECIPE, Case, cases, chain, machine, with_cycles

from pbsim.hardware import Machine
from pbsim.network.network import Network
from pbsim.optim import UpdateRule
from pbsim.results.audit import Audit
from pbsim.schedule import Batches, DeadlockError, Op, Timing, Trace, run_pipeline
from pbsim.schedule.batches import shortened
from pbsim.schedule.compiled import Engine
from pbsim.schedule.steady import CompiledRun, shares
from pbsim.schedule.trace import COLUMNS

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
Row = tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a run left: its trace, its books, or the words of its deadlock."""

    timing: Timing
    rows: list[Row]
    deadlock: str

    @property
    def books(self) -> dict[str, object]:
        timing, ledger, delays = self.timing, self.timing.ledger, self.timing.delays
        return {
            "cycles": timing.cycles,
            "units": [vars(unit) for unit in timing.units],
            "links": (timing.links.bytes, timing.links.busy_cycles),
            "in flight": timing.peak_in_flight,
            "delays": [getattr(delays, name).tolist() for name in ("count", "total", "least", "most")],
            "memory": (ledger.current, ledger.peak, ledger.core_peak, ledger.machine_peak),
            "when": (ledger.peak_cycle, ledger.core_peak_cycle),
            "step": timing.step_cycles,
        }


def outcome(machine: Machine, batches: Batches, chunk_rows: int = 50_000, **how: object) -> Outcome:
    timing, chunks = run_pipeline(machine, batches, chunk_rows, **how)
    seen, deadlock = [Trace.of([])], ""
    try:
        until = 0
        for chunk in chunks:
            assert not len(chunk.rows) or chunk.rows.start.min() >= until  # the stream keeps its promise
            until = chunk.until
            seen.append(chunk.rows)
    except DeadlockError as error:
        deadlock = str(error)
    columns = (getattr(Trace.concatenate(*seen), name).tolist() for name in COLUMNS)
    return Outcome(timing, sorted(zip(*columns, strict=True)), deadlock)


def longer(case: Case, samples: int) -> Batches:
    return replace(case.batches, samples=case.samples + samples)


def check_equal_to_simpy(case: Case, more: int, chunk_rows: int, *, skip: bool) -> None:
    batches = longer(case, more)
    expected = outcome(case.machine, batches, engine="simpy")
    found = outcome(case.machine, batches, chunk_rows, engine="compiled", skip=skip)
    assert found.rows == expected.rows
    assert found.deadlock == expected.deadlock
    if not expected.deadlock:
        assert found.books == expected.books


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="dataflow"), st.integers(0, 30), st.integers(1, 200))
def test_the_compiled_engine_equals_the_simpy_model_event_for_event(case, more, chunk_rows):
    check_equal_to_simpy(case, more, chunk_rows, skip=False)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="dataflow"), st.integers(60, 200), st.integers(1, 2000))
def test_a_periodic_regime_continued_by_arithmetic_has_the_same_trace_and_books(case, more, chunk_rows):
    check_equal_to_simpy(case, more, chunk_rows, skip=True)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="lockstep"), st.integers(0, 120), st.integers(1, 2000))
def test_lockstep_continued_by_arithmetic_has_the_same_trace_and_books(case, more, chunk_rows):
    check_equal_to_simpy(case, more, chunk_rows, skip=True)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True), st.integers(0, 150), st.integers(0, 40))
def test_without_rows_beyond_a_window_the_books_and_the_window_are_the_same(case, more, kept):
    batches = longer(case, more)
    expected = outcome(case.machine, batches, engine="simpy")
    found = outcome(case.machine, batches, engine="compiled", kept=kept)
    assert found.deadlock == expected.deadlock
    if not expected.deadlock:
        assert found.books == expected.books
        sample = COLUMNS.index("sample")
        window = [row for row in expected.rows if row[sample] < kept]
        assert [row for row in found.rows if row[sample] < kept] == window


def test_the_regime_is_found_where_it_is_known():
    # Two equal stages, one credit each at the second, a free fabric: F + Bx + Bw + U = 6 cycles per sample from the
    # start, so that the state at one sample's entry is that at the next one's.
    made = machine(chain(2), pipeline__timing="dataflow", pipeline__credits="1f1b")
    run = outcome(made, Batches(10_000), engine="compiled", kept=0)
    assert run.timing.steady_state is not None
    assert (run.timing.steady_state.period_samples, run.timing.steady_state.period_cycles) == (1, 6)
    assert run.timing.steady_state.skipped_samples > 9_600
    # ... the first stage's last backward comes after the second's: (S - 1) (F + Bx) later than without a pipeline
    assert run.timing.cycles == 10_000 * 6 + 4


def unequal() -> Machine:
    """Stages of 60, 61, 62 and 67 cycles with many credits: buffers fill for hundreds of samples."""
    made = machine(chain(4), pipeline__timing="dataflow", pipeline__credits=40)
    return with_cycles(made, [(20, 0, 20, 20), (21, 10, 20, 10), (22, 10, 20, 10), (27, 10, 20, 10)])


def test_a_run_of_any_length_takes_the_cycles_of_its_slowest_stage():
    for samples in (10**4, 10**6, 10**9):
        timing = outcome(unequal(), Batches(samples), engine="compiled", kept=10).timing
        assert timing.steady_state is not None
        assert timing.estimate is None
        assert not timing.all_rows
        assert 67 * samples <= timing.cycles <= 67 * samples + 4 * 67
        assert timing.delays.count[1].tolist() == [samples] * 4


def test_in_the_steady_state_a_stage_is_busy_by_its_share_of_the_slowest_ones_time():
    timing = outcome(unequal(), Batches(10**8), engine="compiled", kept=0).timing
    for unit, own in zip(timing.units, (60, 61, 62, 67), strict=True):
        assert unit.busy / timing.cycles == pytest.approx(own / 67, rel=1e-6)


def test_without_a_repetition_in_the_budget_figures_are_an_estimate_with_its_spread():
    # the first stage takes 60 cycles and runs ahead of the last, which takes 67, until its credits are used up
    made = unequal()
    made = replace(made, cores=tuple(replace(core, credits=100_000) for core in made.cores))
    samples = 1_000_000
    timing = Timing(made, Batches(samples))
    run = CompiledRun(made, timing, 50_000, kept=10, skip=True, event_budget=60_000)
    list(run.chunks())
    assert timing.estimate is not None
    assert timing.steady_state is None
    assert timing.estimate.simulated_samples < 10_000
    assert 67 <= timing.estimate.cycles_per_sample_least <= timing.estimate.cycles_per_sample_most < 67.5
    assert timing.cycles == pytest.approx(67 * samples, rel=2e-3)
    assert timing.cycles >= 67 * samples
    for unit in timing.units:
        assert unit.total == timing.cycles
    assert [unit.forward for unit in timing.units] == [20 * samples, 21 * samples, 22 * samples, 27 * samples]


@pytest.mark.parametrize("timing", ["dataflow", "lockstep"])
def test_epochs_of_a_drained_schedule_are_left_out_but_not_their_ends(timing):
    # 50 epochs of 7 full batches of 8 and one of 3, then 2 batches and 5 samples
    made = machine(chain(3), pipeline__timing=timing)
    batches = Batches(50 * 59 + 21, 8, drained=True, epoch_samples=59)
    expected = outcome(made, batches, engine="simpy")
    found = outcome(made, batches, engine="compiled", kept=4)
    assert found.books == expected.books
    assert found.timing.steady_state is not None
    assert found.timing.steady_state.skipped_samples > 45 * 59


def check_that_a_windowed_run_passes_its_audit(made: Machine, net: Network, batches: Batches, kept: int) -> None:
    timing, chunks = run_pipeline(made, batches, engine="compiled", kept=kept)
    audit = Audit(made, net, timing)
    for chunk in chunks:
        audit.watch(chunk)
    audit.finish()
    assert timing.cycles == outcome(made, batches, engine="simpy").timing.cycles


@pytest.mark.parametrize("timing", ["dataflow", "lockstep"])
@pytest.mark.parametrize("kept", [0, 10, 1000])
@pytest.mark.parametrize(
    "batches",
    [
        Batches(20 * 50, 4, drained=True, epoch_samples=50),  # batches do not divide the epoch
        Batches(3 * 97 + 43, 4, drained=True, epoch_samples=97),  # the run ends within an epoch
        Batches(300 * 7, 3, drained=True, epoch_samples=7),  # many epochs within the window
    ],
)
def test_long_drained_runs_pass_their_audit(timing, kept, batches):
    net = chain(3)
    check_that_a_windowed_run_passes_its_audit(machine(net, pipeline__timing=timing), net, batches, kept)


def test_many_stashed_versions_in_flight_are_those_of_their_forwards():
    rule = UpdateRule(RECIPE, stash_weights=True)
    made = machine(chain(3), rule=rule, pipeline__timing="dataflow", core__units="split", pipeline__credits=150)
    made = with_cycles(made, [(2, 0, 3, 2), (2, 3, 3, 2), (2, 3, 3, 4)])
    simpy, compiled = (outcome(made, Batches(400), engine=engine, skip=False) for engine in ("simpy", "compiled"))
    assert simpy.timing.peak_in_flight[0] > 64
    assert compiled.rows == simpy.rows


def test_an_estimate_keeps_its_head_where_a_stage_stands_still():
    # forwards first and no credits: stage 0 makes no backward as long as samples come
    made = machine(chain(3), pipeline__timing="dataflow", pipeline__priority="forward", pipeline__credits="unbounded")
    timing = Timing(made, Batches(10**6))
    list(CompiledRun(made, timing, 50_000, kept=0, skip=True, event_budget=60_000).chunks())
    assert 6 * 10**6 <= timing.cycles <= 1.01 * 6 * 10**6
    for mean, least, most in timing.delays.table():
        assert least <= mean <= most


@settings(max_examples=200, deadline=None, derandomize=True)
@example(5042, 4, 1437, 0)  # the last epoch has more left over than a whole one
@given(st.integers(1, 400), st.integers(1, 9), st.integers(0, 40), st.integers(0, 50))
def test_a_shortened_run_lacks_what_its_repeats_add(samples, size, epoch, kept):
    batches = Batches(samples, size, drained=True, epoch_samples=epoch)
    shorter = shortened(batches, kept)
    if shorter is None:
        return
    assert shorter.batches.samples >= min(kept, samples)
    assert shorter.batches.samples + sum(times * (b - a) for a, b, times in shorter.repeats) == samples
    added = sum(times * (shorter.batches.index(b) - shorter.batches.index(a)) for a, b, times in shorter.repeats)
    assert shorter.batches.count + added == batches.count
    window = np.arange(min(kept, samples))
    assert (shorter.batches.indices(window) == batches.indices(window)).all()


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_shares_add_up(total, weights):
    parts = shares(total, np.array(weights))
    assert sum(parts) == total
    assert min(parts) >= 0


def changes_the_state(change: Callable[[Engine], None]) -> None:
    made = machine(chain(3), pipeline__timing="dataflow", fabric__link_bytes_per_cycle=3)
    engine = Engine(made, Batches(50))
    engine.advance(until_sample=20)
    state, key = engine.state(20), engine.state_hash(20)
    change(engine)
    assert not np.array_equal(engine.state(20), state) or len(engine.state(20)) != len(state)
    assert engine.state_hash(20) != key


def test_the_state_knows_what_decides_about_the_future():
    changes_the_state(lambda engine: engine.core_state.__setitem__((1, 0), engine.core_state[1, 0] + 1))
    changes_the_state(lambda engine: engine.arrived.__setitem__(0, engine.arrived[0] + 1))
    changes_the_state(lambda engine: engine.heap.__setitem__((0, 0), engine.heap[0, 0] + 1))
    changes_the_state(lambda engine: engine.scalars.__setitem__(2, engine.scalars[2] + 1))


def test_every_operation_of_a_long_run_is_counted_once():
    run = outcome(unequal(), Batches(3_000), engine="compiled")
    ops = [row[COLUMNS.index("op")] for row in run.rows]
    for op in (Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.UPDATE):
        assert ops.count(op) == 3_000 * 4
