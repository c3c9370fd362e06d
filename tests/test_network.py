"""Capture, work and partition of networks, against torch itself and against counts made by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pbsim.errors import UserError
from pbsim.network import (
    Network,
    Operator,
    Stage,
    Work,
    build_model,
    build_shapes,
    capture_network,
    operator_function,
    zoo,
)

WHERE = "workload.toml"


class Calls(nn.Module):
    """A module whose forward is a function of its submodules (or parameters) and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **members: Any) -> None:
        super().__init__()
        self.function = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def capture(
    module: nn.Module, shape: Sequence[int], partition: str | list[str] = "layer", loss: str = "mse"
) -> Network:
    return capture_network(module, tuple(shape), partition=partition, loss=loss, where=WHERE)


def refused(module: nn.Module, shape: Sequence[int], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        capture(module, shape, **options)
    assert all(problem.where == WHERE for problem in caught.value.problems)
    return str(caught.value)


def operators(network: Network) -> list[Operator]:
    """All operators in an order in which they can run: by stage."""
    return [operator for stage in network.stages for operator in stage.operators]


def run(network: Network, module: nn.Module, x: Tensor) -> Tensor:
    """Run the captured operators; a stage reads only what it made or what its edges bring it."""
    parameters = dict(module.named_parameters())
    values = {0: x}
    for stage in network.stages:
        local = {value: values[value] for value in stage.inputs}
        for operator in stage.operators:
            if operator.kind in ("mse", "cross_entropy"):
                continue
            inputs = [local[value] for value in operator.inputs]
            local[operator.output] = operator_function(operator)(
                inputs, [parameters[name] for name in operator.parameters]
            )
            assert local[operator.output].shape[1:] == network.shapes[operator.output]
        values.update({value: local[value] for value in stage.outputs if value in local})
        if network.output_value in local:
            values[network.output_value] = local[network.output_value]
    return values[network.output_value]


def check(network: Network) -> None:
    """What holds of every network."""
    made_by: dict[int, int] = {0: 0}
    for position, stage in enumerate(network.stages):
        assert stage.index == position
        assert stage.work == sum((operator.work for operator in stage.operators), Work())
        for operator in stage.operators:
            assert operator.output not in made_by
            made_by[operator.output] = position
    assert sorted(made_by) == list(range(len(network.shapes)))
    names = [stage.name for stage in network.stages]
    assert len(set(names)) == len(names)
    crossing = {
        (made_by[value], position, value)
        for position, stage in enumerate(network.stages)
        for operator in stage.operators
        for value in operator.inputs
        if made_by[value] != position
    }
    assert crossing == {(edge.source, edge.target, value) for edge in network.edges for value in edge.values}
    assert all(edge.source < edge.target for edge in network.edges)
    for position, stage in enumerate(network.stages):
        inward = {value for edge in network.edges if edge.target == position for value in edge.values}
        outward = {value for edge in network.edges if edge.source == position for value in edge.values}
        assert set(stage.inputs) == inward | ({0} if position == 0 else set())
        assert set(stage.outputs) == outward
    assert operators(network)[-1].name == "loss"
    assert network.shapes[operators(network)[-1].output] == ()


def same_as_torch(module: nn.Module, shape: Sequence[int], partition: str | list[str] = "layer") -> Network:
    """Capture, check, and compare with the module on three random samples."""
    network = capture(module, shape, partition)
    check(network)
    x = torch.randn(3, *shape)
    torch.testing.assert_close(run(network, module, x.clone()), module(x.clone()))
    return network


def groups(network: Network) -> list[str]:
    """Each stage as the kinds in it, loss included."""
    return [" ".join(operator.kind for operator in stage.operators) for stage in network.stages]


def stage_of(network: Network, name: str) -> Stage:
    (found,) = [s for s in network.stages if any(operator.name == name for operator in s.operators)]
    return found


# --- capture against torch ----------------------------------------------------------------------------------

ZOO = {
    "mlp": (lambda: zoo.mlp(), (1, 8, 8)),
    "cnn": (lambda: zoo.cnn(), (1, 8, 8)),
    "cnn_groups": (lambda: zoo.cnn([6, 9], in_channels=2, size=9, groups=[2, 3]), (2, 9, 9)),
    "vgg": (lambda: zoo.vgg(11, width=4), (3, 32, 32)),
    "vgg_hidden": (lambda: zoo.vgg(11, width=4, size=64, hidden=9), (3, 64, 64)),
    "resnet": (lambda: zoo.resnet_cifar(8, width=4), (3, 8, 8)),
    "bottlenecks": (lambda: zoo.resnet_imagenet(50, classes=5, width=4, groups=2), (3, 40, 32)),
}


@pytest.mark.parametrize("partition", ["layer", "module", "residual"])
@pytest.mark.parametrize("name", ZOO)
def test_zoo_runs_as_captured(name: str, partition: str) -> None:
    torch.manual_seed(1)
    factory, shape = ZOO[name]
    same_as_torch(factory(), shape, partition)


ODD = {
    "conv_rectangular": (
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2), groups=2),
        (4, 9, 7),
    ),
    "conv_same_odd": (nn.Conv2d(2, 3, 3, padding="same", dilation=2), (2, 7, 5)),
    "conv_same_even": (nn.Conv2d(2, 3, (2, 4), padding="same", bias=False), (2, 7, 5)),
    "conv_valid": (nn.Conv2d(2, 3, 3, padding="valid"), (2, 7, 5)),
    "norm_plain": (nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4, affine=False, eps=0.1)), (2, 3, 3)),
    "norm_flat": (nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6)), (5,)),
    "relu_inplace": (nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)), (2, 4, 4)),
    "max_pool": (
        nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d((3, 2), 2, (1, 0), (1, 2), ceil_mode=True)),
        (1, 8, 9),
    ),
    "avg_pool": (nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d(3, 2, 1, True, False)), (1, 8, 7)),
    "avg_pool_counting": (nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d((2, 3), ceil_mode=True)), (1, 7, 8)),
    "adaptive": (nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d((2, 1))), (1, 4, 3)),
    "identity": (nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Dropout(0.0), nn.ReLU()), (3,)),
    "mean": (
        Calls(lambda s, x: s.fc(s.conv(x).mean((-1, 2))), conv=nn.Conv2d(1, 4, 1), fc=nn.Linear(4, 2)),
        (1, 4, 3),
    ),
    "mean_keep": (
        Calls(lambda s, x: s.conv(x).mean((2, 3), keepdim=True), conv=nn.Conv2d(1, 4, 1)),
        (1, 4, 3),
    ),
    "views": (
        Calls(
            lambda s, x: s.fc2(s.fc1(x.view(x.shape[0], -1)).reshape(-1, 3)),
            fc1=nn.Linear(4, 3),
            fc2=nn.Linear(3, 2),
        ),
        (1, 2, 2),
    ),
    "squeeze": (
        Calls(lambda s, x: F.adaptive_avg_pool2d(s.conv(x), 1).squeeze(), conv=nn.Conv2d(1, 4, 1)),
        (1, 2, 2),
    ),
    "adds": (
        Calls(lambda s, x: (s.a(x) + x).add_(F.relu_(s.a2(x))), a=nn.Linear(3, 3), a2=nn.Linear(3, 3)),
        (3,),
    ),
    "add_itself": (Calls(lambda s, x: s.a(x + x), a=nn.Linear(3, 3)), (3,)),
    "relu_reused": (
        Calls(lambda s, x: s.relu(s.b(s.relu(s.a(x)))), a=nn.Linear(3, 3), b=nn.Linear(3, 3), relu=nn.ReLU()),
        (3,),
    ),
    "input_read_late": (
        Calls(lambda s, x: s.b(F.relu(s.a(x))) + s.c(x), a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 2)),
        (3,),
    ),
    "starts_with_relu": (nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)), (2, 2)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_networks_run_as_captured(name: str) -> None:
    torch.manual_seed(2)
    for partition in ("layer", "module", "residual"):
        same_as_torch(*ODD[name], partition)


