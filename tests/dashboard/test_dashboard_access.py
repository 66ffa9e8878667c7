"""Access: a real dashboard, and requests with and without its token, without a browser's manners."""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl_client.dashboard.access import ACTION_HEADER, Keys, hosts_of
from elasticdl_client.errors import FlagError
from elasticdl_client.job_status import JobPhase, JobStatus
from tests.command import elasticdl
from tests.dashboard.dashboards import ROOT, RunningDashboard
from tests.dashboard.written_jobs import BEGAN, write_job


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    lines = ["\x1b[1;31mERROR\x1b[0m \x1b]0;title\x07red", "10%\r 60%\r100% done\r", "x" * 3_000_000, "<b>last</b>"]
    for name, log in (("done", ["hello"]), ("kept", ["hello"]), ("lines", lines)):
        status = JobStatus(name, JobPhase.SUCCEEDED, exit_code=0, metrics={"auc": math.nan})
        write_job(home / ".elasticdl" / "jobs" / name, status, logs={"master": "\n".join(log) + "\n"})
    return home


@pytest.fixture(scope="module")
def dashboard(jobs: Path) -> Iterator[RunningDashboard]:
    running = RunningDashboard(jobs)
    yield running
    running.stop()


@pytest.fixture
def bearer(dashboard: RunningDashboard) -> dict[str, str]:
    return {"Authorization": f"Bearer {dashboard.token}"}


def test_without_the_token_nothing_is_served(dashboard: RunningDashboard) -> None:
    for path in ("/", "/static/main.js", "/api/jobs", "/api/stream", "/nothing", "/?token=", "/?token=" + "0" * 64):
        answer = dashboard.ask(path)
        assert answer.status == 403, path
        assert b"done" not in answer.body
    assert dashboard.ask("/", Cookie=f"elasticdl_dashboard_{dashboard.port}={'0' * 64}").status == 403
    assert dashboard.ask("/", Cookie=f"elasticdl_dashboard_{dashboard.port}={dashboard.token}").status == 403
    assert dashboard.ask("/", Authorization="Bearer " + "0" * 64).status == 403


def test_a_metric_that_is_no_number_is_null_for_the_browser(dashboard: RunningDashboard) -> None:
    [job, *_] = dashboard.get("/api/jobs")["jobs"]
    assert dashboard.get(f"/api/jobs/{job['id']}")["metrics"] == {"auc": None}
    dashboard.read_until(f"/api/stream?job={job['id']}", b'"metrics":{"auc":null}')


def test_the_token_of_the_address_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(
    dashboard: RunningDashboard,
) -> None:
    answer = dashboard.ask(f"/?token={dashboard.token}")
    assert (answer.status, answer.headers["location"]) == (303, ".")
    cookie = answer.headers["set-cookie"]
    assert {"httponly", "samesite=lax"} <= {part.strip().lower() for part in cookie.split(";")}
    assert dashboard.token not in cookie
    page = dashboard.ask("/", Cookie=dashboard.cookie())
    assert page.status == 200
    assert b"<title>ElasticDL" in page.body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.7:{port}", ""]
)
def test_a_host_of_another_name_is_refused_with_the_token_too(
    dashboard: RunningDashboard, bearer: dict[str, str], host: str
) -> None:
    named = host.format(port=dashboard.port)
    assert dashboard.ask("/", Host=named, **bearer).status == 403
    assert dashboard.ask(f"/?token={dashboard.token}", Host=named).status == 403


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:9", "[::1]:{port}", "localhost"])
def test_the_ports_of_tunnels_are_taken(dashboard: RunningDashboard, bearer: dict[str, str], host: str) -> None:
    assert dashboard.ask("/", Host=host.format(port=dashboard.port), **bearer).status == 200


