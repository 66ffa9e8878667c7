"""Evaluations: rounds over the validation data, their merged metric states and results.

A round hands out one task per slice of the validation data and merges the returned states without interpreting them;
then one worker computes the results from the merged states.  The caller decides when a round is due.
"""

from __future__ import annotations

import base64
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl.master.core.values import Array, MetricArrays
from elasticdl.protocol import Shard

MAX_SAVED_BYTES = 128 << 10  # of all states: the size of a journal is limited
NO_RECORDS = Shard("", 0, 0)


def _floats(data: bytes) -> array[float]:
    values = array("d")
    values.frombytes(data)
    return values


def _add(left: Array, right: Array) -> Array:
    if left.shape != right.shape or len(left.data) != len(right.data):
        raise ValueError(f"metric states of shapes {left.shape} and {right.shape} cannot be added")
    total = array("d", (a + b for a, b in zip(_floats(left.data), _floats(right.data), strict=True)))
    return Array(left.shape, total.tobytes())


def merge(left: MetricArrays, right: MetricArrays) -> MetricArrays:
    """Merge two states of one metric.

    Raises:
        ValueError: The states do not belong to the same metric.
    """
    if left.additive != right.additive or (left.additive and len(left.arrays) != len(right.arrays)):
        raise ValueError(f"states of the metric {left.name!r} differ in kind")
    if not left.additive:
        return MetricArrays(left.name, left.arrays + right.arrays, False, left.num_states + right.num_states)
    return MetricArrays(left.name, tuple(_add(a, b) for a, b in zip(left.arrays, right.arrays, strict=True)))


def _joined(known: Mapping[str, MetricArrays], states: Iterable[MetricArrays]) -> dict[str, MetricArrays]:
    """Return the states of metrics by name, with more states merged in; raises like `merge`."""
    joined = dict(known)
    for state in states:
        joined[state.name] = merge(joined[state.name], state) if state.name in joined else state
    return joined


class EvaluationRound:
    """One evaluation: its tasks are todo, leased or done; the task after the last one computes the results."""

    def __init__(
        self, number: int, step: int, is_final: bool, slices: Sequence[Shard], merged: Iterable[MetricArrays] = ()
    ) -> None:
        """Make a round of evaluation.

        Args:
            merged: For a round without slices: all states.
        """
        self.number = number
        self.step = step
        self.is_final = is_final
        self._slices = slices
        self.todo = deque(range(len(slices)))
        self.leased: set[int] = set()
        self.num_done = 0
        self.num_records = 0  # of done tasks
        self.num_samples = 0  # that `feed` has made of these records
        self.made_by = ""  # operations of `feed` that change the number, for the log
        self._states: dict[str, MetricArrays] = {state.name: state for state in merged}
        if self._states:
            self.todo.append(self.result_task)

    @property
    def result_task(self) -> int:
        return len(self._slices)

    def take(self, allowed: Callable[[int, int], bool]) -> int | None:
        """Take and return the next task that is `allowed(number of the round, task)`; None if there is none."""
        task = next((task for task in self.todo if allowed(self.number, task)), None)
        if task is not None:
            self.take_this(task)
        return task

    def take_this(self, task: int) -> None:
        self.todo.remove(task)
        self.leased.add(task)

    def give_back(self, task: int) -> None:
        self.leased.remove(task)
        self.todo.appendleft(task)

    def slice(self, task: int) -> Shard:
        return NO_RECORDS if task == self.result_task else self._slices[task]

    def merged(self, task: int) -> tuple[MetricArrays, ...]:
        """Return the metric states for the lease of a task."""
        return tuple(self._states.values()) if task == self.result_task else ()

    def finish(self, task: int, states: Iterable[MetricArrays]) -> None:
        """Take over the states of a leased task; after the last one the results may be computed.

        Raises:
            ValueError: States of one metric cannot be merged.
        """
        self._states = _joined(self._states, states)
        self.leased.remove(task)
        self.num_done += 1
        if self.num_done == len(self._slices):
            self.todo.append(self.result_task)

    def count(self, num_records: int, surplus: int, made_by: str) -> None:
        """Count the records of a done task; it has `surplus` samples more than records."""
        self.num_records += num_records
        self.num_samples += num_records + max(surplus, -num_records)
        self.made_by = self.made_by or made_by

    def validate(self) -> None:
        assert not self.leased & set(self.todo)
        expected = len(self._slices) + (self.num_done == len(self._slices))
        assert len(self.todo) + len(self.leased) + self.num_done == expected


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """When a round is due during training; any of the conditions suffices.

    Attributes:
        every_steps: Model versions between two rounds; 0 means never.
        every_seconds: Seconds between two rounds; 0 means never.
        start_delay: Seconds of training before the first round that is due by time.
        each_epoch: A round is due when an epoch is covered.
    """

    every_steps: int = 0
    every_seconds: float = 0.0
    start_delay: float = 0.0
    each_epoch: bool = False


