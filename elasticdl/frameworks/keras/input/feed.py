"""Trace the user's `feed` into a task's dataset: seed its shuffles, vectorise its maps, find random operations.

`Dataset.shuffle` and `Dataset.map` are patched only while `feed` is being traced, and only for the tracing thread.

`Packing` and `Elements`: how a minibatch and the end of a task are packed, and one iteration over them.

If every part is an ordinary tensor, elements leave tf.data as flat lists, by one raw operation, and an end has parts
without samples: for a structure tf.data's own iterator needs as much time in Python as parsing the minibatch.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.data.ops.map_op import _MapDataset  # the public `map` has no option for the device

import elasticdl.frameworks
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.operations import (
    changing_the_count,
    frames_of_operation,
    has_control_flow,
    not_vectorisable,
    operations_of_dataset,
    stateful_random,
)
from elasticdl.frameworks.keras.samples import check_structure
from elasticdl.frameworks.user_code import num_taken
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.keras")

Explained = Callable[[str, bytes | None], str]
_SLICED = "Attempting to slice scalar input"  # TensorFlow's error for `record[0]`
_OURS = os.path.dirname(os.path.dirname(elasticdl.frameworks.__file__))
_NOT_OF_USERS = ("<", _OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
_HAS_TRACEBACK = "Traceback (most recent call last)"
_GRAPH_SEED = 87_654_321  # any constant but 0: the second half of the seed of every shuffle


class TracedFeed:
    """The user's `feed` for one mode."""

    def __init__(
        self,
        feed: Callable[..., Any],
        mode: Mode,
        metadata: Any,
        minibatch_size: int,
        explained: Explained = lambda message, _record: message,
    ) -> None:
        """
        Args:
            feed: The user's function.
            mode: Passed to `feed`.
            metadata: Passed to `feed`.
            minibatch_size: Samples per minibatch.
            explained: Converts TensorFlow's error about a record, and the record if it is known, to a message for
                users.
        """
        # tf.data disables AutoGraph for its caller; convert `feed` as if it was called outside of tf.data.
        autograph = tf.__internal__.autograph
        self._feed = autograph.tf_convert(feed, autograph.control_status_ctx(), convert_by_default=False)
        self._arguments = (mode.value, metadata)[: num_taken(feed)]
        self._mode = mode
        self._minibatch_size = minibatch_size
        self._probed: Any = None
        self._samples: Any = None  # once traced
        self.explained = explained
        self.counting: list[str] = []  # methods that may drop or repeat samples, known once traced

    def __call__(self, records: Any, seed: Any) -> Any:
        """Return the dataset of samples of one task.

        Args:
            records: Vector of strings.
            seed: int64 scalar; every shuffle in the task depends only on it.
        """
        dataset = tf.data.Dataset.from_tensor_slices(records)
        patches = _Patches(seed, self._minibatch_size, dataset, records)
        with patches.applied():
            samples = self._checked(self._feed(dataset, *self._arguments))
        self.counting, self._samples = changing_the_count(samples), samples
        return samples

    def frames_of(self, message: str) -> str:
        """Return the lines of the user's code that made the operation which an error of TensorFlow names.

        As in a traceback; empty: they are not known, or the error has a traceback of its own: Python's in a graph.
        """
        frames = (
            [] if self._samples is None or _HAS_TRACEBACK in message else frames_of_operation(self._samples, message)
        )
        users = [frame for frame in frames if not frame.filename.startswith(_NOT_OF_USERS)]
        return "".join(traceback.format_list(users))

    def probe(self) -> Any:
        """Return the spec of a minibatch, found by calling `feed` with a dataset that is never read.

        Raises:
            ModelDefinitionError: `feed` returns an invalid value, or is endless.
        """
        if self._probed is None:
            self._probed = self._spec()
        return self._probed

    def warn_of_chance(self, flat_map: Any) -> None:
        """Warn of random operations in a traced pipeline that do not depend only on the task."""
        found = stateful_random(operations_of_dataset(flat_map))
        if found:
            _log.warning(
                "feed uses random operations (%s) whose values depend on what a worker did before; "
                "use stateless ones with metadata.seed to get the same minibatches everywhere",
                ", ".join(found),
            )

    def _spec(self) -> Any:
        try:
            samples = self._checked(self._feed(tf.data.Dataset.from_tensors(b""), *self._arguments))
        except ValueError as error:
            if _SLICED not in str(error):
                raise
            raise ModelDefinitionError(
                "feed takes a part of a record, which is one string: the row of a CSV file, say.",
                'Make a list of its fields first: record = tf.io.decode_csv(record, [""] * NUMBER_OF_COLUMNS).',
            ) from error
        if int(samples.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise ModelDefinitionError(
                f"feed(dataset, {self._mode.value!r}, metadata) returns a dataset without end.",
                "Leave out repeat(): --num_epochs says how often the data is read.",
            )
        return samples.batch(self._minibatch_size).element_spec

    def _checked(self, samples: Any) -> Any:
        if not isinstance(samples, tf.data.Dataset):
            raise ModelDefinitionError(
                f"feed(dataset, {self._mode.value!r}, metadata) returned a {type(samples).__name__}.",
                "Return a tf.data.Dataset of single samples; it is batched afterwards.",
            )
        check_structure(self._mode, samples.element_spec)
        return samples


class _Patches:
    """`Dataset.shuffle`, `Dataset.map` and `Dataset.batch` as they are while a `feed` is traced."""

    def __init__(self, seed: Any, chunk: int, dataset: Any, records: Any) -> None:
        """
        Args:
            seed: Seed of the task.
            chunk: Number of records in a vectorised call.
            dataset: Dataset with one element per record.
            records: All records of the task.
        """
        self._seed = seed
        self._num_shuffles = 0
        self._shuffle = tf.data.Dataset.shuffle
        self._map = tf.data.Dataset.map
        self._batch = tf.data.Dataset.batch
        self._chunk = chunk
        self._dataset = dataset
        self._records = records
        # Datasets still in the order of records, each with its chunked version; kept alive, so that ids stay unique.
        self._leading: dict[int, tuple[Any, Any]] = {id(dataset): (dataset, None)}

    @contextmanager
    def applied(self) -> Iterator[None]:
        thread = threading.get_ident()
        original_shuffle, original_map, original_batch = self._shuffle, self._map, self._batch

        def shuffle(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original_shuffle(dataset, *args, **kwargs)
            return self._seeded_shuffle(dataset, *args, **kwargs)

        def mapped(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original_map(dataset, *args, **kwargs)
            return self._fast_map(dataset, *args, **kwargs)

        def batch(dataset: Any, batch_size: Any, drop_remainder: Any = False, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or dataset is not self._dataset or drop_remainder is not False:
                return original_batch(dataset, batch_size, drop_remainder, *args, **kwargs)
            return self._slices(batch_size)

        graph = tf.compat.v1.get_default_graph()
        graph.seed = _GRAPH_SEED
        tf.data.Dataset.shuffle, tf.data.Dataset.map, tf.data.Dataset.batch = shuffle, mapped, batch
        try:
            yield
        finally:
            tf.data.Dataset.shuffle, tf.data.Dataset.map = original_shuffle, original_map
            tf.data.Dataset.batch = original_batch

    def _slices(self, size: Any) -> Any:
        """Return batches of records, sliced from the task's records without making single elements."""
        records, size = self._records, tf.cast(size, tf.int64)
        starts = tf.data.Dataset.range(0, tf.size(records, tf.int64), size)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # reading our source takes longer
        def cut(start: Any) -> Any:
            return records[start : start + size]

        return mapped_inline(starts, cut)

    def _seeded_shuffle(
        self, dataset: Any, buffer_size: Any, seed: Any = None, reshuffle_each_iteration: Any = True, name: Any = None
    ) -> Any:
        self._num_shuffles += 1
        own = self._seed + self._num_shuffles + (0 if seed is None else tf.cast(seed, tf.int64))
        again = True if reshuffle_each_iteration is None else reshuffle_each_iteration
        return self._shuffle(dataset, buffer_size, seed=own, reshuffle_each_iteration=again, name=name)

    def _fast_map(self, dataset: Any, map_func: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("deterministic", None)
        is_told = bool(args or kwargs)
        plain = self._map(dataset, map_func, *args, **kwargs) if is_told else mapped_inline(dataset, map_func)
        known = self._leading.get(id(dataset))
        if known is None:
            return plain
        chunks = known[1] if known[1] is not None else self._slices(self._chunk)
        vectorised = self._vectorised(chunks, map_func, plain)
        if vectorised is None:
            return plain
        samples = vectorised.unbatch()
        self._leading[id(samples)] = (samples, vectorised)
        return samples

    def _vectorised(self, chunks: Any, map_func: Any, plain: Any) -> Any | None:
        spec = plain.element_spec
        reason = _why_plain(plain, spec)
        if not reason:
            try:
                vectorised = mapped_inline(chunks, _vectorise(map_func, spec))
                _check_same(vectorised.element_spec, spec)
            except Exception as error:  # noqa: BLE001  it traced as written, so the fault is ours
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                return vectorised
        _log.info("A per-record map of feed runs record by record, not vectorised: %s", reason)
        return None


def _why_plain(plain: Any, spec: Any) -> str:
    leaves = tf.nest.flatten(spec)
    if not all(type(leaf) is tf.TensorSpec and leaf.shape.is_fully_defined() for leaf in leaves):
        return "records may differ in shape"
    found = not_vectorisable(operations_of_dataset(plain))
    return f"it uses {', '.join(found)}" if found else ""


def _vectorise(map_func: Any, spec: Any) -> Callable[..., Any]:
    def chunk(*elements: Any) -> Any:
        def one(element: Any) -> Any:
            return map_func(*element)

        result = tf.vectorized_map(one, elements, fallback_to_while_loop=False)
        return tf.nest.map_structure(lambda part, leaf: tf.ensure_shape(part, [None, *leaf.shape]), result, spec)

    return chunk


def _check_same(chunked: Any, spec: Any) -> None:
    tf.nest.assert_same_structure(chunked, spec)
    for part, leaf in zip(tf.nest.flatten(chunked), tf.nest.flatten(spec), strict=True):
        if part.dtype != leaf.dtype:
            raise TypeError(f"dtype {part.dtype.name} instead of {leaf.dtype.name}")


DISCARDING = "elasticdl-discard"  # name of the threads that end iterations

Head = npt.NDArray[np.int64]
Int = Any  # int64 scalar tensor


class Packing:
    """From contents of one spec to elements and back."""

    def __init__(self, content: Any) -> None:
        """
        Args:
            content: Spec of the content to pack.
        """
        self._content = content
        leaves = tf.nest.flatten(content)
        self.is_plain = all(type(leaf) is tf.TensorSpec and leaf.shape.rank for leaf in leaves)

    def pack(self, head: list[Int], content: Any) -> Any:
        """Return the element of a minibatch."""
        if self.is_plain:
            return tf.stack(head), *tf.nest.flatten(content)
        return tf.stack(head), tf.experimental.Optional.from_value(content)

    def end(self, head: list[Int]) -> Any:
        """Return the element for the end of a task."""
        if self.is_plain:
            return tf.stack(head), *(_nothing(leaf) for leaf in tf.nest.flatten(self._content))
        return tf.stack(head), tf.experimental.Optional.empty(self._content)

    @staticmethod
    def unpack(parts: Any) -> list[Any]:
        """Return the tensors of a minibatch's content, as a flat list."""
        if len(parts) == 1 and isinstance(parts[0], tf.experimental.Optional):
            return list(tf.nest.flatten(parts[0].get_value(), expand_composites=True))
        return list(parts)


class Elements:
    """One iteration over a dataset of packed elements, which can be let go without waiting."""

    def __init__(self, dataset: Any, is_plain: bool) -> None:
        self._iterator = iter(dataset)
        self._next = self._next_plain if is_plain else self._next_of_any
        leaves = tf.nest.flatten(dataset.element_spec) if is_plain else []
        self._types = [leaf.dtype for leaf in leaves]
        self._shapes = [leaf.shape for leaf in leaves]

    def next(self) -> tuple[Head, Any] | None:
        """Return the head of the next element and its parts for `Packing.unpack`; None: the end.

        Raises:
            tf.errors.OpError: User code raised in the pipeline.
        """
        element = self._next()
        return None if element is None else (element[0].numpy(), element[1:])

    def discard(self) -> None:
        """End the iteration in another thread, since this waits for tf.data's thread, which may wait for a task."""
        held = [self._iterator]
        self._iterator = iter(())
        threading.Thread(target=held.clear, name=DISCARDING, daemon=True).start()

    def _next_plain(self) -> Any:
        try:
            return tf.raw_ops.IteratorGetNext(
                iterator=self._iterator._iterator_resource, output_types=self._types, output_shapes=self._shapes
            )
        except tf.errors.OutOfRangeError:
            return None

    def _next_of_any(self) -> Any:
        return next(self._iterator, None)


def mapped_inline(dataset: Any, function: Callable[..., Any]) -> Any:
    """Return ``dataset.map(function)`` with operations that run in the requesting thread, if possible.

    Passing each operation to a thread pool, with threads that spin for work, costs more than most operations.
    """
    inline = _MapDataset(dataset, function, use_inter_op_parallelism=False)
    return _MapDataset(dataset, function) if has_control_flow(operations_of_dataset(inline)) else inline


def _nothing(leaf: Any) -> Any:
    return tf.zeros([0, *(dim or 0 for dim in leaf.shape.as_list()[1:])], leaf.dtype)
