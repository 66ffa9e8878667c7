"""Peer: a dense table of PyTorch: `torch.nn.functional.embedding`, and `torch.optim` on its rows.

    python benchmarks/peers/torch_tables.py ROWS DIM BATCH ROUNDS

Prints one JSON object of nanoseconds per row, the best of the rounds.  Adam is `SparseAdam`, and Adagrad takes sparse
gradients: both change the rows of the batch alone, as a parameter server does.  `dense_adam` changes the whole table,
and its figure is per row of the table.  It needs PyTorch and NumPy alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def best_ns_per_row(function: Callable[[], object], num_rows: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds + 1):  # the first one warms up
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best * 1e9 / num_rows


def sparse_gradient(num_rows: int, dim: int, batch: int) -> torch.Tensor:
    ids = torch.from_numpy(np.sort(np.random.default_rng(2).choice(num_rows, batch, replace=False)))
    values = torch.from_numpy(np.random.default_rng(3).standard_normal((batch, dim), np.float32))
    gradient = torch.sparse_coo_tensor(ids[None, :], values, (num_rows, dim), check_invariants=False)
    return gradient._coalesced_(True)  # the ids are unique and sorted


def measure(num_rows: int, dim: int, batch: int, rounds: int) -> dict[str, float]:
    table = torch.nn.Parameter(torch.rand(num_rows, dim) * 0.1 - 0.05)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, num_rows, batch))
    figures: dict[str, float] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            lookup = best_ns_per_row(lambda: torch.nn.functional.embedding(ids, table), batch, rounds)
        figures[f"lookup_{threads}"] = lookup
    gradient = sparse_gradient(num_rows, dim, batch)
    optimizers: dict[str, Any] = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
    for name, kind in optimizers.items():
        optimizer = kind([table], lr=0.001)
        table.grad = gradient
        for threads in (1, 2):
            torch.set_num_threads(threads)
            figures[f"{name}_{threads}"] = best_ns_per_row(optimizer.step, batch, rounds)
        table.grad = None
        del optimizer
    if num_rows * dim <= 16_000_000:  # four times the table
        torch.set_num_threads(1)
        optimizer = torch.optim.Adam([table], lr=0.001)
        table.grad = torch.ones_like(table)
        figures["dense_adam_1"] = best_ns_per_row(optimizer.step, num_rows, min(rounds, 5))
    return figures


if __name__ == "__main__":
    print(json.dumps(measure(*(int(argument) for argument in sys.argv[1:5]))))
