"""A scripted API server on a real socket: a job's ConfigMaps and pods, and what these have printed."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from elasticdl_client.job_events import EventHistory, to_journal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.kubernetes import names

NAMESPACE = "team"


class ApiServer:
    """Answers lists of ConfigMaps, pods and Events, single pods and logs; can be gone for a while.

    The annotations of the job's ConfigMap can be patched, pods be made and deleted.

    Attributes:
        spec: in the job's ConfigMap; None: none is.
        has_job, has_state: there are the job's ConfigMaps; there is that of its state.
        annotations: of the job's ConfigMap.
        version: of the job's ConfigMap.
        logs: by pod and life, of which the last is the present one.
        asked: the query of each request for a log, with the pod's name under "pod".
        history: of the job, in its journal.
        allows: the user has all rights.
        deleted: the pods that were deleted, each with the options of that.
        on_log: called with the name of a pod whose log is asked for; if it returns False the connection just ends.
        on_delete, on_create: called with the name of a pod that was deleted, or made.
        master_pod: its manifest in the job's ConfigMap; None: none is.
        made: how many pods were made.
        objects: the kinds of the other objects that were made.
        between: called after the next list of pods and before the next other answer; once.
    """

    def __init__(self) -> None:
        self.status = JobStatus("job")
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[list[str]]] = {}
        self.asked: list[dict[str, str]] = []
        self.events: list[dict[str, Any]] = []
        self.has_job = self.has_state = True
        self.history = EventHistory()
        self.between: Callable[[], None] | None = None
        self.spec: JobSpec | None = None
        self.annotations: dict[str, str] = {}
        self.version = 1
        self.allows = True
        self.deleted: list[tuple[str, dict[str, Any]]] = []
        self.on_log: Callable[[str], bool] = lambda name: True
        self.on_delete: Callable[[str], None] = lambda name: None
        self.on_create: Callable[[str], None] = lambda name: None
        self.master_pod: dict[str, Any] | None = None
        self.made = 0
        self.objects: list[str] = []
        self._port = 0
        self.start()

    def start(self) -> None:
        """Answers from now on, at the same port as before."""
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                *_, name, last = urlsplit(self.path).path.split("/")
                if last != "log" or script.on_log(name):
                    self._send(*script.answer(self.path))

            def do_PATCH(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*script.patch(self.path, sent))

            def do_DELETE(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*script.delete(self.path, sent))

            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(201, json.dumps(script.post(self.path, sent)).encode())

            def _send(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Tests look at what was asked, not at lines."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Refuses connections from now on."""
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path) -> Path:
        server = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
        found = {"clusters": [server], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
        path.write_text(json.dumps(found | {"current-context": "c"}))
        return path

    def add_pod(self, role: str, *lives: list[str], phase: str = "Running") -> None:
        """A pod, such as worker-0, whose container has had these lives."""
        kind, _, index = role.partition("-")
        labels = {names.APP_LABEL: names.APP, names.JOB_LABEL: "job", names.ROLE_LABEL: kind}
        name = f"elasticdl-job-{role}"
        own: dict[str, Any] = {"name": "main", "containerID": f"{name}/{len(lives)}", "restartCount": len(lives) - 1}
        own |= {"image": "image:1", "imageID": "", "ready": phase == "Running"}
        if len(lives) > 1:
            own["lastState"] = {"terminated": {"exitCode": 1}}
        self.logs[name] = [*lives]
        self.pods[name] = {
            "metadata": _metadata(name, labels | {names.INDEX_LABEL: index or "0"}),
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": phase, "containerStatuses": [own]},
        }

    def add_event(self, role: str, time: str, reason: str, message: str, kind: str = "Warning") -> None:
        """An Event of a pod, such as worker-0."""
        uid = self.pods[f"elasticdl-job-{role}"]["metadata"]["uid"]
        event = {"involvedObject": {"uid": uid}, "type": kind, "reason": reason, "message": message}
        self.events.append(event | {"lastTimestamp": f"2026-01-01T{time}Z"})

    def end_pods(self) -> None:
        for pod in self.pods.values():
            pod["status"]["phase"] = "Succeeded"
        self.pods["elasticdl-job-master"]["metadata"]["labels"][names.STATUS_LABEL] = "Finished"

    def answer(self, path: str) -> tuple[int, bytes]:
        """The HTTP status and the body for a request."""
        parts = urlsplit(path)
        if parts.path.endswith(f"/namespaces/{NAMESPACE}"):
            return 200, json.dumps({"metadata": {"name": NAMESPACE}, "status": {"phase": "Active"}}).encode()
        if f"/namespaces/{NAMESPACE}/" not in parts.path:
            return 200, b'{"items": []}'
        *_, kind = steps = parts.path.removeprefix(f"/api/v1/namespaces/{NAMESPACE}/").split("/")
        if kind == "configmaps":
            return 200, json.dumps({"items": self._config_maps() if self.has_job else []}).encode()
        if kind == "pods":
            body = json.dumps({"items": list(self.pods.values())}).encode()
            if self.between is not None:
                self.between()
                self.between = None
            return 200, body
        if kind == "events":
            return 200, json.dumps({"items": self.events}).encode()
        if steps[0] == "serviceaccounts":
            return 200, json.dumps({"metadata": {"name": kind}}).encode()
        if steps[0] == "configmaps":
            found = next((one for one in self._config_maps() if one["metadata"]["name"] == kind), None)
            return (200, json.dumps(found).encode()) if found else (404, b"{}")
        pod = self.pods.get(steps[1])
        if pod is None:
            return 404, json.dumps({"message": f"pods {steps[1]} not found"}).encode()
        if kind != "log":
            return 200, json.dumps(pod).encode()
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.asked.append(query | {"pod": steps[1]})
        printed = self.logs[steps[1]][-2 if query.get("previous", "").lower() == "true" else -1]
        if "timestamps" in query:
            printed = [f"2026-01-01T00:00:{number:02}Z {line}" for number, line in enumerate(printed)]
        shown = printed[-int(query["tailLines"]) :] if "tailLines" in query else printed
        return 200, "".join(f"{line}\n" for line in shown).encode()

    def patch(self, path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        """Changes annotations of the job's ConfigMap, if the version that the caller knows is the newest."""
        assert path == f"/api/v1/namespaces/{NAMESPACE}/configmaps/{names.job_object('job')}"
        if sent["metadata"].get("resourceVersion") != str(self.version):
            return 409, b'{"message": "the object has been modified"}'
        merged = self.annotations | sent["metadata"]["annotations"]
        self.annotations = {name: value for name, value in merged.items() if value is not None}
        self.version += 1
        return 200, json.dumps(self._config_maps()[0]).encode()

    def delete(self, path: str, sent: dict[str, Any]) -> tuple[int, bytes]:
        """Deletes a pod, if it is the one that the caller means."""
        pod = self.pods[path.rpartition("/")[2]]
        if pod["metadata"]["uid"] != sent["preconditions"]["uid"]:
            return 409, b'{"message": "the UID in the precondition differs"}'
        name = pod["metadata"]["name"]
        del self.pods[name]
        self.deleted.append((name, sent))
        self.on_delete(name)
        return 200, b"{}"

    def post(self, path: str, sent: dict[str, Any]) -> dict[str, Any]:
        """Reviews a right, makes a pod, which runs at once, or takes another object of a job."""
        if path.endswith("subjectaccessreviews"):
            return {"spec": {}, "status": {"allowed": self.allows}}
        if sent["kind"] != "Pod":
            self.has_job = True
            self.objects.append(sent["kind"])
            return sent | {"metadata": {**sent["metadata"], "uid": "uid-of-the-object"}}
        if "dryRun=" in path:
            return sent
        self.made += 1
        made = sent | {"status": {"phase": "Running"}}
        made["metadata"] |= {"namespace": NAMESPACE, "uid": f"uid-{self.made}"}
        made["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        self.pods[sent["metadata"]["name"]] = made
        self.on_create(sent["metadata"]["name"])
        return made

    def _config_maps(self) -> list[dict[str, Any]]:
        labels = {names.APP_LABEL: names.APP, names.JOB_LABEL: "job"}
        state = {names.STATUS_KEY: self.status.to_json()}
        job = _metadata(names.job_object("job"), labels)
        job |= {"annotations": dict(self.annotations), "resourceVersion": str(self.version)}
        spec = {} if self.spec is None else {names.SPEC_KEY: self.spec.to_json()}
        if self.master_pod is not None:
            spec[names.MASTER_POD_KEY] = json.dumps(self.master_pod)
        journal = json.dumps({"snapshot": {"core": {"events": to_journal(self.history)}}})
        packed = base64.b64encode(zlib.compress(journal.encode())).decode()
        own = {"data": state, "binaryData": {names.JOURNAL_KEY: packed}}
        states = [{"metadata": _metadata(names.state_object("job"), labels), **own}] if self.has_state else []
        return [{"metadata": job, "data": spec}, *states]


@contextmanager
def own_cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server that is the cluster of this process and its children, which have a home directory of their own."""
    server = ApiServer()
    try:
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(home / "config")))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield server
    finally:
        server.stop()


def _metadata(name: str, labels: dict[str, str]) -> dict[str, Any]:
    created = "2026-01-01T00:00:00Z"
    return {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": labels, "creationTimestamp": created}
