"""Train ResNet-20 by pipelined backpropagation on a slice of the real CIFAR-10: does the loss fall, and how fast is it?

The images come from `image_folder` data: a folder or zip laid out as train|test/class/file, found by `--data` or below
`$PBSIM_DATA`. Prints the mean loss of each tenth of the run, the accuracy on a slice of the test set, and the
executor's time per sample beside that of PyTorch at batch one, measured in the same run. Exits with 1 if the loss has
not fallen.

    python benchmarks/cifar_resnet20.py --data cifar10-images.zip
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import pbsim
from pbsim.config import Source, Workload, read_source
from pbsim.errors import UserError
from pbsim.experiment import resolve, run_experiment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder or zip of images")
    parser.add_argument("--images", type=int, default=2000, help="training images [2000]")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--method", default="pb+lwpv+sc")
    parser.add_argument("--hardware", default="mesh")
    options = parser.parse_args()
    workload = read_source(Workload, "resnet20_cifar10").document
    workload["data"] |= {"kind": "image_folder", "train_samples": options.images, "test_samples": 500}
    if options.data:
        workload["data"]["path"] = str(Path(options.data).resolve())
    workload["training"] |= {"epochs": options.epochs}
    run, seconds = timed_run(options.hardware, workload, options.method)
    loss = run.metrics.sort_values("sample")["loss"].to_numpy()
    tenths = [float(part.mean()) for part in np.array_split(loss, 10)]
    print(f"{len(loss)} samples of {options.images} images, {options.method} on {options.hardware}")
    print("mean training loss by tenths of the run:", " ".join(f"{value:.3f}" for value in tenths))
    print(f"accuracy on 500 test images: {run.summary['accuracy']:.1%}; utilization {run.summary['utilization']:.1%}")
    reference = torch_seconds_per_sample()
    ours = seconds / len(loss)
    print(
        f"whole run {1e3 * ours:.2f} ms per sample; PyTorch at batch one {1e3 * reference:.2f} ms: "
        f"ratio {ours / reference:.2f}"
    )
    return 0 if tenths[-1] < tenths[0] else 1


def timed_run(hardware: str, workload: dict[str, Any], method: str) -> tuple[pbsim.Run, float]:
    """A run after a short one that compiles everything, and its seconds from the first sample's report on."""
    pbsim.simulate(hardware, workload, method, samples=2)
    from pbsim.config import Hardware

    sources = {
        "hardware": read_source(Hardware, hardware),
        "workload": Source(workload, "benchmark"),
        "run": Source({"method": method}, "benchmark"),
    }
    reports: list[float] = []
    run = run_experiment(resolve(sources), None, progress=lambda report: reports.append(time.perf_counter()))
    return run, time.perf_counter() - reports[0]


def torch_seconds_per_sample(samples: int = 100) -> float:
    """Forward, backward and SGD step of the same net in eager PyTorch at batch one, on one thread."""
    import torch

    from pbsim.network.zoo import resnet_cifar

    torch.set_num_threads(1)
    model, x, y = resnet_cifar(depth=20), torch.randn(1, 3, 32, 32), torch.tensor([3])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(samples + 10):
        if step == 10:
            begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return (time.perf_counter() - begin) / samples


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
