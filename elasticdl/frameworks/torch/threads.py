"""How many threads PyTorch computes with: as many as this container has processors, not this machine."""

from __future__ import annotations

import os
import threading

import torch

from elasticdl.frameworks.processors import num_processors

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
