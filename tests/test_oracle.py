"""pbsim against plain PyTorch: every mitigation in lockstep; one stage and drained pipelines against its SGD."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import models
import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

import pbsim
from pbsim.config import Hardware, read_source

SAMPLES = 500
TRAINING = {
    "batch_size": 8,
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.01,
    # 0.07 * 500 is 35.000000000000004 in binary: the decay must act from sample 35 on, not 36.
    "decay": {"kind": "step", "at": [0.07, 0.555, 0.8], "factor": 0.6},
}
METHODS = ("pb", "pb+sc", "pb+lwpv", "pb+lwpw", "pb+lwpv+sc", "pb+ws")
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


def workload(factory: str = "skip_net", partition: str | list[str] = "layer", **training: object) -> dict:
    return {
        "name": "oracle",
        "model": {"factory": f"{Path(models.__file__).resolve()}:{factory}", "partition": partition},
        "data": {"kind": "random", "shape": [2, 6, 6], "classes": 4},
        "training": TRAINING | training,
    }


@lru_cache
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images in float32 (so that both precisions see the same values), labelled by their hottest quadrant."""
    x = np.random.default_rng(7).normal(size=(260, 2, 6, 6)).astype(np.float32)
    quadrants = x.sum(axis=1).reshape(len(x), 2, 3, 2, 3).sum(axis=(2, 4)).reshape(len(x), 4)
    y = quadrants.argmax(axis=1)
    return x[:200], y[:200], x[200:], y[200:]


