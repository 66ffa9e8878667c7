"""``python -m elasticdl.worker``: one worker pod."""

import logging
import os
import sys
from contextlib import suppress

from elasticdl.activities import ActivityClock
from elasticdl.cluster.local.framework_import import import_less_with_keras, no_garbage_collection
from elasticdl.cluster.local.process_title import name_process
from elasticdl.worker.termination import Termination

if __name__ == "__main__":
    name_process()
    clock = ActivityClock()
    termination = Termination(clock)
    termination.install()
    import_less_with_keras()
    # Import this late: the framework takes seconds, and SIGTERM may come before it is loaded.
    with no_garbage_collection():
        from elasticdl.worker.process import main

    exit_code = main(clock, termination)
    logging.shutdown()
    with suppress(ValueError, OSError):  # user code has closed stdout, or its descriptor
        sys.stdout.flush()
    os._exit(exit_code)  # threads of gRPC and of the framework may never end
