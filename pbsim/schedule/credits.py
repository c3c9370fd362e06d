"""How many samples each stage must have in flight: the fewest credits that keep the pipeline's throughput.

Credits bound the samples in flight at a stage, and with them the delay of its gradients: too few and cores wait for
credits, more than enough and every sample waits in a queue while weights move on. Which credits suffice depends on
everything that a machine is (latencies, contention, unequal stages), so they are found by simulating it.

Throughput is that of the steady state, in cycles per sample. Where the machine's state comes back
(`pbsim.schedule.steady`) it is a fraction, exactly. Where it does not within `LATE_SAMPLES` samples or so, it is the
pace over their later half, and counts as equal to another within `ESTIMATE_TOLERANCE`.

What a search aims at is the *reference*: the fewest cycles per sample that bounded credits reach, tried from `1f1b`
(where memory is enforced, from one each) and `lockstep` to multiples of the round trips, until they reach what the
busiest unit, link or host needs, or two doublings have gained nothing. Unbounded credits are not simulated: in front of
a stage slower than those before it they have no steady state, since its queue grows with the run. What they deliver per
cycle is what the slowest resource lets through, and bounded credits reach that.

A lower bound comes first (Little's law): from the start of a sample's F at a stage to the end of its U there pass at
least the round trip's cycles, one operation and message after the other; at c cycles per sample that many cycles hold
`round trip / c` samples. From credits that keep the throughput, a search then lowers blocks of stages, the whole
pipeline first, then halves, down to single stages, each by as much as keeps it, and single stages again until no stage
can spare a credit; once from the first stage to the last, once from the last to the first, and the smaller result
counts. In dataflow a machine with fewer credits can be faster (Graham's anomalies), so none of this relies on
monotonicity: every vector that is taken was simulated, and so was each with a credit less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, inf, nan
from typing import TYPE_CHECKING, Literal

from pbsim.hardware.machine import Machine
from pbsim.hardware.memory import Category
from pbsim.schedule.batches import Batches
from pbsim.schedule.steady import CompiledRun, events_per_sample, least_interval
from pbsim.schedule.timing import DeadlockError, Timing

if TYPE_CHECKING:
    import pandas as pd

Credits = tuple[int, ...]
Why = Literal["one", "round trip", "simulated", "estimated", "open"]

ESTIMATE_TOLERANCE = Fraction(1, 1000)
"""By how much more cycles per sample a pace without a proved period may have, and count as the same."""
FAR_OFF = Fraction(1, 20)
"""Credits whose pace is by so much too slow at the first look are not simulated further; while buffers fill, a pace is
off by a hundredth or two."""
SAMPLES = 10**8
"""Of a simulated run: more than any search simulates one by one."""
EARLY_SAMPLES, LATE_SAMPLES = 1_000, 8_000
"""After so many samples without a repetition, a first look at the pace, and the pace that counts."""
LEAST_EVENTS, MOST_EVENTS = 200_000, 20_000_000
"""Bounds of the events that those samples stand for."""
EVENT_LIMIT = 100_000_000
"""Events after which a search ends with what it has: half a minute or so."""
LARGEST_MULTIPLE = 64
"""Of the round trips' credits, in the search for the reference."""


@dataclass(frozen=True)
class Choice:
    """Credits per stage, and what the machine does with them in the steady state.

    Attributes
    ----------
    cycles_per_sample : of the steady state; None where the machine deadlocks (enforced memory).
    exact : whether the machine's state was seen twice; else the figures are those of the last windows simulated.
    cycles_per_sample_least, cycles_per_sample_most : of the windows; without a spread where exact.
    delays : per stage, the mean measured delay in updates.
    in_flight : per stage, the most samples that were.
    stash_bytes : the most that each core held for its backwards (with weight stashing also of weights), added up.
    """

    credits: Credits
    cycles_per_sample: Fraction | None
    exact: bool
    cycles_per_sample_least: float
    cycles_per_sample_most: float
    delays: tuple[float, ...]
    in_flight: tuple[int, ...]
    stash_bytes: int

    @property
    def pace(self) -> str:
        """Cycles per sample in words, with ~ in front of an estimate."""
        if self.cycles_per_sample is None:
            return "deadlock"
        return f"{'' if self.exact else '~'}{round(float(self.cycles_per_sample), 2):,.10g}"

    @property
    def delay_mean(self) -> float:
        """The mean over stages of their mean delays."""
        return sum(self.delays) / len(self.delays) if self.delays else nan


