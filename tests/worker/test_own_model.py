"""When checkpoints of a model that lives in the workers are written, however often their world changes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np

from elasticdl.ps.applied import MinibatchName
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.ledger import UNKNOWN, Ledger, packed, unpacked

EVERY = 10


class Weights:
    """A framework with a state."""

    def state(self) -> dict[str, Any]:
        return {"w": np.ones(2, np.float32)}

    def load_state(self, state: dict[str, Any]) -> None:
        assert list(state) == ["w"]


def writer_in(directory: Path) -> CheckpointWriter:
    checkpoints = StateCheckpoints(str(directory), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}))
    framework: Any = Weights()
    return CheckpointWriter(Replica(framework, checkpoints, ""), checkpoints, EVERY)


def ledger_of(count: int) -> Ledger:
    ledger = Ledger(steps=count)
    for n in range(count):
        ledger.applied.add(MinibatchName(0, 0, n))
    return ledger


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_worlds_that_are_shorter_than_the_time_between_two_checkpoints_do_not_put_them_off(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    for count in range(0, EVERY, 4):
        writer.begin(ledger_of(count))
        writer.save_if_due(ledger_of(count + 3))
        writer.wait()
        assert not written(tmp_path) or count + 3 >= EVERY
    assert written(tmp_path) == ["version-11"]


def test_the_last_checkpoint_is_written_although_the_last_world_made_no_step(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    writer.begin(ledger_of(7))
    writer.save_last(ledger_of(7))
    assert written(tmp_path) == ["version-7"]


def test_a_member_that_took_the_model_over_writes_what_a_lost_member_has_not_written(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(7))
    writer.save_last(ledger_of(7))
    assert written(tmp_path) == ["version-7"]


def test_a_model_that_was_restored_is_not_written_again_before_a_step(tmp_path: Path) -> None:
    writer_in(tmp_path).save_last(ledger_of(7))
    before = (tmp_path / "version-7").stat().st_ino
    writer = writer_in(tmp_path)
    ledger = writer.model.start_over().ledger
    writer.begin(ledger)
    writer.save_last(ledger)
    assert (tmp_path / "version-7").stat().st_ino == before


def test_checkpoints_of_a_model_that_is_an_older_one_are_written_as_often(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    writer.save_last(ledger_of(25))
    writer.begin(ledger_of(5))
    writer.save_if_due(ledger_of(15))
    writer.wait()
    assert written(tmp_path) == ["version-15", "version-25"]


def test_a_checkpoint_knows_the_samples_of_its_minibatches_and_an_older_one_that_it_does_not(tmp_path: Path) -> None:
    ledger = Ledger()
    for n, num_samples in enumerate((4, 0, 3)):
        ledger.add(MinibatchName(0, 0, n), num_samples)
    writer = writer_in(tmp_path)
    writer.begin(Ledger())
    writer.save_last(ledger)
    checkpoints = StateCheckpoints(str(tmp_path), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}))
    framework: Any = Weights()
    restored = Replica(framework, checkpoints, "").start_over().ledger
    assert restored.num_samples == {(0, 0): 7}
    assert unpacked(packed(restored)).num_samples == restored.num_samples
    manifest = tmp_path / "version-3" / "MANIFEST.json"
    values = json.loads(manifest.read_text())
    del values["manifest_crc32"]
    manifest.write_text(json.dumps(values | {"applied": [[0, 0, [], 3]]}))
    restored = Replica(framework, checkpoints, "").start_over().ledger
    restored.add(MinibatchName(0, 0, 3), 4)
    assert restored.num_samples == {(0, 0): UNKNOWN}


def test_the_last_checkpoint_is_tried_again_if_the_one_before_has_failed(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.write_text("no directory")
    writer = writer_in(place)
    writer.begin(ledger_of(0))
    writer.save_if_due(ledger_of(EVERY))
    writer.wait()
    assert writer.is_behind(ledger_of(EVERY))
    assert not writer.is_due(ledger_of(EVERY))
    place.unlink()
    writer.save_last(ledger_of(EVERY))
    assert not writer.is_behind(ledger_of(EVERY))
    assert written(place) == [f"version-{EVERY}"]


def test_a_checkpoint_that_is_asked_for_is_written_after_the_next_step(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.begin(ledger_of(0))
    writer._checkpoints.request()
    writer.save_if_due(ledger_of(1))
    writer.wait()
    writer.save_if_due(ledger_of(2))
    writer.wait()
    assert written(tmp_path) == ["version-1"]


class HeldCheckpoints(StateCheckpoints):
    """On a slow disk: nothing is written until `may_write` is set."""

    may_write = threading.Event()

    def save(self, *of_checkpoint: Any) -> None:
        assert self.may_write.wait(60)
        super().save(*of_checkpoint)


class RacedWriter(CheckpointWriter):
    """Another thread begins the last checkpoint when the one before is written; that ends when it is awaited."""

    num_waits = 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.num_waits += 1
        if self.num_waits > 2:
            HeldCheckpoints.may_write.set()
        super().wait(timeout_s)
        if self.num_waits == 1:
            self.save(ledger_of(7), {})


def test_a_last_checkpoint_that_another_thread_has_begun_is_waited_for(tmp_path: Path) -> None:
    HeldCheckpoints.may_write.clear()
    checkpoints = HeldCheckpoints(str(tmp_path), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}))
    framework: Any = Weights()
    writer = RacedWriter(Replica(framework, checkpoints, ""), checkpoints, EVERY)
    writer.begin(ledger_of(0))
    writer.save_last(ledger_of(7))
    assert written(tmp_path) == ["version-7"]


def test_a_last_checkpoint_that_takes_too_long_is_not_waited_for_and_written_once(tmp_path: Path) -> None:
    HeldCheckpoints.may_write.clear()
    checkpoints = HeldCheckpoints(str(tmp_path), CheckpointKind("job", "AllreduceStrategy", "model.npz", {}))
    framework: Any = Weights()
    writer = CheckpointWriter(Replica(framework, checkpoints, ""), checkpoints, EVERY)
    writer.begin(ledger_of(0))
    for _ in range(2):
        writer.save_last(ledger_of(7), within_s=0.05)
        assert written(tmp_path) == []
    checkpoints.may_write.set()
    writer.wait()
    assert written(tmp_path) == ["version-7"]
