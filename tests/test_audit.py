"""The audit passes on what the machine does, and names what is wrong with a trace or books tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Case, cases, chain, machine, with_cycles

from pbsim.hardware import Machine
from pbsim.hardware.memory import Category
from pbsim.network.network import Work
from pbsim.results.audit import Audit, AuditError, Bounds, audited
from pbsim.results.records import MalformedTraceError, Recorder
from pbsim.schedule import Batches, Chunk, Op, Timing, Trace, run_pipeline
from pbsim.schedule.trace import COLUMNS

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
SAMPLES = 8
STAGES = 4

Books = Callable[[Timing], None]
Rows = Callable[[Trace], Trace]


def case(**changes: object) -> Case:
    """Four unequal stages with a skip edge, whose links and host take time."""
    keys = {
        "pipeline__timing": "dataflow",
        "fabric__link_bytes_per_cycle": 2,
        "fabric__hop_cycles": 1,
        "host__bytes_per_cycle": 4,
    }
    net = chain(STAGES, elements=[3, 5, 2, 4, 1], skips=((0, 3),))
    made = machine(net, **(keys | changes))
    return Case(net, with_cycles(made, [(3, 0, 2, 1), (4, 2, 2, 1), (2, 1, 1, 1), (3, 2, 1, 2)]), SAMPLES)


def drained(**changes: object) -> Case:
    """The same in epochs of 5 samples and batches of 3: samples 0 to 2, 3 and 4, 5 to 7."""
    return replace(case(**changes), batch=3, epoch=5)


@dataclass(frozen=True)
class Ran:
    """A run whose trace and books can be tampered with before the audit sees them."""

    case: Case
    timing: Timing
    chunks: list[Chunk]

    def audit(self, rows: Rows | None = None, books: Books | None = None) -> Bounds:
        """Audit the run, the whole trace in one chunk if it is tampered with."""
        chunks = self.chunks
        if rows is not None:
            whole = Trace.concatenate(*(chunk.rows for chunk in chunks))
            chunks = [Chunk(rows(whole), chunks[-1].until)]
        if books is not None:
            books(self.timing)
        audit = Audit(self.case.machine, self.case.net, self.timing)
        for _ in audited(chunks, audit):
            pass
        return audit.finish()


def ran(made: Case, chunk_rows: int = 50_000) -> Ran:
    timing, chunks = run_pipeline(made.machine, made.batches, chunk_rows)
    return Ran(made, timing, list(chunks))


def of(stage: int, op: Op, sample: int, target: int | None = None) -> Callable[[Trace], np.ndarray]:
    """The rows of an operation."""

    def chosen(rows: Trace) -> np.ndarray:
        found = (rows.stage == stage) & (rows.op == op) & (rows.sample == sample)
        found = found if target is None else found & (rows.target == target)
        assert found.sum() == 1
        return found

    return chosen


def changed(where: Callable[[Trace], np.ndarray], **amounts: int) -> Rows:
    """Add amounts to columns of some rows."""

    def tamper(rows: Trace) -> Trace:
        chosen = where(rows)
        table = {name: getattr(rows, name).copy() for name in COLUMNS}
        for name, amount in amounts.items():
            table[name][chosen] += amount
        return Trace(**table)

    return tamper


def moved(where: Callable[[Trace], np.ndarray], cycles: int) -> Rows:
    return changed(where, start=cycles, end=cycles)


def onto(where: Callable[[Trace], np.ndarray], other: Callable[[Trace], np.ndarray]) -> Rows:
    """Move a row to where another starts."""

    def tamper(rows: Trace) -> Trace:
        cycles = int(rows.start[other(rows)][0] - rows.start[where(rows)][0])
        return moved(where, cycles)(rows)

    return tamper


def without(where: Callable[[Trace], np.ndarray]) -> Rows:
    return lambda rows: rows[~where(rows)]


def twice(where: Callable[[Trace], np.ndarray]) -> Rows:
    return lambda rows: Trace.concatenate(rows, rows[where(rows)])


def both(*changes: Rows) -> Rows:
    def tamper(rows: Trace) -> Trace:
        for change in changes:
            rows = change(rows)
        return rows

    return tamper


# --- what must pass ------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(cases(every=True, pipeline__memory="report"), st.integers(1, 300))
def test_every_run_passes_in_chunks_of_any_size(made, chunk_rows):
    found = ran(made, chunk_rows)
    bounds = found.audit()
    assert found.timing.cycles >= max(bounds.compute, bounds.link, bounds.host)


@pytest.mark.parametrize("timing", ["dataflow", "lockstep"])
@pytest.mark.parametrize("units", ["shared", "split"])
@pytest.mark.parametrize("build", [case, drained])
def test_the_run_that_is_tampered_with_passes_as_it_is(timing, units, build):
    found = ran(build(pipeline__timing=timing, core__units=units))
    found.audit(rows=lambda rows: rows)


@pytest.mark.parametrize("timing", ["dataflow", "lockstep"])
def test_a_first_stage_with_nothing_to_train_reads_the_version_before_its_update(timing):
    net = chain(2)
    first = replace(net.stages[0], operators=(), parameters=(), parameter_elements=0, work=Work())
    net = replace(net, stages=(first, net.stages[1]))
    made = machine(net, "mesh", pipeline__timing=timing)
    cycles = made.cores[0].cycles
    assert cycles.input_gradient.total == 1
    assert cycles.weight_gradient.total == cycles.update.total == 0
    ran(Case(net, made, 3)).audit()


def test_bounds_are_those_of_the_busiest_core_link_and_the_host():
    made = case()
    bounds = ran(made).audit()
    assert bounds.compute == SAMPLES * 9  # stage 1: 4 + 2 + 2 + 1
    # link 0>1 and back: 5 elements = 10 bytes = 5 cycles to stage 1, and as many to stage 3
    assert bounds.link == SAMPLES * 10
    assert bounds.host == (SAMPLES - 1) * 2  # 3 elements = 6 bytes at 4 per cycle; the first has no one before it


@pytest.mark.parametrize(
    ("units", "cycles"),
    [
        ("shared", 8 * (4 + 2 + 2) + 3 * 1),  # stage 1: F, Bx and Bw of 8 samples, U of 3 batches
        ("split", 8 * (2 + 2) + 3 * 1),  # its backward unit, 35; the forward unit has 8 * 4
    ],
)
def test_the_compute_bound_counts_an_update_per_batch(units, cycles):
    assert ran(drained(core__units=units)).audit().compute == cycles


def test_records_of_a_batch_share_its_update_and_have_no_delay():
    made = drained()
    timing, chunks = run_pipeline(made.machine, made.batches, 20)
    audit = Audit(made.machine, made.net, timing)
    records = [record for _, record in audited(chunks, audit)]
    samples = np.concatenate([record.sample for record in records])
    np.testing.assert_array_equal(samples, np.arange(SAMPLES))
    version, end = (np.concatenate([getattr(record, name) for record in records]) for name in ("version", "end"))
    batch = np.repeat([0, 1, 2], [3, 2, 3])[:, None]
    np.testing.assert_array_equal(version[:, :, F], np.broadcast_to(batch, (SAMPLES, STAGES)))
    np.testing.assert_array_equal(version[:, :, U], np.broadcast_to(batch + 1, (SAMPLES, STAGES)))
    assert (end[0, :, U] == end[2, :, U]).all()
    assert (end[2, :, U] < end[3, :, U]).all()
    assert audit.delays.table() == [(0.0, 0, 0)] * STAGES


def test_records_are_complete_samples_with_their_delays():
    made = case(pipeline__timing="lockstep")
    timing, chunks = run_pipeline(made.machine, made.batches, 20)
    audit = Audit(made.machine, made.net, timing)
    records = [record for _, record in audited(chunks, audit)]
    samples = np.concatenate([record.sample for record in records])
    np.testing.assert_array_equal(samples, np.arange(SAMPLES))
    delay = np.concatenate([record.delay for record in records])
    nominal = np.array([6, 4, 2, 0])
    np.testing.assert_array_equal(delay, np.minimum(np.arange(SAMPLES)[:, None], nominal))
    # over forwards that read version 1 or later: sample 7 alone at stage 0
    assert audit.delays.table() == [(6.0, 6, 6), (4.0, 4, 4), (2.0, 2, 2), (0.0, 0, 0)]


def test_delays_of_a_run_too_short_to_read_an_update_are_over_all_samples():
    made = replace(case(pipeline__timing="lockstep"), samples=3)
    timing, chunks = run_pipeline(made.machine, made.batches)
    audit = Audit(made.machine, made.net, timing)
    for _ in audited(chunks, audit):
        pass
    assert audit.delays.table()[0] == (1.0, 0, 2)  # delays 0, 1, 2 at stage 0


def test_records_refuse_a_row_that_no_sample_should_have():
    made = case()
    rows = Trace.concatenate(*(chunk.rows for chunk in ran(made).chunks))
    recorder = Recorder(made.machine, made.batches)
    with pytest.raises(MalformedTraceError, match="exactly one row of each kind"):
        recorder.feed(changed(of(1, Op.WEIGHT_GRADIENT, 2), stage=1)(rows))


# --- a trace that was tampered with --------------------------------------------------------------------

F, BX, BW, U = Op.FORWARD, Op.INPUT_GRADIENT, Op.WEIGHT_GRADIENT, Op.UPDATE

TAMPERED = {
    "an operation that ends before it starts": (
        changed(of(1, F, 2), end=-100),
        "an operation ends before it starts",
    ),
    "an operation before the run": (moved(of(0, F, 0), -100), "an operation ends before it starts"),
    "an operation on top of another": (onto(of(1, F, 3), of(1, U, 0)), "a unit runs two operations at once"),
    "an operation of the wrong length": (changed(of(3, U, 7), end=1), "not the cycles of its core"),
    "a forward before its sample came": (
        moved(of(0, Op.LOAD, 7), 100),
        "a sample was forwarded before it came from the host",
    ),
    "an activation that leaves before it is computed": (
        moved(of(0, Op.SEND, 0, 1), -1),
        "an activation 0>1 leaves before it is computed",
    ),
    "an input that comes after its forward began": (
        moved(of(2, Op.SEND, 7, 3), 50),
        "stage 3 starts before its input from 2 arrived",
    ),
    "a skipping input that comes after its forward began": (
        moved(of(0, Op.SEND, 7, 3), 200),
        "stage 3 starts before its input from 0 arrived",
    ),
    "a gradient that leaves before it is computed": (
        moved(of(3, Op.SEND, 0, 0), -1),
        "a gradient 3>0 leaves before it is computed",
    ),
    "a gradient that comes after its backward began": (
        moved(of(3, Op.SEND, 7, 2), 50),
        "stage 2 starts Bx before the gradient of 3 arrived",
    ),
    "a message that takes too long": (changed(of(0, Op.SEND, 1, 1), end=1), "a message is early or late"),
    "a message that is too fast": (changed(of(0, Op.SEND, 1, 3), end=-1), "a message is early or late"),
    "a forward that reads a wrong version": (
        changed(of(1, F, 5), version=1),
        "stage 1 reads a version that is not there",
    ),
    "a backward that reads a wrong version": (
        both(changed(of(1, BX, 5), version=-1), changed(of(1, BW, 5), version=-1)),
        "stage 1 reads a version that is not there",
    ),
    "gradients of different versions": (
        changed(of(2, BW, 4), version=1),
        "Bx and Bw of a sample read different versions",
    ),
    "an update that makes a wrong version": (
        changed(of(2, U, 4), version=1),
        "stage 2 counts its updates wrongly",
    ),
    "a missing operation": (without(of(2, BW, 7)), r"samples \[7\] are incomplete"),
    "a missing message": (without(of(1, Op.SEND, 7, 0)), r"samples \[7\] are incomplete"),
    "a doubled update": (twice(of(3, U, 7)), "a unit runs two operations at once"),
    "a doubled load": (twice(of(0, Op.LOAD, 3)), r"samples \[3\] have too many rows"),
    "an operation in place of another": (
        # Bx of stage 0 takes no cycle and overlaps nothing
        both(without(of(1, Op.SEND, 3, 2)), twice(of(0, BX, 3))),
        "exactly one row of each kind",
    ),
}


@pytest.mark.parametrize("tampering", TAMPERED)
def test_a_tampered_trace_is_named(tampering):
    rows, message = TAMPERED[tampering]
    with pytest.raises(AuditError, match=message):
        ran(case()).audit(rows=rows)


def to(where: Callable[[Trace], np.ndarray], cycle: int) -> Rows:
    """Move a row to start at a cycle."""
    return lambda rows: moved(where, cycle - int(rows.start[where(rows)][0]))(rows)


TAMPERED_BATCH = {
    "an update under another sample of its batch": (
        changed(of(1, U, 3), sample=1),
        r"updates of samples \[4\], which are not the first of a batch",
    ),
    "an update of no batch": (changed(of(1, U, 5), sample=4), r"updates of samples \[9\], which are not the first"),
    "a missing update": (without(of(2, U, 5)), r"samples \[5 6 7\] are incomplete"),
    "a missing backward": (without(of(2, BW, 4)), r"samples \[4\] are incomplete"),
    "a doubled update": (twice(of(3, U, 5)), "a unit runs two operations at once"),
    "an update in place of another": (changed(of(2, U, 5), sample=-2), r"samples \[3 4\] have too many rows"),
    "an update of the wrong length": (changed(of(0, U, 5), end=1), "not the cycles of its core"),
    "an update before the last backward of its batch": (to(of(3, U, 0), 0), "U starts before Bw ended"),
    "a forward that reads a wrong version": (
        changed(of(1, F, 4), version=-1),
        "stage 1 reads a version that is not there",
    ),
    "a forward that does not wait for the update": (
        both(to(of(0, Op.LOAD, 3), 0), to(of(0, F, 3), 12)),
        "stage 0 reads a version that is not there",
    ),
    "an update that makes a wrong version": (changed(of(2, U, 3), version=1), "stage 2 counts its updates wrongly"),
}


@pytest.mark.parametrize("tampering", TAMPERED_BATCH)
def test_a_tampered_trace_of_batches_is_named(tampering):
    rows, message = TAMPERED_BATCH[tampering]
    with pytest.raises(AuditError, match=message):
        ran(drained()).audit(rows=rows)


def test_a_schedule_that_should_drain_and_does_not_is_found():
    # pipelined backpropagation at batch one is consistent in itself, but does not wait for its updates
    found = ran(case())
    found.timing.batches = Batches(SAMPLES, 1, drained=True)
    with pytest.raises(AuditError, match="a forward does not read what the update of the batch before has left"):
        found.audit()


def test_the_backward_unit_must_not_overlap_itself():
    with pytest.raises(AuditError, match="a unit runs two operations at once"):
        ran(case(core__units="split")).audit(rows=onto(of(1, BX, 3), of(1, BW, 2)))


def test_split_units_may_overlap_each_other_and_a_shared_one_may_not():
    found = ran(case(core__units="split", pipeline__credits="unbounded"))
    found.audit()
    shared = replace(found.case, machine=case(pipeline__credits="unbounded").machine)
    with pytest.raises(AuditError, match="a unit runs two operations at once"):
        replace(found, case=shared).audit()


def test_operations_that_overlap_across_chunks_are_found():
    found = ran(case(), chunk_rows=1)
    whole = Trace.concatenate(*(chunk.rows for chunk in found.chunks))
    chunk_of = {
        key: k
        for k, chunk in enumerate(found.chunks)
        for key in zip(chunk.rows.stage.tolist(), chunk.rows.op.tolist(), chunk.rows.sample.tolist(), strict=True)
    }
    stage, sample = next(
        (s, i) for s in range(4) for i in range(1, SAMPLES) if chunk_of[s, F, i] != chunk_of[s, U, i - 1]
    )
    cycles = int(whole.start[of(stage, U, sample - 1)(whole)][0] - whole.start[of(stage, F, sample)(whole)][0])
    k = chunk_of[stage, F, sample]
    found.chunks[k] = Chunk(moved(of(stage, F, sample), cycles)(found.chunks[k].rows), found.chunks[k].until)
    with pytest.raises(AuditError, match="a unit runs two operations at once"):
        found.audit()


@pytest.mark.parametrize(
    ("op", "cycles", "message"),
    [
        (BX, -7, "a backward starts before its forward ended"),
        (BW, -9, "Bw starts before Bx ended"),
        (U, -11, "U starts before Bw ended"),
    ],
)
def test_an_operation_before_the_one_it_needs_is_named(op, cycles, message):
    # of sample 0 at the last stage, whose unit has done nothing before
    with pytest.raises(AuditError, match=message):
        ran(case()).audit(rows=moved(of(3, op, 0), cycles))


def test_messages_that_overlap_on_a_link_are_found():
    # samples 0 and 1 pass the link 0>1 one behind the other, to stage 1 and to stage 3
    found = ran(case())
    rows = Trace.concatenate(*(chunk.rows for chunk in found.chunks))
    first = int(rows.start[of(0, Op.SEND, 0, 1)(rows)][0])
    second = int(rows.start[of(0, Op.SEND, 0, 3)(rows)][0])
    assert second == first + 5
    with pytest.raises(AuditError, match=r"link \(0, 1\) carries two messages at once"):
        found.audit(rows=moved(of(0, Op.SEND, 0, 3), -1))


def test_messages_that_overlap_on_a_link_across_chunks_are_found():
    found = ran(case(), chunk_rows=1)
    for k, chunk in enumerate(found.chunks):
        rows = chunk.rows
        chosen = (rows.op == Op.SEND) & (rows.stage == 0) & (rows.target == 3) & (rows.sample == 4)
        if chosen.any():
            found.chunks[k] = Chunk(moved(lambda _, chosen=chosen: chosen, -1)(rows), chunk.until)
    with pytest.raises(AuditError, match=r"link \(0, 1\) carries two messages at once"):
        found.audit()


def test_a_lockstep_delay_that_is_not_that_of_the_papers_is_found():
    # a dataflow run is consistent in itself, but not lockstep
    found = ran(case(pipeline__credits="1f1b"))
    found.timing.step_cycles = 20
    with pytest.raises(AuditError, match="a lockstep delay is not"):
        found.audit()


# --- books that were tampered with ---------------------------------------------------------------------


def booked(**amounts: int) -> Books:
    """Add amounts to fields of the account of core 1's first unit."""

    def tamper(timing: Timing) -> None:
        usage = next(usage for usage in timing.units if usage.core == 1)
        for name, amount in amounts.items():
            setattr(usage, name, getattr(usage, name) + amount)

    return tamper