@settings(max_examples=8, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    ceil_mode=st.booleans(),
)
def test_windows_of_any_form(
    kernel: tuple[int, int], stride: int, padding: int, size: tuple[int, int], ceil_mode: bool
) -> None:
    pool_padding = min(padding, min(kernel) // 2)
    for pool in (nn.MaxPool2d, nn.AvgPool2d):
        module = nn.Sequential(
            nn.Conv2d(1, 2, kernel, stride=1, padding=padding),
            pool(kernel, stride, pool_padding, ceil_mode=ceil_mode),
        )
        same_as_torch(module, (1, *size))


def test_dead_code_and_unused_parameters_are_dropped() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        torch.sigmoid(s.dead(x))
        result: Tensor = s.alive(x)
        return result

    network = same_as_torch(Calls(forward, dead=nn.Linear(3, 3), alive=nn.Linear(3, 2)), (3,))
    assert [operator.kind for operator in operators(network)] == ["linear", "mse"]
    assert dict(network.parameters) == {"alive.weight": (2, 3), "alive.bias": (2,)}


@pytest.mark.parametrize("name", ZOO)
def test_a_network_on_the_meta_device_is_captured_as_with_its_weights(name: str) -> None:
    factory, shape = ZOO[name]
    assert capture(on_meta(factory), shape) == capture(factory(), shape)


def test_tensors_made_in_a_forward_do_not_hinder_capture_on_the_meta_device() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        result: Tensor = s.a(x)
        torch.zeros(1, 2) + s.a(x)  # of no use
        return result

    module = on_meta(lambda: Calls(forward, a=nn.Linear(3, 2)))
    assert groups(capture(module, (3,))) == ["linear mse"]


def test_capture_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2)).eval()).double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    capture(module, (3,))
    assert [member.training for member in module.modules()] == [True, True, False, False, False]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())


def test_the_mode_of_a_module_survives_a_refusal() -> None:
    module = nn.Linear(3, 2).eval()
    refused(module, (4,))
    assert not module.training


def test_the_dtype_is_the_models() -> None:
    network = capture(nn.Linear(3, 2).double(), (3,))
    assert network.stages[0].parameter_elements == 3 * 2 + 2


