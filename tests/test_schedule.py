"""The timing plane equals a cycle-by-cycle reference and the closed forms of pipelined backpropagation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from cycle_reference import BW, BX, LOAD, SEND, F, Row, U, simulate
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from synthetic import RECIPE, Case, cases, chain, machine, with_cycles, with_spare_bytes

from pbsim.config.workload import ConstantDecay
from pbsim.errors import UserError
from pbsim.hardware import Machine, Route
from pbsim.hardware.memory import Category, Ledger
from pbsim.numerics.order import BACKWARD, FORWARD, UPDATE, Horizon, Order, orders
from pbsim.optim import LearningRate, UpdateRule
from pbsim.schedule import Batches, Chunk, DeadlockError, Op, Timing, Trace, row_count, run_pipeline
from pbsim.schedule.dataflow import DataflowCore
from pbsim.schedule.trace import COLUMNS

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def rows_of(trace: Trace) -> list[Row]:
    columns = (getattr(trace, name).tolist() for name in COLUMNS)
    return sorted(zip(*columns, strict=True))


def run(machine: Machine, samples: int, chunk_rows: int = 50_000) -> tuple[Timing, list[Row]]:
    timing, chunks = run_pipeline(machine, Batches(samples), chunk_rows)
    return timing, rows_of(Trace.concatenate(*(chunk.rows for chunk in chunks)))


def accounts(timing: Timing) -> dict[tuple[int, str], dict[str, int]]:
    """Cycles per unit by what they were spent on; only what is not zero."""
    return {
        (unit.core, unit.unit): {
            name: spent for name, spent in vars(unit).items() if name not in ("core", "unit") and spent
        }
        for unit in timing.units
    }


def ends(rows: Sequence[Row], stage: int, op: int) -> list[int]:
    return sorted(end for _, end, s, o, *_ in rows if (s, o) == (stage, op))


def delays(rows: Sequence[Row], stage: int) -> list[int]:
    """Measured delays of a stage's samples, in order."""
    read = {sample: version for _, _, s, op, sample, version, _ in rows if (s, op) == (stage, F)}
    made = {sample: version for _, _, s, op, sample, version, _ in rows if (s, op) == (stage, U)}
    return [made[sample] - 1 - read[sample] for sample in sorted(read)]


def period(rows: Sequence[Row], stage: int = 0) -> float:
    """Cycles between updates of a stage in the middle of a run."""
    updates = ends(rows, stage, U)
    third = len(updates) // 3
    return (updates[2 * third] - updates[third]) / third


# --- against the reference ------------------------------------------------------------------------


def run_batches(machine: Machine, batches: Batches) -> tuple[Timing, list[Row]]:
    timing, chunks = run_pipeline(machine, batches)
    return timing, rows_of(Trace.concatenate(*(chunk.rows for chunk in chunks)))


def run_case(case: Case, chunk_rows: int = 50_000) -> tuple[Timing, list[Row], bool]:
    """Run a case; returns its rows, and whether it got stuck."""
    timing, chunks = run_pipeline(case.machine, case.batches, chunk_rows)
    seen, stuck = [], False
    try:
        for chunk in chunks:
            seen.append(chunk.rows)
    except DeadlockError:
        stuck = True
    return timing, rows_of(Trace.concatenate(*seen)), stuck


def check_against_the_reference(case: Case) -> None:
    expected = simulate(case.machine, case.samples, case.batch, case.epoch)
    timing, rows, stuck = run_case(case)
    assert (rows, stuck) == (expected.rows, expected.stuck)
    if stuck:
        return
    assert timing.cycles == expected.cycles
    assert accounts(timing) == expected.units
    assert len(rows) == row_count(case.machine, case.batches)
    if expected.peaks:
        assert timing.ledger.core_peak == expected.peaks


@settings(max_examples=220, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="dataflow"))
def test_dataflow_equals_the_cycle_by_cycle_reference(case):
    check_against_the_reference(case)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="dataflow", pipeline__memory="enforce"))
def test_enforced_memory_equals_the_cycle_by_cycle_reference(case):
    check_against_the_reference(case)


CROWDED = {
    "pipeline__timing": "dataflow",
    "pipeline__memory": "enforce",
    "pipeline__credits": "unbounded",
    "pipeline__priority": "forward",
    "core__units": "split",
    "fabric__link_bytes_per_cycle": float("inf"),
}
"""Much that wants the room that a forward frees, in the very cycle."""


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, **CROWDED), st.integers(0, 20))
def test_room_that_is_freed_goes_first_to_the_core_itself_as_in_the_reference(case, more):
    check_against_the_reference(replace(case, samples=case.samples + more))


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="dataflow", core__units="split", pipeline__output_slots=1))
def test_split_units_that_share_one_output_slot_equal_the_reference(case):
    check_against_the_reference(case)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__timing="lockstep"))
