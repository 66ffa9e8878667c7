"""Small data sources of every format, and what a reader makes of one with a damaged file; run by another process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import datasets
from PIL import Image

from elasticdl.data.factory import create_reader
from elasticdl.data.recordio import Compressor, RecordIOWriter
from elasticdl.data.sources import write_manifest
from elasticdl_client.errors import DataError
from tests.data import typed_sources as typed
from tests.fuzz.mutations import damage

_ROWS = typed.rows(60)
_SAMPLES = {f"{i:03}": {"cls": b"%d" % i, "txt": b"text" * i} for i in range(60)}


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        write: a source into an empty directory; the files that may be damaged.
        has_checksums: of all that a record is made of.
        source: of the directory, for `create_reader`.
    """

    write: Callable[[Path], list[Path]]
    has_checksums: bool = False
    source: Callable[[Path], str] = str


def _recordio(compressor: Compressor) -> Callable[[Path], list[Path]]:
    def write(directory: Path) -> list[Path]:
        random = Random(0)
        with RecordIOWriter(str(directory / "data"), compressor, chunk_size_bytes=4000) as writer:
            writer.write_all([random.randbytes(200 + i % 3) for i in range(60)])
        return [directory / "data"]

    return write


def _tfrecord(directory: Path) -> list[Path]:
    random = Random(0)
    typed.write_tfrecord(directory / "data.tfrecord", [random.randbytes(1100 + i) for i in range(20)])
    return [directory / "data.tfrecord"]


def _csv(directory: Path) -> list[Path]:
    rows = "".join(f'{row["f"]},{row["n"]},"said ""{row["t"]}"", then\nleft"\n' for row in _ROWS)
    (directory / "data.csv").write_text(f"f,n,t\n{rows}")
    return [directory / "data.csv"]


def _typed(name: str, write: Callable[[Path], None]) -> Callable[[Path], list[Path]]:
    def write_file(directory: Path) -> list[Path]:
        write(directory / name)
        return [directory / name]

    return write_file


def _sqlite(directory: Path) -> list[Path]:
    typed.write_sqlite(directory / "rows.db", _ROWS)
    return [directory / "rows.db"]


def _images(directory: Path) -> list[Path]:
    for name in ("cat", "dog"):
        (directory / name).mkdir()
        Image.effect_noise((16, 16), 50).save(directory / name / "1.png")
    return [directory / "cat" / "1.png"]


def _saved_dataset(directory: Path) -> list[Path]:
    datasets.Dataset.from_list(_ROWS).save_to_disk(str(directory))
    return sorted(directory.iterdir())


FORMATS = {
    "recordio": Format(_recordio(Compressor.NONE), has_checksums=True),
    "recordio_snappy": Format(_recordio(Compressor.SNAPPY), has_checksums=True),
    "recordio_gzip": Format(_recordio(Compressor.GZIP), has_checksums=True),
    "tfrecord": Format(_tfrecord, has_checksums=True),
    "csv": Format(_csv),
    "text": Format(_typed("data.txt", lambda path: path.write_text("a line\nanother\n" * 50) and None)),
    "parquet": Format(_typed("data.parquet", lambda path: typed.write_parquet(path, _ROWS, 20))),
    "arrow": Format(_typed("data.arrow", lambda path: typed.write_arrow(path, _ROWS, 20, "uncompressed"))),
    "arrow_lz4": Format(_typed("data.arrow", lambda path: typed.write_arrow(path, _ROWS, 20))),
    "arrow_stream": Format(_typed("data.arrow", lambda path: typed.write_arrow_stream(path, _ROWS, 20))),
    "jsonl": Format(_typed("data.jsonl", lambda path: typed.write_jsonl(path, _ROWS))),
    "webdataset": Format(_typed("data.tar", lambda path: typed.write_tar(path, _SAMPLES))),
    "npz": Format(_typed("data.npz", lambda path: typed.write_npz(path, _ROWS)), has_checksums=True),
    "npz_compressed": Format(_typed("data.npz", lambda path: typed.write_npz(path, _ROWS, True)), has_checksums=True),
    "images": Format(_images),
    "huggingface": Format(_saved_dataset),
    "sqlite": Format(_sqlite, source=lambda directory: f"sqlite:///{directory}/rows.db?table=t&key=id"),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome for one damaged file.

    Attributes:
        kind: "same" records as before, "other" ones, a "refusal", or a "traceback".
        text: of the error.
    """

    kind: str
    text: str = ""


def read_damaged(name: str, good: Path, place: Path, seed: int) -> Outcome:
    """Reads a source of which one file is damaged, by a seed.

    Args:
        name: of the format.
        good: where its source was written.
        place: for the damaged copy; replaced.
        seed: of the damage.
    """
    random = Random(f"{name} {seed}")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good, place, ignore=shutil.ignore_patterns(".elasticdl"))
    hurt = place / random.choice(files_of(good))
    hurt.write_bytes(damage(hurt.read_bytes(), random))
    return read(name, place, expected=_records(name, good))


def files_of(good: Path) -> list[str]:
    """Of a source that `write` has made, those that may be damaged, as paths below it."""
    found: list[str] = json.loads((good.parent / f"{good.name}.json").read_text())
    return found


def write(name: str, good: Path, with_manifest: bool) -> None:
    """Writes the source of a format, and the checksums of its files."""
    good.mkdir()
    files = FORMATS[name].write(good)
    if with_manifest:
        write_manifest(str(good), [str(path) for path in good.rglob("*") if path.is_file()])
    (good.parent / f"{good.name}.json").write_text(json.dumps([os.fspath(file.relative_to(good)) for file in files]))


def read(name: str, place: Path, expected: list[bytes]) -> Outcome:
    """Reads all there is, in the way of a master and a worker."""
    try:
        found = _records(name, place)
    except DataError as error:
        return Outcome("refusal" if str(place) in error.what else "traceback", str(error))
    except Exception as error:  # noqa: BLE001  that is what is looked for
        return Outcome("traceback", f"{type(error).__name__}: {error}")
    return Outcome("same" if found == expected[: len(found)] else "other")


def _records(name: str, place: Path) -> list[bytes]:
    reader = create_reader(FORMATS[name].source(place))
    reader.metadata()
    return [record for shard in reader.shards() for record in reader.read(shard)]
