"""``make test-versions``: runs tests on the oldest and on the newest packages that the distributions allow.

    python -m tests.versions [LANE …] [--python=PYTHON]

A lane is a virtual environment of its own below .venv-lanes/ and the tests that depend most on what is installed there:
on names of a framework that are not public, on what a client library sends, and whole jobs.  Its packages are
computed from both pyproject.toml, so a lane tests what users may have.  requirements.lock plays no part.

An environment of the oldest versions is made anew when a range has changed; one of the newest is brought up to date in
each run.  Lanes with PyTorch download gigabytes, since other builds than those for CUDA are not on the public index.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.requirements import name_of, oldest, requirements
from tests import skips

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv-lanes"
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
_VERSIONS = """
import sys
from importlib.metadata import distributions
found = {one.name.lower().replace("_", "-"): one.version for one in distributions()}
print(", ".join(f"{name} {found[name]}" for name in sys.argv[1:] if name in found))
"""
NOT_HERE = "not (full or cluster or estimator)"  # as in `make test`


@dataclass(frozen=True, slots=True)
class Lane:
    """The packages installed, and the tests that run.

    Attributes:
        extras: of the distributions.
        tests: files and directories, and those to ignore, as pytest takes them.
        minutes: of the tests, on two cores.
        tools: further packages of the extra `dev`, which the tests need.
        tests_apart: those that run in processes without TensorFlow: PyTorch's compiler comes with a triton that crashes
            in a process that has imported TensorFlow first (PyTorch 2.14.1 for CUDA, TensorFlow 2.21.0).
        is_oldest: the lowest version that each range allows; else the highest.
        others: further requirements: of what only these tests need, and narrower ranges.
        programs: the same, of npm.
    """

    extras: tuple[str, ...]
    tests: tuple[str, ...]
    minutes: int
    tools: tuple[str, ...] = ()
    tests_apart: tuple[str, ...] = ()
    is_oldest: bool = True
    others: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def requirements(self) -> list[str]:
        """As pip reads them, one a line."""
        promised = requirements(list(self.extras), [])
        both = requirements(list(self.extras), [*TOOLS, *self.tools])
        return [*(oldest(one) if self.is_oldest else one for one in promised), *both[len(promised) :], *self.others]


BOTH_FRAMEWORKS = (  # in one process
    "tests/data/test_missing_cells.py",
    "tests/data/test_wrong_cells.py",
    "tests/data/test_wrong_labels.py",
    "tests/keras/test_all_reduce_step.py",
    "tests/keras/test_overrides.py",
)
STORAGE_KINDS = (
    "tests/storage/test_storage_kinds.py",
    "tests/storage/test_hub.py",
    "tests/storage/test_own_clients.py",
)
OTHER_IDENTITIES = (  # AWS's need s3fs, which needs another fsspec than gcsfs
    "tests/storage/test_identities.py::test_tokens_of_google_are_renewed_and_asked_for_again",
    "tests/storage/test_identities.py::test_tokens_of_azure_are_renewed_and_asked_for_again",
)
# pyspark has the jars of HDFS; a job on tables of the Hub trains a model of PyTorch.
BESIDE_STORAGE = ("gcp-storage-emulator==2026.7.19", "pyspark==3.0.1", "torch==2.13.0")
LANES = {
    "kubernetes-oldest": Lane(
        extras=("zoo", "dashboard", "arrow"),
        tests=(
            "tests/client",
            "tests/dashboard/test_dashboard_access.py",
            "tests/kubernetes",
            "tests/rpc",
            "tests/master",
            "tests/cluster/test_cluster_contract.py",
            "tests/cluster/test_kubernetes_creating.py",
            "tests/cluster/test_kubernetes_phases.py",
            "tests/cluster/test_kubernetes_resize.py",
            "tests/cluster/test_kubernetes_watching.py",
            "tests/cluster/test_pod_objects.py",
        ),
        minutes=2,
    ),
    "tensorflow-oldest": Lane(
        extras=("tensorflow", "arrow", "sql", "huggingface", "images", "tensorboard", "analyze"),
        tests=(
            "tests/data",
            "tests/analyze",
            "tests/keras",
            *(f"--ignore={file}" for file in BOTH_FRAMEWORKS),
            "tests/tensorboard",
            "tests/cluster/test_standby.py",
            "tests/e2e/test_main_jobs.py",
        ),
        minutes=4,
        tools=("scikit-learn",),
    ),
    "torch-oldest": Lane(
        extras=("torch", "allreduce", "tensorflow", "arrow", "images"),
        tests=(
            "tests/house/test_internals.py",
            "tests/torch",
            "tests/collective",
            "tests/cluster/test_standby_torch.py",
            "tests/evaluate_predict/test_evaluate_predict_torch.py",
            *BOTH_FRAMEWORKS,
            "tests/e2e/test_all_reduce_user_code.py",
        ),
        minutes=3,
        tools=("scikit-learn",),
    ),
    "trainers-oldest": Lane(
        extras=("torch", "allreduce", "transformers", "accelerate", "lightning"),
        tests=("tests/api/test_pytorch_adapters.py", "tests/api/test_transformers_arguments.py"),
        minutes=1,
    ),
    "trainers-newest": Lane(
        extras=("torch", "allreduce", "transformers", "accelerate", "lightning"),
        tests=(
            "tests/api/test_pytorch_adapters.py",
            "tests/api/test_transformers_arguments.py",
            "tests/api/test_transformers_trainer.py",
            "tests/api/test_pytorch_trainers.py",
            "tests/api/test_pytorch_common_scripts.py",
            "tests/api/test_elastic_accelerator.py",
            "tests/api/test_elastic_strategy.py",
        ),
        minutes=5,
        is_oldest=False,
        others=("peft", "torch==2.13.0"),  # the newest PyTorch is in the lane `newest`
    ),
    "trackers-oldest": Lane(
        extras=("mlflow", "wandb"),
        tests=("tests/tracking",),
        minutes=1,
    ),
    "trackers-newest": Lane(
        extras=("mlflow", "wandb"),
        tests=("tests/tracking",),
        minutes=1,
        is_oldest=False,
    ),
    "storage-oldest": Lane(
        extras=("s3", "http", "arrow", "images"),
        tests=("tests/storage/test_remote_readers.py", "tests/storage/test_storage_contract.py"),
        minutes=1,
        tools=("moto", "flask", "flask-cors"),
    ),
    "storage-kinds-oldest": Lane(
        extras=("gcs", "azure", "oss", "hf", "hdfs", "arrow", "images"),
        tests=STORAGE_KINDS,
        minutes=8,
        tools=("moto", "flask", "flask-cors", "scikit-learn"),  # three for the fixtures beside these tests
        others=BESIDE_STORAGE,
        programs=("azurite@3.35.0",),
    ),
    "storage-kinds-newest": Lane(
        extras=("gcs", "azure", "oss", "hf", "hdfs", "arrow", "images"),
        tests=(*STORAGE_KINDS, *OTHER_IDENTITIES),
        minutes=10,
        tools=("moto", "flask", "flask-cors", "scikit-learn"),
        is_oldest=False,
        others=(*BESIDE_STORAGE, "boto3>=1.43"),  # of moto; pip would look at each of its versions
        programs=("azurite@3.35.0",),
    ),
    "newest": Lane(
        extras=("zoo", "tensorflow", "allreduce", "arrow", "images", "tensorboard"),
        tests=(
            "tests/house/test_internals.py",
            "tests/keras/test_described.py",
            "tests/keras/test_export.py",
            "tests/keras/test_keras_threads.py",
            "tests/keras/test_swap.py",
            "tests/keras/test_all_reduce_step.py",
            "tests/keras/test_overrides.py",
            "tests/e2e/test_main_jobs.py",
        ),
        tests_apart=(
            "tests/client",
            "tests/dashboard/test_dashboard_access.py",
            "tests/kubernetes",
            "tests/rpc",
            "tests/torch",
            "tests/collective",
            "tests/cluster/test_standby_torch.py",
        ),
        minutes=3,
        tools=("scikit-learn",),
        is_oldest=False,
    ),
}


def python_of(name: str) -> Path:
    """The interpreter of a lane's environment."""
    return HOME / name / "bin" / "python"


