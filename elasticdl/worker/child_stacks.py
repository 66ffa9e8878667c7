"""Stacks of the Python processes that this one has started, such as those of a PyTorch DataLoader.

Each of them writes its stacks to a file of this process when a signal asks it to: a forked one has inherited that, one
that multiprocessing spawns gets it with its first message.  A process that does not hold the file or catch the signal
is never asked, because the signal would end it: a subprocess that runs another program.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import multiprocessing.process
import multiprocessing.spawn
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticdl.frameworks.memory_file import create_memory_file

_SIGNAL = signal.SIGRTMIN + 9  # no program is known to use it
_KEY = "elasticdl_stacks"  # of a spawned process's first message, which ignores what it does not know
_MOST_PROCESSES = 32
_ANSWER_S = 1.0  # of one process; one that is stopped does not answer
_QUIET_S = 0.05  # nothing more is written: the answer is whole
_LOOK_S = 0.01  # a file in memory cannot be watched
_THREAD = re.compile(r"(?:Current thread|Thread) 0x\w+")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass(frozen=True, slots=True)
class ChildThread:
    """A thread of another process.

    Attributes:
        process: for people: its number and name.
        frames: file, line and function, the innermost first, without those of the process that has started it.
    """

    process: str
    frames: tuple[tuple[str, int, str], ...]


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


def take() -> list[ChildThread]:
    """The threads of all of them that answer within a second each."""
    if _file is None:
        return []
    asked = [pid for pid in _descendants(os.getpid()) if _can_answer(pid, _file)]
    return [thread for pid in asked[:_MOST_PROCESSES] for thread in _ask(pid, _file)]


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


def _ask(pid: int, file: io.FileIO) -> Iterator[ChildThread]:
    os.ftruncate(file.fileno(), 0)
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        os.kill(pid, _SIGNAL)
    except OSError:
        return
    for frames in _threads(_answer(file)):
        yield ChildThread(f"{pid} ({name})", frames)


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


def _threads(text: str) -> Iterator[tuple[tuple[str, int, str], ...]]:
    """The frames of each thread, from what `faulthandler` writes."""
    for block in _THREAD.split(text)[1:]:
        frames = []
        for found in map(_FRAME.fullmatch, block.splitlines()):
            if found is None:
                continue
            if found["file"] == multiprocessing.process.__file__ and found["function"].endswith("_bootstrap"):
                break  # below are those of the process that has forked it
            frames.append((found["file"], int(found["line"]), found["function"]))
        yield tuple(frames)
