"""Jobs of PyTorch models as a user runs them on this machine, and what their processes import."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Metadata
from elasticdl.frameworks.framework import Mode, TaskRecords
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import framework_of, load
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.zoo_modules import check_framework
from tests.chaos.job import REPOSITORY
from tests.chaos.jobs import MNIST
from tests.e2e.whole_jobs import train
from tests.lean_import import LEAN_IMPORT

TORCH_MNIST = replace(
    MNIST,
    name="torch-mnist",
    model_def="mnist.mnist_pytorch.custom_model",
    num_epochs=2,
    minibatch_size=32,
    num_workers=1,
    num_ps_pods=0,
)


def exported_accuracy(output: Path, data: Path) -> float:
    """Of the exported values in a module of the zoo, over the validation data."""
    definition = load(str(REPOSITORY / "model_zoo"), TORCH_MNIST.model_def)
    module = definition.model()
    module.load_state_dict(torch.load(output / "model.pt", weights_only=True))
    reader = create_reader(str(data / "validation"))
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    framework = TorchFramework(definition, len(records), 0, Metadata())
    (batch, _) = framework.batches(Mode.EVALUATION, iter([TaskRecords(0, 0, records)]))
    with torch.no_grad():
        found = module.eval()(batch.data.features).argmax(1) == batch.data.labels
    return float(found.float().mean())


@pytest.mark.timeout(300)
def test_mnist_trains_with_the_local_strategy_and_is_exported(tmp_path: Path) -> None:
    output = tmp_path / "model"
    metrics = train(TORCH_MNIST, tmp_path, distribution_strategy="Local", output=output, evaluation_steps=100)
    assert metrics["accuracy"] >= 0.96
    assert exported_accuracy(output, tmp_path / "mnist") == pytest.approx(metrics["accuracy"], abs=1e-3)
    assert (output / "model.pt2").exists()
    (log,) = (tmp_path / "job").rglob("*-worker-0.log")
    assert len(re.findall(r"The model is on (the CPU \(\d+ threads?\)|cuda:0 \()", log.read_text())) == 1


@pytest.mark.timeout(300)
def test_mnist_trains_with_all_reduce_on_two_workers(tmp_path: Path) -> None:
    output = tmp_path / "model"
    metrics = train(TORCH_MNIST, tmp_path, distribution_strategy="AllReduceStrategy", num_workers=2, output=output)
    assert metrics["accuracy"] >= 0.96
    assert exported_accuracy(output, tmp_path / "mnist") == pytest.approx(metrics["accuracy"], abs=1e-3)


IMPORTS = """
import sys
from pathlib import Path
import elasticdl.worker.process
from elasticdl_client.choices import DistributionStrategy
from elasticdl.model_def import load_model_definition
from elasticdl.worker.factories import Readers, first_op, load_framework
from elasticdl_client.job_spec import JobSpec
model_def, framework, data, strategy = sys.argv[1:]
spec = JobSpec(job_name="j", model_zoo="model_zoo", model_def=model_def, training_data=data,
               distribution_strategy=DistributionStrategy(strategy))
first_op(framework)
definition = load_model_definition(spec)
load_framework(spec, definition, Readers(spec, definition)).report()
print(*sorted({"tensorflow", "keras", "torch"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("model_def", "framework", "imported"),
    [
        ("mnist.mnist_pytorch.custom_model", "torch", "torch"),
        ("mnist.mnist_functional_api.custom_model", "tensorflow", "keras tensorflow"),
    ],
)
def test_a_worker_imports_the_framework_of_its_job_alone(
    tmp_path: Path, model_def: str, framework: str, imported: str
) -> None:
    (tmp_path / "data.csv").write_text("a\n1\n")
    argv = [sys.executable, "-c", LEAN_IMPORT + IMPORTS, model_def, framework, str(tmp_path / "data.csv"), "Local"]
    printed = subprocess.run(argv, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert printed.returncode == 0, printed.stderr[-2000:]
    assert printed.stdout.split("\n")[-2] == imported


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch", FrameworkName.TORCH),
        ("from torch.nn import functional", FrameworkName.TORCH),
        ("def custom_model():\n    import torch", FrameworkName.TORCH),
        ("from .layers import Net", FrameworkName.TORCH),
        ("from shop.layers import Net", FrameworkName.TORCH),
        ("from shop import layers", FrameworkName.TORCH),
        ("import keras", FrameworkName.TENSORFLOW),
        ("import keras\nfrom shop.layers import Net", FrameworkName.TENSORFLOW),
        ("import torch\nimport tensorflow", FrameworkName.TENSORFLOW),
        ("import numpy", FrameworkName.TENSORFLOW),
        ("from elasticdl.layers import Embedding\nimport shop.layers", FrameworkName.TENSORFLOW),
        ("not Python", FrameworkName.TENSORFLOW),
    ],
)
def test_the_framework_is_read_off_the_imports(tmp_path: Path, text: str, expected: FrameworkName) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "layers.py").write_text("import torch\n")
    (tmp_path / "shop" / "model.py").write_text(text + "\n")
    spec = JobSpec(model_zoo=str(tmp_path), model_def="shop.model.custom_model")
    assert framework_of(spec) is expected
    named = JobSpec(model_zoo=str(tmp_path), model_def="shop.model.custom_model", framework=FrameworkName.TORCH)
    assert framework_of(named) is FrameworkName.TORCH


def test_parameter_servers_are_refused_before_anything_starts() -> None:
    zoo = str(REPOSITORY / "model_zoo")
    with pytest.raises(ElasticDLError, match="written for PyTorch"):
        check_framework(JobSpec(model_zoo=zoo, model_def=TORCH_MNIST.model_def))
    check_framework(JobSpec(model_zoo=zoo, model_def=MNIST.model_def))
    flags = {"job_name": "j", "model_def": "a.b.c", "training_data": "d", "framework": "torch", "runtime": "local"}
    with pytest.raises(ElasticDLError, match="--framework=torch"):
        JobSpec.from_flags("train", flags)
