"""Settings of how a step is computed: device, precision, memory layout, compilation, number of parts, loss scale.

`device_meter` returns the `DeviceMeter` of a model: name, settings and memory of the device.  PyTorch computes with as
many threads as this container has CPUs, not as this machine has.

Settings of the user's module (autocast in `forward`, `torch.compile` in the model function) are not changed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticdl.frameworks.devices import DeviceMeter, cpu_text, num_processors
from elasticdl.protocol import Device
from elasticdl_client.choices import Precision
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec

_DTYPES = {Precision.FP32: None, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_COMPILERS = ("g++", "clang++")
_INITIAL_SCALE = 65536.0  # this and the next two values as in torch.amp.GradScaler
_BACKOFF = 0.5
_GROWTH_STEPS = 2000
_LEAST_SCALE = 1.0  # a gradient that overflows even here would hardly be finite in float32
_SCALE, _STEPS = "loss_scale/scale", "loss_scale/steps"


@dataclass(frozen=True, slots=True)
class Computation:
    """The values of `ComputationFlags`.

    Attributes:
        part_size: A minibatch is computed in parts of this many samples, the last one may be smaller; 0: as a whole.
        shards_optimizer: The optimizer keeps the state of only some of the parameters; see `ShardsOptimizer`.
    """

    precision: Precision = Precision.FP32
    is_compiled: bool = False
    channels_last: bool = False
    clip_gradient_norm: float = 0.0
    part_size: int = 0
    shards_optimizer: bool = False

    @classmethod
    def of(cls, spec: JobSpec) -> Computation:
        """Return what the flags of a job ask for."""
        part_size = spec.minibatch_size // spec.accumulate_steps if spec.accumulate_steps > 1 else 0
        return cls(
            spec.precision,
            spec.compile,
            spec.channels_last,
            spec.clip_gradient_norm,
            part_size,
            spec.shard_optimizer,
        )

    @property
    def dtype(self) -> Any:
        """The dtype of autocast; None: no autocast."""
        return _DTYPES[self.precision]

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: float16 needs it; bfloat16 has the exponent range of float32."""
        return self.precision is Precision.FP16

    def prepare(self, module: Any, device: Any, what: str) -> Any:
        """Return a module on its device, with the requested memory layout, and compiled if requested.

        Args:
            module: The user's module.
            device: Its device.
            what: The user's function, for messages.

        Raises:
            ModelDefinitionError: A setting has no effect on this module, or this machine has no compiler.
        """
        if self.channels_last:
            if all(parameter.dim() not in _FORMATS for parameter in module.parameters()):
                raise ModelDefinitionError(
                    f"{what} returned a module without a convolution of two or three dimensions, and --channels_last "
                    "is about nothing else.",
                    "Leave --channels_last out.",
                )
            for parameter in module.parameters():
                parameter.data = with_channels_last(parameter.data)
        if self.is_compiled and not hasattr(module, "_orig_mod"):
            _check_compiler(device)
            module = torch.compile(module)
        return module

    def clip(self, parameters: Sequence[Any]) -> None:
        """Scale gradients in place so that their total norm is at most `clip_gradient_norm`."""
        if self.clip_gradient_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_gradient_norm)


class LossScale:
    """The factor of the loss that keeps small gradients of float16 from becoming 0; always 1 in other precisions.

    A step whose gradient overflows is computed again with half the scale, so that no minibatch is left out.  The scale
    doubles after 2,000 steps without overflow.  It changes with a step that is made alone, so that it belongs to the
    state after the step: members whose models are equal have equal scales, whatever broke between.
    """

    def __init__(self, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._value = _INITIAL_SCALE if is_dynamic else 1.0
        self._num_steps = 0  # steps without overflow since the scale has changed

    def at(self, num_repeats: int) -> float:
        """Return the factor of the next step, computed for the n-th time after the first."""
        return max(_LEAST_SCALE, self._value * _BACKOFF**num_repeats) if self._is_dynamic else 1.0

    def may_overflow(self, num_repeats: int) -> bool:
        """Return whether the loss scale can be the cause of a gradient that is not finite."""
        return self._is_dynamic and self.at(num_repeats) > _LEAST_SCALE

    def count_step(self, num_repeats: int) -> None:
        """Adapt the scale after a step that was computed again `num_repeats` times."""
        if not self._is_dynamic:
            return
        self._value = self.at(num_repeats)
        self._num_steps = 0 if num_repeats else self._num_steps + 1
        if self._num_steps == _GROWTH_STEPS:
            self._value /= _BACKOFF
            self._num_steps = 0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state of the scale for a checkpoint."""
        if not self._is_dynamic:
            return {}
        return {_SCALE: np.array(self._value), _STEPS: np.array(self._num_steps)}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load a state returned by `arrays`; a state of a job with another precision resets the scale."""
        if not self._is_dynamic:
            return
        self._value = float(arrays.get(_SCALE, _INITIAL_SCALE))
        self._num_steps = int(arrays.get(_STEPS, 0))


def with_channels_last(part: Any) -> Any:
    """Return a tensor of 4 or 5 dimensions with its second one last in memory, anything else as it is."""
    layout = _FORMATS.get(part.dim()) if isinstance(part, torch.Tensor) else None
    return part if layout is None else part.contiguous(memory_format=layout)


def is_channels_last(tensor: Any) -> bool:
    """Return whether a tensor has the memory format channels_last."""
    layout = _FORMATS.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def _check_compiler(device: Any) -> None:
    """Raise if torch.compile has no C++ compiler, which it needs on the CPU; for a GPU it has its own."""
    if device.type != "cpu" or os.environ.get("CXX") or any(map(shutil.which, _COMPILERS)):
        return
    raise ModelDefinitionError(
        f"--compile needs a C++ compiler on the CPU, and there is none of {', '.join(_COMPILERS)}.",
        "Install g++ in the image, name another compiler in CXX, or leave --compile out.",
    )


def device_meter(device: torch.device) -> DeviceMeter:
    """Return the meter of the device that parameters are on."""
    return DeviceMeter(_described(device), lambda: _read(device))


def _described(device: torch.device) -> str:
    if device.type == "cpu":
        return cpu_text(torch.get_num_threads())
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    settings = {"TF32 matrix products": _has_tf32(), "cudnn.benchmark": torch.backends.cudnn.benchmark}
    text = ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in settings.items())
    return f"{device} ({properties.name}, {properties.total_memory / (1 << 30):.1f} GiB); {text}"


def _has_tf32() -> bool:
    """Return whether float32 matrix products use TF32; PyTorch's older setting raises if the newer one was used."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "")  # since PyTorch 2.9
    return precision == "tf32" if precision else bool(torch.backends.cuda.matmul.allow_tf32)


def _read(device: torch.device) -> Device | None:
    """Return the device with the memory reserved by PyTorch's allocator; None: it is not a GPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Device(str(device), properties.name, torch.cuda.memory_reserved(device), properties.total_memory)


_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads() -> None:
    """Set the number of threads to the container's CPU limit, unless the user has set it in the environment."""
    if not any(os.environ.get(name) for name in _CHOSEN):
        torch.set_num_threads(num_processors())


def keep_threads_here() -> None:
    """Let threads started after this call, such as the input's, compute alone; the calling thread is not affected.

    Every computing thread has its own OpenMP team; if a process has more team threads than CPUs, they sleep at every
    barrier.
    """
    torch.get_num_threads()  # fixes the number for the calling thread
    other = threading.Thread(target=torch.set_num_threads, args=(1,))  # sets it for itself and for new threads
    other.start()
    other.join()
