"""The elastic controller: a script's view of the group it trains in."""

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
    """Turns a script's own loop into the steps of a group that changes; made by `create_elastic_controller`.

    Attributes:
        rank: of this process in its group; the member with rank 0 writes checkpoints.
        size: members of the group.
        is_rehearsal: the present batch only makes this process ready (compilation, memory) before it joins; the
            script's changes to registered state on it are undone.
    """

    _loader: ElasticLoader | None = None

    # Before training ------------------------------------------------------------------------------------------------

    def register(self, *things: Any, **named: Any) -> None:
        """Register objects that are equal in all members and are restored from checkpoints; same order everywhere.

        Models, optimizers, schedulers, scalers, objects of the script's own with `state_dict` and `load_state_dict`.

        Raises:
            JobError: a model comes after `loader`, or anything else after the first batch.
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
        """As in the original: registers it."""
        self.register(model)

    def set_broadcast_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """As in the original: registers it."""
        self.register(optimizer)

    def loader(
        self, dataset: Any = None, collate_fn: Callable[..., Any] | None = None, **options: Any
    ) -> ElasticLoader:
        """Return the substitute for a DataLoader: each iteration is one epoch, or the rest of it.

        Called again with the same data, as in a loop over epochs, it returns the same loader.

        Args:
            dataset: a map-style data set, or an `IterableDataset` of a known size, see `Fetcher`; a `DataLoader`, whose
                data set and options are taken; or a function that makes the batch of a `Minibatch`, for files that
                ElasticDL reads.
            options: of `DataLoader`, such as `num_workers`; `batch_size` and `shuffle` where
                `create_elastic_controller` was not given them.

        Raises:
            ElasticDLError: the data set cannot be counted, it is another one than before, or an option contradicts the
                job's flags.
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
        """Decorate a function that evaluates the model on some validation records: their numbers → means by name.

        It is called without gradients, the modules in evaluation mode; the log shows the means over all records.

        Args:
            dataset_size: number of validation records; each worker evaluates a part of them.
            steps: minibatches between two evaluations; 0: after every epoch.
        """

        def take(function: Callable[[range], Mapping[str, float]]) -> Callable[[range], Mapping[str, float]]:
            self.evaluations.append(ScriptEvaluation(function, dataset_size, steps))
            return function

        return take

    # In the loop ----------------------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Numbers of the epochs that are left, in the place of `range(num_epochs)`.

        Where the loader is made in the loop's body, the first number is 0 in every worker.
        """
        self._spans_epochs = False
        if self._loop is None:
            yield 0
        self._settle()
        while self._prepare():
            yield self._epoch_to_join() if self.is_rehearsal else self.get_current_epoch()
            self._settle()

    def _epoch_to_join(self) -> int:
        """Return the epoch of the model with which this process will begin after its rehearsal."""
        data, epoch = self._parts.data, self._sampled_epoch
        if epoch < 0:
            epoch = self._parts.model.num_saved() // data.get_minibatch_count_per_epoch()
        num_epochs = data.plan.num_epochs
        return min(epoch, num_epochs - 1) if num_epochs else epoch  # all may be trained

    def step(self, num_items: Any = None) -> AbstractContextManager[None]:
        """Return the context of the script's code on one batch: forward, backward, the update of the model.

        Args:
            num_items: the divisor of the batch's loss where that is not its records, such as its tokens without
                padding; a number or a tensor of one element.  The step's gradient is then the mean over all workers'
                items.  None: the batch's records.
        """
        return _StepContext(self, num_items)

    def elastic_run(self, function: Function) -> Function:
        """Decorate the function that trains on one batch: as if its calls stood in `with controller.step()`.

        It returns None where the step is dropped; its batch comes again.
        """

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self.step():
                return function(*arguments, **keywords)
            return None

        return cast(Function, run)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of a `backward()` that is not the last one of its batch."""
        return self._parts.gradients.no_sync()

    def log_loss(self, loss: Any) -> None:
        """Report the loss of this batch, a number or a tensor of one element, to the master and the log."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of a forward pass into `mean_loss`; called before its `backward()`."""
        self._parts.gradients.add_loss(loss)

    @property
    def mean_loss(self) -> torch.Tensor:
        """Return the loss of the step, a mean over all workers' records or items, once `backward()` is done."""
        return cast(torch.Tensor, self._parts.gradients.mean_loss)

    @property
    def num_minibatches_in_step(self) -> int:
        """Return the minibatches of all workers in the step that is being made; 0 between two steps."""
        return len(self._plan.all_parts) if self._plan is not None else 0

    @property
    def num_steps_left(self) -> int | None:
        """Return the updates after the present one, if the group stays as it is; None: training is endless."""
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
        """Return the minibatches of all workers together."""
        return self._parts.data.get_minibatch_count_per_epoch()

    @property
    def has_fixed_global_batch(self) -> bool:
        """Return whether every step has the same number of records."""
        return bool(self._parts.shares.num_per_step)

    @property
    def epochs_trained(self) -> float:
        """Return the epochs in the model, with the part of the present one."""
        return self._num_names / max(1, self._parts.data.get_minibatch_count_per_epoch())

    @property
    def is_over(self) -> bool:
        """Return whether there is no more to train for this worker."""
        return self._is_over

    @property
    def global_completed_batch_num(self) -> int:
        """Return the minibatches in the model."""
        return self._num_names

    @property
    def num_steps(self) -> int:
        """Return the updates of the model."""
        return self._parts.group.ledger.steps

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Training stands inside: at its end, also by an exception, this process leaves its group.

        As in the original one loop over the loader goes over all epochs here, unless it stands in `epochs()`.
        """
        self._spans_epochs = True
        try:
            yield
        finally:
            self._spans_epochs = False
            self.close()

    def stop_training(self, reason: str) -> None:
        """End training early, on purpose, in all workers: started tasks are trained, and the loops end.

        Without it a job whose scripts end before the end of the data has failed.
        """
        self._parts.data.stop_training(reason)

    def end_early(self, reason: str) -> None:
        """Leave the group for good; stop training in all workers where data are left."""
        if self.num_steps_left != 0 and not self.is_over:
            self.stop_training(reason)
        self.close()

    def save_checkpoint(self) -> None:
        """Write a checkpoint now, between two batches: the worker with rank 0 does, in the others nothing happens."""
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
    """Iterated like a DataLoader: each time over the batches of one epoch, or of what is left of it.

    Attributes:
        dataset: the argument of `controller.loader`, or that of the DataLoader.
    """

    def __init__(self, controller: ElasticController, dataset: Any) -> None:
        self._controller = controller
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the batches of the present loop in this process, or the most that the next one may give.

        Within a loop: those that it has given, and this process's part of what is left; so a progress of
        `batch_index / len(loader)` ends at 1, also when workers join or are lost.  Before a loop: the whole epoch, and
        in a job the batch of the rehearsal, so that a loop bounded by it does not end early.
        """
        return self._controller.num_batches

    def __iter__(self) -> Iterator[Any]:
        return self._controller.batches()


def taken_over(
    loader: torch.utils.data.DataLoader[Any], collate_fn: Callable[..., Any] | None, options: dict[str, Any]
) -> tuple[Any, Callable[..., Any] | None, dict[str, Any]]:
    """Return data set, `collate_fn` and options of a DataLoader that hold for an elastic one.

    Raises:
        DataError: its data set makes the batches.
    """
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "A DataLoader with batch_size=None has a data set of batches, and the ledger counts samples.",
            "Give a data set of single samples: the loader makes batches of them, by collate_fn.",
        )
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    batches = loader.batch_sampler
    is_plain = loader.batch_size is not None or type(batches) is not BatchSampler
    source: Any = loader if is_plain else batches  # Accelerate gives a loader that it prepares the batch sampler alone
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
    """Whether a sampler takes each record of a data set once: it may be made for a part of it, or for another one."""
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
    """Whether a sampler that takes each record once does so in a random order."""
    return bool(sampler.shuffle) if isinstance(sampler, DistributedSampler) else isinstance(sampler, RandomSampler)
