"""Lightning's strategy for the workers of a job, which come and go; outside of a job it is the single-device strategy.

    from elasticdl.api.lightning import ElasticStrategy

    Trainer(strategy=ElasticStrategy(), max_epochs=3).fit(model, DataLoader(…), …)

The DataLoader for training becomes the elastic one, and each optimizer step becomes a step of all workers.  The
Trainer's counters follow the ledger: see elasticdl/api/pytorch/trainers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from elasticdl.api.pytorch import ElasticController, create_elastic_controller, join_job
from elasticdl.api.pytorch.trainers import check_epochs, check_minibatch_size, evaluating, saving, say_plain
from elasticdl_client.errors import JobError


class ElasticStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains in all workers of a job; docs/pytorch_trainers.md lists differences to other strategies."""

    def __init__(self, device: str | torch.device = "", **keywords: Any) -> None:
        """
        Args:
            device: Empty: the GPU of this worker if it has one, else its CPU.
            keywords: Arguments of `SingleDeviceStrategy`.

        Raises:
            JobError: The master cannot be reached, or another launcher has started this process.
        """
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"), **keywords)
        session = join_job()
        self._session = session if session.link is not None else None
        self._controller: ElasticController | None = None
        self._has_stepped = False  # before the first step Lightning may reduce: lengths of loaders
        self._has_ended = False
        self._validation: AbstractContextManager[Any] = nullcontext()  # context of the validation in progress
        if self._session is None:
            say_plain("ElasticStrategy", "SingleDeviceStrategy of Lightning")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the elastic loader for training; a validation loader gives all of its data to each worker."""
        if self._session is None or not self.lightning_module.trainer.training:
            return super().process_dataloader(dataloader)
        self._has_stepped = False  # Lightning reduces the length of a newly made loader
        trainer, module = self.lightning_module.trainer, self.lightning_module
        if not module.automatic_optimization:
            raise JobError(
                "automatic_optimization = False is impossible with ElasticStrategy in a job",
                "let Lightning step the optimizer, or take a controller in training_step (docs/pytorch_script.md)",
            )
        if not isinstance(dataloader, DataLoader) or dataloader.batch_size is None or dataloader.drop_last:
            raise JobError(
                "the training data are no DataLoader with a batch_size and without drop_last",
                "give DataLoader(dataset, batch_size=…): the job's ledger decides which records make a batch",
            )
        if self._has_ended:
            raise JobError(
                "fit() is called a second time, and the data of a job are trained once",
                "train in one call, or start another job that begins with the saved model",
            )
        if self._controller is not None:
            return self._controller.loader(dataloader)  # reload_dataloaders_every_n_epochs; refuses another data set
        num_epochs = max(0, trainer.max_epochs or 0)
        check_epochs(self._session.spec, num_epochs, "Trainer(max_epochs=…)")
        check_minibatch_size(self._session.spec, dataloader.batch_size, "batch_size of the DataLoader")
        self._controller = create_elastic_controller(
            dataloader.batch_size,
            num_epochs,
            state=[module],
            trainable_only=True,
            session=self._session,
        )
        return self._controller.loader(dataloader)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **keywords: Any) -> Any:
        """Take a step with all workers: forward, backward and the update."""
        if self._controller is None:
            return super().optimizer_step(optimizer, closure, model, **keywords)
        self._has_stepped = True
        with self._controller.step():
            return super().optimizer_step(optimizer, closure, model, **keywords)
        return None

    def on_validation_start(self) -> None:
        """Start to count the time as evaluation."""
        if self._session is not None:
            self._validation = evaluating(self._session)
            self._validation.__enter__()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Stop counting the time as evaluation."""
        super().on_validation_end()
        self._validation.__exit__(None, None, None)

    def on_train_end(self) -> None:
        """Leave the group; stop the job if the Trainer stops before the end of the data."""
        controller = self._controller
        if controller is not None:
            self._has_ended = True
            controller.end_early("the Trainer stops: max_steps, max_time or a callback")
        super().on_train_end()

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """Save in the worker with rank 0."""
        with saving(self._session) if self._session is not None else nullcontext():
            super().save_checkpoint(*arguments, **keywords)

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker currently has rank 0 and therefore writes checkpoints."""
        return self._session is None or self._session.rank == 0

    def reduce(self, tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return this worker's tensor: a validation is complete in each worker.

        Raises:
            JobError: In training: other workers have other batches.
        """
        self._check_validates("sync_dist=True")
        return super().reduce(tensor, *arguments, **keywords)

    def all_gather(self, tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return this worker's tensor, like `reduce`."""
        self._check_validates("all_gather()")
        return super().all_gather(tensor, *arguments, **keywords)

    def _check_validates(self, what: str) -> None:
        if self._has_stepped and self.lightning_module.trainer.training:
            raise JobError(
                f"{what} in training would return this worker's part only: workers come and go between two batches",
                "log without it; the metrics of validation are those of all of its data in each worker",
            )
