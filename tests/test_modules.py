"""Modules before and after a run: what is refused, what is left alone, and what torch's own state has to do with it."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from pbsim import Run, UserError, open_run, simulate

WORKLOAD: dict[str, Any] = {
    "name": "made_up",
    "model": {"factory": "pbsim.network.zoo:mlp", "arguments": {"features": 6, "hidden": [5], "classes": 3}},
    "data": {"kind": "random", "shape": [6], "classes": 3, "train_samples": 40, "test_samples": 10},
    "training": {"batch_size": 4, "lr": 0.05, "momentum": 0.9},
}


def module() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def run(model: Any = None, **arguments: Any) -> Run:
    return simulate("mesh", arguments.pop("workload", WORKLOAD), samples=10, model=model, **arguments)


def weights(run: Run) -> dict[str, np.ndarray]:
    return load_file(run.path / "weights.safetensors")


# What is refused


def with_complex_buffer(model: nn.Module) -> None:
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))


def with_complex_parameter(model: nn.Module) -> None:
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))


def with_sparse_buffer(model: nn.Module) -> None:
    model.register_buffer("mask", torch.eye(2).to_sparse())


def with_meta_buffer(model: nn.Module) -> None:
    model.register_buffer("mask", torch.zeros(2, device="meta"))


def with_gradient_hook(model: Any) -> None:
    model[0].weight.register_hook(lambda gradient: 0 * gradient)


def with_accumulation_hook(model: Any) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def with_backward_hook(model: Any) -> None:
    model[2].register_full_backward_hook(lambda *_: None)


def with_backward_pre_hook(model: Any) -> None:
    model.register_full_backward_pre_hook(lambda *_: None)


class Extra(nn.Sequential):
    def get_extra_state(self) -> Any:
        return {"epoch": 3}


class Broken(nn.Sequential):
    def get_extra_state(self) -> Any:
        raise NotImplementedError("not today")


def with_extra_state(model: nn.Module) -> nn.Module:
    return Extra(*model.children())


def with_broken_state(model: nn.Module) -> nn.Module:
    return Broken(*model.children())


REFUSED = [
    (with_complex_buffer, "model = phase: is complex"),
    (with_complex_parameter, "model = phase: is complex"),
    (with_sparse_buffer, "model = mask: has the layout torch.sparse_coo"),
    (with_meta_buffer, "model = on the meta device: has no weights to train; time it alone"),
    (with_gradient_hook, "model = 0.weight: has a hook on its gradient"),
    (with_accumulation_hook, "model = 0.weight: has a hook on its gradient"),
    (with_backward_hook, "model = 2: has a backward hook"),
    (with_backward_pre_hook, "model = the model itself: has a backward hook"),
    (with_extra_state, "model = _extra_state: is of type dict"),
    (with_broken_state, "model = state_dict(): raises NotImplementedError: not today"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[spoil.__name__ for spoil, _ in REFUSED])
def test_what_cannot_be_trained_or_written_is_refused_by_name(spoil, message):
    model = module()
    model = spoil(model) or model
    with pytest.raises(UserError, match=re.escape(message)):
        run(model)


@pytest.mark.parametrize("model", ["mlp", nn.Linear, np.ones(3), 3])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(UserError, match=r"model = \w+: should be a torch.nn.Module"):
        run(model)


def test_buffers_of_other_types_are_written_as_they_are():
    model = module()
    model.register_buffer("count", torch.tensor([3]))
    model.register_buffer("mean", torch.ones(2, dtype=torch.bfloat16))
    found = weights(run(model))
    assert (found["count"].dtype, found["mean"].dtype) == (np.int64, np.float32)
    assert torch.equal(model.get_buffer("mean"), torch.ones(2))


# What is left alone


REFUSALS = {
    "mesh": lambda: run(MODEL[0], workload=WORKLOAD | {"model": WORKLOAD["model"] | {"partition": ["nope"]}}),
    "pattern": lambda: run(MODEL[0], workload=WORKLOAD | {"training": WORKLOAD["training"] | {"exempt": ["nope"]}}),
    "nesterov": lambda: run(
        MODEL[0], method="pb+sc", workload=WORKLOAD | {"training": WORKLOAD["training"] | {"nesterov": True}}
    ),
    "classes": lambda: run(MODEL[0], data=(np.ones((4, 6)), [0, 1, 2, 9], np.ones((4, 6)), [0, 1, 2, 9])),
}
MODEL: list[nn.Module] = []


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_module_is_as_it_was_where_the_run_is_refused(refusal):
    model = module().double()
    model[1].eval()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    MODEL[:] = [model]
    with pytest.raises(UserError):
        REFUSALS[refusal]()
    assert [member.training for member in model.modules()] == [True, True, False, True]
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])
        assert value.dtype == torch.float64


def test_a_module_is_as_it_was_where_the_run_fails(monkeypatch):
    model = module().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr("pbsim.results.writer.RunWriter.figure", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_run_leaves_modules_in_their_modes_and_casts_them():
    model = module().double()
    model[0].eval()
    assert run(model).model is model
    assert [member.training for member in model.modules()] == [True, False, True, True]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_module_that_has_two_names_is_written_trained_under_both():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 3)
            self.alias = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    torch.manual_seed(1)
    result = run(Twice())
    found = weights(result)
    assert not np.array_equal(found["first.weight"], load_file(result.path / "initial.safetensors")["first.weight"])
    np.testing.assert_array_equal(found["first.weight"], found["alias.weight"])


# The shape of outputs


@pytest.mark.parametrize("targets", ["labels", "floats"])
def test_both_backends_take_outputs_that_are_not_flat_for_a_mean_squared_error(targets):
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.conv = nn.Conv2d(1, 3, 3)
            self.pool = nn.AdaptiveAvgPool2d(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(self.conv(x))  # (n, 3, 1, 1)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 1, 4, 4))
    y = rng.integers(0, 3, 20) if targets == "labels" else rng.standard_normal((20, 3))
    workload = WORKLOAD | {"loss": {"kind": "mse"}}
    numba, torch_ = (
        run(Pooled(), workload=workload, data=(x, y, x, y), backend=backend, settings={"precision": "float64"})
        for backend in ("numba", "torch")
    )
    np.testing.assert_allclose(numba.metrics["loss"], torch_.metrics["loss"], rtol=1e-12)
    assert numba.summary["loss"] == pytest.approx(torch_.summary["loss"], rel=1e-12)
    for name, array in weights(numba).items():
        np.testing.assert_allclose(array, weights(torch_)[name], rtol=1e-9)
    outputs = numba.model(torch.from_numpy(x)).detach().reshape(20, 3).numpy()
    wanted = np.eye(3)[y] if targets == "labels" else y
    assert numba.summary["loss"] == pytest.approx(((outputs - wanted) ** 2).mean(), rel=1e-12)


# Torch's own state


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_callers_mode_of_torch_does_not_matter(backend, mode, tmp_path):
    expected, own = run(backend=backend), module()
    handed_in = weights(run(module(), backend=backend))
    with mode():
        found = run(backend=backend, out=tmp_path / "run")
        reopened = open_run(found.path).model
        trained = run(own, backend=backend)
    for name, array in weights(expected).items():
        np.testing.assert_array_equal(weights(found)[name], array)
        assert not reopened.state_dict()[name].is_inference()
    for name, tensor in own.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), handed_in[name])
        np.testing.assert_array_equal(weights(trained)[name], handed_in[name])


def test_a_module_that_was_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = module()
    with pytest.raises(UserError, match=r"was made under torch\.inference_mode\(\)"):
        run(model)


def test_runs_in_threads_give_what_they_give_alone():
    seeds = range(6)
    alone = [weights(run(seed=seed)) for seed in seeds]
    barrier = threading.Barrier(len(seeds))

    def together(seed: int) -> dict[str, np.ndarray]:
        barrier.wait()
        return weights(run(seed=seed, backend="torch" if seed == 5 else "numba", settings={"threads": 1 + seed % 2}))

    before = torch.get_num_threads()
    with ThreadPoolExecutor(len(seeds)) as pool:
        found = list(pool.map(together, seeds))
    for one, other in zip(alone[:5], found[:5], strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
    assert torch.get_num_threads() == before


def test_models_of_runs_are_built_in_threads_as_alone(tmp_path):
    paths = [run(seed=seed, out=tmp_path / str(seed)).path for seed in range(4)]
    expected = [weights(open_run(path)) for path in paths]
    torch.manual_seed(5)
    following = torch.rand(2)
    torch.manual_seed(5)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda path: open_run(path).model, paths))
    assert torch.equal(torch.rand(2), following)
    for model, arrays in zip(models, expected, strict=True):
        for name, tensor in model.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), arrays[name])


def test_a_run_within_a_run_works():
    class Nested:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            if index == 0:
                run()
            return torch.ones(6) * index, index % 3

    assert run(data=(Nested(), Nested())).summary["samples"] == 10


# Numbers that are not finite


def test_a_run_that_diverges_has_neither_accuracy_nor_loss():
    diverged = run(workload=WORKLOAD | {"training": WORKLOAD["training"] | {"lr": 1e30}})
    assert (diverged.summary["status"], diverged.summary["accuracy"], diverged.summary["loss"]) == (
        "diverged", None, None,
    )  # fmt: skip
    assert diverged.evaluations["accuracy"].isna().all()
