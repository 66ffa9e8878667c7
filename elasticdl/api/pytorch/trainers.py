"""Support for trainers of other libraries: shared parts of their adapters, and Lightning's own `Trainer`.

`LightningTrainer` adapts a Lightning `Trainer` that runs the script's loop: its counts of batches and epochs follow the
ledger.

The Trainer is found through a registered `LightningModule` in `fit`.  Nothing of Lightning is imported, so both of its
packages work; only public attributes of the Trainer are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from elasticdl.activities import Activity
from elasticdl.api.session import ScriptSession
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.api")


class CollateParts:
    """Makes the parts of a minibatch, each with its own forward and backward pass; runs in the loader's processes."""

    def __init__(self, collate: Callable[[list[Any]], Any], size: int) -> None:
        """
        Args:
            collate: Makes a batch of samples.
            size: Records per part.
        """
        self._collate, self._size = collate, size

    def __call__(self, samples: Sequence[Any]) -> list[tuple[int, Any]]:
        pieces = [list(samples[start : start + self._size]) for start in range(0, len(samples), self._size)]
        return [(len(piece), self._collate(piece)) for piece in pieces]


def say_plain(name: str, plain: str) -> None:
    """Log that an adapter does nothing outside of a job."""
    _log.info("%s runs as the plain %s: this process is in no job of ElasticDL", name, plain)


def saving(session: ScriptSession) -> AbstractContextManager[Any]:
    """Return the context for a checkpoint written by a library: slow storage must not count as a hang."""
    return session.clock.during(Activity.CHECKPOINT)


def evaluating(session: ScriptSession) -> AbstractContextManager[Any]:
    """Return the context for an evaluation by a library: a long one must not count as a hang."""
    return session.clock.during(Activity.EVALUATE)


def check_epochs(spec: JobSpec, num_epochs: float, argument: str) -> None:
    """Check a script's number of epochs against the job's.

    Raises:
        JobError: The job's flag has another value.
    """
    if spec.num_epochs not in (JobSpec().num_epochs, num_epochs):
        raise JobError(
            f"the job's --num_epochs is {spec.num_epochs}, and the script trains for {num_epochs:g} epochs",
            f"leave --num_epochs out: {argument} says it",
        )


def check_minibatch_size(spec: JobSpec, size: int, argument: str) -> None:
    """Check a script's batch size against the job's.

    Raises:
        JobError: The job's flag has another value.
    """
    if spec.minibatch_size not in (JobSpec().minibatch_size, size):
        raise JobError(
            f"the job's --minibatch_size is {spec.minibatch_size}, and the script's batches have {size} records",
            f"leave --minibatch_size out: {argument} says it",
        )