def test_no_torch_at_import() -> None:
    code = "import sys, pbsim.network; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# --- work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_macs_are_half_the_flops_that_torch_counts(name: str) -> None:
    factory, shape = ZOO[name]
    module = factory()
    works = [operator.work for operator in operators(capture(module, shape))]
    with FlopCounterMode(display=False) as counter:
        output = module(torch.randn(1, *shape))
    assert 2 * sum(work.macs_forward for work in works) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    backward = sum(work.macs_input_gradient + work.macs_weight_gradient for work in works)
    assert 2 * backward == counter.get_total_flops()


def test_macs_of_a_grouped_convolution() -> None:
    # 6 x 5 x 4 outputs, each of 4 / 2 channels times a 3 x 2 window = 1440; no bias; data need no gradient.
    work = operators(capture(nn.Conv2d(4, 6, (3, 2), groups=2, bias=False), (4, 7, 5)))[0].work
    assert work == Work(macs_forward=1440, macs_weight_gradient=1440)


def test_vector_work_of_every_kind() -> None:
    module = Calls(
        lambda s, x: s.tail(s.conv(x) + s.side(x)),
        conv=nn.Conv2d(1, 4, 1),
        side=nn.Conv2d(1, 4, 1, bias=False),
        tail=nn.Sequential(
            nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Dropout(0.0), nn.Flatten()
        ),
    )
    network = capture(module, (1, 4, 4), loss="cross_entropy")
    vector = [
        (o.kind, o.work.vector_forward, o.work.vector_input_gradient, o.work.vector_weight_gradient)
        for o in sorted(operators(network), key=lambda o: o.output)
    ]
    assert vector == [
        ("conv2d", 64, 0, 64),  # the bias, once per element of 4 x 4 x 4
        ("conv2d", 0, 0, 0),
        ("add", 64, 0, 0),
        ("group_norm", 4 * 64, 5 * 64, 2 * 64),
        ("relu", 64, 64, 0),
        ("max_pool2d", 4 * 16, 16, 0),  # 4 x 2 x 2 outputs of 2 x 2 windows
        ("avg_pool2d", 4 * 4, 4 * 4, 0),
        ("identity", 0, 0, 0),
        ("flatten", 0, 0, 0),
        ("cross_entropy", 3 * 4, 2 * 4, 0),
    ]


BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def on_meta(factory: Callable[..., nn.Module], **arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return factory(**arguments)


@pytest.mark.parametrize(("depth", "total"), [(50, 25_557_032), (101, 44_549_160), (152, 60_192_808)])
def test_weights_and_macs_of_imagenet_residual_networks(depth: int, total: int) -> None:
    # 7 x 7 x 3 x 64 stem on 112 x 112 outputs; norms have a scale and a shift per channel.
    weights, macs = 49 * 3 * 64 + 2 * 64, 49 * 3 * 64 * 112**2
    inward = 64
    for channels, side, repeats in zip((64, 128, 256, 512), (56, 28, 14, 7), BLOCKS[depth], strict=True):
        outward = 4 * channels
        for block in range(repeats):
            # The first block of a size, but of the first size, halves the map in its 3 x 3 convolution.
            side_in = 2 * side if block == 0 and channels > 64 else side
            kernels = [(inward * channels, side_in), (9 * channels**2, side), (channels * outward, side)]
            norms = channels + channels + outward
            if block == 0:
                kernels.append((inward * outward, side))
                norms += outward
            weights += sum(kernel for kernel, _ in kernels) + 2 * norms
            macs += sum(kernel * extent**2 for kernel, extent in kernels)
            inward = outward
    weights, macs = weights + 2048 * 1000 + 1000, macs + 2048 * 1000
    assert weights == total  # as torchvision has them
    network = capture(on_meta(zoo.resnet_imagenet, depth=depth), (3, 224, 224), loss="cross_entropy")
    assert sum(stage.parameter_elements for stage in network.stages) == weights
    assert sum(stage.work.macs_forward for stage in network.stages) == macs
    if depth == 50:
        assert macs == pytest.approx(4.09e9, rel=1e-3)


def test_weights_and_macs_of_vgg16_for_imagenet() -> None:
    weights = macs = 0
    inward = 3
    for channels, side, repeats in ((64, 224, 2), (128, 112, 2), (256, 56, 3), (512, 28, 3), (512, 14, 3)):
        for _ in range(repeats):
            weights += 9 * inward * channels + channels
            macs += 9 * inward * channels * side**2
            inward = channels
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        weights, macs = weights + inputs * outputs + outputs, macs + inputs * outputs
    assert weights == 138_357_544
    network = capture(on_meta(zoo.vgg, depth=16, classes=1000, size=224, hidden=4096), (3, 224, 224))
    assert sum(stage.parameter_elements for stage in network.stages) == weights
    assert sum(stage.work.macs_forward for stage in network.stages) == macs


def test_the_stride_of_a_bottleneck_stands_in_its_3x3_convolution() -> None:
    network = capture(on_meta(zoo.resnet_imagenet), (3, 224, 224))
    strided = [
        (operator.name, operator.attributes["kernel"])
        for operator in operators(network)
        if operator.kind == "conv2d" and operator.attributes["stride"] != (1, 1)
    ]
    assert sorted(strided) == [
        *[(f"blocks.{block}.{conv}", kernel) for block in (13, 3, 7) for conv, kernel in (
            ("conv2", (3, 3)), ("shortcut.conv", (1, 1)),
        )],
        ("stem.conv", (7, 7)),
    ]  # fmt: skip


def test_no_gradient_flows_to_the_data() -> None:
    network = capture(nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 4), nn.Linear(4, 3), nn.Linear(3, 2)), (4,))
    relu, norm, first, second, loss = operators(network)
    assert (relu.needs_input_gradient, norm.needs_input_gradient) == ((False,), (False,))
    assert relu.work == Work(vector_forward=4)
    assert not relu.saves_output
    assert norm.work == Work(vector_forward=16, vector_weight_gradient=8)
    assert first.work.macs_input_gradient == second.work.macs_input_gradient * 2 == 12
    assert loss.work == Work(vector_forward=4, vector_input_gradient=2)
    plain = capture(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), (4,))
    assert operators(plain)[0].work.macs_input_gradient == 0


