"""From a factory's name in a workload to a torch module: the one place that imports a user's code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pbsim.errors import UserError, user_error

if TYPE_CHECKING:
    from torch import nn

FACTORY_FORMS = '"module:function" or "path/to/file.py:function"'


def build_model(factory: str, arguments: Mapping[str, Any], *, base: Path | None, where: str, seed: int) -> nn.Module:
    """Call a model factory.

    The random generator of torch is seeded immediately before the call, and the default dtype is float32
    during it, so that the same seed gives the same weights whatever ran before.

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
    import torch

    function = _find(factory, base, where)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        signature = f"{factory}{inspect.signature(function)}"
        raise user_error(where, "model.arguments", dict(arguments), f"{error}; the factory is {signature}") from error
    except ValueError:
        pass  # a callable without a signature: the call itself will tell

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(seed)
    try:
        model = function(**arguments)
    except Exception as error:
        raise user_error(where, "model.arguments", dict(arguments), _said(error)) from error
    finally:
        torch.set_default_dtype(dtype)
    if not isinstance(model, torch.nn.Module):
        found = type(model).__name__
        raise user_error(where, "model.factory", factory, f"it must return a torch.nn.Module, not {found}")
    return model


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
