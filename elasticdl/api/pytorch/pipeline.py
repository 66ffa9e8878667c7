"""From minibatches of the ledger to batches, by PyTorch's own DataLoader, with as many processes as the script wants.

The loader is asked for one minibatch after the other for as long as the script runs, so its processes are started
once, before any connection is open that they could hold on to.  It never waits for work: where nothing was asked for it
makes an empty place, and continues.  A batch that is made ahead is known by the name of its minibatch.
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

Request = tuple[Minibatch, int] | None  # and the seed
Made = tuple[Name, Any] | None

_OURS = ("sampler", "batch_sampler", "drop_last", "dataset")
_NUMPY_SEEDS = 2**32


class LoaderPipeline:
    """See above.  Called by one thread."""

    def __init__(self, source: Dataset[Any], collate: Callable[..., Any] | None, seed: int, **options: Any) -> None:
        """
        Args:
            source: the script's data; see `Fetcher`.
            seed: the job's; random augmentation depends on it and the minibatch's name alone.
            options: of the DataLoader, such as `num_workers`, `prefetch_factor`, `pin_memory`.
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
        self._awaited: set[Name] = set()  # asked for and not made yet
        self._dropped: set[Name] = set()  # of them, those that are not wanted any more
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
        """Minibatches that the loader's processes make at once or keep ready."""
        return int(self._loader.num_workers * (self._loader.prefetch_factor or 0))

    def start(self) -> None:
        """Starts the loader's processes."""
        if self._batches is None:
            at_exit(self.close)  # before those of `multiprocessing`, which ends its children by SIGTERM
            self._batches = iter(self._loader)

    def close(self) -> None:
        """From now on SIGTERM ends the loader's processes at once."""
        self._is_over.value = True

    def ask(self, minibatch: Minibatch) -> None:
        """It will be wanted."""
        name = minibatch.name
        if name in self._awaited:
            self._dropped.discard(name)
        elif name not in self._made:
            self._awaited.add(name)
            self._wanted.append((minibatch, derive_seed(self._seed, *name)))

    def forget(self, name: Name) -> None:
        """It is not wanted any more."""
        if self._made.pop(name, None) is None and name in self._awaited:
            self._dropped.add(name)

    def get(self, minibatch: Minibatch) -> Any:
        """Its batch, waiting for it; may be had again until `forget`.

        Raises:
            Exception: any exception of the data set.
        """
        self.start()
        self.ask(minibatch)
        assert self._batches is not None
        while minibatch.name not in self._made:
            made = next(self._batches)
            if made is None:
                continue
            (epoch, task, n), batch = made  # lists, where pin_memory of PyTorch 2.6 made them
            name = (epoch, task, n)
            self._awaited.discard(name)
            if name in self._dropped:
                self._dropped.discard(name)
            else:
                self._made[name] = batch
        return self._made[minibatch.name]


class Fetcher(Dataset[Any]):  # type: ignore[misc]
    """Makes the batch of a minibatch; runs in the loader's processes.

    The source is a map-style data set (a record is its number), or an `IterableDataset` whose k-th sample is record k,
    which is read from a place on if it has `read(start, end)` and gone through up to there otherwise; or a function of
    the minibatch that returns the batch.
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
    """The requested minibatches, without end; None where there is none."""

    def __init__(self, wanted: deque[Request]) -> None:
        self._requests = wanted

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self._requests.popleft() if self._requests else None


class _Begin:
    """Of a loader's process: SIGTERM may reach the whole pod, and it must not end before the script has left.

    A thread of its own heeds it: the main thread may be in the data set for long, or just begin to wait for work.
    """

    def __init__(self, users: Callable[[int], None] | None, is_over: ctypes.c_bool) -> None:
        """
        Args:
            is_over: shared with the script: whether it has left.
        """
        self._users = users
        self._is_over = is_over

    def __call__(self, number: int) -> None:
        signals = signal_pipe(signal.SIGTERM)
        threading.Thread(target=self._end_when_told, args=(signals,), name="termination", daemon=True).start()
        if self._users is not None:
            self._users(number)

    def _end_when_told(self, signals: int) -> None:
        end: float | None = None  # by the monotonic clock
        while select.select([signals], [], [], end and max(0.0, end - time.monotonic()))[0]:
            if signal.SIGTERM in os.read(signals, 64):
                if self._is_over.value:
                    os._exit(0)  # anything else is an error to the DataLoader
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
    """Return one batch of several, as `default_collate` makes it of all their samples; or a list of all samples.

    Args:
        sizes: samples of each.

    Raises:
        DataError: they cannot be put together.
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
    """Whether a part of a batch, or each value in it, has a row or an item for each of this many samples."""
    if isinstance(part, Tensor):
        return part.dim() > 0 and len(part) == size
    if isinstance(part, dict):
        return all(_is_column(value, size) for value in part.values())
    is_list = isinstance(part, list | tuple)
    return is_list and (len(part) == size or (bool(part) and all(_is_column(value, size) for value in part)))


def cause_of(error: Exception) -> str:
    """An error of the script in one line, with its record, whichever process it comes from."""
    lines = str(error).splitlines()
    if any(line.startswith("Original Traceback") for line in lines):  # a loader's process has sent it as text
        ends = max(number for number, line in enumerate(lines) if line.startswith(" "))
        return ", ".join(lines[ends + 1 :])
    return ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _seed_all(seed: int) -> None:
    """Seed all random sources, so that augmentation is the same in every worker."""
    seed_script(seed)
    if get_worker_info() is not None:  # a process of its own: no other code draws from these
        random.seed(seed)
        np.random.seed(seed % _NUMPY_SEEDS)
