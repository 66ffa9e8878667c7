"""Callbacks: what the master decides for the user's callbacks, from the configuration that a worker has reported.

When training stops, and the occasions: tasks of one worker during training (saves the model, calls
`on_epoch_end`), in order, one at a time.  ledger/work.py chooses the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticdl.master.core.plan.stopping import EarlyStop, SaveRule, Saving, StopRule, count
from elasticdl.master.core.values import Occasion


@dataclass(slots=True)
class _Entry:
    """An occasion that is not over; its number is that of its task."""

    number: int
    save_to: str
    epoch: int
    logs: dict[str, float]


class Callbacks:
    """Does nothing until a worker has reported the user's."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        """
        Args:
            rules: as frameworks/callback_rules.py writes them.

        Raises:
            ValueError: they are not; names the key.
        """
        self._stopping = [EarlyStop(StopRule.of(rule)) for rule in _rules(rules, "stopping")]
        self._saving = [Saving(SaveRule.of(rule)) for rule in _rules(rules, "saving")]
        count(rules, "max_steps")  # the plan's, which is limited by it
        self._calls_epoch_end = bool(rules.get("calls_epoch_end"))
        self._open: list[_Entry] = []
        self._is_taken = False  # a worker has the first of them
        self._num_occasions = 0
        self._num_ended = 0  # epochs
        self.has_stopped = False

    @property
    def wants_evaluations(self) -> bool:
        """Whether anything depends on metrics, or receives them."""
        watches = any(one.rule.watched is not None for one in self._saving)
        return bool(self._stopping) or watches or self._calls_epoch_end

    # Decisions ------------------------------------------------------------------------------------------------------

    def evaluated(self, results: Mapping[str, float], step: int, epoch: int, loss: float | None) -> str:
        """An evaluation is over.

        Args:
            epoch: the newest that has begun, from 1.

        Returns:
            Why training stops; empty: it continues.

        Raises:
            ValueError: a metric that is monitored does not exist, or a path cannot be made.
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
        """Training has come further.

        Args:
            num_ended: epochs that are committed and covered.

        Returns:
            Whether there is a new occasion.

        Raises:
            ValueError: a path cannot be made.
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
                self._open.remove(entry)  # the newer one would overwrite it
        self._add(path, epoch - 1, logs)

    def _add(self, save_to: str, epoch: int, logs: Mapping[str, float]) -> None:
        self._open.append(_Entry(self._num_occasions, save_to, epoch, dict(logs)))
        self._num_occasions += 1

    # Occasions ------------------------------------------------------------------------------------------------------

    @property
    def all_done(self) -> bool:
        """No occasion is open."""
        return not self._open

    @property
    def taken(self) -> int | None:
        """The occasion that a worker has."""
        return self._open[0].number if self._is_taken else None

    def next(self) -> int | None:
        """The next occasion that may be taken; None while the one before is taken, or if there is none."""
        return self._open[0].number if self._open and not self._is_taken else None

    def take(self, number: int) -> bool:
        """Take an occasion.

        Returns:
            Whether it was the next one.
        """
        if self.next() != number:
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
    """As Keras names them."""
    logs = {f"val_{name}": value for name, value in results.items()}
    return logs if loss is None else {"loss": loss, **logs}
