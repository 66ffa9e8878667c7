"""Evaluate and predict on a cluster, from a checkpoint of parameter servers, with workers that are killed; and
TensorBoard and the analysis of a table on a cluster."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import REPOSITORY, list_pods
from tests.e2e_kubernetes.space import Space

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
_NUM_RECORDS = 360
_OF_TRAINING = (
    "training_data", "validation_data", "checkpoint_dir", "checkpoint_steps", "num_epochs", "log_loss_steps",
)  # fmt: skip


def one_pass(space: Space, command: str, trained: KubernetesJob, **flags: object) -> KubernetesJob:
    """On one parameter server; `trained` had two."""
    job = space.job(command, model_def="paced.passes.custom_model", num_ps_pods=1, **flags)
    for name in _OF_TRAINING:
        if name not in flags:
            del job.flags[name]
    job.flags["volume"] = f"{job.flags['volume']};host_path={trained.directory},mount_path=/trained"
    job.flags |= {"minibatch_size": 8, "num_minibatches_per_task": 2, "checkpoint_dir_for_init": "/trained/checkpoints"}
    job.command = command
    job.set_pace(0.2)  # a worker is lost and replaced before two of them are through these few records
    return job


def is_shown_by_tensorboard(job: KubernetesJob, directory: str) -> None:
    """`elasticdl tensorboard JOB` answers at a port of this machine, and leaves no pod."""
    command = [sys.executable, "-m", "elasticdl_client.main", "tensorboard", job.name, f"--namespace={job.namespace}"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for said in process.stdout:
            if "TensorBoard of job" in said:
                break
        address = re.search(r"http://\S+/", said)

        def told(path: str) -> Any:
            assert address, said + job.story()
            with urllib.request.urlopen(f"{address.group()}data/{path}", timeout=60) as answer:
                return json.load(answer)

        try:
            assert told("environment")["data_location"] == directory
            wanted = {"loss", "evaluation/accuracy", "staleness", "workers"}
            job.wait_until("its tags", lambda: wanted <= told("plugin/scalars/tags").get(".", {}).keys())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    job.wait_until("its pod to go", lambda: not list_pods(job.namespace, f"app=elasticdl-{job.name}-tensorboard"))


def ends_exactly_after_a_kill(job: KubernetesJob, verb: str) -> None:
    job.submit()
    job.wait_until("tasks that are done", lambda: (s := job.status()) is not None and s.records_done > 0, 180)
    host.kill(job.the_pod(job.worker(0)).uid, signal.SIGKILL)
    job.wait_for_pod(job.worker(2))
    job.hurry()
    status = job.wait_for_end()
    assert status.exit_code == 0, job.story()
    (found,) = status.coverage
    counts = (found.verb, found.records, found.committed, found.repeated, found.lost)
    assert counts == (verb, _NUM_RECORDS, _NUM_RECORDS, 0, 0), job.story()


def test_a_checkpoint_is_evaluated_and_predicts_though_workers_are_killed(open_space: OpenSpace) -> None:
    space = open_space("passes")
    trained = space.job("train", num_epochs=2, tensorboard_log_dir="/job/logs")
    trained.set_pace(0.002)  # it trains for some seconds, each of which is a point of the series `staleness`
    trained.submit().wait_for_end()  # at this pace: `assert_ends_exactly` begins with full speed
    trained.assert_ends_exactly()
    is_shown_by_tensorboard(trained, "/job/logs")

    evaluated = one_pass(
        space, "evaluate", trained, validation_data="/data/digits/validation", metrics_output="/job/metrics.json"
    )
    ends_exactly_after_a_kill(evaluated, "evaluated")
    status = evaluated.status()
    assert status is not None
    assert status.metrics["accuracy"] == pytest.approx(trained.metrics()["accuracy"], abs=1e-6)
    assert f'"accuracy": {status.metrics["accuracy"]}' in (evaluated.directory / "metrics.json").read_text()

    predicted = one_pass(
        space,
        "predict",
        trained,
        prediction_data="/data/digits/validation",
        prediction_outputs="/job/out",
        prediction_format="csv",
    )
    ends_exactly_after_a_kill(predicted, "predicted")
    parts = sorted((predicted.directory / "out").glob("part-*.csv"))
    rows = [row for part in parts for row in list(csv.reader(part.open(newline="")))[1:]]
    assert len(rows) == _NUM_RECORDS
    assert all(len(row) == 10 for row in rows)


def test_a_table_is_analysed_by_two_workers(open_space: OpenSpace) -> None:
    job = open_space("analyze").job("analyze", data="/job/people.csv", output="/job/people.json", missing_values="?")
    job.command = "analyze"
    for name in (*_OF_TRAINING, "model_def", "minibatch_size", "num_minibatches_per_task", "num_ps_pods"):
        del job.flags[name]
    ages = ["?", *map(str, range(1, 100))]
    (job.directory / "people.csv").write_text("age,word\n" + "".join(f"{age},w{k % 3}\n" for k, age in enumerate(ages)))
    job.flags["records_per_task"] = 9
    job.submit()
    status = job.wait_for_end()
    assert status.exit_code == 0, job.story()
    assert [(one.verb, one.committed, one.repeated, one.lost) for one in status.coverage] == [("analyzed", 100, 0, 0)]
    columns = json.loads((job.directory / "people.json").read_text())["columns"]
    age = columns["age"]
    assert (age["count"], age["missing"], age["min"], age["max"], age["avg"]) == (99, 1, 1, 99, 50)
    assert columns["word"]["vocab_counts"] == [34, 33, 33]
