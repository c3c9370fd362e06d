"""The public verbs: from files to a run directory.

`simulate` is one straight line: resolve the files, capture the network, lay it out on the hardware, let the two planes
run one behind the other, and write down what they say.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pbsim.config import (
    Hardware,
    Method,
    Settings,
    Source,
    Workload,
    apply_overrides,
    builtin,
    dump_resolved,
    parse_method,
    read_source,
    validate,
    with_regions,
)
from pbsim.errors import Problem, UserError, user_error

if TYPE_CHECKING:
    from torch import nn

    from pbsim.datasets import Dataset
    from pbsim.hardware import Machine
    from pbsim.network import Network
    from pbsim.numerics.backend import Backend
    from pbsim.optim import LearningRate, UpdateRule
    from pbsim.results import Run
    from pbsim.results.progress import Report
    from pbsim.schedule import Batches
    from pbsim.schedule.credits import CreditSearch

HardwareLike = str | Path | Mapping[str, Any] | Hardware
WorkloadLike = str | Path | Mapping[str, Any] | Workload

_RUNS = threading.RLock()
"""Runs of several threads go one behind the other: threads of torch and BLAS are the process's, and so is the GIL."""


@dataclass(frozen=True)
class Resolved:
    """A validated experiment: the three tables, the method, and where hardware, workload and regions came from."""

    hardware: Hardware
    workload: Workload
    settings: Settings
    method: Method
    hardware_where: str
    workload_where: str
    regions_where: tuple[str, str]


def load_hardware(hardware: str | Path) -> Hardware:
    """Read a hardware file, or a shipped one by its name; raises `UserError` with all that is wrong in it."""
    return validate(Hardware, with_regions(read_source(Hardware, hardware)))


def load_workload(workload: str | Path) -> Workload:
    """Read a workload file, or a shipped one by its name; raises `UserError` with all that is wrong in it."""
    return validate(Workload, _absolute(read_source(Workload, workload)))


def check_file(name: str) -> list[str]:
    """What is in order in a hardware or workload file, and warnings, as lines; raises `UserError` with what is not.

    Of a workload the factory is looked up, for which its module is imported, but not called; data are not read.
    """
    from pbsim.config.files import read_either

    table, source = read_either(name)
    if isinstance(table, Workload):
        return _check_workload(table, source)
    assert isinstance(table, Hardware)
    return _check_hardware(table)


def _check_hardware(hardware: Hardware) -> list[str]:
    from pbsim.hardware.energy import ACTIONS, energy_table

    lines = [f"hardware {hardware.name!r}: keys and values are valid"]
    energy = energy_table(hardware)
    if energy is None:
        return [*lines, "note: no [energy] table: energy is not counted"]
    missing = [action for action in ACTIONS if action not in energy.entries]
    if missing:
        lines.append(f"note: energy {energy.name} has no entry for {', '.join(missing)} ({hardware.datatype}): 0 pJ")
    return lines


def _check_workload(workload: Workload, source: Source) -> list[str]:
    from pbsim.datasets import find_data
    from pbsim.network import find_factory

    find_factory(workload.model.factory, workload.model.arguments, base=source.base, where=source.where)
    lines = [
        f"workload {workload.name!r}: keys and values are valid",
        f"{workload.model.factory} is there and takes its arguments",
    ]
    try:
        place = find_data(workload.data, where=source.where, base=source.base)
    except UserError as error:
        return [*lines, *(f"warning: no data here: {problem.allowed}" for problem in error.problems)]
    return lines if place is None else [*lines, f"data at {place} (not read)"]


