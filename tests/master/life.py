"""``python -m tests.master.life JOB_DIR PORT``: a life of a master on a `DirectoryCluster`, to be killed by tests."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from elasticdl.master.environment import Endpoint
from elasticdl.master.journal import Superseded
from elasticdl.master.local_environment import LOOPBACK, FileJournal, LocalEnvironment, read_spec
from elasticdl.master.master import Master, fail
from elasticdl_client.errors import ElasticDLError
from tests.master.directory_cluster import DirectoryCluster

TOKEN = "a-token-of-tests"


def open_environment(job_dir: Path, port: int) -> LocalEnvironment:
    return LocalEnvironment(
        spec=read_spec(job_dir),
        cluster=DirectoryCluster(job_dir / "pods"),
        journal=FileJournal(job_dir),
        endpoint=Endpoint(LOOPBACK, port, TOKEN),
        token_file=str(job_dir / "token"),
    )


def main() -> int:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        place = open_environment(Path(sys.argv[1]), int(sys.argv[2]))
    except Superseded as error:
        print(error)
        return 3
    try:
        return Master(place).run()
    except Superseded as error:
        print(error)
        return 3
    except ElasticDLError as error:
        print(error)
        fail(place, error, threading.Event())
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
