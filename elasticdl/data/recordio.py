"""The `Reader` over RecordIO files; the file itself and the writer of one are re-exported here.

Never looks into a file's bytes: that is `recordio_file`, `recordio_index` and `recordio_format`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from elasticdl.data.reader import Metadata, Shard
from elasticdl.data.recordio_file import RecordIOFile
from elasticdl.data.recordio_format import Compressor
from elasticdl.data.recordio_index import RecordIOIndex
from elasticdl.data.recordio_writer import RecordIOWriter
from elasticdl.data.sources import no_records, shard_not_of_source

__all__ = ["Compressor", "RecordIOFile", "RecordIOIndex", "RecordIOReader", "RecordIOWriter"]


class RecordIOReader:
    """The `Reader` over RecordIO files: one shard a file, named by its path.  Files without records are left out."""

    def __init__(self, source: str, paths: Sequence[str], seed: int = 0) -> None:
        """Opens no file yet.

        Args:
            source: as the user named it; for messages.
            paths: of the files.
            seed: of the job; for the metadata.
        """
        self._source = source
        self._paths = sorted(paths)
        self._seed = seed
        self._files: dict[str, RecordIOFile] = {}
        self._lock = threading.Lock()

    def shards(self) -> list[Shard]:
        shards: list[Shard] = []
        for path in self._paths:
            num_records = len(self._open(path))
            if num_records:
                shards.append(Shard(path, 0, num_records))
        if not shards:
            raise no_records(self._source)
        return shards

    def read(self, shard: Shard) -> list[bytes]:
        if shard.name not in self._paths:
            raise shard_not_of_source(shard, self._source)
        file = self._open(shard.name)
        if not 0 <= shard.start <= shard.end <= len(file):
            raise shard_not_of_source(shard, self._source, len(file))
        return file.read(shard.start, shard.end)

    def metadata(self) -> Metadata:
        return Metadata(seed=self._seed)

    def _open(self, path: str) -> RecordIOFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = RecordIOFile(path)
            return file
