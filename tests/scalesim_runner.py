"""Runs SCALE-Sim's published package on some layers, in whatever interpreter has it; knows nothing of pbsim.

Reads from stdin, as JSON, `{"rows", "cols", "dataflow", "layers": {name: [height, width, kernel height, kernel width,
channels, filters, stride]}}`; writes to stdout, as JSON, per layer what its reports say: `cycles`, `stalls`,
`input_reads`, `filter_reads`. Its own output goes to stderr.

Usage: `python scalesim_runner.py < request.json`; `python scalesim_runner.py --versions` writes versions alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CONFIG = """[general]
run_name = run
[architecture_presets]
ArrayHeight: {rows}
ArrayWidth: {cols}
IfmapSramSzkB: 1024
FilterSramSzkB: 1024
OfmapSramSzkB: 1024
IfmapOffset: 0
FilterOffset: 10000000
OfmapOffset: 20000000
Bandwidth: 10
Dataflow: {dataflow}
ReadRequestBuffer: 64
WriteRequestBuffer: 64
[layout]
IfmapCustomLayout: False
IfmapSRAMBankBandwidth: 10
IfmapSRAMBankNum: 10
IfmapSRAMBankPort: 2
FilterCustomLayout: False
FilterSRAMBankBandwidth: 10
FilterSRAMBankNum: 10
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport: False
SparseRep: ellpack_block
OptimizedMapping: False
BlockSize: 8
RandomNumberGeneratorSeed: 40
[run_presets]
InterfaceBandwidth: CALC
UseRamulatorTrace: False
"""


def versions() -> dict[str, str]:
    """Installed versions, empty where a package is not there."""
    found = {}
    for package in ("scalesim", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def run(request: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Run all layers of a request on one array."""
    from scalesim.scale_sim import scalesim

    names = list(request["layers"])
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(sys.stderr):
        folder = Path(place)
        (folder / "array.cfg").write_text(CONFIG.format(**request))
        rows = [", ".join(map(str, [name, *request["layers"][name]])) + ",\n" for name in names]
        (folder / "layers.csv").write_text("header\n" + "".join(rows))
        layout = [f"{name}, " + ", ".join(["1"] * 30) + ",\n" for name in names]  # read, and not used
        (folder / "layout.csv").write_text("header\n" + "".join(layout))
        simulator = scalesim(
            save_disk_space=True,
            verbose=False,
            config=str(folder / "array.cfg"),
            topology=str(folder / "layers.csv"),
            layout=str(folder / "layout.csv"),
        )
        simulator.run_scale(top_path=str(folder))
        cycles = _table(folder / "run" / "COMPUTE_REPORT.csv")
        accesses = _table(folder / "run" / "DETAILED_ACCESS_REPORT.csv")
    return {
        name: {
            "cycles": int(float(time["Total Cycles"])),
            "stalls": int(float(time["Stall Cycles"])),
            "input_reads": int(float(access["SRAM IFMAP Reads"])),
            "filter_reads": int(float(access["SRAM Filter Reads"])),
        }
        for name, time, access in zip(names, cycles, accesses, strict=True)
    }


def _table(path: Path) -> list[dict[str, str]]:
    header, *rows = ([cell.strip() for cell in line.split(",")] for line in path.read_text().splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


if __name__ == "__main__":
    print(json.dumps(versions() if "--versions" in sys.argv else run(json.load(sys.stdin))))