@dataclass(frozen=True)
class CreditSearch:
    """What a search has found.

    Attributes
    ----------
    tolerance : the share of the reference's cycles per sample that may be added.
    bound_cycles : per sample, what the busiest unit, link or host needs: no credits do better.
    round_trips : per stage, the least cycles from the start of a sample's F to the end of its U.
    least : per stage, the credits without which the round trips alone miss the throughput.
    reference : the credits, and the cycles per sample, that the search was to keep.
    minimum : the smallest credits found that keep it.
    why : per stage, why one credit less is too few: `one` (a stage needs one), `round trip` (`least`, proved),
        `simulated` (slower, exactly), `estimated` (slower, by the pace of the last windows), `open` (the limit of
        events came first: perhaps it is not).
    choices : by name, what other credits do.
    simulations, events : how many the search took.
    notes : what the user should know of it.
    """

    tolerance: float
    bound_cycles: int
    round_trips: tuple[int, ...]
    least: Credits
    reference: Choice
    minimum: Choice
    why: tuple[Why, ...]
    choices: dict[str, Choice]
    simulations: int
    events: int
    notes: tuple[str, ...] = ()

    @property
    def credits(self) -> list[int]:
        """The smallest credits found, as `pipeline.credits` takes them."""
        return list(self.minimum.credits)

    def relative_throughput(self, choice: Choice) -> float:
        """Samples per cycle, as a share of the reference's; 0 where the machine deadlocks."""
        if choice.cycles_per_sample is None or self.reference.cycles_per_sample is None:
            return 0.0
        return float(self.reference.cycles_per_sample / choice.cycles_per_sample)

    @property
    def table(self) -> pd.DataFrame:
        """One row per choice; the columns are those of `Choice`, and delays of the first, middle and last stage."""
        import pandas as pd

        last = len(self.minimum.credits) - 1
        rows = [
            {
                "choice": name,
                "credits": list(choice.credits),
                "credits_total": sum(choice.credits),
                "cycles_per_sample": nan if choice.cycles_per_sample is None else float(choice.cycles_per_sample),
                "exact": choice.exact,
                "relative_throughput": self.relative_throughput(choice),
                "delay_mean": choice.delay_mean,
                **{
                    f"delay_{place}": choice.delays[stage] if choice.delays else nan
                    for place, stage in (("first", 0), ("middle", last // 2), ("last", last))
                },
                "stash_bytes": choice.stash_bytes,
            }
            for name, choice in self.choices.items()
        ]
        return pd.DataFrame(rows)


def minimum_credits(
    machine: Machine,
    *,
    tolerance: float = 0.0,
    event_limit: int = EVENT_LIMIT,
    progress: Callable[[int, str], None] | None = None,
) -> CreditSearch:
    """Find the fewest credits per stage that keep the throughput of as many as one likes, in dataflow timing.

    Parameters
    ----------
    machine : its own credits are one of the choices reported, where they are bounded and not among the others.
    tolerance : by which share the cycles per sample may grow.
    event_limit : of the engine, where the search ends with the best it has found; the reference, and the choices to
        compare with, are simulated in any case.
    progress : told how many simulations there were, and what the search is at.

    Raises
    ------
    ValueError : the timing is lockstep, which has no use for credits.
    DeadlockError : memory is enforced, and no credits tried let the machine proceed.
    """
    if machine.hardware.pipeline.timing == "lockstep":
        raise ValueError("in lockstep the steps decide what is in flight, and credits bound nothing")
    laboratory = Laboratory(machine, event_limit, progress or (lambda simulations, what: None))
    reference, tried = _reference(laboratory)
    assert reference.cycles_per_sample is not None
    target = reference.cycles_per_sample * (1 + Fraction(str(float(tolerance))))
    round_trips = round_trip_cycles(machine)
    search = Descent(laboratory, target, least_credits(round_trips, target))
    minimum = search.run([choice for choice in tried.values() if laboratory.keeps(choice, target)])
    why = search.why(minimum)
    choices = _choices(laboratory, minimum, tried, reference)
    notes = []
    if search.cut_short or "open" in why:
        notes.append(f"the limit of {event_limit:,} events was reached: perhaps fewer credits suffice")
    notes += _anomalies(laboratory, minimum, choices, target)
    return CreditSearch(
        tolerance,
        least_interval(machine),
        tuple(round_trips),
        search.least,
        reference,
        minimum,
        why,
        choices,
        laboratory.simulations,
        laboratory.events,
        tuple(notes),
    )


# --- one machine, many credits --------------------------------------------------------------------


class LimitReached(Exception):
    """The search has used up its events."""


@dataclass
class Laboratory:
    """Simulates a machine with any credits, and remembers what it has seen."""

    machine: Machine
    event_limit: int = EVENT_LIMIT
    progress: Callable[[int, str], None] = lambda simulations, what: None
    simulations: int = 0
    events: int = 0
    deadlock: DeadlockError | None = None
    """The last one, if there was any."""
    _seen: dict[Credits, tuple[int, Choice]] = field(default_factory=dict)

    def measure(self, credits: Credits, samples: int = LATE_SAMPLES, *, limited: bool = False) -> Choice:
        """What the machine does with these credits, estimated after so many samples if nothing repeats.

        Raises
        ------
        LimitReached : if `limited`, and the events are used up.
        """
        budget = min(MOST_EVENTS, max(LEAST_EVENTS, samples * events_per_sample(self.machine)))
        spent, choice = self._seen.get(credits, (0, None))
        if choice is None or not (choice.exact or spent >= budget):
            if limited and self.events >= self.event_limit:
                raise LimitReached
            choice = self._simulate(credits, budget)
            self._seen[credits] = budget, choice
        return choice

    def keeps(self, choice: Choice, target: Fraction) -> bool:
        """Whether a choice needs no more than so many cycles per sample."""
        if choice.cycles_per_sample is None:
            return False
        return choice.cycles_per_sample <= (target if choice.exact else target * (1 + ESTIMATE_TOLERANCE))

    def try_out(self, credits: Credits, target: Fraction) -> bool:
        """Whether credits keep a throughput; those that are far off are found out early."""
        early = self.measure(credits, EARLY_SAMPLES, limited=True)
        if early.exact or (early.cycles_per_sample or 0) > target * (1 + FAR_OFF):
            return self.keeps(early, target)
        return self.keeps(self.measure(credits, limited=True), target)

    def _simulate(self, credits: Credits, budget: int) -> Choice:
        """Run until the regime is proved to be periodic, or the budget is spent."""
        timing = Timing(with_credits(self.machine, credits), Batches(SAMPLES))
        run = CompiledRun(timing.machine, timing, 1, kept=0, skip=True, event_budget=budget)
        try:
            for _ in run.chunks():
                pass
        except DeadlockError as deadlock:
            self.deadlock = deadlock
            return Choice(credits, None, True, inf, inf, (), (), 0)
        finally:
            self.simulations += 1
            self.events += run.engine.events
        return _observed(credits, timing, run)


def with_credits(machine: Machine, credits: Credits) -> Machine:
    """The machine with other credits, and otherwise as it is."""
    cores = tuple(replace(core, credits=count) for core, count in zip(machine.cores, credits, strict=True))
    return replace(machine, cores=cores)


def _observed(credits: Credits, timing: Timing, run: CompiledRun) -> Choice:
    """What a simulation has shown of the steady state."""
    steady, estimate = timing.steady_state, timing.estimate
    regime, _ = run.added[
        0
    ]  # what was left out: periods of the steady state, or samples at the pace of the last windows
    if steady is not None:
        pace = Fraction(steady.period_cycles, steady.period_samples)
        least = most = float(pace)
    else:
        assert estimate is not None
        pace = Fraction(regime.cycle, SAMPLES - estimate.simulated_samples)
        least, most = estimate.cycles_per_sample_least, estimate.cycles_per_sample_most
    count, total = regime.delays[1].T
    held = sum(core[Category.STASH] + core[Category.WEIGHT_VERSIONS] for core in timing.ledger.peak)
    delays = tuple((total / count).tolist())
    return Choice(credits, pace, steady is not None, least, most, delays, tuple(timing.peak_in_flight), held)


# --- what to aim at -------------------------------------------------------------------------------


def round_trip_cycles(machine: Machine) -> list[int]:
    """Per stage, the least cycles from the start of a sample's F to the end of its U: the longest way there and back.

    Every F waits for the messages it reads, every Bx for its own F and for the gradients of all that read its result;
    a message takes its serialisation and the latency of its way. Bw and U follow Bx.
    """
    cycles = [core.cycles for core in machine.cores]
    channels = sorted(machine.channels, key=lambda channel: channel.source)
    found = []
    for first in range(machine.stages):
        forward = {first: cycles[first].forward.total}
        for channel in channels:
            if channel.source in forward:
                route, target = channel.forward, channel.target
                end = forward[channel.source] + route.serialisation + route.latency + cycles[target].forward.total
                forward[target] = max(end, forward.get(target, 0))
        back = dict(forward)
        for channel in sorted(machine.channels, key=lambda channel: -channel.target):
            if channel.source in back:
                route, source = channel.gradient, channel.source
                sent = back[channel.target] + cycles[channel.target].input_gradient.total
                back[source] = max(back[source], sent + route.serialisation + route.latency)
        own = cycles[first]
        found.append(back[first] + own.input_gradient.total + own.weight_gradient.total + own.update.total)
    return found


def least_credits(round_trips: Sequence[int], cycles_per_sample: Fraction) -> Credits:
    """Per stage, the samples that must be in flight at so many cycles per sample (Little's law)."""
    return tuple(max(1, ceil(trip / cycles_per_sample)) for trip in round_trips)


def named_credits(stages: int) -> dict[str, Credits]:
    """What `1f1b` and `lockstep` stand for."""
    return {
        "1f1b": tuple(stages - s for s in range(stages)),
        "lockstep": tuple(2 * (stages - 1 - s) + 1 for s in range(stages)),
    }


def _reference(laboratory: Laboratory) -> tuple[Choice, dict[str, Choice]]:
    """The bounded credits with the fewest cycles per sample, and all that were tried on the way.

    Ends where a choice provably takes what the busiest resource needs, or two doublings have gained nothing.
    """
    machine = laboratory.machine
    bound = Fraction(least_interval(machine))
    least = least_credits(round_trip_cycles(machine), bound)
    tried: dict[str, Choice] = {}
    best, best_pace, gained = None, None, 0
    for name, credits, doubling in _growing(machine, least):
        laboratory.progress(laboratory.simulations, f"looking for the reference: {name}")
        choice = tried[name] = laboratory.measure(credits)
        pace = choice.cycles_per_sample
        if pace is not None and (best_pace is None or pace < best_pace):
            best, best_pace, gained = choice, pace, doubling
        if best is not None and (best_pace == bound or doubling >= gained + 2):
            return best, tried
    if best is None:
        assert laboratory.deadlock is not None
        raise laboratory.deadlock
    return best, tried


def _growing(machine: Machine, least: Credits) -> Iterator[tuple[str, Credits, int]]:
    """More and more credits: name, credits, how often they were doubled.

    Where memory is enforced more may deadlock, so that there the first ones are few.
    """
    named = named_credits(machine.stages)
    most = 1
    while machine.hardware.pipeline.memory == "enforce" and most < machine.stages:
        yield f"1f1b, at most {most}", tuple(min(count, most) for count in named["1f1b"]), 0
        most *= 2
    for name, credits in named.items():
        yield name, credits, 0
    doubling, multiple = 0, 1
    while multiple <= LARGEST_MULTIPLE:
        yield f"{multiple} x round trip", tuple(multiple * count for count in least), doubling
        doubling, multiple = doubling + 1, 2 * multiple


# --- downwards ------------------------------------------------------------------------------------


class Descent:
    """Lowers credits as long as a throughput is kept.

    Attributes
    ----------
    target : cycles per sample that are allowed.
    least : credits below which none need be tried.
    cut_short : whether the limit of events ended it.
    """

    def __init__(self, laboratory: Laboratory, target: Fraction, least: Credits) -> None:
        self.laboratory, self.target, self.least = laboratory, target, least
        self.cut_short = False
        self._kept: list[Choice] = []

    def run(self, starts: Sequence[Choice]) -> Choice:
        """The smallest credits found below the smallest start."""
        start = min(starts, key=_size)
        self._kept = [start]
        try:
            for forwards in (True, False):
                self._descend(start.credits, forwards)
        except LimitReached:
            self.cut_short = True
        return min(self._kept, key=_size)

    def why(self, minimum: Choice) -> tuple[Why, ...]:
        """Per stage, why one credit less is too few."""
        return tuple(self._why(minimum.credits, stage) for stage in range(len(minimum.credits)))

    def _why(self, credits: Credits, stage: int) -> Why:
        if credits[stage] == 1:
            return "one"
        if credits[stage] <= self.least[stage]:
            return "round trip"
        fewer = _lowered(credits, range(stage, stage + 1), 1, self.least)
        try:
            if self.laboratory.try_out(fewer, self.target):
                return "open"
        except LimitReached:
            return "open"
        return "simulated" if self.laboratory.measure(fewer, EARLY_SAMPLES).exact else "estimated"

    def _descend(self, credits: Credits, forwards: bool) -> Credits:
        """Lower blocks of stages, of all at first, then of half as many, and single stages until none can be."""
        size = stages = len(credits)
        while True:
            before = credits
            blocks = [range(first, min(first + size, stages)) for first in range(0, stages, size)]
            for block in blocks if forwards else reversed(blocks):
                credits = self._lower(credits, block)
            if size == 1 and credits == before:
                return credits
            size = -(-size // 2)

    def _lower(self, credits: Credits, block: range) -> Credits:
        """Lower the credits of a block by as much as keeps the throughput: 1, 2, 4, ..., then by bisection."""
        most = max(credits[stage] - self.least[stage] for stage in block)
        good, step = 0, 1
        bad = most + 1
        while good < most and step < bad:
            step = min(step, most)
            if not self._keeps(_lowered(credits, block, step, self.least)):
                bad = step
                break
            good, step = step, 2 * step
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._keeps(_lowered(credits, block, middle, self.least)):
                good = middle
            else:
                bad = middle
        return _lowered(credits, block, good, self.least)

    def _keeps(self, credits: Credits) -> bool:
        laboratory = self.laboratory
        fewest = min(sum(choice.credits) for choice in self._kept)
        laboratory.progress(laboratory.simulations, f"{fewest:,} credits in all keep the throughput")
        kept = laboratory.try_out(credits, self.target)
        if kept:
            self._kept.append(laboratory.measure(credits))
        return kept


def _size(choice: Choice) -> tuple[int, int, float]:
    """What makes one choice smaller than another: credits in all, then memory, then delay."""
    return sum(choice.credits), choice.stash_bytes, choice.delay_mean


def _lowered(credits: Credits, block: range, step: int, least: Credits) -> Credits:
    """The credits of a block lowered by a step, none below the least."""
    return tuple(
        max(min(count, least[stage]), count - step) if stage in block else count for stage, count in enumerate(credits)
    )


# --- what it costs --------------------------------------------------------------------------------


def _choices(laboratory: Laboratory, minimum: Choice, tried: dict[str, Choice], reference: Choice) -> dict[str, Choice]:
    """What to lay side by side: the named credits, the file's own, and the minimum with more and more added."""
    laboratory.progress(laboratory.simulations, "comparing with other credits")
    stages = laboratory.machine.stages
    choices = {name: tried.get(name) or laboratory.measure(c) for name, c in named_credits(stages).items()}
    own = tuple(core.credits or 0 for core in laboratory.machine.cores)
    if all(own) and own not in [choice.credits for choice in choices.values()]:
        choices["the file's"] = laboratory.measure(own)
    choices["minimum"] = minimum
    for more in (1, 2):
        choices[f"minimum + {more}"] = laboratory.measure(tuple(count + more for count in minimum.credits))
    for multiple in (2, 4):
        choices[f"{multiple} x minimum"] = laboratory.measure(tuple(multiple * count for count in minimum.credits))
    if reference not in choices.values():
        choices["reference"] = reference
    return choices


def _anomalies(laboratory: Laboratory, minimum: Choice, choices: dict[str, Choice], target: Fraction) -> Iterator[str]:
    """A word on the slowest of those choices that have more credits and yet less throughput."""
    slower = {
        name: float(choice.cycles_per_sample / target) - 1
        for name, choice in choices.items()
        if choice.cycles_per_sample is not None
        and not laboratory.keeps(choice, target)
        and (choice.exact or choice.cycles_per_sample > target * (1 + FAR_OFF))
        and all(more >= count for more, count in zip(choice.credits, minimum.credits, strict=True))
    }
    if slower:
        name = max(slower, key=lambda name: slower[name])
        yield (
            f"more credits can be slower here: {name!r} needs {slower[name]:.1%} more cycles per sample, since a unit "
            "then takes samples in another order; the throughput is that of exactly these credits"
        )
