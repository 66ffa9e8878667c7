"""Random numbers: those of the model's steps, and those of the user's `feed`.

The model draws from PyTorch's global generator, seeded with each minibatch; `feed`, in another thread meanwhile, from a
generator of that thread's own, seeded with each task.  Neither disturbs the other.
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
    """While entered, what `feed` draws in this thread depends on the seed of its task alone."""
    chance = OwnGenerator()
    chance.generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    with chance:
        yield


def seed_step(seed: int, device: Any) -> None:
    """Before a forward pass.  Like `torch.manual_seed`, which takes a millisecond where there is no GPU.

    Args:
        device: of the module, which is on it already.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        for generator in torch.cuda.default_generators:  # of all GPUs: the module may use others
            generator.manual_seed(seed)


def seed_script(seed: int) -> None:
    """`torch.manual_seed` for code that chooses its device itself.

    `torch.manual_seed` formats the stack of its caller for each kind of accelerator that is not in use yet, which takes
    a millisecond: it is called only where there is one that the code may still begin to use.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "cuda" and torch.cuda.is_initialized():
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
    elif accelerator is None or get_worker_info() is not None or not _is_there(accelerator.type):
        torch.default_generator.manual_seed(seed)  # a process of a DataLoader computes on the processor
    else:
        torch.manual_seed(seed)


@cache
def _is_there(kind: str) -> bool:
    """Whether this machine has an accelerator that PyTorch is built for."""
    return bool(torch.get_device_module(kind).is_available())
