"""Hugging Face's `Accelerator`, made elastic for the workers of a job; outside of a job it is the plain one.

    from elasticdl.api.accelerate import ElasticAccelerator as Accelerator

The first DataLoader passed to `prepare` becomes the elastic loader, and `with accelerator.accumulate(model):` is the
step.  A batch without an effect (the sample on which a new worker gets ready, a step lost together with a worker) ends
that block with `sync_gradients` false, like a part of an accumulated update.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from elasticdl.api.pytorch import ElasticController, create_elastic_controller, join_job
from elasticdl.api.pytorch.trainers import (
    CollateParts,
    check_epochs,
    check_minibatch_size,
    saving,
    say_plain,
)
from elasticdl_client.errors import JobError

_log = logging.getLogger("elasticdl.api")
_CHECKPOINTS = "a job continues by itself from the newest checkpoint in its --checkpoint_dir"


class ElasticAccelerator(Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` for the workers of a job; docs/pytorch_trainers.md lists the differences."""

    def __init__(self, *arguments: Any, num_epochs: int | None = None, **keywords: Any) -> None:
        """
        Args:
            num_epochs: Number of loops of the script over its training data; None: the job's --num_epochs.

        Raises:
            JobError: An argument is impossible in a job, or contradicts the job's flags.
        """
        session = join_job()
        self._training: AcceleratorTraining | None = None
        super().__init__(*arguments, **keywords)
        if session.link is None:
            say_plain("ElasticAccelerator", "accelerate.Accelerator")
            return
        if self.distributed_type != DistributedType.NO:
            raise JobError(
                f"{self.distributed_type} is impossible with ElasticAccelerator in a job",
                "start the script without DeepSpeed, FSDP and the like: each worker holds the whole model",
            )
        if num_epochs is not None:
            check_epochs(session.spec, num_epochs, "ElasticAccelerator(num_epochs=…)")
        self._training = AcceleratorTraining(self, session, num_epochs)

    # Before training ------------------------------------------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return the elastic loader for the first DataLoader; others give all of their data to each worker."""
        if self._training is None or self._training.has_loader:
            return super().prepare_data_loader(data_loader, *arguments, **keywords)
        return self._training.take(data_loader)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register objects that must be equal in all workers."""
        super().register_for_checkpointing(*objects)
        if self._training is not None:
            self._training.registered += objects

    # A step ---------------------------------------------------------------------------------------------------------

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """Return the block around forward, backward and update."""
        if self._training is None:
            return super().accumulate(*models)  # type: ignore[no-any-return]
        return _Block(self._training)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Compute gradients; in the last part of an update they are summed over all workers."""
        training = self._training
        if training is None:
            super().backward(loss, **keywords)
            return
        part = training.part
        if part is None or not training.is_inside:
            raise JobError(
                "backward() stands outside of `with accelerator.accumulate(model):`",
                "put forward, backward and the optimizer's step into that block; one backward for each batch",
            )
        with ExitStack() as stack:
            if not part.is_last:
                stack.enter_context(training.controller.no_sync())
            training.controller.add_loss(loss * part.weight)
            super().backward(loss * (part.weight * self.gradient_accumulation_steps), **keywords)

    @property
    def mean_loss(self) -> torch.Tensor:
        """The loss of the step over all workers, available after its last `backward`; only in a job."""
        if self._training is None:
            raise JobError("mean_loss is that of a job's workers, and there is no job", "use the loss of the batch")
        return self._training.controller.mean_loss

    def gather(self, tensor: Any) -> Any:
        """Return this worker's tensor: an evaluation is complete in each worker.

        Raises:
            JobError: In training: other workers have other batches.
        """
        self._check_evaluates("gather()")
        return super().gather(tensor)

    def reduce(self, tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return this worker's tensor, like `gather`."""
        self._check_evaluates("reduce()")
        return super().reduce(tensor, *arguments, **keywords)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` of all workers return True."""
        if self._training is None:
            super().set_trigger()
        else:
            self._training.open().set_trigger()

    def check_trigger(self) -> bool:
        """Return whether any worker has set the trigger; all workers get True after the same update."""
        if self._training is None:
            return bool(super().check_trigger())
        return self._training.open().check_trigger()

    def end_training(self) -> None:
        """End training and trackers; if the script left its loop before the end of the data, stop the job.

        An exception that ends the script concerns only this worker: a new worker replaces it.
        """
        if self._training is not None:
            if sys.exc_info()[0] is None:
                self._training.end()
            else:
                self._training.warn_of_error()
        super().end_training()

    def _check_evaluates(self, what: str) -> None:
        if self._training is not None and torch.is_grad_enabled():
            raise JobError(
                f"{what} in training would return this worker's part only: workers come and go between two batches",
                "log accelerator.mean_loss; evaluate in `with torch.no_grad():`, where each worker has all of the data",
            )

    # Rank 0 of the moment -------------------------------------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        """Whether this worker currently has rank 0."""
        return bool(super().is_main_process) if self._training is None else self._training.session.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this worker currently has rank 0."""
        return bool(super().is_local_main_process) if self._training is None else self.is_main_process

    def print(self, *arguments: Any, **keywords: Any) -> None:
        """Print in the worker with rank 0."""
        if self.is_main_process:
            super().print(*arguments, **keywords)

    def log(self, *arguments: Any, **keywords: Any) -> None:
        """Log to the trackers in the worker with rank 0."""
        if self.is_main_process:
            super().log(*arguments, **keywords)

    def save(self, *arguments: Any, **keywords: Any) -> None:
        """Save an object in the worker with rank 0."""
        self._save(super().save, *arguments, **keywords)

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        """Save a model in the worker with rank 0."""
        self._save(super().save_model, *arguments, **keywords)

    def save_state(self, *arguments: Any, **keywords: Any) -> Any:
        """Save all prepared objects in the worker with rank 0, for use after the job."""
        return self._save(super().save_state, *arguments, **keywords)

    def _save(self, save: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Save in the worker with rank 0; outside of a job Accelerate decides which process saves."""
        if self._training is None:
            return save(*arguments, **keywords)
        if not self.is_main_process:
            return None
        with saving(self._training.session):
            return save(*arguments, **keywords)

    def load_state(self, *arguments: Any, **keywords: Any) -> None:
        """Load a state written by `save_state`.

        Raises:
            JobError: In a job.
        """
        if self._training is not None:
            raise JobError("load_state() is impossible in a job", f"leave it out: {_CHECKPOINTS}")
        super().load_state(*arguments, **keywords)


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """The position of a batch of the script in its update.

    Attributes:
        weight: Its share of the update's records; the weights of an update sum up to 1.
        is_first: It begins the update.
        is_last: Its backward completes the gradient.
    """

    weight: float
    is_first: bool
    is_last: bool


class AcceleratorTraining:
    """The part of an `ElasticAccelerator` that works in a job.

    Attributes:
        session: This worker's place in its job.
        registered: Objects that the script has registered.
        part: Position of the current batch; None: there is no batch.
        is_inside: The script is inside the block of `accumulate`.
        was_inside: The script has entered that block with the current batch.
    """

    controller: ElasticController

    def __init__(self, accelerator: Any, session: Any, num_epochs: int | None) -> None:
        """
        Args:
            num_epochs: Epochs that the script states; None: the job's flag holds.
        """
        self.registered: tuple[Any, ...] = ()
        self.part: UpdatePart | None = None
        self.is_inside = self.was_inside = False
        self._accelerator, self.session = accelerator, session
        self._num_epochs = session.spec.num_epochs if num_epochs is None else num_epochs
        self._num_loops = 0
        self._plain: Any = None
        self._loader: Any = None
        self._step: AbstractContextManager[None] | None = None

    # Before training ------------------------------------------------------------------------------------------------

    @property
    def has_loader(self) -> bool:
        """Whether a DataLoader for training was prepared."""
        return self._plain is not None

    @property
    def has_begun(self) -> bool:
        """Whether the controller exists."""
        return self._loader is not None

    @property
    def num_parts(self) -> int:
        """The number of batches in an update."""
        return int(self._accelerator.gradient_accumulation_steps)

    def take(self, plain: Any) -> AcceleratorLoader:
        """Return the elastic loader that replaces a DataLoader.

        Raises:
            JobError: The job's ledger cannot make its batches.
        """
        if not isinstance(plain, DataLoader) or plain.batch_size is None:
            raise JobError(
                "the training data are no DataLoader with a batch_size",
                "prepare DataLoader(dataset, batch_size=…): the job's ledger decides which records make a batch",
            )
        if plain.drop_last:
            raise JobError(
                "drop_last is impossible in a job: it leaves records out", "leave it out; the last batch is smaller"
            )
        check_minibatch_size(
            self.session.spec, plain.batch_size * self.num_parts, "batch_size times gradient_accumulation_steps"
        )
        self._plain = plain
        return AcceleratorLoader(self, plain)

    def open(self) -> ElasticController:
        """Return the controller; it is made when the first loop begins or its length is read."""
        if not self.has_begun:
            accelerator, plain = self._accelerator, self._plain
            if plain is None:
                raise JobError("no DataLoader is prepared", "give it to accelerator.prepare() before the loop")
            if not accelerator._models:
                raise JobError("no model is prepared", "give it to accelerator.prepare() before the loop")
            self.controller = create_elastic_controller(
                plain.batch_size * self.num_parts,
                self._num_epochs,
                state=[accelerator.unwrap_model(model) for model in accelerator._models],
                trainable_only=True,
                session=self.session,
            )
            self._loader = self.controller.loader(
                plain, CollateParts(plain.collate_fn, plain.batch_size), batch_size=plain.batch_size * self.num_parts
            )
        return self.controller

    @property
    def _has_data_left(self) -> bool:
        """Whether the script has begun to train and data are left."""
        return self._num_loops > 0 and bool(self.controller.num_steps_left) and not self.controller.is_over

    def warn_of_error(self) -> None:
        """Log that an error does not stop the job while data are left."""
        if self._has_data_left:
            _log.warning(
                "accelerator.end_training() does not stop the job, for an exception is being handled. To stop it, "
                "call end_training() after the except block."
            )

    def end(self) -> None:
        """Stop the job if data are left; do nothing before the first loop."""
        if not self._num_loops:
            return
        controller, planned = self.controller, self._num_epochs
        if self._has_data_left:
            _log.warning(
                "accelerator.end_training() stops the job: %.4g of its %d epochs are trained. To train all of them, "
                "write as many loops over the DataLoader.",
                controller.epochs_trained,
                planned,
            )
        controller.end_early("accelerator.end_training() was called before the end of the data")

    # In the loop ----------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """Yield the remaining batches of the current epoch."""
        controller, accelerator = self.open(), self._accelerator
        self._num_loops += 1
        if 0 < self._num_epochs < self._num_loops:
            raise JobError(
                f"this is loop {self._num_loops} over the training data, and the job has {self._num_epochs} epochs",
                "give ElasticAccelerator(num_epochs=…) the number of loops, or the job --num_epochs",
            )
        if self._num_loops == 1:
            scaler = [accelerator.scaler] if accelerator.scaler is not None else []
            controller.register(*accelerator._optimizers, *accelerator._schedulers, *scaler, *self.registered)
        for found in self._loader:
            num_records = sum(size for size, _ in found)
            for number, (size, batch) in enumerate(found):
                self.part = UpdatePart(size / num_records, number == 0, number == len(found) - 1)
                self.was_inside = False
                yield send_to_device(batch, accelerator.device)
                if not self.was_inside:
                    raise JobError(
                        "a batch was not trained in `with accelerator.accumulate(model):`",
                        "put forward, backward and the optimizer's step into that block",
                    )
                if self._step is None:
                    break  # the update is done, or lost
        self.part = None

    def begin_batch(self) -> None:
        """Enter the block of `accumulate`."""
        if self.part is None or self.was_inside:
            raise JobError(
                "`with accelerator.accumulate(model):` stands where there is no batch",
                "put it into the loop over the prepared DataLoader, once",
            )
        self.is_inside = self.was_inside = True
        if self.part.is_first:
            self._step = self.controller.step()
            self._step.__enter__()
            self._counts = [scheduler.scheduler.last_epoch for scheduler in self._accelerator._schedulers]
        self._accelerator.gradient_state._set_sync_gradients(self.part.is_last)

    def end_batch(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Leave the block of `accumulate`; return whether its exception was raised by us, so that it is suppressed."""
        step, part, self.is_inside = self._step, self.part, False
        assert step is not None
        assert part is not None
        if error is None and not part.is_last:
            return False
        is_rehearsal, num_steps, self._step = self.controller.is_rehearsal, self.controller.num_steps, None
        if error is None and not is_rehearsal:
            self._advance()
            self.controller.log_loss(self.controller.mean_loss)
        is_ours = bool(step.__exit__(kind, error, trace))
        self._accelerator.gradient_state._set_sync_gradients(self.controller.num_steps > num_steps)
        return is_ours

    def _advance(self) -> None:
        """Advance the learning-rate schedulers by the minibatches of all workers, as Accelerate's own wrapper does."""
        for wrapped, count in zip(self._accelerator._schedulers, self._counts, strict=True):
            schedule = wrapped.scheduler
            end = getattr(schedule, "total_steps", math.inf)  # OneCycleLR raises when stepped beyond it
            if schedule.last_epoch > count:
                for _ in range(self.controller.num_minibatches_in_step - 1):
                    if schedule.last_epoch < end:
                        schedule.step()


class _Block(AbstractContextManager[None]):
    def __init__(self, training: AcceleratorTraining) -> None:
        self._training = training

    def __enter__(self) -> None:
        self._training.begin_batch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._training.end_batch(kind, error, trace)


class AcceleratorLoader:
    """Replaces the DataLoader for training.

    Attributes:
        dataset: The DataLoader's data set.
        batch_size: The DataLoader's batch size.
    """

    def __init__(self, training: AcceleratorTraining, plain: Any) -> None:
        self._training, self.dataset, self.batch_size = training, plain.dataset, plain.batch_size

    def __len__(self) -> int:
        """Return the number of batches in an epoch, over all workers."""
        return self._training.open().num_minibatches_per_epoch * self._training.num_parts

    def __iter__(self) -> Iterator[Any]:
        return self._training.batches()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job's ledger defines the order of each epoch."""
