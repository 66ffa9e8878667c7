"""Evaluation during training: all members evaluate the model between the same two steps, each on its own records."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from elasticdl.activities import Activity, ActivityClock
from elasticdl.api.pytorch.state import RegisteredState
from elasticdl.worker.allreduce.replica import Membership

_log = logging.getLogger("elasticdl.api")


class EvaluatedController(Protocol):
    """The part of the controller used for evaluation."""

    state: RegisteredState
    rank: int
    size: int

    @property
    def group(self) -> Membership: ...

    def tell_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics to the master, if there is one."""
        ...


class ScriptEvaluation:
    """A script's evaluation function: runs it when it is due, and averages its results over all members."""

    def __init__(self, function: Callable[[range], Mapping[str, float]], dataset_size: int, steps: int) -> None:
        """
        Args:
            function: Maps numbers of records to means over them, by name; called without gradients and with the modules
                in evaluation mode.
            dataset_size: Number of validation records; each member evaluates a contiguous range.
            steps: Minibatches between two evaluations; 0: after every epoch.
        """
        self._function = function
        self._dataset_size = dataset_size
        self._steps = steps

    def run_if_due(
        self, evaluated: int, num_minibatches: int, per_epoch: int, trainer: EvaluatedController, clock: ActivityClock
    ) -> int:
        """Evaluate the model if an evaluation is due.

        Args:
            evaluated: The previous return value.
            num_minibatches: Minibatches in the model.
            per_epoch: Minibatches per epoch.
            trainer: The controller.
            clock: Clock of this process; it counts the time of evaluating, and of waiting for other members.

        Returns:
            The number of evaluation periods that are over.

        Raises:
            GroupEnded: The group is broken; the next group repeats the evaluation.
        """
        period = self._steps or per_epoch
        over = num_minibatches // period if period else 0
        if over > evaluated:
            results = self._over_all(trainer, clock)
            if trainer.rank == 0:
                shown = {name: round(value, 6) for name, value in results.items()}
                _log.info("Evaluation metrics[step=%d]: %s", num_minibatches, shown)
                trainer.tell_metrics(num_minibatches, results)
        return max(over, evaluated)

    def _over_all(self, trainer: EvaluatedController, clock: ActivityClock) -> dict[str, float]:
        rank, size, count = trainer.rank, trainer.size, self._dataset_size
        piece = range(rank * count // size, (rank + 1) * count // size)
        with clock.during(Activity.EVALUATE):
            found = self._evaluated(trainer, piece) if piece else {}
        sums = {name: float(value) * len(piece) for name, value in found.items()}
        data = json.dumps(sums).encode()
        with clock.during(Activity.COLLECTIVE):
            told = [json.loads(trainer.group.share(data if rank == k else None, k)) for k in range(size)]
        total: dict[str, float] = {}
        for one in told:
            for name, value in one.items():
                total[name] = total.get(name, 0.0) + value
        return {name: value / count for name, value in total.items()}

    def _evaluated(self, trainer: EvaluatedController, piece: range) -> Mapping[str, float]:
        modules = trainer.state.modules
        modes = [(module, module.training) for top in modules for module in top.modules()]
        random_state = torch.get_rng_state()
        try:
            for module in modules:
                module.eval()
            with torch.no_grad():
                return self._function(piece)
        finally:
            torch.set_rng_state(random_state)
            for module, mode in modes:
                module.training = mode