def test_the_input_passed_on_carries_no_gradient() -> None:
    module, shape = ODD["input_read_late"]
    network = capture(module, shape)
    passed = [edge for edge in network.edges if 0 in edge.values]
    assert [(edge.source, edge.elements, edge.gradient_elements) for edge in passed] == [(0, 3, 0)]
    assert network.stages[0].inputs == (0,)
    assert 0 in network.stages[0].outputs


# --- stash --------------------------------------------------------------------------------------------------


def test_stash_of_the_digits_network() -> None:
    network = capture(zoo.cnn(), (1, 8, 8), loss="cross_entropy")
    assert [stage.stash_elements for stage in network.stages] == [
        # input 64; normalized values 1024 and 8 deviations; output of the ReLU 1024; 256 positions of maxima
        64 + 1024 + 8 + 1024 + 256,
        # input 256; normalized values 512 and 16 deviations; output of the ReLU 512; 128 positions of maxima
        256 + 512 + 16 + 512 + 128,
        # input 128; 10 probabilities
        128 + 10,
    ]


def test_a_tensor_is_stashed_once_under_all_its_names() -> None:
    # The ReLU's output (12 elements) is, flattened and behind a dropout, the input of the Linear: kept once.
    module = Calls(
        lambda s, x: s.linear(s.dropout(torch.flatten(F.relu(s.conv(x)), 1))),
        conv=nn.Conv2d(1, 3, 1),
        dropout=nn.Dropout(0.0),
        linear=nn.Linear(12, 2),
    )
    one = capture(nn.Sequential(module), (1, 2, 2), partition=["0"])
    assert [stage.stash_elements for stage in one.stages] == [4 + 12 + 2]  # and the loss keeps the output
    two = capture(module, (1, 2, 2), partition="layer")
    assert [stage.stash_elements for stage in two.stages] == [4 + 12, 12 + 2]


# --- partition ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "stages"), [(11, 29), (13, 33), (16, 39)])
def test_every_module_of_vgg_is_a_stage(depth: int, stages: int) -> None:
    network = capture(zoo.vgg(depth, width=2), (3, 32, 32), "module", "cross_entropy")
    assert len(network.stages) == stages
    assert network.stages[0].name == "features.0"
    assert network.stages[-1].name == "loss"


@pytest.mark.parametrize(("depth", "stages"), [(20, 34), (32, 52), (44, 70), (56, 88), (110, 169)])
def test_stages_of_residual_networks(depth: int, stages: int) -> None:
    network = capture(zoo.resnet_cifar(depth, width=2), (3, 8, 8), "residual", "cross_entropy")
    assert len(network.stages) == stages == 9 * (depth - 2) // 6 + 7


@pytest.mark.parametrize("depth", [50, 152])
def test_stages_of_imagenet_residual_networks(depth: int) -> None:
    module, blocks = on_meta(zoo.resnet_imagenet, depth=depth), sum(BLOCKS[depth])
    stages = {rule: len(capture(module, (3, 224, 224), rule).stages) for rule in ("layer", "residual", "module")}
    assert stages == {
        # stem, three convolutions per block, four shortcuts, Linear: every layer with weights
        "layer": 1 + 3 * blocks + 4 + 1,
        # and an addition per block, the last ReLU, the pool, the loss
        "residual": 1 + 4 * blocks + 4 + 1 + 3,
        # stem of four modules; three times convolution, norm, ReLU; shortcuts of two modules; pool, Linear, loss
        "module": 4 + 9 * blocks + 2 * 4 + 3,
    }
    assert depth != 50 or stages == {"layer": 54, "residual": 73, "module": 159}


def test_stages_of_vgg16_for_imagenet() -> None:
    module = on_meta(zoo.vgg, depth=16, classes=1000, size=224, hidden=4096)
    stages = {rule: len(capture(module, (3, 224, 224), rule).stages) for rule in ("layer", "residual", "module")}
    # 13 convolutions and 3 Linears; 13 + 2 ReLUs, 5 pools, 2 dropouts; the loss
    assert stages == {"layer": 16, "residual": 16 + 1, "module": 16 + 15 + 5 + 2 + 1}


