"""Callbacks: the master's decisions for the user's callbacks, by the configuration that a worker has reported.

It decides when training stops, and makes occasions: tasks of one worker during training (save the model, call
`on_epoch_end`), in order, one at a time.  ledger/work.py chooses the worker.

`EarlyStop` decides when a metric has stopped improving, `Saving` when a model is the best so far.  Each evaluation
counts as an epoch does in Keras.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.master.core.values import Occasion


@dataclass(slots=True)
class _Entry:
    """An open occasion; its number is that of its task."""

    number: int
    save_to: str
    epoch: int
    logs: dict[str, float]


class Callbacks:
    """State of the user's callbacks; without effect until a worker has reported them."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        """Read the rules of the user's callbacks.

        Args:
            rules: Rules in the format of frameworks/callback_rules.py.

        Raises:
            ValueError: The rules have another format; the message names the key.
        """
        self._stopping = [EarlyStop(StopRule.of(rule)) for rule in _rules(rules, "stopping")]
        self._saving = [Saving(SaveRule.of(rule)) for rule in _rules(rules, "saving")]
        count(rules, "max_steps")  # only checked here: it limits the plan
        self._calls_epoch_end = bool(rules.get("calls_epoch_end"))
        self._open: list[_Entry] = []
        self._is_taken = False  # whether a worker has the first of them
        self._num_occasions = 0
        self._num_ended = 0  # number of ended epochs
        self.has_stopped = False

    @property
    def wants_evaluations(self) -> bool:
        """Whether any callback depends on metrics, or receives them."""
        watches = any(one.rule.watched is not None for one in self._saving)
        return bool(self._stopping) or watches or self._calls_epoch_end

    def may_begin(self, num_begun: int) -> bool:
        """Return whether the next epoch may begin: the model at the end of the last one is no longer needed.

        As in Keras, the model that is saved or handed to a hook at an epoch's end is the one that was evaluated.
        """
        looks = bool(self._stopping) or self._calls_epoch_end or any(not one.rule.every_steps for one in self._saving)
        return not looks or (self._num_ended >= num_begun and not self._open)

    # Decisions ------------------------------------------------------------------------------------------------------

    def evaluated(self, results: Mapping[str, float], step: int, epoch: int, loss: float | None) -> str:
        """Handle the results of an evaluation.

        Args:
            epoch: Number of the newest epoch that has begun, from 1.

        Returns:
            Why training stops; empty if it continues.

        Raises:
            ValueError: A monitored metric does not exist, or a path cannot be made.
        """
        for saving in self._saving:
            if saving.evaluated(results):
                self._save(saving, step, epoch, _logs(results, loss))
        reasons = [reason for one in self._stopping if (reason := one.evaluated(results))]
        if not reasons or self.has_stopped:
            return ""
        self.has_stopped = True
        return reasons[0]

    def advance(self, step: int, num_ended: int, results: Mapping[str, float], loss: float | None) -> bool:
        """Handle progress of the training.

        Args:
            num_ended: Number of epochs that are committed and covered.

        Returns:
            Whether there is a new occasion.

        Raises:
            ValueError: A path cannot be made.
        """
        before, logs = self._num_occasions, _logs(results, loss)
        for epoch in range(self._num_ended, num_ended):
            if self._calls_epoch_end:
                self._add("", epoch, logs)
        has_ended = num_ended > self._num_ended
        self._num_ended = max(num_ended, self._num_ended)
        for saving in self._saving:
            if saving.is_due(step, has_ended):
                self._save(saving, step, max(1, num_ended), logs)
        return self._num_occasions > before

    def _save(self, saving: Saving, step: int, epoch: int, logs: Mapping[str, float]) -> None:
        pattern = saving.rule.path
        try:
            path = pattern.format(epoch=epoch, step=step, batch=step, **logs)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(f"ModelCheckpoint cannot make a name of {pattern!r}: {error!r}") from error
        for entry in self._open[int(self._is_taken) :]:
            if entry.save_to == path:
                self._open.remove(entry)  # the newer one would overwrite its file
        self._add(path, epoch - 1, logs)

    def _add(self, save_to: str, epoch: int, logs: Mapping[str, float]) -> None:
        self._open.append(_Entry(self._num_occasions, save_to, epoch, dict(logs)))
        self._num_occasions += 1

    # Occasions ------------------------------------------------------------------------------------------------------

    @property
    def all_done(self) -> bool:
        """Whether no occasion is open."""
        return not self._open

    @property
    def taken(self) -> int | None:
        """Number of the occasion that a worker has; None if none has any."""
        return self._open[0].number if self._is_taken else None

    def next(self, num_covered: int) -> int | None:
        """Return the next occasion to take; None while the one before is taken, or if there is none.

        Args:
            num_covered: Number of epochs that the model contains now; an epoch's end waits while its epoch is
                incomplete again after a loss of the model.
        """
        if not self._open or self._is_taken:
            return None
        first = self._open[0]
        return first.number if first.save_to or first.epoch < num_covered else None

    def take(self, number: int) -> bool:
        """Take an occasion.

        Returns:
            Whether it was the first one and not taken.
        """
        if not self._open or self._is_taken or self._open[0].number != number:
            return False
        self._is_taken = True
        return True

    def occasion(self) -> Occasion:
        """Return the task of the first occasion."""
        first = self._open[0]
        return Occasion(first.save_to, first.epoch, tuple(sorted(first.logs.items())))

    def give_back(self) -> None:
        self._is_taken = False

    def finish(self) -> str:
        """Finish the taken occasion; return where the model was saved, if it was."""
        self._is_taken = False
        return self._open.pop(0).save_to

    # The journal ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "stopping": [one.snapshot() for one in self._stopping],
            "saving": [one.snapshot() for one in self._saving],
            "open": [[one.number, one.save_to, one.epoch, one.logs] for one in self._open],
            "num_occasions": self._num_occasions,
            "num_ended": self._num_ended,
            "has_stopped": self.has_stopped,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        for stopping, state in zip(self._stopping, saved["stopping"], strict=True):
            stopping.restore(state)
        for saving, state in zip(self._saving, saved["saving"], strict=True):
            saving.restore(state)
        self._open = [_Entry(*entry) for entry in saved["open"]]
        self._num_occasions, self._num_ended = saved["num_occasions"], saved["num_ended"]
        self.has_stopped = saved["has_stopped"]


def _rules(rules: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = rules.get(name, [])
    if not isinstance(found, list) or not all(isinstance(rule, dict) for rule in found):
        raise ValueError(f"{name} is no list of rules")
    return found


def _logs(results: Mapping[str, float], loss: float | None) -> dict[str, float]:
    """Return the logs of an epoch with Keras' names."""
    logs = {f"val_{name}": value for name, value in results.items()}
    return logs if loss is None else {"loss": loss, **logs}


