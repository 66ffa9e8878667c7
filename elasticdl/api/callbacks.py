"""Callbacks for a module's `callbacks()`, for every framework; docs/callbacks.md describes their effect in a job.

The master makes their decisions, once for all workers, from the settings of these objects.
A Keras module may use Keras's own `EarlyStopping`, `ModelCheckpoint`, `TerminateOnNaN` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Callback", "EarlyStopping", "MaxStepsStopping", "ModelCheckpoint", "SavedModelExporter", "TerminateOnNaN"]


class Callback:
    """Base class for a PyTorch module's own callbacks: override the hooks that you need.  Keras has its own base class.

    `model` is the worker's module in evaluation mode; changes made by a hook do not reach other workers.
    """

    def on_train_begin(self, model: Any) -> None:
        """Called in every worker, before its first minibatch."""

    def on_epoch_end(self, model: Any, epoch: int, logs: Mapping[str, float]) -> None:
        """Called in one worker after each epoch (counted from 0); `logs`: `loss`, and `val_NAME` for each metric."""

    def on_evaluation_end(self, model: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called in one worker after each evaluation; `step` is the model version, `metrics` maps names to values."""

    def on_train_end(self, model: Any, output: str) -> None:
        """Called in one worker at the end; `output` is the directory of `--output`; it may be empty."""


class Decided:
    """A callback whose settings the master reads; none of its hooks is called."""


class EarlyStopping(Decided):
    """End training once a metric of the evaluation has stopped improving.

    Args:
        monitor: A metric of `eval_metrics_fn`, with or without `val_` before its name; `val_loss` always exists.
        min_delta: Only a change larger than this is an improvement.
        patience: Number of evaluations in a row without an improvement after which training ends.
        mode: min, max or auto: min for losses, max for names with acc or auc.
        baseline: Improvements reset the patience only once the metric is better than this value.
        start_from_epoch: Number of initial evaluations to ignore.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        start_from_epoch: int = 0,
    ) -> None:
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.mode = mode
        self.baseline = baseline
        self.start_from_epoch = start_from_epoch


class ModelCheckpoint(Decided):
    """Save the whole model during training.

    Args:
        filepath: A directory, written like that of `--output`, or a file: `.keras` for a Keras model, `.pt` (the
            state_dict) for a PyTorch model.  May contain the fields `{epoch}`, `{step}` and metrics, such as
            `{val_accuracy:.3f}`.  A relative path is below `--checkpoint_dir`.
        monitor: See `EarlyStopping`.
        save_best_only: Save only after an evaluation with a better result than all before.
        mode: See `EarlyStopping`.
        save_freq: "epoch", or a number of model versions.
        initial_value_threshold: The first saved model must be better than this.
    """

    def __init__(
        self,
        filepath: str,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        self.filepath = str(filepath)
        self.monitor = monitor
        self.save_best_only = save_best_only
        self.mode = mode
        self.save_freq = save_freq
        self.initial_value_threshold = initial_value_threshold


class MaxStepsStopping(Decided):
    """Limit the number of minibatches, like `--max_step`; the smaller of the two limits applies."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps


class SavedModelExporter(Decided):
    """Export the trained model at the end to another directory than `--output`, in the same form."""

    def __init__(self, path: str) -> None:
        self.path = str(path)


class TerminateOnNaN(Decided):
    """End training at the first loss or gradient that is not finite: like `--nan_policy=fail`, the default."""