def shortened(timing: Timing) -> None:
    timing.cycles -= 1


def lengthened(timing: Timing) -> None:
    timing.cycles += 1


def left_over(timing: Timing) -> None:
    timing.ledger.add(timing.cycles, 2, Category.STASH, 10)


def taken_away(timing: Timing) -> None:
    timing.ledger.add(timing.cycles, 2, Category.OUTPUT_BUFFER, -1)


def more_bytes(timing: Timing) -> None:
    timing.links.bytes[0] += 1


def less_busy(timing: Timing) -> None:
    timing.links.busy_cycles[3] -= 1


def more_samples(timing: Timing) -> None:
    timing.batches = Batches(timing.samples + 1)


COOKED = {
    "cycles that sum to more": (booked(idle=1), "cycles of core 1 do not sum to the run's"),
    "cycles that sum to less": (booked(stall_input=-1), "cycles of core 1 do not sum to the run's"),
    "forward booked as idle": (booked(forward=-1, idle=1), "core 1 books 31 cycles of forward"),
    "backward booked as forward": (booked(forward=2, input_gradient=-2), "core 1 books 34 cycles of forward"),
    "weight gradient booked as input gradient": (
        booked(input_gradient=1, weight_gradient=-1),
        "core 1 books 17 cycles of input_gradient",
    ),
    "update booked as weight gradient": (
        booked(weight_gradient=1, update=-1),
        "core 1 books 17 cycles of weight_gradient",
    ),
    "update booked as stall": (booked(update=-1, stall_output=1), "core 1 books 7 cycles of update"),
    "a negative count": (booked(idle=-1000, stall_input=1000), "core 1 has a negative count of cycles"),
    "a run that ends too early": (shortened, "an operation ends after the run"),
    "a run that ends too late": (lengthened, "do not sum to the run's"),
    "memory left over": (left_over, "memory is not empty after the drain: .*STASH"),
    "memory given back twice": (taken_away, "memory is not empty after the drain: .*OUTPUT_BUFFER"),
    "bytes that were not sent": (more_bytes, r"link \(0, 1\) booked"),
    "busy cycles that are missing": (less_busy, r"link \(2, 1\) booked"),
    "samples that did not run": (more_samples, "has not run every sample exactly once"),
}


