"""Stopping: when a metric has stopped improving, and when a model is the best one yet.

Each evaluation counts as an epoch does in Keras.  Nothing here knows where metrics come from or what is done then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Watched:
    """A metric, and what counts as an improvement of it."""

    metric: str
    maximize: bool
    min_delta: float = 0.0  # a change has to be larger; not below 0

    def improves(self, value: float, reference: float | None) -> bool:
        """Whether `value` is better than `reference`, of which there may be none; a NaN never is."""
        if reference is None:
            return value == value
        if self.maximize:
            return value - self.min_delta > reference
        return value + self.min_delta < reference

    def value(self, results: Mapping[str, float], who: str) -> float:
        """The metric among the results of an evaluation.

        Raises:
            ValueError: it is not among them.
        """
        if self.metric not in results:
            known = ", ".join(results) or "none"
            raise ValueError(f"{who} monitors {self.metric!r}, and the evaluation's metrics are: {known}")
        return results[self.metric]


@dataclass(frozen=True, slots=True)
class StopRule:
    """EarlyStopping, as Keras has it.

    Attributes:
        patience: so many evaluations without an improvement end training.
        baseline: while it is not reached, improvements do not begin the patience anew.
        start_from: evaluations that do not count.
    """

    watched: Watched
    patience: int = 0
    baseline: float | None = None
    start_from: int = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StopRule:
        return cls(_watched(plain), plain["patience"], plain["baseline"], plain["start_from"])


class EarlyStopping:
    """What has become of a `StopRule`."""

    def __init__(self, rule: StopRule) -> None:
        self._rule = rule
        self._best: float | None = None
        self._wait = 0
        self._num_evaluations = 0

    def evaluated(self, results: Mapping[str, float]) -> str:
        """Why training is to stop after this evaluation; empty: it goes on.

        Raises:
            ValueError: the metric is not among the results.
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
    """ModelCheckpoint, as Keras has it.

    Attributes:
        path: may have `{epoch}`, `{step}` and metrics in it.
        watched: None: every time; else only after an evaluation that is better than all before.
        threshold: the value to be bettered by the first.
        every_steps: model versions between two; 0: at the end of epochs, or with `watched` after evaluations.
    """

    path: str
    watched: Watched | None = None
    threshold: float | None = None
    every_steps: int = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SaveRule:
        watched = _watched(plain) if plain["metric"] else None
        return cls(plain["path"], watched, plain["threshold"], plain["every_steps"])


class Saving:
    """What has become of a `SaveRule`."""

    def __init__(self, rule: SaveRule) -> None:
        self.rule = rule
        self._best = rule.threshold
        self._last_step = 0

    def evaluated(self, results: Mapping[str, float]) -> bool:
        """Whether the model is to be saved after this evaluation.

        Raises:
            ValueError: the metric is not among the results.
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
        """Whether the model is to be saved now, whatever it is worth."""
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


def _watched(plain: Mapping[str, Any]) -> Watched:
    return Watched(plain["metric"], plain["maximize"], plain["min_delta"])
