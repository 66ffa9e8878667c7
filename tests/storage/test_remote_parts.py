"""Predictions in storage: whole parts, once each, and nothing of what was not finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.paths import path_of
from elasticdl.worker.inference.output_parts import Parts
from elasticdl.worker.tasks import HeldLease, LeaseLost
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from tests.storage.faulty_proxy import Fault, FaultyProxy, Request

PUBLISH = """
import sys
from elasticdl.storage.fsspec_storage import storage_of
storage_of(sys.argv[1]).publish(sys.argv[1], b"x" * 1_000_000)
"""


def lease(number: int, task: int) -> HeldLease:
    return HeldLease(pb.Lease(id=number, type=pb.PREDICTION, task=task))


def test_a_part_is_published_when_its_lease_is_confirmed_and_a_lost_one_changes_nothing(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    url = f"s3://bucket/{tmp_path.name}/predictions"
    kept, lost = (Parts(path_of(url), "csv", lambda number, counts=counts: counts) for counts in (True, False))
    proxy.once_each(Fault.UNAVAILABLE, method="PUT")
    for task in (100000, 2, 99999):
        with kept.writing(lease(task, task)) as path:
            path.write_text(f"task {task}\n")
    with kept.writing(lease(7, 7)):
        pass  # no rows, no part
    with pytest.raises(LeaseLost), lost.writing(lease(8, 2)) as path:
        path.write_text("late\n")
    with pytest.raises(ValueError, match="is not in list"), kept.writing(lease(9, 2)) as path:
        [path.write_text("half\n")].index(0)
    assert not path.parent.exists()
    assert kept.names() == ["part-00002.csv", "part-99999.csv", "part-100000.csv"]
    assert storage_of(url).read(f"{url}/part-00002.csv", 0, 7) == b"task 2\n"
    kept.sweep()
    with kept.writing_named(lease(10, 0), "_SUCCESS") as path:
        path.write_text("{}")
    assert len(kept.names()) == 3


class Together:
    """Answers no request for a part until this number of them, of one method, is there at once."""

    def __init__(self, number: int, method: str) -> None:
        self._lacking = threading.Semaphore(number - 1)
        self._method = method
        self.are_there = threading.Event()

    def fault_of(self, request: Request) -> Fault | None:
        if request.method == self._method and "/part-" in request.path:
            if not self._lacking.acquire(blocking=False):
                self.are_there.set()
            self.are_there.wait(5)
        return None


def test_parts_are_read_in_their_order_and_removed_each_several_at_once(proxy: FaultyProxy, tmp_path: Path) -> None:
    directory = path_of(f"s3://bucket/{tmp_path.name}/predictions")
    parts = Parts(directory, "csv", lambda number: True)
    for task in range(40):
        with parts.writing(lease(task, task)) as path:
            path.write_bytes(b"%d" % task * task)
    reads = Together(8, "GET")
    proxy.fault_of, proxy.requests = reads.fault_of, []
    assert list(parts.contents()) == [b"%d" % task * task for task in range(40)]
    assert reads.are_there.is_set()
    assert [one.method for one in proxy.requests].count("HEAD") <= 1  # of the directory
    with parts.writing_named(lease(40, 0), "notes") as path:
        path.write_text("of another program")
    deletions = Together(8, "DELETE")
    proxy.fault_of = deletions.fault_of
    parts.remove()
    assert deletions.are_there.is_set()
    assert [path.name for path in directory.iterdir()] == ["notes"]


def test_a_process_that_is_killed_in_an_upload_leaves_nothing(proxy: FaultyProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/part-00000.csv"
    proxy.once_each(Fault.HELD, method="PUT")
    uploading = subprocess.Popen([sys.executable, "-c", PUBLISH, url], env={**os.environ})
    try:
        proxy.held.wait(60)
        assert proxy.held.is_set()
    finally:
        uploading.send_signal(signal.SIGKILL)
        uploading.wait()
    assert not storage_of(url).exists(url)


def test_where_predictions_cannot_be_written_is_said_at_once() -> None:
    flags = {
        "job_name": "p",
        "runtime": "local",
        "model_def": "m.model",
        "prediction_data": "s3://b/d",
        "checkpoint_dir_for_init": "/c",
    }
    assert JobSpec.from_flags("predict", {**flags, "prediction_outputs": "s3://b/out"})
    with pytest.raises(FlagError, match="storage that cannot be written"):
        JobSpec.from_flags("predict", {**flags, "prediction_outputs": "https://host/out"})
    with pytest.raises(FlagError, match="has a credential in it") as caught:
        JobSpec.from_flags("predict", {**flags, "prediction_outputs": "s3://b/out?secret=abc123"})
    assert "abc123" not in str(caught.value)