def simulate(
    hardware: HardwareLike,
    workload: WorkloadLike,
    method: str | None = None,
    *,
    seed: int | None = None,
    samples: int | None = None,
    epochs: int | None = None,
    out: str | Path | None = None,
    timing_only: bool | None = None,
    backend: str | None = None,
    settings: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    data: Any = None,
) -> Run:
    """Simulate a machine while a network trains on it.

    Parameters
    ----------
    hardware, workload : a file, the name of a shipped one, a dictionary, or a loaded table.
    method : `schedule[:batch][+mitigation[=value]]...`, for example `pb+lwpv+sc` or `sgd:32`; by default `pb`.
    seed : of initial weights, order of samples, augmentation and random data; by default 0.
    samples, epochs : length of the run; by default the workload's epochs.
    out : the run directory, which must not exist; by default a temporary one that goes with the returned object.
    timing_only : simulate the machine, and train nothing; by default False. The factory is then called on torch's meta
        device, so that a network of any size has no memory for its weights; the summary's `notes` say where that was
        not possible.
    backend : `numba` (the default) or `torch`.
    settings : keys of the `[run]` table: `precision`, `horizon`, `trace`, `threads`, `engine`, and those above. A key
        that is given both here and as an argument must have one value.
    model : a module in place of the workload's factory. When the run is done, it is cast to the run's precision and
        has the trained weights; with timing alone, or where a run is refused or fails, it is left as it is.
    data : arrays `(x_train, y_train, x_test, y_test)`, a dictionary of them, or a pair of torch data sets, in place of
        the workload's.

    Raises
    ------
    UserError : something in the files or arguments is wrong; it lists every problem.

    Notes
    -----
    Runs of several threads go one behind the other; use processes to have them side by side.
    """
    asked = {
        "method": method,
        "seed": seed,
        "samples": samples,
        "epochs": epochs,
        "backend": backend,
        "timing_only": timing_only,
    }
    handed_in = [name for name, given in (("model", model), ("data", data)) if given is not None]
    run = _settings(asked, settings)
    run["handed_in"] = sorted({*handed_in, *run.get("handed_in", [])}, reverse=True)
    sources = {
        "hardware": read_source(Hardware, hardware),
        "workload": read_source(Workload, workload),
        "run": Source(run, "settings"),
    }
    return run_experiment(resolve(sources), out, model=model, data=data)


def minimum_credits(
    hardware: HardwareLike,
    workload: WorkloadLike,
    method: str | None = None,
    *,
    tolerance: float = 0.0,
    event_limit: int | None = None,
    settings: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    data: Any = None,
) -> CreditSearch:
    """Find the fewest credits per stage that keep a pipeline's throughput, and what delay other choices cost.

    Nothing is trained, as in `simulate` with `timing_only`, whose other parameters these are. The machine is laid out
    once, for the credits that the hardware file has; `pbsim.schedule.credits` says how the search goes on from there.

    Parameters
    ----------
    tolerance : by which share the cycles per sample may grow; 0.02 trades 2 % of the throughput for shorter delays.
    event_limit : events of the simulations after which the search ends with the best it has; by default 100 million.

    Raises
    ------
    UserError : something in the files or arguments is wrong, or credits bound nothing: in lockstep, and under schedules
        that drain the pipeline.
    """
    handed_in = [name for name, given in (("model", model), ("data", data)) if given is not None]
    run = _settings({"method": method, "timing_only": True}, settings)
    run["handed_in"] = sorted({*handed_in, *run.get("handed_in", [])}, reverse=True)
    sources = {
        "hardware": read_source(Hardware, hardware),
        "workload": read_source(Workload, workload),
        "run": Source(run, "settings"),
    }
    return search_credits(resolve(sources), tolerance, event_limit, model=model, data=data)