# Bounds a field of a path: a very long width would exhaust the memory.
_FORMAT = re.compile(r"[^\d{}]{0,4}\d{0,3}[^\d{}]{0,2}\d{0,3}[^\d{}]{0,2}")


@dataclass(frozen=True, slots=True)
class Watched:
    """A metric, and the criterion for its improvement."""

    metric: str
    maximize: bool
    min_delta: float = 0.0  # only a greater change counts; not negative

    def improves(self, value: float, reference: float | None) -> bool:
        """Return whether `value` is better than `reference`, if there is one; NaN never is."""
        if reference is None:
            return value == value
        if self.maximize:
            return value - self.min_delta > reference
        return value + self.min_delta < reference

    def value(self, results: Mapping[str, float], who: str) -> float:
        """Return the metric out of the results of an evaluation.

        Raises:
            ValueError: The results lack it.
        """
        if self.metric not in results:
            known = ", ".join(results) or "none"
            raise ValueError(f"{who} monitors {self.metric!r}, and the evaluation's metrics are: {known}")
        return results[self.metric]


@dataclass(frozen=True, slots=True)
class StopRule:
    """EarlyStopping, with the semantics of Keras.

    Attributes:
        patience: Number of evaluations without an improvement after which training ends.
        baseline: Improvements reset the patience only once this value is reached.
        start_from: Number of first evaluations that do not count.
    """

    watched: Watched
    patience: int = 0
    baseline: float | None = None
    start_from: int = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StopRule:
        """Make a rule of a worker's report.

        Raises:
            ValueError: The report is malformed; the message names the key.
        """
        baseline = plain.get("baseline")
        return cls(
            _watched(plain),
            count(plain, "patience"),
            None if baseline is None else _number(plain, "baseline"),
            count(plain, "start_from"),
        )


