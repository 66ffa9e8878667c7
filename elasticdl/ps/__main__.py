"""``python -m elasticdl.ps``: one parameter server pod."""

import logging
import os
import sys

from elasticdl.cluster.local.framework_import import no_garbage_collection
from elasticdl.cluster.local.process_title import name_process

with no_garbage_collection():
    from elasticdl.ps.server.process import main

if __name__ == "__main__":
    name_process()
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)  # threads of gRPC may never end
