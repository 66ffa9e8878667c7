"""Make batches from minibatches of the ledger, with PyTorch's own DataLoader and the script's number of processes.

The loader is asked for one minibatch after another while the script runs, so its processes are started only once,
before there are connections that they could keep open.  It never waits for work: if there is no request, it yields
None and continues.  A batch made ahead is identified by the name of its minibatch.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.sharedctypes import RawValue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from elasticdl.api.data import Minibatch, Name
from elasticdl.api.session import at_exit
from elasticdl.frameworks.torch.randomness import seed_script
from elasticdl.protocol import derive_seed
from elasticdl.rpc.signals import signal_pipe
from elasticdl.worker.termination import EXIT_CODE, LIMIT_S
from elasticdl_client.errors import DataError

Request = tuple[Minibatch, int] | None  # minibatch and seed
Made = tuple[Name, Any] | None

_OURS = ("sampler", "batch_sampler", "drop_last", "dataset")
_NUMPY_SEEDS = 2**32


class LoaderPipeline:
    """Makes the batches of requested minibatches.  Not thread-safe."""

    def __init__(self, source: Dataset[Any], collate: Callable[..., Any] | None, seed: int, **options: Any) -> None:
        """
        Args:
            source: The script's data; see `Fetcher`.
            collate: Makes a batch of samples; None: PyTorch's default.
            seed: Seed of the job; random augmentation depends only on it and on the minibatch's name.
            options: Arguments of the DataLoader, such as `num_workers`, `prefetch_factor`, `pin_memory`.
        """
        wrong = [name for name in _OURS if options.pop(name, None) not in (None, False)]
        if wrong:
            raise DataError(
                f"{' and '.join(wrong)} cannot be chosen for an elastic loader: the ledger decides which records come, "
                "each once an epoch.",
                "Leave it out; the last minibatch of an epoch may be smaller. Instead of a sampler, weight the loss, "
                "or give a data set that has rare samples more than once: torch.utils.data.Subset(dataset, indices).",
            )
        self._seed = seed
        self._wanted: deque[Request] = deque()
        self._made: dict[Name, Any] = {}
        self._awaited: set[Name] = set()  # requested, not made yet
        self._dropped: set[Name] = set()  # awaited, but no longer needed
        self._is_over = RawValue(ctypes.c_bool, False)
        options["worker_init_fn"] = _Begin(options.get("worker_init_fn"), self._is_over)
        self._loader: DataLoader[Any] = DataLoader(
            Fetcher(source, collate),
            batch_size=None,
            sampler=_WantedSamples(self._wanted),
            collate_fn=_as_it_is,
            **options,
        )
        self._batches: Iterator[Made] | None = None

    @property
    def num_ahead(self) -> int:
        """The number of minibatches that the loader's processes make or keep ready at a time."""
        return int(self._loader.num_workers * (self._loader.prefetch_factor or 0))

    def start(self) -> None:
        """Start the loader's processes."""
        if self._batches is None:
            at_exit(self.close)  # runs before the exit functions of `multiprocessing`, which send SIGTERM to children
            self._batches = iter(self._loader)

    def close(self) -> None:
        """Let SIGTERM end the loader's processes immediately from now on."""
        self._is_over.value = True

    def ask(self, minibatch: Minibatch) -> None:
        """Request the batch of a minibatch."""
        name = minibatch.name
        if name in self._awaited:
            self._dropped.discard(name)
        elif name not in self._made:
            self._awaited.add(name)
            self._wanted.append((minibatch, derive_seed(self._seed, *name)))

    def forget(self, name: Name) -> None:
        """Discard the batch of a minibatch, made or not."""
        if self._made.pop(name, None) is None and name in self._awaited:
            self._dropped.add(name)

    def get(self, minibatch: Minibatch) -> Any:
        """Return the batch of a minibatch, waiting until it is made; it is kept until `forget`.

        Raises:
            Exception: Any exception of the data set.
        """
        self.start()
        self.ask(minibatch)
        assert self._batches is not None
        while minibatch.name not in self._made:
            made = next(self._batches)
            if made is None:
                continue
            (epoch, task, n), batch = made  # may be a list: pin_memory of PyTorch 2.6 converts tuples
            name = (epoch, task, n)
            self._awaited.discard(name)
            if name in self._dropped:
                self._dropped.discard(name)
            else:
                self._made[name] = batch
        return self._made[minibatch.name]


