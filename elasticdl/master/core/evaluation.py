"""Evaluations: rounds over the validation data, their merged metric states and results.

A round hands out one task per slice of the validation data; the states that come back are merged without knowing what
they mean; then one worker computes the numbers from the merged states.  When a round is due is said by the caller.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elasticdl.master.core.values import Array, MetricState, Shard


def _floats(data: bytes) -> array[float]:
    values = array("d")
    values.frombytes(data)
    return values


def _add(left: Array, right: Array) -> Array:
    if left.shape != right.shape or len(left.data) != len(right.data):
        raise ValueError(f"metric states of shapes {left.shape} and {right.shape} cannot be added")
    total = array("d", (a + b for a, b in zip(_floats(left.data), _floats(right.data), strict=True)))
    return Array(left.shape, total.tobytes())


def merge(left: MetricState, right: MetricState) -> MetricState:
    """Two states of one metric as one.

    Raises:
        ValueError: the states do not belong to the same metric.
    """
    if left.additive != right.additive or (left.additive and len(left.arrays) != len(right.arrays)):
        raise ValueError(f"states of the metric {left.name!r} differ in kind")
    if not left.additive:
        return MetricState(left.name, left.arrays + right.arrays, False, left.num_states + right.num_states)
    return MetricState(left.name, tuple(_add(a, b) for a, b in zip(left.arrays, right.arrays, strict=True)))


class Round:
    """One evaluation: its tasks are todo, leased or done; the task after the last one computes the results."""

    def __init__(self, number: int, step: int, is_final: bool, slices: Sequence[Shard]) -> None:
        self.number = number
        self.step = step
        self.is_final = is_final
        self._slices = slices
        self.todo = deque(range(len(slices)))
        self.leased: set[int] = set()
        self.num_done = 0
        self._states: dict[str, MetricState] = {}

    @property
    def result_task(self) -> int:
        return len(self._slices)

    def take(self, allowed: Callable[[int, int], bool]) -> int | None:
        """The next task to be leased that is `allowed(number of the round, task)`."""
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
        return Shard("", 0, 0) if task == self.result_task else self._slices[task]

    def merged(self, task: int) -> tuple[MetricState, ...]:
        """What goes with the lease of a task."""
        return tuple(self._states.values()) if task == self.result_task else ()

    def finish(self, task: int, states: Iterable[MetricState]) -> None:
        """Takes the states of a leased task over; after the last one the results may be computed.

        Raises:
            ValueError: states of one metric do not go together.
        """
        merged = dict(self._states)
        for state in states:
            known = merged.get(state.name)
            merged[state.name] = state if known is None else merge(known, state)
        self._states = merged
        self.leased.remove(task)
        self.num_done += 1
        if self.num_done == len(self._slices):
            self.todo.append(self.result_task)

    def validate(self) -> None:
        assert not self.leased & set(self.todo)
        expected = len(self._slices) + (self.num_done == len(self._slices))
        assert len(self.todo) + len(self.leased) + self.num_done == expected


class Evaluations:
    """The round in progress, if any, and what came of the earlier ones."""

    def __init__(self, every: int, slices: Sequence[Shard]) -> None:
        self._every = every
        self._slices = slices
        self.current: Round | None = None
        self.has_final = False
        self.results: dict[str, float] = {}
        self.results_step = 0
        self._num_rounds = 0
        self._last_step = 0

    @property
    def is_possible(self) -> bool:
        return bool(self._slices)

    @property
    def is_over(self) -> bool:
        """Nothing is left to be evaluated once all is trained."""
        return self.current is None and (self.has_final or not self.is_possible)

    def begin_if_due(self, step: int, all_trained: bool) -> Round | None:
        """Begins a round when there is none and one is due: each `evaluation_steps`, and the final one."""
        if not self.is_possible or self.current is not None or self.has_final:
            return None
        if not all_trained and (self._every <= 0 or step // self._every <= self._last_step // self._every):
            return None
        self._last_step = step
        self._num_rounds += 1
        self.current = Round(self._num_rounds, step, all_trained, self._slices)
        return self.current

    def finish(self, results: Mapping[str, float]) -> Round:
        """The round in progress has its results."""
        current = self.current
        assert current is not None
        self.results, self.results_step = dict(results), current.step
        self.has_final = current.is_final
        self.current = None
        return current

    def withdraw(self) -> None:
        """The model has lost something: the final evaluation must be made again, a periodic one begins anew."""
        self.has_final = False
        if self.current is not None:
            step, final = self.current.step, self.current.is_final
            self._num_rounds += 1
            self.current = None if final else Round(self._num_rounds, step, False, self._slices)

    def snapshot(self) -> dict[str, Any]:
        """States of a round in progress are not kept: it begins anew in the next life."""
        current = self.current
        return {
            "current": None if current is None else [current.number, current.step, current.is_final],
            "has_final": self.has_final,
            "results": self.results,
            "results_step": self.results_step,
            "num_rounds": self._num_rounds,
            "last_step": self._last_step,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        if saved["current"] is not None:
            number, step, is_final = saved["current"]
            self.current = Round(number, step, is_final, self._slices)
        self.has_final = saved["has_final"]
        self.results, self.results_step = dict(saved["results"]), saved["results_step"]
        self._num_rounds, self._last_step = saved["num_rounds"], saved["last_step"]
