"""A process group that cannot outlive the agent.

Two independent mechanisms end a group when the agent is gone, for whatever reason.  Its leader has asked the kernel for
SIGKILL at its parent's death.  And a sentinel, a shell that waits for the end of a pipe whose only writer is the agent,
kills the rest of the group.  The sentinel is in another group, so that signals to the pod's group (such as SIGSTOP) do
not reach it.  No process of the group runs user code before both are in place: the leader waits at a gate until then.
A process that leaves the group by itself (setsid) is not covered.

The agent must have a single thread: death signals are bound to the thread that forked.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHELL = "/bin/sh"
_SENTINEL = 'read _; kill -s KILL -- "-$1"'
_DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent (the thread that forked or adopted it) ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it learns how they end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def pass_gate(gate: int, parent: int) -> None:
    """Wait, in the leader, until the agent has guarded the group; end this process if the agent is gone."""
    if not os.read(gate, 1):
        os._exit(1)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.close(gate)


def redirect_output(log_fd: int) -> None:
    """Redirect standard output and error of this process to the log; its standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)


class Leash:
    """The pipe whose end shows all sentinels that the agent is gone.  Nothing is ever written to it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def spawn_sentinel(self, group: int) -> int:
        """Start the sentinel of a group, and return its pid."""
        return os.posix_spawn(
            _SHELL,
            [_SHELL, "-c", _SENTINEL, "sentinel", str(group)],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, self._read, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setpgroup=0,
            setsigmask=_DEAF_TO,
        )


@dataclass(slots=True)
class ProcessGroup:
    """A guarded group; its id is the pid of its leader, a child of this process."""

    pid: int
    sentinel: int

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes left in the group.  Call it only before the leader is reaped."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the rest of the group, and its sentinel.  Call it only before the leader is reaped."""
        self.signal(signal.SIGKILL)
        os.kill(self.sentinel, signal.SIGKILL)


def guard(pid: int, leash: Leash) -> ProcessGroup:
    """Make a child that waits at its gate the leader of a guarded group.

    Raises:
        OSError: the child is gone, or no process can be started.
    """
    os.setpgid(pid, pid)
    return ProcessGroup(pid, leash.spawn_sentinel(pid))


def start(
    command: Sequence[str], env: Mapping[str, str], log_fd: int, leash: Leash, inherit: Sequence[int] = ()
) -> ProcessGroup:
    """Start a command as the leader of a guarded group.

    A command that cannot be executed ends with code 127, and its log says why.

    Raises:
        OSError: no process can be started.
    """
    parent = os.getpid()
    gate, gate_opener = os.pipe()
    try:
        # Block signals while the child has the agent's handlers: a signal for the child must not end the agent.
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                os.close(gate_opener)
                _become(command, env, log_fd, gate, parent, inherit, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        group = guard(pid, leash)
        os.write(gate_opener, b"\n")
        return group
    finally:
        os.close(gate)
        os.close(gate_opener)


def _forget_handlers(mask: Iterable[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _become(
    command: Sequence[str],
    env: Mapping[str, str],
    log_fd: int,
    gate: int,
    parent: int,
    inherit: Sequence[int],
    mask: Iterable[int],
) -> NoReturn:
    try:
        _forget_handlers(mask)
        die_with_parent()
        pass_gate(gate, parent)
        redirect_output(log_fd)
        for fd in inherit:
            os.set_inheritable(fd, True)
        try:
            os.execvpe(command[0], list(command), dict(env))
        except OSError as error:
            os.write(2, f"cannot execute {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)
