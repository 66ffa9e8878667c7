"""--track: the values trackers get, that none of them delays a job, and real MLflow and Weights & Biases."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.tracking import MlflowTracker, TrackerThread, WandbTracker, check_packages
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.local_checks import check_local
from tests.master.actors import MasterJob, running, wait_until

LONG_S = 30.0
LOCAL: dict[str, object] = {"distribution_strategy": "Local", "num_ps_pods": 0}


class ScriptedTracker:
    """See `Tracker`; remembers what it gets, and fails or hangs as a test says."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.tags: dict[str, str] = {}
        self.closed: JobPhase | None = None
        self.num_opened = 0
        self.errors: list[Exception] = []
        self.may_continue = threading.Event()
        self.is_asked = threading.Event()
        self.may_continue.set()

    def open(self) -> ScriptedTracker:
        self.num_opened += 1
        return self

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self.is_asked.set()
        self.may_continue.wait(LONG_S)
        if self.errors:
            raise self.errors.pop()
        self.points.append((step, dict(values)))

    def tag(self, name: str, text: str) -> None:
        self.tags[name] = text

    def close(self, phase: JobPhase) -> None:
        self.closed = phase


def status(**changes: object) -> JobStatus:
    return dataclasses.replace(Job(JobSettings("j")).status(), **changes)  # type: ignore[arg-type]


def test_a_tracker_gets_numbers_by_step_evaluations_and_lost_pods() -> None:
    tracker = ScriptedTracker()
    thread = TrackerThread("scripted", tracker.open)
    thread.on_status(status(model_version=10, loss=2.0, workers_alive=2, records_per_second=7.0))
    thread.on_status(status(model_version=10, loss=2.0, workers_alive=2, records_per_second=7.0))
    thread.on_evaluation(10, {"accuracy": 0.5})
    lost = {"worker": {"Preempted": 2}, "ps": {"Killed": 1}}
    thread.on_status(status(model_version=10, workers_alive=2, pods_lost=lost))
    thread.on_status(status(phase=JobPhase.FAILED, model_version=10, workers_alive=2, pods_lost=lost))
    thread.close()
    first, evaluation, losses = tracker.points
    assert first[0] == 10
    assert {name: value for name, value in first[1].items() if not name.startswith("time/")} == {
        "workers": 2,
        "records_per_second": 7.0,
        "goodput": 0.0,
        "loss": 2.0,
    }
    assert evaluation == (10, {"evaluation/accuracy": 0.5})
    assert losses == (10, {"pods_lost": 3})
    assert tracker.tags == {"pods_lost.worker.Preempted": "2", "pods_lost.ps.Killed": "1"}
    assert tracker.closed is JobPhase.FAILED
    assert tracker.num_opened == 1


def test_a_tracker_that_fails_is_opened_again_and_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    tracker = ScriptedTracker()
    tracker.errors.append(RuntimeError("the server is away"))
    thread = TrackerThread("scripted", tracker.open, retry_s=0.0)
    for step in (1, 2, 3):
        thread.on_evaluation(step, {"x": 0.0})
    thread.close()
    assert [step for step, _ in tracker.points] == [2, 3]
    assert tracker.num_opened == 2
    assert [record.message for record in caplog.records] == [
        "--track=scripted: points are left out for 0 s: the server is away"
    ]


@pytest.mark.parametrize(("phase", "num_opened"), [(JobPhase.SUCCEEDED, 2), (JobPhase.RUNNING, 1)])
def test_a_run_that_a_failure_has_left_is_opened_again_only_to_end_it(phase: JobPhase, num_opened: int) -> None:
    tracker = ScriptedTracker()
    thread = TrackerThread("scripted", tracker.open)
    thread.on_status(status(phase=phase, model_version=1))
    tracker.errors.append(RuntimeError("the server is away"))
    thread.on_evaluation(1, {"x": 0.0})
    thread.close()
    assert tracker.num_opened == num_opened
    assert tracker.closed is (phase if num_opened == 2 else None)


