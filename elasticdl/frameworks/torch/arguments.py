"""How the features of a minibatch become the arguments of a module's `forward`: by name, or as they are."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch

from elasticdl_client.errors import ModelDefinitionError

_log = logging.getLogger("elasticdl.torch")
_HINT = (
    "Name forward's parameters as the features, or let it take the whole dictionary, forward(self, features); "
    "--columns chooses among the columns of a table."
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ForwardArguments:
    """Of one module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        try:
            self._signature = inspect.signature(module.forward)
        except (TypeError, ValueError):  # it is not written in Python
            self._signature = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
        self._parameters = dict(self._signature.parameters)
        self._logged: set[str] = set()

    def of(self, features: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position and by name.

        A tuple or list are the arguments.  Of a dictionary those that are parameters are given by name, and the others
        are left out; where it lacks what `forward` asks for, and that is one argument, it is the argument itself.

        Raises:
            ModelDefinitionError: `forward` asks for something that is not among the features.
        """
        if isinstance(features, tuple | list):
            if not self._fits(*features):
                raise self._error(features, f"it is given {len(features)} arguments")
            return tuple(features), {}
        if not isinstance(features, Mapping):
            return (features,), {}
        if self._fits(**features):
            return (), dict(features)
        parameters = [name for name, parameter in self._parameters.items() if parameter.kind in _NAMED]
        named = {name: features[name] for name in parameters if name in features}
        if named and self._fits(**named):
            self._log_left_out(features, named)
            return (), named
        if not self._fits(features):
            missing = [name for name in self._required() if name not in features]
            raise self._error(features, f"there is no feature {', '.join(missing)}")
        if not _takes_tensor(self._module):
            return (features,), {}
        if len(features) == 1:
            return tuple(features.values()), {}
        raise self._error(features, "it takes one tensor, and which feature that is cannot be seen from the names")

    def _fits(self, *args: Any, **kwargs: Any) -> bool:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    def _required(self) -> list[str]:
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        ]

    def _log_left_out(self, features: Mapping[str, Any], named: Mapping[str, Any]) -> None:
        left_out = ", ".join(str(name) for name in features if name not in named)
        line = f"forward{self._signature} is not given the features {left_out}"
        if line not in self._logged:
            self._logged.add(line)
            _log.info(line)

    def _error(self, features: Any, what: str) -> ModelDefinitionError:
        names = ", ".join(map(str, features)) if isinstance(features, Mapping) else f"{len(features)} without names"
        return ModelDefinitionError(
            f"The features do not fit {type(self._module).__name__}.forward: {what}.\n"
            f"  parameters: {', '.join(map(str, self._parameters.values()))}\n  features: {names}",
            _HINT,
        )


def _takes_tensor(module: Any) -> bool:
    """Whether it is of a class of PyTorch's, none of which takes a dictionary."""
    if type(module).forward is torch.nn.Sequential.forward and len(module):
        return _takes_tensor(module[0])
    return type(module).__module__.startswith("torch.nn")
