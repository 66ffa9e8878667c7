"""Ranged reads of object storage against the same client's own, in the same run, from a server on this machine.

``python -m benchmarks.storage [--quick] [--json]``: the client is s3fs; the server, in a process of its own, gives
ranges of files as S3 does and waits 10 ms before each answer, about what a bucket in the same region takes.  Four ways
of reading, in MB/s, each beside the raw one: a file in one read, against `cat_ranges` of the same parts; a scan of it,
against the same; tasks of 8 MB one after the other by the readers of RecordIO and of TFRecord, against `cat_file`
of the same ranges one after the other; and those again (`paced_`) from a server that gives each connection 90 MB/s, as
Amazon states it of S3.  The process keeps its memory as workers do.  Rounds alternate, and the best of each counts.
The ratios of processor time (`_cpu_ratio`, raw to ours) are of this process alone: readers compare checksums and cut
records, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from elasticdl.data.factory import create_reader
from elasticdl.data.recordio import RecordIOIndex, RecordIOWriter
from elasticdl.data.tfrecord import framed
from elasticdl.protocol import Shard
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl.storage.remote_file import PART_BYTES, RemoteFile

RECORD_BYTES = 16 << 10
TASK_RECORDS = 512
ROUNDS = 3
LATENCY_S = 0.01
PACED = "paced"  # the bucket of which a connection gets:
PACED_BYTES_PER_S = 90e6
PACED_PIECE_BYTES = 512 << 10


class Bucket(BaseHTTPRequestHandler):
    """Files of the working directory, as S3 answers HEAD, GET with a range, and PUT."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def do_PUT(self) -> None:
        """Take a file."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = Path(self._file[1])
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self._head(200, 0, {})

    def do_HEAD(self) -> None:
        """Answer with the size of a file."""
        path = Path(self._file[1])
        self._head(200 if path.is_file() else 404, path.stat().st_size if path.is_file() else 0, {"ETag": '"1"'})

    def do_GET(self) -> None:
        """Answer with a range of a file; list nothing."""
        if "list-type" in self.path:
            nothing = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
            self._head(200, len(nothing), {"Content-Type": "application/xml"})
            self.wfile.write(nothing)
            return
        bucket, name = self._file
        with open(name, "rb") as file:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            end = last + 1
            self._head(206, end - first, {"ETag": '"1"', "Content-Range": f"bytes {first}-{last}/*"})
            piece_bytes = PACED_PIECE_BYTES if bucket == PACED else end - first
            begun = time.monotonic()
            for start in range(first, end, piece_bytes):
                if bucket == PACED:
                    time.sleep(max(0.0, begun + (start - first) / PACED_BYTES_PER_S - time.monotonic()))
                os.sendfile(self.connection.fileno(), file.fileno(), start, min(piece_bytes, end - start))

    @property
    def _file(self) -> tuple[str, str]:
        """Bucket and name."""
        bucket, _, name = self.path[1:].partition("/")
        return bucket, name

    def _head(self, status: int, size_bytes: int, headers: Mapping[str, str]) -> None:
        time.sleep(LATENCY_S)
        self.send_response(status)
        for name, value in {"Content-Length": str(size_bytes), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def serve() -> None:
    """Print the port, and serve until standard input ends."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()
        server.shutdown()


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    started, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - started, time.process_time() - cpu