def test_a_tracker_that_hangs_holds_up_neither_the_job_nor_its_end(caplog: pytest.LogCaptureFixture) -> None:
    tracker = ScriptedTracker()
    tracker.may_continue.clear()
    thread = TrackerThread("scripted", tracker.open, max_queued=2, close_s=0.05)
    thread.on_evaluation(0, {"x": 0.0})
    assert tracker.is_asked.wait(LONG_S)
    for step in range(1, 10):
        thread.on_evaluation(step, {"x": 0.0})
    thread.close()
    tracker.may_continue.set()
    assert [record.message for record in caplog.records] == [
        "--track=scripted: points are left out, as it does not take them in time",
        "--track=scripted: the last points are left out, as it does not answer",
    ]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"track": "mlfow"}, "'mlfow' is none of tensorboard, mlflow, wandb"),
        ({"track": "wandb,wandb"}, "wandb is named twice"),
        (
            {"track": "mlflow", "runtime": "kubernetes", "image_name": "i"},
            "--track=mlflow needs the address of a server",
        ),
        ({"track": "tensorboard", "runtime": "kubernetes", "image_name": "i"}, "needs --tensorboard_log_dir"),
    ],
)
def test_trackers_that_cannot_work_are_rejected(flags: dict[str, object], what: str) -> None:
    given = {"job_name": "j", "runtime": "local", "model_def": "m.model", "training_data": "d"}
    with pytest.raises(FlagError, match=what):
        JobSpec.from_flags("train", given | flags)


def test_a_missing_package_is_named_here_or_else_by_the_master(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = {"job_command": "true", "model_zoo": str(tmp_path), "job_name": "j", "runtime": "local"}
    spec = JobSpec.from_flags("train", {**command, "track": "wandb"})
    with pytest.raises(FlagError, match="--track=wandb: the package wandb is not installed here") as caught:
        check_local(spec)
    assert caught.value.hint == "pip install wandb"
    with pytest.raises(JobError, match="the master has no package wandb"):
        check_packages(spec)


def test_the_run_has_the_same_id_in_all_lives_of_the_master(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, **LOCAL)) as job:
        job.worker()
        run_id = job.journal()["run_id"]
        job.kill()
        job.start()
        wait_until(lambda: job.journal()["generation"] == 2, "the next life")
        assert job.journal()["run_id"] == run_id


def has_runs(home: Path, count: int) -> bool:
    return len(list(home.glob("wandb/offline-run-*"))) == count


def test_wandb_takes_an_evaluation_that_ends_after_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(JobSpec(job_name="j", job_dir=str(tmp_path)), "j-1")
    tracker.log(10, {"loss": 1.0}, 0.0)
    tracker.log(40, {"loss": 0.5}, 0.0)
    tracker.log(20, {"evaluation/accuracy": 0.75}, 0.0)
    summary = dict(wandb.run.summary)
    tracker.close(JobPhase.SUCCEEDED)
    wandb.teardown()  # else its process, which a variable names, is that of later masters, too
    assert (summary["loss"], summary["evaluation/accuracy"], summary["model_version"]) == (0.5, 0.75, 20)


def test_mlflow_takes_every_name_of_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = MlflowTracker(JobSpec(job_name="j"), "j-1")
    tracker.log(10, {"loss": 1.0, "evaluation/recall@10": 0.5, "evaluation/top-5 (%)": 50.0, "évaluation/x": 1.0}, 0.0)
    (run,) = tracker._client.search_runs([tracker._client.get_experiment_by_name("elasticdl").experiment_id])
    assert run.data.metrics == {
        "loss": 1.0,
        "evaluation/recall_10": 0.5,
        "evaluation/top-5 _": 50.0,
        "évaluation/x": 1.0,
    }


def test_three_lives_are_one_run_of_mlflow_and_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs mlflow and wandb")
    tracking = pytest.importorskip("mlflow.tracking", reason="needs mlflow and wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    home = tmp_path / "home"
    home.mkdir()
    with running(MasterJob(tmp_path, **LOCAL, num_epochs=3, track="mlflow,wandb", job_dir=str(home))) as job:
        for life in (1, 2):
            worker = job.worker()
            assert worker.register().accepted
            if life == 1:
                assert worker.report_model().accepted
            wait_until(partial(has_runs, home, life), f"the run of life {life}")
            job.kill()
            job.start()
        worker = job.worker()
        assert worker.register().accepted
        wait_until(partial(has_runs, home, 3), "the run of life 3")  # the end of a job waits for 10 s, no longer
        worker.train_all()
        assert job.wait() == 0, job.log()
        assert "points are left out" not in job.log()
        run_id = f"digits-{job.journal()['run_id']}"
    client = tracking.MlflowClient(tracking_uri=f"file:{home / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("elasticdl").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits")
    assert run.data.tags["elasticdl.run"] == run_id
    assert run.data.params["minibatch_size"] == "8"
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "records_per_second")]
    assert steps == sorted(steps)
    assert steps[-1] == 24
    runs = [path.name for path in home.glob("wandb/offline-run-*")]
    assert len(runs) == 3
    assert all(name.endswith(run_id) for name in runs)