class EarlyStop:
    """The state of a `StopRule`."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._best: float | None = None
        self._wait = 0
        self._num_evaluations = 0

    def evaluated(self, results: Mapping[str, float]) -> str:
        """Return why training is to stop after this evaluation; empty if it continues.

        Raises:
            ValueError: The results lack the metric.
        """
        rule, watched = self._rule, self._rule.watched
        value = watched.value(results, "EarlyStopping")
        number = self._num_evaluations
        self._num_evaluations += 1
        if number < rule.start_from:
            return ""
        self._wait += 1
        if watched.improves(value, self._best):
            self._best = value
            if rule.baseline is None or watched.improves(value, rule.baseline):
                self._wait = 0
            return ""
        if self._wait < rule.patience or number == 0:
            return ""
        best = "none" if self._best is None else f"{self._best:.6g}"
        return f"{watched.metric} has not improved for {self._wait} evaluations (now {value:.6g}, best {best})"

    def snapshot(self) -> list[Any]:
        return [self._best, self._wait, self._num_evaluations]

    def restore(self, saved: list[Any]) -> None:
        self._best, self._wait, self._num_evaluations = saved


@dataclass(frozen=True, slots=True)
class SaveRule:
    """ModelCheckpoint, with the semantics of Keras.

    Attributes:
        path: Path template; may contain `{epoch}`, `{step}` and metrics.
        watched: None means to save every time; else only after an evaluation better than all before.
        threshold: The value that the first evaluation must better.
        every_steps: Model versions between two saves; 0: at the end of epochs, or with `watched` after evaluations.
    """

    path: str
    watched: Watched | None = None
    threshold: float | None = None
    every_steps: int = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SaveRule:
        """Make a rule of a worker's report.

        Raises:
            ValueError: The report is malformed; the message names the key.
        """
        watched = _watched(plain) if plain.get("metric") else None
        threshold = plain.get("threshold")
        return cls(
            _pattern(plain),
            watched,
            None if threshold is None else _number(plain, "threshold"),
            count(plain, "every_steps"),
        )


class Saving:
    """The state of a `SaveRule`."""

    def __init__(self, rule: SaveRule) -> None:
        self.rule = rule
        self._best = rule.threshold
        self._last_step = 0

    def evaluated(self, results: Mapping[str, float]) -> bool:
        """Return whether to save the model after this evaluation.

        Raises:
            ValueError: The results lack the metric.
        """
        watched = self.rule.watched
        if watched is None:
            return False
        value = watched.value(results, "ModelCheckpoint")
        if not watched.improves(value, self._best):
            return False
        self._best = value
        return True

    def is_due(self, step: int, has_epoch_ended: bool) -> bool:
        """Return whether to save the model now, regardless of metrics."""
        every = self.rule.every_steps
        if self.rule.watched is not None:
            return False
        if not every:
            return has_epoch_ended
        is_due, self._last_step = step // every > self._last_step // every, step
        return is_due

    def snapshot(self) -> list[Any]:
        return [self._best, self._last_step]

    def restore(self, saved: list[Any]) -> None:
        self._best, self._last_step = saved


def count(plain: Mapping[str, Any], name: str) -> int:
    """Return a non-negative whole number, 0 if it is missing.

    Raises:
        ValueError: It is something else.
    """
    value = plain.get(name, 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {value!r}, no number of 0 or more")
    return value


def _watched(plain: Mapping[str, Any]) -> Watched:
    metric, maximize = plain.get("metric"), plain.get("maximize", False)
    if not isinstance(metric, str) or type(maximize) is not bool:
        raise ValueError(f"metric is {metric!r} and maximize {maximize!r}, no text and no yes or no")
    return Watched(metric, maximize, _number(plain, "min_delta"))


def _number(plain: Mapping[str, Any], name: str) -> float:
    value = plain.get(name, 0.0)
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise ValueError(f"{name} is {value!r}, no finite number")
    return float(value)


def _pattern(plain: Mapping[str, Any]) -> str:
    """Return a path whose fields are plain names with short formats; it is untrusted, and the master fills it in."""
    path = plain.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError(f"path is {path!r}, no path")
    for _, name, form, _ in string.Formatter().parse(path):
        if name is not None and ("." in name or "[" in name or not _FORMAT.fullmatch(form or "")):
            raise ValueError(f"path is {path!r}: {{{name}:{form}}} is no plain field")
    return path
