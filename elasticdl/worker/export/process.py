"""``python -m elasticdl.worker.export.process RESULT_FD``: writes a model that a worker sends through standard input.

It loads the user's module again and holds the tables once; when it ends, their memory is free again.  Finally it writes
JSON to the descriptor: `error`, empty if it has succeeded, and its memory as `started_bytes` and `peak_bytes`.

The model comes as messages and arrays through a pipe, each read once, in order.  A message is a little-endian u64 and
as many bytes of JSON; an array is its bytes alone, its size being known by then.  A chunk of a table is the u64 count
of its ids, the ids, and their rows; a count of 0 ends the table.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from elasticdl.cluster.local.framework_import import import_less_with_keras, no_garbage_collection
from elasticdl.frameworks.framework import Floats, Ids, InitialRow, Parameters, TableRows
from elasticdl.model_def import load_model_definition
from elasticdl.rpc.logs import log_to_stdout
from elasticdl.worker.factories import Readers, load_framework
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_spec import JobSpec

_log = logging.getLogger("elasticdl.worker")


def export(pipe: BinaryIO) -> int:
    """Write the model that comes through the pipe.

    Returns:
        The memory of this process before the first table, in bytes.
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
    """Return a field of /proc/self/status in bytes; getrusage would include the worker's memory before exec."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def main(result_fd: int) -> int:
    """Run the process, and return its exit code."""
    log_to_stdout()
    with os.fdopen(os.dup(0), "rb", buffering=0) as pipe, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # user code must not read the model as keyboard input
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
    with os.fdopen(result_fd, "w") as file:
        json.dump(result, file)
    return 1 if result["error"] else 0


_COUNT = struct.Struct("<Q")


class StreamEnded(Exception):
    """The other end has closed the pipe."""


class ExportWriter:
    """Writes a model to the pipe.  Raises `BrokenPipeError` after the reader has ended."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def message(self, **values: Any) -> None:
        encoded = json.dumps(values).encode()
        self._count(len(encoded))
        self._pipe.write(encoded)

    def array(self, values: npt.NDArray[Any]) -> None:
        self._pipe.write(_bytes(np.ascontiguousarray(values)))

    def table(self, table: TableRows) -> None:
        self.message(table=table.name, num_rows=table.num_rows, dim=table.dim, initial=asdict(table.initial))
        for ids, rows in table.chunks:
            if len(ids):
                self._count(len(ids))
                self.array(ids)
                self.array(rows)
        self._count(0)

    def end(self) -> None:
        """End the stream after the last table."""
        self.message(end=True)
        self._pipe.flush()

    def _count(self, count: int) -> None:
        self._pipe.write(_COUNT.pack(count))


class ExportReader:
    """Reads a model from the pipe.  Raises `StreamEnded` if it ends too early."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def message(self) -> dict[str, Any]:
        encoded = bytearray(self._count())
        self._fill(memoryview(encoded))
        decoded: dict[str, Any] = json.loads(encoded)
        return decoded

    def floats(self, *shape: int) -> Floats:
        values = np.empty(shape, np.float32)
        self._fill_array(values)
        return values

    def tables(self) -> Iterator[TableRows]:
        """Yield the tables; each must be read to its end before the next."""
        while "table" in (message := self.message()):
            name, num_rows, dim = message["table"], message["num_rows"], message["dim"]
            yield TableRows(name, dim, num_rows, self._chunks(dim), InitialRow(**message["initial"]))

    def _chunks(self, dim: int) -> Iterator[tuple[Ids, Floats]]:
        while (count := self._count()) > 0:
            ids = np.empty(count, np.int64)
            self._fill_array(ids)
            yield ids, self.floats(count, dim)

    def _count(self) -> int:
        encoded = bytearray(_COUNT.size)
        self._fill(memoryview(encoded))
        return int(_COUNT.unpack(encoded)[0])

    def _fill_array(self, values: npt.NDArray[Any]) -> None:
        self._fill(_bytes(values))

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            count = self._pipe.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                raise StreamEnded
            buffer = buffer[count:]


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)  # threads of the framework may never end
