"""``python -m tests.master.life JOB_DIR PORT``: a life of a master on a `DirectoryCluster`, to be killed by tests."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from elasticdl.master.journal import Superseded
from elasticdl.master.master import Master, Place, fail_status, read_spec
from elasticdl_client.errors import ElasticDLError
from tests.master.directory_cluster import DirectoryCluster

TOKEN = "a-token-of-tests"


def place(job_dir: Path, port: int) -> Place:
    cluster = DirectoryCluster(job_dir / "pods")
    return Place(job_dir, cluster, "127.0.0.1", port, "127.0.0.1", TOKEN, str(job_dir / "token"))


def main() -> int:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    job_dir = Path(sys.argv[1])
    try:
        return Master(read_spec(job_dir), place(job_dir, int(sys.argv[2]))).run()
    except Superseded as error:
        print(error)
        return 3
    except ElasticDLError as error:
        print(error)
        fail_status(job_dir, "digits", str(error))
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
