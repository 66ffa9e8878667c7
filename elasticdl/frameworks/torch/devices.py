"""The device that a PyTorch model is on: its name, its settings, and the memory that this process takes of it.

PyTorch computes with as many threads as this container has processors, not this machine.
"""

from __future__ import annotations

import os
import threading

import torch

from elasticdl.frameworks.devices import DeviceMeter, cpu_text, num_processors
from elasticdl.protocol import Device


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
