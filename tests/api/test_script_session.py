"""The place of a script in its job: one for a process, whatever the script makes of it.  Real processes and sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticdl.api.data import DataShardService
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.job_spec import JobSpec
from tests.worker.counting import lease
from tests.worker.scripted_master import TOKEN, ScriptedMaster

TWO_SERVICES = """
from elasticdl.api.data import DataShardService
first = DataShardService(batch_size=2, dataset_size=8)
try:
    DataShardService(batch_size=2, dataset_size=8)
except Exception as error:
    print(type(error).__name__, error)
print(len(list(first)))
"""
TWO_JOIN = """
from elasticdl.api.session import ScriptSession
assert ScriptSession.join() is ScriptSession.join()
"""
A_CHILD_IMPORTS = """
import multiprocessing
from elasticdl.api.data import DataShardService
def draw():
    try:
        print(len(list(data)), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
child = multiprocessing.get_context("spawn").Process(target=draw)
if __name__ == "__main__":
    child.start()
    child.join()
data = DataShardService(batch_size=2, dataset_size=8)
if __name__ == "__main__":
    draw()
"""
A_CHILD_IS_FORKED = """
import os, sys
from elasticdl.api.data import DataShardService
data = DataShardService(batch_size=2, dataset_size=8)
if os.fork() == 0:
    sys.exit()
print(os.wait()[1], len(list(data)))
"""
A_CHILD_JOINS = """
import multiprocessing
from elasticdl.api.session import ScriptSession
def join():
    try:
        ScriptSession.join()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
if __name__ == "__main__":
    {parent}
    child = multiprocessing.get_context("{method}").Process(target=join)
    child.start()
    child.join()
"""


class MasterOfScript(ScriptedMaster):
    """Says what the data are."""

    def RegisterWorker(self, request: Any, context: Any) -> pb.RegisterWorkerReply:  # noqa: N802
        reply = super().RegisterWorker(request, context)
        reply.job_spec = JobSpec().to_json()
        reply.plan.CopyFrom(pb.Plan(minibatch_size=2, num_minibatches_per_task=2, num_epochs=1, num_records=8))
        return reply


@pytest.fixture
def master() -> Iterator[ScriptedMaster]:
    made = MasterOfScript(lease(0), lease(1))
    yield made
    made.stop()


def output_of(master: ScriptedMaster, code: str, directory: Path) -> str:
    """Run a script as a worker of the master's job."""
    (directory / "token").write_text(TOKEN)
    (directory / "script.py").write_text(code)
    environment = {
        "MASTER_ADDR": master.address,
        "WORKER_ID": "1",
        "ELASTICDL_TOKEN_FILE": str(directory / "token"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(directory / "script.py")]
    done = subprocess.run(command, env=os.environ | environment, timeout=120, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


def incarnations(master: ScriptedMaster) -> set[int]:
    return {request.incarnation for request in master.hears("RegisterWorker")}


def test_a_second_join_is_the_same_place(master: ScriptedMaster, tmp_path: Path) -> None:
    output_of(master, TWO_JOIN, tmp_path)
    assert len(incarnations(master)) == 1


def test_a_second_service_is_refused_and_the_first_trains_on(master: ScriptedMaster, tmp_path: Path) -> None:
    said = output_of(master, TWO_SERVICES, tmp_path)
    assert "JobError this script has a second trainer, controller or DataShardService" in said
    assert said.splitlines()[-1] == "4"
    assert len(incarnations(master)) == 1


def test_a_second_service_of_a_process_that_is_alone_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    services = [DataShardService(batch_size=2, dataset_size=8) for _ in range(2)]
    assert "A job would refuse what runs here alone: this script has a second trainer" in caplog.text
    assert [len(list(service)) for service in services] == [4, 4]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_does_not_take_the_place_of_a_process_that_has_joined(
    method: str, master: ScriptedMaster, tmp_path: Path
) -> None:
    said = output_of(master, A_CHILD_JOINS.format(method=method, parent="ScriptSession.join()"), tmp_path)
    assert "is the process that has joined the job, and has started this one" in said
    assert len(incarnations(master)) == 1


def test_a_forked_child_ends_without_the_reports_of_its_parent(master: ScriptedMaster, tmp_path: Path) -> None:
    assert output_of(master, A_CHILD_IS_FORKED, tmp_path) == "0 4\n"


def test_a_child_that_imports_the_script_does_not_take_its_place(master: ScriptedMaster, tmp_path: Path) -> None:
    assert output_of(master, A_CHILD_IMPORTS, tmp_path) == "4\n"
    assert len(incarnations(master)) == 1


def test_a_child_that_imports_a_script_alone_is_refused_its_records(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(A_CHILD_IMPORTS)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, timeout=120, check=True, stdout=subprocess.PIPE)
    refusal, *_, own = done.stdout.decode().splitlines()
    assert "a DataShardService belongs to the process that has made it" in refusal
    assert own == "4"


def test_a_child_of_a_process_that_has_not_joined_may_train(master: ScriptedMaster, tmp_path: Path) -> None:
    assert output_of(master, A_CHILD_JOINS.format(method="spawn", parent="pass"), tmp_path) == ""
    assert len(incarnations(master)) == 1