def test_bottlenecks_under_residual_and_layer() -> None:
    module = on_meta(zoo.resnet_imagenet)
    residual, layer = (capture(module, (3, 224, 224), rule) for rule in ("residual", "layer"))
    norm = "conv2d group_norm"
    strided, plain = [norm, "add"], ["add"]
    inner = [f"relu {norm} relu", f"{norm} relu", norm]
    assert groups(residual)[:10] == [
        "conv2d group_norm relu max_pool2d",
        *[f"{norm} relu", f"{norm} relu", norm, *strided],
        *[*inner, *plain],
    ]
    assert groups(residual)[-5:] == ["add", "relu", "avg_pool2d flatten", "linear", "mse"]
    assert groups(layer)[:5] == [
        "conv2d group_norm relu max_pool2d", f"{norm} relu", f"{norm} relu", norm, f"{norm} add relu",
    ]  # fmt: skip
    assert [stage.name for stage in residual.stages[:2]] == ["stem", "blocks.0.conv1+norm1+relu1"]


def test_residual_stages_and_skip_edges() -> None:
    network = capture(zoo.resnet_cifar(8, width=4), (3, 8, 8), "residual", "cross_entropy")
    unit = "group_norm relu conv2d group_norm relu"
    plain = [unit, "conv2d", "add"]
    strided = ["conv2d", *plain]
    tail = ["group_norm relu", "avg_pool2d flatten", "linear", "cross_entropy"]
    assert groups(network) == ["conv2d", *plain, *strided, *strided, *tail]
    assert [stage.name for stage in network.stages[:5]] == [
        "stem",
        "blocks.0.norm1+relu1+conv1+norm2+relu2",
        "blocks.0.conv2",
        "blocks.0.add",
        "blocks.1.shortcut",
    ]
    ends = [(edge.source, edge.target) for edge in network.edges]
    assert [end for end in ends if end[1] - end[0] > 1] == [(0, 3), (3, 5), (4, 7), (7, 9), (8, 11)]
    assert {(0, 1), (3, 4)} <= set(ends)
    # Block 1 reads the sum of block 0 in its shortcut and its first norm: the same value, 4 x 8 x 8 elements.
    shortcut, first = (next(e for e in network.edges if (e.source, e.target) == end) for end in [(3, 4), (3, 5)])
    assert shortcut.values == first.values
    assert shortcut.elements == shortcut.gradient_elements == 256


def test_layer_joins_additions_to_the_main_path() -> None:
    network = capture(zoo.resnet_cifar(8, width=4), (3, 8, 8), "layer", "cross_entropy")
    unit = "group_norm relu conv2d group_norm relu"
    assert groups(network) == [
        "conv2d",
        *[unit, "conv2d add"],
        *["conv2d", unit, "conv2d add"],
        *["conv2d", unit, "conv2d add group_norm relu avg_pool2d flatten"],
        "linear cross_entropy",
    ]


@pytest.mark.parametrize("shortcut_first", [True, False])
def test_a_shortcut_is_not_the_main_path_whenever_it_runs(shortcut_first: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.stem(x)
        if shortcut_first:
            short = s.short(y)
            return s.b(F.relu(s.a(y))) + short  # type: ignore[no-any-return]
        return s.b(F.relu(s.a(y))) + s.short(y)  # type: ignore[no-any-return]

    module = Calls(forward, **{name: nn.Conv2d(2, 2, 1) for name in ("stem", "a", "b", "short")})
    network = same_as_torch(module, (2, 4, 4))
    assert [operator.kind for operator in stage_of(network, "b").operators][:2] == ["conv2d", "add"]
    assert [operator.kind for operator in stage_of(network, "short").operators] == ["conv2d"]


def test_post_activation_blocks_under_residual() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.norm1(self.conv1(x)))
            return F.relu(self.norm2(self.conv2(y)) + x)

    module = nn.Sequential(
        nn.Conv2d(1, 4, 1),
        nn.ReLU(),
        Block(),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    assert groups(same_as_torch(module, (1, 4, 4), "residual")) == [
        "conv2d relu",
        *["conv2d group_norm relu", "conv2d group_norm", "add"],
        *["relu conv2d group_norm relu", "conv2d group_norm", "add"],
        *["relu", "avg_pool2d flatten", "linear", "mse"],
    ]


def test_a_norm_without_a_convolution_after_it_stays_before() -> None:
    module = Calls(
        lambda s, x: s.fc(torch.flatten(s.sum(s.conv(x)), 1)),
        conv=nn.Conv2d(1, 4, 1),
        sum=Calls(lambda s, y: s.norm(y) + y, norm=nn.GroupNorm(2, 4)),
        fc=nn.Linear(16, 2),
    )
    assert groups(same_as_torch(module, (1, 2, 2), "layer")) == [
        "conv2d group_norm add flatten",
        "linear mse",
    ]
    assert groups(same_as_torch(module, (1, 2, 2), "residual"))[:2] == ["conv2d group_norm", "add"]


def test_what_stands_first_joins_the_first_stage_after() -> None:
    module, shape = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3), nn.ReLU()), (4, 2, 2)
    assert groups(same_as_torch(module, shape, "layer")) == ["group_norm flatten linear relu mse"]
    assert groups(same_as_torch(module, shape, "module")) == ["group_norm flatten", "linear", "relu", "mse"]
    assert groups(same_as_torch(zoo.mlp(4, [3], 2), (2, 2), "module"))[0] == "flatten linear"


def test_dropout_is_a_stage_of_its_own_under_module() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 2))
    assert groups(capture(module, (3,), "module")) == ["linear", "identity", "linear", "mse"]
    assert groups(capture(module, (3,), "layer")) == ["linear identity", "linear mse"]


