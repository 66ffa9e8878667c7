"""The `Reader` over RecordIO files; the file itself and the writer of one are re-exported here.

Never looks into a file's bytes: that is `recordio_file`, `recordio_index` and `recordio_format`.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.data.reader import Metadata
from elasticdl.data.recordio_file import RecordIOFile
from elasticdl.data.recordio_format import Compressor
from elasticdl.data.recordio_index import RecordIOIndex
from elasticdl.data.recordio_writer import RecordIOWriter
from elasticdl.data.shard_files import PartsReader

__all__ = ["Compressor", "RecordIOFile", "RecordIOIndex", "RecordIOReader", "RecordIOWriter"]


class RecordIOReader(PartsReader):
    """The `Reader` over RecordIO files: one shard a file, named by its path.  Files without records are left out."""

    def __init__(self, source: str, paths: Sequence[str], seed: int = 0) -> None:
        """Opens no file yet.

        Args:
            source: as the user named it; for messages.
            paths: of the files.
            seed: of the job; for the metadata.
        """
        super().__init__(source, paths, RecordIOFile, lambda: Metadata(seed=seed))
