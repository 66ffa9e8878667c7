"""The port `Cluster`: pods that can be created, deleted, listed and watched.

Adapters: local/adapter.py and kubernetes/adapter.py.  Below this port there are only primitives: master/core decides
which pods to create and when, and what follows from a pod's end.

`explained` tells why a pod ended, from the end of its log: a script's own error, or the last lines.  A Python error is
shown as the user needs it: the error, and the frames of the user's own files, without those of ElasticDL and of
libraries.  The log keeps the full traceback.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class PodPhase(StrEnum):
    """The phases of a pod, as in Kubernetes."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EndReason(StrEnum):
    """Why a pod has ended."""

    NONE = ""  # it has not ended
    COMPLETED = "Completed"
    ERROR = "Error"  # by itself: a non-zero exit code, or a crash signal (SEGV, ABRT, BUS, ILL, FPE)
    KILLED = "Killed"  # SIGKILL or SIGTERM from outside
    OOM_KILLED = "OOMKilled"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    DELETED = "Deleted"
    NODE_LOST = "NodeLost"


class RestartPolicy(StrEnum):
    NEVER = "Never"
    ON_FAILURE = "OnFailure"


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod to run.  `command` is an argument vector, never a shell string."""

    name: str
    role: Role
    index: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    restart_policy: RestartPolicy = RestartPolicy.NEVER
    grace_s: float = 10.0  # between SIGTERM and SIGKILL at deletion
    framework: str = ""  # a key of `standby.PRELOADED`: may be forked from a standby that has imported it
    slot: int = 0  # of a worker: its number among the wanted workers; a successor keeps it
    memory_factor: float = 1.0  # multiplies the memory from the job's flags
    num_gpus: int = 0  # local runtime: GPUs that the process sees, at most those of the machine


def check_spec(spec: PodSpec) -> None:
    """Raise for a spec that no adapter accepts.

    Raises:
        ElasticDLError: the name is invalid, or there is no command.
    """
    if not _NAME.fullmatch(spec.name):
        raise ElasticDLError(
            f"{spec.name!r} cannot be the name of a pod.",
            "Use lower-case letters, digits, '-' and '.', at most 253, a letter or digit at both ends.",
        )
    if not spec.command:
        raise ElasticDLError(f"Pod {spec.name} has no command.")


@dataclass(frozen=True, slots=True)
class Pod:
    """The state of a pod at one moment."""

    name: str
    role: Role
    index: int
    uid: str  # differs between successive pods of the same name
    phase: PodPhase
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: EndReason = EndReason.NONE
    exit_code: int | None = None  # 128 + signal number after a signal
    message: str = ""  # for people: why it is pending, or has ended
    restarts: int = 0
    blocked: str = ""  # why a pending pod cannot start without help: its image cannot be pulled, …
    pid: int = 0  # local runtime only
    node: str = ""  # empty before it is assigned, and in the local runtime
    has_slot: bool = False  # local runtime only: it has a slot, and runs or will start
    queue: str = ""  # the queue that has not admitted it yet


class QuotaExceeded(ElasticDLError):
    """A pod was not created because a quota is used up; `what` is the text of the cluster."""


class CannotResize(ElasticDLError):
    """The cluster cannot give running pods more memory."""


class EventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class PodEvent:
    type: EventType
    pod: Pod


class Cluster(Protocol):
    """The pods of one job.  All methods raise `ElasticDLError` if the cluster rejects a call or does not answer."""

    def create(self, spec: PodSpec) -> Pod:
        """Create a pod; it may stay Pending.  The name of a living pod is rejected."""
        ...

    def delete(self, name: str, grace_s: float | None = None) -> None:
        """Delete a pod, without waiting: SIGTERM, grace period, SIGKILL, DELETED.  A missing pod is no error."""
        ...

    def resize(self, spec: PodSpec) -> int:
        """Give a running pod the memory of `spec`; return the bytes in force, when the change is done.

        Raises:
            CannotResize: this cluster cannot resize pods.
            ElasticDLError: this pod is not resized, or not in time.
        """
        ...

    def list(self) -> list[Pod]:
        """Return all pods of this job, with ended ones and the master's."""
        ...

    def watch(self) -> Iterator[PodEvent]:
        """Yield ADDED for every existing pod, then every change, until `close`."""
        ...

    def logs(self, name: str) -> str:
        """Return the output of a pod, running or ended; at least its last MiB."""
        ...