def test_lockstep_equals_the_cycle_by_cycle_reference(case):
    check_against_the_reference(case)


def test_in_lockstep_no_core_misses_a_step_that_ends_with_its_own_last_operation():
    # A free fabric and host: the step is as long as the slowest core computes. That one ends with a Bw and a U of no
    # cycles (it has no parameters), in the very cycle in which the next step begins.
    made = machine(chain(3))
    for slowest in range(3):
        cycles = [(1, min(stage, 1), 1, 1) for stage in range(3)]
        cycles[slowest] = (3, 2, 0, 0)
        for units in ("shared", "split"):
            made = with_cycles(machine(chain(3), core__units=units), cycles)
            check_against_the_reference(Case(chain(3), made, 5))


def test_two_stages_by_hand():
    # F takes 2, Bx 1, Bw 1, U 1; a message of 4 bytes takes 2 cycles on a link of 2 bytes per cycle, plus 1
    # per hop; the host takes 1 cycle for a sample of 4 bytes. One credit: a sample at a time.
    net = chain(2, elements=2)
    made = machine(
        net,
        pipeline__timing="dataflow",
        pipeline__credits=1,
        fabric__link_bytes_per_cycle=2,
        fabric__hop_cycles=1,
        host__bytes_per_cycle=4,
    )
    timing, chunks = run_pipeline(with_cycles(made, [(2, 0, 1, 1), (2, 1, 1, 1)]), Batches(2))
    assert str(Trace.concatenate(*(chunk.rows for chunk in chunks))).splitlines() == [
        "0load0@-1 [0, 1)",
        "0F0@0 [1, 3)",
        "0load1@-1 [1, 2)",  # the slot is free once F has begun
        "0send0>1 [3, 6)",  # 2 cycles on the link, 1 of hop
        "1F0@0 [6, 8)",
        "1I0@0 [8, 9)",
        "1W0@0 [9, 10)",
        "1send0>0 [9, 12)",  # leaves at the end of Bx
        "1U0@1 [10, 11)",
        "0I0@0 [12, 12)",  # no input gradient at the first stage
        "0W0@0 [12, 13)",
        "0U0@1 [13, 14)",
        "0F1@1 [14, 16)",  # the only credit is back
        "0send1>1 [16, 19)",
        "1F1@1 [19, 21)",
        "1I1@1 [21, 22)",
        "1W1@1 [22, 23)",
        "1send1>0 [22, 25)",
        "1U1@2 [23, 24)",
        "0I1@1 [25, 25)",
        "0W1@1 [25, 26)",
        "0U1@2 [26, 27)",
    ]
    assert timing.cycles == 27
    assert accounts(timing) == {
        # waits for the host [0, 1) before its first operation; for the credit of sample 1, which has been in
        # the input slot from cycle 2, in [3, 12); for the last gradient in [16, 25)
        (0, "shared"): {
            "idle": 1, "forward": 4, "weight_gradient": 2, "update": 2, "stall_memory": 9, "stall_input": 9
        },
        # idle before [6, ...) and after 24; waits for sample 1 in [11, 19)
        (1, "shared"): {
            "idle": 9, "forward": 4, "input_gradient": 2, "weight_gradient": 2, "update": 2, "stall_input": 8
        },
    }  # fmt: skip


# --- closed forms ---------------------------------------------------------------------------------