def test_a_module_that_runs_twice_makes_two_stages() -> None:
    network = capture(*ODD["relu_reused"], partition="module")
    assert [stage.name for stage in network.stages] == ["a", "relu", "b", "relu@2", "loss"]


def test_a_module_under_two_names_goes_by_the_first() -> None:
    linear = nn.Linear(3, 2)
    module = Calls(lambda s, x: F.relu(s.second(x)), first=linear, second=linear)
    network = same_as_torch(module, (3,), "module")
    assert [stage.name for stage in network.stages] == ["first+relu", "loss"]
    assert network.stages[0].parameters == ("first.weight", "first.bias")


def test_a_list_of_modules() -> None:
    module = zoo.vgg(11, width=2)
    network = same_as_torch(module, (3, 32, 32), ["features", "flatten", "classifier"])
    assert [stage.name for stage in network.stages] == ["features", "flatten", "classifier"]
    assert groups(network)[1] == "flatten"
    assert network.stages[2].operators[-1].kind == "mse"
    assert set(network.stages[0].parameters) == {
        name for name, _ in module.features.named_parameters(prefix="features")
    }


def in_list(names: list[str], module: nn.Module | None = None, shape: Sequence[int] = (1, 8, 8)) -> str:
    return refused(module or zoo.vgg(11, width=2), shape if module else (3, 32, 32), partition=names)


def test_faults_of_a_list_are_told_all_at_once() -> None:
    message = in_list(["featurs", "features.0", "features", "features", "nothing"])
    assert "model.partition = featurs: the model has no such module; did you mean features" in message
    assert "model.partition = features.0: it lies within 'features', which is listed too" in message
    assert "model.partition = features: it is listed twice" in message
    assert "model.partition = nothing: the model has no such module" in message
    assert "these operators are in none of the modules listed: flatten, classifier.0, classifier.1" in message


def test_order_of_a_list() -> None:
    message = in_list(["flatten", "features", "classifier"])
    assert "model.partition = flatten: it reads from 'features', which must stand before it in the list" in message


def test_a_list_may_be_neither_empty_nor_name_empty_modules() -> None:
    assert "must hold at least one module name" in in_list([])
    module = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    assert "1: it holds no operator" in in_list(["0", "1"], module, (2,))


def test_a_cycle_between_stages() -> None:
    outer = Calls(lambda s, x: s.second(s.first(x)), first=nn.Linear(2, 2), second=nn.Linear(2, 2))
    module = Calls(
        lambda s, x: s.pair.second(s.middle(s.pair.first(x))),
        pair=outer,
        middle=nn.Sequential(nn.Linear(2, 2)),
    )
    message = in_list(["pair", "middle"], module, (2,))
    assert "model.partition: the stages" in message
    assert "pair -> middle -> pair" in message or "middle -> pair -> middle" in message
    assert same_as_torch(module, (2,), ["pair.first", "middle", "pair.second"]).stages[1].name == "middle"


def test_unknown_rule() -> None:
    assert "model.partition = blocks: allowed are layer, module, residual" in refused(
        nn.Linear(2, 2), (2,), partition="blocks"
    )


# --- refusals -----------------------------------------------------------------------------------------------


