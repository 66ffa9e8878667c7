"""The user's learning-rate scheduler: by epoch, as Keras has it, or by model version.

Rates are functions of the module alone, so that every worker finds the same, in whatever order it works on epochs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from elasticdl.api.tensorflow import LearningRateScheduler as ByVersion
from elasticdl.frameworks.user_code import user_call
from elasticdl_client.errors import ModelDefinitionError

_ZERO = 1e-30  # on the wire 0 stands for the optimizer's own rate
_ByEpoch = keras.callbacks.LearningRateScheduler


class LearningRates:
    """The rates of the scheduler among the callbacks, if there is one."""

    def __init__(self, path: str, callbacks: Sequence[Any], optimizer: Callable[[], Any]) -> None:
        """
        Args:
            path: of the user's module, for messages.
            optimizer: the user's, asked only if there is a scheduler.

        Raises:
            ModelDefinitionError: there are two schedulers, or the optimizer has a schedule of its own.
        """
        found = [callback for callback in callbacks if isinstance(callback, ByVersion | _ByEpoch)]
        if len(found) > 1:
            raise ModelDefinitionError(
                f"{path}: callbacks() returned {len(found)} learning-rate schedulers.", "Return one."
            )
        self._path = path
        self._scheduler = found[0] if found else None
        self._by_epoch: list[float] = []
        if found:
            self._own = _own_rate(path, optimizer())
            self._takes_rate = isinstance(found[0], _ByEpoch) and _takes_two(found[0].schedule)

    def at(self, epoch: int, version: int) -> float | None:
        """See `Framework.learning_rate`.

        Raises:
            ModelDefinitionError: the schedule raises, or its value is no learning rate.
        """
        if self._scheduler is None:
            return None
        if isinstance(self._scheduler, ByVersion):
            return self._call(version)
        while len(self._by_epoch) <= epoch:
            before = self._by_epoch[-1] if self._by_epoch else self._own
            number = len(self._by_epoch)
            self._by_epoch.append(self._call(number, before) if self._takes_rate else self._call(number))
        return self._by_epoch[epoch]

    def _call(self, *arguments: Any) -> float:
        assert self._scheduler is not None
        shown = ", ".join(map(str, arguments))
        what = f"{self._path}: the schedule of {type(self._scheduler).__name__}, called with ({shown}),"
        schedule = self._scheduler.schedule
        value = user_call(lambda: float(schedule(*arguments)), what)
        if not (math.isfinite(value) and value >= 0):
            raise ModelDefinitionError(f"{what} returned {value}.", "A learning rate is a finite number, not below 0.")
        return value or _ZERO


def own_rate_at(optimizer: Any, version: int) -> float | None:
    """Return an optimizer's own rate: a constant, or its schedule's at a model version."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(inner, "_learning_rate", None)
    if rate is None:
        return None
    return float(rate(version) if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else rate)


def _own_rate(path: str, optimizer: Any) -> float:
    rate = getattr(optimizer, "_learning_rate", None)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise ModelDefinitionError(
            f"{path}: callbacks() has a learning-rate scheduler, and the optimizer a {type(rate).__name__}.",
            "Use one of them: each sets the learning rate.",
        )
    return 0.0 if optimizer is None else float(optimizer.learning_rate)


def _takes_two(schedule: Callable[..., Any]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.0)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True
