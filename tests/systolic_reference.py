"""A systolic array simulated cell by cell: operands enter at the edges, move one cell per cycle, and meet.

It knows nothing of fold formulas. A product is cut into folds of the array's size; each fold runs alone, from its first
operand until its last result is there, and its cycles, SRAM reads and writes are counted as they happen. Cells beyond
the edge of a product work on zeros, which no memory holds, and take their time like all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Matrix = list[list[float]]


@dataclass
class Run:
    """A product, and what it took."""

    product: np.ndarray
    folds: int = 0
    cycles: int = 0
    accesses: int = 0


def multiply(a: np.ndarray, b: np.ndarray, rows: int, cols: int, dataflow: str, load: bool = True) -> Run:
    """Multiply on a rows x cols array; without `load`, what holds still is in the cells already."""
    if dataflow == "os":
        return _output_stationary(a, b, rows, cols)
    if dataflow == "ws":
        return _held(b, a, rows, cols, load)
    run = _held(a.T, b.T, rows, cols, load)  # (a b)^T = b^T a^T, with a^T held
    run.product = run.product.T
    return run


def _output_stationary(a: np.ndarray, b: np.ndarray, rows: int, cols: int) -> Run:
    """Every cell gathers one output; rows of `a` enter from the left, columns of `b` from above, each a cycle later."""
    (m, depth), n = a.shape, b.shape[1]
    run = Run(np.zeros((m, n)))
    for top in range(0, m, rows):
        for left in range(0, n, cols):
            run.folds += 1
            going_right = [[None] * cols for _ in range(rows)]
            going_down = [[None] * cols for _ in range(rows)]
            gathered = np.zeros((rows, cols))
            done, cycle = np.zeros((rows, cols), int), 0
            while (done < depth).any():
                for i in range(rows):
                    step = cycle - i
                    entering = None
                    if 0 <= step < depth:
                        real = top + i < m
                        entering = a[top + i, step] if real else 0.0
                        run.accesses += real
                    going_right[i] = [entering, *going_right[i][:-1]]
                entering_above: list = [None] * cols
                for j in range(cols):
                    step = cycle - j
                    if 0 <= step < depth:
                        real = left + j < n
                        entering_above[j] = b[step, left + j] if real else 0.0
                        run.accesses += real
                going_down = [entering_above, *going_down[:-1]]
                for i in range(rows):
                    for j in range(cols):
                        if going_right[i][j] is not None and going_down[i][j] is not None:
                            gathered[i, j] += going_right[i][j] * going_down[i][j]
                            done[i, j] += 1
                cycle += 1
            run.cycles += cycle
            used = gathered[: min(rows, m - top), : min(cols, n - left)]
            run.product[top : top + rows, left : left + cols] = used
            run.accesses += used.size
    return run


def _held(held: np.ndarray, streamed: np.ndarray, rows: int, cols: int, load: bool) -> Run:
    """`streamed` (T x K) times `held` (K x N): cells hold `held`; partial sums move down and leave at the bottom."""
    (times, depth), n = streamed.shape, held.shape[1]
    run = Run(np.zeros((times, n)))
    for top in range(0, depth, rows):
        for left in range(0, n, cols):
            run.folds += 1
            cells = np.zeros((rows, cols))
            block = held[top : top + rows, left : left + cols]
            cycle = 0
            if load:  # a row enters at the top every cycle, the bottom row's first, and all move down
                for k in reversed(range(rows)):
                    entering = np.zeros(cols)
                    if k < block.shape[0]:
                        entering[: block.shape[1]] = block[k]
                        run.accesses += block.shape[1]
                    cells = np.vstack([entering, cells[:-1]])
                    cycle += 1
            else:
                cells[: block.shape[0], : block.shape[1]] = block
            assert (cells[: block.shape[0], : block.shape[1]] == block).all()
            going_right: list = [[None] * cols for _ in range(rows)]
            sums: list = [[None] * cols for _ in range(rows)]
            left_over, step = times * cols, 0
            while left_over:
                for i in range(rows):
                    time = step - i
                    entering_value = None
                    if 0 <= time < times:
                        real = top + i < depth
                        entering_value = streamed[time, top + i] if real else 0.0
                        run.accesses += real
                    going_right[i] = [entering_value, *going_right[i][:-1]]
                above: list = [[0.0] * cols, *sums[:-1]]
                sums = [
                    [
                        None if going_right[i][j] is None else above[i][j] + going_right[i][j] * cells[i, j]
                        for j in range(cols)
                    ]
                    for i in range(rows)
                ]
                for j in range(cols):
                    if sums[-1][j] is not None:
                        left_over -= 1
                        time = step - (rows - 1) - j
                        if left + j < n:  # added to what earlier folds have left, which is read back
                            run.product[time, left + j] += sums[-1][j]
                            run.accesses += 1 + (top > 0)
                cycle, step = cycle + 1, step + 1
            run.cycles += cycle
    return run