STEP = 6  # cycles of a step of lockstep_ideal: F 3, Bx, Bw and U 1 each


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.integers(1, 20))
def test_lockstep_ideal_has_the_delays_of_the_papers(stages, samples):
    # forward of sample i at stage s reads the version max(0, i - 2(S-1-s)), hence a delay of min(i, 2(S-1-s))
    timing, rows = run(machine(chain(stages)), samples)
    for stage in range(stages):
        nominal = 2 * (stages - 1 - stage)
        assert delays(rows, stage) == [min(i, nominal) for i in range(samples)]
        read = sorted((sample, version) for *_, s, op, sample, version, _ in rows if (s, op) == (stage, F))
        assert read == [(i, max(0, i - nominal)) for i in range(samples)]
    assert timing.step_cycles == STEP


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.integers(1, 20))
def test_lockstep_ideal_has_the_cycles_and_utilization_of_the_papers(stages, samples):
    # M samples pass S stages forward and S - 1 back: M + 2S - 2 steps, in M of which a core works
    timing, _ = run(machine(chain(stages)), samples)
    steps = samples + 2 * stages - 2
    assert timing.cycles == steps * STEP
    busy = sum(unit.busy for unit in timing.units)
    assert busy * steps == samples * timing.cycles * stages  # utilization M / (M + 2S - 2)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_lockstep_holds_as_many_samples_as_the_delay_and_one_more(stages):
    timing, _ = run(machine(chain(stages)), 4 * stages)
    assert timing.peak_in_flight == [2 * (stages - 1 - s) + 1 for s in range(stages)]
    assert sum(timing.peak_in_flight) == stages**2
    for core, peak in zip(timing.machine.cores, timing.ledger.peak, strict=True):
        assert peak[Category.STASH] == timing.peak_in_flight[core.stage] * core.memory.stash


@pytest.mark.parametrize("timing", ["lockstep", "dataflow"])
def test_weight_stashing_holds_a_version_for_the_delay_and_one_more(timing):
    rule = UpdateRule(RECIPE, stash_weights=True)
    run_, rows = run(machine(chain(4), rule=rule, pipeline__timing=timing), 40)
    for stage, core in enumerate(run_.machine.cores):
        most = max(delays(rows, stage))
        assert run_.ledger.peak[stage][Category.WEIGHT_VERSIONS] == (most + 1) * core.memory.weights
        if timing == "lockstep":
            assert most == 2 * (3 - stage)


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_credits_of_1f1b_halve_the_delay_at_the_same_throughput(stages):
    # equal stages, one shared unit, a free fabric
    found = {}
    for credits in ("1f1b", "lockstep"):
        made = machine(chain(stages), pipeline__timing="dataflow", pipeline__credits=credits)
        timing, found[credits] = run(made, 12 * stages)
        assert period(found[credits]) == STEP  # every core computes all the time
        assert timing.cycles < (12 * stages + 2 * stages) * STEP
    for stage in range(stages):
        steady = delays(found["1f1b"], stage)[2 * stages : -2 * stages]
        assert set(steady) == {stages - 1 - stage}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_the_slowest_stage_sets_the_period_where_credits_suffice(forward):
    # a shared unit of stage s works F + Bx + Bw + U = 2 f per sample
    cycles = [(f, f, 0, 0) if s else (f, 0, 0, f) for s, f in enumerate(forward)]
    made = machine(chain(len(forward)), pipeline__timing="dataflow", pipeline__credits=20)
    _, rows = run(with_cycles(made, cycles), 60)
    assert period(rows) == pytest.approx(2 * max(forward), rel=0.05)


def test_the_narrowest_link_sets_the_period_where_cores_are_fast():
    # stage 2 makes 20 elements = 40 bytes: 20 cycles on a link of 2 bytes per cycle, in each direction; a
    # core computes for 6 cycles
    made = machine(
        chain(4, elements=[4, 4, 4, 20, 4]), pipeline__timing="dataflow", pipeline__credits=20,
        fabric__link_bytes_per_cycle=2,
    )  # fmt: skip
    timing, rows = run(made, 60)
    assert period(rows, stage=3) == 20
    assert max(timing.links.busy_cycles) == 60 * 20
    assert 60 * 20 <= timing.cycles < 64 * 20  # the bound, and a fill and drain of 54 cycles


def test_the_sram_sets_the_period_where_it_is_slow():
    # A PE of 2 bytes per cycle. F, Bx and Bw move 100 + 100 values and 8 weights of 2 bytes: 208 cycles, more than the
    # 16 of 64 MACs; then 8 elementwise steps on 4 lanes, and a cycle of overhead for either: 212. U moves 5 * 8 values:
    # 40 cycles, and 1 of overhead.
    made = machine(
        chain(3, elements=100),
        "mesh",
        core__pes=1,
        core__sram_bytes_per_cycle=2,
        pipeline__allocation="uniform",
        fabric__link_bytes_per_cycle=float("inf"),
    )
    assert [core.cycles.interval(split=False) for core in made.cores] == [2 * 212 + 41, *2 * [3 * 212 + 41]]
    _, rows = run(made, 60)
    assert period(rows) == 3 * 212 + 41


