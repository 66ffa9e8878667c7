"""Seed the random numbers of the model's steps and of the user's `feed`, independently.

The model uses PyTorch's global generator, seeded for each minibatch; `feed`, in another thread, uses a generator of
that thread, seeded for each task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

_NUMPY_SEEDS = 2**32
_DRAWING = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "uniform_",
    ]
)


class OwnGenerator(TorchFunctionMode):  # type: ignore[misc]
    """While entered, whatever this thread draws without naming a generator comes from `generator`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING and kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


@contextmanager
def seeded_task(seed: int) -> Iterator[None]:
    """Return a context in which random numbers of `feed` in this thread depend only on the seed of its task."""
    chance = OwnGenerator()
    chance.generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    with chance:
        yield


def seed_step(seed: int, device: Any) -> None:
    """Seed PyTorch before a forward pass; faster than `torch.manual_seed`, which takes 1 ms without a GPU.

    Args:
        seed: Seed of the minibatch.
        device: Device of the module, already in use.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        for generator in torch.cuda.default_generators:  # all GPUs: the module may use several
            generator.manual_seed(seed)


def seed_script(seed: int) -> None:
    """Seed PyTorch for code that chooses its device itself; usually faster than `torch.manual_seed`.

    `torch.manual_seed` formats the stack of its caller for each kind of accelerator that is not in use yet, which takes
    1 ms: it is called only if there is an accelerator that the code may still begin to use.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "cuda" and torch.cuda.is_initialized():
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
    elif accelerator is None or get_worker_info() is not None or not _is_there(accelerator.type):
        torch.default_generator.manual_seed(seed)  # a process of a DataLoader uses only the CPU
    else:
        torch.manual_seed(seed)


@cache
def _is_there(kind: str) -> bool:
    """Return whether this machine has an accelerator of a kind supported by this build of PyTorch."""
    return bool(torch.get_device_module(kind).is_available())
