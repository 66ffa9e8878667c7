"""Flags from the command line, a file and the environment, read as `elasticdl train` reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import FlagError
from elasticdl_client.flag_sources import GivenFlags, gather, infer
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
JOB = "runtime: local\nmodel_def: digits.digits_functional.custom_model\ntraining_data: data/train\nnum-workers: 4\n"


def train(path: Path, *arguments: str, **environment: str) -> GivenFlags:
    return gather("train", ["-f", str(path), *arguments], environment)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_the_command_line_goes_before_the_file_and_that_before_the_environment(file: Path) -> None:
    environment = {"ELASTICDL_NUM_WORKERS": "9", "ELASTICDL_NAMESPACE": "team-a", "ELASTICDL_NUM_EPOCHS": "7"}
    given = train(file, "--job_name=x", "--num_epochs=3", **environment)
    spec = JobSpec.from_flags("train", given.values)
    assert (spec.num_workers, spec.num_epochs, spec.namespace) == (4, 3, "team-a")
    assert given.notes == ("--namespace=team-a comes from ELASTICDL_NAMESPACE.",)


def test_a_file_may_name_its_command_and_hold_commas_and_false(tmp_path: Path) -> None:
    flags = {"job_name": "x", "training_data": "t", "model_def": "a.b.c", "runtime": "local"}
    spec = JobSpec.from_flags("train", {**flags, "envs": "A=1,B=2", "grads_to_wait": "2", "use_async": "false"})
    path = tmp_path / "job.yaml"
    path.write_text(
        "job_type: train\njob_name: x\ntraining_data: t\nmodel_def: a.b.c\nruntime: local\n"
        "envs: A=1,B=2\ngrads_to_wait: 2\nuse_async: false\n"
    )
    assert JobSpec.from_flags("train", train(path).values) == spec


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("num_workers: 2:16", "2:16"),  # YAML 1.1 takes it for 136
        ("image-name: 1.10", "1.10"),
        ("job_name: 0123", "0123"),
        ("job_name: 2026-01-02", "2026-01-02"),
        ("label_column: yes", "yes"),
        ("label_column: 'on'", "on"),
        ("use_async: no", False),
        ("minibatch_size: 1_000", 1000),
    ],
)
def test_a_text_is_taken_as_it_is_written(tmp_path: Path, line: str, value: object) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{line}\n")
    assert list(train(path).values.values()) == [value]


def test_a_namespace_has_a_short_flag_as_in_kubectl(file: Path) -> None:
    assert train(file, "-n", "team-b").values["namespace"] == "team-b"
    assert train(file, "-n=team-b").values["namespace"] == "team-b"


def test_a_secret_of_the_environment_is_not_shown(file: Path) -> None:
    given = train(file, ELASTICDL_VALIDATION_DATA="postgresql://me:hunter2@host/db")
    assert "hunter2" not in " ".join(given.notes)
    assert "ELASTICDL_VALIDATION_DATA" in given.notes[0]


@pytest.mark.parametrize("name", ["ELASTICDL_NUM_WORKER", "ELASTICDL_NUM_WOKRERS"])
def test_a_slip_in_the_name_of_a_variable_is_noted(file: Path, name: str) -> None:
    assert train(file, **{name: "8"}).notes == (f"{name} is the variable of no flag; ELASTICDL_NUM_WORKERS would be.",)


def test_other_variables_are_left_alone(file: Path) -> None:
    """Of other commands, of processes of jobs, and of the services of a pod's namespace."""
    names = ("PREDICTION_DATA", "JOB_NAME", "POD_NAME", "NUM_PROCESSES", "DIGITS_MASTER_PORT", "MASTER_TIMEOUT_S")
    assert train(file, **{f"ELASTICDL_{name}": "8" for name in names}).notes == ()


