"""``python -m elasticdl.master``: run one generation of a job's master, from its environment to its exit code.

``ELASTICDL_NAMESPACE`` and ``ELASTICDL_JOB_NAME`` select Kubernetes; otherwise it runs on the local runtime.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from contextlib import closing

from elasticdl.cluster.local.framework_import import no_garbage_collection
from elasticdl.cluster.local.process_title import name_process

with no_garbage_collection():
    from elasticdl.master import local_environment
    from elasticdl.master.environment import RuntimeEnvironment
    from elasticdl.master.journal import ResumedElsewhere, Superseded
    from elasticdl.master.master import Master, crash, end_here, fail
    from elasticdl.rpc.logs import log_to_stdout
    from elasticdl.rpc.signals import on_signals
    from elasticdl_client.choices import CODE_ERROR_VARIABLE
    from elasticdl_client.errors import ElasticDLError, JobError
    from elasticdl_client.job_status import EXIT_SUPERSEDED

logger = logging.getLogger("elasticdl.master")


class MasterProcess:
    """One generation of the master; the signal thread sets `stop`."""

    def __init__(self) -> None:
        self._master: Master | None = None
        self._is_checkpoint_requested = False

    def run(self) -> int:
        """Run the generation; return its exit code."""
        try:
            environment = _open_environment()
        except Superseded as error:
            logger.error("%s", error)
            return EXIT_SUPERSEDED
        except ElasticDLError as error:
            logger.error("%s", error)
            return 1
        with closing(environment):
            return self._run(environment)

    def on_signal(self, number: int) -> None:
        """Handle a signal: SIGUSR1 requests a checkpoint, others end the job or this generation of its master."""
        if number == signal.SIGUSR1:
            self._is_checkpoint_requested = True
            if self._master is not None:
                self._master.request_checkpoint()
            return
        if self._master is None:
            logging.shutdown()
            os._exit(128 + number)
        self._master.request_stop(signal.Signals(number).name)

    def _run(self, environment: RuntimeEnvironment) -> int:
        try:
            logging.getLogger().setLevel(str(environment.spec.log_level))
            if wrong := os.environ.get(CODE_ERROR_VARIABLE):
                what, hint, may_pass = json.loads(wrong)
                if may_pass and environment.journal.read_status() is not None:  # the job has begun: try it again
                    logger.error("%s", JobError(what, hint))
                    return 1
                raise JobError(what, hint)
            self._master = Master(environment)
            if self._is_checkpoint_requested:  # before the master existed
                self._master.request_checkpoint()
            return self._master.run()
        except ResumedElsewhere as error:
            logger.error("%s", error)
            end_here(environment, error, self._master.stopped if self._master is not None else threading.Event())
            return EXIT_SUPERSEDED
        except Superseded as error:
            logger.error("%s", error)
            return EXIT_SUPERSEDED
        except ElasticDLError as error:
            logger.error("%s", error)
            fail(environment, error, self._master.stopped if self._master is not None else threading.Event())
            return 1
        except Exception:
            crash(environment, "the master's log")
            logger.exception("Internal error of the master")
            return 70


def main() -> int:
    """Run this generation of the master; return its exit code."""
    log_to_stdout()
    process = MasterProcess()
    on_signals(process.on_signal, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return process.run()


def _open_environment() -> RuntimeEnvironment:
    if os.environ.get("ELASTICDL_NAMESPACE") and os.environ.get("ELASTICDL_JOB_NAME"):
        with no_garbage_collection():
            from elasticdl.master.kubernetes import environment

        return environment.open_environment()
    return local_environment.open_environment()


if __name__ == "__main__":
    name_process()
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)  # threads of gRPC and of the watch may still be blocked
