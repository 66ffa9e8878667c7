"""The stacks of processes that a process has started, by every method of multiprocessing; others are left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest

from elasticdl.worker import stacks
from elasticdl.worker.activity import Activity
from elasticdl.worker.child_stacks import ChildStacks, ChildThread

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


@pytest.fixture
def children() -> ChildStacks:
    made = ChildStacks()
    made.watch()
    return made


def taken(children: ChildStacks, function: str) -> ChildThread:
    """The thread that is in a function: a process under load answers late, or is on its way there."""
    deadline = time.monotonic() + 30
    while True:
        found = [thread for thread in children.take() if function in [name for _, _, name in thread.frames]]
        if found:
            return found[0]
        assert time.monotonic() < deadline


@pytest.mark.parametrize("method", METHODS)
def test_a_process_of_multiprocessing_shows_its_line(children: ChildStacks, method: str) -> None:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=wait_for_release, args=(there,))
    process.start()
    here.recv()
    thread = taken(children, "loop_until")
    text = stacks.take(Activity.INPUT, [thread]).text
    here.send(b"")
    process.join()
    assert process.exitcode == 0
    assert [function for _, _, function in thread.frames][-2:] == ["wait_for_release", "run"]
    described = stacks.describe([stacks.of_child(thread)], Activity.INPUT)  # one of this process may rank first
    assert described.text in text
    assert described.where.startswith(f"{__file__}:")
    assert described.where.endswith("in loop_until")


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_waits_for_work_runs_no_code_of_the_users(children: ChildStacks, method: str) -> None:
    """A forked one has the frames of the process that forked it below its own."""
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=wait_idly, args=(there,))
    process.start()
    here.recv()
    thread = taken(children, "wait_idly")
    here.send(b"")
    process.join()
    assert [function for _, _, function in thread.frames][-2:] == ["wait_idly", "run"]
    assert not stacks.of_child(thread).runs_user_code


def test_another_program_is_not_asked(children: ChildStacks) -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert children.take() == []
        process.communicate()
    assert process.returncode == 0


def test_without_a_watch_there_is_nothing() -> None:
    assert ChildStacks().take() == []


def test_a_process_that_is_stopped_does_not_answer(children: ChildStacks) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=wait_idly, args=(there,))
    process.start()
    here.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert children.take() == []
    os.kill(process.pid, signal.SIGCONT)
    here.send(b"")
    process.join()
    assert process.exitcode == 0
