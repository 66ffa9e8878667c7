"""The agent's side of the standby: when it is used, its requests, its restarts.

The standby is started when the first pod that could use it is created.  That pod, and pods created during its imports,
wait for it: one import and forks are faster than an import in every pod.  It serves pods of one framework whose
environments differ only in variables that imports do not read; or of one script that imports PyTorch first.  A request
that it does not answer always falls back to a plain start.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from elasticdl.cluster.cluster import PodSpec
from elasticdl.cluster.local.process_group import Leash, ProcessGroup, start
from elasticdl.cluster.local.script import COMMAND_MODULE, Script
from elasticdl.cluster.local.standby import PRELOADED, ForkRequest
from elasticdl_client.choices import RUN_MODULE

_LOG = logging.getLogger("elasticdl.agent")
_PYTHON = (sys.executable, *RUN_MODULE)
_STANDBY = "elasticdl.cluster.local.standby"
_SCRIPT_STANDBY = "elasticdl.cluster.local.script_standby"
_MAX_FAILURES = 3  # dead standbys, or hung children, after which no more is started
_OWN_PREFIX = "ELASTICDL_"
_OWN_NAMES = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORKER_ID", "PS_ID"})


@dataclass(frozen=True, slots=True)
class _Flavour:
    """The properties of a pod that its standby must have as well: the imports, and all that they may read.

    Attributes:
        program: The command of the standby, up to its descriptor.
        arguments: The arguments after the agent's process id.
        env: The environment of the pod, without the variables of a single pod.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    env: tuple[tuple[str, str], ...]

    @staticmethod
    def of(spec: PodSpec, env: Mapping[str, str]) -> _Flavour | None:
        """Return the flavour of a pod; None if no standby could serve it."""
        if len(spec.command) <= len(_PYTHON) or spec.command[: len(_PYTHON)] != _PYTHON:
            return None
        own = (item for item in spec.env.items() if not item[0].startswith(_OWN_PREFIX) and item[0] not in _OWN_NAMES)
        shared = tuple(sorted(own))
        script = Script.of(spec.command, env)
        if script is not None:
            program = (*_PYTHON, COMMAND_MODULE, script.directory, *script.interpreter, "-m", _SCRIPT_STANDBY)
            return _Flavour(program, (",".join(script.modules), *script.words), shared)
        if spec.framework not in PRELOADED:
            return None
        if any(importlib.util.find_spec(name.partition(".")[0]) is None for name in PRELOADED[spec.framework]):
            return None
        return _Flavour((*_PYTHON, _STANDBY), (spec.framework,), shared)


class Fork:
    """A pod that is being forked by the standby, until it has reported progress or failed to."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.gate, self._gate_opener = os.pipe()
        self._ready_reader, self.ready = os.pipe()
        os.set_blocking(self._ready_reader, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open_gate(self, loop: asyncio.AbstractEventLoop, on_progress: Callable[[], None]) -> None:
        """Let the guarded child continue; `on_progress` is called when it has reported, or closed its pipe."""
        with suppress(BrokenPipeError):  # it was killed at its gate; `reap` will handle that
            os.write(self._gate_opener, b"\n")
        self._loop = loop
        loop.add_reader(self._ready_reader, on_progress)

    def close_childs_ends(self) -> None:
        """Close the child's descriptors, after the request was sent: from now on, only the child has them."""
        os.close(self.gate)
        os.close(self.ready)

    def has_progressed(self) -> bool:
        """Return whether the child has reported; True at most once."""
        try:
            return os.read(self._ready_reader, 1) != b""
        except BlockingIOError:
            return False

    def stop_watching(self) -> None:
        """Stop calling `on_progress`."""
        if self._loop is not None:
            self._loop.remove_reader(self._ready_reader)
            self._loop = None

    def close(self) -> None:
        """End the watch; a child that is still at its gate ends itself."""
        self.stop_watching()
        os.close(self._gate_opener)
        os.close(self._ready_reader)


