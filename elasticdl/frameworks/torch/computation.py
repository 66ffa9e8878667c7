"""What computes a step and how: the device, precision, memory layout, compilation, number of parts, and the loss scale.

`DeviceMeter` gives a device's name, its settings, and the memory that this process takes of it.  PyTorch computes with
as many threads as this container has processors, not this machine.

Settings of the user's module (autocast in `forward`, `torch.compile` in the model function) are left as they are.
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
_INITIAL_SCALE = 65536.0  # this and the next two as in torch.amp.GradScaler
_BACKOFF = 0.5
_GROWTH_STEPS = 2000
_LEAST_SCALE = 1.0  # a value that overflows at this one is hardly finite in float32
_SCALE, _STEPS = "loss_scale/scale", "loss_scale/steps"


@dataclass(frozen=True, slots=True)
class Computation:
    """The values of `ComputationFlags`.

    Attributes:
        part_size: samples in each part in which a minibatch is computed, the last one maybe smaller; 0: as a whole.
        shards_optimizer: the optimizer keeps its state for some of the parameters alone; see `ShardsOptimizer`.
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
        """Of autocast; None: there is none."""
        return _DTYPES[self.precision]

    @property
    def scales_loss(self) -> bool:
        """Gradients of float16 need a loss scale; bfloat16 has the exponents of float32."""
        return self.precision is Precision.FP16

    def prepare(self, module: Any, device: Any, what: str) -> Any:
        """Return a module on its device with the memory layout that is asked for, compiled if it shall be.

        Args:
            what: the user's function, for messages.

        Raises:
            ModelDefinitionError: it has no use of what is asked for, or this machine has no compiler.
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
        """Scale gradients in place so that the norm of all together is at most `clip_gradient_norm`."""
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
        self._num_steps = 0  # without overflow, since the scale has changed

    def at(self, num_repeats: int) -> float:
        """Return the factor of the next step, computed for the n-th time after the first."""
        return max(_LEAST_SCALE, self._value * _BACKOFF**num_repeats) if self._is_dynamic else 1.0

    def may_overflow(self, num_repeats: int) -> bool:
        """Whether a gradient that is not finite may be the fault of that factor."""
        return self._is_dynamic and self.at(num_repeats) > _LEAST_SCALE

    def count_step(self, num_repeats: int) -> None:
        """A step is made: it was computed again so often."""
        if not self._is_dynamic:
            return
        self._value = self.at(num_repeats)
        self._num_steps = 0 if num_repeats else self._num_steps + 1
        if self._num_steps == _GROWTH_STEPS:
            self._value /= _BACKOFF
            self._num_steps = 0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its part of a checkpoint."""
        if not self._is_dynamic:
            return {}
        return {_SCALE: np.array(self._value), _STEPS: np.array(self._num_steps)}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """The inverse of `arrays`; the state of a job in another precision starts the scale afresh."""
        if not self._is_dynamic:
            return
        self._value = float(arrays.get(_SCALE, _INITIAL_SCALE))
        self._num_steps = int(arrays.get(_STEPS, 0))


def with_channels_last(part: Any) -> Any:
    """Return a tensor of 4 or 5 dimensions with its second one last in memory, anything else as it is."""
    layout = _FORMATS.get(part.dim()) if isinstance(part, torch.Tensor) else None
    return part if layout is None else part.contiguous(memory_format=layout)


def is_channels_last(tensor: Any) -> bool:
    """Whether it lies in memory so, and not in the order of its dimensions."""
    layout = _FORMATS.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def _check_compiler(device: Any) -> None:
    """On the CPU torch.compile writes C++; on a GPU it brings its own compiler."""
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
    """Of products of float32 matrices; the older of PyTorch's two settings raises where the newer one was used."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "")  # since PyTorch 2.9
    return precision == "tf32" if precision else bool(torch.backends.cuda.matmul.allow_tf32)


def _read(device: torch.device) -> Device | None:
    """Return the device with the memory that PyTorch's allocator has taken of it; None: it is no GPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Device(str(device), properties.name, torch.cuda.memory_reserved(device), properties.total_memory)


_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads() -> None:
    """Heeds the control group's limit, unless the user has said how many threads there shall be."""
    if not any(os.environ.get(name) for name in _CHOSEN):
        torch.set_num_threads(num_processors())


def keep_threads_here() -> None:
    """Threads that begin after this call, that of the input say, compute alone; the calling one computes as before.

    Every thread that computes has an OpenMP team of its own, and a process with more threads in teams than processors
    lets them sleep at every barrier.
    """
    torch.get_num_threads()  # the number becomes the calling thread's own
    other = threading.Thread(target=torch.set_num_threads, args=(1,))  # for itself, and for those to come
    other.start()
    other.join()
