"""The input pipeline of one mode: one dataset for the whole job, one element of its outer dataset per task.

Owns the order of minibatches and the end markers of tasks, and converts errors of user code to `FeedError`.  It never
retries and never parses a record.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from elasticdl.frameworks.devices import num_processors
from elasticdl.frameworks.framework import Batch, FeedError, Mode, Surplus, TaskRecords
from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs
from elasticdl.frameworks.keras.input.feed import Elements, Packing, TracedFeed, mapped_inline
from elasticdl.frameworks.keras.operations import complete, out_of_range
from elasticdl.frameworks.keras.samples import KerasMinibatch, size_of, take_apart, with_features
from elasticdl.layers.placement import TableSpec

_PREFETCH = 2
_MOST_SAMPLES_PER_RECORD = 1000
_END = -1
_SEED_MASK = 2**62 - 1
_QUOTE = "\\'"  # TensorFlow escapes a quote in an assertion's message
_NOISE = re.compile(
    r"Error in user-defined function passed to .*? transformation with iterator: \S*: ?"
    r"|\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w+\]( name:)?"
)
IdsFunction = Callable[[Any], dict[str, Any]]


class TaskSource:
    """Feeds tasks to the outer dataset from the thread of tf.data, at most one task ahead of the one being yielded."""

    def __init__(self, tasks: Iterator[TaskRecords]) -> None:
        self.leases: deque[int] = deque()  # tasks in the pipeline, in order, without those that have ended
        self.only_record: bytes | None = None  # the only record of the newest task, if it has one record
        self.error: Exception | None = None
        self._tasks = tasks
        self._closed = False
        self._changed = threading.Condition()

    def elements(self) -> Iterator[tuple[np.int64, np.int64, Any]]:
        while self._may_advance():
            try:
                task = next(self._tasks, None)
            except Exception as error:  # noqa: BLE001  raised again where the batch is taken
                self.error = error
                return
            if task is None:
                return
            self.leases.append(task.lease)
            self.only_record = bytes(task.records[0]) if len(task.records) == 1 else None
            records = np.fromiter(task.records, dtype=object, count=len(task.records))
            yield np.int64(task.lease), np.int64(task.seed & _SEED_MASK), records

    def ended(self) -> None:
        """Remove the oldest task: its end marker has left the pipeline."""
        with self._changed:
            self.leases.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _may_advance(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self.leases) <= 1)
            return not self._closed


class Pipeline:
    """Minibatches of tasks, for one mode."""

    def __init__(
        self,
        mode: Mode,
        feed: TracedFeed,
        inputs: ModelInputs,
        minibatch_size: int,
        tables: dict[str, TableSpec],
        make_ids: Callable[[Any], IdsFunction],
    ) -> None:
        """
        Args:
            mode: Mode of the minibatches.
            feed: The feed for this mode.
            inputs: Inputs of the model; minibatches have features only for these.
            minibatch_size: Samples per minibatch.
            tables: The tables on the parameter servers.
            make_ids: Maps the spec of batched features to a function that finds their ids.
        """
        self._mode = mode
        self._feed = feed
        self._inputs = inputs
        self._minibatch_size = minibatch_size
        self._tables = tables
        self._make_ids = make_ids
        self._dataset: Any = None
        self._source: TaskSource | None = None
        self._packing: Packing | None = None  # once traced
        self.spec: Any = None  # spec of a minibatch's element, once traced

    def batches(self, tasks: Iterator[TaskRecords]) -> Iterator[Batch]:
        """See `Framework.batches`."""
        source = TaskSource(tasks)
        if self._dataset is None:
            first = next(tasks, None)
            if first is None:
                return
            self._trace(first)
            source = TaskSource(_chained(first, tasks))
        assert self._packing is not None
        elements = Elements(self._dataset, self._packing.is_plain)
        self._source = source
        try:
            yield from self._run(elements, source)
        finally:
            source.close()
            elements.discard()

    def _run(self, elements: Elements, source: TaskSource) -> Iterator[Batch]:
        n, num_samples = 0, 0
        while True:
            try:
                element = elements.next()
            except tf.errors.OpError as error:
                if source.error is not None:
                    raise source.error from None
                message = _message(error)
                explained = self._feed.explained(message, source.only_record)
                is_explained = explained != message
                frames = self._feed.frames_of(str(error))
                raise FeedError(source.leases[0], n, explained, is_explained, frames) from _without_frames(error)
            if element is None:
                if source.error is not None:
                    raise source.error
                return
            (lease, number, size), content = element
            if number == _END:
                source.ended()
                yield Batch(int(lease), n, end=True, surplus=self._surplus(num_samples - int(size)))
                n, num_samples = 0, 0
            else:
                yield self._batch(int(lease), n, int(size), Packing.unpack(content))
                n, num_samples = n + 1, num_samples + int(size)

    def _surplus(self, count: int) -> Surplus:
        return Surplus(count, ", ".join(self._feed.counting) if count else "")

    def _matched(self, element: Any) -> Any:
        return with_features(self._mode, element, self._inputs.matched(take_apart(self._mode, element).features))

    def _batch(self, lease: int, n: int, size: int, parts: list[Any]) -> Batch:
        count = len(parts) - len(self._tables)
        ids = {name: part.numpy() for name, part in zip(sorted(self._tables), parts[count:], strict=True)}
        for name, table in self._tables.items():
            wrong = out_of_range(table, ids[name])
            if wrong:
                raise FeedError(lease, n, wrong)
        return Batch(lease, n, size=size, ids=ids, data=KerasMinibatch(self._mode, parts[:count], self.spec, ids))

    def _trace(self, first: TaskRecords) -> None:
        try:
            fed = self._feed.probe()
            self._dataset = self._compiled()
            self._inputs.log_left_out(take_apart(self._mode, fed).features)
        except Exception as error:
            raise FeedError(first.lease, 0, _message(error)) from error

    def _compiled(self) -> Any:
        def elements() -> Iterator[tuple[np.int64, np.int64, Any]]:
            source = self._source
            assert source is not None
            yield from source.elements()

        outer = tf.data.Dataset.from_generator(
            elements,
            output_signature=(
                tf.TensorSpec((), tf.int64),
                tf.TensorSpec((), tf.int64),
                tf.TensorSpec((None,), tf.string),
            ),
        )
        whole = outer.flat_map(self._task)
        self._feed.warn_of_chance(whole)
        options = tf.data.Options()
        options.deterministic = True
        # Waiting for a task must not take a thread from the steps.
        options.threading.private_threadpool_size = num_processors() + 1
        # It breaks graphs in which a dataset has two successors, as the trials of vectorised maps leave them.
        options.experimental_optimization.map_and_batch_fusion = False
        return whole.prefetch(_PREFETCH).with_options(options)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _task(self, lease: Any, seed: Any, records: Any) -> Any:
        minibatches = batched(self._feed(records, seed), self._minibatch_size)
        self.spec = self._matched(minibatches.element_spec)
        ids = self._make_ids(take_apart(self._mode, self.spec).features) if self._tables else None
        most = tf.size(records, tf.int64) * _MOST_SAMPLES_PER_RECORD // self._minibatch_size + 1

        def minibatch(n: Any, made: Any) -> Any:
            parts = self._matched(made)
            tf.debugging.Assert(
                n < most, [f"feed makes more than {_MOST_SAMPLES_PER_RECORD} samples a record: does it ever end?"]
            )
            found = {} if ids is None else ids(take_apart(self._mode, parts).features)
            content = (parts, complete(found, self._tables))
            self._packing = Packing(tf.nest.map_structure(tf.type_spec_from_value, content))
            return self._packing.pack([lease, n, size_of(parts)], content)

        full = mapped_inline(minibatches.enumerate(), minibatch)
        assert self._packing is not None
        return full.concatenate(
            tf.data.Dataset.from_tensors(self._packing.end([lease, _END, tf.size(records, tf.int64)]))
        )


def batched(samples: Any, size: int) -> Any:
    """Return ``samples.batch(size)``; if `feed` ends with ``unbatch()``, rebatch its batches without unbatching."""
    batches = getattr(samples, "_input_dataset", None) if type(samples).__name__ == "_UnbatchDataset" else None
    if batches is None or batches.element_spec != samples.batch(size).element_spec:
        return samples.batch(size)
    return batches.rebatch(size)


def _chained(first: TaskRecords, rest: Iterator[TaskRecords]) -> Iterator[TaskRecords]:
    yield first
    yield from rest


def _without_frames(error: BaseException) -> BaseException:
    """Return the error without its frames and those of its cause: they would keep the iterator alive, and the thread
    that frees the error would wait for tf.data's threads."""
    error.__context__ = None
    return error.with_traceback(None)


def _message(error: BaseException) -> str:
    text = _NOISE.sub("", getattr(error, "message", None) or str(error))
    return f"{type(error).__name__}: {text.replace(_QUOTE, _QUOTE[1]).strip()}"
