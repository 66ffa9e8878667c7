"""``python -m elasticdl.master``: one life of a job's master, from its environment to its exit code.

Environment: ``ELASTICDL_JOB_DIR``, ``ELASTICDL_TOKEN_FILE``, ``MASTER_PORT`` (0: a free one) and
``ELASTICDL_AGENT_SOCKET`` for the local runtime.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from elasticdl.cluster.processes import ProcessCluster
from elasticdl.master.journal import Superseded
from elasticdl.master.master import Master, Place, crash_status, fail_status, read_spec
from elasticdl.rpc.tokens import TOKEN_FILE_VARIABLE, read_token
from elasticdl_client.errors import ElasticDLError, JobError

_LOOPBACK = "127.0.0.1"
_EXIT_SUPERSEDED = 3

logger = logging.getLogger("elasticdl.master")


def main() -> int:
    """The exit code of this life of the master."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    job_dir, job_name = Path(os.environ.get("ELASTICDL_JOB_DIR", "")), ""
    try:
        _environment("ELASTICDL_JOB_DIR")
        spec = read_spec(job_dir)
        job_name = spec.job_name
        logging.getLogger().setLevel(str(spec.log_level))
        master = Master(spec, _place(job_dir))
    except Superseded as error:
        logger.error("%s", error)
        return _EXIT_SUPERSEDED
    except ElasticDLError as error:
        logger.error("%s", error)
        if job_dir.name:
            fail_status(job_dir, job_name, str(error))
        return 1

    def stop(number: int, _frame: FrameType | None) -> None:
        master.request_stop(f"the job was ended by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        return master.run()
    except Superseded as error:
        logger.error("%s", error)
        return _EXIT_SUPERSEDED
    except ElasticDLError as error:
        logger.error("%s", error)
        fail_status(job_dir, job_name, str(error))
        return 1
    except Exception:
        crash_status(job_dir, job_name, "the master's log")
        logger.exception("Internal error of the master")
        return 70
    finally:
        master.close()


def _place(job_dir: Path) -> Place:
    token = read_token()
    return Place(
        job_dir=job_dir,
        cluster=ProcessCluster(_environment("ELASTICDL_AGENT_SOCKET")),
        host=_LOOPBACK,
        port=_port(os.environ.get("MASTER_PORT", "") or "0"),
        address=_LOOPBACK,
        token=token,
        token_file=os.environ[TOKEN_FILE_VARIABLE],
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise JobError(f"MASTER_PORT={text} is not a port")
    return int(text)


def _environment(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise JobError(f"{name} is not set", "masters are started by `elasticdl train`, not by hand")
    return value


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)  # threads of gRPC and of the watch may still wait for something
