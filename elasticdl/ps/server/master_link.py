"""A PS's communication with the master: registration, readiness, heartbeats.

It repeats calls until the master answers or has been away for too long.  It registers again, with its incarnation, with
every new generation of the master; that never changes the state of the PS.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import MasterGone, connect, is_transient
from elasticdl.rpc.resource_use import cpu_use, used_share
from elasticdl_client.errors import JobError

TERMINATED = 128 + signal.SIGTERM


class Shutdown:
    """The end of this process: ordered by the master, after SIGTERM, or by an error.

    `leave` sets the exit code; the first call counts.  Thread-safe, but not for signal handlers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._exit_code: int | None = None
        self._asked_at: float | None = None

    @property
    def exit_code(self) -> int:
        return self._exit_code or 0

    @property
    def asked_at(self) -> float | None:
        """Monotonic time of SIGTERM; None before."""
        return self._asked_at

    def ask(self) -> None:
        """Note SIGTERM: leave as soon as the master says that nothing is lost by it."""
        with self._changed:
            if self._asked_at is None:
                self._asked_at = time.monotonic()
                self._changed.notify_all()

    def leave(self, exit_code: int) -> None:
        """Leave now."""
        with self._changed:
            if self._exit_code is None:
                self._exit_code = exit_code
                self._changed.notify_all()

    def leave_in_order(self) -> None:
        """Leave now, by order of the master."""
        self.leave(0 if self._asked_at is None else TERMINATED)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the time-out, SIGTERM or `leave`; return whether to leave now."""
        with self._changed:
            before = self._asked_at
            self._changed.wait_for(lambda: self._exit_code is not None or self._asked_at != before, timeout_s)
            return self._exit_code is not None


_log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_URGENT_HEARTBEAT_S = 0.2
_CALL_TIMEOUT_S = 10.0
_LAST_CALLS_S = 3.0  # after SIGTERM, how long to wait for a master that does not answer
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0

Answer = TypeVar("Answer")


class RegistrationRefused(JobError):
    """The master rejects this PS: it has replaced it, or the job is over."""


class Left(Exception):
    """SIGTERM came while this PS waited for the master."""


@dataclass(frozen=True, slots=True)
class PsIdentity:
    """The id of this PS, and the address where it listens."""

    ps_id: int
    pod_name: str
    address: str


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state that a PS began with.

    Attributes:
        restored_from: Directory of the checkpoint; empty: none.
        damaged: The fault of each checkpoint that was skipped.
        error: Why the PS cannot begin at all; empty if it can.
    """

    restored_from: str = ""
    damaged: tuple[str, ...] = ()
    error: str = ""


