"""Callbacks for a module's `callbacks()`, of every framework; docs/callbacks.md says what each does in a job.

The master takes their decisions, once for all workers, from the settings of these objects.
A Keras module may use Keras's own `EarlyStopping`, `ModelCheckpoint`, `TerminateOnNaN` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Callback", "EarlyStopping", "MaxStepsStopping", "ModelCheckpoint", "SavedModelExporter", "TerminateOnNaN"]


class Callback:
    """Base class of a PyTorch module's own callbacks: override the hooks that you need.  Keras has its own base class.

    `model` is the worker's module in evaluation mode; changes by a hook do not reach other workers.
    """

    def on_train_begin(self, model: Any) -> None:
        """In every worker, before its first minibatch."""

    def on_epoch_end(self, model: Any, epoch: int, logs: Mapping[str, float]) -> None:
        """In one worker, once an epoch, from 0, is in the model; `logs`: `loss`, and `val_NAME` of each metric."""

    def on_evaluation_end(self, model: Any, step: int, metrics: Mapping[str, float]) -> None:
        """In one worker, after each evaluation; `step` is the model version, `metrics` are by name."""

    def on_train_end(self, model: Any, output: str) -> None:
        """In one worker, at the end; `output` is the directory of `--output`, which may be empty."""


class Decided:
    """Decided by the master: nothing of it is called."""


class EarlyStopping(Decided):
    """End training once a metric of the evaluation has stopped improving.

    Args:
        monitor: a metric of `eval_metrics_fn`, with or without `val_` before its name; `val_loss` is always there.
        min_delta: a change has to be larger to be an improvement.
        patience: evaluations in a row without an improvement that end training.
        mode: min, max or auto: min for losses, max for names with acc or auc.
        baseline: improvements do not count for the patience before this value is bettered.
        start_from_epoch: the number of first evaluations that do not count.
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
        filepath: a directory, which gets what `--output` gets, or a file: `.keras` of a Keras model, `.pt` (the
            state_dict) of a PyTorch model.  `{epoch}`, `{step}` and metrics, `{val_accuracy:.3f}`, are filled in.
            A relative one lies in `--checkpoint_dir`.
        monitor: see `EarlyStopping`.
        save_best_only: only after an evaluation that is better than all before.
        mode: see `EarlyStopping`.
        save_freq: "epoch", or a number of model versions.
        initial_value_threshold: the first saved model must be better than this.
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
    """Limit the number of minibatches, like `--max_step`; of both the smaller one counts."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps


class SavedModelExporter(Decided):
    """Export the trained model to a directory at the end, beside `--output`, in the same form."""

    def __init__(self, path: str) -> None:
        self.path = str(path)


class TerminateOnNaN(Decided):
    """Training ends at the first loss or gradient that is not finite: like `--nan_policy=fail`, the default."""
