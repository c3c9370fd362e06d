"""Shipped machines: they hold what they are named after, say where every figure comes from, and run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest

from pbsim.config import Hardware, shipped
from pbsim.config.hardware import Core
from pbsim.experiment import load_hardware, simulate

HAS_SYSTOLIC = "systolic" in str(Core.model_fields["datapath"]).lower()
PRESETS = [
    "lockstep_ideal",
    "mesh",
    "wse_like",
    "ipu_like",
    pytest.param("systolic_32", marks=pytest.mark.skipif(not HAS_SYSTOLIC, reason="awaits the systolic datapath")),
]
MARK = re.compile(r"\[(src|run|page|derived|recalled|assumed)\b")


def figures(name: str) -> Iterator[tuple[str, str]]:
    """Every key of a preset that is a figure of the machine, with the comments that belong to it."""
    table, above = "", ""
    for line in shipped(Hardware)[name].read_text(encoding="utf-8").splitlines():
        content, _, comment = line.partition("#")
        content = content.strip()
        if content.startswith("["):
            table, above = content.strip("[]"), comment
        elif not content:
            above = f"{above} {comment}" if line else ""
        else:
            key, _, value = content.partition("=")
            if re.search(r"\d", re.sub(r'"[^"]*"', "", value)) and table not in ("pipeline", "batch_parallel"):
                yield f"{table}.{key.strip()}".lstrip("."), f"{above} {comment}"
            above = ""


@pytest.mark.parametrize("name", ["wse_like", "ipu_like"])
def test_every_figure_of_a_device_says_where_it_comes_from(name):
    found = dict(figures(name))
    assert {"clock_ghz", "mesh.rows", "core.datapath", "core.sram_kib", "fabric.link_bytes_per_cycle"} <= found.keys()
    assert [key for key, comments in found.items() if not MARK.search(comments)] == []


def test_the_wafer_has_the_rates_of_its_sources():
    table = load_hardware("wse_like")
    assert table.mesh.pes == 750 * 994 == 745_500
    # the wafer: 850,000 PEs at 1.1 GHz have 7.5 PFLOP/s; 40 GB; 20 PB/s and 220 Pb/s at about 1 GHz
    assert 2 * table.core.datapath.macs_per_cycle * 850_000 * 1.1e9 == pytest.approx(7.5e15, rel=0.01)
    assert table.core.sram_kib * 1024 * 850_000 == pytest.approx(40e9, rel=0.05)
    assert table.core.sram_bytes_per_cycle * 850_000 * 1e9 == pytest.approx(20e15, rel=0.03)
    assert table.fabric.link_bytes_per_cycle * 8 * 8 * 850_000 * 1e9 == pytest.approx(220e15, rel=0.02)


def test_the_ipu_has_the_rates_of_its_sources():
    table = load_hardware("ipu_like")
    tiles, clock = table.mesh.pes, table.clock_ghz * 1e9
    assert tiles == 1472
    assert 2 * table.core.datapath.macs_per_cycle * tiles * clock == pytest.approx(250e12, rel=0.01)
    assert table.core.sram_bytes_per_cycle * tiles * clock == pytest.approx(47.5e12, rel=0.01)
    assert table.fabric.link_bytes_per_cycle * tiles * clock == pytest.approx(8e12, rel=0.01)


@pytest.mark.skipif(not HAS_SYSTOLIC, reason="awaits the systolic datapath")
def test_the_systolic_machine_is_weight_stationary_with_resident_weights():
    datapath = load_hardware("systolic_32").core.datapath
    assert (datapath.rows, datapath.cols, datapath.dataflow, datapath.weights) == (32, 32, "ws", "resident")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs(name):
    run = simulate(name, "digits_mlp", samples=20, timing_only=True)
    s = run.summary
    assert s["status"] == "finished"
    assert s["sram_shortfall_bytes"] == 0
    assert 0 < s["initiation_interval_cycles"] * 20 <= s["cycles"]
    assert math.isfinite(s["samples_per_second"])
    assert (run.nodes["rows"] * run.nodes["cols"]).sum() == load_hardware(name).mesh.pes