def test_the_name_of_a_job_is_never_taken_from_the_environment(file: Path) -> None:
    assert "job_name" not in train(file, ELASTICDL_JOB_NAME="other").values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "is not a mapping of flags to values"),
        ("a: [\n", "is not YAML"),
        ("job_name: 2026-13-01\n", "is not YAML: month must be in 1..12"),
        ("training_data: [a, b]\n", "training_data is a list, not one value"),
        ("num_workers:\n", "num_workers is empty"),
        ("num_workers: 2\nepochs: 1\nnum_workers: 8\n", "num_workers is given twice"),
        ("num_workers: 2\nnum-workers: 8\n", "num_workers is given twice"),
        ("job_type: evaluate\n", "describes a job of `elasticdl evaluate`"),
    ],
)
def test_a_file_that_says_no_flags_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(FlagError) as caught:
        train(path)
    assert str(path) in caught.value.what
    assert words in caught.value.what


@pytest.mark.parametrize("name", ["cluster_spec_json", "cluster-spec-json"])
def test_a_cluster_spec_may_be_a_mapping(tmp_path: Path, name: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{name}: {{worker_pod_spec: {{env: []}}}}\n")
    assert json.loads(str(train(path).values["cluster_spec_json"])) == {"worker_pod_spec": {"env": []}}


@pytest.mark.parametrize(
    ("line", "example"),
    [
        ("envs: {A: 1, B: 2}", '"A=1,B=2"'),
        ("model-params: {units: 1}", '"units=64;name=wide"'),
        ("training_data: [a, b]", '"a.csv,b.csv"'),
    ],
)
def test_a_mapping_or_list_in_a_file_is_refused_with_the_text_to_write(tmp_path: Path, line: str, example: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{line}\n")
    with pytest.raises(FlagError) as caught:
        train(path)
    assert example in caught.value.hint


@pytest.mark.parametrize("arguments", [["-f"], ["-f", "no/such.yaml"], ["-f", "a.yaml", "--filename=b.yaml"]])
def test_a_file_that_is_not_there_is_said(arguments: list[str]) -> None:
    with pytest.raises(FlagError):
        gather("train", arguments, {})


@pytest.mark.parametrize(
    ("line", "environment", "origin"),
    [
        ("num_worker: 4\n", {}, "job.yaml: Unknown flag --num_worker."),
        ("num_epochs: many\n", {}, "job.yaml: --num_epochs takes a whole number, not 'many'."),
        ("", {"ELASTICDL_NUM_EPOCHS": "many"}, "ELASTICDL_NUM_EPOCHS: --num_epochs takes a whole number, not 'many'."),
    ],
)
def test_a_wrong_flag_names_the_place_it_comes_from(
    file: Path, line: str, environment: dict[str, str], origin: str
) -> None:
    file.write_text(JOB + line)
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "train", "-f", str(file), "--job_name=x"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 2
    assert origin in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", ["--model_zoo=~/zoo", "--code=~/zoo"])
def test_what_follows_from_the_module_is_read_below_the_home_directory_and_in_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "torch_model.py").write_text("import torch\n")
    (tmp_path / "zoo" / "keras_model.py").write_text("import keras\ndef dataset(): ...\n")

    def inferred(name: str) -> dict[str, object]:
        return infer("train", gather("train", ["--runtime=local", flag, f"--model_def={name}.custom_model"], {})).values

    assert inferred("torch_model")["distribution_strategy"] is DistributionStrategy.ALL_REDUCE
    assert inferred("keras_model")["training_data"] == OF_MODULE


@pytest.mark.parametrize("name", ["model", "model.", ".custom_model", "..custom_model", "zoo/model.py", "a..b.c"])
def test_a_name_of_no_module_of_the_working_directory_is_left_to_the_check_of_its_flag(name: str) -> None:
    flags = ["--runtime=local", "--job_name=x", "--training_data=t", f"--model_def={name}"]
    given = infer("train", gather("train", flags, {}))
    with pytest.raises(FlagError, match="--model_def") as raised:
        JobSpec.from_flags("train", given.values)
    assert "package.module.symbol" in str(raised.value)


def test_standard_input_is_a_file_too_and_the_version_is_said() -> None:
    argv = [sys.executable, "-m", "elasticdl_client.main"]
    done = subprocess.run(
        [*argv, "train", "-f", "-"], cwd=ROOT, input="num_wokers: 3\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean --num_workers?" in done.stderr
    said = subprocess.run([*argv, "--version"], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0
    assert said.stdout == f"elasticdl {VERSION}\n"
