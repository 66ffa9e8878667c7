"""The stacks of all threads of this process and of those that it has started, when the master suspects a hang.

Python's own frames always, native ones where py-spy is installed.  Nothing of the values of variables is read.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType

from elasticdl.activities import Activity
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.child_stacks import ChildThread

MAX_TEXT = 16_000  # characters of an answer: a heartbeat stays a small message
_MAX_NATIVE = 8_000
_MAX_FRAMES = 40  # of a thread that runs user code
_MAX_OTHER_FRAMES = 10  # of any other one
_PY_SPY_S = 8.0  # below --lease_timeout's default: py-spy stops the whole process meanwhile
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_NO_PROCESS = ctypes.c_ulong(0)

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(
    f"{_ROOT / name}{os.sep}" for name in ("elasticdl", "elasticdl_client", "elasticdl_preprocessing", "elasticai_api")
)
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Whose frames below user code mean that it waits for another process.
_OTHER_PROCESSES = ("/torch/utils/data/", "/multiprocessing/", "/concurrent/futures/")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class Origin(IntEnum):
    """Whose code a frame runs."""

    USER = 0
    OURS = 1
    LIBRARY = 2


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A line that is being executed."""

    file: str
    line: int
    function: str

    @property
    def origin(self) -> Origin:
        if self.file.startswith(_OURS):
            return Origin.OURS
        is_library = self.file.startswith(("<", *_LIBRARIES)) or any(part in self.file for part in _PACKAGES)
        return Origin.LIBRARY if is_library else Origin.USER

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread's frames, the innermost first."""

    name: str
    is_main: bool
    frames: Sequence[StackFrame]

    @property
    def user_line(self) -> StackFrame | None:
        """The innermost line of user code."""
        return next((frame for frame in self.frames if frame.origin is Origin.USER), None)

    @property
    def runs_user_code(self) -> bool:
        """The code that was entered last, libraries aside, is the user's, and it does not wait for another process."""
        for frame in self.frames:
            if frame.origin is not Origin.LIBRARY:
                return frame.origin is Origin.USER
            if any(part in frame.file for part in _OTHER_PROCESSES):
                return False
        return False


def take(activity: Activity, children: Iterable[ChildThread] = ()) -> pb.Stacks:
    """The stacks of all threads but the calling one; a few milliseconds, or some seconds where py-spy is installed."""
    described = describe([*_threads(), *map(of_child, children)], activity)
    native = _native_stacks(shutil.which("py-spy"))
    if native:
        described.text = f"{described.text[: MAX_TEXT - len(native) - 1]}\n{native}"
    return described


def of_child(child: ChildThread) -> ThreadStack:
    """A thread of a process that this one has started."""
    return ThreadStack(f"of process {child.process}", False, [StackFrame(*frame) for frame in child.frames])


def describe(threads: Iterable[ThreadStack], activity: Activity) -> pb.Stacks:
    """Puts what matters first.

    Args:
        activity: of the main thread: where it waits for input, another thread that runs user code is what it waits for.
    """
    waits = activity in (Activity.INPUT, Activity.IDLE)

    def rank(stack: ThreadStack) -> tuple[bool, bool, bool]:
        return (not stack.runs_user_code, stack.user_line is None, stack.is_main is waits)

    ordered = sorted(threads, key=rank)
    line = ordered[0].user_line if ordered else None
    text = "\n".join(_text_of(stack) for stack in ordered)
    return pb.Stacks(where="" if line is None else str(line), text=_cut(text, MAX_TEXT))


def _text_of(stack: ThreadStack) -> str:
    longest = _MAX_OTHER_FRAMES if stack.user_line is None else _MAX_FRAMES
    lines = [f"thread {stack.name}:", *(f"  {frame}" for frame in stack.frames[:longest])]
    if len(stack.frames) > longest:
        lines.append(f"  … {len(stack.frames) - longest} more")
    return "\n".join(lines)


def _threads() -> list[ThreadStack]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    return [
        ThreadStack(names.get(ident, f"native-{ident}"), ident == main, _frames_of(frame))
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]


def _frames_of(frame: FrameType | None) -> list[StackFrame]:
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(StackFrame(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname))
        frame = frame.f_back
    return frames


def _native_stacks(py_spy: str | None) -> str:
    """Return the output of py-spy for this process; empty without it."""
    if py_spy is None:
        return ""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # Yama lets a process trace its children only, not its parent
    try:
        done = subprocess.run(
            [py_spy, "dump", "--native", "--pid", str(os.getpid())],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PY_SPY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy has not answered: {error}"
    finally:
        prctl(_PR_SET_PTRACER, _NO_PROCESS, 0, 0, 0)
    if done.returncode:
        return f"py-spy has failed: {_cut(done.stderr.strip(), 500)}"
    return f"native stacks (py-spy):\n{_cut(done.stdout.strip(), _MAX_NATIVE)}"


def _cut(text: str, longest: int) -> str:
    """Whole lines, as many as fit."""
    if len(text) <= longest:
        return text
    return text[: longest - 2].rpartition("\n")[0] + "\n…"
