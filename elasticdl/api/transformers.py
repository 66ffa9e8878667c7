"""Hugging Face's `Trainer`, made elastic for the workers of a job; outside of a job it is the plain one.

    from elasticdl.api.transformers import ElasticTrainer as Trainer

The Trainer keeps its loop.  One iteration of it is one update of the model by all workers.  An iteration without an
update (the sample on which a new worker gets ready, a step lost together with a worker) is repeated inside
`training_step`, so that callbacks, logs and schedulers see each update once.  Its counters are those of the ledger.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import transformers
from transformers import IntervalStrategy, ProgressCallback, Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from elasticdl.api.pytorch import ElasticController, create_elastic_controller, join_job
from elasticdl.api.pytorch.trainers import (
    CollateParts,
    check_epochs,
    check_minibatch_size,
    evaluating,
    saving,
    say_plain,
)
from elasticdl_client.errors import JobError

_ONE_DEVICE = "give --processes_per_worker the number of GPUs: each gets a process, and all of the job train together"
_NO_WRAPPERS = (
    "leave it out: in a job each worker holds the whole model, and ElasticDL sums the gradients; where the model does "
    "not fit, train fewer parameters (peft), or use `torchrun` without ElasticDL"
)
_NO_BEST = (
    "leave it out: workers would end with models of different steps; load the best checkpoint after the job, its path "
    "is best_model_checkpoint in trainer_state.json"
)
_METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_NO_SIGNALS = "leave it out: on SIGTERM a job saves its own checkpoint, and one worker's end would end training"
_BY_LEDGER = "leave it out: the job's ledger decides which records come, so that none is left out or repeated"
# Attributes of TrainerState that are equal in all workers.
_SHARED = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint")

Compute = Callable[[Any, Any, Any], torch.Tensor]


class ElasticTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` for the workers of a job; docs/pytorch_trainers.md lists the differences.

    Raises:
        JobError: An argument is impossible in a job, or contradicts the job's flags.
    """

    args: Any
    callback_handler: Any
    control: Any

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        session = join_job()
        self._training: ElasticTraining | None = None
        if session.link is None:
            say_plain("ElasticTrainer", "transformers.Trainer")
        else:
            check_version()
            check_arguments(keywords.get("args", arguments[1] if len(arguments) > 1 else None))
        super().__init__(*arguments, **keywords)
        if session.link is None:
            return
        num_parts = self.args.gradient_accumulation_steps
        check_epochs(session.spec, self.args.num_train_epochs, "TrainingArguments(num_train_epochs=…)")
        check_minibatch_size(
            session.spec,
            self.args.per_device_train_batch_size * num_parts,
            "per_device_train_batch_size times gradient_accumulation_steps",
        )
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1  # the parts of an update are one batch to the Trainer's loop
        self.accelerator.gradient_accumulation_steps = 1  # else it divides the loss once more in transformers 5.3
        self._training = ElasticTraining(self, num_parts, session, super().training_step)
        self.callback_handler = ElasticCallbacks(self.callback_handler, self._training)
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.is_world_process_zero()

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **keywords: Any) -> Any:
        """Train like the plain Trainer; in a job, continue from the job's own checkpoint.

        Raises:
            JobError: Called with a checkpoint of the Trainer or for a hyperparameter search, or called a second time.
        """
        training = self._training
        if training is None:
            return super().train(resume_from_checkpoint, trial, **keywords)
        if resume_from_checkpoint or trial is not None:
            raise JobError(
                "resume_from_checkpoint and hyperparameter_search are impossible in a job",
                "call train() without them; --checkpoint_dir lets a job continue where it was",
            )
        if training.is_open:
            raise JobError(
                "train() is called a second time, and the data of a job are trained once",
                "train in one call, or start another job that begins with the saved model",
            )
        with training.abandoned_by_error():
            return super().train(None, None, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator; each loss passed to its `backward` counts in the mean loss of the step."""
        super().create_accelerator_and_postprocess()
        backward = self.accelerator.backward

        def elastic_backward(loss: torch.Tensor, **keywords: Any) -> None:
            if self._training is not None:
                self._training.controller.add_loss(loss)
            backward(loss, **keywords)

        self.accelerator.backward = elastic_backward

    # Data and schedule ----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the elastic loader; the data set, `data_collator` and `dataloader_…` arguments apply."""
        plain = super().get_train_dataloader()
        return plain if self._training is None else self._training.open(plain)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the parts of one update as one batch, and their number of items."""
        if self._training is None or not isinstance(epoch_iterator, Batches):
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        batch = next(epoch_iterator, None)
        return ([batch], self.count_items(batch)) if batch is not None else ([], None)

    def count_items(self, batch: UpdateParts) -> Any:
        """Return the divisor of the model's loss over all parts of an update; None: the records of each part."""
        return super().get_batch_samples(iter(batch.parts), len(batch.parts), self.args.device)[1]

    def divisor(self, num_items: Any) -> Any:
        """Return the number of items by which the loss of an update is divided; None: it is a mean over records.

        Args:
            num_items: Items in the update; the Trainer may have counted them although the loss does not need them.
        """
        is_divided = getattr(self, "loss_is_scaled_for_ga", None)  # set by the user, if transformers supports it
        if is_divided is None:
            is_divided = self.compute_loss_func is not None or self.model_accepts_loss_kwargs
        return num_items if is_divided and self.args.average_tokens_across_devices else None

    def set_initial_training_values(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the plain values, except that epochs do not end training if `max_steps` does."""
        values = super().set_initial_training_values(*arguments, **keywords)
        return (sys.maxsize, *values[1:]) if self._training is not None and self.args.max_steps > 0 else values

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make a scheduler that ends with the data, for any number of workers."""
        if self._training is not None:
            num_training_steps = self._training.schedule(num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    # A step ---------------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the loss of a step over all workers; its gradient is set in the parameters."""
        if self._training is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        return self._training.step(model, inputs, num_items_in_batch)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a batch, over all its parts."""
        return sum(super(ElasticTrainer, self).floating_point_ops(part) for part in parts_of(inputs))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for part in parts_of(inputs):
            super()._track_num_input_tokens(part)

    # Rank 0 of the moment -------------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Return whether this worker currently has rank 0."""
        return bool(super().is_world_process_zero()) if self._training is None else self._training.session.rank == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this worker currently has rank 0: only one worker of the job logs such messages."""
        return bool(super().is_local_process_zero()) if self._training is None else self.is_world_process_zero()

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        """Remove old checkpoints only in the worker with rank 0: it may be writing one."""
        limit = self.args.save_total_limit
        if not self.is_world_process_zero():
            self.args.save_total_limit = None
        try:
            return super()._finalize_training(*arguments, **keywords)
        finally:
            self.args.save_total_limit = limit

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model if this worker has rank 0."""
        self._save_by_rank_0(super().save_model, output_dir, _internal_call)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self._save_by_rank_0(super()._save_checkpoint, *arguments, **keywords)

    def _save_by_rank_0(self, save: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Save in the worker with rank 0; outside of a job the Trainer decides which process saves."""
        if self._training is None:
            save(*arguments, **keywords)
        elif self.is_world_process_zero():
            with saving(self._training.session):
                save(*arguments, **keywords)

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """Evaluate; rank 0 runs the evaluations scheduled by `eval_strategy` and shares their metrics."""
        training = self._training
        if training is None:
            return super().evaluate(*arguments, **keywords)  # type: ignore[no-any-return]
        shares, training.shares_metrics = training.shares_metrics, False
        if not shares or training.controller.rank == 0:
            with evaluating(training.session):
                metrics: dict[str, float] = super().evaluate(*arguments, **keywords)
            if not shares:
                return metrics
            training.controller.share(json.dumps(metrics, default=float).encode())
            return metrics
        data = training.controller.share(None)
        if data is None:  # rank 0 is lost
            return self.evaluate(*arguments, **keywords)
        metrics = json.loads(data)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class UpdateParts(dict[str, Any]):
    """A worker's minibatch as the Trainer's loop sees it: the dictionary of its first part, and all parts in `parts`.

    Attributes:
        weights: Share of the records of each part; their sum is 1.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> None:
        super().__init__(parts[0])
        self.parts, self.weights = parts, weights


def parts_of(inputs: Any) -> Sequence[Any]:
    """Return the parts of a batch, or the batch as its only part."""
    return inputs.parts if isinstance(inputs, UpdateParts) else [inputs]


class Batches(Iterator[Any]):
    """The Trainer's iterator over an epoch: only batches of steps with this worker, not those of a rehearsal."""

    def __init__(self, training: ElasticTraining) -> None:
        self._training = training

    def __next__(self) -> Any:
        batch = self._training.next_batch()
        if batch is None:
            raise StopIteration
        return batch


class TrainerLoader:
    """Replaces the Trainer's DataLoader.

    Attributes:
        dataset: The training data set.
    """

    def __init__(self, training: ElasticTraining, dataset: Any) -> None:
        self._training, self.dataset = training, dataset

    def __len__(self) -> int:
        """Return the number of minibatches in an epoch, over all workers: the maximum number of updates."""
        return self._training.controller.num_minibatches_per_epoch

    def __iter__(self) -> Batches:
        self._training.begin_epoch()
        return Batches(self._training)


class ElasticTraining:
    """The part of an `ElasticTrainer` that works in a job.

    Attributes:
        session: This worker's place in its job.
        is_open: It has data.
        shares_metrics: The next evaluation is due in all workers after the same step.
        is_void: The Trainer's current iteration makes no step: the data ended after its batch was lost.
        is_aligned: All workers of the group have reached this point after the same step.
    """

    controller: ElasticController

    def __init__(self, trainer: Any, num_parts: int, session: Any, compute: Compute) -> None:
        """
        Args:
            num_parts: Parts of an update, each with its own backward.
            compute: The plain `training_step`.
        """
        self.shares_metrics = self.is_void = self.is_aligned = False
        self._trainer, self._num_parts, self.session, self._compute = trainer, num_parts, session, compute
        self.is_open = False
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())
        self._first: UpdateParts | None = None
        self._before_void: Any = None
        self._step: AbstractContextManager[None] | None = None
        self._by_minibatch = False  # the scheduler is stepped once for each minibatch

    # Before training ------------------------------------------------------------------------------------------------

    def open(self, plain: Any) -> TrainerLoader:
        """Return the elastic loader that replaces a DataLoader."""
        args = self._trainer.args
        strategy = getattr(args, "train_sampling_strategy", "random")
        size = args.per_device_train_batch_size * self._num_parts
        self.controller = create_elastic_controller(
            size,
            0 if args.max_steps > 0 else int(args.num_train_epochs),
            shuffle=strategy != "sequential",
            state=[self._trainer.model],
            trainable_only=True,
            session=self.session,
        )
        collate = CollateParts(plain.collate_fn, args.per_device_train_batch_size)
        self._loader = self.controller.loader(plain, collate, batch_size=size)
        self.is_open = True
        return TrainerLoader(self, self._loader.dataset)

    def schedule(self, num_steps: int) -> int:
        """Return the length of a schedule of `num_steps`, in minibatches if it follows the data."""
        left = self.controller.num_steps_left
        self._by_minibatch = left is not None and not self.controller.has_fixed_global_batch
        return num_steps if left is None or self._by_minibatch else left

    def join(self, state: TrainerState) -> None:
        """Register the remaining objects, rehearse, enter the group, and take over its state.

        Raises:
            JobError: The Trainer does not train with the elastic loader.
        """
        if not self.is_open:
            raise JobError(
                "get_train_dataloader() is overridden, and each worker would train on all of the data",
                "let it return super().get_train_dataloader(); the data set and data_collator are yours",
            )
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        rest = [trainer.optimizer, trainer.lr_scheduler, *([scaler] if scaler is not None else [])]
        self.controller.register(*rest, trainer=TrainerProgress(trainer))
        self._batches = iter(self._loader)
        self._first = self.next_batch()
        self._follow(state)

    # A step ---------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Start the epoch of the next batches, or its remaining part."""
        if self._first is None:
            self._batches = iter(self._loader)

    def next_batch(self) -> UpdateParts | None:
        """Return the batch of the next step with this worker; None: the epoch is over."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while (found := next(self._batches, None)) is not None:
            sizes = [size for size, _ in found]
            batch = UpdateParts([part for _, part in found], [size / sum(sizes) for size in sizes])
            if not self.controller.is_rehearsal:
                return batch
            model = self._trainer.model_wrapped
            with self.controller.step():
                self._compute_parts(model, batch, self._trainer.count_items(batch))
            model.zero_grad()
        self._batches = iter(())
        return None

    def step(self, model: Any, batch: UpdateParts, num_items: Any) -> torch.Tensor:
        """Compute batches until the gradient of a step of all workers is complete; return its loss."""
        while True:
            step = self.controller.step(self._trainer.divisor(num_items))
            step.__enter__()
            try:
                self._compute_parts(model, batch, num_items)
            except BaseException as error:
                if not step.__exit__(type(error), error, error.__traceback__):
                    raise
            else:
                self._step = step
                return self.controller.mean_loss.to(self._trainer.args.device)
            found = self.next_batch()
            if found is None:
                return self._make_void()
            batch, num_items = found, self._trainer.count_items(found)

    def end_step(self, state: TrainerState) -> None:
        """Commit the step after the update of the model, and set the Trainer's counters."""
        controller, step, self._step = self.controller, self._step, None
        assert step is not None
        if self._by_minibatch and self._trainer._created_lr_scheduler:
            for _ in range(controller.num_minibatches_in_step - 1):
                self._trainer.lr_scheduler.step()
        controller.log_loss(controller.mean_loss)
        step.__exit__(None, None, None)
        self.is_aligned = True
        self._follow(state)

    def end_void(self, state: TrainerState) -> None:
        """Revert the changes of the Trainer in an iteration without a step."""
        self.is_void = False
        self.controller.state.load_state(self._before_void)
        self._follow(state)

    def settle(self, control: TrainerControl, state: TrainerState) -> None:
        """Stop the job if the Trainer stops before the end of the data, and the Trainer if the data end."""
        left = self.controller.num_steps_left
        if control.should_training_stop and left != 0 and not self.controller.is_over:
            self.controller.stop_training(f"the Trainer stops at step {state.global_step}: max_steps or a callback")
        elif self.controller.is_over:
            control.should_training_stop = True

    def abandoned_by_error(self) -> AbstractContextManager[Any]:
        """Return a context in which an error ends the current step; the other workers repeat it."""
        stack = ExitStack()

        def end(kind: Any, error: BaseException | None, trace: Any) -> bool:
            step, self._step = self._step, None
            return error is not None and step is not None and bool(step.__exit__(kind, error, trace))

        stack.push(end)
        return stack

    def _compute_parts(self, model: Any, batch: UpdateParts, num_items: Any) -> None:
        trainer = self._trainer
        for number, (part, weight) in enumerate(zip(batch.parts, batch.weights, strict=True), 1):
            trainer.current_gradient_accumulation_steps = 1 / weight  # the Trainer divides a part's mean loss by it
            with ExitStack() as stack:
                if number < len(batch.parts):
                    stack.enter_context(self.controller.no_sync())
                self._compute(model, part, num_items)
        trainer.current_gradient_accumulation_steps = 1

    def _make_void(self) -> torch.Tensor:
        self.is_void, self.is_aligned = True, False
        self._before_void = self.controller.state.state()
        self._trainer.accelerator.gradient_state._set_sync_gradients(False)  # makes its optimizer skip the step
        return torch.zeros((), device=self._trainer.args.device)

    def _follow(self, state: TrainerState) -> None:
        """Set the Trainer's counters to those of the ledger."""
        controller = self.controller
        state.global_step, state.epoch = controller.num_steps, controller.epochs_trained
        state.is_world_process_zero = state.is_local_process_zero = controller.rank == 0
        left = controller.num_steps_left
        if left is not None:
            state.max_steps = state.global_step + left + (controller.num_minibatches_in_step > 0)
            # Resolves intervals that are given as a fraction of all steps.
            state.compute_steps(self._trainer.args, state.max_steps)
        for callback in self._trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps


class TrainerProgress:
    """The Trainer's counters and logs, equal in all workers, for workers that join later."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the log, the best metric, the losses not logged yet and the state of callbacks."""
        trainer = self._trainer
        known = {name: getattr(trainer.state, name) for name in _SHARED}
        return {
            "state": json.dumps(known, default=float),
            "loss": float(trainer._tr_loss),
            "total_loss": float(trainer._total_loss_scalar),
            "logged": int(trainer._globalstep_last_logged),
            "callbacks": json.dumps([one.state()["attributes"] for one in self._callbacks], default=float),
        }

    @property
    def _callbacks(self) -> list[ExportableState]:
        """The callbacks with a state, such as for early stopping."""
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict`."""
        trainer = self._trainer
        for name, value in json.loads(state["state"]).items():
            setattr(trainer.state, name, value)
        trainer._tr_loss = torch.tensor(state["loss"], device=trainer.args.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = state["total_loss"], state["logged"]
        known_of_callbacks = json.loads(state.get("callbacks", "[]"))  # absent in old checkpoints
        for callback, known in zip(self._callbacks, known_of_callbacks, strict=False):
            for name, value in known.items():
                setattr(callback, name, value)


class ElasticCallbacks(CallbackHandler):  # type: ignore[misc]
    """The Trainer's events, each once per step of the job, with the ledger's counters."""

    def __init__(self, plain: CallbackHandler, training: ElasticTraining) -> None:
        self.__dict__.update(plain.__dict__)
        self._training = training
        self._trains = False  # the current epoch has batches

    def call_event(self, event: Any, args: Any, state: Any, *arguments: Any, **keywords: Any) -> Any:
        """Call an event; a Trainer that does not train first takes over the rank of the script's training Trainer."""
        if not self._training.is_open:
            state.is_world_process_zero = state.is_local_process_zero = self._training.session.rank == 0
        return super().call_event(event, args, state, *arguments, **keywords)

    def on_train_begin(self, args: Any, state: Any, control: Any) -> Any:
        """Join the job first."""
        self._training.join(state)
        args.eval_on_start &= not state.global_step  # else others wait for a joining worker's evaluation
        return super().on_train_begin(args, state, control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any) -> Any:
        """Skip the event if there are no more data."""
        self._trains = not self._training.controller.is_over
        if self._trains:
            return super().on_epoch_begin(args, state, control)
        control.should_training_stop = True
        return control

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any) -> Any:
        """Skip the event if there is no step."""
        return control if self._training.is_void else super().on_pre_optimizer_step(args, state, control)

    def on_optimizer_step(self, args: Any, state: Any, control: Any) -> Any:
        """Skip the event if there is no step."""
        return control if self._training.is_void else super().on_optimizer_step(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any) -> Any:
        """Commit the step and set its number from the ledger first."""
        training = self._training
        if training.is_void:
            training.end_void(state)
            return control
        training.end_step(state)
        self._show_progress(args, state, control)
        control = super().on_step_end(args, state, control)
        training.shares_metrics = control.should_evaluate and _is_due(args, state)
        training.settle(control, state)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any) -> Any:
        """Skip the event for an epoch without batches."""
        if not self._trains:
            return control
        control = super().on_epoch_end(args, state, control)
        is_by_epochs = args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch
        self._training.shares_metrics = control.should_evaluate and is_by_epochs and self._training.is_aligned
        self._training.settle(control, state)
        return control

    def on_train_end(self, args: Any, state: Any, control: Any) -> Any:
        """Leave the group first; the evaluation after an epoch may have stopped the Trainer."""
        self._training.settle(control, state)
        self._training.controller.close()
        return super().on_train_end(args, state, control)

    def _show_progress(self, args: Any, state: Any, control: Any) -> None:
        """Show the progress bar in a worker that has just got rank 0."""
        for callback in self.callbacks:
            if state.is_world_process_zero and isinstance(callback, ProgressCallback) and callback.training_bar is None:
                callback.on_train_begin(args, state, control)


def _is_due(args: Any, state: TrainerState) -> bool:
    """Return whether all workers evaluate after this step."""
    if args.eval_strategy != IntervalStrategy.STEPS or args.eval_delay > state.global_step:
        return False
    return bool(state.global_step % state.eval_steps == 0 or state.global_step >= state.max_steps)


def check_version() -> None:
    """Refuse versions of transformers whose Trainer has a different loop.

    Raises:
        JobError: The version is older than 5.3.
    """
    if not hasattr(Trainer, "_run_epoch"):
        raise JobError(
            f"transformers {transformers.__version__} is too old for ElasticTrainer in a job",
            "pip install 'transformers>=5.3,<6'",
        )


def check_arguments(args: Any) -> None:
    """Refuse arguments that are impossible in a job.

    Args:
        args: TrainingArguments; None: their defaults.

    Raises:
        JobError: An argument is impossible.
    """
    if args is None:
        return
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    sampling = str(getattr(args, "train_sampling_strategy", "random"))
    refused = {
        "deepspeed": (bool(args.deepspeed), _NO_WRAPPERS),
        "fsdp": (bool(args.fsdp), _NO_WRAPPERS),
        "parallelism_config": (getattr(args, "parallelism_config", None) is not None, _NO_WRAPPERS),
        "several GPUs in one process": (args.n_gpu > 1, _ONE_DEVICE),
        "enable_jit_checkpoint": (bool(args.enable_jit_checkpoint), _NO_SIGNALS),
        "auto_find_batch_size": (bool(args.auto_find_batch_size), "give per_device_train_batch_size"),
        "dataloader_drop_last": (bool(args.dataloader_drop_last), _BY_LEDGER),
        f"train_sampling_strategy={sampling}": (sampling not in ("random", "sequential"), _BY_LEDGER),
        "load_best_model_at_end": (bool(args.load_best_model_at_end), _NO_BEST),
        f"lr_scheduler_type={schedule}": (
            schedule in _METRIC_SCHEDULES,
            "give a schedule by steps, such as linear or cosine",
        ),
        f"num_train_epochs={args.num_train_epochs}": (
            args.max_steps <= 0 and (args.num_train_epochs != int(args.num_train_epochs) or args.num_train_epochs < 1),
            "give a whole number of epochs, or max_steps",
        ),
    }
    for what, (is_refused, hint) in refused.items():
        if is_refused:
            raise JobError(f"{what} is impossible with ElasticTrainer in a job", hint)
