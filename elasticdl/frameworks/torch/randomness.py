"""Random numbers: those of the model's steps, and those of the user's `feed`.

The model draws from PyTorch's global generator, seeded with each minibatch; `feed`, in another thread meanwhile, from a
generator of that thread's own, seeded with each task.  Neither disturbs the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


def seed_step(seed: int, device: Any) -> None:
    """Before a forward pass.  Like `torch.manual_seed`, which takes a millisecond where there is no GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def seed_script(seed: int) -> None:
    """`torch.manual_seed` for code that chooses its device itself; quick where PyTorch is built for processors alone.

    Else `torch.manual_seed` formats the stack of its caller for each kind of accelerator, for a call that never comes.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
