"""The jobs on real data that everything is proved on, with the quality each must reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.job import REPOSITORY, LocalJob

TEST_DATA = Path(os.environ.get("ELASTICDL_TEST_DATA", REPOSITORY.parent / "shared" / "data"))


@cache
def _generated(dataset: str, needs_source: bool) -> TemporaryDirectory[str]:
    directory = TemporaryDirectory()
    argv = [sys.executable, "scripts/gen_dataset.py", dataset, "--output", directory.name]
    argv += ["--records_per_shard", "4096"]
    if needs_source:
        argv += ["--source", str(TEST_DATA / dataset)]
    subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True)
    return directory


@dataclass(frozen=True, slots=True)
class RealJob:
    """A model of the zoo on a data set.

    Attributes:
        num_epochs: enough for `quality`, which is (metric, least value).
        chaos_epochs: enough to outlast a life full of faults.
        pace_s: seconds that a model with a pace takes for a record, until `LocalJob.hurry`.
    """

    name: str
    model_def: str
    dataset: str
    num_train: int
    num_epochs: int
    chaos_epochs: int
    minibatch_size: int
    num_minibatches_per_task: int
    num_workers: int
    num_ps_pods: int
    quality: tuple[str, float]
    needs_source: bool = True
    flags: dict[str, object] = field(default_factory=dict)
    pace_s: float = 0

    @property
    def num_records(self) -> int:
        return self.num_train * self.num_epochs

    @property
    def num_steps(self) -> int:
        """Minibatches of the job, when every task is full; a little fewer than there are."""
        return self.num_records // self.minibatch_size

    def lengthened(self) -> RealJob:
        """The job as it is tormented."""
        return replace(self, num_epochs=self.chaos_epochs)

    def available(self) -> bool:
        return not self.needs_source or (TEST_DATA / self.dataset).is_dir()

    def make_data(self, directory: Path) -> Path:
        """Copies the data set, which this process generates once, to ``directory/<dataset>``."""
        output = directory / self.dataset
        if not output.exists():
            shutil.copytree(_generated(self.dataset, self.needs_source).name, output)
        return output

    def local_job(self, job_dir: Path, data: Path, **flags: object) -> LocalJob:
        return LocalJob(
            job_dir,
            {
                "job_name": self.name,
                "model_zoo": "model_zoo",
                "model_def": self.model_def,
                "training_data": data / "train",
                "validation_data": data / "validation",
                "minibatch_size": self.minibatch_size,
                "num_minibatches_per_task": self.num_minibatches_per_task,
                "num_epochs": self.num_epochs,
                "num_workers": self.num_workers,
                "num_ps_pods": self.num_ps_pods,
                **self.flags,
                **flags,
            },
            pace_s=self.pace_s,
        )


DIGITS = RealJob(
    name="digits",
    model_def="digits.digits_functional.custom_model",
    dataset="digits",
    num_train=1437,
    num_epochs=12,
    chaos_epochs=120,
    minibatch_size=32,
    num_minibatches_per_task=4,
    num_workers=2,
    num_ps_pods=1,
    quality=("accuracy", 0.95),
    needs_source=False,
)
# For faults of the system: workers that import no framework, slow until the faults have happened.
NUMPY_DIGITS = replace(
    DIGITS,
    model_def="paced.numpy_digits.custom_model",
    quality=("accuracy", 0.9),
    flags={"model_zoo": "tests/e2e_kubernetes/zoo"},
    pace_s=0.0005,
)
MNIST = RealJob(
    name="mnist",
    model_def="mnist.mnist_functional_api.custom_model",
    dataset="mnist",
    num_train=9000,
    num_epochs=3,
    chaos_epochs=12,
    minibatch_size=64,
    num_minibatches_per_task=8,
    num_workers=2,
    num_ps_pods=2,
    quality=("accuracy", 0.96),
)
FRAPPE = RealJob(
    name="frappe",
    model_def="deepfm.deepfm_edl_embedding.custom_model",
    dataset="frappe",
    num_train=57722,
    num_epochs=5,
    chaos_epochs=12,
    minibatch_size=256,
    num_minibatches_per_task=16,
    num_workers=2,
    num_ps_pods=2,
    quality=("auc", 0.93),
)
JOBS = (DIGITS, MNIST, FRAPPE)


def zoo_with(directory: Path, code: str) -> Path:
    """A model zoo in ``directory/zoo`` whose module `model` is the digits example with more code at its end."""
    zoo = directory / "zoo"
    zoo.mkdir()
    source = (REPOSITORY / "model_zoo/digits/digits_functional.py").read_text()
    (zoo / "model.py").write_text(source + "\n\n" + textwrap.dedent(code))
    return zoo
