"""The input pipeline of the PyTorch framework: return values of `feed`, order, chance, errors, reading ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords

Make = Callable[..., Any]
KINDS = [
    "feed",
    "as_columns",
    "as_dataset",
    "as_tensor_dataset",
    "as_generator",
    "as_iterable",
    "as_list",
    "records_alone",
]


@pytest.fixture
def numbers() -> list[bytes]:
    """20 records: 0 to 19."""
    return [str(k).encode() for k in range(20)]


def features(batches: list[Batch]) -> list[list[float]]:
    return [batch.data.features.reshape(-1).tolist() for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_feed_returns_the_minibatches_are_the_same(
    framework: Make, numbers: Any, minibatches: Make, kind: str
) -> None:
    found = minibatches(framework("torch_feeds.custom_model", feed=f"torch_feeds.{kind}"), numbers)
    assert features(found) == [[float(k) for k in part] for part in (range(8), range(8, 16), range(16, 20))]
    assert [batch.size for batch in found] == [8, 8, 4]
    assert [batch.n for batch in found] == [0, 1, 2]
    assert found[0].data.labels.tolist() == [k % 10 for k in range(8)]
    assert found[0].data.features.dtype == torch.float32


def test_feed_may_leave_records_out(framework: Make, numbers: Any, minibatches: Make) -> None:
    found = minibatches(framework("torch_feeds.custom_model", feed="torch_feeds.even_ones"), numbers)
    assert features(found) == [[0, 2, 4, 6, 8, 10, 12, 14], [16, 18]]


@pytest.mark.parametrize(("kind", "surplus"), [("feed", 0), ("even_ones", -10), ("every_one_twice", 20)])
def test_the_end_of_a_task_says_what_feed_has_made_of_its_records(
    framework: Make, numbers: Any, kind: str, surplus: int
) -> None:
    tested = framework("torch_feeds.custom_model", feed=f"torch_feeds.{kind}")
    made = list(tested.batches(Mode.TRAINING, iter([TaskRecords(5, 0, numbers)])))
    assert made[-1].surplus == Surplus(surplus)
    assert sum(batch.size for batch in made) == 20 + surplus


def test_samples_are_put_together_by_the_users_function(framework: Make, numbers: Any, minibatches: Make) -> None:
    found = minibatches(framework("collated.custom_model", minibatch_size=3), numbers[:4])
    assert [batch.data.features.shape for batch in found] == [(3, 2), (1, 3)]
    assert [batch.size for batch in found] == [3, 1]


def test_prediction_has_features_alone(framework: Make, numbers: Any, minibatches: Make) -> None:
    (batch,) = minibatches(framework("torch_feeds.custom_model"), numbers[:3], Mode.PREDICTION)
    assert batch.data.features.reshape(-1).tolist() == [0, 1, 2]
    assert batch.data.labels is None


def test_tasks_keep_their_order_their_names_and_their_ends(framework: Make, numbers: Any) -> None:
    tested = framework("torch_feeds.custom_model")
    tasks = [TaskRecords(5, 0, numbers[:9]), TaskRecords(6, 0, []), TaskRecords(7, 0, numbers[:8])]
    found = [(batch.lease, batch.n, batch.end) for batch in tested.batches(Mode.TRAINING, iter(tasks))]
    assert found == [(5, 0, False), (5, 1, False), (5, 2, True), (6, 0, True), (7, 0, False), (7, 1, True)]


@pytest.mark.parametrize("kind", ["shuffled", "shuffled_by_python", "shuffled_by_numpy"])
def test_chance_in_feed_depends_on_the_task_alone(framework: Make, numbers: Any, minibatches: Make, kind: str) -> None:
    tested, other = (framework("torch_feeds.custom_model", feed=f"torch_feeds.{kind}", seed=seed) for seed in (1, 2))
    first = features(minibatches(tested, numbers, seed=7))
    torch.manual_seed(123)
    assert features(minibatches(other, numbers, seed=7)) == first
    assert features(minibatches(tested, numbers, seed=8)) != first


def test_feed_draws_nothing_from_the_generator_of_the_model(framework: Make, numbers: Any, minibatches: Make) -> None:
    tested = framework("torch_feeds.custom_model", feed="torch_feeds.shuffled")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    minibatches(tested, numbers)
    assert torch.equal(torch.rand(3), expected)


def test_feed_computes_with_one_thread_and_the_model_with_all(
    framework: Make, numbers: Any, minibatches: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the number is the user's choice
    torch.set_num_threads(3)
    try:
        found = minibatches(framework("torch_feeds.custom_model", feed="torch_feeds.counting_threads"), numbers[:2])
        assert features(found) == [[1.0, 1.0]]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_feed_that_raises_is_reported_with_the_minibatch(framework: Make, numbers: Any) -> None:
    tested = framework("torch_feeds.custom_model", feed="torch_feeds.raising_at_13")
    batches = tested.batches(Mode.TRAINING, iter([TaskRecords(4, 0, numbers)]))
    assert next(batches).n == 0
    with pytest.raises(FeedError, match="ValueError: thirteen") as raised:
        next(batches)
    assert (raised.value.lease, raised.value.n) == (4, 1)
    assert isinstance(raised.value.__cause__, ValueError)
    rest = list(tested.batches(Mode.TRAINING, iter([TaskRecords(4, 0, numbers[:8])])))
    assert [batch.end for batch in rest] == [False, True]


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("endless", "Does it ever end"),
        ("a_number", "returned a int"),
        ("unequal", r"tensors of \[2, 3\] samples"),
        ("without_labels", "minibatches that are a Tensor"),
        ("exiting", "SystemExit"),
    ],
)
def test_a_feed_that_is_of_no_use_is_reported(
    framework: Make, numbers: Any, minibatches: Make, kind: str, complaint: str
) -> None:
    with pytest.raises(FeedError, match=complaint):
        minibatches(framework("torch_feeds.custom_model", feed=f"torch_feeds.{kind}"), numbers[:3])


def test_tasks_are_read_at_most_one_ahead(framework: Make, numbers: Any) -> None:
    taken: list[int] = []
    second_taken = threading.Event()

    def tasks() -> Iterator[TaskRecords]:
        for lease in range(4):
            taken.append(lease)
            if lease == 1:
                second_taken.set()
            yield TaskRecords(lease, 0, numbers[:2])

    batches = framework("torch_feeds.custom_model", minibatch_size=2).batches(Mode.TRAINING, tasks())
    assert not next(batches).end
    assert second_taken.wait(20)
    assert taken == [0, 1]
    assert [batch.lease for batch in batches] == [0, 1, 1, 2, 2, 3, 3]


def test_an_error_of_the_tasks_comes_through_and_a_left_pipeline_ends(framework: Make, numbers: Any) -> None:
    def tasks() -> Iterator[TaskRecords]:
        yield TaskRecords(1, 0, numbers[:8])
        raise KeyError("lease")

    tested = framework("torch_feeds.custom_model")
    with pytest.raises(KeyError, match="lease"):
        list(tested.batches(Mode.TRAINING, tasks()))
    before = threading.enumerate()  # that of the first pipeline may be about to end
    left = tested.batches(Mode.TRAINING, iter([TaskRecords(1, 0, numbers)] * 9))
    next(left)
    (thread,) = (t for t in threading.enumerate() if t.name == "elasticdl-input" and t not in before)
    left.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_reader_that_exits_leaves_no_thread_waiting(framework: Make) -> None:
    """In a thread an exit ends nothing but that thread."""

    def tasks() -> Iterator[TaskRecords]:
        raise SystemExit("no such table")
        yield

    def wait() -> None:
        try:
            next(framework("torch_feeds.custom_model").batches(Mode.TRAINING, tasks()))
        except SystemExit as error:
            exits.append(str(error))

    exits: list[str] = []
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert exits == ["no such table"]


def test_read_only_arrays_are_taken_without_a_warning(framework: Make, numbers: Any, minibatches: Make) -> None:
    with np.errstate(all="raise"):
        found = minibatches(framework("torch_feeds.custom_model", feed="torch_feeds.read_only"), numbers)
    assert features(found)[0] == [float(k) for k in range(8)]