class Fetcher(Dataset[Any]):  # type: ignore[misc]
    """Makes the batch of a minibatch; runs in the loader's processes.

    The source is one of these:
    - a map-style data set: record k is item k;
    - an `IterableDataset`: record k is the k-th sample.  If it has a method `read(start, end)`, this reads a range of
      samples; otherwise all samples before the range are read, too;
    - a function from the minibatch to the batch.
    """

    def __init__(self, source: Any, collate: Callable[..., Any] | None) -> None:
        self._source = source
        self._collate = collate or default_collate

    def __getitem__(self, request: Request) -> Made:
        if request is None:
            return None
        minibatch, seed = request
        _seed_all(seed)
        return minibatch.name, self._batch(minibatch)

    def _batch(self, minibatch: Minibatch) -> Any:
        source, indices = self._source, minibatch.indices
        if isinstance(source, IterableDataset):
            return self._collate(self._streamed(source, indices))
        if not hasattr(source, "__getitem__"):
            return source(minibatch)
        several = getattr(source, "__getitems__", None)
        return self._collate(several(indices) if several else [_sample(source, index) for index in indices])

    def _streamed(self, source: Any, indices: Sequence[int]) -> list[Any]:
        first, end = min(indices), max(indices) + 1
        reads: Callable[[int, int], Iterable[Any]] | None = getattr(source, "read", None)
        found = list(reads(first, end) if reads is not None else islice(iter(source), first, end))
        if len(found) != end - first:
            raise DataError(
                f"{type(source).__name__} gives {len(found)} samples for records {first} to {end - 1}.",
                "Each record must be one sample, in the same order each time, and every process must be given all "
                "of them: leave get_worker_info() out.",
            )
        return [found[index - first] for index in indices]


class _WantedSamples(Sampler[Request]):  # type: ignore[misc]
    """Yields the requested minibatches, endlessly; None if there is no request."""

    def __init__(self, wanted: deque[Request]) -> None:
        self._requests = wanted

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self._requests.popleft() if self._requests else None


class _Begin:
    """The `worker_init_fn`: a loader's process must survive a SIGTERM to the whole pod until the script has left.

    A separate thread handles the signal, because the main thread may be busy in the data set, or waiting for work.
    """

    def __init__(self, users: Callable[[int], None] | None, is_over: ctypes.c_bool) -> None:
        """
        Args:
            users: The script's own `worker_init_fn`.
            is_over: Shared with the script: it has left.
        """
        self._users = users
        self._is_over = is_over

    def __call__(self, number: int) -> None:
        signals = signal_pipe(signal.SIGTERM)
        threading.Thread(target=self._end_when_told, args=(signals,), name="termination", daemon=True).start()
        if self._users is not None:
            self._users(number)

    def _end_when_told(self, signals: int) -> None:
        end: float | None = None  # of the monotonic clock
        while select.select([signals], [], [], end and max(0.0, end - time.monotonic()))[0]:
            if signal.SIGTERM in os.read(signals, 64):
                if self._is_over.value:
                    os._exit(0)  # the DataLoader reports any other exit as an error
                end = end or time.monotonic() + LIMIT_S
        os._exit(EXIT_CODE)


def _as_it_is(made: Made) -> Made:
    return made


def _sample(source: Any, index: int) -> Any:
    try:
        return source[index]
    except Exception as error:
        error.add_note(f"in record {index} of {type(source).__name__}")
        raise


def joined(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate batches, with the result of `default_collate` for all their samples; or return a list of all samples.

    Args:
        batches: The batches, at least one.
        sizes: Number of samples in each batch.

    Raises:
        DataError: The batches cannot be concatenated.
    """
    first = batches[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(list(batches))
        if isinstance(first, dict):
            return {key: joined([batch[key] for batch in batches], sizes) for key in first}
        if isinstance(first, list | tuple):
            values = [(value, size) for batch, size in zip(batches, sizes, strict=True) for value in batch]
            are_samples = [*map(len, batches)] == list(sizes) and not all(_is_column(*one) for one in values)
            if are_samples or all(isinstance(value, str | bytes) for value in first):
                return type(first)(value for batch in batches for value in batch)
            columns = [joined(column, sizes) for column in zip(*batches, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        reason = f"a {type(first).__name__}"
    except (RuntimeError, KeyError, ValueError) as error:
        reason = str(error)
    raise DataError(
        f"A batch has several backward(), so a worker's minibatches of a step are one batch, and these cannot be put "
        f"together ({reason}).",
        "Let collate_fn make tensors of equal shapes, in lists, tuples and dictionaries; or leave fixed_global_batch "
        "out.",
    )


def _is_column(part: Any, size: int) -> bool:
    """Return whether a part of a batch, or each value in it, has a row or item for each of `size` samples."""
    if isinstance(part, Tensor):
        return part.dim() > 0 and len(part) == size
    if isinstance(part, dict):
        return all(_is_column(value, size) for value in part.values())
    is_list = isinstance(part, list | tuple)
    return is_list and (len(part) == size or (bool(part) and all(_is_column(value, size) for value in part)))


def cause_of(error: Exception) -> str:
    """Return an error of the script as one line, with its record; it may come from a loader's process."""
    lines = str(error).splitlines()
    if any(line.startswith("Original Traceback") for line in lines):  # sent as text by a loader's process
        ends = max(number for number, line in enumerate(lines) if line.startswith(" "))
        return ", ".join(lines[ends + 1 :])
    return ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _seed_all(seed: int) -> None:
    """Seed all random sources, so that augmentation is the same in every worker."""
    seed_script(seed)
    if get_worker_info() is not None:  # in a loader's process, where no other code uses these generators
        random.seed(seed)
        np.random.seed(seed % _NUMPY_SEEDS)
