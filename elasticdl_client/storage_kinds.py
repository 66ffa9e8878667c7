"""The kinds of storage that URLs name: the package that each needs, and the extra that installs it.  Reads nothing.

`AnyPath`: the port of what readers of models ask a path, of a file system (`pathlib.Path`) or of storage.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from types import MappingProxyType
from typing import Literal, Protocol, Self

from elasticdl_client.errors import StorageError
from elasticdl_client.secret_values import hide


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A kind of storage.

    Attributes:
        module: Module that fsspec imports for the scheme.
        requirement: for pip.
        extra: Extra of elasticdl2 with the requirement; empty: none.
        can_list: whether it has directories; without, a URL names one file.
        read_only: why no file can be published; empty: files can.
    """

    module: str
    requirement: str
    extra: str = ""
    can_list: bool = True
    read_only: str = ""

    @property
    def can_write(self) -> bool:
        """Whether files can be published."""
        return not self.read_only


_S3 = StorageKind("s3fs", "s3fs", "s3")
_GCS = StorageKind("gcsfs", "gcsfs", "gcs")
_AZURE = StorageKind("adlfs", "adlfs>=2026.8", "azure")
_COMMITS = "a repository of the Hub takes commits, some in an hour, and not files"
_HTTP = StorageKind("aiohttp", "fsspec[http]", "http", can_list=False, read_only="web servers take no files")

KINDS: Mapping[str, StorageKind] = MappingProxyType(
    {
        "s3": _S3,
        "s3a": _S3,
        "gs": _GCS,
        "gcs": _GCS,
        "az": _AZURE,
        "abfs": _AZURE,
        "abfss": _AZURE,
        "oss": StorageKind("oss2", "oss2", "oss"),
        "hf": StorageKind("huggingface_hub", "huggingface_hub>=1", "hf", read_only=_COMMITS),
        "hdfs": StorageKind("hdfs_native", "hdfs-native", "hdfs"),
        "http": _HTTP,
        "https": _HTTP,
    }
)


def scheme_of(path: str) -> str:
    """Return the scheme of a URL of storage, in lower case; empty for a path and for any other URL."""
    scheme, mark, _ = path.partition("://")
    return scheme.lower() if mark and scheme.lower() in KINDS else ""


def is_remote(path: str) -> bool:
    """Return whether a name of data is a URL of storage."""
    return bool(scheme_of(path))


def check_url(url: str) -> None:
    """Check that a URL of storage holds no credential: names of its files are printed, and stored in the job's journal.

    Raises:
        StorageError: it has a password, a token or a signature in it, names no bucket or host, or its scheme has
            capitals.
    """
    shown = hide(url)
    if shown != url:
        raise StorageError(
            f"The URL {shown} has a credential in it, which would be printed with the names of the files.",
            "Name the file without it; give credentials by the environment: --envs, or a Secret.",
        )
    if not url.partition("://")[2].strip("/"):
        raise StorageError(f"The URL {url} names no bucket or host.", "Write for example s3://BUCKET/DIRECTORY.")
    if has_capitals(url):
        raise StorageError(f"The URL {url} has a scheme in capitals.", f"Write {scheme_of(url)}://.")


def has_capitals(url: str) -> bool:
    """Return whether the scheme of a URL of storage is not in lower case: packages take it for the name of a bucket."""
    return not url.startswith(scheme_of(url))


def check_installed(url: str) -> None:
    """Check that the package for a URL of storage is installed here.

    Raises:
        StorageError: naming the package and the extra.
    """
    kind = KINDS[scheme_of(url)]
    missing = next((name for name in ("fsspec", kind.module) if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise missing_package(url, missing)


def missing_package(url: str, module: str) -> StorageError:
    """Return the error for a package that a URL of storage needs and that cannot be imported."""
    scheme = scheme_of(url)
    kind = KINDS[scheme]
    extra = f" (the extra {kind.extra})" if kind.extra else ""
    return StorageError(
        f"{scheme}:// needs the package {module}, which is not installed.",
        f"Install it: pip install '{kind.requirement}'{extra}; in an image, name it in the zoo's requirements.txt.",
    )


class AnyPath(Protocol):
    """A file or directory.

    A missing one is a `FileNotFoundError`; storage that does not answer is a `StorageError`.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffix(self) -> str: ...

    @property
    def parent(self) -> Self: ...

    def __truediv__(self, name: str, /) -> Self: ...

    def exists(self) -> bool: ...

    def is_file(self) -> bool: ...

    def is_dir(self) -> bool: ...

    def iterdir(self) -> Iterator[Self]:
        """Yield what is in the directory, in any order."""
        ...

    def read_bytes(self) -> bytes: ...

    def open(self, mode: Literal["rb"], /) -> BufferedReader:
        """Open the file, to be read in order."""
        ...
