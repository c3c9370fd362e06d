"""pbsim: cycle-level simulation of hardware on which a network trains sample by sample.

The public names are loaded when they are first used, so that `import pbsim` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pbsim.errors import UserError
    from pbsim.experiment import load_hardware, load_workload, minimum_credits, simulate
    from pbsim.results import Run, open_run

__all__ = ["Run", "UserError", "load_hardware", "load_workload", "minimum_credits", "open_run", "simulate"]

_HOMES = {
    "Run": "pbsim.results",
    "UserError": "pbsim.errors",
    "load_hardware": "pbsim.experiment",
    "load_workload": "pbsim.experiment",
    "minimum_credits": "pbsim.experiment",
    "open_run": "pbsim.results",
    "simulate": "pbsim.experiment",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("pbsim")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
