"""The elastic controller: a script's view of its group of workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from elasticdl.api.pytorch.evaluation import ScriptEvaluation
from elasticdl.api.pytorch.registration import is_same_data
from elasticdl.api.pytorch.steps import ScriptSteps
from elasticdl_client.errors import DataError, JobError

Function = TypeVar("Function", bound=Callable[..., Any])


class ElasticController(ScriptSteps):
    """Turns a script's own loop into steps of an elastic group; made by `create_elastic_controller`.

    Attributes:
        rank: Rank of this process in its group; the member with rank 0 writes checkpoints.
        size: Number of members of the group.
        is_rehearsal: The current batch only prepares this process (compilation, memory) before it joins the group; its
            changes to registered objects are reverted.
    """

    _loader: ElasticLoader | None = None

    # Before training ------------------------------------------------------------------------------------------------

    def register(self, *things: Any, **named: Any) -> None:
        """Register objects that must be equal in all members, and are saved in checkpoints.

        These are models, optimizers, schedulers, scalers, and objects of your own with `state_dict` and
        `load_state_dict`.  Register them in the same order in every worker.

        Args:
            things: Objects; each is named after its type.
            named: Objects by name.

        Raises:
            JobError: A model is registered after `loader`, or another object after the first batch.
        """
        if self._has_rehearsed:
            raise JobError("register() comes too late: training has begun", "call it before the first batch")
        named_things = [(thing, "") for thing in things] + [(thing, name) for name, thing in named.items()]
        if self._loop is not None and any(isinstance(thing, torch.nn.Module) for thing, _ in named_things):
            raise JobError("register() of a model comes too late", "call it before loader()")
        for thing, name in named_things:
            self.state.add(thing, name)
        if self._loop is not None:
            self._loop.model.begin()

    def set_broadcast_model(self, model: torch.nn.Module) -> None:
        """Register a model, as in the original ElasticDL."""
        self.register(model)

    def set_broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer, as in the original ElasticDL."""
        self.register(optimizer)

    def loader(
        self, dataset: Any = None, collate_fn: Callable[..., Any] | None = None, **options: Any
    ) -> ElasticLoader:
        """Return the replacement of a DataLoader: each iteration yields one epoch, or the rest of it.

        Another call with the same data, for example in a loop over epochs, returns the same loader.

        Args:
            dataset: A map-style data set, or an `IterableDataset` of known size (see `Fetcher`); or a `DataLoader`, to
                use its data set and options; or a function from a `Minibatch` to a batch, for files that ElasticDL
                reads.
            collate_fn: Makes a batch of samples, as in `DataLoader`; None: PyTorch's default.
            options: Other arguments of `DataLoader`, such as `num_workers`; also `batch_size` and `shuffle`, if
                `create_elastic_controller` did not get them.

        Raises:
            ElasticDLError: The size of the data set is unknown, the data set differs from the one before, or an option
                contradicts the job's flags.
        """
        if isinstance(dataset, torch.utils.data.DataLoader):
            dataset, collate_fn, options = taken_over(dataset, collate_fn, options)
        if self._loader is None:
            self._loop = self._wire(self, dataset, {"collate": collate_fn, **options})
            self._loader = ElasticLoader(self, dataset)
        elif not is_same_data(dataset, self._loader.dataset):
            raise JobError(
                "a controller trains on one data set, and loader() was given another data set",
                "make it once, before the loop over epochs; validation data need no elastic loader but a DataLoader",
            )
        return self._loader

    def on_evaluation(
        self, dataset_size: int, steps: int = 0
    ) -> Callable[[Callable[[range], Mapping[str, float]]], Callable[[range], Mapping[str, float]]]:
        """Return a decorator for a function that evaluates the model on some validation records.

        The function gets the numbers of the records, as a range, and returns means over them, by name.  It is called
        without gradients and with the modules in evaluation mode; the log shows the means over all records.

        Args:
            dataset_size: Number of validation records; each worker evaluates a part of them.
            steps: Minibatches between two evaluations; 0: after every epoch.
        """

        def take(function: Callable[[range], Mapping[str, float]]) -> Callable[[range], Mapping[str, float]]:
            self.evaluations.append(ScriptEvaluation(function, dataset_size, steps))
            return function

        return take

    # In the loop ----------------------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the remaining epochs; use it instead of `range(num_epochs)`.

        If the loader is made inside this loop, the first number is 0 in every worker.
        """
        self._spans_epochs = False
        if self._loop is None:
            yield 0
        self._settle()
        while self._prepare():
            yield self._epoch_to_join() if self.is_rehearsal else self.get_current_epoch()
            self._settle()

    def _epoch_to_join(self) -> int:
        """Return the epoch in which this process will begin after its rehearsal."""
        data, epoch = self._parts.data, self._sampled_epoch
        if epoch < 0:
            epoch = self._parts.model.num_saved() // data.get_minibatch_count_per_epoch()
        num_epochs = data.plan.num_epochs
        return min(epoch, num_epochs - 1) if num_epochs else epoch  # the last epoch may be complete

    def step(self, num_items: Any = None) -> AbstractContextManager[None]:
        """Return the context for the script's code on one batch: forward, backward, the update of the model.

        If the step is dropped, because a worker was lost, its batch comes again in a later iteration.

        Args:
            num_items: The divisor of the batch's loss, if it is not the number of records: for example the number of
                tokens without padding; a number, or a tensor with one element.  The step's gradient is then the mean
                over the items of all workers.  None: the number of records.
        """
        return _StepContext(self, num_items)

    def elastic_run(self, function: Function) -> Function:
        """Decorate the function that trains on one batch: each call runs inside `with controller.step()`.

        The call returns None if the step is dropped; the batch then comes again.
        """

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self.step():
                return function(*arguments, **keywords)
            return None

        return cast(Function, run)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context for a `backward()` that is not the last one of its batch."""
        return self._parts.gradients.no_sync()

    def log_loss(self, loss: Any) -> None:
        """Report the loss of this batch, a number or a tensor with one element, to the master and the log."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a forward pass to `mean_loss`; call it before its `backward()`."""
        self._parts.gradients.add_loss(loss)

    @property
    def mean_loss(self) -> torch.Tensor:
        """The mean loss of the step over the records or items of all workers, available after `backward()`."""
        return cast(torch.Tensor, self._parts.gradients.mean_loss)

    @property
    def num_minibatches_in_step(self) -> int:
        """The number of minibatches of all workers in the current step; 0 between two steps."""
        return len(self._plan.all_parts) if self._plan is not None else 0

    @property
    def num_steps_left(self) -> int | None:
        """The number of updates after the current one, if the group does not change; None: training is endless."""
        data, shares = self._parts.data, self._parts.shares
        per_epoch = data.get_minibatch_count_per_epoch()
        total = per_epoch * data.plan.num_epochs
        if not total:
            return None
        done = self._num_names + self.num_minibatches_in_step
        if not shares.num_per_step:
            return -(-max(0, total - done) // self.size)
        of_epoch = -(-(per_epoch - done % per_epoch) // shares.num_per_step) if done % per_epoch else 0
        return of_epoch + (total - done) // per_epoch * -(-per_epoch // shares.num_per_step)

    @property
    def num_minibatches_per_epoch(self) -> int:
        """The number of minibatches in an epoch, over all workers."""
        return self._parts.data.get_minibatch_count_per_epoch()

    @property
    def has_fixed_global_batch(self) -> bool:
        """Whether every step has the same number of records."""
        return bool(self._parts.shares.num_per_step)

    @property
    def epochs_trained(self) -> float:
        """The number of epochs trained, including the fraction of the current one."""
        return self._num_names / max(1, self._parts.data.get_minibatch_count_per_epoch())

    @property
    def is_over(self) -> bool:
        """Whether there are no more data to train for this worker."""
        return self._is_over

    @property
    def global_completed_batch_num(self) -> int:
        """The number of minibatches in the model."""
        return self._num_names

    @property
    def num_steps(self) -> int:
        """The number of updates of the model."""
        return self._parts.group.ledger.steps

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Return the context for the training loop: at its end, also by an exception, this process leaves its group.

        As in the original ElasticDL, one loop over the loader inside it yields all epochs, unless it is inside a loop
        over `epochs()`.
        """
        self._spans_epochs = True
        try:
            yield
        finally:
            self._spans_epochs = False
            self.close()

    def stop_training(self, reason: str) -> None:
        """End training early, on purpose, in all workers: tasks in progress are completed, and the loops end.

        If scripts end before the end of the data without this call, the job has failed.

        Args:
            reason: For the log.
        """
        self._parts.data.stop_training(reason)

    def end_early(self, reason: str) -> None:
        """Leave the group; if data are left, stop training in all workers."""
        if self.num_steps_left != 0 and not self.is_over:
            self.stop_training(reason)
        self.close()

    def save_checkpoint(self) -> None:
        """Write a checkpoint now, if this worker has rank 0, otherwise do nothing; call it between two batches."""
        if self.rank == 0 and self._is_inside:
            self._parts.writer.save_last(self._parts.group.ledger)


class _StepContext(AbstractContextManager[None]):
    def __init__(self, controller: ElasticController, num_items: Any) -> None:
        self._controller, self._num_items = controller, num_items

    def __enter__(self) -> None:
        self._controller.begin_batch(self._num_items)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._controller.end_batch(error)


class ElasticLoader:
    """Used like a DataLoader: each iteration yields the batches of one epoch, or of the rest of it.

    Attributes:
        dataset: The data set passed to `controller.loader`, or that of the passed DataLoader.
    """

    def __init__(self, controller: ElasticController, dataset: Any) -> None:
        self._controller = controller
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of batches of the current loop in this process, or the maximum for the next loop.

        Within a loop: the batches yielded so far plus this process's share of the rest, so that the progress
        `batch_index / len(loader)` ends at 1 even when workers join or are lost.  Before a loop: the whole epoch, plus
        the batch of the rehearsal in a job, so that a loop bounded by this number does not end early.
        """
        return self._controller.num_batches

    def __iter__(self) -> Iterator[Any]:
        return self._controller.batches()


def taken_over(
    loader: torch.utils.data.DataLoader[Any], collate_fn: Callable[..., Any] | None, options: dict[str, Any]
) -> tuple[Any, Callable[..., Any] | None, dict[str, Any]]:
    """Return the data set, `collate_fn` and options of a DataLoader for the elastic loader.

    Raises:
        DataError: The data set of the DataLoader yields batches, not samples.
    """
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "A DataLoader with batch_size=None has a data set of batches, and the ledger counts samples.",
            "Give a data set of single samples: the loader makes batches of them, by collate_fn.",
        )
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    batches = loader.batch_sampler
    is_plain = loader.batch_size is not None or type(batches) is not BatchSampler
    source: Any = loader if is_plain else batches  # Accelerate sets only the batch sampler of a prepared loader
    own = {name: getattr(loader, name) for name in names}
    own |= {name: getattr(source, name) for name in ("batch_size", "drop_last")}
    takes_all = _takes_all(source.sampler, loader.dataset)
    if takes_all and _permutes(source.sampler):
        own["shuffle"] = True
    elif not isinstance(loader.dataset, IterableDataset):
        if not takes_all:
            own["sampler"] = source.sampler
        if own["batch_size"] is None:
            own["batch_sampler"] = batches
    if loader.num_workers:
        own["prefetch_factor"] = loader.prefetch_factor
    return loader.dataset, collate_fn or loader.collate_fn, {**own, **options}


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler takes each record of the data set once; it may be made for a part or another one."""
    match sampler:
        case DistributedSampler():
            taken_from = sampler.dataset
        case SequentialSampler():
            taken_from = sampler.data_source
        case RandomSampler(replacement=False, data_source=taken_from) if sampler.num_samples == len(taken_from):
            pass
        case _:
            return False
    return taken_from is dataset or len(taken_from) == len(dataset)


def _permutes(sampler: Any) -> bool:
    """Return whether a sampler that takes each record once uses a random order."""
    return bool(sampler.shuffle) if isinstance(sampler, DistributedSampler) else isinstance(sampler, RandomSampler)
