"""Members of a group as real processes: each does what it is told, and says what came of it.

They are forked from a process that has torch in memory already, so that a new one costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from elasticdl.collective import ElasticGroup, GroupLost, Peer

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before the members' server imports torch
HOST = "127.0.0.1"
TOKEN = "the token of this job"
ANSWER_S = 30.0

Verb = Callable[..., Any]


class Told:
    """A verb on its way in a member."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def result(self, timeout_s: float = ANSWER_S) -> Any:
        """Its result, or the exception it raised."""
        assert self._connection.poll(timeout_s), "the member does not answer"
        answer, error = self._connection.recv()
        if error is not None:
            raise error
        return answer

    def error(self, timeout_s: float = ANSWER_S) -> GroupLost:
        try:
            answer = self.result(timeout_s)
        except GroupLost as error:
            return error
        raise AssertionError(f"no GroupLost, but {answer!r}")

    def has_answered(self, within_s: float) -> bool:
        return self._connection.poll(within_s)


class Member:
    """A process with an `ElasticGroup`.

    Args:
        environment: of it, beside this process's own.
    """

    def __init__(self, number: int, device: str = "cpu", environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "tests.collective.members"])
        self.number = number
        self._calls, calls = context.Pipe()
        self._signals, signals = context.Pipe()
        self._process = context.Process(
            target=_live, args=(calls, signals, device, dict(environment or {})), daemon=True
        )
        self._process.start()
        calls.close()
        signals.close()
        self.address = Told(self._calls).result()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def peer(self) -> Peer:
        return Peer(self.number, self.address)

    def tell(self, verb: Verb, *args: Any) -> Told:
        """Its main thread does `verb(group, *args)`, a function of a module."""
        self._calls.send((verb, args))
        return Told(self._calls)

    def call(self, verb: Verb, *args: Any) -> Any:
        return self.tell(verb, *args).result()

    def meanwhile(self, verb: Verb, *args: Any) -> Any:
        """Another thread of it does the same, whatever the main thread does."""
        self._signals.send((verb, args))
        return Told(self._signals).result()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int:
        """Its exit code after an orderly end."""
        if self._process.is_alive():
            self.go_on()
            self._calls.send(None)
            self._process.join(ANSWER_S)
        if self._process.is_alive():
            self.kill()
        code = self._process.exitcode
        assert code is not None
        return code


@contextmanager
def members(count: int) -> Iterator[list[Member]]:
    with ending([Member(number) for number in range(count)]) as made:
        yield made


@contextmanager
def ending(made: list[Member]) -> Iterator[list[Member]]:
    """Members, which have ended afterwards."""
    try:
        yield made
    finally:
        for member in made:
            member.end()


def form(group: Sequence[Member], version: int, timeout_s: float = ANSWER_S) -> None:
    """All of them form a group in this order."""
    for told in begin_to_form(group, version, timeout_s):
        told.result()


def begin_to_form(
    group: Sequence[Member], version: int, timeout_s: float = ANSWER_S, absent: Sequence[Member] = ()
) -> list[Told]:
    """Addresses of the members that come."""
    peers = [member.peer for member in group]
    return [
        member.tell(ElasticGroup.form, version, peers, rank, timeout_s)
        for rank, member in enumerate(group)
        if member not in absent
    ]


def all_do(group: Sequence[Member], verb: Verb, *args: Any) -> list[Any]:
    """Return the results of all."""
    told = [member.tell(verb, *args) for member in group]
    return [one.result() for one in told]


def until(is_true: Callable[[], bool], timeout_s: float = ANSWER_S) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end, "it does not become true"
        time.sleep(0.005)


def _live(calls: Connection, signals: Connection, device: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    group = ElasticGroup(HOST, TOKEN, device)
    calls.send((group.address, None))
    threading.Thread(target=_obey, args=(group, signals), daemon=True).start()
    _obey(group, calls)
    group.close()


def _obey(group: ElasticGroup, orders: Connection) -> None:
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        if order is None:
            return
        verb, args = order
        try:
            answer = verb(group, *args), None
        except GroupLost as error:
            answer = None, GroupLost(error.what, error.rank)
        except Exception as error:  # noqa: BLE001  raised again by the caller
            answer = None, error
        orders.send(answer)
