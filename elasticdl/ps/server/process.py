"""One PS pod, from its environment to its exit code.

Exit codes: 0: the master said stop; 1: an error here, or the master is gone or rejects this PS; 143: SIGTERM.  After
SIGTERM, the master says stop as soon as a checkpoint contains this PS's state.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl.ps.partition import Buckets, even_buckets
from elasticdl.ps.server.master_link import TERMINATED, Beginning, Left, PsIdentity, PsMasterLink, Shutdown
from elasticdl.ps.server.restoring import restore, restore_other
from elasticdl.ps.server.service import JobBounds, PsService, register_service, serve_tensors
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.rpc import addresses
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import read_master_timeout_s
from elasticdl.rpc.handshake import ENCRYPT_VARIABLE, check_encryption
from elasticdl.rpc.job_secret import read_token, whole_spec
from elasticdl.rpc.logs import log_to_stdout
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl.rpc.servers import serve
from elasticdl.rpc.signals import on_signals
from elasticdl.storage.paths import path_of
from elasticdl.storage.versions import NoneIsWhole
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.ps")

_MAX_THREADS = 512  # most of them wait for a round to close, or for a name in flight
_MAX_MESSAGE_BYTES = 16 << 20  # a worker sends more than 4 MiB as a stream


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of the pod.

    Attributes:
        host: Address to listen on, and to register unless `advertised` is set; with `advertised`, the default is any.
        port: 0: a free port.
        master_timeout_s: How long to continue without a master.
        encrypts: Encrypt tensors on the network.
    """

    ps_id: int
    pod_name: str
    master_address: str
    host: str
    port: int
    advertised: str
    master_timeout_s: float
    encrypts: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the settings from the environment.

        Raises:
            JobError: a variable is missing.
        """
        advertised = environment.get("PS_ADVERTISED_HOST", "")
        host = environment.get("PS_HOST", "") or (addresses.any_host() if advertised else "127.0.0.1")
        is_any = host in (addresses.ANY, addresses.ANY_IPV4)
        needed = ("MASTER_ADDR", "PS_ID", *(["PS_ADVERTISED_HOST"] if is_any else []))
        for name in needed:
            if not environment.get(name):
                raise JobError(f"{name} is not set", "parameter servers are started by the master, not by hand")
        return cls(
            ps_id=int(environment["PS_ID"]),
            pod_name=environment.get("ELASTICDL_POD_NAME", ""),
            master_address=environment["MASTER_ADDR"],
            host=host,
            port=int(environment.get("PS_PORT", "0")),
            advertised=advertised,
            master_timeout_s=read_master_timeout_s(),
            encrypts=bool(environment.get(ENCRYPT_VARIABLE)),
        )


class PsProcess:
    """Builds the parts of one PS, and sends its heartbeats."""

    def __init__(self, settings: Settings, token: str) -> None:
        self._settings = settings
        self._token = token
        self._service = PsService(settings.ps_id, ServerState())
        self._beginning = Beginning()
        self._departure = Shutdown()
        self._ready = threading.Event()

    def terminate(self) -> None:
        """Handle SIGTERM: leave in order, or at once if no worker uses this PS yet."""
        if self._ready.is_set():
            self._departure.ask()
        else:
            self._departure.leave(TERMINATED)

    def run(self) -> int:
        """Serve until a request to leave; return the exit code.

        Raises:
            ElasticDLError: this PS cannot continue.
        """
        settings = self._settings
        if settings.encrypts:
            check_encryption()
        tensors = serve_tensors(self._service, settings.host, self._token, self._damaged, settings.encrypts)
        server, port = serve(
            lambda grpc_server: register_service(grpc_server, self._service, self._damaged, tensors.address),
            settings.host,
            settings.port,
            self._token,
            _MAX_THREADS,
            "PS_PORT",
            _MAX_MESSAGE_BYTES,
        )
        try:
            address = addresses.written(settings.advertised or settings.host, port)
            identity = PsIdentity(settings.ps_id, settings.pod_name, address)
            link = PsMasterLink(
                settings.master_address,
                self._token,
                identity,
                self._departure,
                self._service.accept_lease,
                settings.master_timeout_s,
            )
            self._serve(link, identity)
        except Left:
            pass
        finally:
            server.stop(grace=1.0).wait()
            tensors.close()
        return self._departure.exit_code

    def _serve(self, link: PsMasterLink, identity: PsIdentity) -> None:
        admitted = link.register()
        spec = whole_spec(admitted.job_spec)
        logging.getLogger().setLevel(spec.log_level)
        service, own = self._service, even_buckets(identity.ps_id, spec.num_ps_pods)
        service.state, service.job = ServerState(_updates(spec), own), JobBounds(spec.checkpoint_dir, spec.num_epochs)
        threading.Thread(target=self._begin, args=(link, admitted, own), daemon=True).start()
        _log.info("PS %d serves at %s, incarnation %d", identity.ps_id, identity.address, link.incarnation)
        while not link.wait(lambda: service.is_master_awaited):
            activity = "serving" if self._ready.is_set() else "restoring"
            reply = link.beat(activity, service.partition.version, service.load())
            if reply.HasField("partition"):
                service.accept_partition(reply.partition)
            if reply.known:
                service.num_pushing = reply.num_pushing
            if reply.stop:
                _log.info("Stopping: requested by the master")
                self._departure.leave_in_order()
            elif link.is_new_life(reply):
                _log.info("Registering again: the master has generation %d", reply.generation)
                link.register()
                if self._ready.is_set():
                    self._report_ready(link)

    def _begin(self, link: PsMasterLink, admitted: pb.RegisterPsReply, own: Buckets) -> None:
        """Restore the state and report it ready, in a thread of its own, so that heartbeats continue."""
        try:
            try:
                self._beginning = self._restore(admitted, own)
            except ElasticDLError as error:
                _log.error("%s", error)
                damaged = error.damaged if isinstance(error, NoneIsWhole) else ()
                self._beginning = Beginning("", damaged, error.what)
            else:
                self._service.incarnation = link.incarnation
                self._ready.set()
            self._report_ready(link)
            if self._beginning.error:
                self._departure.leave(1)
        except Left:
            pass
        except ElasticDLError as error:
            _log.error("%s", error)
            self._departure.leave(1)

    def _restore(self, admitted: pb.RegisterPsReply, own: Buckets) -> Beginning:
        """Restore the checkpoint that the master names, if any.

        Raises:
            ElasticDLError: the checkpoint cannot be restored.
        """
        if not admitted.restore_from:
            return Beginning()
        begun = time.monotonic()
        wanted, state = path_of(admitted.restore_from), self._service.state
        if admitted.parameters_only:
            restored = restore_other(wanted, own, lambda snapshot: state.restore(snapshot, parameters_only=True))
        else:
            restored = restore(wanted, own, lambda snapshot: state.restore(snapshot, parameters_only=False))
        for reason in restored.damaged:
            _log.warning("A damaged checkpoint is passed over: %s", reason)
        _, _, version = state.applied()
        seconds = time.monotonic() - begun
        _log.info("Restored %s in %.1f s, version %d of this PS", restored.directory, seconds, version)
        return Beginning(str(restored.directory), restored.damaged)

    def _report_ready(self, link: PsMasterLink) -> None:
        _, initialized, _ = self._service.state.applied()
        link.report_ready(initialized, self._beginning)

    def _damaged(self) -> None:
        _log.error("An update failed in its middle: leaving, to be restored from the last checkpoint")
        self._departure.leave(1)


def _updates(spec: JobSpec) -> UpdateSettings:
    return UpdateSettings(
        use_async=spec.use_async,
        grads_to_wait=spec.grads_to_wait,
        sync_version_tolerance=spec.sync_version_tolerance,
        max_staleness=spec.max_staleness,
        lr_staleness_modulation=spec.lr_staleness_modulation,
    )


def main() -> int:
    """Run a PS, and return its exit code."""
    log_to_stdout()
    threading.excepthook = _end_on_thread_error
    keep_large_buffers()
    try:
        process = PsProcess(Settings.from_environment(os.environ), read_token())
        on_signals(lambda _: process.terminate(), signal.SIGTERM)
        return process.run()
    except ElasticDLError as error:
        _log.error("%s", error)
        return 1


def _end_on_thread_error(args: threading.ExceptHookArgs) -> None:
    """End a PS whose restoring thread dies, with the reason in its log: it would never be ready."""
    _log.error("Thread %s died", args.thread and args.thread.name, exc_info=args.exc_value)
    logging.shutdown()
    os._exit(1)
