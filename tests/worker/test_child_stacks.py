"""The stacks of processes that a process has started, by every method of multiprocessing; others are left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from elasticdl.activities import Activity
from elasticdl.frameworks.memory_file import create_memory_file
from elasticdl.worker import stacks
from elasticdl.worker.stacks import ThreadStack

METHODS = ("fork", "spawn", "forkserver")


def wait_for_release(connection: Connection) -> None:
    release = threading.Event()
    threading.Thread(target=lambda: (connection.recv(), release.set()), daemon=True).start()
    connection.send(b"")
    loop_until(release)


def loop_until(release: threading.Event) -> None:
    while not release.is_set():
        pass


def wait_idly(connection: Connection) -> None:
    connection.send(b"")
    connection.recv()


def wait_without_handler(connection: Connection) -> None:
    signal.signal(stacks._SIGNAL, signal.SIG_DFL)
    wait_idly(connection)


@pytest.fixture(autouse=True)
def watched() -> None:
    stacks.watch()


def functions_of(thread: ThreadStack) -> list[str]:
    return [frame.function for frame in thread.frames]


def taken(function: str) -> ThreadStack:
    """The thread that is in a function: under load a process answers late or in two parts, or is on its way there."""
    deadline = time.monotonic() + 30
    while True:
        answers = [(thread, functions_of(thread)) for thread in stacks.of_children()]
        found = [thread for thread, functions in answers if function in functions and functions[-1] == "run"]
        if found:
            return found[0]
        assert time.monotonic() < deadline


def threads_of(process: int | None) -> list[ThreadStack]:
    """Other tests may have left processes that answer, too."""
    return [thread for thread in stacks.of_children() if thread.name.startswith(f"of process {process} ")]


@pytest.mark.parametrize("method", METHODS)
def test_a_process_of_multiprocessing_shows_its_line(method: str) -> None:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=wait_for_release, args=(there,))
    process.start()
    here.recv()
    thread = taken("loop_until")
    described = stacks.describe([thread], Activity.INPUT)
    here.send(b"")
    process.join()
    assert process.exitcode == 0
    assert functions_of(thread)[-2:] == ["wait_for_release", "run"]
    assert described.text.startswith(f"thread of process {process.pid} (")
    assert described.where.startswith(f"{__file__}:")
    assert described.where.endswith("in loop_until")


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_waits_for_work_runs_no_code_of_the_users(method: str) -> None:
    """A forked one has the frames of the process that forked it below its own."""
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=wait_idly, args=(there,))
    process.start()
    here.recv()
    thread = taken("wait_idly")
    here.send(b"")
    process.join()
    assert functions_of(thread)[-2:] == ["wait_idly", "run"]
    assert not thread.runs_user_code


def test_another_program_is_not_asked() -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert threads_of(process.pid) == []
        process.communicate()
    assert process.returncode == 0


def test_without_a_watch_there_is_nothing() -> None:
    program = "from elasticdl.worker import stacks; print(stacks.of_children())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("function", "answers"), [(wait_idly, True), (wait_without_handler, False)], ids=["forked after", "in the child"]
)
def test_a_process_outlives_the_question_though_signals_were_restored(
    function: Callable[[Connection], None], answers: bool
) -> None:
    """Lightning's `fit` ends so: it sets every signal to what Python says that it was, the default for one in C."""
    signal.signal(stacks._SIGNAL, signal.getsignal(stacks._SIGNAL))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there,))
    process.start()
    here.recv()
    if answers:
        assert taken(function.__name__)
    else:
        assert threads_of(process.pid) == []
    here.send(b"")
    process.join()
    assert process.exitcode == 0


def test_a_handler_of_the_users_outlives_a_fork() -> None:
    program = (
        "import os, signal; from elasticdl.worker import stacks; stacks.watch()\n"
        "signal.signal(stacks._SIGNAL, lambda *_: print('theirs', flush=True))\n"
        "if not (pid := os.fork()): os._exit(0)\n"
        "os.waitpid(pid, 0); os.kill(os.getpid(), stacks._SIGNAL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("theirs\n", "")


def test_a_process_that_is_stopped_does_not_answer() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=wait_idly, args=(there,))
    process.start()
    here.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert threads_of(process.pid) == []
    os.kill(process.pid, signal.SIGCONT)
    here.send(b"")
    process.join()
    assert process.exitcode == 0


def test_a_python_for_an_old_libc_has_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = create_memory_file("elasticdl-test")
    try:
        assert os.pwrite(descriptor, b"stacks", 0) == 6
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:elasticdl-test")
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match="Invalid argument"):
        create_memory_file("x" * 300)