@pytest.mark.parametrize("cooking", COOKED)
def test_cooked_books_are_named(cooking):
    books, message = COOKED[cooking]
    with pytest.raises(AuditError, match=message):
        ran(case()).audit(books=books)


def test_a_forward_booked_on_the_backward_unit_is_found():
    found = ran(case(core__units="split"))
    forward, backward = (usage for usage in found.timing.units if usage.core == 1)
    forward.forward, backward.forward = 0, forward.forward
    forward.idle += 32
    backward.idle -= 32
    with pytest.raises(AuditError, match="core 1 books 0 cycles of forward"):
        found.audit()


def held_too_many(timing: Timing) -> None:
    timing.peak_in_flight[1] += 1


def stashed_too_little(timing: Timing) -> None:
    timing.ledger.peak[1][Category.STASH] -= 1


@pytest.mark.parametrize("build", [case, drained])
def test_an_update_booked_as_stall_is_found(build):
    with pytest.raises(AuditError, match=r"core 1 books \d cycles of update"):
        ran(build()).audit(books=booked(update=-1, stall_input=1))


@pytest.mark.parametrize("timing", ["dataflow", "lockstep"])
@pytest.mark.parametrize("units", ["shared", "split"])
def test_samples_in_flight_of_a_batch_are_recounted(timing, units):
    found = ran(drained(pipeline__timing=timing, core__units=units))
    assert found.timing.peak_in_flight[:2] == [3, 3]  # a batch fits in the 7 and 5 credits of stages 0 and 1
    with pytest.raises(AuditError, match=r"samples in flight peaked at .3 3 . 1., booked .3, 4, ., 1."):
        found.audit(books=held_too_many)


