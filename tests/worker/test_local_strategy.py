"""Local strategy: model, optimizer and ledger are one checkpoint."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from elasticdl.activities import Activity, ActivityClock
from elasticdl.frameworks.framework import Batch, Framework, NotFiniteStep
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.storage.versions import NoneIsWhole
from elasticdl.worker.checkpoint import Checkpoint, CheckpointKind, StateCheckpoints
from elasticdl.worker.local import STATE_FILE, LocalStrategy
from elasticdl.worker.tasks import HeldLease, LeaseLost, NotFinite, TaskBatches
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import CheckpointError, JobError, StorageUnreachable
from elasticdl_client.job_spec import JobSpec
from tests.storage.lost_files import lost_until_asked_again


class Adder:
    """A framework whose model is the sum of the minibatch numbers that it was trained on."""

    def __init__(self) -> None:
        self.total = 0.0

    def learning_rate(self, epoch: int, version: int) -> float | None:
        return None

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        self.total += batch.n + 1
        return self.total

    def state(self) -> dict[str, npt.NDArray[Any]]:
        return {"total": np.array(self.total)}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.total = float(state["total"])


class Spoiled(Adder):
    """The same; its fourth step is not finite."""

    def train(self, batch: Batch, seed: int, learning_rate: float | None = None) -> float:
        if batch.n == 3:
            raise NotFiniteStep("The gradient is not finite")
        return super().train(batch, seed, learning_rate)


def strategy(framework: Adder, directory: Path, num_records: int = 0, **changes: object) -> LocalStrategy:
    values: dict[str, Any] = {"job_name": "adder", "keep_checkpoint_max": 0, **changes}
    spec = JobSpec(distribution_strategy=DistributionStrategy.LOCAL, checkpoint_dir=str(directory), **values)
    checkpoints = StateCheckpoints.of_module(spec, STATE_FILE)
    return LocalStrategy(cast(Framework, framework), checkpoints, 2, 1, ActivityClock(), lambda: num_records)


class Outage(StateCheckpoints):
    """Those in a directory, as in storage that answers at the third time.

    Attributes:
        seen: the activities of the worker, in order.
    """

    def __init__(self, directory: Path, clock: ActivityClock) -> None:
        super().__init__(str(directory), CheckpointKind("adder", "Local", STATE_FILE, {}))
        self.seen: list[Activity] = []
        self._clock = clock

    @property
    def place(self) -> str:
        return "s3://bucket/checkpoints"

    def newest(self) -> Checkpoint | None:
        self.seen.append(self._clock.read()[0])
        if len(self.seen) < 3:
            raise StorageUnreachable("no answer in 180 s")
        return super().newest()


def task(number: int, num_minibatches: int) -> tuple[HeldLease, TaskBatches]:
    held = HeldLease(pb.Lease(id=7, type=pb.TRAINING, epoch=0, task=number))
    batches: Iterator[Batch] = iter(
        [*(Batch(7, n, size=1) for n in range(num_minibatches)), Batch(7, num_minibatches, end=True)]
    )
    return held, TaskBatches(held, next(batches), batches, ActivityClock())


def train(local: LocalStrategy, number: int, num_minibatches: int) -> list[int]:
    """The minibatches that were computed."""
    held, batches = task(number, num_minibatches)
    local.begin(held)
    computed: list[int] = []
    local.train_task(held, batches, lambda n, loss: computed.append(n))
    return computed


def test_a_model_that_has_taken_a_step_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    local = strategy(Spoiled(), tmp_path)
    with pytest.raises(NotFinite, match="The gradient is not finite") as raised:
        train(local, 0, 5)
    assert raised.value.minibatch == 3
    assert train(local, 1, 3) == [0, 1, 2]  # it has begun before the job's end reaches this worker
    local.close()
    restored = Adder()
    strategy(restored, tmp_path).restore()
    assert restored.total == 1 + 2


def test_a_successor_waits_for_storage_that_does_not_answer(tmp_path: Path) -> None:
    train(strategy(Adder(), tmp_path), 3, 5)
    clock, restored = ActivityClock(), Adder()
    checkpoints = Outage(tmp_path, clock)
    LocalStrategy(cast(Framework, restored), checkpoints, 2, 1, clock).restore()
    assert restored.total == 1 + 2 + 3 + 4
    assert checkpoints.seen == [Activity.CHECKPOINT] * 3
    assert clock.read()[0] is Activity.START


@pytest.mark.parametrize("name", ["MANIFEST.json", STATE_FILE])
def test_a_successor_waits_for_a_volume_that_does_not_answer(tmp_path: Path, name: str) -> None:
    train(strategy(Adder(), tmp_path), 3, 5)
    restored = Adder()
    local = strategy(restored, tmp_path)
    with lost_until_asked_again(tmp_path / "version-4" / name):
        local.restore()
    assert restored.total == 1 + 2 + 3 + 4
    assert [(t.epoch, t.task, t.watermark) for t in local.ledger().tasks] == [(0, 3, 4)]


def test_a_successor_computes_only_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    first = Adder()
    assert train(strategy(first, tmp_path), 3, 5) == [0, 1, 2, 3, 4]
    second = Adder()
    local = strategy(second, tmp_path)
    local.restore()
    assert second.total == 1 + 2 + 3 + 4  # the checkpoint after four steps
    assert [(t.epoch, t.task, t.watermark) for t in local.ledger().tasks] == [(0, 3, 4)]
    assert train(local, 3, 5) == [4]
    assert second.total == first.total


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(strategy(Adder(), tmp_path), 0, 4)
    damaged = tmp_path / "version-4" / "local.npz"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    restored = Adder()
    strategy(restored, tmp_path).restore()
    assert restored.total == 1 + 2
    assert str(damaged) in caplog.text


def test_a_model_of_which_all_checkpoints_are_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    train(strategy(Adder(), tmp_path), 0, 4)
    for name in ("version-2", "version-4"):
        (tmp_path / name / STATE_FILE).write_bytes(b"damaged")
    with pytest.raises(NoneIsWhole) as raised:
        strategy(Adder(), tmp_path).restore()
    assert [reason.split(":")[0] for reason in raised.value.damaged] == ["version-4", "version-2"]


def test_another_jobs_checkpoint_is_refused(tmp_path: Path) -> None:
    train(strategy(Adder(), tmp_path), 0, 4)
    with pytest.raises(CheckpointError, match="is of job adder, not other"):
        strategy(Adder(), tmp_path, job_name="other").restore()


def test_a_ledger_of_another_number_of_records_is_refused_before_a_minibatch_is_computed(tmp_path: Path) -> None:
    train(strategy(Adder(), tmp_path, num_records=8), 3, 5)
    same, other = strategy(Adder(), tmp_path, num_records=8), strategy(Adder(), tmp_path, num_records=9)
    same.restore()
    assert train(same, 3, 5) == [4]
    other.restore()
    with pytest.raises(JobError, match="written with num_records=8, not 9"):
        train(other, 3, 5)


def test_a_ledger_says_of_which_checkpoint_and_of_how_many_records_it_is(tmp_path: Path) -> None:
    local = strategy(Adder(), tmp_path, num_records=8)
    local.restore()
    assert (local.restored_from, local.restored_records) == ("", 0)
    train(local, 3, 5)
    successor = strategy(Adder(), tmp_path, num_records=8)
    successor.restore()
    assert (successor.restored_from, successor.restored_records) == (str(tmp_path / "version-4"), 8)


def test_the_hint_of_a_refused_ledger_names_no_strategy_that_refuses_the_checkpoint(tmp_path: Path) -> None:
    train(strategy(Adder(), tmp_path), 0, 4)
    with pytest.raises(CheckpointError) as raised:
        strategy(Adder(), tmp_path, seed=5).restore()
    assert raised.value.hint == "train with seed=0 again, or name another checkpoint_dir to begin a new model"


@pytest.mark.parametrize(
    "change",
    [{"shuffle": True}, {"minibatch_size": 7}, {"seed": 5}, {"training_data": "other"}, {"records_per_shard": 3}],
    ids=str,
)
def test_a_ledger_of_other_minibatches_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    train(strategy(Adder(), tmp_path), 0, 4)
    with pytest.raises(CheckpointError, match="written with " + next(iter(change))):
        strategy(Adder(), tmp_path, **change).restore()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    train(strategy(Adder(), tmp_path, keep_checkpoint_max=2), 0, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-6", "version-8"]


def test_a_full_disk_is_said_and_training_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small file system")
    try:
        (tmp_path / "filler").write_bytes(bytes(4096))
        assert train(strategy(Adder(), tmp_path), 0, 3) == [0, 1, 2]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert "No space left on device" in caplog.text


def test_a_lost_lease_stops_the_task() -> None:
    held, batches = task(0, 3)
    assert next(batches).n == 0
    held.revoked = True
    with pytest.raises(LeaseLost):
        next(batches)


def test_minibatches_that_the_model_holds_are_passed_over() -> None:
    held, batches = task(0, 4)
    held.committed.update((0, 2))
    assert [batch.n for batch in batches] == [1, 3]
    assert batches.num_minibatches == 4


def test_a_checkpoint_that_is_asked_for_is_written_after_the_next_step(tmp_path: Path) -> None:
    local = strategy(Adder(), tmp_path)
    local._checkpoints.request()
    train(local, 3, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]
    train(local, 4, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]  # the next is due after two steps
