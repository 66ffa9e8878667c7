"""``python -m elasticdl.worker.export.process RESULT_FD``: writes a model that a worker sends through standard input.

It loads the user's module again and holds the tables once; when it ends, their memory is free again.  Its last word
goes to the descriptor: JSON with `error`, empty if all went well, and `peak_bytes` of memory.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from typing import BinaryIO

from elasticdl.cluster.local.framework_import import import_less_with_keras, no_garbage_collection
from elasticdl.frameworks.framework import Parameters
from elasticdl.model_def import load_model_definition
from elasticdl.rpc.logs import log_to_stdout
from elasticdl.worker.export.stream import ExportReader, StreamEnded
from elasticdl.worker.factories import Readers, load_framework
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")


def export(pipe: BinaryIO) -> int:
    """Writes the model that the pipe brings.

    Returns:
        The bytes of memory that this process had before the first table came.
    """
    import_less_with_keras()
    reader = ExportReader(pipe)
    order = reader.message()
    spec = JobSpec.from_json(order["job_spec"])
    logging.getLogger().setLevel(spec.log_level)
    with no_garbage_collection():
        definition = load_model_definition(spec)
    framework = load_framework(spec, definition, Readers(spec, definition))
    framework.report()
    parameters = Parameters(reader.floats(order["num_trainable"]), reader.floats(order["num_non_trainable"]))
    before = _status_bytes("VmRSS")
    framework.export(order["path"], parameters, reader.tables(), order["model_file"])
    return before


def _status_bytes(name: str) -> int:
    """Of /proc/self/status, because getrusage includes the worker's own memory before exec."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def main(result_fd: int) -> int:
    """The exit code."""
    log_to_stdout()
    with os.fdopen(os.dup(0), "rb", buffering=0) as pipe, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # user code may read what it takes for the keyboard
        result: dict[str, object] = {"error": ""}
        try:
            result["started_bytes"] = export(pipe)
        except StreamEnded:
            return 1  # the worker is gone, or has lost its lease
        except ElasticDLError as error:
            result = {"error": str(error), "details": getattr(error, "details", "")}
        except Exception as error:  # noqa: BLE001  the user's model runs in here
            result = {"error": f"{type(error).__name__}: {error}", "details": traceback.format_exc()}
    result["peak_bytes"] = _status_bytes("VmHWM")
    with os.fdopen(result_fd, "w") as told:
        json.dump(result, told)
    return 1 if result["error"] else 0


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)  # threads of the framework may still wait for something
