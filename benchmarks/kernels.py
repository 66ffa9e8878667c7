"""The native tables against dense tables of PyTorch and against copying memory, in the same run, by turns.

``python -m benchmarks.kernels [--quick] [--json] [--torch_python=PYTHON]``: nanoseconds per row of lookup, Adagrad and
Adam for 100,000 random ids a call, at 1 M and 10 M rows of 16 and 64 floats, by one and by two threads; the best of the
rounds.  `--quick` takes 1 M × 16 alone.  The peers need PyTorch 2.13 (CPU), in the environment of PYTHON; they are left
out, and that is said, where there is none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elasticdl.kernels import _native
from elasticdl.rpc.resource_use import keep_large_buffers

BATCH = 100_000
NEW_ROWS = 1_000  # of one call while a table is filled
PEER = Path(__file__).parent / "peers" / "torch_tables.py"
RULES: dict[str, tuple[tuple[float, ...], list[float]]] = {  # scalars of an update, initial values of the slots
    "adagrad": ((0.01, 0.0), [0.1]),
    "adam": ((0.001, 0.0, 0.001), [0.0, 0.0]),
}
KINDS = {"adagrad": "Adagrad", "adam": "Adam"}

Figures = dict[str, float]
Ids = npt.NDArray[np.int64]


def best_ns_per_row(functions: list[Callable[[], object]], num_rows: int, rounds: int) -> float:
    """Of all functions at once, each in a thread of its own; the first round warms up."""
    best = float("inf")
    for _ in range(rounds + 1):
        threads = [threading.Thread(target=function) for function in functions[1:]]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        functions[0]()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - started)
    return best * 1e9 / num_rows


def filled_table(num_rows: int, dim: int, rule: str) -> tuple[_native.Table, Figures]:
    """Make a table of the ids 0 … num_rows - 1; return the nanoseconds and the bytes of each row."""
    initializer = _native.Initializer("uniform", 1, -0.05, 0.05)
    optimizer = _native.Optimizer(KINDS[rule], {})
    table = _native.Table(dim, initializer, optimizer, RULES[rule][1], _native.Constraint())
    ids = np.random.default_rng(0).permutation(num_rows)
    out = np.zeros((NEW_ROWS, dim), np.float32)
    longest = elapsed = 0.0
    for first in range(0, num_rows, NEW_ROWS):
        started = time.perf_counter()
        table.pull_into(ids[first : first + NEW_ROWS], True, out)
        taken = time.perf_counter() - started
        elapsed, longest = elapsed + taken, max(longest, taken)
    return table, {
        "create": elapsed * 1e9 / num_rows,
        "longest_call_ms": longest * 1e3,
        "bytes_per_row": table.memory_bytes() / num_rows,
    }


def lookups(table: _native.Table, ids: Ids, num_threads: int) -> list[Callable[[], object]]:
    def pull(part: Ids) -> Callable[[], object]:
        out = np.zeros((len(part), table.dim), np.float32)
        return lambda: table.pull_into(part, False, out)

    return [pull(part) for part in np.array_split(ids, num_threads)]


def updates(table: _native.Table, ids: Ids, rule: str, num_threads: int) -> list[Callable[[], object]]:
    def push(part: Ids) -> Callable[[], object]:
        gradients = np.random.default_rng(3).standard_normal((len(part), table.dim), np.float32)
        return lambda: table.apply(part, gradients, RULES[rule][0])

    return [push(part) for part in np.array_split(ids, num_threads)]


def measure_ours(num_rows: int, dim: int, rounds: int) -> Figures:
    figures: Figures = {}
    random = np.random.default_rng(1)
    for rule in RULES:
        table, made = filled_table(num_rows, dim, rule)
        figures |= {f"{rule}_{name}": value for name, value in made.items()}
        unique = random.choice(num_rows, BATCH, replace=False)
        for threads in (1, 2):
            figures[f"{rule}_{threads}"] = best_ns_per_row(updates(table, unique, rule, threads), BATCH, rounds)
            if rule == "adam":
                ids = random.integers(0, num_rows, BATCH)
                figures[f"lookup_{threads}"] = best_ns_per_row(lookups(table, ids, threads), BATCH, rounds)
    return figures


def copy_gb_per_s(rounds: int) -> float:
    """Bytes read and written by copying 256 MiB, one thread."""
    source = np.ones(64 << 20, np.float32)
    target = np.zeros_like(source)
    return 2 * 4 / best_ns_per_row([lambda: np.copyto(target, source)], source.size, rounds)


def measure_torch(python: str, num_rows: int, dim: int, rounds: int) -> Figures:
    """Empty if there is no PyTorch, which is said."""
    command = [python, str(PEER), *map(str, (num_rows, dim, BATCH, rounds))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        found: Figures = json.loads(done.stdout.splitlines()[-1])
        return found
    if "No module named 'torch'" not in done.stderr:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    print(f"{python} has no PyTorch: no peers. Name one that has: --torch_python=PYTHON", file=sys.stderr)
    return {}


def show(name: str, ours: Figures, torch: Figures) -> None:
    print(f"{name}: ns per row")
    for kind in ("lookup", "adagrad", "adam"):
        for threads in (1, 2):
            mine, peer = ours[f"{kind}_{threads}"], torch.get(f"{kind}_{threads}")
            ratio = "" if peer is None else f"   torch {peer:8.1f}   ratio {mine / peer:5.2f}"
            print(f"  {kind:8} {threads} thread{'s' if threads > 1 else ' '} {mine:8.1f}{ratio}")
    for rule in RULES:
        print(
            f"  {rule}: a new row {ours[f'{rule}_create']:.0f} ns, longest call of 1,000 new rows "
            f"{ours[f'{rule}_longest_call_ms']:.1f} ms, {ours[f'{rule}_bytes_per_row']:.0f} bytes per row"
        )
    if "dense_adam_1" in torch:
        print(f"  torch.optim.Adam of the whole table: {torch['dense_adam_1']:.1f} for each of its rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 M × 16 alone, fewer rounds")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--torch_python", default=sys.executable, help="the Python that has PyTorch")
    arguments = parser.parse_args()
    keep_large_buffers()  # as a parameter server does
    rounds = 5 if arguments.quick else 30
    sizes = [(1_000_000, 16)] if arguments.quick else [(n, dim) for n in (1_000_000, 10_000_000) for dim in (16, 64)]
    figures: Figures = {"memory_copy_gb_per_s": copy_gb_per_s(rounds)}
    print(f"memory copy, read and written: {figures['memory_copy_gb_per_s']:.1f} GB/s")
    for num_rows, dim in sizes:
        ours = measure_ours(num_rows, dim, rounds)
        torch = measure_torch(arguments.torch_python, num_rows, dim, rounds)
        name = f"{num_rows // 1_000_000}M_x_{dim}"
        show(name, ours, torch)
        figures |= {f"{name}_{key}": value for key, value in ours.items()}
        figures |= {f"{name}_torch_{key}": value for key, value in torch.items()}
        if torch:
            figures[f"{name}_lookup_ratio"] = ours["lookup_1"] / torch["lookup_1"]
            figures[f"{name}_adam_ratio"] = ours["adam_1"] / torch["adam_1"]
    if arguments.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
