"""A server of the Hugging Face Hub's documented API on this machine: trees, paths-info, and files by range.

Files larger than `LARGE_BYTES` are given by another place, as on the Hub: an answer with `X-Linked-Etag` leads there.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 20_000
_ENTRIES_OF_A_PAGE = 2
TOKEN = "hf_only-the-environment-knows-this"


@dataclass
class Hub:
    """Repositories by their names in the API, such as ``datasets/OWNER/NAME``: the files of each revision.

    Attributes:
        private: those that need `TOKEN`.
        requests: method, path and range of each request.
    """

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _answer(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD = do_POST = _answer  # noqa: N815  as http.server names them

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def put(self, repository: str, path: str, content: bytes, revision: str = "main") -> None:
        """Commit a file."""
        self.repositories.setdefault(repository, {}).setdefault(revision, {})[path] = content

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        parts = urlsplit(handler.path)
        self.requests.append((handler.command, parts.path, handler.headers.get("Range", "")))
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))).decode()
        names = [unquote(name) for name in parts.path.strip("/").split("/")]
        if names[0] == "large":
            _send_range(handler, self._large[names[1]], {"ETag": '"of-the-other-place"'})
            return
        is_api = names[0] == "api"
        names = names[is_api:]
        if not is_api and names[0] not in ("datasets", "spaces"):
            names = ["models", *names]
        kind, owner, name, verb, revision, *path = names
        repository = f"{kind}/{owner}/{name}"
        is_refused = repository in self.private and handler.headers.get("Authorization") != f"Bearer {TOKEN}"
        if repository not in self.repositories or is_refused:
            _send(handler, 401, b"", {"X-Error-Code": "RepoNotFound"})  # so that no one learns what there is
            return
        files = self.repositories[repository].get(revision)
        if files is None:
            _send(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif verb == "tree":
            self._send_tree(handler, files, "/".join(path), int(parse_qs(parts.query).get("cursor", ["0"])[0]))
        elif verb == "paths-info":
            asked = parse_qs(body)["paths"]
            _send_json(handler, [entry for one in asked if (entry := _entry(files, one)) is not None])
        elif (content := files.get("/".join(path))) is None:
            _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
        elif len(content) > LARGE_BYTES:
            key = hashlib.sha256(content).hexdigest()
            self._large[key] = content
            linked = {"Location": f"http://127.0.0.1:{self.port}/large/{key}", "X-Linked-Etag": f'"{key}"'}
            _send(handler, 302, b"", linked)
        else:
            _send_range(handler, content, {"ETag": f'"{_blob(content)}"'})

    def _send_tree(self, handler: BaseHTTPRequestHandler, files: dict[str, bytes], path: str, first: int) -> None:
        prefix = f"{path}/" if path else ""
        below = {name.removeprefix(prefix).partition("/")[0] for name in files if name.startswith(prefix)}
        if path and not below:
            _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        entries = [_entry(files, prefix + name) for name in sorted(below)]
        last = first + _ENTRIES_OF_A_PAGE
        url = f"http://127.0.0.1:{self.port}{urlsplit(handler.path).path}?cursor={last}"
        _send_json(handler, entries[first:last], {"Link": f'<{url}>; rel="next"'} if last < len(entries) else {})

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _entry(files: dict[str, bytes], path: str) -> dict[str, object] | None:
    content = files.get(path)
    if content is None:
        is_directory = any(name.startswith(f"{path}/") for name in files)
        return {"type": "directory", "oid": _blob(path.encode()), "size": 0, "path": path} if is_directory else None
    entry: dict[str, object] = {"type": "file", "oid": _blob(content), "size": len(content), "path": path}
    if len(content) > LARGE_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}
    return entry


def _blob(content: bytes) -> str:
    """The name that git gives the content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _send_range(handler: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str]) -> None:
    asked = handler.headers.get("Range", "")
    if not asked:
        _send(handler, 200, content, headers)
        return
    first, last = map(int, asked.removeprefix("bytes=").split("-"))
    if first >= len(content):
        _send(handler, 416, b"", headers)
        return
    end = min(last + 1, len(content))
    given = {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}", **headers}
    _send(handler, 206, content[first:end], given)


def _send_json(handler: BaseHTTPRequestHandler, found: object, headers: dict[str, str] | None = None) -> None:
    _send(handler, 200, json.dumps(found).encode(), {"Content-Type": "application/json", **(headers or {})})


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