def test_all_unsupported_operators_are_listed_at_once() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 2)
    )
    with pytest.raises(UserError) as caught:
        capture(nn.Sequential(module, Calls(lambda s, x: x * 2)), (1, 4, 4))
    batch_norm, sigmoid, dropout, times = [str(problem) for problem in caught.value.problems]
    assert batch_norm.startswith("workload.toml: model.factory at 0.1 (aten.batch_norm.default")
    assert batch_norm.endswith("BatchNorm has no meaning at batch one; use GroupNorm")
    assert "at 0.2 (aten.sigmoid.default" in sigmoid
    assert "not supported; supported are linear, conv2d" in sigmoid
    assert "at 0.3 (aten.dropout.default" in dropout
    assert dropout.endswith("Dropout with p = 0.5: only p = 0 is supported")
    assert "at 1 (aten.mul.Tensor, test_network.py:" in times


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "one value per group": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(4, 4)),
        (1, 2, 2),
        "model.factory at 1 (aten.group_norm.default): GroupNorm has one value per group (4 groups",
    ),
    "two outputs": (
        lambda: Calls(lambda s, x: (s.a(x), x), a=nn.Linear(2, 2)),
        (2,),
        "must be a single tensor",
    ),
    "tuple of one": (
        lambda: Calls(lambda s, x: (s.a(x),), a=nn.Linear(2, 2)),
        (2,),
        "must be a single tensor",
    ),
    "no batch": (lambda: Calls(lambda s, x: s.a(x).sum(), a=nn.Linear(2, 2)), (2,), "has no batch dimension"),
    "control flow": (
        lambda: Calls(lambda s, x: s.a(x) if x.sum() > 0 else s.a(-x), a=nn.Linear(2, 2)),
        (2,),
        "its control flow depends on data",
    ),
    "wrong shape": (
        lambda: nn.Linear(3, 2),
        (4,),
        "cannot be captured on samples of shape (4,): RuntimeError: ",
    ),
    "no parameters": (nn.ReLU, (4,), "nothing to train"),
    "parameters unused": (
        lambda: Calls(lambda s, x: F.relu(x), a=nn.Linear(2, 2)),
        (2,),
        "no parameter contributes to the output",
    ),
    "output is input": (
        lambda: Calls(lambda s, x: x, a=nn.Linear(2, 2)),
        (2,),
        "is its input or a parameter",
    ),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), (2,), "its parameter 'weight' is frozen"),
    "buffer": (
        lambda: Calls(lambda s, x: s.a(x) + s.a.mask, a=_with_buffer(nn.Linear(2, 2))),
        (2,),
        "it reads the buffer or constant 'a.mask'",
    ),
    "parameter added": (
        lambda: Calls(lambda s, x: s.a(x) + s.a.bias, a=nn.Linear(2, 2)),
        (2,),
        "it reads the parameter 'a.bias' in place of a value",
    ),
    "computed weight": (
        lambda: Calls(lambda s, x: F.linear(x, s.a.weight * 2), a=nn.Linear(2, 2)),
        (2,),
        "its weight is computed or constant",
    ),
    "number added": (
        lambda: Calls(lambda s, x: s.a(x) + 1.0, a=nn.Linear(2, 2)),
        (2,),
        "operand 1.0 is not a tensor",
    ),
    "alpha": (
        lambda: Calls(lambda s, x: torch.add(s.a(x), x, alpha=2), a=nn.Linear(2, 2)),
        (2,),
        "an addition with alpha = 2",
    ),
    "broadcast": (
        lambda: Calls(lambda s, x: s.a(x) + s.b(x), a=nn.Linear(2, 2), b=nn.Linear(2, 1)),
        (2,),
        "an addition of different shapes, (2,) and (1,)",
    ),
    "divisor": (
        lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.AvgPool2d(2, divisor_override=3)),
        (1, 2, 2),
        "average pooling with divisor_override",
    ),
    "adaptive": (
        lambda: nn.Sequential(nn.Conv2d(1, 1, 1), nn.AdaptiveAvgPool2d(2)),
        (1, 3, 3),
        "adaptive average pooling from 3 x 3 to 2 x 2",
    ),
    "mean": (
        lambda: Calls(lambda s, x: s.a(x).mean(2), a=nn.Conv2d(1, 1, 1)),
        (1, 2, 2),
        "a mean other than over",
    ),
    "reshape": (
        lambda: Calls(lambda s, x: s.a(x).view(-1, 2, 2), a=nn.Linear(4, 4)),
        (4,),
        "a reshape of samples",
    ),
    "linear in two dimensions": (lambda: nn.Linear(4, 2), (3, 4), "flatten it to one dimension first"),
    "hidden change": (
        lambda: Calls(lambda s, x: _hidden_change(s.a(x)), a=nn.Linear(4, 4)),
        (4,),
        "(aten.relu_.default, test_network.py:",
    ),
    "split": (
        lambda: Calls(lambda s, x: F.relu(s.a(x).chunk(2, 1)[0]), a=nn.Linear(4, 4)),
        (4,),
        "aten.chunk.default",
    ),
    "tied": (
        lambda: _tied(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))),
        (2,),
        "the parameter '0.weight' is shared by 0 (stage 0+1) and 2 (stage 2)",
    ),
    "called twice": (
        lambda: Calls(lambda s, x: s.a(F.relu(s.a(x))), a=nn.Linear(2, 2)),
        (2,),
        "the parameter 'a.bias' is shared by a (stage a+relu) and a (stage a)",
    ),
}


def _with_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("mask", torch.ones(2))
    return module


def _hidden_change(x: Tensor) -> Tensor:
    view = x.view(x.shape[0], -1)
    view.relu_()
    return F.relu(x)


def _tied(module: nn.Sequential) -> nn.Module:
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    factory, shape, message = REFUSED[name]
    said = refused(factory(), shape)
    assert message in said
    assert max(map(len, said.splitlines())) < 500
    assert "Traceback" not in capfd.readouterr().err


def test_tied_parameters_are_refused_within_a_stage_too() -> None:
    module = nn.Sequential(_tied(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))))
    assert "the parameter '0.0.weight' is shared by 0.0 (stage 0) and 0.2 (stage 0)" in refused(
        module, (2,), partition=["0"]
    )


def test_losses() -> None:
    assert "loss.kind = cross_entropy: the output of the model must be one score per class" in refused(
        nn.Conv2d(1, 2, 1), (1, 2, 2), loss="cross_entropy"
    )
    assert "loss.kind = hinge: allowed are cross_entropy, mse" in refused(nn.Linear(2, 2), (2,), loss="hinge")
    loss = operators(capture(nn.Linear(2, 2), (2,)))[-1]
    with pytest.raises(ValueError, match="mse is a loss"):
        operator_function(loss)


# --- factories ----------------------------------------------------------------------------------------------


def build(factory: str, arguments: dict[str, Any] | None = None, base: Path | None = None, seed: int = 0) -> nn.Module:
    return build_model(factory, arguments or {}, base=base, where=WHERE, seed=seed)