def build(factory: str = "skip_net", seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return getattr(models, factory)()


def mitigations_of(method: str) -> dict[str, float]:
    items = [item.partition("=") for item in method.split("+")[1:]]
    return {name: float(value or 1) for name, _, value in items}


@lru_cache
def expected(method: str, horizon: str, partition: str, exempt: str) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """Losses, final weights and final test loss of the reference, in float64."""
    x, y, x_test, y_test = (torch.from_numpy(a) for a in arrays())
    order = torch.from_numpy(oracle.sample_order(3, len(x), SAMPLES))
    model = build().to(torch.float64)
    stages = oracle.skip_net_stages(model, partition)
    losses = oracle.run_lockstep(
        stages,
        x[order].to(torch.float64),
        y[order],
        oracle.Recipe.scaled(TRAINING, SAMPLES),
        mitigations_of(method),
        horizon,
        exempt=lambda name: bool(exempt) and name.endswith(exempt),
    )
    for stage in stages:
        stage.load(stage.weights)
    with torch.no_grad():
        loss = functional.cross_entropy(model(x_test.to(torch.float64)), y_test).item()
    return losses, oracle.final_weights(stages), loss


def differences(
    method: str,
    horizon: str = "measured",
    precision: str = "float64",
    backend: str = "numba",
    partition: str = "layer",
    exempt: str = "",
) -> dict[str, float]:
    """Largest relative differences of pbsim from the reference."""
    losses, weights, test_loss = expected(method, horizon, partition, exempt)
    run = pbsim.simulate(
        "lockstep_ideal",
        workload(partition=partition, exempt=[f"*{exempt}"] if exempt else []),
        method,
        seed=3,
        samples=SAMPLES,
        backend=backend,
        settings={"precision": precision, "horizon": horizon},
        model=build(),
        data=arrays(),
    )
    metrics = run.metrics.sort_values("sample")
    trained = {name: w.detach().numpy() for name, w in run.model.named_parameters()}
    assert trained.keys() == weights.keys()
    assert all(w.dtype == np.dtype(precision) for w in trained.values())
    lr_at = oracle.Recipe.scaled(TRAINING, SAMPLES).lr_at
    np.testing.assert_allclose(metrics["lr"], [lr_at(i) for i in range(SAMPLES)], rtol=1e-13)
    np.testing.assert_array_equal(metrics["dataset_index"], oracle.sample_order(3, 200, SAMPLES))
    return {
        "losses": oracle.relative_difference(metrics["loss"].to_numpy(), losses),
        "weights": max(oracle.relative_difference(trained[name], weights[name]) for name in weights),
        "evaluation": oracle.relative_difference(np.array([run.evaluations["loss"].iloc[-1]]), np.array([test_loss])),
    }


def assert_agreement(found: dict[str, float], precision: str) -> None:
    assert all(difference < TOLERANCE[precision] for difference in found.values()), found


@pytest.mark.parametrize("method", METHODS)
def test_lockstep_agrees_with_the_oracle_in_float64(method: str) -> None:
    assert_agreement(differences(method), "float64")


@pytest.mark.parametrize("method", METHODS)
def test_lockstep_agrees_with_the_oracle_in_float32(method: str) -> None:
    assert_agreement(differences(method, precision="float32"), "float32")


@pytest.mark.parametrize("method", ["pb+lwpv+sc", "pb+lwpw", "pb+ws"])
def test_torch_backend_agrees_with_the_oracle(method: str) -> None:
    assert_agreement(differences(method, backend="torch"), "float64")


def test_torch_backend_agrees_with_the_oracle_in_float32() -> None:
    assert_agreement(differences("pb+lwpv+sc", backend="torch", precision="float32"), "float32")


@pytest.mark.parametrize("method", ["pb+lwpv+sc", "pb+lwpw+sc"])
def test_nominal_horizon_agrees_with_the_oracle(method: str) -> None:
    assert_agreement(differences(method, horizon="nominal"), "float64")


@pytest.mark.parametrize("method", ["pb+lwpv=2+sc=0.5", "pb+lwpw+ws", "pb+lwpv+sc+ws"])
def test_multiples_and_combinations_agree_with_the_oracle(method: str) -> None:
    assert_agreement(differences(method), "float64")


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_stages_without_parameters_agree_with_the_oracle(backend: str) -> None:
    """The addition and the loss as stages of their own: two more versions of nothing, four more of delay."""
    assert_agreement(differences("pb+lwpv+sc", partition="residual", backend=backend), "float64")


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_exempt_parameters_do_not_decay(backend: str) -> None:
    assert_agreement(differences("pb+sc", exempt=".bias", backend=backend), "float64")


def test_the_oracle_tells_the_methods_apart() -> None:
    """An agreement means nothing where a wrong method would agree as well."""
    cases = [(m, "measured") for m in METHODS] + [("pb+lwpv+sc", "nominal"), ("pb+lwpw+ws", "measured")]
    for one in cases:
        for other in cases:
            if one != other:
                a, b = expected(*one, "layer", "")[1], expected(*other, "layer", "")[1]
                assert max(oracle.relative_difference(a[n], b[n]) for n in a) > 1e-4, (one, other)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(
    ("factory", "partition"), [("single_linear", "layer"), ("whole_skip_net", ["body"])], ids=["linear", "list"]
)
@pytest.mark.parametrize("method", ["pb", "pb+sc", "pb+lwpv", "pb+lwpw", "pb+lwpv+sc", "pb+lwpw+sc", "pb+ws"])
def test_one_stage_is_sgd(method: str, factory: str, partition: str | list[str], backend: str) -> None:
    samples = 120
    run = pbsim.simulate(
        "mesh",
        workload(factory, partition),
        method,
        seed=3,
        samples=samples,
        backend=backend,
        settings={"precision": "float64"},
        model=build(factory),
        data=arrays(),
    )
    assert len(run.stages) == 1
    losses, weights, _ = sgd(factory, samples)
    assert oracle.relative_difference(run.metrics.sort_values("sample")["loss"].to_numpy(), losses) < 1e-9
    for name, w in run.model.named_parameters():
        assert oracle.relative_difference(w.detach().numpy(), weights[name]) < 1e-9


@lru_cache
def sgd(
    factory: str, samples: int, size: int = 1, warmup_epochs: float = 0, nesterov: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """torch.optim.SGD on the whole module: losses of the samples, final weights, test loss.

    An update has the learning rate of its batch's first sample; warm-up counts updates (DESIGN 5.6).
    """
    x, y, x_test, y_test = (torch.from_numpy(a) for a in arrays())
    model = build(factory).to(torch.float64)
    recipe = oracle.Recipe.scaled(TRAINING, samples, size)
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=nesterov
    )
    order = oracle.sample_order(3, len(x), samples)
    losses = []
    for number, batch in enumerate(oracle.batches(samples, len(x), size)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(batch[0]) * warm(number, warmup_epochs * len(x) / size)
        optimizer.zero_grad()
        chosen = torch.from_numpy(order[list(batch)])
        each = functional.cross_entropy(model(x[chosen].to(torch.float64)), y[chosen], reduction="none")
        each.mean().backward()
        optimizer.step()
        losses.extend(each.tolist())
    with torch.no_grad():
        test_loss = functional.cross_entropy(model(x_test.to(torch.float64)), y_test).item()
    return np.array(losses), {name: w.detach().numpy() for name, w in model.named_parameters()}, test_loss


def warm(update: int, updates: float) -> float:
    return min(1.0, (update + 1) / updates) if updates else 1.0


def drained(
    size: int,
    hardware: str | dict = "lockstep_ideal",
    backend: str = "numba",
    precision: str = "float64",
    **training: object,
) -> pbsim.Run:
    """`sgd:size` on the net with a skip edge, two and a half epochs of 200 samples."""
    partition = training.pop("partition", "layer")
    return pbsim.simulate(
        hardware,
        workload(partition=partition, **training),
        f"sgd:{size}",
        seed=3,
        samples=SAMPLES,
        backend=backend,
        settings={"precision": precision},
        model=build(),
        data=arrays(),
    )


def sgd_differences(run: pbsim.Run, size: int, **recipe: object) -> dict[str, float]:
    """Largest relative differences of a drained run from torch.optim.SGD."""
    losses, weights, test_loss = sgd("skip_net", SAMPLES, size, **recipe)
    trained = {name: w.detach().numpy() for name, w in run.model.named_parameters()}
    return {
        "losses": oracle.relative_difference(run.metrics.sort_values("sample")["loss"].to_numpy(), losses),
        "weights": max(oracle.relative_difference(trained[name], weights[name]) for name in weights),
        "evaluation": oracle.relative_difference(np.array([run.evaluations["loss"].iloc[-1]]), np.array([test_loss])),
    }


def test_the_oracles_batches_end_with_the_epoch_and_with_the_run() -> None:
    assert oracle.batches(11, 5, 2) == [
        range(a, b) for a, b in ((0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10), (10, 11))
    ]


# Epochs of 200 samples and a run of 500: batches of 7 leave 4 at the end of an epoch and 2 at that of the run, batches
# of 32 leave 8 and 4. Step decays act from samples 35, 278 and 400, of which 278 is no batch's first.
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("hardware", ["lockstep_ideal", "mesh"])
@pytest.mark.parametrize("size", [1, 7, 32])
def test_a_drained_pipeline_is_sgd(size: int, hardware: str, backend: str) -> None:
    assert_agreement(sgd_differences(drained(size, hardware, backend), size), "float64")


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_drained_pipeline_with_stages_without_parameters_is_sgd(backend: str) -> None:
    assert_agreement(sgd_differences(drained(7, "mesh", backend, partition="residual"), 7), "float64")


@pytest.mark.parametrize("warmup_epochs", [0.33, 1.2])
def test_a_drained_pipeline_warms_up_by_updates(warmup_epochs: float) -> None:
    """Over 9.4 updates, and over 34.3, of which 29 are of the first epoch: the smaller one at its end counts too."""
    run = drained(7, warmup_epochs=warmup_epochs)
    assert_agreement(sgd_differences(run, 7, warmup_epochs=warmup_epochs), "float64")


def test_a_drained_pipeline_has_torchs_nesterov() -> None:
    assert_agreement(sgd_differences(drained(7, nesterov=True), 7, nesterov=True), "float64")


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_drained_pipeline_is_sgd_in_float32(backend: str) -> None:
    assert_agreement(sgd_differences(drained(32, backend=backend, precision="float32"), 32), "float32")


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("units", ["shared", "split"])
@pytest.mark.parametrize(
    "pipeline",
    [
        {},
        {"credits": "unbounded"},
        {"credits": [3, 1, 4, 1, 5, 2], "priority": "forward"},
        {"credits": "unbounded", "output_slots": 1, "memory": "enforce"},
    ],
    ids=["as it is", "unbounded credits", "uneven credits", "enforced memory"],
)
def test_weights_of_a_drained_pipeline_do_not_depend_on_its_timing(pipeline: dict, units: str, precision: str) -> None:
    """Every timing adds the gradients of a batch in the order of its samples: the same bits."""
    mesh = read_source(Hardware, "mesh").document
    mesh |= {"pipeline": mesh["pipeline"] | pipeline, "core": mesh["core"] | {"units": units}}
    one, other = (drained(7, hardware, precision=precision) for hardware in ("lockstep_ideal", mesh))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())
    assert one.metrics["loss"].tolist() == other.metrics["loss"].tolist()


def test_with_unbounded_credits_the_stashes_of_a_whole_batch_are_held() -> None:
    """Credits bound what a batch may hold: 2(S-1-s) + 1 samples by default, without them all of its N."""
    mesh = read_source(Hardware, "mesh").document
    stash = {}
    for credits in (1, "lockstep", "unbounded"):
        run = drained(32, mesh | {"pipeline": {"credits": credits}})
        rows = run.memory[(run.memory["core"] == 0) & (run.memory["category"] == "stash")]
        stash[credits] = int(rows["peak_bytes"].iloc[0])
    assert stash["lockstep"] == 11 * stash[1]
    assert stash["unbounded"] == 32 * stash[1]


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(
    ("factory", "partition"), [("single_linear", "layer"), ("whole_skip_net", ["body"])], ids=["linear", "list"]
)
def test_with_one_stage_sgd_at_batch_one_is_pb(factory: str, partition: str | list[str], backend: str) -> None:
    runs = [
        pbsim.simulate(
            "mesh",
            workload(factory, partition),
            method,
            seed=3,
            samples=120,
            backend=backend,
            model=build(factory),
            data=arrays(),
        )
        for method in ("pb", "sgd:1")
    ]
    for name in ("metrics", "events", "stages", "cores"):
        pd.testing.assert_frame_equal(runs[0].table(name), runs[1].table(name), check_exact=True)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())