class LightningTrainer:
    """Sets the counters of a Lightning `Trainer`; called between and around the batches of its loop.

    Attributes:
        continues_after_backward: `backward()` must not raise for a dropped step, because the Trainer's automatic
            optimization must run to its end.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop
        self._max_epochs: int = trainer.max_epochs
        self._no_update = 1  # accumulate_grad_batches for a batch without an effect
        self.continues_after_backward = bool(trainer.lightning_module.automatic_optimization)

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> LightningTrainer | None:
        """Return the Trainer that is fitting one of these modules, if any."""
        for module in modules:
            try:
                trainer = getattr(module, "trainer", None)
            except RuntimeError:  # a LightningModule in the script's own loop
                continue
            if trainer is not None and hasattr(trainer, "fit_loop") and trainer.training:
                return cls(trainer)
        return None

    @property
    def _steps(self) -> Any:
        """The Trainer's count of updates by automatic optimization."""
        return self._loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total

    @property
    def _val_check_interval(self) -> float:
        """A number of batches, or a fraction of them; 0: validation is by time, and the Trainer has no interval."""
        number: float = getattr(self._trainer, "val_check_interval", 0)
        return number

    @property
    def state(self) -> list[Any]:
        """The Trainer's objects that must be equal in all members."""
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return [*self._trainer.optimizers, *schedulers, *([scaler] if scaler is not None else [])]

    def begin(self) -> None:
        """Delay validation until an epoch's last batch, whose number is unknown; call it before the first batch."""
        if _is_all(self._val_check_interval):
            self._trainer.val_check_batch = float("inf")

    def check(self, num_epochs: int, is_alone: bool) -> None:
        """Check the Trainer's settings.

        Raises:
            JobError: The Trainer has a setting that is impossible here.
        """
        trainer = self._trainer
        strategy = type(trainer.strategy).__name__
        if trainer.world_size > 1 or torch.distributed.is_initialized():
            raise JobError(
                f"the Trainer has a group of processes of its own ({strategy}, {trainer.world_size} processes)",
                "give Trainer(devices=1), no strategy: the workers of the job (--num_workers) train together",
            )
        if is_alone:
            return
        if not _is_all(trainer.limit_train_batches):
            raise JobError(
                f"limit_train_batches={trainer.limit_train_batches} (also by overfit_batches, fast_dev_run) leaves "
                "records out",
                "to train on fewer of them, give the loader a smaller data set, or the job --max_step",
            )
        if isinstance(self._val_check_interval, float) and not _is_all(self._val_check_interval):
            raise JobError(
                f"val_check_interval={self._val_check_interval} is a part of this worker's batches, and how many it "
                "gets turns out as it trains",
                "give a number of batches, 1.0 for the end of each epoch, or a time",
            )
        if -1 < self._max_epochs < num_epochs:
            raise JobError(
                f"the Trainer ends after max_epochs={self._max_epochs} epochs of num_epochs={num_epochs}",
                f"give Trainer(max_epochs={num_epochs}), or create_elastic_controller(num_epochs={self._max_epochs})",
            )
        if self.continues_after_backward and getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise JobError(
                f"precision={trainer.precision!r} scales the loss, and a step whose gradients are lost cannot be left "
                "out of automatic optimization then",
                "give precision='bf16-mixed', or set automatic_optimization = False in the module",
            )

    def begin_batch(self, epoch: int, num_steps: int) -> None:
        """Set the counters of the Trainer to those of the ledger.

        Args:
            epoch: Epoch of the batch; -1: it is in no epoch.
            num_steps: Updates of the model.

        Raises:
            JobError: The Trainer would accumulate gradients.
        """
        num_batches = self._trainer.accumulate_grad_batches
        if num_batches not in (1, self._no_update):
            raise JobError(
                f"accumulate_grad_batches={num_batches} adds up gradients over several batches, and workers come and "
                "go between them",
                f"leave it out; --fixed_global_batch (alone: fixed_global_batch), {num_batches} times the batch size, "
                "makes updates of that many records, however many workers there are",
            )
        if self.continues_after_backward:
            self._trainer.accumulate_grad_batches = self._no_update = 1
            self._steps.ready = self._steps.completed = num_steps
        if epoch >= 0:
            self._loop.max_epochs = self._max_epochs
            current = self._loop.epoch_progress.current
            current.ready = current.started = epoch + 1
            current.processed = current.completed = epoch

    def end_batch(self, has_stepped: bool, num_steps: int, is_last: bool, num_batches: int, is_cut: bool) -> None:
        """Set the Trainer's state after the script's code on a batch.

        Args:
            has_stepped: The model was updated.
            num_steps: Updates of the model.
            is_last: It is the last batch of its epoch.
            num_batches: Batches of the loop, as far as known.
            is_cut: The Trainer has taken as many batches as the loader had when the loop began.
        """
        loop = self._loop
        loop.max_batches = num_batches
        loop.epoch_loop.batch_progress.is_last_batch = is_last
        if self.continues_after_backward and not has_stepped:
            # So the Trainer treats the batch as one of an accumulated update, and does not step its schedulers.
            self._no_update = loop.epoch_loop.batch_progress.current.ready + 1
            self._trainer.accumulate_grad_batches = self._no_update
            # The Trainer counts a step after this returns, also for a lost step or for the first part of a step.
            self._steps.ready, self._steps.completed = num_steps, num_steps - 1
        if is_cut and not is_last and self._max_epochs >= 0:
            loop.max_epochs = self._max_epochs + 1  # its next loop continues the same epoch

    def end(self) -> None:
        """Stop the Trainer: there are no more data."""
        self._trainer.should_stop = True


def _is_all(batches: float) -> bool:
    """Return whether a setting of the Trainer means all batches of an epoch; the integer 1 means one batch."""
    return isinstance(batches, float) and batches == 1.0
