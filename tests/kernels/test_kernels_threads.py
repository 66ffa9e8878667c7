"""Tables under several threads, and frozen while others write."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from elasticdl.kernels import _native
from tests.kernels.reference import Floats, Ids

STEP = (1.0, 0.0)


def table_of(kind: str, dim: int, num_slots: int = 0) -> _native.Table:
    optimizer = _native.Optimizer(kind, {})
    return _native.Table(
        dim, _native.Initializer("constant", 0, 0.0), optimizer, [0.0] * num_slots, _native.Constraint()
    )


def together(*functions: Callable[[], None]) -> None:
    """Runs all at once, and raises what one of them has raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        barrier.wait()
        try:
            function()
        except BaseException as error:  # noqa: BLE001 it is raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_no_update_is_lost_and_no_row_is_torn() -> None:
    """Each update subtracts a whole number from all elements of a row: sums are exact, and a row is of one number."""
    dim, num_ids, num_calls = 33, 3000, 60
    table = table_of("SGD", dim)
    expected = np.zeros(num_ids, np.int64)
    batches: list[list[tuple[Ids, Floats]]] = []
    for thread in range(4):
        random = np.random.default_rng(thread)
        batches.append([])
        for _ in range(num_calls):
            ids, numbers = random.integers(0, num_ids, 500), random.integers(-8, 9, 500)
            np.add.at(expected, ids, numbers)
            batches[-1].append((ids, np.repeat(numbers[:, None], dim, 1).astype(np.float32)))

    def push(batch: Sequence[tuple[Ids, Floats]]) -> None:
        for ids, gradients in batch:
            table.apply(ids, gradients, STEP)

    def pull() -> None:
        random = np.random.default_rng(99)
        for number in range(200):
            rows = table.pull(random.integers(0, num_ids, 700), number % 2 == 0)
            assert (rows == rows[:, :1]).all()

    together(*(lambda batch=batch: push(batch) for batch in batches), pull, pull)  # type: ignore[misc]
    np.testing.assert_array_equal(table.pull(np.arange(num_ids), False)[:, 0], -expected.astype(np.float32))


def test_threads_create_rows_while_the_table_grows() -> None:
    table = table_of("SGD", 2)
    ids = np.random.default_rng(0).permutation(120_000)

    def create(part: Ids) -> None:
        for few in np.array_split(part, 50):
            table.apply(few, np.ones((len(few), 2), np.float32), STEP)

    together(*(lambda part=ids[start : start + 60_000]: create(part) for start in (0, 30_000, 60_000)))  # type: ignore[misc]
    assert len(table) == 120_000
    rows = table.pull(ids, False)
    assert (rows[30_000:90_000] == -2.0).all()
    assert (rows[:30_000] == -1.0).all()
    assert (rows[90_000:] == -1.0).all()


def contents(frozen: _native.Frozen, max_rows: int) -> dict[int, tuple[bytes, ...]]:
    found: dict[int, tuple[bytes, ...]] = {}
    for ids, rows, slots in frozen.chunks(max_rows):
        assert 0 < len(ids) <= max_rows
        for number, one in enumerate(ids.tolist()):
            assert one not in found, "each row comes once"
            found[one] = (rows[number].tobytes(), *(slot[number].tobytes() for slot in slots))
    return found


def random_push(table: _native.Table, random: np.random.Generator, num_ids: int) -> None:
    ids = random.integers(-num_ids, num_ids, 300)
    table.apply(ids, random.standard_normal((300, table.dim), np.float32), (0.01, 0.0, 0.01))


@pytest.mark.parametrize("max_rows", [1, 7, 1000, 10**9])
def test_a_frozen_table_does_not_change(max_rows: int) -> None:
    table = table_of("Adam", 5, 2)
    random = np.random.default_rng(0)
    for _ in range(10):
        random_push(table, random, 1000)
    before = table.pull(np.sort(table.ids()), False)
    frozen = table.freeze()
    whole = contents(frozen, 10**6)
    for _ in range(10):
        random_push(table, random, 2000)
    assert contents(frozen, max_rows) == whole
    assert len(frozen) == len(whole) < len(table)
    np.testing.assert_array_equal([np.frombuffer(whole[one][0], np.float32) for one in sorted(whole)], before)


def test_a_table_is_frozen_while_others_write() -> None:
    """Writers stop for the moment of freezing only; later writes are not in the view, which is read meanwhile."""
    table = table_of("Adam", 16, 2)
    random_push(table, np.random.default_rng(7), 500)
    gate = threading.Lock()
    stop = threading.Event()

    def write(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not stop.is_set():
            with gate:
                random_push(table, random, 4000)

    def freeze() -> None:
        try:
            for _ in range(8):
                with gate:
                    frozen = table.freeze()
                    at_once = contents(frozen, 100_000)
                for max_rows in (100_000, 64):
                    assert contents(frozen, max_rows) == at_once
                frozen.close()
        finally:
            stop.set()

    together(lambda: write(1), lambda: write(2), freeze)


def test_there_is_one_frozen_view_at_a_time() -> None:
    table = table_of("SGD", 2)
    table.pull(np.arange(100), True)
    frozen = table.freeze()
    with pytest.raises(RuntimeError, match="closed"):
        table.freeze()
    frozen.close()
    frozen.close()
    another = table.freeze()
    frozen.close()  # of the earlier one: the view of another is not touched
    assert len(contents(another, 10)) == 100
    with pytest.raises(ValueError, match="closed"):
        next(iter(frozen.chunks(10)))


def test_dropping_a_view_closes_it_and_dropping_the_table_does_not() -> None:
    table = table_of("SGD", 2)
    table.pull(np.arange(100), True)
    for _ in range(3):
        table.freeze()
    chunks = table.freeze().chunks(10)
    first = next(chunks)
    del table
    gc.collect()
    rest = list(chunks)
    assert sorted(np.concatenate([ids for ids, *_ in (first, *rest)]).tolist()) == list(range(100))
    with pytest.raises(StopIteration):
        next(chunks)


def test_closing_in_the_middle_of_reading_and_writing() -> None:
    table = table_of("Adam", 3, 2)
    random_push(table, np.random.default_rng(0), 10_000)
    for number in range(20):
        frozen = table.freeze()

        def read(frozen: _native.Frozen = frozen) -> None:
            try:
                assert len(contents(frozen, 5)) == len(frozen)
            except ValueError as error:
                assert "closed" in str(error)  # noqa: PT017 it need not happen

        def write(number: int = number) -> None:
            random_push(table, np.random.default_rng(number), 10_000)

        together(read, write, frozen.close)
        assert table.memory_bytes() < 50_000_000


def test_what_a_view_has_kept_is_freed_when_it_is_closed() -> None:
    table = table_of("Adam", 16, 2)
    ids = np.arange(20_000)
    table.pull(ids, True)
    before = table.memory_bytes()
    frozen = table.freeze()
    assert table.memory_bytes() == before
    table.apply(ids, np.ones((20_000, 16), np.float32), (0.1, 0.0, 0.1))
    assert before + 20_000 * 192 <= table.memory_bytes() < before + 1.2 * 20_000 * 192
    frozen.close()
    assert table.memory_bytes() == before


def test_an_empty_table_can_be_frozen() -> None:
    table = table_of("SGD", 2)
    frozen = table.freeze()
    table.pull(np.arange(10), True)
    assert len(frozen) == 0
    assert contents(frozen, 10) == {}
    with pytest.raises(ValueError, match="max_rows"):
        frozen.chunks(0)