def best(ours: Callable[[], object], raw: Callable[[], object]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds and processor seconds of both, in alternating rounds."""
    rounds = [(seconds(ours), seconds(raw)) for _ in range(ROUNDS)]
    our_s, our_cpu_s = (min(one[i] for one, _ in rounds) for i in range(2))
    raw_s, raw_cpu_s = (min(other[i] for _, other in rounds) for i in range(2))
    return (our_s, our_cpu_s), (raw_s, raw_cpu_s)


def write(directory: Path, num_records: int) -> None:
    random = np.random.default_rng(1)
    records = [random.bytes(RECORD_BYTES) for _ in range(num_records)]
    with RecordIOWriter(str(directory / "rows.recordio"), chunk_size_bytes=1 << 20) as writer:
        writer.write_all(records)
    with open(directory / "rows.tfrecord", "wb") as file:
        file.writelines(framed(record) for record in records)


def read_tasks(url: str) -> None:
    reader = create_reader(url)  # its index is known by now; chunks that an earlier one has read are not
    (shard,) = reader.shards()
    for start in range(0, shard.end, TASK_RECORDS):
        reader.read(Shard(shard.name, start, min(start + TASK_RECORDS, shard.end)))


def read_ranges(client: Any, path: str, ranges: Sequence[tuple[int, int]]) -> None:
    for start, end in ranges:
        client.cat_file(path, start=start, end=end)


def ranges_of_tfrecord(num_records: int) -> list[tuple[int, int]]:
    size_bytes = RECORD_BYTES + 16
    starts = range(0, num_records, TASK_RECORDS)
    return [(start * size_bytes, min(start + TASK_RECORDS, num_records) * size_bytes) for start in starts]


def ranges_of_recordio(path: Path, num_records: int) -> list[tuple[int, int]]:
    """Of the chunks that hold the records of each task."""
    index = RecordIOIndex.build(str(path))
    found = []
    for start in range(0, num_records, TASK_RECORDS):
        first = index.chunks[index.find(start)]
        last = index.chunks[index.find(min(start + TASK_RECORDS, num_records) - 1)]
        found.append((first.offset, last.body_offset + last.header.compressed_size_bytes))
    return found


def scan(file: RemoteFile) -> None:
    with file.scan() as stream:
        while stream.read(1 << 20):
            pass


@contextlib.contextmanager
def serving(directory: str) -> Iterator[None]:
    """A server of the files in a directory, as the endpoint of S3 in the environment."""
    argv = [sys.executable, __file__, "--serve"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    server = subprocess.Popen(
        argv, cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        yield
    finally:
        server.stdin.close()
        server.wait()


def measure(num_records: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, serving(name):
        directory = Path(name)
        os.environ["XDG_CACHE_HOME"] = name
        keep_large_buffers()
        write(directory, num_records)
        client = fsspec.filesystem("s3")
        path, url = "bucket/rows.tfrecord", "s3://bucket/rows.tfrecord"
        file = RemoteFile(url)
        size_bytes = file.size_bytes
        starts = range(0, size_bytes, PART_BYTES)
        ends = [min(start + PART_BYTES, size_bytes) for start in starts]

        def raw_whole() -> None:
            client.cat_ranges([path] * len(starts), list(starts), ends, batch_size=16)

        of_recordio = ranges_of_recordio(directory / "rows.recordio", num_records)
        of_tfrecord = ranges_of_tfrecord(num_records)
        for bucket in ("bucket", PACED):
            for warm in ("rows.recordio", "rows.tfrecord"):
                read_tasks(f"s3://{bucket}/{warm}")
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "one_read": (lambda: file.pread(size_bytes, 0), raw_whole),
            "scan": (lambda: scan(file), raw_whole),
        }
        for prefix, bucket in (("", "bucket"), ("paced_", PACED)):
            for kind, ranges in (("recordio", of_recordio), ("tfrecord", of_tfrecord)):
                rows = f"{bucket}/rows.{kind}"
                pairs[prefix + kind] = (partial(read_tasks, f"s3://{rows}"), partial(read_ranges, client, rows, ranges))
        figures: dict[str, float] = {"file_mb": size_bytes / 1e6}
        for kind, (ours, raw) in pairs.items():
            (our_s, our_cpu_s), (raw_s, raw_cpu_s) = best(ours, raw)
            figures[f"{kind}_mb_per_s"] = size_bytes / our_s / 1e6
            figures[f"{kind}_raw_mb_per_s"] = size_bytes / raw_s / 1e6
            figures[f"{kind}_ratio"] = raw_s / our_s
            figures[f"{kind}_cpu_ratio"] = raw_cpu_s / our_cpu_s
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the records")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    figures = measure(2048 if arguments.quick else 8192)
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:12,.2f}")


if __name__ == "__main__":
    main()
