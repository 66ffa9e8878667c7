"""The stacks of all threads of this process and its descendants, for the master when it suspects a hang.

They contain Python frames, and native frames if py-spy is installed, but no values of variables.

A child process, such as a worker of a PyTorch DataLoader, writes its stacks to a file of this process when it gets a
signal.  A forked child inherits the file; a child that multiprocessing spawns gets it with its first message.  A
process that does not hold the file or does not catch the signal, such as another program, is never signalled: it would
be killed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import io
import multiprocessing.process
import multiprocessing.spawn
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from elasticdl.activities import Activity
from elasticdl.frameworks.memory_file import create_memory_file
from elasticdl.rpc import elasticdl_pb2 as pb

MAX_TEXT = 16_000  # characters: a heartbeat must stay a small message
_MAX_NATIVE = 8_000
_MAX_FRAMES = 40  # of a thread that runs user code
_MAX_OTHER_FRAMES = 10  # of any other thread
_PY_SPY_S = 8.0  # below the default of --lease_timeout: py-spy stops the whole process meanwhile
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_NO_PROCESS = ctypes.c_ulong(0)

_SIGNAL = signal.SIGRTMIN + 9  # no program is known to use it
_KEY = "elasticdl_stacks"  # key in a spawned process's first message; unknown keys are ignored there
_MOST_PROCESSES = 32
_ANSWER_S = 1.0  # limit for one process; a stopped process does not answer
_QUIET_S = 0.05  # an answer is complete after this time without a write
_LOOK_S = 0.01  # polling interval: a file in memory cannot be watched
_THREAD = re.compile(r"(?:Current thread|Thread) 0x\w+")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(
    f"{_ROOT / name}{os.sep}" for name in ("elasticdl", "elasticdl_client", "elasticdl_preprocessing", "elasticai_api")
)
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Frames of these files below user code mean that it waits for another process.
_OTHER_PROCESSES = ("/torch/utils/data/", "/multiprocessing/", "/concurrent/futures/")
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class Origin(IntEnum):
    """The owner of the code that a frame runs."""

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
        """Whether the innermost code outside of libraries is the user's, and does not wait for another process."""
        for frame in self.frames:
            if frame.origin is not Origin.LIBRARY:
                return frame.origin is Origin.USER
            if any(part in frame.file for part in _OTHER_PROCESSES):
                return False
        return False


_file: io.FileIO | None = None  # the file that all processes write to, since the first `watch` of this process


def watch() -> None:
    """Make every process that this one forks or spawns from now on able to write its stacks."""
    global _file
    if _file is not None:
        return
    descriptor = create_memory_file("elasticdl-stacks")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    _file = io.FileIO(descriptor, "ab")
    faulthandler.register(_SIGNAL, _file, all_threads=True)
    os.register_at_fork(before=_register_again)
    if os.access(_path_of(descriptor), os.W_OK):
        _set_up_spawned(descriptor)


def take(activity: Activity) -> pb.Stacks:
    """Return the stacks of all threads but the calling one; takes milliseconds, or seconds with py-spy."""
    described = describe([*_threads(), *of_children()], activity)
    native = _native_stacks(shutil.which("py-spy"))
    if native:
        described.text = f"{described.text[: MAX_TEXT - len(native) - 1]}\n{native}"
    return described


def of_children() -> list[ThreadStack]:
    """Return the threads of all descendants of this process that answer within a second each."""
    if _file is None:
        return []
    asked = [pid for pid in _descendants(os.getpid()) if _can_answer(pid, _file)]
    return [thread for pid in asked[:_MOST_PROCESSES] for thread in _ask(pid, _file)]


def describe(threads: Iterable[ThreadStack], activity: Activity) -> pb.Stacks:
    """Format stacks, the most relevant ones first.

    Args:
        threads: The stacks.
        activity: Activity of the main thread.  If it waits for input, threads that run user code come first.
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
    """Return the first lines of a text that fit."""
    if len(text) <= longest:
        return text
    return text[: longest - 2].rpartition("\n")[0] + "\n…"


def _register_again() -> None:
    """Install the handler again where another package has removed it.

    Lightning's `fit` restores all signals at its end, and Python does not know of handlers in C.  A handler that is in
    place, or that the user has set, stays: without any handler, even for a moment, the signal would kill the process.
    """
    assert _file is not None
    if not _catches_signal(os.getpid()):
        faulthandler.unregister(_SIGNAL)
        faulthandler.register(_SIGNAL, _file, all_threads=True)


def _can_answer(pid: int, file: io.FileIO) -> bool:
    """Return whether a process holds the file and catches the signal."""
    own = os.fstat(file.fileno())
    try:
        is_held = any(os.path.samestat(own, one.stat()) for one in Path(f"/proc/{pid}/fd").iterdir())
        return is_held and _catches_signal(pid)
    except OSError:  # it has ended, or has closed a file meanwhile
        return False


def _catches_signal(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def _ask(pid: int, file: io.FileIO) -> Iterator[ThreadStack]:
    os.ftruncate(file.fileno(), 0)
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        os.kill(pid, _SIGNAL)
    except OSError:
        return
    for frames in _frames_written(_answer(file)):
        yield ThreadStack(f"of process {pid} ({name})", False, frames)


def _answer(file: io.FileIO) -> str:
    """Return the content of the file, when nothing more is written to it."""
    pause, begun = threading.Event(), time.monotonic()
    size, grown_at = 0, begun
    while (now := time.monotonic()) - begun < _ANSWER_S and not (size and now - grown_at > _QUIET_S):
        pause.wait(_LOOK_S)
        if (written := os.fstat(file.fileno()).st_size) != size:
            size, grown_at = written, time.monotonic()
    return Path(_path_of(file.fileno())).read_text(errors="replace")


def _path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class _Opened:
    """Unpickles to a file of another process.  Uses the standard library only: sys.path is set later."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return io.FileIO, (self._path, "ab")


class _Registered:
    """Unpickles by installing the handler that writes stacks to a file at the signal."""

    def __init__(self, file: _Opened) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return faulthandler.register, (_SIGNAL, self._file, True)


def _set_up_spawned(descriptor: int) -> None:
    prepare = multiprocessing.spawn.get_preparation_data

    def with_stacks(name: str) -> dict[str, Any]:
        return {**prepare(name), _KEY: _Registered(_Opened(_path_of(descriptor)))}

    multiprocessing.spawn.get_preparation_data = with_stacks


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process, its children first."""
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended, or this kernel does not list children
        return []
    children = [int(number) for text in tasks for number in text.split()]
    return children + [one for child in children for one in _descendants(child)]


def _frames_written(text: str) -> Iterator[list[StackFrame]]:
    """Yield the frames of each thread, from the output of `faulthandler`."""
    for block in _THREAD.split(text)[1:]:
        frames = []
        for found in map(_FRAME.fullmatch, block.splitlines()):
            if found is None:
                continue
            if found["file"] == multiprocessing.process.__file__ and found["function"].endswith("_bootstrap"):
                break  # the frames below are of the process that has forked it
            frames.append(StackFrame(found["file"], int(found["line"]), found["function"]))
        yield frames
