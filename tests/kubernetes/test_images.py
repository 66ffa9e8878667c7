"""`elasticdl zoo` against a real Docker Engine: builds, rebuilds, and errors."""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ready_client
from tests.e2e_kubernetes.image import ready_image
from tests.e2e_kubernetes.locks import one_at_a_time

pytestmark = pytest.mark.cluster
BARE = "python:3.11-slim"


def elasticdl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One build at a time: if two make the same layer at once, the next one finds the newer, without steps on it."""
    with one_at_a_time("build"):
        return ready_client.elasticdl("zoo", *arguments, timeout_s=600)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


def rebuilt(output: str) -> list[str]:
    """The steps that were not in the cache, without FROM."""
    steps = re.split(r"^Step \d+/\d+ : ", output, flags=re.MULTILINE)[1:]
    return [step.splitlines()[0] for step in steps if "---> Using cache" not in step and not step.startswith("FROM")]


def built(output: str) -> str:
    """The id of the image."""
    found = re.search(r"^built \S+: ([0-9a-f]{12}), [\d.]+ [MG]B, in [\d.]+ s$", output, re.MULTILINE)
    assert found, output
    return found[1]


@pytest.fixture(scope="module")
def runtime() -> str:
    """An image that has this checkout's runtime and TensorFlow already: pip finds all it is asked for."""
    with one_at_a_time("image"):
        return ready_image()


@pytest.fixture
def image() -> Iterator[str]:
    """The name of an image that is gone after the test."""
    name = f"elasticdl-test:{uuid.uuid4().hex[:12]}"
    yield name
    subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True)


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "model.py").write_text("def custom_model(): ...\n")
    (folder / "model.py").chmod(0o600)
    return folder


def test_the_image_runs_without_root_on_a_read_only_file_system(
    zoo: Path, image: str, runtime: str, tmp_path: Path
) -> None:
    spec = tmp_path / "cluster.py"
    spec.write_text("class Cluster: ...\n")
    (zoo / "requirements.txt").write_text("numpy\n")
    done = elasticdl("init", str(zoo), f"--base_image={runtime}", f"--cluster_spec={spec}")
    assert done.returncode == 0, done.stderr
    done = elasticdl("build", str(zoo), f"--image={image}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert docker("image", "inspect", "--format={{.Id}}", image).startswith(f"sha256:{built(done.stdout)}")
    assert f"--image_name={image}" in done.stdout

    code = (
        "import getpass, json, os, elasticdl.worker, kubernetes, tensorflow\n"
        "print(json.dumps([os.getuid(), os.getgid(), getpass.getuser(), os.getcwd(), open('model.py').read(),\n"
        "    os.listdir('/cluster_spec'), open('/cluster_spec/cluster.py').read(), os.environ['PYTHONUNBUFFERED'],\n"
        "    [name for name in os.environ if 'INDEX' in name]]))"
    )
    printed = docker("run", "--rm", "--read-only", "--tmpfs=/tmp", "--network=none", image, "python", "-c", code)
    assert json.loads(printed) == [
        1000, 1000, "elasticdl", "/model_zoo", "def custom_model(): ...\n",
        ["cluster.py"], "class Cluster: ...\n", "1", [],
    ]  # fmt: skip


def test_a_changed_model_rebuilds_the_last_layer_alone(zoo: Path, image: str, runtime: str) -> None:
    assert elasticdl("init", str(zoo), f"--base_image={runtime}").returncode == 0
    first = elasticdl("build", str(zoo), f"--image={image}")
    assert first.returncode == 0, first.stdout + first.stderr
    (zoo / "model.py").write_text("def custom_model(): return 1\n")
    second = elasticdl("build", str(zoo), f"--image={image}")
    assert rebuilt(second.stdout) == ["COPY --chown=1000:1000 . /model_zoo/"]
    assert "return 1" in docker("run", "--rm", "--network=none", image, "cat", "model.py")
    assert rebuilt(elasticdl("build", str(zoo), f"--image={image}").stdout) == []
    docker("image", "rm", built(first.stdout))


def test_requirements_that_contradict_the_runtime_fail_the_build_with_pips_words(
    zoo: Path, image: str, runtime: str
) -> None:
    (zoo / "requirements.txt").write_text("elasticdl==0.1\n")
    assert elasticdl("init", str(zoo), f"--base_image={runtime}").returncode == 0
    done = elasticdl("build", str(zoo), f"--image={image}")
    assert done.returncode == 1
    assert "elasticdl==0.1" in done.stdout
    assert "ERROR" in done.stdout
    assert re.search(r"^error: Step \d+ of \d+ failed: RUN if ", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stdout + done.stderr


def test_a_failed_build_shows_the_builders_words_and_exits_1(zoo: Path, image: str) -> None:
    (zoo / "Dockerfile").write_text(f"FROM {BARE}\nRUN echo the cause of it; exit 7\n")
    done = elasticdl("build", str(zoo), f"--image={image}")
    assert done.returncode == 1
    assert "\nthe cause of it\n" in done.stdout
    assert done.stderr.startswith("error: Step 2 of 2 failed: RUN echo the cause of it; exit 7\n")
    assert "returned a non-zero code: 7" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("dockerfile", "complaint", "hint"),
    [
        ("FROM elasticdl-no-such-image:1\n", "elasticdl-no-such-image", "base image|after FROM"),
        (f"FROM {BARE}\nCOPY .elasticdl/runtime.txt /x/\n", "runtime.txt", "`elasticdl zoo init` makes the folder"),
        (f"FROM {BARE}\nFETCH a\n", "unknown instruction: FETCH", ""),
        ("", "cannot be empty", ""),
    ],
)
def test_what_the_builder_does_not_understand_or_find_is_said(
    zoo: Path, image: str, dockerfile: str, complaint: str, hint: str
) -> None:
    (zoo / "Dockerfile").write_text(dockerfile)
    done = elasticdl("build", str(zoo), f"--image={image}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert complaint in done.stderr
    assert re.search(hint, done.stderr)
    assert "Traceback" not in done.stderr


def test_data_in_the_folder_is_warned_of(zoo: Path, image: str) -> None:
    (zoo / "Dockerfile").write_text(f"FROM {BARE}\n")
    (zoo / "data").mkdir()
    with (zoo / "data" / "train.recordio").open("wb") as file:
        file.truncate(120_000_000)
    done = elasticdl("build", str(zoo), f"--image={image}")
    assert done.returncode == 0, done.stderr
    assert "120 MB of files\n  That is much: data (120 MB)" in done.stdout


def test_a_push_to_a_registry_that_is_not_there_says_so(zoo: Path, image: str) -> None:
    name = f"localhost:1/{image}"
    docker("tag", BARE, name)
    try:
        done = elasticdl("push", name)
    finally:
        docker("image", "rm", name)
    assert done.returncode == 1
    assert f"error: {name} was not pushed: " in done.stderr
    assert "connection refused" in done.stderr
    assert "The engine cannot reach localhost:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_push_of_an_image_that_is_not_there_says_so(image: str) -> None:
    done = elasticdl("push", image)
    assert done.returncode == 1
    assert f"The engine has no image {image}." in done.stderr
