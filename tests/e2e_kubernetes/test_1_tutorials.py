"""The tutorials do what they say: their own commands, word for word, as a new user would type them."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.jobs import TEST_DATA
from tests.e2e_kubernetes.image import BUILD, digest
from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl
from tests.e2e_kubernetes.locks import one_at_a_time
from tests.e2e_kubernetes.recorder import Recorder, describe_events
from tests.house.documents import clone, halves, run_blocks, run_page

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

PAGES = REPOSITORY / "docs" / "tutorials"
NUM_EPOCHS = 40  # enough for workers to come back before the end on a busy machine, at their quarter of a CPU
SAID = "said.txt"
NODE_DIRECTORY = "/srv/elasticdl-data"  # of manifests/volume.yaml; the node's containers are Docker's


@pytest.fixture
def tutorial_namespace(tmp_path: Path) -> Iterator[Recorder]:
    """The pages' own namespace, watched; gone before and after, and the volume with it."""
    with one_at_a_time("tutorial"):
        remove_what_the_pages_make()
        recorder = Recorder("tutorial", tmp_path / "logs").start()
        yield recorder
        recorder.close()
        if any(recorder.directory.glob("*.log")):
            print(recorder.timeline(lambda name: name.startswith("elasticdl-mnist")), flush=True)
        remove_what_the_pages_make()


def remove_what_the_pages_make() -> None:
    """The directory of the node, which outlives the volume, is emptied: an interrupted run leaves its checkpoints."""
    kubectl("delete", "namespace", "tutorial", "--ignore-not-found")
    kubectl("delete", "persistentvolume", "elasticdl-data", "--ignore-not-found")
    in_container = ["docker", "run", "--rm", "--volume", f"{NODE_DIRECTORY}:/data", "python:3.11-slim"]
    subprocess.run([*in_container, "sh", "-c", "rm -rf /data/*"], check=True)


@contextlib.contextmanager
def told_in_full(recorder: Recorder) -> Iterator[None]:
    """A failure inside tells what the pods did and said, too."""
    try:
        yield
    except AssertionError as error:
        story = f"{recorder.timeline()}\n{describe_events('tutorial')}\n{recorder.ends_of_logs()}"
        raise AssertionError(f"{error}\n{story}") from error


# The sections on the client and the image take no room of the node: they are done while other tests run.
BEFORE_THE_CLUSTER, ON_THE_CLUSTER = halves(PAGES / "kubernetes.md", "3. A namespace in which jobs may run")


def install_and_build(home: Path) -> str:
    """Run a new user's steps before there is a namespace; the output, which `home`/said.txt keeps."""
    shutil.rmtree(home, ignore_errors=True)
    directory = clone(home / "elasticdl")
    venv.create(home / "environment", with_pip=True)
    # The installed packages serve a few commands: Python compiles their imports, and not all of TensorFlow.
    pip = {"PIP_COMPILE": "0"}  # PIP_NO_COMPILE=1 would set what it negates
    said = run_blocks("kubernetes.md", BEFORE_THE_CLUSTER, directory, home / "environment" / "bin", 900, **pip)
    (home / SAID).write_text(said)
    return said


@pytest.fixture
def home() -> Path:
    """A new user's directory on this machine, one for each content of the checkout."""
    return BUILD / f"tutorial-{digest('Makefile', 'docs/tutorials/kubernetes.md')}"


def test_the_tutorial_installs_the_client_and_builds_the_image(home: Path) -> None:
    said = (home / SAID).read_text() if (home / SAID).exists() else install_and_build(home)
    assert "usage" in said.lower()


@pytest.mark.alone  # its pods take the room of each other by what they ask of the node
def test_the_tutorial_of_a_new_user_works_word_for_word(home: Path, tutorial_namespace: Recorder) -> None:
    if not (TEST_DATA / "mnist").is_dir():
        pytest.skip("the data of mnist is not here")
    directory = home / "elasticdl"
    if not directory.exists() or not (home / SAID).exists():
        install_and_build(home)
    for made in ("mnist", "mnist-model"):  # by a run of this test that failed
        shutil.rmtree(directory / "build" / made, ignore_errors=True)
    with told_in_full(tutorial_namespace):
        said = (home / SAID).read_text() + run_blocks(
            "kubernetes.md", ON_THE_CLUSTER, directory, home / "environment" / "bin", 2400,
            MNIST=str(TEST_DATA / "mnist"),
        )  # fmt: skip
        print(said)
        assert "elasticdl-mnist-worker-4" in said
        losses = [float(loss) for loss in re.findall(r"Loss = ([0-9.e-]+), steps = \d+", said)]
        assert losses, said
        accuracies = [
            float(value) for value in re.findall(r"Evaluation metrics\[step=\d+\]: \{'accuracy': ([0-9.]+)", said)
        ]
        assert len(accuracies) >= 2, said
        assert accuracies[-1] > 0.9, said
        epochs = set(re.findall(r"Epoch (\d+): records 9000, committed 9000, repeated 0, lost 0", said))
        assert epochs == {str(epoch) for epoch in range(1, NUM_EPOCHS + 1)}, said
        assert_serves(directory / "build" / "mnist-model")
    for used in (directory, home / "environment"):  # the output stays: this content is not installed again
        shutil.rmtree(used)


def assert_serves(model: Path) -> None:
    """The SavedModel in plain TensorFlow tells ten classes of a picture."""
    code = (
        "import sys, tensorflow as tf; serve = tf.saved_model.load(sys.argv[1]).signatures['serving_default'];"
        "(out,) = serve(tf.zeros((2, 28, 28, 1))).values(); assert out.shape == (2, 10), out.shape"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", ["minikube_kind", "on_prem", "gke"])
def test_what_the_other_pages_say_works_as_far_as_it_can_be_done_here(
    page: str, tmp_path: Path, tutorial_namespace: Recorder, image: str
) -> None:
    directory = clone(tmp_path / "elasticdl")
    (directory / "build").mkdir(exist_ok=True)
    namespace = f"e2e-page-{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    try:
        # The results of the pages' cloud blocks: an image's name and a namespace.
        given = {"NAMESPACE": namespace, "IMAGE": f"{image}-gke"}
        said = run_page(PAGES / f"{page}.md", directory, Path(sys.executable).parent, 900, **given)
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false")
        subprocess.run(["docker", "rmi", f"{image}-gke"], capture_output=True)
    if "--dry_run" in said:
        manifests = (directory / "build" / "job.yaml").read_text()
        assert "elasticdl-mnist-master" in manifests
