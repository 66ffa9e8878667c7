"""SIGTERM: the last actions of a worker process.  Real processes and sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticdl.activities import ActivityClock
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.termination import FAREWELL_S, LIMIT_S, PATIENCE_S, SAVED_S, Termination
from tests.worker.scripted_master import TOKEN, ScriptedMaster

pytestmark = pytest.mark.timeout(120)
REPOSITORY = Path(__file__).resolve().parents[2]
GRACE_S = 10.0  # of a pod, until SIGKILL
WAITS, HAS_LEFT = "leaves after the present minibatch", "this worker has left"


def lease(number: int = 0, num_minibatches: int = 4) -> pb.Lease:
    shard = pb.ShardMessage(name="s", start=0, end=num_minibatches)
    return pb.Lease(id=100 + number, type=pb.TRAINING, epoch=0, task=number, shard=shard)


class Life:
    """A worker process and its master; a stepwise one listens to the pipe `go`."""

    def __init__(self, directory: Path, master: ScriptedMaster, *command: str) -> None:
        self.master = master
        self.output = ""
        os.mkfifo(directory / "go")
        self._pipe = os.open(directory / "go", os.O_RDWR)
        token = directory / "token"
        token.write_text(TOKEN)
        environment = {"MASTER_ADDR": master.address, "WORKER_ID": "0", "ELASTICDL_TOKEN_FILE": str(token)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._pipe)

    def go(self, *minibatches: int) -> None:
        """Lets it compute these, in this order."""
        os.write(self._pipe, "".join(f"{minibatch}\n" for minibatch in minibatches).encode())

    def until(self, text: str) -> None:
        """Reads what the worker prints until a line has this."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(self.output)

    def ask_to_leave(self) -> None:
        """SIGTERM in the middle of a minibatch, which ends only when it may."""
        self.process.terminate()
        self.until(WAITS)

    def end(self) -> float:
        """Waits for the end that SIGTERM brings; how many seconds."""
        began_at = time.monotonic()
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        assert self.process.wait(60) == 143, self.output
        return time.monotonic() - began_at

    def leave(self) -> float:
        """SIGTERM; seconds until the end."""
        self.process.terminate()
        return self.end()

    def farewells(self) -> list[pb.HeartbeatRequest]:
        return [request for name, request in self.master.told if name == "Heartbeat" and request.leaving]

    def committed(self) -> set[int]:
        return {n for name, request in self.master.told if name == "progress" for n in request.committed}

    def has_finished_a_task(self) -> bool:
        return any(name == "finished" for name, _ in self.master.told)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begin(stack: ExitStack, directory: Path, *leases: pb.Lease, ends: bool = True) -> Life:
    """A stepwise worker with these leases, then the end of the job, or a wait."""
    master = ScriptedMaster(*leases, ends=ends)
    stack.callback(master.stop)
    arguments = (master.address, f"{directory}/go", f"{directory}/saved")
    life = Life(directory, master, "tests.worker.stepwise_worker", *arguments)
    stack.callback(life.stop)
    return life


def saved_minibatches(directory: Path) -> list[int]:
    (manifest,) = directory.glob("saved/version-*/MANIFEST.json")
    return [name.n for name in Ledger.from_manifest(json.loads(manifest.read_text())).applied]


def test_the_present_minibatch_is_finished_reported_and_saved_and_no_more(stack: ExitStack, tmp_path: Path) -> None:
    life = begin(stack, tmp_path, lease())
    life.go(0)
    life.until("computing 1")
    life.ask_to_leave()
    assert life.farewells() == []
    life.go(1, 2, 3)
    life.end()
    assert life.committed() == {0, 1}
    assert "computing 2" not in life.output
    assert not life.has_finished_a_task()
    (farewell,) = life.farewells()
    assert list(farewell.positions) == []
    names = [name for name, _ in life.master.told]
    assert "progress" not in names[names.index("Heartbeat", life.master.told.index(("Heartbeat", farewell))) :]
    assert saved_minibatches(tmp_path) == [0, 1]


def test_a_minibatch_that_lasts_too_long_is_given_up_within_the_grace(stack: ExitStack, tmp_path: Path) -> None:
    life = begin(stack, tmp_path, lease())
    life.go(0)
    life.until("computing 1")
    assert life.leave() < GRACE_S
    assert len(life.farewells()) == 1
    assert life.committed() == {0}


def test_a_compilation_is_not_waited_for(stack: ExitStack, tmp_path: Path) -> None:
    life = begin(stack, tmp_path, lease())
    life.until("computing 0")
    life.leave()
    assert WAITS not in life.output
    assert HAS_LEFT in life.output
    assert len(life.farewells()) == 1


def test_a_worker_that_waits_for_a_task_leaves_at_once(stack: ExitStack, tmp_path: Path) -> None:
    life = begin(stack, tmp_path, ends=False)
    life.master.hears("RequestLease", timeout_s=60)
    life.leave()
    assert WAITS not in life.output
    assert HAS_LEFT in life.output  # the answer to its request is not waited for
    assert len(life.farewells()) == 1


def test_a_master_that_is_away_is_sent_nothing(stack: ExitStack, tmp_path: Path) -> None:
    life = begin(stack, tmp_path, lease())
    life.go(0)
    life.until("computing 1")
    life.master.hears("progress")
    life.master.stop()
    life.ask_to_leave()
    life.go(1)
    assert life.leave() < GRACE_S
    assert saved_minibatches(tmp_path) == [0, 1]


def test_a_worker_that_still_imports_ends_at_once(stack: ExitStack, tmp_path: Path) -> None:
    master = ScriptedMaster()
    stack.callback(master.stop)
    life = Life(tmp_path, master, "elasticdl.worker")
    status = Path(f"/proc/{life.process.pid}/status")
    deadline = time.monotonic() + 60
    while not _catches_sigterm(status.read_text()):  # there is no event
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    life.leave()
    assert master.told == []  # else it would have registered


def test_the_last_reports_leave_the_farewell_its_time() -> None:
    termination = Termination(ActivityClock())
    assert termination.reports_s == 1.0
    for seconds in (PATIENCE_S, SAVED_S, LIMIT_S):
        termination._asked_at = time.monotonic() - seconds
        left_s = LIMIT_S - termination.seconds - termination.reports_s
        assert left_s >= FAREWELL_S - 0.01 or (termination.reports_s == 0.0 and seconds > SAVED_S)
    assert LIMIT_S < GRACE_S


def _catches_sigterm(status: str) -> bool:
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert found is not None
    return bool(int(found.group(1), 16) & 1 << (signal.SIGTERM - 1))


def test_a_forked_child_of_user_code_ends_at_sigterm_without_its_worker(tmp_path: Path) -> None:
    code = """
import os, signal, threading
from elasticdl.activities import ActivityClock
from elasticdl.worker.termination import Termination
termination = Termination(ActivityClock())
termination.install()
child = os.fork()
if child == 0:
    threading.Event().wait()
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), termination.is_asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["-15", "False"]


def test_a_worker_imports_little_before_it_catches_sigterm() -> None:
    """Each millisecond of these imports is one in which SIGTERM kills it at once."""
    program = "import sys, elasticdl.worker.__main__; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"runpy", "socket", "json", "inspect", "pkgutil", "elasticdl.cluster.local.standby"} & {
        *run.stdout.split()
    }