class StandbyProcess:
    """Starts, uses and restarts at most one standby.

    Args:
        loop: The agent's event loop.
        leash: Guards the standby like any pod.
        log_fd: The log for the standby's output.
        on_forked: Called with (request number, pid) when a child waits at its gate.
        on_lost: Called when the standby is gone, so that no request in flight will be answered.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        leash: Leash,
        log_fd: int,
        on_forked: Callable[[int, int], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._leash = leash
        self._log_fd = log_fd
        self._on_forked = on_forked
        self._on_lost = on_lost
        self._flavour: _Flavour | None = None
        self._env: Mapping[str, str] = {}
        self._group: ProcessGroup | None = None
        self._control: socket.socket | None = None
        self._ready = asyncio.Event()
        self._failures = 0
        self._last_number = 0

    @property
    def pid(self) -> int:
        return self._group.pid if self._group else 0

    @property
    def sentinel(self) -> int:
        return self._group.sentinel if self._group else 0

    @property
    def ready(self) -> asyncio.Event:
        """Set while the standby has finished its imports, and can fork at once."""
        return self._ready

    def prepare(self, spec: PodSpec, env: Mapping[str, str]) -> None:
        """Start a standby for pods like this one, unless there is one, or none could serve it."""
        if self._flavour is not None:
            return
        self._flavour = _Flavour.of(spec, env)
        if self._flavour is not None:
            self._env = env
            self._start()

    def request(self, spec: PodSpec, env: Mapping[str, str], log_fd: int) -> Fork | None:
        """Request a fork; None if this pod must be started plainly."""
        if self._control is None or _Flavour.of(spec, env) != self._flavour:
            return None
        self._last_number += 1
        fork = Fork(self._last_number)
        module, *arguments = spec.command[len(_PYTHON) :]
        try:
            ForkRequest(fork.number, module, tuple(arguments), dict(env), log_fd, fork.gate, fork.ready).send(
                self._control
            )
        except OSError as error:
            _LOG.warning("the standby rejected a request: %s", error)
            fork.close_childs_ends()
            fork.close()
            return None
        fork.close_childs_ends()
        return fork

    def trust(self) -> None:
        """Reset the count of failures: a child of this standby works."""
        self._failures = 0

    def end(self) -> None:
        """Kill the standby; `process_ended` will start another one."""
        self._ready.clear()
        if self._group is not None:
            self._group.kill()

    def process_ended(self) -> None:
        """Handle the end of the standby, just before the kubelet reaps it."""
        if self._group is not None:
            self._group.kill()
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._control.close()
        self._group, self._control = None, None
        self._ready.clear()
        self._failures += 1
        if self._failures < _MAX_FAILURES:
            _LOG.warning("the standby process has ended; starting another one")
            self._start()
        else:
            _LOG.warning("the standby process has ended %d times; pods are started plainly now", self._failures)
        self._on_lost()

    def respawn_sentinel(self) -> None:
        """Start the sentinel again after it was killed from outside."""
        if self._group is not None:
            self._group.sentinel = self._leash.spawn_sentinel(self._group.pid)

    def _start(self) -> None:
        assert self._flavour is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fd = theirs.fileno()
        command = [*self._flavour.program, str(fd), str(os.getpid()), *self._flavour.arguments]
        with theirs:
            try:
                self._group = start(command, self._env, self._log_fd, self._leash, inherit=[fd])
            except OSError as error:
                ours.close()
                _LOG.warning("no standby process: %s", error)
                return
        self._control = ours
        self._loop.add_reader(ours, self._answered)

    def _answered(self) -> None:
        assert self._control is not None
        data = b""
        with suppress(OSError):
            data = self._control.recv(4096)
        if not data:  # it is ending; `process_ended` does the rest
            self._loop.remove_reader(self._control)
            self._ready.clear()
            return
        answer = json.loads(data)
        if answer:
            self._on_forked(answer["number"], answer["pid"])
        else:
            _LOG.info("the standby process is ready")
            self._ready.set()
