"""``python -m elasticdl.worker.processes N GPUS MODULE ARGUMENT …``: a worker pod of N processes that run a module."""

import runpy
import sys

from elasticdl.worker.processes import supervisor

if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python -m elasticdl.worker.processes N GPUS MODULE ARGUMENT …")
    code = supervisor.run(int(sys.argv[1]), int(sys.argv[2]))
    if code is not None:
        sys.exit(code)
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
