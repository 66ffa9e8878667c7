"""HDFS with hdfs-native, which needs no Java, with the verbs of fsspec that `FsspecStorage` calls.

HDFS shows unfinished files, so a file is written beside its place, as ``.NAME.part-RANDOM``, and renamed.  HDFS has
real directories; here, as in other storage, a directory exists only through its files: a delete that leaves it empty
removes it.  hdfs:///PATH is on fs.defaultFS; settings come from HADOOP_CONF_DIR or HADOOP_HOME, the user from
HADOOP_USER_NAME or Kerberos.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from posixpath import dirname
from typing import Any

import hdfs_native
from fsspec.asyn import get_loop

from elasticdl.storage.uploads import Progress

_CHUNK_BYTES = 4 << 20
_CLEANUP_S = 10.0  # limit after a failed write, whose NameNode may not answer
_OF_A_SERVER = re.compile(r'\w+\("[^"]*", "(.*?)(?:\\n|"\))')  # class, and message with escaped lines
_REFUSED = "AccessControlException"
_PANIC = "PanicException"  # not an Exception, and its module cannot be imported
_SETTINGS = ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_USER_NAME")
_FOR_NOW = re.compile(  # temporary errors: classes in messages of the client and the servers
    r"SafeMode|Standby|RetriableException|java\.io\.IOException|NotReplicatedYet|OperationFailed|DataTransfer"
    r"|Checksum|BlocksNotFound|FatalRPC|ObserverRetry"
)


class HdfsClient:
    """Files of HDFS, by URL; its coroutines run in the thread of `loop`."""

    async_impl = True

    def __init__(self) -> None:
        self.loop = get_loop()
        self._clients: dict[str, Any] = {}

    async def _ls(self, url: str, *, detail: bool) -> list[dict[str, Any]]:
        """Return the entries of a directory; `detail` must be True."""
        with _translated():
            root, path = _split(url)
            return [_info(root, status) async for status in self._client(root).list_status(path, False)]

    async def _info(self, url: str) -> dict[str, Any]:
        with _translated():
            root, path = _split(url)
            return _info(root, await self._client(root).get_file_info(path))

    async def _cat_file(self, url: str, *, start: int, end: int) -> bytes:
        with _translated():
            root, path = _split(url)
            reader = await self._client(root).read(path)
            size = min(end, len(reader)) - start  # a read beyond the end would panic
            content: bytes = bytes(await reader.read_range(start, size)) if size > 0 else b""
            return content

    async def _pipe_file(self, url: str, content: bytes) -> None:
        await self._write(url, iter([content]))

    async def _put_file(self, local: str, url: str, *, callback: Progress) -> None:
        def chunks() -> Iterator[bytes]:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                callback.relative_update(len(chunk))  # the writer has accepted it

        with open(local, "rb") as file:
            await self._write(url, chunks())

    async def _rm_file(self, url: str) -> None:
        with _translated():
            root, path = _split(url)
            client = self._client(root)
            await client.delete(path, False)
            with contextlib.suppress(RuntimeError, OSError):  # the directory is not empty, or not ours
                while (path := dirname(path)).count("/") > 1:
                    await client.delete(path, False)

    async def _write(self, url: str, chunks: Iterator[bytes]) -> None:
        with _translated():
            root, path = _split(url)
            client = self._client(root)
            directory, _, name = path.rpartition("/")
            part = f"{directory}/.{name}.part-{secrets.token_hex(8)}"
            try:
                writer = await client.create(part, hdfs_native.WriteOptions(create_parent=True))
                for chunk in chunks:
                    await writer.write(chunk)
                await writer.close()
                await client.rename(part, path, True)
            except BaseException:
                with contextlib.suppress(RuntimeError, OSError):  # also a TimeoutError
                    await asyncio.wait_for(client.delete(part, False), _CLEANUP_S)
                raise

    def _client(self, root: str) -> Any:
        if root not in self._clients:
            settings = map(os.environ.get, _SETTINGS)
            self._clients[root] = _kept_client(hdfs_native.AsyncClient, root, os.getpid(), *settings)
        return self._clients[root]


@functools.cache
def _kept_client(make: Callable[[str], Any], root: str, _process: int, *_settings: str | None) -> Any:
    """Return the client of a file system; there is one per process.

    It must never be freed: freeing it waits, with the GIL, for its threads, which wait for the GIL to deliver an
        answer.
    """
    return make(root)


def _split(url: str) -> tuple[str, str]:
    """Return the file system of a URL, and the path in it."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    return f"{scheme}://{authority}", f"/{path.rstrip('/')}"


def _info(root: str, status: Any) -> dict[str, Any]:
    """Return a status in fsspec's form; the modification time, in ms, is when the writer closed the file."""
    name = f"{root}{status.path}"
    if status.isdir:
        return {"name": name, "type": "directory"}
    return {
        "name": name,
        "type": "file",
        "size": status.length,
        "etag": f"{status.modification_time}-{status.length}",
    }


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Convert errors of the client to Python's: it has one class for servers, networks and settings."""
    try:
        yield
    except BaseException as error:
        # hdfs-native 0.14.5 and later panic, in a timer of Rust, when they retry with a silent NameNode.
        if type(error).__name__ == _PANIC:
            raise OSError(f"the NameNode does not answer ({error})") from None
        if not isinstance(error, RuntimeError):
            raise
        text = str(error)
        found = _OF_A_SERVER.match(text)
        said = found[1] if found else text  # without the server's stack
        if _REFUSED in text:
            raise PermissionError(said) from None
        if _FOR_NOW.search(text):
            raise OSError(said) from None
        raise ValueError(said) from None
