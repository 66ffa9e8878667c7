"""--on_end: the end of a job is posted once, to real receivers that answer, refuse, fail or are not there."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from elasticdl_client import end_hook
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus
from tests.client.receiver import Receiver, receiving
from tests.client.test_local_front import MODEL, finish
from tests.client.test_secret_values import FLAGS
from tests.master.actors import MasterJob, held_port, running

ENDED = JobStatus(
    "job",
    JobPhase.SUCCEEDED,
    exit_code=0,
    metrics={"auc": math.nan},
    coverage=(EpochCoverage(1, 9, 9),),
    updated_at=5.0,
)
AT_ONCE = (0.0, 0.0, 0.0)


def job(url: str) -> JobSpec:
    return JobSpec(job_name="job", namespace="here", on_end=url)


def test_a_post_has_the_keys_of_the_status_and_the_credentials_of_the_url() -> None:
    with receiving() as receiver:
        delivery = end_hook.post(job(receiver.url.replace("//", "//me:p%40ss@") + "?key=k#part"), ENDED)
    assert delivery is not None
    assert delivery.is_done
    assert delivery.text.startswith("--on_end=http://***@127.0.0.1:")
    assert "s3cr3t" not in delivery.text
    ((path, headers, body),) = receiver.posts
    assert path == "/services/s3cr3t?key=k"
    assert headers["Authorization"] == "Basic bWU6cEBzcw=="  # me:p@ss
    assert headers["Content-Type"] == "application/json"
    assert (body["name"], body["namespace"], body["phase"], body["exit_code"]) == ("job", "here", "Succeeded", 0)
    assert body["metrics"] == {"auc": None}
    assert body["coverage"][0]["committed"] == 9


@pytest.mark.parametrize(
    ("answers", "is_done", "num_posts"),
    [
        ((503, 429), True, 3),
        ((500, 500, 500, 500), False, 4),
        ((404,), False, 1),
        ((302,), False, 1),
    ],
)
def test_what_may_pass_is_tried_four_times_and_a_refusal_once(
    answers: tuple[int, ...], is_done: bool, num_posts: int
) -> None:
    with receiving(*answers) as receiver:
        delivery = end_hook.post(job(receiver.url), ENDED, pauses_s=AT_ONCE)
    assert delivery is not None
    assert (delivery.is_done, len(receiver.posts)) == (is_done, num_posts)
    assert is_done or f"it answered {answers[-1]}" in delivery.text


def test_a_receiver_that_is_not_there_is_a_line_without_the_path() -> None:
    with held_port() as held:
        delivery = end_hook.post(
            job(f"http://127.0.0.1:{held.getsockname()[1]}/services/s3cr3t"), ENDED, pauses_s=AT_ONCE
        )
    assert delivery is not None
    assert not delivery.is_done
    assert "Connection refused" in delivery.text
    assert "s3cr3t" not in delivery.text


def test_a_process_that_must_end_leaves_the_retries() -> None:
    stop = threading.Event()
    stop.set()
    with receiving(503) as receiver:
        assert end_hook.post(job(receiver.url), ENDED, stop) is None
    assert len(receiver.posts) == 1


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("ftp://host/s3cr3t", "is not an http:// or https:// URL"),
        ("hooks.example/s3cr3t", "is not an http:// or https:// URL"),
        ("http:///s3cr3t", "names no host"),
        ("https://me:s3cr/3t@host/", "has no valid host and port"),
        ("https://host:99999/s3cr3t", "has no valid host and port"),
        ("https://host/a s3cr3t", "has white space in it"),
    ],
)
def test_a_wrong_url_is_rejected_and_not_shown(url: str, what: str) -> None:
    with pytest.raises(FlagError, match=what) as caught:
        JobSpec.from_flags("train", {**FLAGS, "on_end": url})
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example/services/s3cr3t", "https://hooks.example/***"),
        ("http://me:s3cr3t@host:8080", "http://***@host:8080"),
        ("http://me:s3@cr3t@[::1]:80/?x=s3cr3t", "http://***@[::1]:80/***"),
        ("https://host/", "https://host/"),
    ],
)
def test_the_public_part_of_a_job_has_the_host_alone(url: str, shown: str) -> None:
    spec = JobSpec.from_flags("train", {**FLAGS, "on_end": url})
    assert spec.public().on_end == shown
    assert spec.public().public() == spec.public()
    assert spec.public().with_secrets(spec.secrets()).on_end == url


def local_flags(directory: Path, receiver: Receiver) -> dict[str, str]:
    (directory / "m.py").write_text(MODEL)
    (directory / "part-0").write_text("a record")
    return {
        "job_name": "job",
        "runtime": "local",
        "job_dir": str(directory / "job"),
        "model_zoo": str(directory),
        "model_def": "m.custom_model",
        "training_data": str(directory / "part-0"),
        "on_end": receiver.url,
    }


def test_a_local_job_posts_a_failure_as_well(tmp_path: Path) -> None:
    with receiving() as receiver:
        code, output, errors = finish(local_flags(tmp_path, receiver), "fail")
    ((_, _, body),) = receiver.posts
    assert (code, body["phase"], body["exit_code"], body["message"]) == (1, "Failed", 1, "feed raised: broken")
    assert "s3cr3t" not in output + errors + (tmp_path / "job" / "spec.json").read_text()


def test_a_receiver_that_refuses_costs_a_local_job_one_line(tmp_path: Path) -> None:
    with receiving(410) as receiver:
        code, output, errors = finish(local_flags(tmp_path, receiver), "succeed")
    assert code == 0
    assert "Job job succeeded." in output
    (line,) = [line for line in errors.splitlines() if "on_end" in line]
    assert line.endswith("has not taken the status of the job: it answered 410 Gone")


def test_the_master_posts_once_over_all_its_lives_and_again_if_it_was_killed_meanwhile(tmp_path: Path) -> None:
    with receiving() as receiver:
        receiver.holds.set()
        flags = {"distribution_strategy": "Local", "num_ps_pods": 0, "image_name": "none", "runtime": "kubernetes"}
        with running(MasterJob(tmp_path, **flags, tls="false", on_end=receiver.url)) as job:
            worker = job.worker()
            assert worker.register().accepted
            assert worker.report_model().accepted
            worker.train_all()
            assert receiver.arrived.acquire(timeout=60), job.log()
            job.kill()
            receiver.holds.clear()
            job.start()
            assert job.wait() == 0, job.log()
            assert len(receiver.posts) == 2
            job.start()
            assert job.wait() == 0, job.log()
            assert len(receiver.posts) == 2
            assert "/*** has taken the status (200)" in job.log()
            assert "s3cr3t" not in (job.path / "master.log").read_text()
        assert [body["exit_code"] for _, _, body in receiver.posts] == [0, 0]


def test_a_job_that_cannot_be_run_is_posted_by_its_master(tmp_path: Path) -> None:
    with receiving() as receiver:
        flags = {"distribution_strategy": "Local", "num_ps_pods": 0, "image_name": "none", "runtime": "kubernetes"}
        checkpoints = tmp_path / "checkpoints" / "version-1"
        checkpoints.mkdir(parents=True)
        (checkpoints / "MANIFEST.json").write_text("{}")
        with running(MasterJob(tmp_path, **flags, tls="false", on_end=receiver.url)) as job:
            assert job.wait() == 1, job.log()
        ((_, _, body),) = receiver.posts
    assert (body["phase"], body["exit_code"]) == ("Failed", 1)
