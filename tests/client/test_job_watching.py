"""`logs` with kubectl's options and `status --watch`: on real local jobs, and on a scripted API server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from elasticdl_client.errors import JobError
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus
from elasticdl_client.jobs import commands
from elasticdl_client.jobs.options import seconds_of
from elasticdl_client.kubernetes import api, follow
from elasticdl_client.kubernetes.api import ClusterError
from tests.client.api_server import ApiServer, own_cluster
from tests.client.status_writer import write
from tests.client.test_jobs_local import Run, flags, home, run, running  # noqa: F401
from tests.client.test_local_front import ROOT, finish
from tests.lines import line_with

RUNNING = JobStatus(
    "job", JobPhase.RUNNING, generation=1, epoch=1, num_epochs=1, records_done=50, records_total=100, updated_at=1.0
)
ENDED = dataclasses.replace(
    RUNNING, phase=JobPhase.SUCCEEDED, exit_code=0, records_done=100, coverage=(EpochCoverage(1, 100, 100),)
)
LOST = JobEvent(1, 1.0, EventKind.POD_LOST, "worker-3", "", 0, {"reason": "OOMKilled"})
Watch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with own_cluster(tmp_path, monkeypatch) as server:
        server.status = RUNNING
        server.add_pod("master", ["the first life"], ["begins", "works"])
        server.add_pod("worker-0", ["loss 2"])
        server.add_pod("worker-3", ["loss 1"])
        server.add_pod("ps-0", ["serves"])
        yield server


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Start `elasticdl`, and end it afterwards if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        code = "import sys; from elasticdl_client.main import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_role_is_all_its_pods_each_line_after_its_pods_name(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    assert run("logs", "job", "--role=worker") == "[elasticdl-job-worker-0] loss 2\n[elasticdl-job-worker-3] loss 1\n"
    assert run("logs", "job", "--pod=worker-3") == "loss 1\n"
    assert run("logs", "job", "--pod=elasticdl-job-ps-0") == "serves\n"
    with pytest.raises(JobError, match="worker-7") as caught:
        run("logs", "job", "--pod", "worker-7")
    assert "There are master, ps-0, worker-0, worker-3" in caught.value.hint


def test_a_pod_that_is_gone_or_whose_node_is_silent_hides_no_log_of_others(
    cluster: ApiServer,
    run: Run,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.pods["listed, and gone"] = cluster.pods.pop("elasticdl-job-worker-0")
    found = commands.run("logs", ["job", "--role=worker"])
    captured = capsys.readouterr()
    assert (found, captured.out) == (0, "[elasticdl-job-worker-3] loss 1\n")
    assert "note: Cannot read the log of pod elasticdl-job-worker-0" in captured.err
    with pytest.raises(ClusterError, match="not found"):
        run("logs", "job", "--pod=worker-0")


def test_a_pod_whose_log_breaks_off_hides_no_log_of_others(
    cluster: ApiServer,
    run: Run,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.on_log = lambda name: name != "elasticdl-job-worker-0"
    found = commands.run("logs", ["job", "--role=worker"])
    captured = capsys.readouterr()
    assert (found, captured.out) == (0, "[elasticdl-job-worker-3] loss 1\n")
    assert "note: The log of pod elasticdl-job-worker-0" in captured.err
    with pytest.raises(ClusterError, match="elasticdl-job-worker-0 has broken off, or its node does not answer"):
        run("logs", "job", "--pod=worker-0")

    def end(name: str) -> bool:
        cluster.stop()
        return False

    cluster.on_log = end
    try:
        with pytest.raises(ClusterError, match="cannot be reached"):
            run("logs", "job", "--role=worker")
        cluster.start()
        with pytest.raises(ClusterError, match="cannot be reached"):
            run("logs", "job", "--pod=worker-0")
    finally:
        cluster.start()


def test_since_tail_and_previous_are_asked_of_the_server(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    assert run("logs", "job", "--since=1m30s", "--tail=1") == "works\n"
    assert (cluster.asked[-1]["sinceSeconds"], cluster.asked[-1]["tailLines"]) == ("90", "1")
    assert run("logs", "job", "-p") == "the first life\n"
    assert run("logs", "job", "--all", "--previous") == "[elasticdl-job-master] the first life\n"
    with pytest.raises(JobError, match="no earlier log"):
        run("logs", "job", "--pod=worker-0", "--previous")


def test_lines_come_with_their_times(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    assert run("logs", "job", "--timestamps", "--tail=1") == "2026-01-01T00:00:01Z works\n"
    first = json.loads(run("logs", "job", "--timestamps", "-o", "json").splitlines()[0])
    assert first == {"pod": "elasticdl-job-master", "line": "begins", "time": "2026-01-01T00:00:00Z"}
    cluster.end_pods()
    cluster.status = ENDED
    followed = run("logs", "job", "--pod=worker-0", "-f", "--timestamps")
    assert followed == "2026-01-01T00:00:00Z loss 2\n"


def test_following_a_role_takes_pods_that_come_later_whole(cluster: ApiServer, watch: Watch) -> None:
    reader = watch("logs", "job", "--role=worker", "-f", "--since=30s", "--tail=1")
    assert {line_with(reader, "loss"), line_with(reader, "loss")} == {
        "[elasticdl-job-worker-0] loss 2\n",
        "[elasticdl-job-worker-3] loss 1\n",
    }
    cluster.add_pod("worker-4", ["I am", "its successor"])
    assert line_with(reader, "worker-4") == "[elasticdl-job-worker-4] I am\n"
    assert line_with(reader, "worker-4") == "[elasticdl-job-worker-4] its successor\n"
    cluster.end_pods()
    assert reader.wait(30) == 0
    first = {one["pod"]: one for one in reversed(cluster.asked)}
    assert first["elasticdl-job-worker-0"]["sinceSeconds"] == "30"
    assert "sinceSeconds" not in first["elasticdl-job-worker-4"]


def test_a_watched_job_is_shown_through_an_outage_to_its_end(cluster: ApiServer, watch: Watch) -> None:
    watching = watch("status", "job", "--watch", "--runtime=kubernetes")
    line_with(watching, "records 50/100")
    cluster.stop()
    line_with(watching, "cannot be reached")
    cluster.status = ENDED
    cluster.start()
    line_with(watching, "answers again")
    line_with(watching, "epoch 1: records 100, committed 100")
    assert watching.wait(30) == 0


def test_what_happens_last_is_shown_of_a_watched_job(cluster: ApiServer, watch: Watch) -> None:
    watching = watch("status", "job", "--watch", "--runtime=kubernetes")
    line_with(watching, "records 50/100")
    cluster.history = EventHistory((LOST,))
    cluster.status = dataclasses.replace(ENDED, updated_at=2.0)
    line_with(watching, "worker-3 ran out of memory")
    line_with(watching, "epoch 1: records 100, committed 100")
    assert watching.wait(30) == 0


@pytest.mark.parametrize("command", ["status", "events"])
def test_a_job_that_ends_while_it_is_looked_at_is_shown_to_its_end(
    cluster: ApiServer,
    run: Run,  # noqa: F811
    command: str,
) -> None:
    def end() -> None:
        cluster.history, cluster.status = EventHistory((LOST,)), dataclasses.replace(ENDED, updated_at=2.0)
        cluster.end_pods()

    cluster.between = end
    if command == "events":
        assert run("events", "job", "-f", "-o", "json").count("PodLost") == 1
    else:
        found = json.loads(run("status", "job", "-o", "json"))
        assert (found["phase"], found["exit_code"], found["records_done"]) == ("Succeeded", 0, 100)


def test_events_that_are_followed_as_yaml_are_documents(cluster: ApiServer, run: Run) -> None:  # noqa: F811
    cluster.history, cluster.status = EventHistory((LOST, dataclasses.replace(LOST, number=2))), ENDED
    cluster.end_pods()
    events = list(yaml.safe_load_all(run("events", "job", "-f", "-o", "yaml")))
    assert [(event["number"], event["kind"]) for event in events] == [(1, "PodLost"), (2, "PodLost")]


def test_a_watched_job_that_is_deleted_ends_the_watching(cluster: ApiServer, watch: Watch) -> None:
    watching = watch("status", "job", "-w", "-o", "json")
    line_with(watching, '"records_done": 50')
    cluster.has_job, cluster.pods = False, {}
    assert watching.wait(30) == 1
    assert "was deleted" in watching.communicate()[1]


def test_a_job_whose_follower_is_refused_is_said_to_keep_running(cluster: ApiServer) -> None:
    connection = api.connect()
    cluster.answer = lambda path: (401, b'{"message": "Unauthorized"}')  # type: ignore[method-assign]
    with pytest.raises(api.ClusterError, match="rejects your credentials") as caught:
        follow.wait(connection, JobSpec(job_name="job", namespace="team"))
    assert "The job job keeps running" in caught.value.hint
    assert "elasticdl logs -f job --namespace=team" in caught.value.hint
    assert "log in again" in caught.value.hint


def test_ctrl_c_ends_the_watching_alone(cluster: ApiServer, watch: Watch) -> None:
    watching = watch("status", "job", "-w")
    line_with(watching, "job: Running")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 130
    assert watching.communicate()[1] == ""


def test_a_watched_local_job_ends_with_its_exit_code(
    running: subprocess.Popen[str],  # noqa: F811
    flags: dict[str, str],  # noqa: F811
    watch: Watch,
) -> None:
    watching = watch("status", "job", "--watch")
    line_with(watching, "job: Running")
    write(Path(flags["job_dir"]), dataclasses.replace(ENDED, phase=JobPhase.FAILED, exit_code=3, message="feed raised"))
    line_with(watching, "feed raised")
    assert watching.wait(30) == 3


def test_the_life_before_of_a_local_pod_is_read(flags: dict[str, str], run: Run) -> None:  # noqa: F811
    code, _, errors = finish(flags, "die_once")
    assert code == 0, errors
    first, second = run("logs", "job", "--previous"), run("logs", "job")
    assert second.startswith(first)
    assert second.removeprefix(first).startswith("---- started again")
    assert "started again" not in first
    assert run("logs", "job", "--since=1h").startswith("---- started again")  # the lines before say no time
    with pytest.raises(JobError, match="has printed nothing, or there is none"):
        run("logs", "job", "--role=ps")


def test_since_and_roles_of_local_pods(
    running: subprocess.Popen[str],  # noqa: F811
    flags: dict[str, str],  # noqa: F811
    run: Run,  # noqa: F811
) -> None:
    logs = Path(flags["job_dir"]) / "logs"
    now = time.time()
    stamps = [datetime.fromtimestamp(now - age).strftime("%Y-%m-%d %H:%M:%S,000") for age in (3600, 60)]
    (logs / "elasticdl-job-worker-0.log").write_text(
        f"{stamps[0]} INFO old\nolder words\n{stamps[1]} INFO new\nprinted\n"
    )
    (logs / "elasticdl-job-worker-1.log").write_text("no time\n")
    os.utime(logs / "elasticdl-job-worker-1.log", (now - 3600, now - 3600))
    found = run("logs", "job", "--role=worker", "--since=5m", "-o", "json").splitlines()
    assert [json.loads(line)["line"] for line in found] == [f"{stamps[1]} INFO new", "printed"]
    entries = [
        json.dumps({"time": datetime.fromtimestamp(now - age).astimezone().isoformat(timespec="milliseconds"), "n": n})
        for n, age in enumerate((3600, 60))
    ]
    (logs / "elasticdl-job-worker-2.log").write_text("\n".join(entries) + "\n")
    assert run("logs", "job", "--pod=worker-2", "--since=5m") == entries[1] + "\n"
    lines = [f"[process 1] {stamps[0]} INFO old", f"[process 1] {stamps[1]} INFO new"]
    (logs / "elasticdl-job-worker-3.log").write_text("\n".join(lines) + "\n")
    assert run("logs", "job", "--pod=worker-3", "--since=5m") == lines[1] + "\n"
    shown = run("logs", "job", "--pod=worker-0", "--timestamps").splitlines()
    offset = datetime.fromtimestamp(now - 3600).astimezone().isoformat(timespec="seconds")
    assert shown[1] == f"{offset} older words"
    assert run("logs", "job", "--pod=worker-1") == "no time\n"
    assert run("logs", "job", "--pod=worker-1", "--timestamps") == "no time\n"
    assert "[elasticdl-job-worker-1] no time\n" in run("logs", "job", "--role=worker")


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("2m", 120), ("1h30m", 5400), ("45", 45), ("", None), ("0s", None), ("1d", None)]
)
def test_lengths_of_time_are_kubectls(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_watching_an_ended_job_says_its_end_at_once(flags: dict[str, str]) -> None:  # noqa: F811
    finish(flags, "fail")
    assert commands.run("status", ["job", "--watch"]) == 1
