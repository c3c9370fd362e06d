"""The checks that every run makes on itself (DESIGN.md 11, HARDWARE.md 2); one that fails fails the run.

The audit recounts from the trace what the timing plane has kept in its own books: operations, versions, busy
cycles, bytes on links. It works on the stream, and keeps only what is still in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pbsim.hardware import Links, Machine, Route
from pbsim.hardware.energy import ACTIONS, EnergyAccount
from pbsim.hardware.memory import Category
from pbsim.network.network import Network
from pbsim.results.records import BW, BX, F, MalformedTraceError, Recorder, Records, U
from pbsim.schedule import Chunk, Op, Timing, Trace
from pbsim.schedule.timing import Delays
from pbsim.schedule.trace import IntArray


class AuditError(RuntimeError):
    """A run contradicts itself; the message says how."""


@dataclass(frozen=True)
class Bounds:
    """Cycles that no schedule of this machine can beat, per resource; a run is at least as long as each."""

    compute: int
    link: int
    host: int


class Audit:
    """Follows a run's trace; `watch` passes chunks on, `finish` checks the books against it."""

    def __init__(self, machine: Machine, network: Network, timing: Timing) -> None:
        self.machine, self.network, self.timing = machine, network, timing
        self.delays = Delays(machine.stages)
        self._recorder = Recorder(machine, timing.batches)
        self._held = np.zeros(machine.stages, np.int64)
        self._counts = np.zeros((machine.stages, 4), np.int64)
        self._busy_until = np.full((machine.stages, 2), -1)
        self._update_ends: list[IntArray] = [np.empty(0, np.int64) for _ in machine.cores]
        self._forgotten = np.zeros(machine.stages, np.int64)
        self._links = _LinkAudit(machine)
        self._check_floorplan()
        self._last_end = 0
        self._loads = 0

    def watch(self, chunk: Chunk) -> Records:
        """Check a chunk; return the samples that it completes."""
        rows = chunk.rows
        if len(rows):
            self._require(
                (rows.start >= 0).all() and (rows.end >= rows.start).all(),
                "an operation ends before it starts",
            )
            compute = rows[rows.op <= Op.UPDATE]
            np.add.at(self._counts, (compute.stage, compute.op), 1)
            self._last_end = max(self._last_end, int(rows.end.max()))
            self._check_overlap(compute)
            self._links.feed(rows[rows.op == Op.SEND], chunk.until)
            self._loads += int((rows.op == Op.LOAD).sum())
        try:
            records = self._recorder.feed(rows)
        except MalformedTraceError as error:
            raise AuditError(str(error)) from error
        if len(records):
            self._check_durations(records)
            self._check_causality(records)
            self._check_versions(records)
            self._check_delays(records)
            self._count_delays(records)
            if self.timing.batches.drained:
                self._count_in_flight(records)
        return records

    def finish(self) -> Bounds:
        """Check the timing plane's books against what was seen; return the bounds the run was held to."""
        timing, machine = self.timing, self.machine
        if timing.all_rows:
            self._finish_trace()
        elif timing.estimate is None:
            self._links.check_totals(timing.links, timing.samples)
        self._require(timing.cycles >= self._last_end, "an operation ends after the run")
        self._check_units()
        self._check_macs()
        self._check_in_flight()
        leftovers = timing.ledger.leftovers()
        self._require(not leftovers, f"memory is not empty after the drain: {leftovers}")
        if timing.step_cycles is not None:
            self._check_lockstep_stash()
        bounds = bounds_of(machine, timing)
        longest = max(bounds.compute, bounds.link, bounds.host)
        self._require(timing.cycles >= longest, f"{timing.cycles} cycles beat a bound: {bounds}")
        return bounds

    def _finish_trace(self) -> None:
        """The trace was the whole one: nothing of it is missing, and the books agree with it."""
        timing = self.timing
        try:
            self._recorder.finish()
        except MalformedTraceError as error:
            raise AuditError(str(error)) from error
        self._require((self._counts == self._due_counts).all(), "a stage has not run every sample exactly once")
        self._links.finish(timing.links)
        for name in ("count", "total", "least", "most"):
            booked, seen = getattr(timing.delays, name), getattr(self.delays, name)
            self._require((booked == seen).all(), f"the delays' {name} is booked as {booked}, seen as {seen}")

    @property
    def _due_counts(self) -> IntArray:
        """How many F, Bx, Bw and U every stage has to run."""
        timing = self.timing
        return np.array([[timing.samples, timing.samples, timing.samples, timing.batches.count]] * self.machine.stages)

    def check_energy(self, account: EnergyAccount) -> None:
        """Check counted actions against what was seen, and energy against counts; after `finish`."""
        machine, cores = self.machine, account.cores
        whole, samples = self.timing.all_rows, self.timing.samples
        routes = (self._links.messages if whole else dict.fromkeys(self._links.messages, samples)).items()
        counts, loads = (self._counts, self._loads) if whole else (self._due_counts, samples)
        for core, stage, seen, actions in zip(machine.cores, self.network.stages, counts, cores, strict=True):
            done = [(int(count), cost) for count, cost in zip(seen, core.cycles.operations, strict=True)]
            work = stage.work
            macs = (work.macs_forward, work.macs_input_gradient, work.macs_weight_gradient, 0)
            sent = sum(count * route.size for route, count in routes if route.source == core.stage)
            received = sum(count * route.size for route, count in routes if route.target == core.stage)
            for name, counted, recounted in (
                ("MACs", actions.macs, sum(n * each for (n, _), each in zip(done, macs, strict=True))),
                ("vector operations", actions.vector_ops, sum(n * cost.vector_operations for n, cost in done)),
                ("SRAM bytes of operations", actions.operation_bytes, sum(n * cost.sram_bytes for n, cost in done)),
                ("SRAM bytes of messages", actions.message_bytes, sent + received),
                ("bytes from the host", actions.host_bytes, 0 if core.stage else loads * machine.host_bytes),
                ("PE-cycles", actions.pe_cycles, core.pes * self.timing.cycles),
            ):
                self._require(counted == recounted, f"core {core.stage} counts {counted} {name}, seen {recounted}")
        hops = sum(actions.link_byte_hops for actions in cores)
        walked = sum(count * route.size * route.steps for route, count in routes)
        self._require(hops == walked, f"{hops} byte-hops counted, messages took {walked}")
        picojoules = sum(actions.counts[a] * account.table.pj(a) for actions in cores for a in ACTIONS)
        self._require(
            bool(np.isclose(account.joules, picojoules * 1e-12, rtol=1e-9, atol=0.0)),
            f"{account.joules} J is not {picojoules} pJ, the sum of counts times entries",
        )

    def _count_delays(self, records: Records) -> None:
        """Recount the delays of complete samples."""
        delay, recount = records.delay, self.delays
        for row, chosen in enumerate((records.version[:, :, F] >= 1, np.ones_like(delay, dtype=bool))):
            recount.count[row] += chosen.sum(axis=0)
            recount.total[row] += np.where(chosen, delay, 0).sum(axis=0)
            least = np.where(chosen, delay, np.iinfo(np.int64).max).min(axis=0)
            recount.least[row] = np.minimum(recount.least[row], least)
            recount.most[row] = np.maximum(recount.most[row], np.where(chosen, delay, -1).max(axis=0))

    @staticmethod
    def _require(holds: bool | np.bool_, otherwise: str) -> None:
        if not holds:
            raise AuditError(f"audit: {otherwise}")

    def _check_floorplan(self) -> None:
        """Cores and spare nodes share out the mesh: every PE is in one of them."""
        mesh, nodes = self.machine.hardware.mesh, self.machine.nodes
        for node in nodes:
            inside = 0 <= node.row < node.end_row <= mesh.rows and 0 <= node.col < node.end_col <= mesh.cols
            self._require(inside, f"node {node} is not on the mesh of {mesh.rows} x {mesh.cols} PEs")
        top, left = np.array([node.row for node in nodes]), np.array([node.col for node in nodes])
        end, right = np.array([node.end_row for node in nodes]), np.array([node.end_col for node in nodes])
        rows = np.minimum.outer(end, end) > np.maximum.outer(top, top)
        cols = np.minimum.outer(right, right) > np.maximum.outer(left, left)
        apart = (rows & cols).sum() == len(nodes)  # every node shares PEs with itself alone
        tiled = apart and sum(node.pes for node in nodes) == mesh.pes
        self._require(tiled, "the nodes of the fabric overlap, or leave PEs out")
        for core, node in zip(self.machine.cores, nodes, strict=False):
            self._require(core.pes == node.pes, f"core {core.stage} has {core.pes} PEs, and its region {node.pes}")

    def _check_overlap(self, rows: Trace) -> None:
        """No unit runs two operations at once."""
        unit = (rows.op != Op.FORWARD) if self.machine.split else np.zeros(len(rows), bool)
        unit = unit.astype(np.int64)
        order = np.lexsort((rows.op, rows.sample, rows.end, rows.start, unit, rows.stage))
        stage, unit, start, end = rows.stage[order], unit[order], rows.start[order], rows.end[order]
        key = stage * 2 + unit
        first = np.ones(len(key), bool)
        first[1:] = key[1:] != key[:-1]
        before = np.empty(len(key), np.int64)
        before[1:] = end[:-1]
        before[first] = self._busy_until[stage[first], unit[first]]
        self._require((start >= before).all(), "a unit runs two operations at once")
        last = np.ones(len(key), bool)
        last[:-1] = first[1:]
        self._busy_until[stage[last], unit[last]] = end[last]

    def _check_durations(self, records: Records) -> None:
        """Every operation takes the cycles that the hardware model gives it."""
        expected = np.array(
            [
                [
                    core.cycles.forward.total,
                    core.cycles.input_gradient.total,
                    core.cycles.weight_gradient.total,
                    core.cycles.update.total,
                ]
                for core in self.machine.cores
            ]
        )
        self._require((records.end - records.start == expected).all(), "an operation has not the cycles of its core")

    def _check_causality(self, records: Records) -> None:
        """Nothing starts before what it needs is there."""
        start, end = records.start, records.end
        self._require((start[:, 0, F] >= records.load_end).all(), "a sample was forwarded before it came from the host")
        self._require((start[:, :, BX] >= end[:, :, F]).all(), "a backward starts before its forward ended")
        self._require((start[:, :, BW] >= end[:, :, BX]).all(), "Bw starts before Bx ended")
        self._require((start[:, :, U] >= end[:, :, BW]).all(), "U starts before Bw ended")
        for c, channel in enumerate(self.machine.channels):
            s, t = channel.source, channel.target
            leaves, comes = records.send_start[:, c], records.send_end[:, c]
            self._require((leaves[:, 0] >= end[:, s, F]).all(), f"an activation {s}>{t} leaves before it is computed")
            self._require((start[:, t, F] >= comes[:, 0]).all(), f"stage {t} starts before its input from {s} arrived")
            self._require((leaves[:, 1] >= end[:, t, BX]).all(), f"a gradient {t}>{s} leaves before it is computed")
            self._require(
                (start[:, s, BX] >= comes[:, 1]).all(),
                f"stage {s} starts Bx before the gradient of {t} arrived",
            )

    def _check_versions(self, records: Records) -> None:
        """Versions equal the number of updates that ended by then, recounted from the updates' ends."""
        batches = self.timing.batches
        one_per_batch = records.sample == batches.firsts(batches.indices(records.sample))
        for stage in range(self.machine.stages):
            ends = np.sort(np.concatenate([self._update_ends[stage], records.end[one_per_batch, stage, U]]))
            starts, versions = records.start[:, stage], records.version[:, stage]
            for op in (F, BX):
                counted = self._forgotten[stage] + np.searchsorted(ends, starts[:, op], side="right")
                due = versions[:, F] if op == BX and self.machine.stash_weights else counted
                right = due == versions[:, op]
                if not self.machine.cores[stage].cycles.update.total:
                    # without weights there is nothing to read, and an update takes no time: where it comes in the very
                    # cycle of a read, either may have been first
                    right |= versions[:, op] == self._forgotten[stage] + np.searchsorted(ends, starts[:, op])
                self._require(right.all(), f"stage {stage} reads a version that is not there")
            self._require((versions[:, BW] == versions[:, BX]).all(), "Bx and Bw of a sample read different versions")
            made = self._forgotten[stage] + np.searchsorted(ends, records.end[:, stage, U], side="right")
            self._require((made == versions[:, U]).all(), f"stage {stage} counts its updates wrongly")
            known = int(np.searchsorted(ends, starts[-1, F], side="right"))
            self._forgotten[stage] += known
            self._update_ends[stage] = ends[known:]

    def _check_delays(self, records: Records) -> None:
        """What the schedule promises: no delays where it drains, in lockstep those of the papers."""
        if self.timing.batches.drained:
            due = self.timing.batches.indices(records.sample)[:, None]
            self._require(
                (records.version[:, :, F] == due).all(),
                "a forward does not read what the update of the batch before has left",
            )
        elif self.timing.step_cycles is not None:
            nominal = 2 * (self.machine.stages - 1 - np.arange(self.machine.stages))
            due = np.minimum(records.sample[:, None], nominal)
            self._require((records.delay == due).all(), "a lockstep delay is not min(sample, 2(S-1-s))")

    def _count_in_flight(self, records: Records) -> None:
        """Recount the most samples in flight where batches are drained, so that none begins while another is there.

        A sample is in flight from the start of F to the end of its backward: of Bw, or of U behind the last of a batch.
        """
        batches = self.timing.batches
        batch = batches.indices(records.sample)
        last = records.sample == batches.firsts(batch) + batches.lengths(batch) - 1
        ends = np.where(last[:, None], records.end[:, :, U], records.end[:, :, BW])
        for stage in range(self.machine.stages):
            begun = np.sort(records.start[:, stage, F])
            left = np.searchsorted(np.sort(ends[:, stage]), begun, side="right")
            self._held[stage] = max(self._held[stage], int((np.arange(1, len(begun) + 1) - left).max()))

    def _check_units(self) -> None:
        """Each unit's cycles sum to the run's, and its busy cycles are those of the operations seen, or due."""
        counts = self._counts if self.timing.all_rows else self._due_counts
        for usage in self.timing.units:
            self._require(
                usage.total == self.timing.cycles,
                f"the cycles of core {usage.core} do not sum to the run's: {usage}",
            )
            core = self.machine.cores[usage.core]
            seen = {
                "forward": core.cycles.forward.total * counts[usage.core, F],
                "input_gradient": core.cycles.input_gradient.total * counts[usage.core, BX],
                "weight_gradient": core.cycles.weight_gradient.total * counts[usage.core, BW],
                "update": core.cycles.update.total * counts[usage.core, U],
            }
            for name, cycles in seen.items():
                runs_here = usage.unit == "shared" or (usage.unit == "forward") == (name == "forward")
                booked = getattr(usage, name)
                self._require(
                    self.timing.estimate is not None or booked == (cycles if runs_here else 0),
                    f"core {usage.core} books {booked} cycles of {name}",
                )
            parts = (usage.stall_input, usage.stall_output, usage.stall_memory, usage.idle)
            self._require(min(parts) >= 0, f"core {usage.core} has a negative count of cycles: {usage}")

    def _check_macs(self) -> None:
        """MACs of the operations seen equal those of the model's shapes, for F, Bx and Bw apart."""
        counts = self._counts if self.timing.all_rows else self._due_counts
        for op, name in ((F, "macs_forward"), (BX, "macs_input_gradient"), (BW, "macs_weight_gradient")):
            seen = sum(int(counts[s.index, op]) * getattr(s.work, name) for s in self.network.stages)
            operators = (o for s in self.network.stages for o in s.operators)
            expected = self.timing.samples * sum(getattr(o.work, name) for o in operators)
            self._require(seen == expected, f"{name}: {seen} simulated, {expected} by the model's shapes")

    def _check_in_flight(self) -> None:
        """Samples in flight, recounted, equal the books and keep to credits.

        Where every sample is followed by its update they are delays + 1 (samples stay in order).
        """
        held = self._held if self.timing.batches.drained else self.delays.most[1] + 1
        booked = self.timing.peak_in_flight
        if not self.timing.all_rows:
            held = np.array(booked)
        self._require((held == booked).all(), f"samples in flight peaked at {held}, booked {booked}")
        for core in self.machine.cores:
            within = self.timing.step_cycles is not None or core.credits is None or held[core.stage] <= core.credits
            self._require(within, f"core {core.stage} held {held[core.stage]} samples with {core.credits} credits")

    def _check_lockstep_stash(self) -> None:
        """In lockstep, stage s holds the stashes of 2(S-1-s) + 1 samples at most, where drained of one batch."""
        batches = self.timing.batches
        together = batches.end(0) if batches.drained else batches.samples  # no batch is longer than the first
        for core in self.machine.cores:
            due = min(together, 2 * (self.machine.stages - 1 - core.stage) + 1)
            peak = self.timing.ledger.peak[core.stage][Category.STASH]
            self._require(peak == due * core.memory.stash, f"the stash of core {core.stage} peaked at {peak} bytes")


