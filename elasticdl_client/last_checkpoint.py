"""The last checkpoint of a job that the user stops: asked for, and waited for.  Nothing here ends anything."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import JobError, StorageError
from elasticdl_client.job_events import EventHistory, EventKind
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus

TIMEOUT_S = 60.0
_LOOK_S = 0.1


def can_be_written(spec: JobSpec, status: JobStatus | None) -> bool:
    """Return whether the job has a model with something in it, and a place for it.

    Of scripts those have one whose workers form groups; others keep their models themselves.
    """
    if spec.job_type is not JobType.TRAIN or not spec.checkpoint_dir or status is None:
        return False
    has_model = bool(spec.model_def) or status.num_worlds > 0
    return has_model and status.exit_code is None and status.records_done > 0


class SignalledMaster:
    """The master of a local job, which takes SIGUSR1 as the request for a checkpoint.

    The signal would end a master that has no handler yet, so that one is asked when it has; the next generation of a
    master that is lost is asked again.
    """

    def __init__(self, find: Callable[[], int | None]) -> None:
        """
        Args:
            find: returns its process; 0: it is started again; None: there is no master any more.
        """
        self._find = find
        self._asked = 0

    def ask(self) -> bool:
        """Ask for a checkpoint, once; return whether there is a master."""
        master = self._find()
        if master is None:
            return False
        if master not in (0, self._asked) and _takes_requests(master):
            with suppress(ProcessLookupError):
                os.kill(master, signal.SIGUSR1)
            self._asked = master
        return True


def write(
    spec: JobSpec,
    read_status: Callable[[], JobStatus | None],
    read_events: Callable[[], EventHistory],
    ask: Callable[[], bool],
    is_given_up: Callable[[], bool],
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Ask a job's master for a checkpoint and return when there is one that the next master takes.

    Args:
        read_status: returns the last status that the master wrote.
        read_events: returns the events of the job so far.
        ask: asks for the checkpoint unless that is done; returns False where there is no master any more.
        is_given_up: whether the checkpoint is to be waited for no longer.

    Returns:
        The number of minibatches in it; 0: there is none in time, or it has failed.
    """
    before, failures = _newest(spec, read_events), _number(read_events, EventKind.CHECKPOINT_FAILED)
    wanted, version = _committed(spec, read_status()), before
    began_at, deadline, pause = time.time(), time.monotonic() + timeout_s, threading.Event()
    while time.monotonic() < deadline and not is_given_up() and ask():
        status, version = read_status(), _newest(spec, read_events)
        committed = _committed(spec, status)
        if version > before and version >= min(wanted, committed):  # fewer, once a server is lost
            return version
        if status is not None and status.updated_at > began_at and 0 < committed <= version:
            return version  # there was nothing to write
        if _number(read_events, EventKind.CHECKPOINT_FAILED) > failures:
            break
        if status is not None and status.exit_code is not None:
            break
        pause.wait(_LOOK_S)
    return version if version > before else 0


def _committed(spec: JobSpec, status: JobStatus | None) -> int:
    """Return how many minibatches a checkpoint of parameter servers must hold; one begun earlier has fewer."""
    is_of_servers = spec.distribution_strategy is DistributionStrategy.PARAMETER_SERVER
    return status.model_version if is_of_servers and status is not None else 0


def _takes_requests(process: int) -> bool:
    """Return whether a process has a handler for the request."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & 1 << (signal.SIGUSR1 - 1))


def _newest(spec: JobSpec, read_events: Callable[[], EventHistory]) -> int:
    """Return the number of minibatches in the newest checkpoint; 0: there is none.

    Of parameter servers it counts once the journal has it: the next master restores what its journal names.  A script
    may have another directory, and its workers tell the master what they have written.
    """
    if spec.distribution_strategy is DistributionStrategy.PARAMETER_SERVER or not spec.model_def:
        return _number(read_events, EventKind.CHECKPOINT_SAVED)
    from elasticdl.storage.paths import path_of
    from elasticdl.storage.versions import complete

    try:
        return max((_number_of(path.name) for path in complete(path_of(spec.checkpoint_dir))), default=0)
    except StorageError:
        return 0


def _number(read_events: Callable[[], EventHistory], kind: EventKind) -> int:
    """Return the greatest number of a checkpoint in the events of a kind; 0: there are none."""
    try:
        events = read_events().events
    except JobError:
        return 0
    return max((_number_of(event.subject) for event in events if event.kind is kind), default=0)


def _number_of(name: str) -> int:
    number = name.partition("-")[2]
    return int(number) if number.isdecimal() else 0
