"""The RecordIO codec: exact bytes, all compressors, and every way a file can be damaged."""

from __future__ import annotations

import gzip
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import cramjam
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticdl.data.recordio import Compressor, RecordIOFile, RecordIOIndex, RecordIOReader, RecordIOWriter
from elasticdl.protocol import Shard
from elasticdl_client.errors import DataError

GOLDEN_BODY = bytes.fromhex("03000000 616263 00000000 02000000 7a00")
GOLDEN_RECORDS = [b"abc", b"", b"z\x00"]


def chunk(body: bytes, num_records: int, compressor: int = 0) -> bytes:
    return struct.pack("<5I", 0x01020304, zlib.crc32(body), compressor, len(body), num_records) + body


def read_all(path: Path) -> list[bytes]:
    with RecordIOFile(str(path)) as file:
        return file.read(0, len(file))


def masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def snappy_frame_per_write(writes: list[bytes]) -> bytes:
    """Return Go's unbuffered snappy stream: its identifier, then an uncompressed frame for each write."""
    frames = [b"\xff\x06\x00\x00sNaPpY"]
    for data in writes:
        frame = struct.pack("<I", masked_crc32c(data)) + data
        frames.append(b"\x01" + len(frame).to_bytes(3, "little") + frame)
    return b"".join(frames)