def test_a_seed_gives_the_same_float32_weights() -> None:
    first = build("pbsim.network.zoo:cnn", {"channels": [4]}, seed=3).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        again = build("pbsim.network.zoo:cnn", {"channels": [4]}, seed=3).state_dict()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    other = build("pbsim.network.zoo:cnn", {"channels": [4]}, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) and first[name].dtype == torch.float32 for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_building_a_model_leaves_torchs_generator_as_it_was() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    build("pbsim.network.zoo:cnn", {"channels": [4]}, seed=3)
    build_shapes("pbsim.network.zoo:cnn", {"channels": [4]}, base=None, where=WHERE, seed=3)
    with pytest.raises(UserError):
        build("pbsim.network.zoo:cnn", {"channels": [4], "groups": 3})
    assert torch.equal(torch.rand(3), expected)


def test_the_weights_are_those_of_the_seed_and_the_factory_alone() -> None:
    built = build("pbsim.network.zoo:cnn", seed=5)
    torch.manual_seed(5)
    alone = zoo.cnn()
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in built.state_dict().items())


FACTORIES = """
import numpy as np
import torch
from torch import nn

def plain():
    return nn.Linear(3, 2)

def loads():
    model = nn.Linear(3, 2)
    shapes = {"weight": (2, 3), "bias": 2}
    model.load_state_dict({name: torch.from_numpy(np.ones(shape, "f4")) for name, shape in shapes.items()})
    return model

def reads():
    model = nn.Linear(3, 2)
    model.largest = model.weight.max().item()
    return model

def converts():
    model = nn.Linear(3, 2)
    model.weights = model.weight.detach().numpy()
    return model

def from_arrays():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.from_numpy(np.ones((2, 3), "f4")))
    return model

def constant():
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.ones(1, device="cpu"), persistent=False)
    return model

def fails():
    raise ValueError("no such net")
"""


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("plain", ""),
        ("loads", ""),
        ("reads", "RuntimeError: Tensor.item() cannot be called on meta tensors"),
        ("converts", "TypeError: can't convert meta device type tensor to numpy"),
        ("from_arrays", "it makes 'weight' elsewhere"),
        ("constant", "it makes 'scale' elsewhere"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_shapes_come_without_weights_wherever_the_factory_needs_none(tmp_path: Path, factory: str, reason: str) -> None:
    (tmp_path / "model.py").write_text(FACTORIES)
    name = f"model.py:{factory}"
    model, note = build_shapes(name, {}, base=tmp_path, where=WHERE, seed=4)
    assert {parameter.is_meta for parameter in model.parameters()} == {not reason}
    assert {name: value.shape for name, value in model.named_parameters()} == {"weight": (2, 3), "bias": (2,)}
    if reason:
        assert note.startswith(
            f"the weights of {name} are in memory, as it cannot run on torch's meta device: {reason}"
        )
        assert torch.equal(model.bias, build(name, base=tmp_path, seed=4).bias)
    else:
        assert note == ""


def test_a_factory_that_fails_does_so_without_weights_too(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORIES)
    with pytest.raises(UserError, match=r"model\.arguments = \{\}: ValueError: no such net"):
        build_shapes("model.py:fails", {}, base=tmp_path, where=WHERE, seed=0)
    with pytest.raises(UserError, match="missing a required argument"):
        build_shapes("torch.nn:Linear", {}, base=tmp_path, where=WHERE, seed=0)


def test_a_file_beside_the_workload(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\n\ndef small(width=2):\n    return nn.Linear(width, 1)\n\ndef wrong():\n    return 7\n"
    )
    assert isinstance(build("model.py:small", {"width": 3}, tmp_path), nn.Linear)
    with pytest.raises(UserError, match=r"has no function 'smal'; it has small, wrong"):
        build("model.py:smal", base=tmp_path)
    with pytest.raises(UserError, match=r"must return a torch.nn.Module, not int"):
        build("model.py:wrong", base=tmp_path)
    with pytest.raises(UserError, match=r"model.factory = other.py:small: there is no file .*other.py"):
        build("other.py:small", base=tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"importing broken.py failed: ZeroDivisionError"):
        build("broken.py:small", base=tmp_path)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        ("zoo", {}, r'model.factory = zoo: it must be "module:function" or "path/to/file.py:function"'),
        ("no.such:thing", {}, "there is no module 'no'"),
        ("pbsim.network.zoo:resnet", {}, "has no function 'resnet'; it has mlp, cnn, vgg, resnet_cifar"),
        (
            "pbsim.network.zoo:cnn",
            {"chanels": [4]},
            r"model.arguments = .*unexpected keyword argument 'chanels'",
        ),
        (
            "pbsim.network.zoo:cnn",
            {"channels": [4], "groups": 3},
            "4 channels cannot be divided into 3 groups",
        ),
        ("pbsim.network.zoo:cnn", {"channels": [4] * 4}, "must not vanish"),
        ("pbsim.network.zoo:resnet_cifar", {"depth": 21}, "ValueError: depth 21 is not 6n \\+ 2"),
        ("pbsim.network.zoo:vgg", {"depth": 12}, "ValueError: depth 12 is not one of 11, 13, 16"),
        ("pbsim.network.zoo:vgg", {"size": 16}, "must be at least 32"),
        ("pbsim.network.zoo:cnn", {"channels": "x"}, "model[.]arguments"),
    ],
)
def test_factories_that_fail(factory: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(factory, arguments)
