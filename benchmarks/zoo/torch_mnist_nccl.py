"""The larger network of torch_mnist for workers that share a GPU, which NCCL refuses on one machine.

Each takes the number of its process as the name of its machine, so that NCCL connects them by sockets.
"""

import os

from .torch_mnist import feed, large_model, loss, optimizer

__all__ = ["feed", "large_model", "loss", "optimizer"]

os.environ["NCCL_HOSTID"] = str(os.getpid())
