"""A training script in the style of the original's: its data set asks a service for the number of each record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from elasticai_api.common.data_shard_service import RecordIndexService, build_data_shard_service
from elasticai_api.proto import elasticai_api_pb2
from elasticai_api.pytorch.controller import PyTorchAllReduceController, create_elastic_controller
from elasticai_api.pytorch.optimizer import DistributedOptimizer
from elasticdl_client.errors import DataError, FlagError, JobError
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of

RECORDS, BATCH, EPOCHS = 40, 4, 2
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.original.test_original_scripts import made_controller, train
train(made_controller())
"""


class Asking(Dataset[Any]):
    """Numbers, each of the record that the service names."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(self._service.fetch_record_index())])


def made_controller() -> Any:
    return create_elastic_controller(
        batch_size=BATCH, num_epochs=EPOCHS, dataset_size=RECORDS, shuffle=True, shuffle_shards=True
    )


def train(controller: Any, service: Any = None, num_workers: int = 0) -> list[int]:
    """The loop of such a script; returns the records that it has trained."""
    data = Asking(service or controller.data_shard_service)
    loader = controller.loader(dataset=data, batch_size=BATCH, num_workers=num_workers)
    model = torch.nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    controller.set_broadcast_model(model)
    controller.set_broadcast_optimizer(optimizer)
    seen: list[int] = []

    @controller.elastic_run  # type: ignore[untyped-decorator]
    def train_one_batch(numbers: Any) -> None:
        optimizer.zero_grad()
        model(numbers).mean().backward()
        optimizer.step()

    with controller.scope():
        for numbers in loader:
            train_one_batch(numbers)
            seen += [int(number) for number in numbers[:, 0]]
    assert loader.dataset is data
    return seen


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_record_that_the_data_set_asks_for_is_trained_once_an_epoch(num_workers: int) -> None:
    assert sorted(train(made_controller(), num_workers=num_workers)) == sorted(EPOCHS * list(range(RECORDS)))


def test_a_controller_made_of_an_index_service_answers_for_it() -> None:
    service = RecordIndexService(
        batch_size=BATCH, dataset_size=RECORDS, num_epochs=EPOCHS, task_type=elasticai_api_pb2.TRAINING
    )
    assert sorted(train(PyTorchAllReduceController(service), service)) == sorted(EPOCHS * list(range(RECORDS)))


def test_two_workers_share_such_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    flags = {
        "job_name": "original",
        "job_command": f"python {tmp_path / 'train.py'}",
        "distribution_strategy": "AllreduceStrategy",
        "num_workers": 2,
        "num_minibatches_per_task": 2,
    }
    job = LocalJob(tmp_path / "job", flags).start()
    assert job.wait(120) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [
        (RECORDS, RECORDS, 0, 0)
    ] * EPOCHS


def test_a_loader_of_the_scripts_own_is_refused_before_the_loop() -> None:
    controller = made_controller()
    data = Asking(controller.data_shard_service)
    with pytest.raises(JobError, match=r"controller\.loader"), controller.scope():
        pytest.fail("training has begun")
    with pytest.raises(JobError, match=r"controller\.loader"):
        next(iter(DataLoader(data, batch_size=BATCH)))


def test_what_an_original_script_says_and_cannot_be_kept_is_refused() -> None:
    controller = create_elastic_controller(batch_size=BATCH)
    data = Asking(controller.data_shard_service)
    with pytest.raises(DataError, match="dataset_size"):
        controller.loader(dataset=data)
    with pytest.raises(DataError, match="batch_size is 8"):
        controller.loader(dataset=range(RECORDS), batch_size=8)
    with pytest.raises(DataError, match="task_type"):
        build_data_shard_service(batch_size=BATCH, dataset_size=8, task_type=elasticai_api_pb2.EVALUATION)
    with pytest.raises(JobError, match="RecordIndexService"):
        PyTorchAllReduceController(data_shard_service=object())


def test_arguments_of_the_distributed_optimizer_are_kept_or_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, adasum = 0, 2  # as Horovod has them
    kept = DistributedOptimizer(optimizer, model.named_parameters(), object(), 1, average, 2.0)
    assert kept is optimizer
    assert not getattr(kept, "fixed_global_batch_size", False)
    with pytest.raises(TypeError, match="num_groups"):
        DistributedOptimizer(optimizer, num_groups=2)
    with pytest.raises(FlagError, match="op="):
        DistributedOptimizer(optimizer, op=adasum)
    with pytest.raises(FlagError, match="backward_passes_per_step=4"):
        DistributedOptimizer(optimizer, backward_passes_per_step=4)
    assert DistributedOptimizer(optimizer, backward_passes_per_step=4, fixed_global_batch_size=True) is optimizer


def test_a_job_with_another_global_batch_than_the_optimizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from elasticai_api.pytorch.controller import create_elastic_controller\n"
        "from elasticai_api.pytorch.optimizer import DistributedOptimizer\n"
        f"controller = create_elastic_controller(batch_size={BATCH}, num_epochs=1, dataset_size={RECORDS})\n"
        "optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)\n"
        "optimizer = DistributedOptimizer(optimizer, global_batch_num_per_step=3, fixed_global_batch_size=True)\n"
        "controller.set_broadcast_optimizer(optimizer)\n"
    )
    flags = {
        "job_name": "original",
        "job_command": f"python {tmp_path / 'train.py'}",
        "distribution_strategy": "AllreduceStrategy",
        "num_workers": 1,
        "fixed_global_batch": 2 * BATCH,
    }
    job = LocalJob(tmp_path / "job", flags).start()
    assert job.wait(120) != 0
    assert f"--fixed_global_batch={3 * BATCH}" in job.story()
