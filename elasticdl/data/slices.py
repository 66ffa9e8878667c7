"""A reader's records in shards of limited size: `--records_per_shard`."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.data.reader import Metadata, Reader
from elasticdl.data.sources import shard_not_of_source
from elasticdl.protocol.values import Shard


class SlicedReader:
    """Shards `name#0000`, `name#1000`, …: the part's name and the number of the first record in it, all as long.

    So their names are in the order of the records.
    """

    def __init__(self, reader: Reader, records_per_shard: int) -> None:
        self._reader = reader
        self._size = records_per_shard

    def shards(self) -> list[Shard]:
        found = []
        for shard in self._reader.shards():
            width = len(str(shard.end))
            for start in range(0, shard.end, self._size):
                found.append(Shard(f"{shard.name}#{start:0{width}}", 0, min(self._size, shard.end - start)))
        return sorted(found)

    def read(self, shard: Shard) -> Sequence[bytes]:
        name, _, number = shard.name.rpartition("#")
        if not name or not number.isdigit() or not 0 <= shard.start <= shard.end <= self._size:
            raise shard_not_of_source(shard, name or shard.name)
        return self._reader.read(Shard(name, int(number) + shard.start, int(number) + shard.end))

    def metadata(self) -> Metadata:
        return self._reader.metadata()
