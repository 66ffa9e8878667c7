"""Build the user's module; its initial values depend only on the code and the seed.

Owns the names and the order of parameters and buffers, and their device (GPU or CPU); it does not train.
`ForwardArguments` converts the features of a minibatch to arguments of `forward`, by name or by position.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elasticdl.frameworks.framework import FEATURES_ALONE, Floats, Parameters, Variable
from elasticdl.frameworks.torch.computation import Computation, with_channels_last
from elasticdl.frameworks.torch.samples import mapped
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition
from elasticdl_client.errors import ModelDefinitionError

_COMPILED_PREFIX = "_orig_mod."
_NUMPY_SEEDS = 2**32
_OF_A_TRAINER = ("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers")


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """The location of a buffer in its module; a forward pass may replace the tensor itself."""

    name: str
    owner: Any
    key: str

    @property
    def tensor(self) -> Any:
        return self.owner._buffers.get(self.key)

    def put(self, value: Any) -> None:
        """Set the buffer to a value; replace the tensor if shape or dtype differ."""
        current = self.tensor
        if current is not None and current.shape == value.shape and current.dtype == value.dtype:
            current.copy_(value)
        else:
            self.owner._buffers[self.key] = value.clone()


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A module on its device.

    Attributes:
        module: The result of the user's function.
        parameters: The trainable parameters by name, in the order of the module.
        frozen: The other parameters by name.
        buffers: The buffers in the module's state, such as running statistics.
        computation: Its precision and memory layout.
    """

    module: Any
    device: Any
    parameters: Mapping[str, Any]
    frozen: Mapping[str, Any]
    buffers: Sequence[ValuePlace]
    computation: Computation
    _arguments: list[ForwardArguments] = field(default_factory=list)  # none or one

    def variables(self) -> tuple[Variable, ...]:
        """The names and shapes of trainable parameters, frozen ones and buffers, in this order."""
        trained = [Variable(name, tuple(p.shape), True) for name, p in self.parameters.items()]
        rest = [(name, p) for name, p in self.frozen.items()] + [(b.name, b.tensor) for b in self.buffers]
        return tuple(trained + [Variable(name, tuple(value.shape), False) for name, value in rest])

    def values(self) -> Parameters:
        """Return copies of all values as two flat vectors."""
        rest = [*self.frozen.values(), *(b.tensor for b in self.buffers)]
        return Parameters(_flat(list(self.parameters.values())), _flat(rest))

    def assign(self, parameters: Parameters) -> None:
        """Set all values from two flat vectors."""
        rest = [*self.frozen.values(), *(b.tensor for b in self.buffers)]
        for tensors, flat in ((self.parameters.values(), parameters.trainable), (rest, parameters.non_trainable)):
            position = 0
            for tensor in tensors:
                part = flat[position : position + tensor.numel()]
                with torch.no_grad():
                    tensor.copy_(torch.from_numpy(np.ascontiguousarray(part)).reshape(tensor.shape))
                position += tensor.numel()

    def train(self) -> None:
        """Put the module into its mode of training; only if it is in another one, as it walks through all layers."""
        if not self.module.training:
            self.module.train()

    @property
    def plain(self) -> Any:
        """The module without the wrapper of `torch.compile`."""
        return getattr(self.module, "_orig_mod", self.module)

    @property
    def arguments(self) -> ForwardArguments:
        """The conversion of features to arguments of the module."""
        if not self._arguments:
            self._arguments.append(ForwardArguments(self.plain))
        return self._arguments[0]

    def predict(self, features: Any) -> Any:
        """Call the module, see `ForwardArguments`; with autocast its outputs are converted to float32."""
        if self.computation.channels_last:
            features = mapped(with_channels_last, features)
        args, kwargs = self.arguments.of(features)
        if self.computation.dtype is None:
            return self.module(*args, **kwargs)
        with torch.autocast(self.device.type, self.computation.dtype):
            outputs = self.module(*args, **kwargs)
        return mapped(_as_float32, outputs)