def test_the_bytes_of_an_uncompressed_file_are_those_of_pyrecordio(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with RecordIOWriter(str(path)) as writer:
        writer.write_all(GOLDEN_RECORDS)
    header = bytes.fromhex("04030201 3b9b57dc 00000000 11000000 03000000")
    assert path.read_bytes() == header + GOLDEN_BODY


@pytest.mark.parametrize(("compressor", "decompress"), [(1, cramjam.snappy.decompress), (2, gzip.decompress)])
def test_compressed_chunks_have_the_checksum_of_their_compressed_bytes(
    tmp_path: Path, compressor: int, decompress: object
) -> None:
    path = tmp_path / "data"
    with RecordIOWriter(str(path), Compressor(compressor)) as writer:
        writer.write_all(GOLDEN_RECORDS)
    data = path.read_bytes()
    magic, checksum, kind, size, count = struct.unpack_from("<5I", data)
    assert (magic, kind, size, count) == (0x01020304, compressor, len(data) - 20, 3)
    assert checksum == zlib.crc32(data[20:])
    assert bytes(decompress(data[20:])) == GOLDEN_BODY  # type: ignore[operator]


def test_snappy_as_pyrecordio_writes_it_one_frame_a_write(tmp_path: Path) -> None:
    path = tmp_path / "data"
    pieces = [piece for record in GOLDEN_RECORDS for piece in (struct.pack("<I", len(record)), record) if piece]
    frames = snappy_frame_per_write(pieces)
    path.write_bytes(chunk(frames, 3, 1) + chunk(frames, 3, 1))
    assert read_all(path) == GOLDEN_RECORDS * 2


def test_a_snappy_chunk_of_several_streams_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "data"
    frames = bytes(cramjam.snappy.compress(GOLDEN_BODY[:7])) + bytes(cramjam.snappy.compress(GOLDEN_BODY[7:]))
    path.write_bytes(chunk(frames, 3, 1))
    assert read_all(path) == GOLDEN_RECORDS


def test_chunks_of_different_compressors_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    gzipped, framed = gzip.compress(GOLDEN_BODY), bytes(cramjam.snappy.compress(GOLDEN_BODY))
    path.write_bytes(chunk(GOLDEN_BODY, 3) + chunk(gzipped, 3, 2) + chunk(framed, 3, 1) + chunk(b"", 0))
    assert read_all(path) == GOLDEN_RECORDS * 3


@given(
    records=st.lists(st.binary(max_size=60), max_size=60),
    compressor=st.sampled_from(Compressor),
    chunk_size_bytes=st.integers(1, 400),
    cache_size_bytes=st.sampled_from([0, 600, 1 << 20]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(
    tmp_path: Path, records: list[bytes], compressor: Compressor, chunk_size_bytes: int, cache_size_bytes: int
) -> None:
    path = str(tmp_path / "data")
    with RecordIOWriter(path, compressor, chunk_size_bytes) as writer:
        writer.write_all(records)
    assert writer.num_records == len(records)
    with RecordIOFile(path, cache_size_bytes) as file:
        assert len(file) == len(records)
        assert file.read(0, len(file)) == records
        assert [file.read(i, i + 1)[0] for i in reversed(range(len(file)))] == records[::-1]


@pytest.mark.parametrize("length", [0, 1, 100])
def test_equally_long_records_with_zeros_at_their_ends_keep_them(tmp_path: Path, length: int) -> None:
    path = str(tmp_path / "data")
    records = [bytes([i % 3] * (length // 2) + [0] * (length - length // 2)) for i in range(1000)]
    with RecordIOWriter(path, chunk_size_bytes=4096) as writer:
        writer.write_all(records)
    assert read_all(Path(path)) == records


@pytest.mark.parametrize("length_of", [lambda i: 1000, lambda i: 900 + i % 200], ids=["equal", "varying"])
@pytest.mark.parametrize("compressor", Compressor)
def test_ranges_of_a_large_chunk(tmp_path: Path, compressor: Compressor, length_of: object) -> None:
    path = str(tmp_path / "data")
    records = [i.to_bytes(4, "big") + bytes(length_of(i)) for i in range(3000)]  # type: ignore[operator]
    with RecordIOWriter(path, compressor, chunk_size_bytes=32 << 20) as writer:
        writer.write_all(records)
    with RecordIOFile(path) as file:
        assert len(file.index.chunks) == 1
        assert file.read(1234, 1300) == records[1234:1300]
        assert file.read(0, 2) == records[:2]
        assert file.read(2999, 3000) == records[2999:]


@pytest.mark.parametrize("chunk_size_bytes", [32 << 20, 100_000])
@pytest.mark.parametrize("compressor", [Compressor.NONE, Compressor.SNAPPY])
@pytest.mark.parametrize("length_of", [lambda i: 9000, lambda i: (0, 1, 20_000, 5000)[i % 4]], ids=["equal", "varying"])
def test_large_records_are_read_to_their_places(
    tmp_path: Path, length_of: Callable[[int], int], compressor: Compressor, chunk_size_bytes: int
) -> None:
    """Of an uncompressed chunk that was checked they are read from the file, each time."""
    path = tmp_path / "data"
    records = [i.to_bytes(2, "big") * (length_of(i) // 2) + b"e" * (length_of(i) % 2) for i in range(600)]
    with RecordIOWriter(str(path), compressor, chunk_size_bytes) as writer:
        writer.write_all(records)
    with RecordIOFile(str(path)) as file:
        assert file.read(0, 600) == records
        assert file.read(0, 600) == records
        assert file.read(1, 2) == records[1:2]
        assert file.read(3, 500) == records[3:500]
        if compressor is Compressor.NONE:
            os.truncate(path, path.stat().st_size // 2)
            with pytest.raises(DataError, match="became another one, or shorter"):
                file.read(3, 500)
            assert file.read(3, 100) == records[3:100]


def test_a_file_of_large_records_that_is_overwritten_while_it_is_read_is_named(tmp_path: Path) -> None:
    """As by `cp`, which keeps the inode: the lengths that were checked are those of the old file."""
    path = tmp_path / "data"
    old, new = [b"a" * 9000, b"b" * 5000], [b"c" * 5000, b"d" * 9000]
    for records in (old, new):
        with RecordIOWriter(str(tmp_path / records[0].decode()[:1]), Compressor.NONE) as writer:
            writer.write_all(records)
    path.write_bytes((tmp_path / "a").read_bytes())
    with RecordIOFile(str(path)) as file:
        assert file.read(0, 2) == old
        path.write_bytes((tmp_path / "c").read_bytes())
        with pytest.raises(DataError, match="became another one"):
            file.read(0, 2)


def test_a_file_without_bytes_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with RecordIOWriter(str(path)):
        pass
    assert path.read_bytes() == b""
    assert read_all(path) == []


def test_threads_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    records = [str(i).encode() for i in range(20_000)]
    with RecordIOWriter(path, Compressor.SNAPPY, 2000) as writer:
        writer.write_all(records)
    right: list[bool] = []
    with RecordIOFile(path, cache_size_bytes=10_000) as file:

        def scan(step: int) -> None:
            ranges = range(0, 20_000, step)
            right.append([r for start in ranges for r in file.read(start, min(start + step, 20_000))] == records)

        threads = [threading.Thread(target=scan, args=(step,)) for step in (97, 500, 3001)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert right == [True] * 3


def test_a_source_of_many_files_keeps_few_of_them_open(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"data-{number:03}") for number in range(400)]
    for path in paths:
        Path(path).write_bytes(chunk(GOLDEN_BODY, 3))
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = RecordIOReader(str(tmp_path), paths)
    assert [shard.name for shard in reader.shards()] == paths
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 300
    assert [reader.read(Shard(path, 0, 3)) for path in paths] == [GOLDEN_RECORDS] * 400


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with RecordIOWriter(str(path), chunk_size_bytes=1) as writer:
        writer.write(b"first")
        assert not path.exists()
    assert read_all(path) == [b"first"]
    writer.close()


def test_a_failed_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with RecordIOWriter(str(tmp_path / "data")) as writer:
            writer.write(b"first")
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_writing_where_no_directory_is_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none/data cannot be written: No such file"):
        RecordIOWriter(str(tmp_path / "none" / "data"))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data cannot be opened: No such file"):
        RecordIOIndex.build(str(tmp_path / "data"))


TWO_CHUNKS = chunk(GOLDEN_BODY, 3) + chunk(GOLDEN_BODY, 3)
SECOND = 20 + len(GOLDEN_BODY)


@pytest.mark.parametrize("size", [size for size in range(1, len(TWO_CHUNKS)) if size != SECOND])
def test_a_file_cut_off_anywhere_but_between_chunks_is_found_when_indexed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(TWO_CHUNKS[:size])
    chunk_start = 0 if size < SECOND else SECOND
    with pytest.raises(DataError) as caught:
        RecordIOIndex.build(str(path))
    assert f"{path}, byte {chunk_start}: " in caught.value.what
    assert "cut off" in caught.value.what or "truncated" in caught.value.what


@pytest.mark.parametrize("position", range(len(TWO_CHUNKS)))
def test_any_flipped_byte_is_found(tmp_path: Path, position: int) -> None:
    path = tmp_path / "data"
    damaged = bytearray(TWO_CHUNKS)
    damaged[position] ^= 0x55
    path.write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert f"{path}, byte " in caught.value.what
    assert caught.value.hint


def test_a_wrong_magic_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(chunk(GOLDEN_BODY, 3) + b"x" * 30)
    with pytest.raises(DataError, match=rf"byte {SECOND}: no RecordIO chunk begins here"):
        read_all(path)


def test_an_unknown_compressor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(chunk(GOLDEN_BODY, 3, 3))
    with pytest.raises(DataError, match="byte 8: the chunk names the unknown compressor 3"):
        read_all(path)


def test_a_wrong_checksum_spoils_only_its_own_chunk(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(TWO_CHUNKS[:-1] + b"?")
    with RecordIOFile(str(path)) as file:
        assert file.read(0, 3) == GOLDEN_RECORDS
        with pytest.raises(DataError, match=rf"byte {SECOND}: a chunk is corrupt: its CRC-32 is"):
            file.read(2, 4)


@pytest.mark.parametrize(
    ("body", "num_records", "what"),
    [
        (struct.pack("<I", 0xFFFFFFFF) + b"abc", 1, "record 0 of a chunk says 4294967295 bytes, 3 are left"),
        (GOLDEN_BODY, 2, "6 bytes left after the 2 records"),
        (GOLDEN_BODY, 4, "ends before record 3 of the 4"),
        (GOLDEN_BODY, 0xFFFFFFFF, "cannot hold the 4294967295 records"),
        (b"", 1, "cannot hold the 1 records"),
        (b"abc", 1, "cannot hold the 1 records"),
    ],
)
def test_lengths_that_do_not_add_up_are_named(tmp_path: Path, body: bytes, num_records: int, what: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(chunk(body, num_records))
    with RecordIOFile(str(path)) as file, pytest.raises(DataError) as caught:
        file.read(0, 1)
    assert f"{path}, byte 0: " in caught.value.what
    assert what in caught.value.what


def test_a_huge_compressed_size_is_truncation_and_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(struct.pack("<5I", 0x01020304, 0, 0, 0xFFFFFFFF, 1) + b"abc")
    with pytest.raises(DataError, match="its header says 4294967295 bytes, the file has 3 more"):
        RecordIOIndex.build(str(path))


@pytest.mark.parametrize("compressor", [1, 2])
def test_a_body_that_is_not_compressed_as_said_is_named(tmp_path: Path, compressor: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(chunk(GOLDEN_BODY, 3, compressor))
    with pytest.raises(DataError, match="byte 0: a chunk cannot be decompressed as"):
        read_all(path)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(TWO_CHUNKS)
    with RecordIOFile(str(path)) as file:
        path.write_bytes(TWO_CHUNKS[:SECOND])
        with pytest.raises(DataError, match="became shorter"):
            file.read(0, 6)
