"""Writes a run directory: streams while the run goes on, and appears under its name only once it is whole."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pbsim.errors import UserError
from pbsim.results.place import FIGURE, Place, make_folder, publish, remove_empty
from pbsim.results.schemas import EVENTS, METRICS, TABLES
from pbsim.schedule import Op, Trace

MAX_ALL_ROWS = 5_000_000
DEFAULT_WINDOW = 1000
ROW_GROUP = 1 << 16
"""Rows of a row group in tables that grow with the run."""


def window_samples(trace: str | None, rows: int, samples: int) -> int:
    """How many samples of a run's trace are kept: of `all`, `first:N` or `none`, by default by the number of rows."""
    if trace is None:
        return samples if rows <= MAX_ALL_ROWS else min(DEFAULT_WINDOW, samples)
    if trace == "all":
        return samples
    return 0 if trace == "none" else min(int(trace.removeprefix("first:")), samples)


def window_setting(window: int, samples: int) -> str:
    """The setting that keeps a window: the inverse of `window_samples`."""
    return "all" if window == samples else f"first:{window}" if window else "none"


class RowGroups:
    """A parquet file that grows, in row groups of one size: its bytes depend on its rows, and not on how they came."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema)
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def append(self, table: pa.Table) -> None:
        """Add rows."""
        self._waiting.append(table)
        self._rows += len(table)
        while self._rows >= ROW_GROUP:
            self._write(ROW_GROUP)

    def close(self) -> None:
        """Write what is left; nothing can be added after."""
        if self._writer.is_open:
            try:
                if self._rows:
                    self._write(self._rows)
            finally:
                self._writer.close()

    def _write(self, rows: int) -> None:
        table = pa.concat_tables(self._waiting)
        self._waiting, self._rows = [table.slice(rows)], self._rows - rows
        self._writer.write_table(table.slice(0, rows).combine_chunks(), row_group_size=rows)


class RunWriter:
    """A run directory in the making, in a hidden folder beside its place.

    Used as a context manager: leaving it without `publish` removes what was written.

    Parameters
    ----------
    place : where the directory will appear.
    window : samples whose events are kept.
    """

    def __init__(self, place: Place, window: int) -> None:
        self.place, self.window = place, window
        self.folder, self._parents = make_folder(place)
        self._kept = False
        try:
            self._events = RowGroups(self.folder / "events.parquet", EVENTS)
            self._metrics = RowGroups(self.folder / "metrics.parquet", METRICS)
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close()
        finally:
            if not self._kept:
                self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_empty(self._parents)

    def _close(self) -> None:
        for table in (self._events, self._metrics):
            table.close()

    def events(self, rows: Trace) -> None:
        """Append the rows of a trace that are in the window."""
        rows = rows[rows.sample < self.window]
        if not len(rows):
            return
        labels = pa.DictionaryArray.from_arrays(rows.op.astype(np.int8), [op.label for op in Op])
        columns = [
            rows.start,
            rows.end,
            rows.stage,
            rows.stage,
            labels,
            rows.sample,
            rows.version,
            rows.target,
        ]
        self._events.append(pa.table([pa.array(column) for column in columns], schema=EVENTS))

    def metrics(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append metrics of samples."""
        self._metrics.append(pa.table(dict(columns), schema=METRICS))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table from its rows."""
        pq.write_table(
            pa.Table.from_pylist([dict(row) for row in rows], schema=TABLES[name]),
            self.folder / f"{name}.parquet",
        )

    def weights(self, name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Write weights under their torch names."""
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, self.folder / name)
        (self.folder / name).chmod(0o644)  # as every other file; safetensors keeps it to its owner

    def text(self, name: str, text: str) -> None:
        """Write a text file."""
        (self.folder / name).write_text(text, encoding="utf-8")

    def json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file; numbers that are not finite become null, which JSON can say."""
        self.text(name, json.dumps(_finite(content), indent=2) + "\n")

    def figure(self) -> None:
        """Draw the utilization figure from what has been written."""
        from pbsim.results.run import Run

        self._close()
        place = self.folder / FIGURE
        place.parent.mkdir()
        Run(self.folder).plot_utilization().savefig(place, dpi=150)

    def publish(self) -> None:
        """Put the directory in its place; where that has been taken, it is kept, and a `UserError` says where."""
        self._close()
        self.folder.chmod(0o755)
        try:
            publish(self.folder, self.place)
        except UserError:
            self._kept = True
            raise


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