def test_the_host_sets_the_period_where_it_is_slow():
    made = machine(chain(2, elements=10), pipeline__timing="dataflow", host__bytes_per_cycle=0.5)
    _, rows = run(made, 30)
    assert period(rows) == 40  # 20 bytes


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(pipeline__timing="dataflow"))
def test_credits_are_never_exceeded(case):
    timing, rows = run(case.machine, case.samples)
    for core in case.machine.cores:
        begun = [start for start, _, s, op, *_ in rows if (s, op) == (core.stage, F)]
        ended = ends(rows, core.stage, U)
        held = max(sum(b <= at for b in begun) - sum(e <= at for e in ended) for at in begun)
        assert held == timing.peak_in_flight[core.stage]
        assert core.credits is None or held <= core.credits


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(
    cases(pipeline__timing="lockstep"),
    st.sampled_from(["link", "hop", "host", "core"]),
)
def test_in_lockstep_a_faster_machine_is_never_slower(case, what):
    # chains only: where messages contend, one that comes earlier can hold up another (an anomaly of any list
    # scheduling)
    assume(all(channel.target == channel.source + 1 for channel in case.machine.channels))
    before, _ = run(case.machine, case.samples)
    after, _ = run(faster(case.machine, what), case.samples)
    assert after.cycles <= before.cycles


