"""The Python API on real local jobs whose master is scripted, and on a scripted API server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import elasticdl
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, to_journal
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.kubernetes import names
from elasticdl_client.sdk import start
from elasticdl_client.sdk.start import FlagValue, spec_of
from tests.client.api_server import NAMESPACE, ApiServer, own_cluster
from tests.client.test_local_front import MODEL, ROOT

SCRIPTED = (sys.executable, "-m", "tests.client.status_writer")
SURVIVES = (
    "import sys; from elasticdl_client.sdk import start\n"
    "flags = {name: value for name, _, value in (one.partition('=') for one in sys.argv[1:])}\n"
    "job = start.start('train', flags, master_command=(sys.executable, '-m', 'tests.client.status_writer', 'wait'))\n"
    "print(next(job.logs(follow=True)))"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-cluster"))
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "part-0").write_text("a record")
    return tmp_path


def flags_of(home: Path, name: str = "job") -> dict[str, FlagValue]:
    return {"job_name": name, "model_zoo": home, "model_def": "m.custom_model", "training_data": [home / "part-0"]}


def started(home: Path, scenario: str, name: str = "job", **options: bool) -> elasticdl.JobHandle:
    return start.start(JobType.TRAIN, flags_of(home, name), master_command=(*SCRIPTED, scenario), **options)


def test_a_job_runs_quietly_to_its_end_and_its_handle_has_metrics_and_model(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = start.start(
        JobType.TRAIN, {**flags_of(home), "output": home / "model"}, master_command=(*SCRIPTED, "succeed")
    )
    assert job.wait(60) is job
    assert job.phase is elasticdl.Phase.SUCCEEDED
    assert job.metrics == {"accuracy": 0.97}
    assert job.status.records_done == 100
    assert job.model_path == str(home / "model")
    assert job.spec.num_workers == 2
    assert capfd.readouterr() == ("", "")
    assert job.notes[0].startswith("--runtime=local")
    again = elasticdl.get("job")
    assert again.metrics == job.metrics
    left_out = JobEvent(1, 1.0, EventKind.MODEL_NOT_EXPORTED, "job")
    journal = {"snapshot": {"core": {"events": to_journal(EventHistory((left_out,)))}}}
    (Path(job.directory) / "journal.json").write_text(json.dumps(journal))
    assert again.model_path is None
    again.delete()
    assert not Path(job.directory).exists()
    assert job.metrics == {"accuracy": 0.97}, "the last state of a job that has ended stays"


def test_a_job_that_fails_raises_its_explanation_and_exit_code(home: Path) -> None:
    job = started(home, "fail")
    with pytest.raises(elasticdl.JobFailed, match="Job job failed: feed raised: broken") as caught:
        job.wait(60)
    assert caught.value.exit_code == 1
    assert caught.value.hint.endswith("/logs.")
    assert "has failed" in caught.value.explanation
    assert job.model_path is None


def test_two_jobs_of_two_threads_run_at_once_and_are_stopped_apart(home: Path) -> None:
    jobs: dict[str, elasticdl.JobHandle] = {}

    def run(name: str) -> None:
        jobs[name] = started(home, "wait", name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = jobs["first"], jobs["second"]
    with pytest.raises(TimeoutError, match="job first has not ended in"):
        first.wait(0.2)
    with pytest.raises(JobError, match="A job of this name still runs"):
        started(home, "succeed", "first")
    first.stop()
    assert first.phase is elasticdl.Phase.STOPPED
    journal = Path(first.directory) / "journal.json"
    journal.unlink(missing_ok=True)  # it is there if the request for a checkpoint was heard
    with pytest.raises(elasticdl.JobFailed, match="Job first has stopped") as caught:
        first.wait()
    assert caught.value.exit_code is None
    assert "before it had begun" in caught.value.what
    assert "elasticdl resume" not in caught.value.hint
    journal.write_text("{}")
    with pytest.raises(elasticdl.JobFailed) as caught:
        first.wait()
    assert "elasticdl resume first" in caught.value.hint
    assert second.phase in (elasticdl.Phase.PENDING, elasticdl.Phase.RUNNING)
    second.delete()
    with pytest.raises(JobError, match='job "second" on this machine was deleted before its end was seen'):
        second.wait()
    assert started(home, "succeed", "first").wait(60).phase is elasticdl.Phase.SUCCEEDED


def test_a_job_outlives_the_python_process_that_has_started_it(home: Path) -> None:
    arguments = [f"{name}={home if name == 'model_zoo' else value}" for name, value in flags_of(home).items()]
    arguments[-1] = f"training_data={home / 'part-0'}"
    done = subprocess.run(
        [sys.executable, "-c", SURVIVES, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("pod elasticdl-job-master\n"), done.stderr
    job = elasticdl.get("job", runtime="local")
    assert job.phase in (elasticdl.Phase.PENDING, elasticdl.Phase.RUNNING)
    job.delete()
    with pytest.raises(JobError, match='job "job" not found'):
        elasticdl.get("job")


def test_with_progress_notes_and_the_job_are_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(home, "succeed", progress=True).wait(60)
    output, errors = capsys.readouterr()
    assert "note: --runtime=local" in errors
    assert "epoch 1: records 100, committed 100, repeated 0, lost 0" in output
    assert "Job job succeeded." in output


@pytest.mark.parametrize(
    ("flags", "what", "hint"),
    [
        ({"num_worker": 3}, "Unknown flag --num_worker.", "Did you mean --num_workers?"),
        ({"num_workers": 2.5}, "--num_workers takes a whole number, not '2.5'.", ""),
        ({"num_workers": True}, "--num_workers takes a whole number, not 'True'.", ""),
        ({"training_data": None}, "training_data is None.", "Leave it out."),
        ({"training_data": {1, 2}}, "training_data is a set.", "Give a text"),
        ({"training_data": ["a,b", "c"]}, "training_data has 'a,b' in it, and ',' is what separates.", ""),
        ({"wait": True}, "--wait is for the command line alone.", "Call .wait()"),
        ({"dry_run": True}, "--dry_run is for the command line alone.", "Use the command"),
        ({"job_name": "job"}, "`elasticdl train` needs", ""),
    ],
)
def test_a_wrong_flag_raises_the_error_of_the_command_line(
    home: Path, flags: dict[str, FlagValue], what: str, hint: str
) -> None:
    with pytest.raises(FlagError) as caught:
        elasticdl.train(**flags)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_flags_have_pythons_types(home: Path) -> None:
    spec = spec_of(
        JobType.TRAIN,
        {
            **flags_of(home),
            "runtime": Runtime.LOCAL,
            "shuffle": True,
            "lease_timeout": 12.5,
            "model_params": {"units": [1, 2], "name": "wide"},
            "envs": {"A": "1,2", "B": 3},
            "training_data": (home / "a", "b"),
        },
        lambda note: None,
    )
    assert spec.runtime is Runtime.LOCAL
    assert spec.shuffle
    assert spec.lease_timeout == 12.5
    assert spec.model_params == "units=[1, 2];name=wide"
    assert spec.envs_dict() == {"A": "1,2", "B": "3"}
    assert spec.training_data == f"{home / 'a'},b"


def test_the_environment_holds_the_defaults_and_no_job_is_only_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICDL_NUM_WORKERS", "5")
    assert spec_of(JobType.TRAIN, flags_of(home), lambda note: None).num_workers == 5
    monkeypatch.setenv("ELASTICDL_DRY_RUN", "true")
    with pytest.raises(FlagError, match=r"^ELASTICDL_DRY_RUN: --dry_run is for the command line alone"):
        elasticdl.train(**flags_of(home), image_name="i", runtime="kubernetes")


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with own_cluster(home, monkeypatch) as server:
        yield server


def test_a_job_of_a_cluster_has_the_same_handle(server: ApiServer) -> None:
    server.status = JobStatus("job", JobPhase.RUNNING, records_done=5, records_total=10)
    server.add_pod("master", ["a line"])
    server.spec = JobSpec(job_name="job")
    job = elasticdl.get("job", namespace=NAMESPACE)
    assert (job.runtime, job.namespace, job.phase) == (Runtime.KUBERNETES, NAMESPACE, elasticdl.Phase.RUNNING)
    with pytest.raises(TimeoutError):
        job.wait(0.1)
    with pytest.raises(TimeoutError):
        job.stop(0.1)
    assert server.annotations == {names.STOP_ANNOTATION: "true"}
    assert list(job.logs()) == ["a line"]
    assert list(job.logs("all")) == ["[elasticdl-job-master] a line"]
    server.status = JobStatus("job", JobPhase.SUCCEEDED, exit_code=0, metrics={"accuracy": 0.5})
    assert job.wait(30).metrics == {"accuracy": 0.5}


def test_a_job_is_submitted_to_a_cluster_and_its_handle_returned_at_once(
    server: ApiServer, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.has_job = False
    job = elasticdl.train(
        job_name="job",
        namespace=NAMESPACE,
        image_name="image:1",
        model_def="m.custom_model",
        training_data="/data/train",
        envs={"KEY": "s3cr3t"},
    )
    assert sorted(server.objects) == ["ConfigMap", "ConfigMap", "NetworkPolicy", "Secret", "Service"]
    assert (job.name, job.runtime, job.phase) == ("job", Runtime.KUBERNETES, elasticdl.Phase.PENDING)
    assert [note for note in job.notes if "without --checkpoint_dir" in note]
    assert capfd.readouterr() == ("", "")
    server.add_pod("master", [], phase="Pending")
    waiting = {"reason": "ImagePullBackOff", "message": "there is no such image"}
    server.pods["elasticdl-job-master"]["status"]["containerStatuses"][0]["state"] = {"waiting": waiting}
    with pytest.raises(JobError, match="does not start; its master is pending: ImagePullBackOff") as caught:
        job.wait(30)
    assert "elasticdl delete job --namespace=team" in caught.value.hint
    server.pods.clear()
    server.has_job = False
    with pytest.raises(JobError, match='job "job" in namespace team was deleted before its end was seen'):
        job.wait(30)


def test_every_error_of_the_api_is_one_that_users_can_catch() -> None:
    assert issubclass(elasticdl.JobFailed, elasticdl.ElasticDLError)
    assert elasticdl.ElasticDLError is ElasticDLError
    with pytest.raises(FlagError, match="is not the name of a job"):
        elasticdl.get("--runtime=local")
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        elasticdl.trian  # noqa: B018


def test_importing_elasticdl_imports_no_framework_and_no_client() -> None:
    code = (
        "import sys, elasticdl; assert 'elasticdl_client.sdk' not in sys.modules; elasticdl.train\n"
        "sys.exit(' '.join(set(sys.modules) & {'tensorflow', 'torch', 'grpc', 'numpy', 'kubernetes', 'IPython'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
