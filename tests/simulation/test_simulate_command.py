"""`elasticdl simulate` as its page shows it, and what it says of mistakes."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl.simulation.scenario import Scenario, scenario_of
from elasticdl_client.errors import FlagError
from tests.command import elasticdl

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text()
JOB = (
    "--job_name=j",
    "--image_name=i:1",
    "--model_def=m.custom_model",
    "--training_data=/data",
    "--num_workers=2",
)
SIZE = ("--step_seconds=1", "--records=6400")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def simulate(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return elasticdl("simulate", *arguments, directory=directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(block("yaml"))
    return tmp_path


def test_the_command_of_the_page_prints_both_columns(directory: Path) -> None:
    command = block("bash").replace("\\\n", " ").split()
    assert command[:2] == ["elasticdl", "simulate"]
    argv = [sys.executable, "-m", "elasticdl_client.main", *command[1:]]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == block("text")


def test_the_page_has_every_key_of_a_cluster() -> None:
    keys = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert keys == [field.name for field in dataclasses.fields(Scenario)]


def test_json_has_the_same_for_programs_and_a_file_may_hold_the_flags(directory: Path) -> None:
    (directory / "job.yaml").write_text("".join(f"{flag[2:].replace('=', ': ')}\n" for flag in JOB))
    done = simulate(directory, "--cluster=cluster.yaml", *SIZE, "-f", "job.yaml", "-o", "json")
    found = json.loads(done.stdout)
    assert found["workers"] == 2
    for name in ("elastic", "gang"):
        assert set(found[name]) == {"seconds", "cost", "mean_workers", "workers_lost", "records_again", "starts"}
        assert found[name]["seconds"] == pytest.approx(40 + 20 + 50, abs=10)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--cluster=cluster.yaml", *SIZE, *JOB, "--distribution_strategy=AllReduceStrategy"], "cannot be simulated"),
        (["--cluster=cluster.yaml", *SIZE, *JOB, "--num_workerz=3"], "num_workerz"),
        (["--cluster=none.yaml", *SIZE, *JOB], "none.yaml cannot be read"),
        ([*SIZE, *JOB], "--cluster is missing"),
        (["--cluster=cluster.yaml", "--step_seconds=slow", "--records=10", *JOB], "--step_seconds=slow"),
        (["--cluster=cluster.yaml", *SIZE, *JOB, "-o", "xml"], "xml is not a format"),
        (["--cluster=cluster.yaml", *SIZE, *JOB, "--num_epochs=0"], "never ends"),
        (["--cluster=cluster.yaml", *SIZE, *JOB, "--processes_per_worker=2"], "of 2 processes cannot be simulated"),
    ],
)
def test_a_mistake_is_said_at_once(directory: Path, arguments: list[str], what: str) -> None:
    done = simulate(directory, *arguments)
    assert done.returncode == 2
    assert what in done.stderr


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("nodes:\n- name: a\n  resources: cpu=1\n  prize: 3\n", 4, "'prize'"),
        ("nodes:\n- name: a\n", 2, "lacks resources"),
        ("nodes:\n- {name: a, resources: cpu=1}\nstart: soon\n", 3, "start is a time"),
        ("nodes:\n- {name: a, resources: cpu=1}\nstart: 1:30\n", 3, "not '1:30'"),
        ("nodes:\n- {name: a, resources: tea=1}\n", 2, "resources is no text of resources"),
        ("nodes: 3\n", 1, "nodes is a list"),
        ("nodes:\n- {name: a, resources: cpu=1}\nnodes: []\n", 3, "nodes is given twice"),
        ("nodes: [\n", 2, "not YAML"),
        ("nodes:\n- {name: a, resources: cpu=1}\npriorities: {high: very}\n", 3, "high is a whole number"),
        ("nodes:\n- name: 2026-13-01\n  resources: cpu=1\n", 2, "not '2026-13-01'"),
        ("nodes:\n- name: a\n  resources: cpu=1\n  price: !euro 3\n", 4, "tag '!euro'"),
    ],
)
def test_a_mistake_in_the_file_is_said_with_its_line(text: str, line: int, what: str) -> None:
    with pytest.raises(FlagError) as caught:
        scenario_of(text, "c.yaml")
    assert caught.value.what.startswith(f"c.yaml:{line}: ")
    assert what in caught.value.what


def test_times_are_read_as_kubectl_writes_them() -> None:
    text = "nodes: [{name: a, resources: 'cpu=500m,memory=1Gi', notice: 2m}]\nstart: 1h30m\nnode_lost: 7\n"
    found = scenario_of(text, "c.yaml")
    assert found.nodes[0].resources == {"cpu": 0.5, "memory": 2.0**30}
    assert (found.nodes[0].notice, found.start, found.node_lost) == (120.0, 5400.0, 7.0)


def test_a_range_of_workers_pays_for_no_more_than_its_parameter_servers_have_time_for(directory: Path) -> None:
    (directory / "bound.yaml").write_text(
        'nodes: [{name: n, resources: "cpu=20", price: 1}]\nsteps_per_server: 4\nstart: 5s\nimage_pull: 0s\n'
    )
    flags = [*JOB[:-1], "--num_workers=1:16", "--worker_resource_request=cpu=1", "--ps_resource_request=cpu=1"]
    done = simulate(directory, "--cluster=bound.yaml", "--step_seconds=1", "--records=256000", *flags, "-o", "json")
    found = json.loads(done.stdout)
    assert (found["workers"], found["least_workers"]) == (16, 1)
    elastic, gang = found["elastic"], found["gang"]
    assert gang["seconds"] == pytest.approx(5 + 4000 / 4)
    assert gang["mean_workers"] == pytest.approx(16, rel=0.02)
    assert elastic["seconds"] < 1.3 * gang["seconds"]  # it begins with one worker
    assert elastic["mean_workers"] < 5
    assert elastic["cost"] < 0.5 * gang["cost"]


def test_a_range_without_an_end_has_no_gang(directory: Path) -> None:
    done = simulate(directory, "--cluster=cluster.yaml", *SIZE, *JOB[:-1], "--num_workers=auto")
    assert done.returncode == 2
    assert "has no limit" in done.stderr


def test_a_job_that_the_master_refuses_has_no_duration(directory: Path) -> None:
    flags = ["--minibatch_size=1", "--num_minibatches_per_task=1", "--step_seconds=1", "--records=100_000_000_000"]
    done = simulate(directory, "--cluster=cluster.yaml", *flags, *JOB)
    assert done.returncode == 1
    assert "An epoch has 100,000,000,000 tasks" in done.stderr
    assert done.stdout == ""


def test_what_is_asked_for_by_a_limit_alone_takes_room_as_on_kubernetes(directory: Path) -> None:
    (directory / "gpu.yaml").write_text('nodes: [{name: n, resources: "cpu=20,memory=80Gi,gpu=1"}]\n')
    limit = "--worker_resource_limit=memory=4096Mi,gpu=1"
    done = simulate(directory, "--cluster=gpu.yaml", *SIZE, *JOB, limit, "-o", "json")
    found = json.loads(done.stdout)
    assert found["gang"]["seconds"] is None
    assert found["elastic"]["mean_workers"] <= 1
