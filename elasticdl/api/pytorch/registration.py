"""Check a script's setup: the same data set in each epoch, named states, unregistered optimizers."""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from elasticdl.api.pytorch.state import RegisteredState
from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.pytorch")


def named_things(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects of the argument `state` with their names; an empty name: to be generated.

    Args:
        state: A sequence of objects, a mapping from names to objects, or a single object.
    """
    if isinstance(state, Mapping):
        yield from ((str(name), thing) for name, thing in state.items())
    elif hasattr(state, "state_dict"):
        yield "", state
    else:
        yield from (("", thing) for thing in state)


def is_same_data(one: Any, other: Any) -> bool:
    """Return whether two data sets are the same object, or have the same type and equal attributes.

    Attributes are equal if they are the same object, or equal plain values.
    """
    try:
        return _is_same(one, other)
    except RecursionError:  # a data set refers to itself
        return False


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, bool | int | float | str | bytes | range | Path):
        return bool(one == other)
    if inspect.isroutine(one) or not getattr(one, "__dict__", None):
        return False
    mine, others = vars(one), vars(other)
    return mine.keys() == others.keys() and all(_is_same(value, others[name]) for name, value in mine.items())


class OptimizerCheck:
    """Refuses an optimizer or scaler, after its first step, that would make the members' models differ.

    Warns of an unregistered scheduler once it changes a learning rate.
    """

    def __init__(self, state: RegisteredState) -> None:
        self._state = state
        self._checked = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]]()  # sizes of its groups
        self._first_rates = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[float]]()
        self._is_in_step = False
        self._hook = register_optimizer_step_post_hook(self._look)

    def begin(self) -> None:
        """Start checking: the script's code on a batch begins.  Optimizer steps outside of it are not checked."""
        self._is_in_step = True

    def end(self) -> None:
        self._is_in_step = False

    def close(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if self._is_in_step and (known := self._checked.get(optimizer)) != sizes:
            if known and (self._state.holds(optimizer) or (optimizer.state and self._state.may_hold(optimizer))):
                raise ModelDefinitionError(
                    f"{type(optimizer).__name__} has {len(sizes)} groups of {sum(sizes)} parameters, and {len(known)} "
                    f"of {sum(known)} at its first step: a worker that joins begins without add_param_group(), and "
                    "could not take its state over.",
                    "Give it all of them at their own rates before the first batch; freeze what is trained later after "
                    "controller.loader(), with requires_grad_(False).",
                )
            self._check(optimizer)
            self._checked[optimizer] = sizes
            if _is_scheduled(optimizer) and not self._state.may_hold_schedule(optimizer):
                self._first_rates[optimizer] = _rates(optimizer)
        elif optimizer in self._first_rates and self._first_rates[optimizer] != _rates(optimizer):
            del self._first_rates[optimizer]
            _log.warning(
                "The rate of %s follows a schedule that is not registered: a worker that joins or replaces another "
                "begins it anew, with other rates than the others. Give the scheduler to create_elastic_controller: "
                "state=[model, optimizer, scheduler]",
                type(optimizer).__name__,
            )

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelDefinitionError(
                "LBFGS computes the loss several times in a step, and how often depends on each worker's own loss: the "
                "models would differ.",
                "Take an optimizer whose step() computes it once, or equally often.",
            )
        if optimizer.state and not self._state.may_hold(optimizer):
            raise ModelDefinitionError(
                f"{kind} is not registered: a worker that joins would begin with an empty state of it, and its model "
                "would differ from the others'.",
                "Give it to create_elastic_controller: state=[model, optimizer].",
            )
        scaler = _scaler_of_step()
        if scaler is not None and not self._state.may_hold_scaler(scaler):
            raise ModelDefinitionError(
                f"{type(scaler).__name__} is not registered: a worker that joins would begin with another scale than "
                "the others, and its gradients would count with another weight.",
                "Give it to create_elastic_controller: state=[model, optimizer, scaler].",
            )
        registered = {id(parameter) for module in self._state.modules for parameter in module.parameters()}
        given = (parameter for group in optimizer.param_groups for parameter in group["params"])
        lone = [one for one in given if one.grad is not None and id(one) not in registered]
        if lone:
            shape = "×".join(map(str, lone[0].shape)) or "()"
            count = "1 parameter" if len(lone) == 1 else f"{len(lone)} parameters, the first"
            raise ModelDefinitionError(
                f"{kind} trains {count} of shape {shape} that no registered module has: "
                "their gradients would not be averaged over the workers.",
                "Put them into a module, and give it to create_elastic_controller: state=[…].",
            )


def _scaler_of_step() -> torch.amp.GradScaler | None:
    """Return the enabled scaler that has called the optimizer's `step`; None: there is none."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") != torch.amp.GradScaler.__module__:
            continue  # do not read `f_locals` of the script: this would keep the tensors of this batch alive
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return caller if caller.is_enabled() else None
    return None


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a PyTorch scheduler was made for the optimizer."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
