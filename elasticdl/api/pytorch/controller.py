"""The elastic controller: what a script sees of the world it trains in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from elasticdl.api.pytorch.evaluation import ScriptEvaluation
from elasticdl.api.pytorch.steps import ScriptSteps
from elasticdl_client.errors import JobError

Function = TypeVar("Function", bound=Callable[..., Any])


class ElasticController(ScriptSteps):
    """Turns a script's own loop into the steps of a world that changes; made by `create_elastic_controller`.

    Attributes:
        rank: of this process in its world; the member with rank 0 writes checkpoints.
        size: members of the world.
        is_rehearsal: the present batch only makes this process ready (compilation, memory) before it joins; whatever
            the script does on it to what is registered is undone.
    """

    # Before training ------------------------------------------------------------------------------------------------

    def register(self, *things: Any, **named: Any) -> None:
        """Register objects that are equal in all members and are restored from checkpoints; same order everywhere.

        Models, optimizers, schedulers, scalers, objects of the script's own with `state_dict` and `load_state_dict`.
        """
        if self._loop is not None:
            raise JobError("register() comes too late: training has begun", "call it before the first batch")
        for thing in things:
            self.state.add(thing)
        for name, thing in named.items():
            self.state.add(thing, name)

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

        Args:
            dataset: a map-style data set, or an `IterableDataset` of a known size, see `Fetcher`; a `DataLoader`, whose
                data set and options are taken; or a function that makes the batch of a `Minibatch`, for files that
                ElasticDL reads.
            options: of `DataLoader`, such as `num_workers`.
        """
        if isinstance(dataset, torch.utils.data.DataLoader):
            dataset, collate_fn, options = taken_over(dataset, collate_fn, options)
        if self._loop is not None:
            raise JobError("a controller has one loader", "iterate over the same one in every epoch")
        self._loop = self._wire(self, dataset, {"collate": collate_fn, **options})
        return ElasticLoader(self, dataset)

    def on_evaluation(
        self, dataset_size: int, steps: int = 0
    ) -> Callable[[Callable[[range], Mapping[str, float]]], Callable[[range], Mapping[str, float]]]:
        """Decorates a function from numbers of validation records to means over them; see `ScriptEvaluation`.

        Args:
            steps: minibatches between two evaluations; 0: after every epoch.
        """

        def take(function: Callable[[range], Mapping[str, float]]) -> Callable[[range], Mapping[str, float]]:
            self.evaluations.append(ScriptEvaluation(function, dataset_size, steps))
            return function

        return take

    # In the loop ----------------------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Numbers of the epochs that are left, in the place of `range(num_epochs)`."""
        self._spans_epochs = False
        self._settle()
        while self._prepare():
            yield self.get_current_epoch()
            self._settle()

    def step(self) -> AbstractContextManager[None]:
        """The script's code on one batch: forward, one backward, the update of the model."""
        return _Step(self)

    def elastic_run(self, function: Function) -> Function:
        """Decorates the function that trains on one batch: as if its calls stood in `with controller.step()`.

        It returns None where the step is dropped; its batch comes again.
        """

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with self.step():
                return function(*arguments, **keywords)
            return None

        return cast(Function, run)

    def no_sync(self) -> AbstractContextManager[None]:
        """For a `backward()` that is not the last one of its batch."""
        return self._parts.gradients.no_sync()

    def log_loss(self, loss: Any) -> None:
        """Lets the master know (and the log show) the loss of this batch; a number or a tensor of one."""
        self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    @property
    def global_completed_batch_num(self) -> int:
        """Minibatches in the model."""
        return self._num_names

    @property
    def num_steps(self) -> int:
        """Updates of the model."""
        return self._parts.world.ledger.steps

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Training stands inside: at its end, also by an exception, this process leaves its world.

        As in the original one loop over the loader goes over all epochs here, unless it stands in `epochs()`.
        """
        self._spans_epochs = True
        try:
            yield
        finally:
            self._spans_epochs = False
            self.close()

    def stop_training(self, reason: str) -> None:
        """End training early, on purpose, in all workers: what is begun is trained, and the loops end.

        Without it a job whose scripts end before the end of the data has failed.
        """
        self._parts.data.stop_training(reason)

    def save_checkpoint(self) -> None:
        """Writes one now, between two batches; of rank 0, without effect in the others."""
        if self.rank == 0 and self._is_inside:
            self._parts.writer.save_last(self._parts.world.ledger)


class _Step(AbstractContextManager[None]):
    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller

    def __enter__(self) -> None:
        self._controller.begin_batch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._controller.end_batch(error)


class ElasticLoader:
    """Iterated like a DataLoader: each time over the batches of one epoch, or of what is left of it.

    Attributes:
        dataset: what `controller.loader` was given, or that of the DataLoader.
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
    """Return data set, `collate_fn` and options of a DataLoader that hold for an elastic one."""
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    own = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        own["prefetch_factor"] = loader.prefetch_factor
    return loader.dataset, collate_fn or loader.collate_fn, {**own, **options}
