"""The port `Framework` on PyTorch."""

import torch

from elasticdl.frameworks.torch.framework import TorchFramework

__all__ = ["TorchFramework", "first_op"]


def first_op() -> None:
    """Execute an op, to find out whether PyTorch works in this process."""
    torch.ones(2).sum()