def test_more_samples_of_a_batch_in_flight_than_credits_are_found():
    found = ran(drained())
    fewer = drained(pipeline__credits=2).machine
    with pytest.raises(AuditError, match="core 0 held 3 samples with 2 credits"):
        replace(found, case=replace(found.case, machine=fewer)).audit()


def test_a_lockstep_stash_that_holds_more_than_a_batch_is_found():
    def stashed_too_much(timing: Timing) -> None:
        timing.ledger.peak[0][Category.STASH] += 1

    with pytest.raises(AuditError, match="the stash of core 0 peaked at 19 bytes"):  # 3 samples of 6
        ran(drained(pipeline__timing="lockstep")).audit(books=stashed_too_much)


@pytest.mark.parametrize(
    ("books", "message"),
    [
        (held_too_many, "samples in flight peaked at .7 5 3 1., booked .7, 6, 3, 1."),
        (stashed_too_little, "the stash of core 1 peaked at 49 bytes"),
    ],
)
def test_a_lockstep_stash_that_is_not_that_of_the_papers_is_found(books, message):
    with pytest.raises(AuditError, match=message):
        ran(case(pipeline__timing="lockstep")).audit(books=books)


def test_macs_that_are_not_those_of_the_operators_are_found():
    made = case()
    stages = list(made.net.stages)
    stages[1] = replace(stages[1], work=stages[1].work + Work(macs_input_gradient=1))
    made = replace(made, net=replace(made.net, stages=tuple(stages)))
    with pytest.raises(AuditError, match="macs_input_gradient: 1544 simulated, 1536 by the model's shapes"):
        ran(made).audit()  # 8 samples of 3 times 64, and 8 more