def _settings(asked: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Arguments and `settings` together; raises `UserError` where one key has two values."""
    if settings is not None and not isinstance(settings, Mapping):
        raise user_error("settings", "", type(settings).__name__, "should be a dictionary of keys of [run]")
    arguments, table = (
        {key: value for key, value in builtin(given or {}).items() if value is not None} for given in (asked, settings)
    )
    problems = [
        Problem("settings", key, repr(table[key]), f"contradicts the argument {key}={arguments[key]!r}; give one")
        for key in arguments.keys() & table.keys()
        if arguments[key] != table[key]
    ]
    problems += [
        Problem("settings", key, repr(value), hint) for key, value in table.items() if (hint := _misplaced(key))
    ]
    if problems:
        raise UserError(problems)
    return {**arguments, **table}


def _misplaced(key: str) -> str:
    """What to do with a setting that is a key of a file; empty for all others."""
    head, *inner = str(key).removeprefix("hardware.").removeprefix("workload.").split(".")
    for name, kind in (("workload", Workload), ("hardware", Hardware)):
        if head in kind.model_fields and head not in Settings.model_fields:
            place = "".join(f"[{part!r}]" for part in (head, *inner))
            table = f"table = pbsim.load_{name}(...).model_dump(exclude_none=True)"
            return f"is a key of the {name}, not of [run]: {table}, then set table{place} and hand in the table"
    return ""


def resolve(sources: Mapping[str, Source], overrides: tuple[str, ...] = ()) -> Resolved:
    """Apply overrides and validate everything; raises `UserError` with the problems of all files together."""
    problems: list[Problem] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError as error:
            problems.extend(error.problems)

    attempt(lambda: apply_overrides(overrides, sources))
    hardware_source = attempt(lambda: with_regions(sources["hardware"])) or sources["hardware"]
    hardware = attempt(lambda: validate(Hardware, hardware_source))
    workload = attempt(lambda: validate(Workload, _absolute(sources["workload"])))
    settings = attempt(lambda: validate(Settings, sources["run"]))
    text = sources["run"].document.get("method", "pb")
    method: Method | None = attempt(lambda: parse_method(text)) if isinstance(text, str) else None
    if settings is not None and settings.samples is not None and settings.epochs is not None:
        problems.append(Problem(sources["run"].where, "samples", str(settings.samples), "excludes epochs: give one"))
    if problems or method is None:
        raise UserError(problems)
    horizon = method.horizon or settings.horizon
    settings = settings.model_copy(update={"method": str(method), "horizon": horizon})
    return Resolved(
        hardware,
        workload,
        settings,
        replace(method, horizon=horizon),
        sources["hardware"].where,
        sources["workload"].where,
        hardware_source.place_of("pipeline.placement"),
    )


def _absolute(source: Source) -> Source:
    """Make the paths of a workload independent of where its file lies, so that its resolved form can be rerun."""
    document, base = dict(source.document), source.base or Path.cwd()
    for table, key in (("data", "path"), ("model", "factory")):
        value = document.get(table, {}).get(key) if isinstance(document.get(table), Mapping) else None
        if isinstance(value, str) and (key == "path" or value.rpartition(":")[0].endswith(".py")):
            document[table] = {**document[table], key: str(base / Path(value).expanduser())}
    return Source(document, source.where, source.base, source.overrides)


def run_experiment(
    resolved: Resolved,
    out: str | Path | None,
    *,
    force: bool = False,
    model: nn.Module | None = None,
    data: Any = None,
    progress: Callable[[Report], None] | None = None,
) -> Run:
    """Run a resolved experiment; see `simulate`."""
    from pbsim.network import load_parameters
    from pbsim.results.place import find_place
    from pbsim.results.run import Run, temporary_place
    from pbsim.results.writer import RunWriter, window_samples, window_setting
    from pbsim.schedule import row_count

    path, keep = (Path(out), None) if out is not None else temporary_place()
    place = find_place(path, force)
    with _RUNS, _torch(resolved.settings.threads):
        setup = _set_up(resolved, model, data)
        window = window_samples(resolved.settings.trace, row_count(setup.machine, setup.batches), setup.total)
        setup = setup.with_settings(trace=window_setting(window, setup.total))
        with RunWriter(place, window) as writer:
            trained = _execute(setup, writer, progress or (lambda report: None))
            writer.publish()
        if trained is not None:
            load_parameters(setup.module, setup.resolved.settings.precision, trained)
    return Run(path, None if resolved.settings.timing_only else setup.module, keep)


def search_credits(
    resolved: Resolved,
    tolerance: float = 0.0,
    event_limit: int | None = None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    progress: Callable[[int, str], None] | None = None,
) -> CreditSearch:
    """Search the credits of a resolved experiment; see `minimum_credits`."""
    from pbsim.schedule.credits import EVENT_LIMIT, SAMPLES
    from pbsim.schedule.credits import minimum_credits as search

    _check_credits_matter(resolved, tolerance, event_limit)
    with _RUNS, _torch(resolved.settings.threads):
        setup = _set_up(resolved, model, data)
        _check_length(setup.machine, SAMPLES, resolved.hardware_where)
        found = search(setup.machine, tolerance=tolerance, event_limit=event_limit or EVENT_LIMIT, progress=progress)
        return replace(found, notes=(*setup.notes, *found.notes, *_laid_out_anew(setup, found)))


def _check_credits_matter(resolved: Resolved, tolerance: float, event_limit: int | None) -> None:
    """Refuse what has no credits to search."""
    problems = []
    if resolved.hardware.pipeline.timing == "lockstep":
        reason = "in lockstep the steps decide that stage s of S has 2(S-1-s)+1 samples in flight, whatever credits say"
        problems.append(Problem(resolved.hardware_where, "pipeline.timing", "lockstep", f"{reason}: use dataflow"))
    if resolved.method.drained:
        reason = (
            "drains the pipeline at every update: it has no delay, and no steady throughput that credits could keep"
        )
        problems.append(Problem("method", "", str(resolved.method), f"{reason}; search under pb"))
    if not 0 <= tolerance < float("inf"):
        problems.append(Problem("settings", "tolerance", str(tolerance), "should be a share from 0, for example 0.02"))
    if event_limit is not None and event_limit < 1:
        problems.append(Problem("settings", "event_limit", str(event_limit), "should be an integer from 1"))
    if problems:
        raise UserError(problems)


def _laid_out_anew(setup: Setup, found: CreditSearch) -> Iterator[str]:
    """What to know if the hardware file, with the credits found, lays the network out in another way.

    `balanced` shares out PEs by work and by memory, of which credits are a part.
    """
    from pbsim.hardware import build_machine
    from pbsim.schedule.credits import Laboratory, with_credits

    hardware, where, credits = setup.resolved.hardware, setup.resolved.hardware_where, found.minimum.credits
    pipeline = hardware.pipeline.model_copy(update={"credits": found.credits})
    hardware = hardware.model_copy(update={"pipeline": pipeline})
    try:
        machine = build_machine(hardware, setup.network, setup.rule, where, setup.resolved.regions_where)
    except UserError as error:
        yield f"with these credits in its file the network does not fit on the hardware: {error}"
        return
    searched = with_credits(setup.machine, credits)
    if (machine.cores, machine.channels, machine.link_ends) == (searched.cores, searched.channels, searched.link_ends):
        return
    choice = Laboratory(machine).measure(credits)
    pace = "deadlocks" if choice.cycles_per_sample is None else f"needs {choice.pace} cycles per sample"
    yield (
        f"`{pipeline.allocation}` shares out PEs by memory too: with these credits in its file the machine is laid out "
        f"in another way, and {pace}; put them there and search once more"
    )


@dataclass(frozen=True)
class Setup:
    """Everything a run is made of, ready to go."""

    resolved: Resolved
    module: nn.Module
    network: Network
    rule: UpdateRule
    machine: Machine
    lr: LearningRate
    decays: Mapping[str, float]
    dataset: Dataset | None
    epoch_samples: int
    total: int
    notes: tuple[str, ...]
    """What the user should know of how the run was set up."""

    @property
    def batches(self) -> Batches:
        """The samples of the run, cut into the batches of its updates."""
        from pbsim.schedule import Batches

        method = self.resolved.method
        return Batches(self.total, method.batch, method.drained, self.epoch_samples)

    def with_settings(self, **changes: Any) -> Setup:
        """The same with settings decided."""
        settings = self.resolved.settings.model_copy(update=changes)
        return replace(self, resolved=replace(self.resolved, settings=settings))


def _set_up(resolved: Resolved, model: nn.Module | None, data: Any) -> Setup:
    """Read data, build and capture the model, lay it out on the hardware."""
    import torch

    from pbsim.datasets import extent, from_user, load
    from pbsim.hardware import build_machine
    from pbsim.network import capture_network, check_trainable
    from pbsim.optim import LearningRate, scale_recipe, update_rule

    hardware, workload, settings = resolved.hardware, resolved.workload, resolved.settings
    where, table, training = resolved.workload_where, workload.data, workload.training
    missing = [
        name for name, given in (("model", model), ("data", data)) if name in settings.handed_in and given is None
    ]
    if missing:
        needed = f"this run needs its {' and '.join(missing)} handed in again"
        raise user_error("settings", "run.handed_in", settings.handed_in, needed)
    if model is not None and not isinstance(model, torch.nn.Module):
        raise user_error("settings", "model", type(model).__name__, "should be a torch.nn.Module")
    known = extent(table) if settings.timing_only and data is None else None
    dataset: Dataset | None = None
    if known is None:
        dataset = load(table, seed=settings.seed, where=where, base=None) if data is None else from_user(data)
        known = dataset.shape, dataset.train_samples
    shape, epoch_samples = known
    notes: tuple[str, ...] = ()
    origin = ("settings", "model") if model is not None else (where, "model.factory")
    if model is None:
        model, notes = _build(resolved)
    if not settings.timing_only:
        check_trainable(model, *origin)
    network = capture_network(model, shape, partition=workload.model.partition, loss=workload.loss.kind, where=where)
    if dataset is not None:
        dataset = _fit_targets(dataset, network, workload, where)
    rule = update_rule(resolved.method, scale_recipe(training, resolved.method.batch))
    machine = build_machine(hardware, network, rule, resolved.hardware_where, resolved.regions_where)
    epochs = None if settings.samples else settings.epochs or training.epochs
    total = settings.samples or (epochs or 0) * epoch_samples
    _check_length(machine, total, resolved.hardware_where)
    lr = LearningRate(rule.recipe, total, epoch_samples, training.warmup_epochs, training.decay)
    decays = _weight_decays(network, workload, where)
    setup = Setup(resolved, model, network, rule, machine, lr, decays, dataset, epoch_samples, total, notes)
    return setup.with_settings(epochs=epochs)


def _build(resolved: Resolved) -> tuple[nn.Module, tuple[str, ...]]:
    """The workload's model, with timing alone without memory for its weights; and what there is to say of that."""
    from pbsim.network import build_model, build_shapes

    factory, arguments = resolved.workload.model.factory, resolved.workload.model.arguments
    where, seed = resolved.workload_where, resolved.settings.seed
    if not resolved.settings.timing_only:
        return build_model(factory, arguments, base=None, where=where, seed=seed), ()
    model, note = build_shapes(factory, arguments, base=None, where=where, seed=seed)
    return model, (note,) if note else ()


def _fit_targets(dataset: Dataset, network: Network, workload: Workload, where: str) -> Dataset:
    """Targets as the loss wants them: labels below the model's outputs, or one target per output."""
    outputs = int(np.prod(network.shapes[network.output_value]))
    if workload.loss.kind == "cross_entropy":
        if not dataset.classes:
            raise user_error(
                where, "loss.kind", "cross_entropy", "needs integer labels; the data are regression targets"
            )
        if dataset.classes > outputs:
            raise user_error(
                where, "model", f"{outputs} outputs", f"too few for the {dataset.classes} classes of the data"
            )
        return dataset
    if dataset.classes:
        if dataset.classes > outputs:
            raise user_error(
                where, "model", f"{outputs} outputs", f"too few for the {dataset.classes} classes of the data"
            )
        one_hot = np.eye(outputs, dtype=np.float32)
        return replace(dataset, y_train=one_hot[dataset.y_train], y_test=one_hot[dataset.y_test])
    if dataset.y_train.shape[1] != outputs:
        given = dataset.y_train.shape[1]
        raise user_error(where, "model", f"{outputs} outputs", f"should be as many as the {given} targets of the data")
    return dataset


def _check_length(machine: Machine, total: int, where: str) -> None:
    """Refuse a run whose cycles may not be int64: as long as everything it does, one after the other."""
    work = sum(c.cycles.forward.total + c.cycles.backward for c in machine.cores)
    routes = [route for channel in machine.channels for route in (channel.forward, channel.gradient)]
    transfers = machine.host_cycles + sum(route.latency + route.serialisation for route in routes)
    cycles = (total + 2 * machine.stages) * (work + transfers)
    if cycles >= 2**63:
        raise user_error(where, "", "", f"{total} samples may take {cycles:.1e} cycles, too many to count in int64")


def _weight_decays(network: Network, workload: Workload, where: str) -> dict[str, float]:
    """Weight decay by parameter: the recipe's, or none for those it exempts."""
    patterns = workload.training.exempt
    unused = [p for p in patterns if not fnmatch.filter(network.parameters, p)]
    if unused:
        raise user_error(
            where,
            "training.exempt",
            unused,
            f"no parameter matches; there are {', '.join(network.parameters)}",
        )
    return {
        name: 0.0 if any(fnmatch.fnmatchcase(name, p) for p in patterns) else workload.training.weight_decay
        for name in network.parameters
    }


def _execute(setup: Setup, writer: Any, progress: Callable[[Report], None]) -> Mapping[str, Any] | None:
    """Let both planes run, the numbers a pipeline depth behind the clock, and write what they leave.

    Returns the trained parameters, None with timing alone; the module is left as it is.
    """
    from pbsim.datasets import TrainingData
    from pbsim.hardware.energy import energy_account, pipelined
    from pbsim.network import state_arrays, trained_arrays
    from pbsim.numerics.order import Horizon, orders
    from pbsim.numerics.training import due_samples, train
    from pbsim.results.audit import Audit
    from pbsim.results.metrics import MetricsStream
    from pbsim.results.progress import Report
    from pbsim.results.tables import (
        core_rows,
        energy_rows,
        energy_summary,
        link_rows,
        memory_rows,
        node_rows,
        notes,
        operation_rows,
        stage_rows,
        timing_summary,
        versions,
    )
    from pbsim.schedule import Chunk, run_pipeline

    settings, workload = setup.resolved.settings, setup.resolved.workload
    kept = writer.window if settings.timing_only and writer.window < setup.total else None
    timing, chunks = run_pipeline(setup.machine, setup.batches, engine=settings.engine, kept=kept)
    audit = Audit(setup.machine, setup.network, timing)
    window = writer.window if settings.timing_only else None
    metrics = MetricsStream(writer, setup.lr, settings.seed, setup.epoch_samples, window)
    done, latest = 0, float("nan")

    def watched() -> Iterator[Chunk]:
        nonlocal done
        for chunk in chunks:
            records = audit.watch(chunk)
            writer.events(chunk.rows)
            metrics.timed(records)
            done += len(records)
            reached = max(done, timing.entered)
            if reached < setup.total:
                progress(Report(reached, setup.total, chunk.until, latest))
            yield chunk
        progress(Report(setup.total, setup.total, timing.cycles, latest))

    evaluations: list[dict[str, Any]] = []
    trained: Mapping[str, Any] | None = None
    if settings.timing_only:
        for _ in watched():
            pass
    else:
        assert setup.dataset is not None
        before = state_arrays(setup.module, settings.precision)
        backend = _backend(setup, before)
        samples = TrainingData(setup.dataset, workload.data.augment, settings.seed)
        horizon = Horizon(setup.machine.stages, settings.horizon == "nominal")
        due = due_samples(workload.training.evaluate_every_epochs, setup.epoch_samples, setup.total)
        order = orders(watched(), setup.rule, setup.lr, horizon, setup.batches)
        for piece in train(order, backend, samples, setup.machine.stages, setup.batches, due):
            metrics.trained(piece.losses)
            latest = float(piece.losses.mean()) if len(piece.losses) else latest
            if piece.evaluation is not None:
                at = piece.evaluation
                evaluations.append(_evaluate(setup, backend, at.sample, at.cycle))
        evaluations.append(_evaluate(setup, backend, setup.total - 1, timing.cycles))
        trained = backend.parameters()
        writer.weights("initial.safetensors", before)
        writer.weights("weights.safetensors", trained_arrays(setup.module, before, trained))
    bounds = audit.finish()
    executed = pipelined(setup.machine, timing.samples, setup.batches.count, timing.cycles)
    energy = energy_account(setup.machine, executed)
    if energy is not None:
        audit.check_energy(energy)
    last = evaluations[-1] if evaluations else {}
    diverged = metrics.diverged or not np.isfinite(last.get("loss", 0.0))
    writer.table("stages", stage_rows(setup.network, timing))
    writer.table("operations", operation_rows(timing))
    writer.table("cores", core_rows(timing))
    writer.table("memory", memory_rows(timing))
    writer.table("nodes", node_rows(timing.machine))
    writer.table("links", link_rows(timing))
    writer.table("energy", energy_rows(energy))
    writer.table("evaluations", evaluations)
    writer.text("config.toml", dump_resolved(setup.resolved.hardware, workload, settings))
    writer.json(
        "summary.json",
        {
            "method": settings.method,
            "seed": settings.seed,
            "status": "diverged" if diverged else "finished",
            "accuracy": None if diverged else last.get("accuracy"),
            "loss": None if diverged else last.get("loss"),
            **timing_summary(timing),
            **energy_summary(energy),
            "bounds_cycles": bounds.__dict__,
            "trace_samples": writer.window,
            "precision": settings.precision,
            "horizon": settings.horizon,
            "backend": settings.backend,
            "timing_only": settings.timing_only,
            "notes": [*setup.notes, *notes(timing)],
            "versions": versions(),
        },
    )
    writer.figure()
    return trained


def _backend(setup: Setup, state: Mapping[str, Any]) -> Backend:
    """The backend that the settings name, with the model's weights."""
    settings = setup.resolved.settings
    if settings.backend == "numba":
        from pbsim.numerics.executor import NumbaBackend as Chosen
    else:
        from pbsim.numerics.torch_backend import TorchBackend as Chosen  # type: ignore[assignment]
    return Chosen(setup.network, state, setup.rule, setup.decays, settings.precision)


def _evaluate(setup: Setup, backend: Backend, sample: int, cycle: int) -> dict[str, Any]:
    """A row of `evaluations.parquet`: the test set on the weights as they are."""
    assert setup.dataset is not None
    targets = setup.dataset.y_test
    loss, outputs = backend.evaluate(setup.dataset.x_test, targets)
    accuracy = float("nan")
    if setup.dataset.classes and np.isfinite(loss):
        labels = targets if targets.ndim == 1 else targets.argmax(axis=1)
        accuracy = float((outputs.argmax(axis=1) == labels).mean())
    seconds = cycle / (setup.resolved.hardware.clock_ghz * 1e9)
    return {
        "sample": sample, "cycle": cycle, "seconds": seconds, "split": "test", "loss": loss, "accuracy": accuracy,
    }  # fmt: skip


@contextmanager
def _torch(threads: int | None) -> Iterator[None]:
    """Torch as a run needs it, whatever mode the caller is in; with so many threads."""
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)
