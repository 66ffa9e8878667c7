"""The port `Cluster`: pods that can be created, deleted, listed and watched.

Adapters: local/adapter.py and kubernetes/adapter.py.  Below this port there are only primitives: master/core
decides which pods to create when, and the consequences of a pod's end.

`explained` says why a pod ended, from the end of its log: a script's own error, or simply its last lines.  A Python
error is shown as the user needs it: the error, and the frames of the user's own files, without ours and those of
libraries.  The log keeps the whole traceback.
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
    """Kubernetes's phases, with the same meaning."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EndReason(StrEnum):
    """Why a pod is no longer running."""

    NONE = ""  # it has not ended
    COMPLETED = "Completed"
    ERROR = "Error"  # a non-zero exit code, or a crash signal (SEGV, ABRT, BUS, ILL, FPE): its own fault
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
    """The process to run.  `command` is an argument vector, never a shell string."""

    name: str
    role: Role
    index: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    restart_policy: RestartPolicy = RestartPolicy.NEVER
    grace_s: float = 10.0  # between SIGTERM and SIGKILL at deletion
    framework: str = ""  # a name of `standby.PRELOADED`: may be started from a standby process that has imported it
    slot: int = 0  # of a worker: the place among the wanted ones that it fills, its predecessor's if it has one
    memory_factor: float = 1.0  # times the memory that the job's flags give to the role
    num_gpus: int = 0  # local runtime: GPUs that the process sees, at most those of the machine


def check_spec(spec: PodSpec) -> None:
    """Refuse a spec that no adapter accepts.

    Raises:
        ElasticDLError: the name is not one, or there is no command.
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
    """A pod as observed at one moment."""

    name: str
    role: Role
    index: int
    uid: str  # differs between two pods of the same name
    phase: PodPhase
    labels: Mapping[str, str] = field(default_factory=dict)
    reason: EndReason = EndReason.NONE
    exit_code: int | None = None  # 128 + signal number after a signal
    message: str = ""  # for people: why it is pending, or why it ended
    restarts: int = 0
    blocked: str = ""  # why a pending pod cannot start without intervention: its image cannot be pulled, …
    pid: int = 0  # local runtime only
    node: str = ""  # where it is; empty before it has a place, and in the local runtime
    has_slot: bool = False  # local runtime only: there is room for it, it runs or is about to
    queue: str = ""  # that has not admitted it yet


class CannotResize(ElasticDLError):
    """Pods cannot be given more memory while they run."""


class EventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class PodEvent:
    type: EventType
    pod: Pod


class Cluster(Protocol):
    """Six verbs.  All raise `ElasticDLError` when the cluster cannot be reached or refuses."""

    def create(self, spec: PodSpec) -> Pod:
        """Accepts a pod; it may stay Pending.  A second pod of a living one's name is refused."""
        ...

    def delete(self, name: str, grace_s: float | None = None) -> None:
        """SIGTERM, grace, SIGKILL, then DELETED.  Deleting what does not exist is not an error.  Does not wait."""
        ...

    def resize(self, spec: PodSpec) -> int:
        """Gives a running pod the memory of `spec`; returns when it is in force, and how many bytes that are.

        Raises:
            CannotResize: no pod of this cluster can be resized.
            ElasticDLError: this one is not, or not in time.
        """
        ...

    def list(self) -> list[Pod]:
        """Every pod of this job that exists, ended ones included, the master's own among them."""
        ...

    def watch(self) -> Iterator[PodEvent]:
        """First one ADDED for every pod that exists, then every change, until `close`."""
        ...

    def logs(self, name: str) -> str:
        """Return the output of the pod so far, of an ended pod too; of a long one at least the last MiB."""
        ...


MAX_LOG_BYTES = 16 << 10  # of a log that are looked at: a traceback through a framework is long
_NUM_LINES = 10  # shown of a log that does not end with an error of a script
_NUM_FRAMES = 4  # the innermost ones
_MAX_LINES_AFTER = 10  # of an error's own text; lines further from the end are not the reason
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line \d+(, in .*)?$')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_NOT_THE_END = ("Exception ignored ", "Error in atexit.")  # said while a process ends, whyever it does
_OUR_OWN = "elasticdl_client.errors."
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3\.\d+/")  # of another interpreter, such as that of a pod's image
_REPOSITORY = Path(__file__).resolve().parents[2]
_OURS = tuple(
    f"{_REPOSITORY / package}/"
    for package in ("elasticdl", "elasticdl_client", "elasticdl_preprocessing", "elasticai_api")
)


def explained(code: str, log: str) -> str:
    """Return how a process ended: its exit code with the error of the user's script, or the last lines of its log."""
    lines = log.rstrip().splitlines()
    error = _error_of_script(lines)
    if error:
        return f"{code}: {error}"
    tail = "\n".join(lines[-_NUM_LINES:])
    return f"{code}; its last lines:\n{tail}" if tail else code


def shows_error_of_script(log: str) -> bool:
    """Return whether the end of a log holds the error that has ended a script, with frames in the user's files."""
    return bool(_error_of_script(log.rstrip().splitlines()))


def frames_of_user(traceback: str) -> str:
    """Return the frames in the user's own files of a formatted exception; all of it if there are none."""
    lines = traceback.rstrip().splitlines()
    found = _last_traceback(lines)
    frames = [] if found is None else _frames_of_user(lines[found.first : found.error])
    return "\n".join(frames) or traceback


@dataclass(frozen=True, slots=True)
class _Traceback:
    """Where one stands in a log: its first frame, and the line of its error."""

    first: int
    error: int


def _error_of_script(lines: list[str]) -> str:
    """The error that has ended a script, with the frames in the user's files; empty if there is none."""
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
    """The newest one that is why a process ended; of a chain the error that was raised last."""
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
    """The frames in files that are neither ours nor a library's, each with its line of code, and no marks below it."""
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
