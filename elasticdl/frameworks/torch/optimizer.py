"""The user's `optimizer(model)`, `lr_scheduler(optimizer)` and `callbacks()`.

A schedule is converted to a function of the step: the scheduler runs on a separate optimizer that never updates
anything, and the rates of the last steps are cached; for an older step the scheduler is restarted.

For callbacks: the rules for the master, and the calls of their hooks.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elasticdl.api import callbacks as ours
from elasticdl.frameworks.callback_rules import RuleMaker, Rules
from elasticdl.frameworks.torch.model import BuiltModule
from elasticdl.frameworks.user_code import made_callbacks, refuse_hooks, user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_SCHEDULED = ("lr", "momentum", "betas")
_INTERVALS = ("step", "epoch")
_NUM_KNOWN = 256  # cached positions; a broken group goes back by fewer

Groups = list[dict[str, Any]]


def make_optimizer(definition: ModelDefinition, built: BuiltModule) -> Any:
    """Call the user's `optimizer`: with the parameters if this is its argument's name, else with the model.

    Raises:
        ModelDefinitionError: The function raises, or its result cannot be used.
    """
    function, path = definition.optimizer, definition.path
    assert function is not None
    names = _arguments(function)
    if not names:
        raise ModelDefinitionError(
            f"{path}: optimizer() takes no argument.", "PyTorch's optimizers hold parameters: define optimizer(model)."
        )
    if "param" in names[0]:
        made = user_call(lambda: function(list(built.parameters.values())), f"{path}: optimizer({names[0]})")
    else:
        made = user_call(lambda: function(built.module), f"{path}: optimizer({names[0]})")
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelDefinitionError(
            f"{path}: optimizer({names[0]}) returned a {type(made).__name__}.", "Return a torch.optim.Optimizer."
        )
    if isinstance(made, torch.optim.LBFGS):
        raise ModelDefinitionError(
            f"{path}: LBFGS computes the loss several times in a step, which a worker does not.",
            "Take an optimizer whose step() needs no closure.",
        )
    known = {id(parameter) for parameter in built.parameters.values()}
    strange = sum(id(p) not in known for group in made.param_groups for p in group["params"] if p.requires_grad)
    if strange:
        raise ModelDefinitionError(
            f"{path}: the optimizer has {strange} parameters that are not the model's.",
            "Give it parameters of the model that optimizer(model) is called with.",
        )
    return made


def check_shards(path: str, built: BuiltModule, optimizer: Any) -> None:
    """Check that the optimizer's state can be held in shards (`--shard_optimizer`).

    Raises:
        ModelDefinitionError: It is not one of PyTorch's own optimizers, or float32 cannot hold a parameter.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise ModelDefinitionError(
            f"{path}: --shard_optimizer with {type(optimizer).__name__}, which is none of torch.optim: each worker "
            "updates its own part of the parameters, and other inputs of an update are not known.",
            "Take an optimizer of torch.optim, or leave --shard_optimizer out.",
        )
    wide = [name for name, parameter in built.parameters.items() if parameter.dtype == torch.float64]
    if wide:
        raise ModelDefinitionError(
            f"{path}: --shard_optimizer sends parameters in float32, and {wide[0]} is float64.",
            "Train in float32, or leave --shard_optimizer out.",
        )


def describe_optimizer(optimizer: Any) -> str:
    """Return the optimizer's class and its plain settings (numbers and texts) as JSON."""
    plain = {name: value for name, value in optimizer.defaults.items() if isinstance(value, bool | int | float | str)}
    return json.dumps({"class_name": type(optimizer).__name__, "config": plain})


