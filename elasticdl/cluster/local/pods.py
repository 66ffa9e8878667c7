"""One local pod: what was asked for, what has become of it, and its log.

It owns the words: phases, reasons, messages.  It never starts or signals a process; the kubelet does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from elasticdl.cluster.cluster import EndReason, Pod, PodPhase, PodSpec
from elasticdl.cluster.last_words import MAX_LOG_BYTES
from elasticdl.cluster.local.process_group import ProcessGroup
from elasticdl.cluster.local.standby_process import Fork
from elasticdl.protocol.values import Role

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_TOLD_TO_END = {128 + signal.SIGKILL, 128 + signal.SIGTERM}  # exit codes after SIGTERM, or of a killed child


@dataclass(frozen=True, slots=True)
class PodEnding:
    """How a leader ended: its code (128 + signal number after a signal) and why."""

    exit_code: int
    reason: EndReason
    text: str

    @staticmethod
    def of(wait_status: int) -> PodEnding:
        """Reads the status that waitpid has given."""
        code = os.waitstatus_to_exitcode(wait_status)
        if code == 0:
            return PodEnding(0, EndReason.COMPLETED, "")
        if code > 0:
            reason = EndReason.KILLED if code in _TOLD_TO_END else EndReason.ERROR
            return PodEnding(code, reason, f"exit code {code}")
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {-code}"
        reason = EndReason.KILLED if -code in _FROM_OUTSIDE else EndReason.ERROR
        return PodEnding(128 - code, reason, f"killed by {name}")


@dataclass(slots=True)
class LocalPod:
    """The agent's record of a pod."""

    spec: PodSpec
    uid: str
    log: PodLog
    phase: PodPhase = PodPhase.PENDING
    reason: EndReason = EndReason.NONE
    exit_code: int | None = None
    message: str = ""
    restarts: int = 0
    active: bool = False  # from its first start to its end, pauses before restarts included
    group: ProcessGroup | None = None
    fork: Fork | None = None  # being started by the standby, until it has reported progress
    started_at: float = 0.0
    pause_s: float = 0.0  # before its last restart
    gpus: tuple[str, ...] = ()  # that it alone sees, for `CUDA_VISIBLE_DEVICES`; empty: none are given to it
    why_ending: EndReason = EndReason.NONE  # DELETED or PREEMPTED once it is terminating
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def needs_slot(self) -> bool:
        return self.spec.role is not Role.MASTER

    @property
    def ended(self) -> bool:
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def snapshot(self) -> Pod:
        """The pod as the port shows it."""
        return Pod(
            name=self.spec.name,
            role=self.spec.role,
            index=self.spec.index,
            uid=self.uid,
            phase=self.phase,
            labels=self.spec.labels,
            reason=self.reason,
            exit_code=self.exit_code,
            message=self.message,
            restarts=self.restarts,
            pid=self.group.pid if self.group else 0,
            has_slot=self.active or (self.phase is PodPhase.PENDING and not self.message),
        )


class PodLog:
    """The file that holds everything a pod has printed, over restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._life_begins = 0

    def open(self, line: str) -> int:
        """Open the file to continue after a line; the caller closes it.

        Raises:
            OSError: it cannot be opened, or the disk is full.
        """
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, line.encode())
        except OSError:
            os.close(fd)
            raise
        return fd

    def open_life(self) -> int:
        """Opens it for a new life of the pod, set off by a line from the one before; the caller closes it.

        Raises:
            OSError: see `open`.
        """
        is_first = not self.path.exists() or not self.path.stat().st_size
        moment = datetime.now().isoformat(" ", "seconds")
        fd = self.open("" if is_first else f"---- started again {moment} ----\n")
        self._life_begins = os.fstat(fd).st_size
        return fd

    def tail(self) -> str:
        """The end of what the present life has printed."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._life_begins, size - MAX_LOG_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""
