"""Estimators under TensorFlow's own parameter servers, on the local runtime: elastic, and nothing is lost.

Runs where TensorFlow has Estimators: `make test-estimator`.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import signal
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.job_status import EpochCoverage
from tests.chaos.job import LocalJob
from tests.chaos.jobs import TEST_DATA
from tests.chaos.scenarios import coverage_of

pytest.importorskip("tensorflow_estimator", reason="Estimators need TensorFlow 2.15: make test-estimator")

pytestmark = [pytest.mark.estimator, pytest.mark.timeout(240)]

IRIS = TEST_DATA / "iris" / "iris.csv"
CRITEO = TEST_DATA / "criteo" / "criteo_sample.txt"
OPTIONAL = {"pyarrow"}  # the extra of Parquet files; jobs that need it say so
ROOMS = (
    "api.data",
    "api.tensorflow",
    "cluster",
    "data",
    "master",
    "ps",
    "rpc",
    "worker.command",
)  # others: Keras 3, torch


def job_of(tmp_path: Path, module: str, arguments: str, **flags: object) -> LocalJob:
    command = f"python -m model_zoo.{module} --model_dir={tmp_path / 'model'} {arguments}"
    given: dict[str, object] = {"job_name": "estimator", "job_command": command, "need_tf_config": True}
    return LocalJob(tmp_path / "job", given | {"num_workers": 2, "num_ps_pods": 1} | flags)


def kill(job: LocalJob, role: Role, slot: int) -> None:
    """SIGKILL of a server, or of the worker that fills a slot: 0 is the chief."""
    pods = [pod for pod in job.pods(role) if int(pod.labels.get("elasticdl-worker-slot", pod.index)) == slot]
    os.kill(pods[0].pid, signal.SIGKILL)


def last_metrics(job: LocalJob, evaluator: str) -> dict[str, float]:
    lines = re.findall(r"Evaluation metrics\[step=\d+\]: (\{.*\})", job.log(evaluator))
    assert lines, job.story()
    return dict(json.loads(lines[-1].replace("'", '"')))


def test_every_module_imports_beside_the_older_tensorflow() -> None:
    for room in (f"elasticdl.{name}" for name in ROOMS):
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), prefix=f"{room}."):
            if not module.name.endswith("__main__"):
                _import(module.name)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise


def test_iris_on_a_server_a_chief_two_workers_and_an_evaluator(tmp_path: Path) -> None:
    flags = {"num_workers": 3, "training_data": IRIS, "validation_data": IRIS, "num_minibatches_per_task": 2}
    job = job_of(tmp_path, "iris.dnn_estimator", "--num_epochs=40", **flags).start()
    assert job.wait(200) == 0, job.story()
    coverage = coverage_of(job)
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage] == [(150, 150, 0, 0)] * 40
    assert "committed 150, repeated at most 0, lost 0" in job.master_log()
    assert last_metrics(job, "elasticdl-estimator-worker-3")["accuracy"] >= 0.95


def test_a_lost_worker_server_and_chief_cost_no_record(tmp_path: Path) -> None:
    arguments = "--num_epochs=250 --save_steps=100"
    job = job_of(tmp_path, "iris.dnn_estimator", arguments, training_data=IRIS, num_minibatches_per_task=2).start()
    version = 0
    for role, slot in ((Role.WORKER, 1), (Role.PS, 0), (Role.WORKER, 0)):
        version += 400
        job.wait_for_version(version)
        kill(job, role, slot)
    assert job.wait(200) == 0, job.story()
    coverage, log = coverage_of(job), job.master_log()
    total = EpochCoverage.total(coverage)  # the status has the newest 100 epochs one by one
    assert (total.since, total.epoch, total.records, total.committed, total.lost) == (1, 250, 37_500, 37_500, 0)
    assert "PS 0 is lost" in log
    handed_out_again = re.findall(r"TensorFlow's last checkpoint: (\d+) records", log)
    assert len(handed_out_again) == 2  # for the server and for the chief; a worker costs nothing
    assert sum(map(int, handed_out_again)) <= sum(c.repeated for c in coverage) <= 150 * 250 / 2


def test_max_steps_end_training_as_they_were_asked_to(tmp_path: Path) -> None:
    job = job_of(tmp_path, "iris.dnn_estimator", "--max_steps=12", training_data=IRIS, num_workers=1).start()
    assert job.wait(120) == 0, job.story()
    assert "TensorFlow's session was asked to stop" in job.master_log()
    newest = coverage_of(job)[-1]
    assert (newest.records, newest.lost) == (150, 0)
    assert newest.unplanned > 0


def test_deepfm_on_the_criteo_sample(tmp_path: Path) -> None:
    job = job_of(tmp_path, "deepfm.deepfm_estimator", "--num_epochs=10", training_data=CRITEO, validation_data=CRITEO)
    assert job.start().wait(200) == 0, job.story()
    assert [(c.records, c.committed, c.lost) for c in coverage_of(job)] == [(200, 200, 0)] * 10
    assert last_metrics(job, "elasticdl-estimator-worker-2")["auc"] >= 0.9
