"""PlannedEvaluation: an evaluate job, whose one pass over the data is its plan.

The states of the plan's tasks are added up here as they come, and are written down together with what is done, so that
a restarted master continues where the last one was.  Then one round of nothing but the task of the results follows.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from elasticdl.master.core.evaluation import EvaluationRound, Evaluations, EvaluationSchedule, merge
from elasticdl.master.core.values import Array, MetricArrays

MAX_SAVED_BYTES = 128 << 10  # of all states: a journal has little room


class PlannedEvaluation(Evaluations):
    """See `Evaluations`."""

    def __init__(self) -> None:
        super().__init__(EvaluationSchedule(), ())
        self._states: dict[str, MetricArrays] = {}

    @property
    def is_possible(self) -> bool:
        return True

    def add(self, states: Iterable[MetricArrays]) -> None:
        """Takes over the states of a task of the plan.

        Raises:
            ValueError: states of one metric do not go together; none is taken.
        """
        merged = dict(self._states)
        for state in states:
            known = merged.get(state.name)
            merged[state.name] = state if known is None else merge(known, state)
        self._states = merged

    def begin_if_due(self, step: int, all_trained: bool) -> EvaluationRound | None:
        """Once all is done: the round that computes the results."""
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
    """Of JSON's types only."""
    arrays = [[list(array.shape), base64.b64encode(array.data).decode()] for array in state.arrays]
    return [state.name, arrays, state.additive, state.num_states]


def _state(name: str, arrays: list[Any], additive: bool, num_states: int) -> MetricArrays:
    decoded = tuple(Array(tuple(shape), base64.b64decode(data)) for shape, data in arrays)
    return MetricArrays(name, decoded, additive, num_states)
