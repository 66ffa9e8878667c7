"""The dashboard in a namespace: its calls of the API, the rights of its Role, and its Deployment."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticdl.master.journal import encode
from elasticdl_client.job_events import EventHistory, to_journal
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.jobs.options import parse
from elasticdl_client.kubernetes import names
from tests.client.api_server import NAMESPACE, ApiServer
from tests.dashboard.dashboards import ROOT, RunningDashboard
from tests.dashboard.written_jobs import BEGAN, Story, a_life

MANIFEST = ROOT / "manifests" / "dashboard.yaml"


class Recording(ApiServer):
    """Remembers the rights that requests need, as (resource, verb)."""

    def __init__(self) -> None:
        self.used: set[tuple[str, str]] = set()
        super().__init__()

    def _config_maps(self) -> list[dict[str, Any]]:
        story = Story()
        story.pod("worker-0", 1, 2, 3)
        core = {"events": to_journal(EventHistory(tuple(story.events))), "series": a_life(60, 3, 900, 90).to_journal()}
        owner, state = super()._config_maps()
        packed = base64.b64encode(zlib.compress(encode({"core": core}))).decode()
        return [owner, {**state, "binaryData": {names.JOURNAL_KEY: packed}}]

    def answer(self, path: str) -> tuple[int, bytes]:
        parts = path.partition("?")[0].removeprefix(f"/api/v1/namespaces/{NAMESPACE}/").split("/")
        resource = "/".join(part for i, part in enumerate(parts) if i != 1)
        self.used.add((resource, "list" if len(parts) == 1 else "get"))
        return super().answer(path)


def manifests() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def deployed() -> list[str]:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "elasticdl_client.main", "dashboard"]
    return list(container["args"])


@pytest.fixture
def cluster() -> Iterator[Recording]:
    server = Recording()
    server.status = JobStatus("job", JobPhase.RUNNING, workers_wanted=2, records_done=901, updated_at=BEGAN + 61)
    server.add_pod("master", ["I am the master"])
    server.add_pod("worker-0", ["I am a worker"], phase="Pending")
    worker = server.pods["elasticdl-job-worker-0"]
    worker["spec"]["nodeName"] = "n"
    worker["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ContainerCreating"}}
    server.add_event("worker-0", "00:02:00", "FailedMount", "the volume is not there")
    yield server
    server.stop()


def test_its_role_grants_what_it_asks_for_and_nothing_else(cluster: Recording, tmp_path: Path) -> None:
    arguments = [one for one in deployed() if not one.startswith(("--listen", "--port", "--browser"))]
    dashboard = RunningDashboard(tmp_path, *arguments, KUBECONFIG=str(cluster.kubeconfig(tmp_path / "config")))
    try:
        (row,) = dashboard.get("/api/jobs")["jobs"]
        page = dashboard.get(f"/api/jobs/{row['id']}")
        assert (page["namespace"], page["phase"], page["actions"]) == (NAMESPACE, "Running", [])
        assert (len(page["events"]), page["problem"]) == (3, "")
        assert page["series"]["records"][-2:] == [900, 901]  # the journal's newest, and what was seen
        (worker,) = [pod for pod in page["pods"] if pod["name"] == "worker-0"]
        assert "the volume is not there" in worker["message"]
        dashboard.read_until(f"/api/jobs/{row['id']}/logs?pod=master", b"I am the master")
    finally:
        dashboard.stop()
    rules = manifests()["Role"]["rules"]
    granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert cluster.used == granted
    assert {verb for _, verb in granted} <= {"get", "list"}
    assert {group for rule in rules for group in rule["apiGroups"]} == {""}


def test_a_cluster_that_is_away_is_said_and_what_was_known_stays(cluster: Recording, tmp_path: Path) -> None:
    kubeconfig = str(cluster.kubeconfig(tmp_path / "config"))
    cluster.allows = False
    dashboard = RunningDashboard(tmp_path, "--runtime=kubernetes", KUBECONFIG=kubeconfig)
    try:
        (row,) = dashboard.get("/api/jobs")["jobs"]
        page = dashboard.get(f"/api/jobs/{row['id']}")
        assert (len(page["events"]), page["actions"]) == (3, [])
        cluster.stop()
        answer = dashboard.get("/api/jobs")
        assert [job["name"] for job in answer["jobs"]] == ["job"]
        assert "cannot be reached" in answer["problems"][0]
        cluster.start()
        assert dashboard.get("/api/jobs")["problems"] == []
    finally:
        dashboard.stop()


def test_a_job_of_a_cluster_that_is_away_is_not_said_to_be_gone(cluster: Recording, tmp_path: Path) -> None:
    kubeconfig = str(cluster.kubeconfig(tmp_path / "config"))
    cluster.stop()
    dashboard = RunningDashboard(tmp_path, "--runtime=kubernetes", KUBECONFIG=kubeconfig)
    try:
        path = f"/api/jobs/{'0' * 16}"
        answer = dashboard.ask(path, Authorization=f"Bearer {dashboard.token}")
        assert (answer.status, "cannot be reached" in answer.json()["error"]) == (503, True)
        dashboard.read_until(f"/api/stream?job={'0' * 16}", b'"why":"The job is not seen now')
        cluster.start()
        assert dashboard.ask(path, Authorization=f"Bearer {dashboard.token}").status == 404
        dashboard.read_until(f"/api/stream?job={'0' * 16}", b'"why":"There is no such job any more')
    finally:
        dashboard.stop()


def test_its_pod_fits_the_restricted_profile_and_takes_its_token_from_the_secret() -> None:
    found = manifests()
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (variable,) = container["env"]
    assert variable["name"] == "ELASTICDL_DASHBOARD_TOKEN"
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "elasticdl-dashboard", "key": "token"}
    options = parse("dashboard", deployed())
    assert options.read_only
    assert (options.listen, options.port) == ("0.0.0.0", found["Service"]["spec"]["ports"][0]["port"])
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == found["Service"]["spec"]["selector"] == found["Deployment"]["spec"]["selector"]["matchLabels"]