class _LinkAudit:
    """Recounts what each link carried, and that it carried one message at a time."""

    def __init__(self, machine: Machine) -> None:
        self.links = machine.links()
        self._routes = {(r.source, r.target): r for c in machine.channels for r in (c.forward, c.gradient)}
        self.messages = dict.fromkeys(self._routes.values(), 0)
        self._pending: list[list[IntArray]] = [[] for _ in self.links.bytes]
        self._free_at = np.zeros(len(self.links.bytes), np.int64)
        self.bytes = np.zeros(len(self.links.bytes), np.int64)
        self.busy_cycles = np.zeros(len(self.links.bytes), np.int64)
        for route in self._routes.values():
            self._check_route(machine, route)

    def _check_route(self, machine: Machine, route: Route) -> None:
        """Its links lead from the source to the target, one behind the other, and none streams faster than it can."""
        name, fabric = f"route {route.source}>{route.target}", machine.hardware.fabric
        nodes = [route.source, *(self.links.ends[link][1] for link in route.links)]
        leads = all(self.links.ends[link][0] == node for link, node in zip(route.links, nodes, strict=False))
        Audit._require(leads and nodes[-1] == route.target, f"{name} does not lead there: its links pass nodes {nodes}")
        once = len(set(nodes)) == len(nodes)
        Audit._require(once, f"{name} passes a node twice: {nodes}")
        Audit._require(
            route.steps >= len(route.links), f"{name} crosses {len(route.links)} links in {route.steps} steps"
        )
        in_order = all(a < b or not fabric.hop_cycles for a, b in pairwise([*route.offsets, route.latency]))
        Audit._require(in_order, f"{name} takes its links at {route.offsets}, and arrives after {route.latency} cycles")
        for link in route.links:
            most = route.serialisation * machine.link_wires[link] * fabric.link_bytes_per_cycle
            Audit._require(
                route.size == 0 or math.isinf(fabric.link_bytes_per_cycle) or route.size <= most,
                f"{name} puts {route.size} bytes on link {self.links.ends[link]}, which carries {most} meanwhile",
            )

    def feed(self, sends: Trace, until: int) -> None:
        """Take messages; check the links up to a cycle before which no further message starts."""
        for (source, target), route in self._routes.items():
            here = (sends.stage == source) & (sends.target == target)
            starts, hold = sends.start[here], route.serialisation
            self.messages[route] += len(starts)
            Audit._require((sends.end[here] - starts == route.latency + hold).all(), "a message is early or late")
            for link, offset in zip(route.links, route.offsets, strict=True):
                self.bytes[link] += route.size * len(starts)
                self.busy_cycles[link] += hold * len(starts)
                if hold and len(starts):
                    begin = starts + offset
                    self._pending[link].append(np.stack([begin, begin + hold], axis=1))
        for link in range(len(self._pending)):
            self._settle(link, until)

    def _settle(self, link: int, until: int) -> None:
        if not self._pending[link]:
            return
        spans = np.concatenate(self._pending[link])
        spans = spans[np.argsort(spans[:, 0])]
        settled = spans[spans[:, 0] < until]
        self._pending[link] = [spans[len(settled) :]]
        if len(settled):
            before = np.concatenate([[self._free_at[link]], settled[:-1, 1]])
            Audit._require(
                (settled[:, 0] >= before).all(), f"link {self.links.ends[link]} carries two messages at once"
            )
            self._free_at[link] = settled[-1, 1]

    def check_totals(self, links: Links, samples: int) -> None:
        """Compare the fabric's books with what so many samples send, where not every message was seen."""
        for link, booked in enumerate(zip(links.bytes, links.busy_cycles, strict=True)):
            here = [route for route in self._routes.values() if link in route.links]
            due = (samples * sum(r.size for r in here), samples * sum(r.serialisation for r in here))
            Audit._require(booked == due, f"link {self.links.ends[link]} booked {booked}, due {due} (bytes, cycles)")

    def finish(self, links: Links) -> None:
        """Settle what is left, and compare with the fabric's own books."""
        for link in range(len(self._pending)):
            self._settle(link, np.iinfo(np.int64).max)
            carried = (int(self.bytes[link]), int(self.busy_cycles[link]))
            booked = (links.bytes[link], links.busy_cycles[link])
            Audit._require(
                carried == booked,
                f"link {self.links.ends[link]} booked {booked}, carried {carried} (bytes, cycles)",
            )
        hops = sum(r.size * len(r.links) * count for r, count in self.messages.items())
        total = sum(links.bytes)
        Audit._require(total == hops, f"the links carried {total} bytes, messages times their hops are {hops}")


def bounds_of(machine: Machine, timing: Timing) -> Bounds:
    """Lower bounds of a run: the busiest unit's work, the busiest link's, and the host's."""
    samples, updates = timing.samples, timing.batches.count
    busiest = 0
    for core in machine.cores:
        forwards = samples * core.cycles.forward.total
        backwards = samples * (core.cycles.input_gradient.total + core.cycles.weight_gradient.total)
        backwards += updates * core.cycles.update.total
        busiest = max(busiest, max(forwards, backwards) if machine.split else forwards + backwards)
    return Bounds(
        compute=busiest,
        link=max(timing.links.busy_cycles, default=0),
        host=(timing.samples - 1) * machine.host_cycles,
    )


def audited(chunks: Iterable[Chunk], audit: Audit) -> Iterator[tuple[Chunk, Records]]:
    """Chunks as they come, each with the samples it completes."""
    for chunk in chunks:
        yield chunk, audit.watch(chunk)
