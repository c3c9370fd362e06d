"""How fast is the timing plane? The SimPy model beside bare SimPy, and the compiled engine beside the SimPy model.

At 34 stages (ResNet-20) and 169 stages (ResNet-110) on the mesh: rows of the trace per second, that is operations and
messages, loads from the host not counted. Bare SimPy is 100 processes that each wait for a timeout of one cycle, again
and again. All take turns, and the best of all rounds counts for each, so that whatever else the machine is doing falls
on all alike. Exits with 1 if a requirement does not hold.

    python benchmarks/timing_engines.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator

import numpy as np
import simpy

from pbsim.config import parse_method
from pbsim.errors import UserError
from pbsim.experiment import load_hardware, load_workload
from pbsim.hardware import Machine, build_machine
from pbsim.network import build_shapes, capture_network
from pbsim.optim import scale_recipe, update_rule
from pbsim.schedule import Batches, Op, run_pipeline
from pbsim.schedule.pipeline import Engine

WORKLOADS = ("resnet20_cifar10", "resnet110_cifar10")
LEAST_OF_BARE = 0.25
"""Rows of the SimPy model per bare timeout, in the same time."""
LEAST_OF_SIMPY = 5.0
"""Rows of the compiled engine per row of the SimPy model, in the same time."""
COMPILED_ROWS = 8
"""Rows of a run on the compiled engine, per row of one on the SimPy model."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of a run on the SimPy model, about [60000]")
    parser.add_argument("--hardware", default="mesh")
    options = parser.parse_args()
    machines = [on_hardware(workload, options.hardware) for workload in WORKLOADS]
    for machine in machines:
        rows_per_second(machine, 100, "compiled")  # compiles
        rows_per_second(machine, 100, "simpy")
    bare, model, compiled = 0.0, [0.0] * len(machines), [0.0] * len(machines)
    for _ in range(options.rounds):
        for index, machine in enumerate(machines):
            bare = max(bare, bare_timeouts_per_second())
            model[index] = max(model[index], rows_per_second(machine, options.rows, "simpy"))
            rows = COMPILED_ROWS * options.rows
            compiled[index] = max(compiled[index], rows_per_second(machine, rows, "compiled"))
    print(f"bare SimPy: {bare:,.0f} timeouts/s, the best of {options.rounds * len(machines)} rounds")
    print(f"{'stages':>6} {'SimPy model':>14} {'of bare':>8} {'':>9} {'compiled':>14} {'of SimPy':>9}")
    held = True
    for machine, simpy_rows, compiled_rows in zip(machines, model, compiled, strict=True):
        of_bare, of_simpy = simpy_rows / bare, compiled_rows / simpy_rows
        first, second = of_bare >= LEAST_OF_BARE, of_simpy >= LEAST_OF_SIMPY
        held = held and first and second
        print(
            f"{machine.stages:>6} {simpy_rows:>12,.0f}/s {of_bare:>8.1%} {verdict(first, f'{LEAST_OF_BARE:.0%}')} "
            f"{compiled_rows:>12,.0f}/s {of_simpy:>8.1f}x {verdict(second, f'{LEAST_OF_SIMPY:.0f}x')}"
        )
    return 0 if held else 1


def verdict(holds: bool, least: str) -> str:
    """Whether a requirement holds."""
    return f"({'>=' if holds else 'below'} {least})"


def on_hardware(workload: str, hardware: str) -> Machine:
    """A shipped workload's network on the hardware, under pipelined backpropagation."""
    table, method = load_workload(workload), parse_method("pb")
    factory, arguments = table.model.factory, table.model.arguments
    module, _ = build_shapes(factory, arguments, base=None, where=workload, seed=0)
    shape = table.data.shape
    assert shape is not None  # of CIFAR-10
    network = capture_network(
        module, tuple(shape), partition=table.model.partition, loss=table.loss.kind, where=workload
    )
    return build_machine(load_hardware(hardware), network, update_rule(method, scale_recipe(table.training, 1)))


def bare_timeouts_per_second(processes: int = 100, timeouts: int = 2000) -> float:
    """SimPy with nothing in it but processes that wait."""

    def wait(env: simpy.Environment) -> Generator[simpy.Event, object, None]:
        for _ in range(timeouts):
            yield env.timeout(1)

    env = simpy.Environment()
    for _ in range(processes):
        env.process(wait(env))
    begin = time.perf_counter()
    env.run()
    return processes * timeouts / (time.perf_counter() - begin)


def rows_per_second(machine: Machine, rows: int, engine: Engine) -> float:
    """Operations and messages per second of a run of about so many rows, every event simulated."""
    per_sample = 4 * machine.stages + 2 * len(machine.channels)
    samples = max(1, rows // per_sample)
    begin = time.perf_counter()
    _, chunks = run_pipeline(machine, Batches(samples), engine=engine, skip=False)
    pieces = [chunk.rows.op for chunk in chunks]
    seconds = time.perf_counter() - begin
    seen = int((np.concatenate(pieces) != Op.LOAD).sum())
    if seen != samples * per_sample:
        raise AssertionError(f"{seen} rows of {samples} samples, not {samples * per_sample}")
    return seen / seconds


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