MAX_LOG_BYTES = 16 << 10  # of a log that are searched: a traceback through a framework is long
_NUM_LINES = 10  # shown of a log without an error of a script
_NUM_FRAMES = 4  # the innermost ones
_MAX_LINES_AFTER = 10  # of an error's text; errors further from the end are not the reason
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line \d+(, in .*)?$')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_NOT_THE_END = ("Exception ignored ", "Error in atexit.")  # printed during the exit, for any reason
_OUR_OWN = "elasticdl_client.errors."
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3\.\d+/")  # of any interpreter, for example of a pod's image
_REPOSITORY = Path(__file__).resolve().parents[2]
_OURS = tuple(
    f"{_REPOSITORY / package}/"
    for package in ("elasticdl", "elasticdl_client", "elasticdl_preprocessing", "elasticai_api")
)


def explained(code: str, log: str) -> str:
    """Return how a process ended: its exit code, and the error of the user's script or the last lines of its log."""
    lines = log.rstrip().splitlines()
    error = _error_of_script(lines)
    if error:
        return f"{code}: {error}"
    tail = "\n".join(lines[-_NUM_LINES:])
    return f"{code}; its last lines:\n{tail}" if tail else code


def shows_error_of_script(log: str) -> bool:
    """Return whether the end of a log has the error that ended a script, with frames in the user's files."""
    return bool(_error_of_script(log.rstrip().splitlines()))


def frames_of_user(traceback: str) -> str:
    """Return the frames of a formatted exception that are in the user's files; the whole text if there are none."""
    lines = traceback.rstrip().splitlines()
    found = _last_traceback(lines)
    frames = [] if found is None else _frames_of_user(lines[found.first : found.error])
    return "\n".join(frames) or traceback


@dataclass(frozen=True, slots=True)
class _Traceback:
    """The position of a traceback in a log: its first frame, and the line of its error."""

    first: int
    error: int


def _error_of_script(lines: list[str]) -> str:
    """Return the error that ended a script, with the frames in the user's files; empty if there is none."""
    found = _last_traceback(lines)
    if found is None:
        return ""
    frames = _frames_of_user(lines[found.first : found.error])
    if not frames:
        return ""
    text = [lines[found.error].removeprefix(_OUR_OWN)]
    if text[0] != lines[found.error]:
        text[0] = text[0].partition(": ")[2] or text[0]
    for line in lines[found.error + 1 :]:
        if line.startswith(_NOT_THE_END) or line.strip() == _HEADER:
            break
        text.append(line)
    return "\n".join([*text, *frames])


def _last_traceback(lines: list[str]) -> _Traceback | None:
    """Return the last traceback that is the reason of an end; of a chain of errors, the last raised."""
    found, first, is_why = None, None, True
    for number, line in enumerate(lines):
        if line.startswith(_NOT_THE_END):
            is_why = False
        elif line.endswith(_HEADER):
            first = None
        elif _FRAME.match(line):
            first = number if first is None else first
        elif first is not None and _ERROR.match(line):
            if is_why:
                found = _Traceback(first, number)
            first, is_why = None, True
    if found is None:
        return None
    after = next((n for n, line in enumerate(lines) if n > found.error and line.startswith(_NOT_THE_END)), len(lines))
    return found if after - found.error <= _MAX_LINES_AFTER else None


def _frames_of_user(lines: list[str]) -> list[str]:
    """Return the frames outside of ElasticDL and libraries, each with its line of code, without markers."""
    frames: list[list[str]] = []
    for line in lines:
        match = _FRAME.match(line)
        if match:
            frames.append([match["path"], line])
        elif frames and len(frames[-1]) == 2 and line.strip(" ^~"):
            frames[-1].append(line)
    users = [lines_of for path, *lines_of in frames if _is_users(path)]
    return [line for lines_of in users[-_NUM_FRAMES:] for line in lines_of]


def _is_users(path: str) -> bool:
    is_library = "site-packages" in path or "dist-packages" in path or path.startswith(_LIBRARIES)
    is_library = is_library or _STANDARD_LIBRARY.search(path) is not None
    return not (is_library or path.startswith("<frozen ") or path.startswith(_OURS))