@pytest.mark.parametrize(("resource", "changes"), [("host", {"host_cycles": 1000})])
def test_a_run_that_beats_a_bound_is_found(resource, changes):
    found = ran(case())
    slow = replace(found.case.machine, **changes)
    with pytest.raises(AuditError, match=f"beat a bound.*{resource}=7000"):
        replace(found, case=replace(found.case, machine=slow)).audit()


def other_route(made: Machine, **changes: object) -> Machine:
    """The machine with its first channel's forward route changed."""
    first, *rest = made.channels
    return replace(made, channels=(replace(first, forward=replace(first.forward, **changes)), *rest))


UNSOUND = {
    "links that do not follow each other": (
        lambda made: other_route(made, links=(0, 4), offsets=(0, 1), latency=2),
        r"route 0>1 does not lead there: its links pass nodes \[0, 1, 3\]",
    ),
    "links that lead back": (
        lambda made: other_route(made, links=(0, 1, 0), offsets=(0, 1, 2), latency=3),
        r"route 0>1 passes a node twice: \[0, 1, 0, 1\]",
    ),
    "a head that stands still": (
        lambda made: other_route(made, offsets=(1,), latency=1),
        r"route 0>1 takes its links at \(1,\), and arrives after 1 cycles",
    ),
    "a message that streams too fast": (
        lambda made: other_route(made, serialisation=4),
        r"route 0>1 puts 10 bytes on link \(0, 1\), which carries 8.0 meanwhile",
    ),
    "nodes that overlap": (
        lambda made: replace(made, nodes=(made.nodes[0], made.nodes[0], *made.nodes[2:])),
        "the nodes of the fabric overlap, or leave PEs out",
    ),
    "a node beside the mesh": (
        lambda made: replace(made, nodes=(replace(made.nodes[0], col=16), *made.nodes[1:])),
        r"node \[0, 16, 1, 1\] is not on the mesh of 16 x 16 PEs",
    ),
    "a core that is larger than its region": (
        lambda made: replace(made, cores=(replace(made.cores[0], pes=2), *made.cores[1:])),
        "core 0 has 2 PEs, and its region 1",
    ),
}


@pytest.mark.parametrize("fault", UNSOUND)
def test_a_machine_whose_fabric_is_not_sound_is_found(fault):
    tamper, message = UNSOUND[fault]
    found = ran(case())
    with pytest.raises(AuditError, match=message):
        Audit(tamper(found.case.machine), found.case.net, found.timing)
