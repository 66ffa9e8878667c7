"""Turn the settings of the user's callbacks into rules for the master, for every framework.

master/core/plan/callbacks.py reads `Rules.to_json`.  A setting that the master cannot follow is refused here, by name.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticdl.api import callbacks as ours
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.storage_kinds import is_remote

VAL = "val_"
LOSS = "loss"


@dataclass(slots=True)
class Rules:
    """The rules of all callbacks of a module.

    Attributes:
        stopping: One per EarlyStopping: metric, maximize, min_delta, patience, baseline, start_from.
        saving: One per ModelCheckpoint: path, metric (empty: always save), maximize, min_delta, threshold, every_steps.
        max_steps: Limit on training steps; 0: no limit.
        calls_epoch_end: Some callback overrides that hook.
        export_paths: One per SavedModelExporter.
        stops_at_nan: There is a TerminateOnNaN.
    """

    stopping: list[dict[str, Any]] = field(default_factory=list)
    saving: list[dict[str, Any]] = field(default_factory=list)
    max_steps: int = 0
    calls_epoch_end: bool = False
    export_paths: list[str] = field(default_factory=list)
    stops_at_nan: bool = False

    @property
    def watches(self) -> str:
        """The rules that need evaluations, for messages; empty: no rule needs them."""
        if self.stopping:
            return "EarlyStopping"
        return "ModelCheckpoint(save_best_only=True)" if any(rule["metric"] for rule in self.saving) else ""

    def can_name(self, path: str) -> bool:
        """Return whether the path of a ModelCheckpoint, with its fields filled in, can be this path."""
        return any(_filled_in(rule["path"]).fullmatch(path) for rule in self.saving)

    def to_json(self) -> str:
        """Return the rules as JSON for the master; empty if there are none."""
        rules = {
            "stopping": self.stopping,
            "saving": self.saving,
            "max_steps": self.max_steps,
            "calls_epoch_end": self.calls_epoch_end,
        }
        return json.dumps(rules) if any(rules.values()) else ""


def _filled_in(pattern: str) -> re.Pattern[str]:
    parts = string.Formatter().parse(pattern)
    return re.compile("".join(re.escape(text) + ("" if name is None else "[^/]*") for text, name, _, _ in parts))


class RuleMaker:
    """Collects the rules of callbacks, added one by one, in `rules`."""

    def __init__(self, path: str, metrics: Mapping[str, bool | None]) -> None:
        """
        Args:
            path: Path of the user's module, for messages.
            metrics: Maps the name of each evaluation metric to whether higher is better; None: unknown.
        """
        self.rules = Rules()
        self._path = path
        self._metrics = metrics

    def add(self, callback: Any) -> None:
        """Add one of `elasticdl.api.callbacks`; ignore any other callback.

        Raises:
            ModelDefinitionError: The callback has a setting that the master cannot follow.
        """
        match callback:
            case ours.EarlyStopping():
                self.add_early_stopping(callback)
            case ours.ModelCheckpoint():
                self.add_model_checkpoint(callback, callback.initial_value_threshold)
            case ours.MaxStepsStopping():
                self._add_max_steps(callback.max_steps)
            case ours.SavedModelExporter():
                self.rules.export_paths.append(callback.path)
            case ours.TerminateOnNaN():
                self.rules.stops_at_nan = True

    def add_early_stopping(self, callback: Any) -> None:
        """Add an EarlyStopping, Keras's or ours.

        Raises:
            ModelDefinitionError: The callback has a setting that the master cannot follow.
        """
        metric, maximize = self._monitored(callback)
        patience, start = int(callback.patience), int(callback.start_from_epoch)
        self.rules.stopping.append(
            {
                "metric": metric,
                "maximize": maximize,
                "min_delta": self._number("min_delta", abs(callback.min_delta)),
                "patience": patience,
                "baseline": None if callback.baseline is None else self._number("baseline", callback.baseline),
                "start_from": start,
            }
        )

    def add_model_checkpoint(self, callback: Any, threshold: float | None) -> None:
        """Add a ModelCheckpoint, Keras's or ours.

        Raises:
            ModelDefinitionError: The callback has a setting that the master cannot follow.
        """
        every = 0 if callback.save_freq == "epoch" else callback.save_freq
        if not isinstance(every, int) or every < 0 or (every == 0 and callback.save_freq != "epoch"):
            raise self._refused(
                f"ModelCheckpoint(save_freq={callback.save_freq!r})",
                "that is no time to save",
                'Give "epoch" or a number of steps.',
            )
        if callback.save_best_only and every:
            raise self._refused(
                f"ModelCheckpoint(save_best_only=True, save_freq={every})",
                "the best model is known after evaluations alone",
                "Leave save_freq out; --evaluation_steps says when there are evaluations.",
            )
        metric, maximize = self._monitored(callback) if callback.save_best_only else ("", False)
        self._check_path(callback.filepath)
        self.rules.saving.append(
            {
                "path": callback.filepath,
                "metric": metric,
                "maximize": maximize,
                "min_delta": 0.0,
                "threshold": None if threshold is None else self._number("initial_value_threshold", threshold),
                "every_steps": every,
            }
        )

    def _add_max_steps(self, max_steps: Any) -> None:
        if not isinstance(max_steps, int) or max_steps < 1:
            raise self._refused(f"MaxStepsStopping({max_steps!r})", "that is no number of steps", "Give 1 or more.")
        known = self.rules.max_steps
        self.rules.max_steps = min(known, max_steps) if known else max_steps

    def _monitored(self, callback: Any) -> tuple[str, bool]:
        """Return the metric that a callback monitors, and whether higher is better."""
        who, monitor = type(callback).__name__, callback.monitor
        if monitor == LOSS:
            raise self._refused(
                f"{who}(monitor='loss')",
                "no process knows the training loss as a whole",
                "Monitor val_loss, the loss on --validation_data.",
            )
        name = monitor.removeprefix(VAL)
        known = next((metric for metric in self._metrics if name == metric or name.startswith(f"{metric}_")), None)
        if known is None:
            names = ", ".join(VAL + metric for metric in self._metrics) or "none"
            raise self._refused(
                f"{who}(monitor={monitor!r})", "there is no such metric", f"Monitor one of eval_metrics_fn(): {names}."
            )
        if callback.mode in ("min", "max"):
            return name, callback.mode == "max"
        maximize = self._metrics[known] if name == known else None
        if maximize is None:
            maximize = False if LOSS in name else True if "acc" in name or "auc" in name else None
        if maximize is None:
            raise self._refused(
                f"{who}(monitor={monitor!r})", "it is unknown whether more is better", 'Give mode="max" or mode="min".'
            )
        return name, maximize

    def _check_path(self, path: str) -> None:
        logs = {LOSS: 0.0, **{VAL + name: 0.0 for name in self._metrics}}
        try:
            path.format(epoch=1, step=1, batch=1, **logs)
        except (LookupError, ValueError, AttributeError) as error:
            raise self._refused(
                f"ModelCheckpoint({path!r})",
                f"{error!r}",
                f"A path may have in braces: epoch, step, {', '.join(logs)}.",
            ) from error

    def _number(self, name: str, value: Any) -> float:
        if not math.isfinite(value):
            raise self._refused(f"{name}={value!r}", "that is no number", "Give a finite number.")
        return float(value)

    def _refused(self, what: str, why: str, hint: str) -> ModelDefinitionError:
        return ModelDefinitionError(f"{self._path}: {what}: {why}.", hint)


def check_job(path: str, rules: Rules, has_validation_data: bool, skips_nan: bool, checkpoint_dir: str) -> None:
    """Refuse callbacks that have no effect with the flags of this job.

    Raises:
        ModelDefinitionError: The message names the callback.
    """
    if rules.watches and not has_validation_data:
        raise ModelDefinitionError(
            f"{path}: {rules.watches} needs evaluations, and there is nothing to evaluate on.",
            "Give --validation_data, or leave the callback out.",
        )
    if rules.stops_at_nan and skips_nan:
        raise ModelDefinitionError(
            f"{path}: TerminateOnNaN ends training, and --nan_policy=skip continues it.", "Leave one of them out."
        )
    relative = next((path for path in _paths(rules) if not (path.startswith("/") or is_remote(path))), None)
    if relative is not None and not checkpoint_dir:
        raise ModelDefinitionError(
            f"{path}: a callback writes to {relative}, which is relative to --checkpoint_dir, and there is none.",
            "Give an absolute path on a volume, a URL of storage, or --checkpoint_dir.",
        )


def _paths(rules: Rules) -> Iterable[str]:
    return [*(rule["path"] for rule in rules.saving), *rules.export_paths]