def test_autograd_sees_the_weights_copied_in_after_the_forward() -> None:
    """The oracle's own footing: gradients by hand, activations of the old weights, weights of the new ones."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 3, padding=1).to(torch.float64)
    norm = nn.GroupNorm(2, 4).to(torch.float64)
    linear = nn.Linear(4 * 25, 3).to(torch.float64)
    module = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), linear)
    stage = oracle.Stage(module, ("x",), "y").adopt(module)
    old = [torch.randn_like(w) for w in stage.weights]
    new = [torch.randn_like(w) for w in stage.weights]
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    error = torch.randn(1, 3, dtype=torch.float64)

    stage.load(old)
    result = module(x)
    stage.load(new)
    own = oracle.Saved([x], result, old, 0)
    found = oracle.backpropagate(stage, own, error)

    with torch.no_grad():
        convolved = functional.conv2d(x, old[0], old[1], padding=1)
        groups = convolved.reshape(1, 2, -1)
        deviation = (groups.var(dim=2, unbiased=False, keepdim=True) + norm.eps).sqrt()
        normal = (groups - groups.mean(dim=2, keepdim=True)) / deviation
        scaled = normal.reshape(1, 4, 5, 5) * old[2].view(1, 4, 1, 1) + old[3].view(1, 4, 1, 1)
        hidden = scaled.clamp(min=0).flatten(1)
        at_scaled = ((error @ new[4]).reshape(1, 4, 5, 5)) * (scaled > 0)
        at_normal = (at_scaled * new[2].view(1, 4, 1, 1)).reshape(1, 2, -1)
        projection = normal * (at_normal * normal).mean(dim=2, keepdim=True)
        centred = at_normal - at_normal.mean(dim=2, keepdim=True) - projection
        at_convolved = (centred / deviation).reshape(1, 4, 5, 5)
        at_input = functional.conv_transpose2d(at_convolved, new[0], padding=1)
        patches = functional.unfold(x, 3, padding=1)[0]
        by_hand = [
            at_input,
            (at_convolved.reshape(4, -1) @ patches.T).reshape(4, 2, 3, 3),
            at_convolved.sum(dim=(0, 2, 3)),
            (at_scaled * normal.reshape(1, 4, 5, 5)).sum(dim=(0, 2, 3)),
            at_scaled.sum(dim=(0, 2, 3)),
            error.T @ hidden,
            error[0],
        ]
    for one, other in zip(found, by_hand, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