def faster(machine: Machine, what: str) -> Machine:
    """The same machine with twice the links or host, no hop latency, or every F cut to a cycle."""
    if what == "host":
        return replace(machine, host_cycles=-(-machine.host_cycles // 2))
    if what == "core":
        cycles = (core.cycles for core in machine.cores)
        counts = [(1, c.input_gradient.total, c.weight_gradient.total, c.update.total) for c in cycles]
        return with_cycles(machine, counts)

    def eased(route: Route) -> Route:
        if what == "hop":
            return replace(route, offsets=(0,) * len(route.links), latency=0)
        return replace(route, serialisation=-(-route.serialisation // 2))

    channels = (replace(c, forward=eased(c.forward), gradient=eased(c.gradient)) for c in machine.channels)
    return replace(machine, channels=tuple(channels))


# --- the stream -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(), st.integers(1, 40))
def test_chunks_of_any_size_hold_the_same_rows_and_keep_their_promise(case, chunk_rows):
    whole, rows = run(case.machine, case.samples)
    timing, stream = run_pipeline(case.machine, case.batches, chunk_rows)
    chunks = list(stream)
    assert rows_of(Trace.concatenate(*(chunk.rows for chunk in chunks))) == rows
    assert (timing.cycles, accounts(timing)) == (whole.cycles, accounts(whole))
    for earlier, later in pairwise(chunks):
        assert earlier.until <= later.until
    until = 0
    for chunk in chunks:
        assert not len(chunk.rows) or chunk.rows.start.min() >= until
        until = chunk.until
    assert until > max(start for start, *_ in rows)


def test_a_machine_that_cannot_proceed_names_the_core_that_holds_it():
    made = machine(chain(3), pipeline__timing="dataflow")
    stuck = replace(made.cores[1], credits=0)
    made = replace(made, cores=(made.cores[0], stuck, made.cores[2]))
    with pytest.raises(DeadlockError) as caught:
        run(made, 4)
    messages = str(caught.value).splitlines()
    assert messages[1] == (
        "schedule: core 1: deadlock: the forward of sample 0 waits for one of 0 credits (0 in flight, 0 done)"
    )
    assert "core 0: deadlock: waits for the gradient of sample 0" in messages[0]
    assert "core 2: deadlock: waits for the activation of sample 0" in messages[2]


def test_a_machine_whose_messages_cannot_leave_names_the_slot():
    made = machine(chain(2), pipeline__timing="dataflow", fabric__link_bytes_per_cycle=4)
    pipeline = made.hardware.pipeline.model_copy(update={"output_slots": 0})
    made = replace(made, hardware=made.hardware.model_copy(update={"pipeline": pipeline}))
    with pytest.raises(DeadlockError, match="core 0: deadlock: sample 0 waits for a slot of the output buffer"):
        run(made, 2)


def crowded(spare: int) -> Machine:
    """Three stages without credits, whose middle core holds one sample and `spare` bytes more."""
    made = machine(
        chain(3, elements=4),
        pipeline__timing="dataflow",
        pipeline__memory="enforce",
        pipeline__credits="unbounded",
        fabric__link_bytes_per_cycle=4,
    )
    return with_spare_bytes(made, [100, spare, 100])


def test_younger_inputs_that_take_the_room_of_the_oldest_gradient_are_a_named_deadlock():
    # core 1 takes in samples (8 bytes each) until nothing is left for the gradient of sample 0's weights (16 bytes)
    # and for the gradients that core 2 has made
    with pytest.raises(DeadlockError) as caught:
        run(crowded(0), 6)
    of_core = dict(enumerate(str(caught.value).splitlines()))
    assert "core 0: deadlock: waits for the gradient of sample 0 (6 in flight" in of_core[0]
    assert "core 1: deadlock: sample 4 waits for 8 bytes (0 free) of the output buffer" in of_core[1]
    assert "the backward of sample 0 waits for 16 bytes (0 free) (5 in flight" in of_core[1]
    assert "core 2: deadlock: sample 3 waits for a slot of the output buffer, to leave for stage 1" in of_core[2]
    assert "a message of sample 1 waits for 8 bytes of the input buffer of core 1 (0 free)" in of_core[2]


def test_a_little_more_memory_or_a_credit_resolves_it():
    timing, _ = run(crowded(16), 6)
    assert timing.ledger.core_peak[1] <= timing.machine.cores[1].memory.capacity
    made = crowded(0)
    timing, _ = run(replace(made, cores=tuple(replace(core, credits=1) for core in made.cores)), 6)
    assert timing.peak_in_flight == [1, 1, 1]


def test_lockstep_refuses_a_machine_whose_enforced_memory_is_too_small():
    made = machine(chain(3), pipeline__memory="enforce")
    needed = run(made, 6)[0].ledger.core_peak[0]
    small = replace(made.cores[0], memory=replace(made.cores[0].memory, capacity=needed - 3))
    with pytest.raises(
        UserError, match=rf"core 0 \(layer0\): has {needed - 3} bytes of SRAM and needs {needed}, 3 more"
    ):
        run(replace(made, cores=(small, *made.cores[1:])), 6)


F0, F1, B0, B1 = (Op.FORWARD, 0), (Op.FORWARD, 1), (Op.INPUT_GRADIENT, 0), (Op.INPUT_GRADIENT, 1)


def run_in_order(orders: list[list[tuple[Op, int]]]) -> list[Row]:
    made = machine(chain(len(orders)), pipeline__timing="dataflow", pipeline__credits="unbounded")
    _, chunks = run_pipeline(made, Batches(2), orders=orders)
    return rows_of(Trace.concatenate(*(chunk.rows for chunk in chunks)))


def test_stages_run_in_an_order_made_by_hand():
    rows = run_in_order([[F0, F1, B1, B0], [F1, F0, B1, B0]])
    for stage, order in enumerate([[F, F, BX, BX], [F, F, BX, BX]]):
        ran = [(op, sample) for _, _, s, op, sample, *_ in rows if s == stage and op in (F, BX)]
        assert ran == list(zip(order, [[0, 1, 1, 0], [1, 0, 1, 0]][stage], strict=True))


def test_a_crossed_order_is_a_deadlock_that_names_every_core():
    # core 0 wants the gradient of sample 0 before it forwards sample 1; core 1 wants sample 1 before that gradient
    with pytest.raises(DeadlockError) as caught:
        run_in_order([[F0, B0, F1, B1], [F0, F1, B0, B1]])
    first, second = str(caught.value).splitlines()
    assert "core 0: deadlock: its order has input_gradient of sample 0 next, and waits for the gradient" in first
    assert "core 1: deadlock: its order has forward of sample 1 next, and waits for the activation" in second


# --- fill and drain -------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "batch"), [(1, 4), (4, 1), (4, 8), (6, 32)])
def test_fill_and_drain_in_lockstep_takes_n_plus_2s_minus_2_steps_per_batch(stages, batch):
    # lockstep_ideal: F = 3, Bx = Bw = U = 1 in steps of 6; each stage is busy in N of the N + 2S - 2 slots of a batch,
    # and all of a slot except for U, which comes once: utilization N / (N + 2S - 2), less the missing updates
    timing, _ = run_batches(machine(chain(stages)), Batches(5 * batch, batch, drained=True))
    steps = batch + 2 * stages - 2
    assert timing.cycles == 5 * steps * 6
    for unit in timing.units:
        assert unit.forward == 3 * 5 * batch
        assert unit.busy + 5 * (batch - 1) == Fraction(batch, steps) * timing.cycles


@pytest.mark.parametrize("credits", ["unbounded", "lockstep", "1f1b"])
@pytest.mark.parametrize(("stages", "batch"), [(1, 4), (4, 8), (6, 32)])
def test_fill_and_drain_in_dataflow_is_busy_n_of_n_plus_s_minus_1(stages, batch, credits):
    # A shared unit, equal stages, a free fabric. The first F reaches the last stage after (S-1) F, that works without
    # a pause for N (F + Bx + Bw) + U, and the last gradient needs (S-1) Bx back to stage 0, whose Bw and U are the
    # last stage's own length later: per batch N (F + Bx + Bw) + U + (S-1) (F + Bx).
    for forward, input_gradient, weight_gradient, update in [(5, 2, 3, 1), (1000, 998, 1, 1)]:
        cycles = [(forward, input_gradient, weight_gradient, update)] * stages
        made = machine(chain(stages), pipeline__timing="dataflow", pipeline__credits=credits)
        timing, _ = run_batches(with_cycles(made, cycles), Batches(3 * batch, batch, drained=True))
        busy = batch * (forward + input_gradient + weight_gradient) + update
        assert timing.cycles == 3 * (busy + (stages - 1) * (forward + input_gradient))
        assert all(unit.busy == 3 * busy for unit in timing.units)
    # where F = B and a gradient leaves at the end of all of B, that is N / (N + S - 1)
    assert busy * 3 / timing.cycles == pytest.approx(batch / (batch + stages - 1), rel=1e-3)


def test_batches_end_with_the_epoch_and_with_the_run():
    # epochs of 5 samples in batches of 2: 2 + 2 + 1, 2 + 2 + 1, and 1 left of the run
    batches = Batches(11, 2, drained=True, epoch_samples=5)
    timing, rows = run_batches(machine(chain(2)), batches)
    updates = [(sample, version) for _, _, s, op, sample, version, _ in rows if (s, op) == (0, U)]
    assert updates == [(0, 1), (2, 2), (4, 3), (5, 4), (7, 5), (9, 6), (10, 7)]
    assert batches.count == 7
    assert [batches.lengths(np.arange(7)).tolist()] == [[2, 2, 1, 2, 2, 1, 1]]
    assert timing.step_cycles is not None
    assert timing.cycles == (11 + 7 * 2) * timing.step_cycles


def test_an_error_within_the_simulation_is_not_taken_for_a_deadlock(monkeypatch):
    def fail(core: DataflowCore, now: int, *, updated: bool) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(DataflowCore, "end_backward", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run(machine(chain(2), pipeline__timing="dataflow"), 3)


# --- memory ---------------------------------------------------------------------------------------


Moment = tuple[int, int]  # a cycle, and within it
ENDS, ARRIVES, BEGINS = 0, 1, 2


def highest(spans: list[tuple[Moment, Moment, int]]) -> int:
    """The highest level at the end of a cycle: what comes and goes within one does not count."""
    cycles = {begin[0] for begin, _, _ in spans}
    return max((sum(size for begin, end, size in spans if begin[0] <= at < end[0]) for at in cycles), default=0)


@pytest.mark.parametrize("timing", ["dataflow", "lockstep"])
@pytest.mark.parametrize("units", ["shared", "split"])
def test_memory_peaks_are_those_counted_from_the_rows(timing, units):
    # output slots enough, so that every result goes into the output buffer as soon as it is computed
    samples = 9
    made = machine(
        chain(4, elements=[3, 5, 2, 4, 1], skips=((0, 3),)),
        rule=UpdateRule(RECIPE, stash_weights=True, difference=1.0),
        pipeline__timing=timing, core__units=units, pipeline__output_slots=20,
        fabric__link_bytes_per_cycle=2, fabric__hop_cycles=1, host__bytes_per_cycle=2,
    )  # fmt: skip
    result, rows = run(made, samples)
    assert all(unit.stall_output == 0 for unit in result.units)
    held = [spans_by_category(made, rows, stage, samples, result.step_cycles) for stage in range(4)]
    permanent = []
    for core, spans in zip(made.cores, held, strict=True):
        peaks = result.ledger.peak[core.stage]
        always = [core.memory.weights, core.memory.momentum, core.memory.previous_weights]
        permanent.append(sum(always))
        assert peaks[: len(always)] == always
        for category, found in spans.items():
            assert peaks[category] == highest(found), (core.stage, category.label)
        together = [span for found in spans.values() for span in found]
        assert permanent[-1] + highest(together) == result.ledger.core_peak[core.stage]
    together = [span for spans in held for found in spans.values() for span in found]
    assert sum(permanent) + highest(together) == result.ledger.machine_peak
    assert not result.ledger.leftovers()


def spans_by_category(
    machine: Machine, rows: Sequence[Row], stage: int, samples: int, step: int | None
) -> dict[Category, list[tuple[Moment, Moment, int]]]:
    """From when to when a core holds how many bytes, for everything that comes and goes."""
    begins = {(s, op, i, to): (start, BEGINS) for start, _, s, op, i, _, to in rows}
    finishes = {(s, op, i, to): end for _, end, s, op, i, _, to in rows}
    memory = machine.cores[stage].memory
    spans: dict[Category, list[tuple[Moment, Moment, int]]] = {
        category: [] for category in Category if category >= Category.WEIGHT_VERSIONS
    }

    def boundary(cycle: int) -> int:
        """When something that ends at a cycle takes effect: in lockstep at the end of the step."""
        return cycle if step is None else -(-cycle // step) * step

    def sent(source: int, op: int, sample: int, target: int, serialisation: int) -> tuple[Moment, Moment]:
        """A message's time in the output buffer; in lockstep from when all are sent to the step's end."""
        start, _ = begins[source, SEND, sample, target]
        if step is not None:
            compute = min(begin % step for (_, o, *_), (begin, _) in begins.items() if o == SEND)
            return (start - start % step + compute, ARRIVES), (boundary(start + 1), ENDS)
        return (finishes[source, op, sample, -1], ARRIVES), (start + serialisation, ENDS)

    for i in range(samples):
        forward, update = begins[stage, F, i, -1], (finishes[stage, U, i, -1], ENDS)
        spans[Category.STASH].append((forward, update, memory.stash))
        spans[Category.WEIGHT_VERSIONS].append((forward, update, memory.weight_versions))
        spans[Category.GRADIENTS].append((begins[stage, BW, i, -1], update, memory.gradients))
        if stage == 0:
            loaded = (boundary(finishes[0, LOAD, i, -1]), ARRIVES)
            spans[Category.INPUT_BUFFER].append((loaded, forward, machine.host_bytes))
        for c in machine.channels:
            if c.target == stage:
                arrival = (boundary(finishes[c.source, SEND, i, stage]), ARRIVES)
                spans[Category.INPUT_BUFFER].append((arrival, forward, c.forward.size))
                buffered = sent(stage, BX, i, c.source, c.gradient.serialisation)
                spans[Category.OUTPUT_BUFFER].append((*buffered, c.gradient.size))
            if c.source == stage:
                arrival = (boundary(finishes[c.target, SEND, i, stage]), ARRIVES)
                spans[Category.INPUT_BUFFER].append((arrival, update, c.gradient.size))
                buffered = sent(stage, F, i, c.target, c.forward.serialisation)
                spans[Category.OUTPUT_BUFFER].append((*buffered, c.forward.size))
    return spans


def test_the_ledger_reports_what_is_left_over():
    made = machine(chain(2))
    ledger = Ledger(made)
    assert ledger.leftovers() == []
    ledger.add(0, 1, Category.STASH, 8)
    ledger.add(0, 0, Category.GRADIENTS, -4)
    assert ledger.leftovers() == [(0, Category.GRADIENTS, -4), (1, Category.STASH, 8)]


# --- the order of the numbers ---------------------------------------------------------------------


def ordered(
    chunks: Sequence[Chunk],
    stages: int,
    rule: UpdateRule | None = None,
    nominal: bool = False,
    batches: Batches | None = None,
) -> list[Order]:
    lr = LearningRate(RECIPE, 100, 100, 0.0, ConstantDecay(kind="constant"))
    return list(orders(chunks, rule or UpdateRule(RECIPE), lr, Horizon(stages, nominal), batches or Batches(100)))


def operations(pieces: Sequence[Order]) -> list[tuple[int, int, int, int, int]]:
    columns = ("kind", "stage", "sample", "cycle", "delay")
    return [row for piece in pieces for row in zip(*(getattr(piece, name).tolist() for name in columns), strict=True)]


def hand_written() -> Trace:
    """One stage: U of sample 0 ends at cycle 5, when F of sample 2 starts; F of sample 1 starts at 4."""
    rows = [
        (0, 2, 0, F, 0, 0, -1),
        (2, 3, 0, BX, 0, 0, -1),
        (3, 4, 0, BW, 0, 0, -1),
        (4, 5, 0, U, 0, 1, -1),
        (4, 6, 0, F, 1, 0, -1),
        (5, 7, 0, F, 2, 1, -1),
        (6, 7, 0, BX, 1, 1, -1),
        (7, 8, 0, BW, 1, 1, -1),
        (8, 9, 0, U, 1, 2, -1),
        (9, 10, 0, BX, 2, 2, -1),
        (10, 11, 0, BW, 2, 2, -1),
        (11, 12, 0, U, 2, 3, -1),
    ]
    return Trace.of([value for row in rows for value in row])


def test_a_write_at_a_cycle_comes_before_a_read_at_that_cycle():
    pieces = ordered([Chunk(hand_written(), 13)], 1)
    assert operations(pieces) == [
        (FORWARD, 0, 0, 0, 0),
        (BACKWARD, 0, 0, 2, -1),
        (FORWARD, 0, 1, 4, 1),  # reads version 0, its update makes version 2
        (UPDATE, 0, 0, 5, 0),  # before the forward that starts as it ends
        (FORWARD, 0, 2, 5, 1),
        (BACKWARD, 0, 1, 6, -1),
        (UPDATE, 0, 1, 9, 1),
        (BACKWARD, 0, 2, 9, -1),
        (UPDATE, 0, 2, 12, 1),
    ]


def test_forwards_of_unknown_delay_hold_the_order_back():
    trace = hand_written()
    first, rest = trace[trace.start < 6], trace[trace.start >= 6]
    pieces = ordered([Chunk(first, 6), Chunk(rest, 13)], 1)
    assert operations(pieces[:1]) == [
        (FORWARD, 0, 0, 0, 0),
        (BACKWARD, 0, 0, 2, -1),
    ]  # F of sample 1 has no update yet
    assert operations(pieces) == operations(ordered([Chunk(trace, 13)], 1))


def test_a_trace_that_ends_too_early_is_refused():
    trace = hand_written()
    with pytest.raises(RuntimeError, match="cannot be ordered"):
        ordered([Chunk(trace[trace.op != U], 13)], 1)


def test_coefficients_follow_the_measured_delay_or_the_nominal_one():
    rule = UpdateRule(RECIPE, spike=1.0, velocity=1.0)
    measured, nominal = (ordered([Chunk(hand_written(), 13)], 1, rule, nominal=choice)[0] for choice in (False, True))
    forwards = measured.kind == FORWARD
    np.testing.assert_allclose(measured.coefficients.velocity_prediction[forwards], [0.0, 0.1, 0.1])  # lr D
    updates = measured.kind == UPDATE
    np.testing.assert_allclose(measured.coefficients.a[updates], [1.0, 0.9, 0.9])  # m^D
    np.testing.assert_allclose(nominal.coefficients.a[updates], [1.0, 1.0, 1.0])  # 2(S-1-s) = 0 for a single stage


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__memory="report"), st.integers(1, 200))
def test_every_read_sees_exactly_as_many_updates_as_its_version(case, chunk_rows):
    _, stream = run_pipeline(case.machine, case.batches, chunk_rows)
    chunks = list(stream)
    rows = rows_of(Trace.concatenate(*(chunk.rows for chunk in chunks)))
    version = {(s, op, sample): v for _, _, s, op, sample, v, _ in rows}
    updates = [0] * case.machine.stages
    batches = case.batches
    pieces = ordered(chunks, case.machine.stages, batches=batches)
    operations_in_order = operations(pieces)
    for kind, stage, sample, _, delay in operations_in_order:
        if kind == UPDATE:
            updates[stage] += 1
            assert version[stage, U, sample] == updates[stage]
        else:
            if kind == FORWARD or not case.machine.stash_weights:
                assert version[stage, F if kind == FORWARD else BX, sample] == updates[stage]
            else:  # stashed weights are of the version that the forward read
                assert version[stage, BX, sample] == version[stage, F, sample]
        if kind != BACKWARD:
            named = batches.first(batches.index(sample))
            assert delay == version[stage, U, named] - 1 - version[stage, F, sample]
            assert delay == 0 or not batches.drained
    assert len(operations_in_order) == case.machine.stages * (2 * case.samples + batches.count)
    for batch in range(batches.count):
        members = range(batches.first(batch), batches.end(batch))
        weights = [
            piece.weight[(piece.kind == BACKWARD) & (piece.stage == 0) & np.isin(piece.sample, members)]
            for piece in pieces
        ]
        np.testing.assert_array_equal(np.concatenate(weights), 1 / len(members))
    cycles = [cycle for *_, cycle, _ in operations_in_order]
    assert cycles == sorted(cycles)