def install(name: str, lane: Lane, python: str) -> None:
    """Make the environment of a lane, or bring it up to date.

    Raises:
        subprocess.CalledProcessError: pip cannot install what the lane needs; its output says why.
    """
    wanted = "".join(f"{line}\n" for line in [f"# {python} {' '.join(lane.programs)}".rstrip(), *lane.requirements()])
    listed = HOME / name / "requirements.txt"
    is_made = listed.exists() and listed.read_text() == wanted
    if is_made and lane.is_oldest:
        return
    if not is_made:
        shutil.rmtree(HOME / name, ignore_errors=True)
        subprocess.run([python, "-m", "venv", HOME / name], check=True)
    unfinished = listed.with_suffix(".part")
    unfinished.write_text(wanted)
    newest = [] if lane.is_oldest else ["--upgrade", "--upgrade-strategy", "eager"]
    pip = [python_of(name), "-m", "pip", "install", "--quiet", *newest]
    # Elsewhere than in the checkout, whose metadata pip would take for installed packages.
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--requirement", unfinished], check=True, cwd=HOME / name, env=alone)
    if lane.programs:
        subprocess.run(["npm", "install", "--silent", "--prefix", HOME / name, *lane.programs], check=True, env=alone)
    unfinished.rename(listed)
    if not has_kernels(name):
        subprocess.run([*pip, "setuptools>=77", "pybind11>=2.12,<4"], check=True)
        build = [python_of(name), "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=ROOT, check=True)


def has_kernels(name: str) -> bool:
    """Whether the kernels of the checkout are built for the interpreter of a lane."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('elasticdl.kernels._native') is None)"
    return subprocess.run([python_of(name), "-c", program], cwd=ROOT).returncode == 0


def installed(name: str, lane: Lane) -> str:
    """The versions that a lane has of what the distributions name, in their order."""
    names = list(dict.fromkeys(name_of(line) for line in lane.requirements()))
    done = subprocess.run([python_of(name), "-c", _VERSIONS, *names], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run_tests(name: str, tests: Sequence[str]) -> bool:
    """Whether tests pass in a lane."""
    argv = [
        python_of(name),
        "-m",
        "pytest",
        "-m",
        NOT_HERE,
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--max-worker-restart",
        "0",
    ]
    argv += ["-q", "-o", f"cache_dir={HOME / name / 'pytest'}", *tests]
    environment = os.environ | {"PYTHONPATH": str(ROOT), skips.VARIABLE: "listed"}
    return subprocess.run(argv, cwd=ROOT, env=environment).returncode == 0


def run_lane(name: str, lane: Lane, python: str, given: Sequence[str]) -> tuple[str, bool]:
    """Install and test; a line that says what came out, and whether all passed."""
    began = time.monotonic()
    try:
        install(name, lane, python)
    except subprocess.CalledProcessError as error:
        return f"cannot be installed: {shlex.join(map(str, error.cmd))}", False
    ready = time.monotonic()
    print(f"==> {name}: {installed(name, lane)}", flush=True)
    groups = [given] if given else [group for group in (lane.tests, lane.tests_apart) if group]
    passed = [run_tests(name, group) for group in groups]  # each, whatever comes of the first
    took = f"{(ready - began) / 60:.1f} min to install, {(time.monotonic() - ready) / 60:.1f} min of tests"
    return f"{'passed' if all(passed) else 'FAILED'}, {took}", all(passed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.splitlines()[0])
    parser.add_argument("lanes", nargs="*", metavar="LANE", help=f"of {', '.join(LANES)}; none: all")
    parser.add_argument("--python", default="python3", help="that makes the environments")
    parser.add_argument("--tests", nargs="+", default=[], metavar="TEST", help="instead of those of the lane")
    options = parser.parse_args()
    if unknown := [name for name in options.lanes if name not in LANES]:
        parser.error(f"there is no lane '{unknown[0]}': choose of {', '.join(LANES)}")
    ends = {}
    for name in options.lanes or LANES:
        lane = LANES[name]
        print(f"==> {name}: installing, and about {lane.minutes} minutes of tests", flush=True)
        ends[name] = run_lane(name, lane, options.python, options.tests)
    for name, (line, _) in ends.items():
        print(f"==> {name:18} {line}")
    return 0 if all(passed for _, passed in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