def build_model(definition: ModelDefinition, seed: int, computation: Computation) -> BuiltModule:
    """Call the user's model function, and return the module on its device.

    Raises:
        ModelDefinitionError: The function raises, or its result cannot be trained.
    """
    what = f"{definition.path}: {definition.symbol}()"
    set_seeds(seed)
    module = user_call(definition.model, what)
    if not isinstance(module, torch.nn.Module):
        raise ModelDefinitionError(
            f"{what} returned a {type(module).__name__}, not a torch.nn.Module.",
            "Return the module; or name its framework: --framework=tensorflow.",
        )
    _check_hooks(what, module)
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(value):
            raise ModelDefinitionError(
                f"{what}: {plain_name(name)} has no shape yet.",
                "Give the layer its sizes: no lazy modules.",
            )
        if value.is_complex():
            raise ModelDefinitionError(f"{what}: {plain_name(name)} is complex.", "Train real parameters.")
    device = own_device()
    module = computation.prepare(module.to(device), device, what)
    parameters = {plain_name(name): p for name, p in module.named_parameters()}
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    return BuiltModule(module, device, trained, frozen, tuple(buffers_of(module)), computation)


def own_device() -> Any:
    """Return the device of this process's model: the GPU, if there is one, with its number for collectives."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_hooks(what: str, module: Any) -> None:
    """Refuse a module with hooks for a trainer, such as Lightning's, because a worker does not call them."""
    kind = type(getattr(module, "_orig_mod", module))
    found = [name for name in _OF_A_TRAINER if callable(getattr(kind, name, None))]
    if found:
        raise ModelDefinitionError(
            f"{what} returned a {kind.__name__} with {', '.join(found)}, which no worker calls.",
            "Return its network, a torch.nn.Module, and define loss, optimizer(model) and eval_metrics_fn() beside it; "
            "or train it as it is in a script of your own: docs/pytorch_script.md.",
        )


def set_seeds(seed: int) -> None:
    """Seed PyTorch, NumPy and Python, before any random code of the user."""
    torch.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the prefix of `torch.compile`."""
    return name.replace(_COMPILED_PREFIX, "")


def as_array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor as NumPy array; bfloat16 becomes float32, without loss."""
    found = tensor.detach().cpu()
    if found.dtype == torch.bfloat16:
        found = found.to(torch.float32)
    return np.asarray(found.numpy(), order="C") if tensor.is_cuda else np.array(found.numpy(), order="C")


def buffers_of(module: Any) -> list[ValuePlace]:
    """Return the buffers in a module's state, each once."""
    places, seen = [], set()
    for prefix, owner in module.named_modules():
        for key, value in owner._buffers.items():
            if value is None or key in owner._non_persistent_buffers_set or id(value) in seen:
                continue
            seen.add(id(value))
            places.append(ValuePlace(plain_name(f"{prefix}.{key}" if prefix else key), owner, key))
    return places


def _as_float32(part: Any) -> Any:
    is_short = isinstance(part, torch.Tensor) and part.dtype in (torch.bfloat16, torch.float16)
    return part.to(torch.float32) if is_short else part


def _flat(tensors: Sequence[Any]) -> Floats:
    parts = [as_array(tensor).astype(np.float32).ravel() for tensor in tensors]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


_log = logging.getLogger("elasticdl.torch")
_HINT = (
    "Name forward's parameters as the features, or let it take the whole dictionary, forward(self, features); "
    "--columns chooses among the columns of a table."
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ForwardArguments:
    """Converts features to the arguments of one module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        try:
            self._signature = inspect.signature(module.forward)
        except (TypeError, ValueError):  # not written in Python
            self._signature = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
        self._parameters = dict(self._signature.parameters)
        self._logged: set[str] = set()

    def of(self, features: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by position and by name.

        A tuple or list contains the positional arguments.  Entries of a dictionary are passed by name if `forward` has
        such parameters, and dropped otherwise; if required parameters are missing and `forward` takes one argument, the
        dictionary itself is the argument.

        Raises:
            ModelDefinitionError: `forward` requires an argument that is not among the features.
        """
        if isinstance(features, tuple | list):
            if not self._fits(*features):
                hint = f"Let forward take what feed returns, each an argument. {FEATURES_ALONE}"
                raise self._error(features, f"it is given {len(features)} arguments", hint)
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

    def _error(self, features: Any, what: str, hint: str = _HINT) -> ModelDefinitionError:
        names = ", ".join(map(str, features)) if isinstance(features, Mapping) else f"{len(features)} without names"
        return ModelDefinitionError(
            f"The features do not fit {type(self._module).__name__}.forward: {what}.\n"
            f"  parameters: {', '.join(map(str, self._parameters.values()))}\n  features: {names}",
            hint,
        )


def _takes_tensor(module: Any) -> bool:
    """Return whether a module has a PyTorch class; these do not accept a dictionary."""
    if type(module).forward is torch.nn.Sequential.forward and len(module):
        return _takes_tensor(module[0])
    return type(module).__module__.startswith("torch.nn")