class Rates:
    """The user's `lr_scheduler(optimizer)`: rates at an epoch and a model version, for each group of parameters."""

    def __init__(self, definition: ModelDefinition, make: Callable[[], Any]) -> None:
        """
        Args:
            definition: The user's module.
            make: Creates another instance of the user's optimizer.
        """
        self._path = definition.path
        self._function = definition.lr_scheduler
        self._make = make
        self._scheduler: Any = None
        self._interval = "step"
        self._newest = -1  # position of the scheduler
        self._known: deque[Groups] = deque(maxlen=_NUM_KNOWN)  # settings up to this position
        self._now: Groups = []

    def check(self) -> None:
        """Create the schedule, if there is one.

        Raises:
            ModelDefinitionError: The schedule cannot be used.
        """
        if self._function is not None and self._scheduler is None:
            self._begin()

    def at(self, epoch: int, version: int) -> float | None:
        """Return the learning rate of the first parameter group; None: there is no schedule.

        Raises:
            ModelDefinitionError: The schedule cannot be used.
        """
        if self._function is None:
            return None
        self.check()
        position = epoch if self._interval == "epoch" else version
        if position <= self._newest - len(self._known):  # the model is from an older checkpoint
            self._begin()
        while self._newest < position:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns if the schedule is stepped before the optimizer
                user_call(self._scheduler.step, f"{self._path}: the scheduler's step()")
            self._keep()
        self._now = self._known[position - self._newest - 1]
        rate = float(self._now[0]["lr"])
        if not math.isfinite(rate):
            what = f"{self._path}: lr_scheduler gives the rate {rate} at {self._interval} {position}."
            raise ModelDefinitionError(what, "A learning rate is a finite number.")
        return rate

    def set(self, optimizer: Any, rate: float | None) -> None:
        """Set the schedule's last rates before a step; if `rate` is not the schedule's, set it for all groups."""
        if rate is None:
            return
        follows = bool(self._now) and float(self._now[0]["lr"]) == rate
        for k, group in enumerate(optimizer.param_groups):
            group.update(self._now[k] if follows else {"lr": rate})

    def _made(self) -> Any:
        assert self._function is not None
        function, optimizer = self._function, self._make()
        what = f"{self._path}: lr_scheduler(optimizer)"
        made = user_call(lambda: function(optimizer), what)
        if isinstance(made, dict):
            self._interval = made.get("interval", "step")
            made = made.get("scheduler")
        if self._interval not in _INTERVALS:
            raise ModelDefinitionError(
                f"{what} says interval {self._interval!r}.", f"It is one of {', '.join(_INTERVALS)}."
            )
        if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ModelDefinitionError(
                f"{what} returned a ReduceLROnPlateau, whose rates depend on a metric.",
                "Take a schedule that depends on steps or epochs alone.",
            )
        if not isinstance(made, torch.optim.lr_scheduler.LRScheduler):
            raise ModelDefinitionError(
                f"{what} returned a {type(made).__name__}.",
                'Return a scheduler of torch.optim.lr_scheduler, or {"scheduler": …, "interval": "epoch"}.',
            )
        if made.optimizer is not optimizer:
            raise ModelDefinitionError(f"{what} is for another optimizer.", "Make it for the one that it is given.")
        return made

    def _begin(self) -> None:
        self._scheduler, self._newest = self._made(), -1
        self._known.clear()
        self._keep()

    def _keep(self) -> None:
        groups = self._scheduler.optimizer.param_groups
        self._known.append([{key: _plain(group[key]) for key in _SCHEDULED if key in group} for group in groups])
        self._newest += 1


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _arguments(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ["params"]


BEGIN, EPOCH, EVALUATION, END = "on_train_begin", "on_epoch_end", "on_evaluation_end", "on_train_end"
_CALLED = {
    BEGIN: f"{BEGIN}(model)",
    EPOCH: f"{EPOCH}(model, epoch, logs)",
    EVALUATION: f"{EVALUATION}(model, step, metrics)",
    END: f"{END}(model, output)",
}


def make_callbacks(path: str, callbacks: Callable[[], Any] | None) -> list[Any]:
    """Call the user's `callbacks()`.

    Args:
        path: Path of the user's module, for messages.
        callbacks: The function; None: there is none.

    Raises:
        ModelDefinitionError: It raises, does not return a list, or a callback has a hook that is never called.
    """
    made = made_callbacks(path, callbacks)
    for callback in made:
        if isinstance(callback, ours.Decided):
            continue
        unknown = sorted(name for name in dir(callback) if name.startswith("on_") and name not in _CALLED)
        refuse_hooks(path, callback, unknown, ", ".join(_CALLED.values()))
        if not any(callable(getattr(callback, name, None)) for name in _CALLED):
            raise ModelDefinitionError(
                f"{path}: callbacks() gives a {type(callback).__name__} without {END}, or another hook.",
                f"A callback is one of elasticdl.api.callbacks, or an object with {', '.join(_CALLED.values())}.",
            )
    return made


def rules_of(path: str, callbacks: list[Any], metrics: Mapping[str, bool | None]) -> Rules:
    """Return the rules that the master applies for the callbacks.

    Args:
        path: Path of the user's module, for messages.
        callbacks: The callbacks.
        metrics: Maps the name of each evaluation metric to whether higher is better; None: unknown.

    Raises:
        ModelDefinitionError: A callback has a setting that the master cannot follow.
    """
    maker = RuleMaker(path, metrics)
    for callback in callbacks:
        maker.add(callback)
    maker.rules.calls_epoch_end = has(callbacks, EPOCH)
    return maker.rules


def watches_loss(callbacks: list[Any]) -> bool:
    """Return whether a callback monitors the loss on validation data."""
    return any(
        callback.monitor == "val_loss" and getattr(callback, "save_best_only", True)
        for callback in callbacks
        if isinstance(callback, ours.EarlyStopping | ours.ModelCheckpoint)
    )


def has(callbacks: list[Any], hook: str) -> bool:
    """Return whether any callback overrides a hook."""
    return any(_does(callback, hook) for callback in callbacks)


def call(callbacks: list[Any], hook: str, *arguments: Any) -> None:
    """Call a hook of all callbacks that override it."""
    for callback in callbacks:
        if _does(callback, hook):
            getattr(callback, hook)(*arguments)


def _does(callback: Any, hook: str) -> bool:
    own = getattr(type(callback), hook, None)
    return callable(getattr(callback, hook, None)) and own is not getattr(ours.Callback, hook)
