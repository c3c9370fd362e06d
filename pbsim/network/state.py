"""The state of a module: what of it can be trained and written, as arrays before and after a run, and back into it.

A run computes on arrays of its own. The module is read before it and changed after it, in one go, so that a run that is
refused or fails leaves a module that was handed in as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pbsim.errors import Problem, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

Arrays = dict[str, NDArray[Any]]


def check_trainable(module: nn.Module, where: str, key: str) -> None:
    """Refuse a module whose state cannot be trained, or cannot be written; `where` and `key` are for the errors.

    Raises
    ------
    UserError
        For tensors on the meta device, complex or without a dense layout; for extra state that is no tensor; for
        hooks on gradients, which are PyTorch's own and would not be called.
    """
    tensors = list(chain(module.named_parameters(), module.named_buffers()))
    if any(tensor.is_meta for _, tensor in tensors):
        raise UserError(Problem(where, key, "on the meta device", "has no weights to train; time it alone"))
    problems = [Problem(where, key, name, reason) for name, reason in _faults(module, tensors)]
    if problems:
        raise UserError(problems)


def _faults(module: nn.Module, tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    import torch

    for name, tensor in tensors:
        if tensor.is_complex():
            yield name, "is complex; only real numbers are trained and written"
        elif tensor.layout != torch.strided:
            yield name, f"has the layout {tensor.layout}; only dense tensors are trained and written"
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            yield name, "has a hook on its gradient, which would not be called; remove it"
    for name, member in module.named_modules():
        if member._backward_hooks or member._backward_pre_hooks:
            yield name or "the model itself", "has a backward hook, which would not be called; remove it"
    try:
        state = module.state_dict()
    except Exception as error:
        yield "state_dict()", f"raises {type(error).__name__}: {error}"
        return
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            yield name, f"is of type {type(value).__name__}; a state dict of anything but tensors cannot be written"


def state_arrays(module: nn.Module, precision: str) -> Arrays:
    """A module's state dict as arrays (copies), floating-point ones in a precision."""
    import torch

    dtype = getattr(torch, precision)
    tensors = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).numpy().copy()
        for name, tensor in tensors.items()
    }


def trained_arrays(module: nn.Module, before: Arrays, parameters: Mapping[str, NDArray[Any]]) -> Arrays:
    """The state after a run: trained parameters, also under a second name of their module, and the rest as before."""
    own = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {name: own.get(id(tensor), "") for name, tensor in module.state_dict(keep_vars=True).items()}
    return {name: parameters.get(names[name], array) for name, array in before.items()}


def load_parameters(module: nn.Module, precision: str, parameters: Mapping[str, NDArray[Any]]) -> None:
    """Cast a module to a precision, and put trained parameters into it."""
    import torch

    named = dict(module.named_parameters())
    with torch.no_grad():
        module.to(getattr(torch, precision))
        for name, array in parameters.items():
            named[name].copy_(torch.from_numpy(np.ascontiguousarray(array)))
