"""From a factory's name in a workload to a torch module: the one place that imports a user's code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pbsim.errors import UserError, user_error

if TYPE_CHECKING:
    from torch import nn

TORCH = threading.RLock()
"""Held while torch's process-wide state is not as the user left it: generator, default dtype, log, modes of modules."""

FACTORY_FORMS = '"module:function" or "path/to/file.py:function"'


def build_model(factory: str, arguments: Mapping[str, Any], *, base: Path | None, where: str, seed: int) -> nn.Module:
    """Call a model factory.

    The random generator of torch is seeded immediately before the call, and the default dtype is float32
    during it, so that the same seed gives the same weights whatever ran before. Both are afterwards as they were.

    Parameters
    ----------
    factory : "module:function", or "path/to/file.py:function" with the path relative to `base`.
    arguments : keyword arguments of the function.
    base : directory of the workload file; None for the working directory.
    where : the workload file, for errors.
    seed : seed of torch.

    Raises
    ------
    UserError
        If there is no such module or function, it does not take or rejects the arguments, or returns no
        module.
    """
    call = _Call(factory, _bound(factory, arguments, base, where), arguments, where, seed)
    return call.on(None)


def build_shapes(
    factory: str, arguments: Mapping[str, Any], *, base: Path | None, where: str, seed: int
) -> tuple[nn.Module, str]:
    """Call a model factory on torch's meta device, where tensors have a shape and neither memory nor values.

    What a network costs needs no more than that, whatever its size. A factory that needs values (it reads one, or
    makes its parameters from arrays) is called again as `build_model` calls it, with all its weights in memory.

    Returns
    -------
    model : of the factory.
    note : empty, or why the model has its weights in memory after all.
    """
    call = _Call(factory, _bound(factory, arguments, base, where), arguments, where, seed)
    try:
        model = call.on("meta")
        tensors = chain(model.named_parameters(), model.named_buffers())
        real = [name for name, tensor in tensors if not tensor.is_meta]
        reason = f"it makes {real[0]!r} elsewhere" if real else ""
    except UserError as error:
        reason = error.problems[0].allowed
    if not reason:
        return model, ""
    model = call.on(None)  # what is wrong with the factory itself is said here
    return model, f"the weights of {factory} are in memory, as it cannot run on torch's meta device: {reason}"


def find_factory(factory: str, arguments: Mapping[str, Any], *, base: Path | None, where: str) -> None:
    """Look a model factory up, without calling it; raises `UserError` if there is none that takes the arguments."""
    _bound(factory, arguments, base, where)


@dataclass(frozen=True)
class _Call:
    """A factory with its arguments, to be called on one device or another."""

    factory: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    where: str
    seed: int

    def on(self, device: str | None) -> nn.Module:
        """Call it with new tensors on a device, or where they are by default."""
        import torch

        with TORCH, torch.inference_mode(False):
            return self._made(device)

    def _made(self, device: str | None) -> nn.Module:
        import torch

        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _default_device(device):
                if device == "meta":  # a factory that loads a state dict loads nothing here, as it should
                    warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
                torch.manual_seed(self.seed)
                model = self.function(**self.arguments)
        except Exception as error:
            raise user_error(self.where, "model.arguments", dict(self.arguments), _said(error)) from error
        finally:
            torch.set_default_dtype(dtype)
        if not isinstance(model, torch.nn.Module):
            found = type(model).__name__
            raise user_error(
                self.where, "model.factory", self.factory, f"it must return a torch.nn.Module, not {found}"
            )
        return model


def _default_device(device: str | None) -> AbstractContextManager[Any]:
    import torch

    return nullcontext() if device is None else torch.device(device)


def _bound(factory: str, arguments: Mapping[str, Any], base: Path | None, where: str) -> Callable[..., Any]:
    """The function that a factory's name means, which takes the arguments."""
    function = _find(factory, base, where)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        signature = f"{factory}{inspect.signature(function)}"
        raise user_error(where, "model.arguments", dict(arguments), f"{error}; the factory is {signature}") from error
    except ValueError:
        pass  # a callable without a signature: the call itself will tell
    return function


def _find(factory: str, base: Path | None, where: str) -> Callable[..., Any]:
    """The function that a factory's name means."""
    place, colon, name = factory.rpartition(":")
    if not colon or not place or not name:
        raise user_error(where, "model.factory", factory, f"it must be {FACTORY_FORMS}")
    try:
        module = _load_file(place, base) if place.endswith(".py") else importlib.import_module(place)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise user_error(where, "model.factory", factory, f"there is no file {error.filename}") from error
    except ModuleNotFoundError as error:
        raise user_error(
            where, "model.factory", factory, f"there is no module {error.name!r}; allowed are {FACTORY_FORMS}"
        ) from error
    except Exception as error:
        raise user_error(where, "model.factory", factory, f"importing {place} failed: {_said(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if _is_factory(value, module)]
        offer = f"; it has {', '.join(known)}" if known else ""
        raise user_error(where, "model.factory", factory, f"{place} has no function {name!r}{offer}")
    return function  # type: ignore[no-any-return]


def _is_factory(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not value.__name__.startswith("_")


def _load_file(place: str, base: Path | None) -> ModuleType:
    """Run a Python file as a module of its own; it is registered so that its classes can be found by name."""
    path = ((base or Path()) / place).resolve()
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    name = f"_pbsim_model_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _said(error: Exception) -> str:
    """The first line of what an exception says, with its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
