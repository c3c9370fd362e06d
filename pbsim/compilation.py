"""Compiled functions, kept on disk until any source they may contain has changed.

Numba's own cache watches one file: that of the function which is called. But a compiled function contains those it
calls, and the constants of its module's imports, as they were: change only those, and numba goes on running the old
ones. Here a cached function belongs to a digest of every source of its package (the folder it lies in), so nothing that
goes into compiled code may come from another one. Contents count, not dates: a fresh copy of the same sources
stays warm.

Where no folder for a cache can be written, or sources cannot be read, functions are compiled anew in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function by numba when it is first called, and keep it from process to process."""
    dispatcher: Any = njit(error_model="numpy")(function)
    if hasattr(dispatcher, "enable_caching"):  # with NUMBA_DISABLE_JIT it is the function itself
        with suppress(OSError, RuntimeError):  # uncached, where numba finds no folder that can be written
            dispatcher._cache = _PackageCache(function)
    return dispatcher  # type: ignore[no-any-return]


def inlined(function: F) -> F:
    """Make a function part of the compiled ones of its package that call it.

    Between functions numba counts references to every array; with many arrays that takes longer than a small function.
    """
    dispatcher: Any = njit(error_model="numpy", inline="always")(function)
    return dispatcher  # type: ignore[no-any-return]


class _PackageCache(FunctionCache):
    """Numba's cache of a function, valid for one state of all sources of its package."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file = IndexDataCacheFile(  # type: ignore[no-untyped-call]
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=source_digest(Path(function.__code__.co_filename).parent),
        )


@lru_cache
def source_digest(folder: Path) -> str:
    """A digest of the names and contents of all Python sources in a folder, and of this one."""
    digest = hashlib.blake2b()
    for path in (*sorted(folder.glob("*.py")), Path(__file__)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()
