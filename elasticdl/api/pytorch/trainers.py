"""Shared parts of the adapters for trainers of other libraries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.api")


class CollateParts:
    """Makes the parts of a minibatch, each with its own forward and backward pass; runs in the loader's processes."""

    def __init__(self, collate: Callable[[list[Any]], Any], size: int) -> None:
        """
        Args:
            size: records of a part.
        """
        self._collate, self._size = collate, size

    def __call__(self, samples: Sequence[Any]) -> list[tuple[int, Any]]:
        pieces = [list(samples[start : start + self._size]) for start in range(0, len(samples), self._size)]
        return [(len(piece), self._collate(piece)) for piece in pieces]


def say_plain(name: str, plain: str) -> None:
    """Log that an adapter does nothing outside of a job."""
    _log.info("%s runs as the plain %s: this process is in no job of ElasticDL", name, plain)


def check_epochs(spec: JobSpec, num_epochs: float, argument: str) -> None:
    """Refuse epochs of a script that contradict the job's.

    Raises:
        JobError: the job's flag says something else.
    """
    if spec.num_epochs not in (JobSpec().num_epochs, num_epochs):
        raise JobError(
            f"the job's --num_epochs is {spec.num_epochs}, and the script trains for {num_epochs:g} epochs",
            f"leave --num_epochs out: {argument} says it",
        )


def check_minibatch_size(spec: JobSpec, size: int, argument: str) -> None:
    """Refuse a batch size of a script that contradicts the job's.

    Raises:
        JobError: the job's flag says something else.
    """
    if spec.minibatch_size not in (JobSpec().minibatch_size, size):
        raise JobError(
            f"the job's --minibatch_size is {spec.minibatch_size}, and the script's batches have {size} records",
            f"leave --minibatch_size out: {argument} says it",
        )