def test_names_are_added_and_addresses_are_taken_where_it_listens_to_others() -> None:
    keys = Keys("t" * 32, ("dash.example",), 80, is_public=True)
    assert [keys.knows_host(host) for host in ("dash.example", "10.0.0.7:80", "evil.example", "[oops", "")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert Keys("t" * 32, hosts_of("FD00:0:0::07")).knows_host("[fd00::7]:80")
    assert not Keys("t" * 32).knows_host("10.0.0.7:80")


@pytest.mark.parametrize("name", ["https://dash.example", "dash.example:8443", "dash.example/jobs", "bücher.example"])
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    assert hosts_of("Dash.example, other") == ("dash.example", "other")
    with pytest.raises(FlagError, match=name) as refused:
        hosts_of(f"other,{name}")
    assert "IP addresses" in refused.value.hint


def test_an_action_needs_the_header_of_the_page_and_its_origin(dashboard: RunningDashboard, jobs: Path) -> None:
    ids = {job["name"]: job["id"] for job in dashboard.get("/api/jobs")["jobs"]}
    path, cookie = f"/api/jobs/{ids['done']}/delete", dashboard.cookie()
    action = Keys(dashboard.token, port=dashboard.port).action
    assert dashboard.ask(path, "POST").status == 403
    assert dashboard.ask(path, "POST", Cookie=cookie).status == 403
    assert dashboard.ask(f"{path}?token={dashboard.token}", "POST").status == 403
    assert dashboard.ask(path, "POST", Cookie=cookie, **{ACTION_HEADER: "0" * 64}).status == 403
    assert (
        dashboard.ask(path, "POST", Cookie=cookie, Origin="http://evil.example", **{ACTION_HEADER: action}).status
        == 403
    )
    assert dashboard.ask(path, "GET", Cookie=cookie).status == 405
    assert (jobs / ".elasticdl" / "jobs" / "done").is_dir()
    done = dashboard.ask(path, "POST", Cookie=cookie, Origin=dashboard.base.rstrip("/"), **{ACTION_HEADER: action})
    assert (done.status, done.json()) == (200, {"done": "Job done is deleted."})
    assert not (jobs / ".elasticdl" / "jobs" / "done").exists()
    assert sorted(job["name"] for job in dashboard.get("/api/jobs")["jobs"]) == ["kept", "lines"]
    refused = dashboard.ask(f"/api/jobs/{ids['kept']}/resume", "POST", Cookie=cookie, **{ACTION_HEADER: action})
    assert refused.status == 409
    assert "there is nothing to resume" in refused.json()["error"]
    scaled = f"/api/jobs/{ids['kept']}/scale?num_workers=3"
    assert dashboard.ask(scaled, "POST", Cookie=cookie).status == 403
    assert dashboard.ask(scaled, "POST", Cookie=cookie, **{ACTION_HEADER: action}).status == 409
    assert (
        dashboard.ask(f"/api/jobs/{ids['kept']}/rename", "POST", Cookie=cookie, **{ACTION_HEADER: action}).status == 404
    )


def test_an_action_passes_a_proxy_that_sends_its_own_host(tmp_path: Path) -> None:
    write_job(tmp_path / ".elasticdl" / "jobs" / "job", JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
    running = RunningDashboard(tmp_path, "--hosts=dash.example.org")
    try:
        (row,) = running.get("/api/jobs")["jobs"]
        headers = {"Cookie": running.cookie(), ACTION_HEADER: Keys(running.token, port=running.port).action}
        for origin, status in (("https://evil.example", 403), ("https://dash.example.org", 409)):
            answer = running.ask(f"/api/jobs/{row['id']}/resume", "POST", Origin=origin, **headers)
            assert answer.status == status, origin
    finally:
        running.stop()


@pytest.mark.parametrize("is_silent", [False, True])
def test_ctrl_c_ends_it_at_once_while_a_page_is_open(tmp_path: Path, is_silent: bool) -> None:
    write_job(tmp_path / ".elasticdl" / "jobs" / "job", JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an API server that takes requests and does not answer
        server = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        found = {
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        }
        (tmp_path / "config").write_text(json.dumps({"current-context": "c", "clusters": [server], **found}))
        runtime = "kubernetes" if is_silent else "local"
        running = RunningDashboard(tmp_path, f"--runtime={runtime}", KUBECONFIG=str(tmp_path / "config"))
        page = http.client.HTTPConnection(running.host, running.port, timeout=30)
        page.request("GET", "/api/stream", headers={"Authorization": f"Bearer {running.token}"})
        assert page.getresponse().readline().startswith(b"event: session")
        running.process.send_signal(signal.SIGINT)
        output, _ = running.process.communicate(timeout=20)  # an answer is waited for longer
    assert running.process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in output
    assert "ERROR" not in output


def test_no_path_leads_out_of_the_page_and_its_jobs(dashboard: RunningDashboard, bearer: dict[str, str]) -> None:
    for path in (
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static//etc/passwd",
        "/static/vendor/../../../../pyproject.toml", "/..%2f..%2fetc/passwd", "/api/jobs/..%2f..%2fkept",
        "/api/jobs/kept", "/api/jobs/%2e%2e/logs", "/static/", "/static/vendor",
    ):  # fmt: skip
        assert dashboard.ask(path, **bearer).status == 404, path
    (kept,) = [job["id"] for job in dashboard.get("/api/jobs")["jobs"] if job["name"] == "kept"]
    for pod in ("../../spec", "worker-0/../../x", "--help", "worker-0%00", "master%0a"):
        assert dashboard.ask(f"/api/jobs/{kept}/logs?pod={pod}", **bearer).status == 400, pod


def test_every_answer_forbids_inline_scripts_and_other_origins(
    dashboard: RunningDashboard, bearer: dict[str, str]
) -> None:
    for answer in (dashboard.ask("/"), dashboard.ask("/", **bearer), dashboard.ask("/api/jobs", **bearer)):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    page = dashboard.ask("/", **bearer).body
    assert b"http:" not in page
    assert b"https:" not in page
    assert b" style=" not in page


def test_the_log_of_a_job_that_has_ended_comes_whole_and_ends(
    dashboard: RunningDashboard, bearer: dict[str, str]
) -> None:
    (kept,) = [job["id"] for job in dashboard.get("/api/jobs")["jobs"] if job["name"] == "kept"]
    stream = dashboard.ask(f"/api/jobs/{kept}/logs?pod=master", **bearer).body.decode()
    assert 'event: lines\ndata: [["master","hello"]]' in stream
    assert 'event: end\ndata: {"error":""}' in stream


def test_lines_of_a_log_come_as_a_terminal_leaves_them_and_no_line_is_endless(
    dashboard: RunningDashboard, bearer: dict[str, str]
) -> None:
    (job,) = [job["id"] for job in dashboard.get("/api/jobs")["jobs"] if job["name"] == "lines"]
    stream = dashboard.ask(f"/api/jobs/{job}/logs?pod=master", **bearer).body
    blocks = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: [")]
    lines = [line for block in blocks for _, line in block]
    assert (lines[0], lines[1], lines[3]) == ("ERROR red", "100% done", "<b>last</b>")
    assert len(lines[2]) < 11_000


def test_a_damaged_job_hides_no_other(tmp_path: Path) -> None:
    jobs = tmp_path / ".elasticdl" / "jobs"
    for name in ("well", "status", "numbers", "journal"):
        write_job(jobs / name, JobStatus(name, JobPhase.SUCCEEDED, exit_code=0, updated_at=BEGAN))
    (jobs / "status" / "status.json").write_text('{"job_name": "status", "pods": [1]}')
    numbers = json.loads((jobs / "numbers" / "status.json").read_text())
    (jobs / "numbers" / "status.json").write_text(json.dumps({**numbers, "updated_at": "yesterday"}))
    (jobs / "journal" / "journal.json").write_text("{")
    (write_job(jobs / "cut", JobStatus("cut", JobPhase.RUNNING)) / "logs").rmdir()
    running = RunningDashboard(tmp_path)
    try:
        ids = {row["name"]: row["id"] for row in running.get("/api/jobs")["jobs"]}
        assert ids.keys() == {"well", "status", "numbers", "journal", "cut"}
        problems = {name: running.get(f"/api/jobs/{job_id}")["problem"] for name, job_id in ids.items()}
        assert problems["well"] == ""
        assert "cannot be read" in problems["journal"]
        assert "cannot show the history" in problems["numbers"]
        assert running.get(f"/api/jobs/{ids['well']}")["name"] == "well"
        bearer = f"Bearer {running.token}"
        refused = running.ask(f"/api/jobs/{ids['cut']}/resume", "POST", Authorization=bearer)
        assert refused.status == 409
        assert f"No such file or directory: {jobs}/cut/logs/" in refused.json()["error"]
        assert "as the owner of the job's directory" in refused.json()["hint"]
    finally:
        running.process.terminate()  # the bug has left its traceback
        running.process.communicate(timeout=30)


def test_one_that_only_shows_offers_no_action_and_takes_the_token_that_it_is_given(tmp_path: Path) -> None:
    write_job(tmp_path / ".elasticdl" / "jobs" / "job", JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
    running = RunningDashboard(tmp_path, "--read_only", "job", ELASTICDL_DASHBOARD_TOKEN="f" * 40)
    try:
        assert "token" not in running.address  # the user has set it and knows it
        running.token = "f" * 40
        (row,) = running.get("/api/jobs")["jobs"]
        assert running.address.endswith(f"#/job/{row['id']}")
        assert running.get(f"/api/jobs/{row['id']}")["actions"] == []
        refused = running.ask(f"/api/jobs/{row['id']}/delete", "POST", Authorization=f"Bearer {running.token}")
        assert refused.status == 403
        assert (tmp_path / ".elasticdl" / "jobs" / "job").is_dir()
    finally:
        running.stop()


def test_a_missing_package_is_named_with_what_to_install() -> None:
    code = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
        "from elasticdl_client.main import exit_with, run\n"
        "exit_with(lambda: run(['dashboard']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the package uvicorn" in done.stderr
    assert "elasticdl2-client[dashboard]" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--listen=example.org"], {}, "is not an IP address"),
        (["no-such-job"], {}, "not found"),
        ([], {"ELASTICDL_DASHBOARD_TOKEN": "short"}, "fewer than 32 characters"),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    home = {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "no-cluster")}
    done = elasticdl("dashboard", "--browser=false", *arguments, **home, **environment)
    assert done.returncode != 0
    assert said in done.stderr