class PsMasterLink:
    """One PS's connection to its master.

    Args:
        departure: Ends all waits.
        accept_lease: Called with the first lease of every generation of the master, and with its newest lease.
    """

    def __init__(
        self,
        address: str,
        token: str,
        identity: PsIdentity,
        departure: Shutdown,
        accept_lease: Callable[[int], None],
        master_timeout_s: float,
    ) -> None:
        self._stub: Any = pb_grpc.MasterStub(connect(address, token))  # type: ignore[no-untyped-call]
        self._address = address
        self._identity = identity
        self._departure = departure
        self._accept_lease = accept_lease
        self._master_timeout_s = master_timeout_s
        self._nonce = secrets.randbits(62)
        self._generation = 0
        self.incarnation = 0

    def register(self) -> pb.RegisterPsReply:
        """Register this PS, and take the incarnation that the master assigns.

        Raises:
            RegistrationRefused, MasterGone, Left: this process must end.
        """
        request = pb.RegisterPsRequest(
            ps_id=self._identity.ps_id,
            pod_name=self._identity.pod_name,
            address=self._identity.address,
            nonce=self._nonce,
            held_incarnation=self.incarnation,
        )
        reply: pb.RegisterPsReply = self._call(self._stub.RegisterPs, request)
        if not reply.accepted:
            raise RegistrationRefused(f"the master does not accept PS {self._identity.ps_id}: {reply.reason}")
        if self.incarnation not in (0, reply.incarnation):
            raise RegistrationRefused(
                f"PS {self._identity.ps_id} has become {reply.incarnation}, this one is {self.incarnation}"
            )
        self.incarnation = reply.incarnation
        self._note_generation(reply.generation)
        return reply

    def report_ready(self, initialized: bool, beginning: Beginning) -> None:
        """Report that this PS is ready, or that it cannot be.  The master then reads its applied set.

        Raises:
            RegistrationRefused, MasterGone, Left: this process must end.
        """
        request = pb.PsReadyRequest(
            ps_id=self._identity.ps_id,
            incarnation=self.incarnation,
            initialized=initialized,
            restored_from=beginning.restored_from,
            damaged=beginning.damaged,
            error=beginning.error,
        )
        reply: pb.Ack = self._call(self._stub.PsReady, request)
        if not reply.accepted:  # perhaps by a new generation of the master, unknown until now
            self.register()
            reply = self._call(self._stub.PsReady, request)
        if not reply.accepted:
            raise RegistrationRefused(f"the master does not accept PS {self._identity.ps_id}: {reply.reason}")

    def beat(self, activity: str, partition_version: int, load: pb.PsLoad) -> pb.HeartbeatReply:
        """Send one heartbeat.

        Args:
            partition_version: Version of the newest partition known here.
            load: Counters of this PS.

        Raises:
            MasterGone, Left: this process must end.
        """
        request = pb.HeartbeatRequest(
            role=pb.PS,
            id=self._identity.ps_id,
            incarnation=self.incarnation,
            activity=activity,
            leaving=self._departure.asked_at is not None,
            partition_version=partition_version,
            load=load,
            memory_share=used_share(),
            cpu=cpu_use(),
        )
        reply: pb.HeartbeatReply = self._call(self._stub.Heartbeat, request)
        if reply.known:
            self._accept_lease(reply.newest_lease)
        return reply

    def is_new_life(self, reply: pb.HeartbeatReply) -> bool:
        """Return whether the master that answered does not know this PS yet."""
        return reply.generation > self._generation or (not reply.known and reply.generation == self._generation)

    def wait(self, is_urgent: Callable[[], bool]) -> bool:
        """Wait until the next heartbeat is due; return whether to leave now.

        Args:
            is_urgent: Returns whether something waits for the master's answer.
        """
        due = time.monotonic() + _HEARTBEAT_S
        while not self._departure.wait(_URGENT_HEARTBEAT_S):
            if self._departure.asked_at is not None or is_urgent() or time.monotonic() >= due:
                return False
        return True

    def _note_generation(self, generation: int) -> None:
        self._generation = max(self._generation, generation)
        self._accept_lease(generation << 32)

    def _call(self, method: Callable[..., Answer], request: object) -> Answer:
        backoff_s = _FIRST_BACKOFF_S
        gone_since = time.monotonic()
        while True:
            try:
                return method(request, timeout=_CALL_TIMEOUT_S if self._departure.asked_at is None else _LAST_CALLS_S)
            except grpc.RpcError as error:
                if not is_transient(error):
                    raise JobError(f"the master at {self._address} refuses a call: {error.details()}") from error
                if time.monotonic() - gone_since > self._master_timeout_s:
                    raise MasterGone(self._address, self._master_timeout_s) from error
                self._leave_without_master(gone_since)
                if backoff_s == _FIRST_BACKOFF_S:
                    _log.info("Waiting for the master at %s: %s", self._address, error.code().name.lower())
            if self._departure.wait(backoff_s):
                raise Left
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _leave_without_master(self, gone_since: float) -> None:
        """After SIGTERM, leave if the master is away: no checkpoint will be requested any more."""
        asked_at = self._departure.asked_at
        if asked_at is not None and time.monotonic() - max(asked_at, gone_since) >= _LAST_CALLS_S:
            _log.warning("The master at %s does not answer: leaving without a checkpoint", self._address)
            self._departure.leave(TERMINATED)