class Evaluations:
    """The round in progress, if any, and the results of earlier ones.

    Attributes:
        tried_by: Id of the worker that tries the metrics before the training; None before the first request and after
            the trial.
    """

    def __init__(self, schedule: EvaluationSchedule, slices: Sequence[Shard]) -> None:
        self._schedule = schedule
        self._slices = slices
        self.current: EvaluationRound | None = None
        self.tried_by: int | None = None
        self._has_tried = False  # in this generation of the master
        self.has_final = False
        self.has_lost_states = False  # after a restart: the states of done tasks are lost
        self.results: dict[str, float] = {}
        self.results_step = 0
        self._num_rounds = 0
        self._last_step = 0
        self._clock = 0.0
        self._trains_since: float | None = None
        self._last_at: float | None = None
        self._num_ended = 0  # number of ended epochs
        self._last_ended = self._ended_before = 0  # ended epochs at the newest round, and at the one before
        self._quarantine: dict[int, frozenset[int]] = {}  # by task, for this and later rounds

    @property
    def is_possible(self) -> bool:
        return bool(self._slices)

    @property
    def is_over(self) -> bool:
        """Whether nothing remains to be evaluated once all is trained."""
        return self.current is None and (self.has_final or not self.is_possible)

    def sample(self, worker_id: int, staying: Container[int], num_records: int) -> Shard:
        """Let a worker try the metrics, unless another one that stays does.

        Args:
            staying: Ids of the workers that stay.

        Returns:
            The first records of the validation data; an empty shard if there is nothing to try.
        """
        if not self._slices or self._has_tried or (self.tried_by != worker_id and self.tried_by in staying):
            return NO_RECORDS
        self.tried_by = worker_id
        return self._slices[0].first(num_records)

    def end_trial(self, worker_id: int) -> None:
        """Note that a worker requests other work: if it has tried the metrics, they can be evaluated."""
        if worker_id == self.tried_by:
            self.tried_by, self._has_tried = None, True

    def pass_time(self, clock: float, step: int, num_ended: int) -> None:
        """Note the present model version and number of covered epochs."""
        self._clock, self._num_ended = clock, num_ended
        if step > 0 and self._trains_since is None:
            self._trains_since = clock

    def _is_due(self, step: int) -> bool:
        schedule = self._schedule
        if schedule.each_epoch and self._num_ended > self._last_ended:
            return True
        if schedule.every_steps > 0 and step // schedule.every_steps > self._last_step // schedule.every_steps:
            return True
        if schedule.every_seconds <= 0 or step <= self._last_step or self._trains_since is None:
            return False
        if self._last_at is None:
            return self._clock - self._trains_since >= schedule.start_delay
        return self._clock - self._last_at >= schedule.every_seconds

    def begin_if_due(self, step: int, all_trained: bool) -> EvaluationRound | None:
        """Begin a round if none runs and one is due by the schedule, or the final one."""
        if not self.is_possible or self.current is not None or self.has_final:
            return None
        if not all_trained and not self._is_due(step):
            return None
        self._ended_before = self._last_ended
        self._last_step, self._last_at, self._last_ended = step, self._clock, self._num_ended
        self._num_rounds += 1
        self.current = EvaluationRound(self._num_rounds, step, all_trained, self._slices)
        return self.current

    def finish(self, results: Mapping[str, float]) -> EvaluationRound:
        """Finish the round in progress with its results; return it."""
        current = self.current
        assert current is not None
        self.results, self.results_step = dict(results), current.step
        self.has_final = current.is_final
        self.current = None
        return current

    def quarantine(self, task: int, records: Iterable[int]) -> None:
        """Quarantine records of a task in this round and all later ones."""
        self._quarantine[task] = self.excluded(task).union(records)

    def excluded(self, task: int) -> frozenset[int]:
        """Return the quarantined records of a task."""
        return self._quarantine.get(task, frozenset())

    def quarantined(self) -> list[tuple[str, int]]:
        """Return (shard, record) of all quarantined records."""
        return [(self._slices[task].name, r) for task in sorted(self._quarantine) for r in sorted(self.excluded(task))]

    def record(self, step: int, results: Mapping[str, float]) -> None:
        """Record the results of an evaluation outside of the rounds."""
        self.results, self.results_step = dict(results), step

    def withdraw(self) -> None:
        """Withdraw the round in progress, because the model has lost something.

        The final evaluation, and that of an epoch's end, wait until the model is complete again; others begin anew.
        """
        self.has_final = False
        if self.current is not None:
            is_of_epoch = self._schedule.each_epoch and self._ended_before < self._last_ended
            waits = self.current.is_final or is_of_epoch
            self._num_rounds += 1
            step = self.current.step
            self.current = None if waits else EvaluationRound(self._num_rounds, step, False, self._slices)
            self._last_ended = self._ended_before  # due again once the epoch is covered again

    def snapshot(self) -> dict[str, Any]:
        """Return the state for the journal, without a round in progress: it begins anew in the next generation."""
        current = self.current
        return {
            "current": None if current is None else [current.number, current.step, current.is_final],
            "has_final": self.has_final,
            "results": self.results,
            "results_step": self.results_step,
            "num_rounds": self._num_rounds,
            "last_step": self._last_step,
            "last_ended": self._last_ended,
            "ended_before": self._ended_before,
            "quarantine": [[task, sorted(records)] for task, records in self._quarantine.items()],
            "ages": [None if since is None else self._clock - since for since in (self._trains_since, self._last_at)],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        if saved["current"] is not None:
            number, step, is_final = saved["current"]
            self.current = EvaluationRound(number, step, is_final, self._slices)
        self.has_final = saved["has_final"]
        self.results, self.results_step = dict(saved["results"]), saved["results_step"]
        self._num_rounds, self._last_step = saved["num_rounds"], saved["last_step"]
        self._last_ended = saved.get("last_ended", 0)
        self._ended_before = saved.get("ended_before", self._last_ended)
        self._quarantine = {task: frozenset(records) for task, records in saved.get("quarantine", ())}
        ages = saved.get("ages", (None, None))
        self._trains_since, self._last_at = (None if age is None else self._clock - age for age in ages)


class PlannedEvaluation(Evaluations):
    """An evaluate job, whose plan is one pass over the data.

    The states of the plan's tasks are merged here as they arrive, and are journalled together with the done tasks, so
    that a restarted master continues where the last one was.  One round that consists only of the task of the results
    follows.
    """

    def __init__(self) -> None:
        super().__init__(EvaluationSchedule(), ())
        self._states: dict[str, MetricArrays] = {}

    @property
    def is_possible(self) -> bool:
        return True

    def add(self, states: Iterable[MetricArrays]) -> None:
        """Take over the states of a task of the plan.

        Raises:
            ValueError: States of one metric cannot be merged; none is taken over.
        """
        self._states = _joined(self._states, states)

    def begin_if_due(self, step: int, all_trained: bool) -> EvaluationRound | None:
        """Begin the round that computes the results, once all is done."""
        if not all_trained or self.current is not None or self.has_final:
            return None
        self.current = EvaluationRound(1, step, True, (), self._states.values())
        return self.current

    def snapshot(self) -> dict[str, Any]:
        size = sum(len(array.data) for state in self._states.values() for array in state.arrays)
        is_kept = size <= MAX_SAVED_BYTES or self.has_final
        states = [] if self.has_final or not is_kept else [_plain(state) for state in self._states.values()]
        return {**super().snapshot(), "states": states, "has_lost_states": not is_kept}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.has_lost_states = saved["has_lost_states"]
        if self.has_lost_states:
            return
        super().restore({**saved, "current": None})
        self._states = {name: _state(name, *rest) for name, *rest in saved["states"]}


def _plain(state: MetricArrays) -> list[Any]:
    """Return a state in JSON types."""
    arrays = [[list(array.shape), base64.b64encode(array.data).decode()] for array in state.arrays]
    return [state.name, arrays, state.additive, state.num_states]


def _state(name: str, arrays: list[Any], additive: bool, num_states: int) -> MetricArrays:
    decoded = tuple(Array(tuple(shape), base64.b64decode(data)) for shape, data in arrays)
    return MetricArrays(name, decoded, additive, num_states)
