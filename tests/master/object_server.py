"""A scripted API server on a real socket that keeps objects by kind and name, and collects what an owner leaves."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Object = dict[str, Any]


class ObjectServer:
    """Answers creations, reads, patches and deletions of the objects of one namespace.

    Attributes:
        objects: by the plural of their kind and their name.
        deletions: of objects, with the options of the call, in order.
        failures: HTTP codes that the next deletions are answered with.
        ahead_s: of this machine's clock, the server's.
        allows: the user has all rights.
        hidden: the names of objects that the user may not read.
    """

    def __init__(self, manifests: list[Object], ahead_s: float = 0.0) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.deletions: list[tuple[str, Object]] = []
        self.failures: list[int] = []
        self.ahead_s = ahead_s
        self.allows = True
        self.hidden: set[str] = set()
        self.has_deleted = threading.Event()
        self._version = 0
        self._lock = threading.Lock()
        for manifest in manifests:
            self._keep(f"{manifest['kind'].lower().removesuffix('y')}{_ending(manifest['kind'])}", dict(manifest))
        script = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                sent = json.loads(self.rfile.read(size)) if size else {}
                code, answer = script.answer(self.command, urlsplit(self.path).path, sent)
                body = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string(time.time() + script.ahead_s)

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_PATCH(self) -> None:
                self._answer()

            def do_DELETE(self) -> None:
                self._answer()

            def log_message(self, *_: object) -> None:
                """Tests look at what has become of the objects."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path) -> Path:
        server = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        found = {"clusters": [server], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
        path.write_text(json.dumps(found | {"current-context": "c"}))
        return path

    def answer(self, verb: str, path: str, sent: Object) -> tuple[int, Object]:
        """The HTTP status and the body for a request."""
        with self._lock:
            if path.endswith("accessreviews"):
                return 201, {**sent, "status": {"allowed": self.allows}}
            *_, kind, name = path.split("/")
            if verb == "POST":
                return self._create(name, sent)
            if verb == "GET" and name in self.hidden:
                return 403, {"message": f"{kind} {name} is forbidden"}
            found = self.objects.get((kind, name))
            if found is None:
                return 404, {"message": f"{kind} {name} not found"}
            if verb == "PATCH":
                if (sent.get("metadata") or {}).get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
                    return 409, {"message": "the uid is another one"}
                for part, value in sent.items():
                    found[part] = {**(found.get(part) or {}), **value}
                self._keep(kind, found)
            elif verb == "DELETE":
                return self._delete(kind, name, sent)
            return 200, found

    def _create(self, kind: str, sent: Object) -> tuple[int, Object]:
        if (kind, sent["metadata"]["name"]) in self.objects:
            return 409, {"message": "it exists already"}
        self._keep(kind, sent)
        return 201, sent

    def _delete(self, kind: str, name: str, options: Object) -> tuple[int, Object]:
        if self.failures:
            code = self.failures.pop(0)
            return code, {"message": f"answered with {code}"}
        uid = self.objects[kind, name]["metadata"]["uid"]
        if (options.get("preconditions") or {}).get("uid", uid) != uid:
            return 409, {"message": "the uid is another one"}
        self.deletions.append((f"{kind}/{name}", options))
        self.objects = {
            key: found
            for key, found in self.objects.items()
            if key != (kind, name) and uid not in [one["uid"] for one in found["metadata"].get("ownerReferences", [])]
        }
        self.has_deleted.set()
        return 200, {}

    def _keep(self, kind: str, found: Object) -> None:
        self._version += 1
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.ahead_s))
        metadata = {"uid": f"uid-{found['metadata']['name']}", "creationTimestamp": created, **found["metadata"]}
        found["metadata"] = {**metadata, "resourceVersion": str(self._version)}
        found.setdefault("status", {})
        self.objects[kind, found["metadata"]["name"]] = found


def _ending(kind: str) -> str:
    return "ies" if kind.endswith("y") else "s"
