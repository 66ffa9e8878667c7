"""Signals reach the thread that waits for them, whatever the main thread does and whichever thread the kernel chose."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.rpc.signalling import signal_other_thread

BLOCKED_MAIN = """
import signal, threading
from elasticdl.rpc.signals import on_signals
on_signals(lambda number: print(number, flush=True), signal.SIGTERM, signal.SIGINT)
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
LOCKED_MAIN = """
import signal, threading
from elasticdl.rpc.signals import on_signals
told = threading.Event()
on_signals(lambda number: told.set(), signal.SIGTERM)
with told._cond:  # as the main thread has it at times within `Event.wait`
    print("ready", flush=True)
    input()
told.wait()
print("told", flush=True)
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
    try:
        assert line(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_signal_is_received_while_the_main_thread_waits_for_a_lock() -> None:
    with running(BLOCKED_MAIN) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            while line(process) != str(int(number)):  # it may be told twice
                assert process.poll() is None


def test_a_signal_that_another_thread_gets_is_received() -> None:
    with running(BLOCKED_MAIN) as process:
        signal_other_thread(process.pid, signal.SIGTERM)
        assert line(process) == str(int(signal.SIGTERM))


def test_a_signal_is_received_while_the_main_thread_holds_the_lock_of_the_event() -> None:
    with running(LOCKED_MAIN) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line(process) == "told"
