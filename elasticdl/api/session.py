"""A script's place in its job: the link to the master, and the job's flags; or no job at all, when it runs by itself.

There is one session in a process.  Nothing here knows of a framework.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from dataclasses import dataclass

from elasticdl.rpc.job_secret import read_token, whole_spec
from elasticdl.rpc.patience import read_master_timeout_s
from elasticdl.worker.activity import ActivityClock
from elasticdl.worker.master_link import MasterLink
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_spec import JobSpec

_OUR_THREADS = ("heartbeat", "reporter", "world watch")


@dataclass(frozen=True, slots=True)
class ScriptSession:
    """The job as a script sees it.

    Attributes:
        link: None: this process runs by itself.
        spec: of the job; defaults when there is none.
        clock: where the time goes; the heartbeat carries it.
        is_server: this pod is one of TensorFlow's parameter servers: it runs the script and takes no data.
    """

    link: MasterLink | None
    spec: JobSpec
    clock: ActivityClock
    is_server: bool = False

    @property
    def is_alone(self) -> bool:
        return self.link is None

    @classmethod
    def join(cls) -> ScriptSession:
        """Registers with the master that the environment names; without one the process is alone.

        Raises:
            JobError: the master cannot be reached, or has replaced this worker.
        """
        clock, address = ActivityClock(), os.environ.get("MASTER_ADDR", "")
        if not address:
            return cls(None, JobSpec(), clock)
        if "PS_ID" in os.environ:
            return cls(None, JobSpec(), clock, is_server=True)
        if "WORKER_ID" not in os.environ:
            raise JobError("MASTER_ADDR is set, and WORKER_ID is not", "unset MASTER_ADDR to run alone")
        link = MasterLink(
            address,
            read_token(),
            int(os.environ["WORKER_ID"]),
            os.environ.get("ELASTICDL_POD_NAME", ""),
            clock,
            read_master_timeout_s(),
        )
        spec = whole_spec(link.register().job_spec)
        logging.getLogger("elasticdl").setLevel(spec.log_level)
        _end_with_our_threads()
        link.start_heartbeat()
        if spec.num_processes_per_worker > 1:
            atexit.register(_report_end, link, os.getpid())  # the first registered, so the last to be called
        return cls(link, spec, clock)


def _report_end(link: MasterLink, process_id: int) -> None:
    """At the end of the process: the exit code of the pod says whether it has ended well."""
    if os.getpid() == process_id:  # not a process that the script has forked
        link.report_end()


def _end_with_our_threads() -> None:
    """A script whose heartbeat or reporter has died would work for nothing: it ends, with the reason in its log."""
    before = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        if args.thread is None or args.thread.name not in _OUR_THREADS:
            before(args)
            return
        if isinstance(args.exc_value, ElasticDLError):
            sys.stderr.write(f"elasticdl: {args.exc_value}\n")
        else:
            before(args)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end
