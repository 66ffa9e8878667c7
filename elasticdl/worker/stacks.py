"""The stacks of all threads of this process and of those that it has started, when the master suspects a hang.

Python's own frames always, native ones where py-spy is installed.  Nothing of the values of variables is read.

Each process that this one has started, such as those of a PyTorch DataLoader, writes its stacks to a file of this
process when a signal asks it to: a forked one has inherited that, one that multiprocessing spawns gets it with its
first message.  A process that does not hold the file or catch the signal is never asked, because the signal would end
it: a subprocess that runs another program.
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

MAX_TEXT = 16_000  # characters of an answer: a heartbeat stays a small message
_MAX_NATIVE = 8_000
_MAX_FRAMES = 40  # of a thread that runs user code
_MAX_OTHER_FRAMES = 10  # of any other one
_PY_SPY_S = 8.0  # below --lease_timeout's default: py-spy stops the whole process meanwhile
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_NO_PROCESS = ctypes.c_ulong(0)

_SIGNAL = signal.SIGRTMIN + 9  # no program is known to use it
_KEY = "elasticdl_stacks"  # of a spawned process's first message, which ignores what it does not know
_MOST_PROCESSES = 32
_ANSWER_S = 1.0  # of one process; one that is stopped does not answer
_QUIET_S = 0.05  # nothing more is written: the answer is whole
_LOOK_S = 0.01  # a file in memory cannot be watched
_THREAD = re.compile(r"(?:Current thread|Thread) 0x\w+")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')

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


_file: io.FileIO | None = None  # that all of them write to, from the first `watch` of this process on


def watch() -> None:
    """From now on every process that is forked or spawned from this one can be asked."""
    global _file
    if _file is not None:
        return
    descriptor = create_memory_file("elasticdl-stacks")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    _file = io.FileIO(descriptor, "ab")
    faulthandler.register(_SIGNAL, _file, all_threads=True)
    os.register_at_fork(before=_register_again)
    if os.access(_path_of(descriptor), os.W_OK):
        _tell_spawned(descriptor)


def take(activity: Activity) -> pb.Stacks:
    """The stacks of all threads but the calling one; a few milliseconds, or some seconds where py-spy is installed."""
    described = describe([*_threads(), *of_children()], activity)
    native = _native_stacks(shutil.which("py-spy"))
    if native:
        described.text = f"{described.text[: MAX_TEXT - len(native) - 1]}\n{native}"
    return described


def of_children() -> list[ThreadStack]:
    """The threads of all processes started from this one that answer within a second each."""
    if _file is None:
        return []
    asked = [pid for pid in _descendants(os.getpid()) if _can_answer(pid, _file)]
    return [thread for pid in asked[:_MOST_PROCESSES] for thread in _ask(pid, _file)]


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


def _register_again() -> None:
    """Install the handler where another package has removed it: Lightning's `fit` restores all signals at its end, and
    Python does not know of handlers in C.

    One that is in place, or that the user has set instead, stays: without any for a moment, the signal would kill.
    """
    assert _file is not None
    if not _catches_signal(os.getpid()):
        faulthandler.unregister(_SIGNAL)
        faulthandler.register(_SIGNAL, _file, all_threads=True)


def _can_answer(pid: int, file: io.FileIO) -> bool:
    """Whether a process holds the file and catches the signal."""
    own = os.fstat(file.fileno())
    try:
        is_held = any(os.path.samestat(own, one.stat()) for one in Path(f"/proc/{pid}/fd").iterdir())
        return is_held and _catches_signal(pid)
    except OSError:  # it has ended, or closed one meanwhile
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
    """The content of the file, when no more comes."""
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
    """Pickled, a file of another process; only of the standard library, as sys.path comes later."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return io.FileIO, (self._path, "ab")


class _Registered:
    """Pickled, the order to write stacks to a file at the signal."""

    def __init__(self, file: _Opened) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return faulthandler.register, (_SIGNAL, self._file, True)


def _tell_spawned(descriptor: int) -> None:
    prepare = multiprocessing.spawn.get_preparation_data

    def with_stacks(name: str) -> dict[str, Any]:
        return {**prepare(name), _KEY: _Registered(_Opened(_path_of(descriptor)))}

    multiprocessing.spawn.get_preparation_data = with_stacks


def _descendants(pid: int) -> list[int]:
    """The processes below one, its children first."""
    try:
        tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended, or this kernel does not say
        return []
    children = [int(number) for text in tasks for number in text.split()]
    return children + [one for child in children for one in _descendants(child)]


def _frames_written(text: str) -> Iterator[list[StackFrame]]:
    """The frames of each thread, from what `faulthandler` writes."""
    for block in _THREAD.split(text)[1:]:
        frames = []
        for found in map(_FRAME.fullmatch, block.splitlines()):
            if found is None:
                continue
            if found["file"] == multiprocessing.process.__file__ and found["function"].endswith("_bootstrap"):
                break  # below are those of the process that has forked it
            frames.append(StackFrame(found["file"], int(found["line"]), found["function"]))
        yield frames
