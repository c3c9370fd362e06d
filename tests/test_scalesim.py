"""Fold formulas against SCALE-Sim's own published package, on layers of AlexNet and ResNet-18.

Slow (minutes), and skipped where the package is not at hand. SCALE-Sim 3.0.0 (PyPI) needs numpy < 2.4: it takes `int()`
of an array of one element (memory/double_buffered_scratchpad_mem.py, line 307), which numpy 2.4 refuses. Where pbsim
runs with a newer numpy, give SCALE-Sim an environment of its own:

    python3 -m venv scalesim-venv
    scalesim-venv/bin/pip install scalesim==3.0.0 'numpy<2.4'
    PBSIM_SCALESIM_PYTHON=scalesim-venv/bin/python pytest -m slow tests/test_scalesim.py

(In an environment with an older numpy, `pip install 'pbsim[scalesim]'` is enough.) SCALE-Sim reports the index of the
last cycle, so that its value plus one is the number of cycles. It knows no padding, and rounds the number of windows
up: it is given exactly the padded map that the layer's windows cover. Its bandwidth is left to be calculated, so that
nothing stalls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_gemm import one_operator

from pbsim.config.hardware import SystolicDatapath
from pbsim.hardware.datapaths import fold
from pbsim.hardware.gemm import Gemm, gemms

pytestmark = pytest.mark.slow

RUNNER = Path(__file__).with_name("scalesim_runner.py")
PYTHON = os.environ.get("PBSIM_SCALESIM_PYTHON", sys.executable)
ROWS, COLS = 64, 128  # a rectangle: rows and columns taken for each other would show


class Layer(NamedTuple):
    """A convolution over a square map; a Linear layer is one over a map of a single position."""

    size: int
    channels: int
    filters: int
    kernel: int
    stride: int
    padding: int


LAYERS = {
    "alexnet conv1": Layer(224, 3, 64, 11, 4, 2),
    "alexnet conv2": Layer(27, 64, 192, 5, 1, 2),
    "alexnet conv3": Layer(13, 192, 384, 3, 1, 1),
    "alexnet conv4": Layer(13, 384, 256, 3, 1, 1),
    "alexnet conv5": Layer(13, 256, 256, 3, 1, 1),
    "resnet18 layer1.0.conv1": Layer(56, 64, 64, 3, 1, 1),
    "resnet18 layer2.0.conv1": Layer(56, 64, 128, 3, 2, 1),
    "resnet18 layer2.0.downsample": Layer(56, 64, 128, 1, 2, 0),
    "resnet18 layer2.0.conv2": Layer(28, 128, 128, 3, 1, 1),
    "resnet18 layer3.0.conv1": Layer(28, 128, 256, 3, 2, 1),
    "resnet18 layer3.0.downsample": Layer(28, 128, 256, 1, 2, 0),
    "resnet18 layer4.0.conv1": Layer(14, 256, 512, 3, 2, 1),
    "resnet18 layer4.0.downsample": Layer(14, 256, 512, 1, 2, 0),
    "resnet18 fc": Layer(1, 512, 1000, 1, 1, 0),
}


def ask(*arguments: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [PYTHON, str(RUNNER), *arguments], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@cache
def reason_to_skip() -> str:
    found = ask("--versions")
    if not found["scalesim"]:
        return f"{PYTHON} has no scalesim: see this file's docstring"
    if tuple(map(int, found["numpy"].split(".")[:2])) >= (2, 4):
        return f"{PYTHON} has numpy {found['numpy']}, and SCALE-Sim needs numpy < 2.4: see this file's docstring"
    return ""


@cache
def reported(dataflow: str) -> dict[str, dict[str, int]]:
    """What SCALE-Sim reports on all layers."""
    layers = {}
    for name, layer in LAYERS.items():
        outputs = (layer.size + 2 * layer.padding - layer.kernel) // layer.stride + 1
        covered = (outputs - 1) * layer.stride + layer.kernel
        shape = [covered, covered, layer.kernel, layer.kernel, layer.channels, layer.filters, layer.stride]
        layers[name] = shape
    return ask(request={"rows": ROWS, "cols": COLS, "dataflow": dataflow, "layers": layers})


def product(layer: Layer) -> Gemm:
    """The layer's forward, as pbsim sees the convolution of a network."""
    pair = {"kernel": layer.kernel, "stride": layer.stride, "padding": layer.padding, "padding_end": layer.padding}
    attributes = {name: (value, value) for name, value in {**pair, "dilation": 1}.items()} | {"groups": 1}
    weight = (layer.filters, layer.channels, layer.kernel, layer.kernel)
    (found,) = gemms(*one_operator("conv2d", attributes, (layer.channels, layer.size, layer.size), (weight,))).forward
    return found


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
@pytest.mark.parametrize("name", LAYERS)
def test_cycles_and_reads_equal_scale_sims(name, dataflow):
    if reason := reason_to_skip():
        pytest.skip(reason)
    gemm, theirs = product(LAYERS[name]), reported(dataflow)[name]
    ours = fold(SystolicDatapath(kind="systolic", rows=ROWS, cols=COLS, dataflow=dataflow), gemm)
    assert theirs["stalls"] == 0
    assert ours.count * ours.cycles == theirs["cycles"] + 1
    # it counts what it reads of either operand; we add results, written per fold along K and read back for the next
    folds_along_k = 1 if dataflow == "os" else -(-gemm.k // ROWS)
    results = gemm.m * gemm.n * (2 * folds_along_k - 1)
    assert ours.elements - results == theirs["input_reads"] + theirs["filter_reads"]
