"""The input pipeline: tasks keep their borders, are the same everywhere, and fail by name."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.framework import FeedError, Mode, Surplus, TaskRecords
from elasticdl.frameworks.keras.input.feed import DISCARDING
from elasticdl.frameworks.keras.input.pipeline import TaskSource
from elasticdl_client.errors import DataError, ModelDefinitionError


def _task(rows_of: Any, lease: int, numbers: Any, seed: int = 0) -> TaskRecords:
    return TaskRecords(lease, seed, rows_of(np.asarray(numbers, "f4").reshape(-1, 1)))


def _labels(batch: Any) -> list[float]:
    return [float(x) for x in batch.data.element[1].numpy()]


def test_minibatches_never_cross_tasks_and_each_task_is_closed(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", minibatch_size=4)
    tasks = [_task(rows_of, 10, range(6)), _task(rows_of, 11, []), _task(rows_of, 12, range(4))]
    seen = [(b.lease, b.n, b.end, b.size) for b in tested.batches(Mode.TRAINING, iter(tasks))]
    assert seen == [
        (10, 0, False, 4),
        (10, 1, False, 2),
        (10, 2, True, 0),
        (11, 0, True, 0),
        (12, 0, False, 4),
        (12, 1, True, 0),
    ]


def test_a_filter_may_leave_a_task_nothing(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", minibatch_size=4, feed="only_positive")
    tasks = [_task(rows_of, 1, [-1, -2, -3]), _task(rows_of, 2, [-1, 2, 3])]
    seen = [(b.lease, b.n, b.end, b.size) for b in tested.batches(Mode.TRAINING, iter(tasks))]
    assert seen == [(1, 0, True, 0), (2, 0, False, 2), (2, 1, True, 0)]


@pytest.mark.parametrize(
    ("feed", "surplus"),
    [
        ("feed", Surplus()),
        ("examples_of_five", Surplus(-5, "take")),
        ("only_positive", Surplus(-1, "filter")),
        ("twice_shuffled", Surplus(10, "repeat")),
        ("every_other_half", Surplus(-3, "take, skip, shard, concatenate")),
        ("full_batches", Surplus(-2, "batch(drop_remainder=True)")),
        ("several_each", Surplus(20, "flat_map")),
        ("doubled_batches", Surplus(10, "unbatch")),
        ("more_than_needed", Surplus()),
    ],
)
def test_the_end_of_a_task_says_what_feed_has_made_of_its_records(
    framework: Any, rows_of: Any, feed: str, surplus: Surplus
) -> None:
    tested = framework("feeds.custom_model", minibatch_size=4, feed=feed)
    tasks = [_task(rows_of, 1, range(10)), _task(rows_of, 2, [])]
    made = list(tested.batches(Mode.TRAINING, iter(tasks)))
    first, second = (batch for batch in made if batch.end)
    assert first.surplus == surplus
    assert sum(batch.size for batch in made if batch.lease == 1) == 10 + surplus.count
    assert second.surplus == Surplus()


def test_a_record_may_end_in_zero_bytes(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", minibatch_size=4)
    batch, _ = tested.batches(Mode.TRAINING, iter([_task(rows_of, 1, [0.0, 1.0, 0.0])]))
    assert _labels(batch) == [0.0, 1.0, 0.0]


def test_a_shuffle_is_the_same_in_every_worker(framework: Any, rows_of: Any) -> None:
    def shuffled(feed: str, tasks: list[TaskRecords]) -> dict[int, list[list[float]]]:
        found: dict[int, list[list[float]]] = {}
        for batch in framework("feeds.custom_model", feed=feed).batches(Mode.TRAINING, iter(tasks)):
            if not batch.end:
                found.setdefault(batch.lease, []).append(_labels(batch))
        return found

    for feed in ("shuffled", "twice_shuffled"):
        tasks = [_task(rows_of, k, range(30), seed=k % 3) for k in range(6)]
        forwards, backwards = shuffled(feed, tasks), shuffled(feed, tasks[::-1])
        assert forwards == backwards
        assert forwards[0] == forwards[3]
        assert forwards[0] != forwards[1]
        expected = sorted([*range(30)] * (2 if feed == "twice_shuffled" else 1))
        assert sorted(label for batch in forwards[0] for label in batch) == expected


def test_a_second_pass_is_shuffled_anew(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", minibatch_size=30, feed="twice_shuffled")
    first, second, _ = tested.batches(Mode.TRAINING, iter([_task(rows_of, 1, range(30))]))
    assert _labels(first) != _labels(second)


def test_nothing_is_retraced_over_fifty_tasks(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", minibatch_size=4)
    tested.report()
    traces = sys.modules["feeds"].traces  # type: ignore[attr-defined]
    list(tested.batches(Mode.TRAINING, iter([_task(rows_of, 0, range(3))])))
    count = len(traces)
    tasks = [_task(rows_of, k, range(k)) for k in range(50)]
    ends = [b for b in tested.batches(Mode.TRAINING, iter(tasks)) if b.end]
    assert len(ends) == 50
    assert len(traces) == count


@pytest.mark.parametrize("feed", ["raising", "python_raising"])
def test_a_feed_that_raises_names_the_minibatch_and_the_pipeline_continues(
    framework: Any, rows_of: Any, feed: str
) -> None:
    tested = framework("feeds.custom_model", minibatch_size=4, feed=feed)
    tasks = iter([_task(rows_of, 1, range(5)), _task(rows_of, 2, [1, 2, 3, 4, 5, -6]), _task(rows_of, 3, range(3))])
    batches = tested.batches(Mode.TRAINING, tasks)
    seen = []
    with pytest.raises(FeedError, match="a negative number is nothing to learn from") as raised:
        seen.extend((batch.lease, batch.n, batch.end) for batch in batches)
    assert (raised.value.lease, raised.value.n) == (2, 1)
    assert seen == [(1, 0, False), (1, 1, False), (1, 2, True), (2, 0, False)]
    assert "feeds.py" in raised.value.details
    assert "tf.debugging.assert_" in raised.value.details or "raise ValueError" in raised.value.details
    again = tested.batches(Mode.TRAINING, iter([_task(rows_of, 4, range(2))]))
    assert [(b.lease, b.n, b.end) for b in again] == [(4, 0, False), (4, 1, True)]


def test_a_feed_that_cannot_be_traced_is_an_error_of_its_first_task(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", feed="untraceable")
    with pytest.raises(FeedError, match="no column 'price'") as raised:
        list(tested.batches(Mode.EVALUATION, iter([_task(rows_of, 9, range(2))])))
    assert (raised.value.lease, raised.value.n) == (9, 0)


def test_an_endless_feed_is_refused_before_the_first_step(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", feed="endless")
    with pytest.raises(ModelDefinitionError, match="dataset without end"):
        tested.report()
    with pytest.raises(FeedError, match="dataset without end"):
        list(tested.batches(Mode.TRAINING, iter([_task(rows_of, 9, range(2))])))


def test_an_endless_feed_that_hides_it_is_stopped(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", feed="hidden_endless")
    with pytest.raises(FeedError, match="does it ever end"):
        list(tested.batches(Mode.TRAINING, iter([_task(rows_of, 9, [1, 2])])))


def test_what_is_not_a_dataset_of_samples_is_refused(framework: Any) -> None:
    with pytest.raises(ModelDefinitionError, match="returned a list"):
        framework("feeds.custom_model", feed="not_a_dataset").report()
    with pytest.raises(ModelDefinitionError, match="features, labels"):
        framework("feeds.custom_model", feed="features_only").report()


def test_prediction_takes_features_alone(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", feed="features_only")
    batch, _ = tested.batches(Mode.PREDICTION, iter([_task(rows_of, 1, range(3))]))
    outputs = tested.predictions(batch, tested.initial(), {})
    assert outputs.shape == (3, 1)


def test_conditions_on_a_record_still_work(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", feed="branching")
    batch, _ = tested.batches(Mode.TRAINING, iter([_task(rows_of, 1, [-2, 5])]))
    assert batch.data.element[0].numpy().ravel().tolist() == [-3.0, 6.0]


def test_chance_in_a_feed_is_warned_of(framework: Any, rows_of: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    list(framework("feeds.custom_model", feed="random").batches(Mode.TRAINING, iter([_task(rows_of, 1, [1])])))
    assert "RandomUniform" in caplog.text
    assert "metadata.seed" in caplog.text
    caplog.clear()
    list(framework("feeds.custom_model", feed="shuffled").batches(Mode.TRAINING, iter([_task(rows_of, 1, [1])])))
    assert "random operations" not in caplog.text


def _examples(count: int) -> list[bytes]:
    def example(k: int) -> bytes:
        feature = {
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=[k, k / 2, -k / 3])),
            "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"name %d\0" % k])),
            "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[k])),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

    return [example(k) for k in range(count)]


def test_a_vectorised_map_gives_what_the_map_as_written_gives(framework: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    found = {}
    for feed in ("examples", "batched_examples"):
        tested = framework("feeds.OfExamples", feed=feed)
        *batches, _ = tested.batches(Mode.TRAINING, iter([TaskRecords(1, 0, _examples(21))]))
        found[feed] = [tf.nest.map_structure(lambda part: part.numpy(), batch.data.element) for batch in batches]
    assert "not vectorised" not in caplog.text
    for one, other in zip(found["examples"], found["batched_examples"], strict=True):
        np.testing.assert_allclose(one[0]["x"], other[0]["x"], rtol=1e-6)
        assert one[0]["name"].tolist() == other[0]["name"].tolist()
        np.testing.assert_array_equal(one[1], other[1])


def test_what_cannot_be_vectorised_runs_as_written_and_is_logged(framework: Any, rows_of: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    batch, _ = framework("feeds.custom_model").batches(Mode.TRAINING, iter([_task(rows_of, 1, [3, 4])]))
    assert _labels(batch) == [3.0, 4.0]
    assert "not vectorised" in caplog.text


def test_tasks_are_drawn_at_most_one_ahead(framework: Any, rows_of: Any) -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[TaskRecords]:
        for k in range(12):
            drawn.append(k)
            yield _task(rows_of, k, [1.0] * (k % 2))

    for batch in framework("feeds.custom_model").batches(Mode.TRAINING, tasks()):
        assert drawn[-1] <= batch.lease + (2 if batch.end else 1)
    assert len(drawn) == 12


def test_the_leases_of_ended_tasks_are_forgotten(rows_of: Any) -> None:
    source = TaskSource(_task(rows_of, k, [1.0]) for k in range(50))
    for lease, _, _ in source.elements():
        assert list(source.leases) == [lease]
        source.ended()
    assert not source.leases


def test_an_error_of_the_tasks_is_raised_as_it_is(framework: Any, rows_of: Any) -> None:
    def tasks() -> Iterator[TaskRecords]:
        yield _task(rows_of, 1, [1.0])
        raise DataError("shard 7 is damaged")

    with pytest.raises(DataError, match="shard 7 is damaged"):
        list(framework("feeds.custom_model").batches(Mode.TRAINING, tasks()))


def test_an_abandoned_pipeline_does_not_wait_for_a_task(framework: Any, rows_of: Any) -> None:
    tested = framework("feeds.custom_model", feed="raising")
    release = threading.Event()

    def tasks() -> Iterator[TaskRecords]:
        yield _task(rows_of, 1, [-1.0])
        release.wait()

    with pytest.raises(FeedError):
        list(tested.batches(Mode.TRAINING, tasks()))
    again = tested.batches(Mode.TRAINING, iter([_task(rows_of, 2, [1.0])]))
    assert [(b.lease, b.end) for b in again] == [(2, False), (2, True)]
    release.set()
    for thread in threading.enumerate():
        if thread.name == DISCARDING:
            thread.join()
