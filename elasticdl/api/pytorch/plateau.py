"""Learning rates that follow a metric: all members agree on the metric passed to `ReduceLROnPlateau.step`.

Each member computes its metric from its own part of the data.  A member with a new metric sets a flag in its header
(`StepFlag.METRIC`); then all members exchange their metrics instead of making a step, and pass the mean to their own
schedulers.  The agreed metrics are part of the model's state, so that a member that has missed one gets it from the
others.
"""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable, Mapping
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elasticdl.api.pytorch.alone import MetricGroup
from elasticdl.api.pytorch.state import RegisteredState
from elasticdl.worker.allreduce.step_header import StepFlag
from elasticdl_client.errors import ModelDefinitionError

_KEPT = 8  # newest agreed metrics, for members that have missed them


class AgreedMetrics:
    """The number of agreed metrics, and the newest of them; part of the model's state."""

    def __init__(self) -> None:
        self.count = 0
        self.newest: list[list[float]] = []  # pairs: number of the scheduler, metric

    def add(self, scheduler: int, metric: float) -> None:
        self.count += 1
        self.newest = [*self.newest, [scheduler, metric]][-_KEPT:]

    def since(self, count: int) -> list[list[float]]:
        """Return the metrics after the first `count`, as far as they are kept."""
        return self.newest[-(self.count - count) :] if self.count > count else []

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "newest": self.newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.newest = state.get("count", 0), list(state.get("newest", []))


class PlateauMetrics:
    """Replaces `ReduceLROnPlateau.step` while a script trains in a job.

    Attributes:
        num_records: Records trained in this process since the last agreed metric: the weight of its next metric.
    """

    def __init__(self, state: RegisteredState, agreed: AgreedMetrics, on_metric: Callable[[], bool]) -> None:
        """
        Args:
            state: The registered objects.
            agreed: The agreed metrics, in the model's state.
            on_metric: Called when the script passes a metric, see `ScriptSteps.take_metric`.
        """
        self.num_records = 0
        self._state = state
        self._agreed = agreed
        self._on_metric = on_metric
        self._given: deque[tuple[int, float]] = deque()  # passed by the script, not agreed yet
        self._num_known = agreed.count  # agreed metrics when the given ones were passed
        self._is_unsure = False  # other members may have agreed on more
        self._step: Callable[..., None] = ReduceLROnPlateau.step
        self._is_open = True
        original, take = self._step, self._take

        @functools.wraps(original)
        def step(scheduler: ReduceLROnPlateau, metrics: Any, *arguments: Any, **keywords: Any) -> None:
            if not take(scheduler, metrics):
                original(scheduler, metrics, *arguments, **keywords)

        ReduceLROnPlateau.step = self._taking = step

    @property
    def wish(self) -> StepFlag:
        """The flag for the next header."""
        self._forget_agreed()
        return StepFlag.METRIC if self._given or self._is_unsure else StepFlag.NOTHING

    def entered(self) -> None:
        """Note that a group was entered: some members of the previous one may have missed a metric at its end."""
        self._is_unsure = bool(self._state.plateau_schedulers)

    def close(self) -> None:
        """Let each scheduler follow only the metric of this process from now on."""
        self._is_open = False
        self._given.clear()
        if ReduceLROnPlateau.step is self._taking:  # else it keeps the registered objects alive
            ReduceLROnPlateau.step = self._step

    def drop(self) -> None:
        """Discard the metrics of a dropped step."""
        self._given.clear()

    def agree(self, group: MetricGroup) -> None:
        """Exchange metrics; called by all members if one of their headers has the flag.

        Raises:
            GroupEnded: The group is broken; members without the agreed metric get it in the next group.
        """
        rows = group.gather(self._row())
        self._is_unsure = False
        counts = rows[:, 0].tolist()
        if min(counts) < max(counts):
            self._catch_up(group, counts.index(max(counts)))
            return
        gives, schedulers = rows[:, 1], rows[:, 2]
        if not gives.any():
            return
        scheduler = int(schedulers[np.flatnonzero(gives)[0]])
        chosen = (gives == 1) & (schedulers == scheduler)
        values, weights = np.ascontiguousarray(rows[chosen, 3:]).view(np.float64).T.tolist()
        self._apply(scheduler, _mean(values, weights))

    def _catch_up(self, group: MetricGroup, source: int) -> None:
        """Apply the metrics that other members have agreed on without this one."""
        told = json.dumps(self._agreed.state_dict()).encode() if group.rank == source else None
        theirs = AgreedMetrics()
        theirs.load_state_dict(json.loads(group.share(told, source)))
        for scheduler, metric in theirs.since(self._agreed.count):
            self._apply(int(scheduler), metric)

    def _apply(self, scheduler: int, metric: float) -> None:
        self._step(self._state.plateau_schedulers[scheduler], metric)
        self._agreed.add(scheduler, metric)
        self.num_records = 0
        self._forget_agreed()

    def _forget_agreed(self) -> None:
        """Discard passed metrics already replaced by agreed ones, here or in the state copied from a member."""
        for scheduler, _ in self._agreed.since(self._num_known):
            if self._given and self._given[0][0] == scheduler:
                self._given.popleft()
        self._num_known = self._agreed.count

    def _row(self) -> npt.NDArray[np.int64]:
        """Return [number of agreed metrics, whether one is pending here, its scheduler, the metric, its weight]."""
        scheduler, metric = self._given[0] if self._given else (0, 0.0)
        row = np.array([self._agreed.count, bool(self._given), scheduler, 0, 0], np.int64)
        row[3:].view(np.float64)[:] = metric, self.num_records
        return row

    def _take(self, scheduler: ReduceLROnPlateau, metric: Any) -> bool:
        """Take a metric; return whether the scheduler is stepped with the agreed one, now or before the next step."""
        if not self._is_open or not self._state.may_hold(scheduler.optimizer):
            return False
        schedulers = self._state.plateau_schedulers
        number = next((k for k, known in enumerate(schedulers) if known is scheduler), -1)
        if number < 0:
            raise ModelDefinitionError(
                "ReduceLROnPlateau is not registered: each worker would lower the rate by a metric of its own, and a "
                "worker that joins would begin with another rate.",
                "Give it to create_elastic_controller: state=[model, optimizer, scheduler].",
            )
        self._forget_agreed()
        self._given.append((number, float(metric)))
        if self._on_metric():
            return True
        self._given.pop()
        return False


def _mean(values: list[float], weights: list[float]) -> float:
    """Return the weighted mean; for equal numbers it is exactly this number."""
    if len(set(values)) == 1:
        return values[0]
    weights = weights if any(weights) else [1.0] * len(weights)
    return fsum(value * weight for value, weight in zip(values, weights, strict=True)) / fsum(weights)
