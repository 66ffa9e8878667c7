"""Jobs on this machine whose user code hangs: the event names the line, and every record is trained once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.explain.slowness import HangPart
from elasticdl_client.job_events import EventKind, JobEvent
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.scenarios import coverage_of
from tests.explain.explained import the_trouble
from tests.hangs import hanging_digits, hanging_script, loader_script
from tests.hangs.frozen_thread import frozen_main_thread
from tests.hangs.job_events import events_of

LIMIT_S = 6  # in a minibatch; on a loaded machine a start takes some seconds
PS = {"num_ps_pods": 1}
GROUP = {"distribution_strategy": "AllReduceStrategy", "num_workers": 2}
ALONE = {**GROUP, "num_workers": 1}


def job_of(tmp_path: Path, data: Path, hangs_in: str, **flags: object) -> LocalJob:
    """A job whose minibatches may take `LIMIT_S`."""
    return LocalJob(
        tmp_path / "job",
        {
            "job_name": "hang",
            "model_zoo": REPOSITORY,
            "model_def": f"{hanging_digits.__name__}.custom_model",
            "training_data": data,
            "minibatch_size": 32,
            "num_epochs": 1,
            "num_workers": 1,
            "step_timeout": LIMIT_S,
            **flags,
        },
        environment={"HANG_IN": hangs_in, "HANG_MARK": str(tmp_path / "mark")},
    )


def line_of(event: JobEvent) -> str:
    """The source line that an event says is being executed."""
    found = re.fullmatch(r"(.+):(\d+) in (\w+)", str(event.details["where"]))
    assert found, event
    assert str(event.details["where"]) in str(event.details["stacks"])
    return Path(found[1]).read_text().splitlines()[int(found[2]) - 1].strip()


def assert_exact(job: LocalJob, num_records: int) -> None:
    assert job.wait(120) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [
        (num_records, num_records, 0, 0)
    ], job.story()


@pytest.mark.parametrize(
    ("hangs_in", "flags", "lines"),
    [
        ("model", PS, ("threading.Event().wait()",)),
        ("feed", ALONE, ("while True:  # an endless loop", "pass")),
        ("feed_sleeps", PS, ("time.sleep(3600)",)),
        ("loss", PS, ("lock.acquire()  # a deadlock",)),
        ("loss", GROUP, ("lock.acquire()  # a deadlock",)),
        ("callback", PS, ("threading.Event().wait()",)),
    ],
)
def test_the_event_names_the_line_and_no_record_is_lost(
    digits: Path, tmp_path: Path, hangs_in: str, flags: dict[str, object], lines: tuple[str, ...]
) -> None:
    job = job_of(tmp_path, digits, hangs_in, **flags).start()
    assert_exact(job, 1437)
    event = events_of(job, EventKind.WORKER_HUNG)[0]  # a machine that stands still for so long makes another one
    assert line_of(event) in lines
    assert event.details["threshold"] == LIMIT_S
    if flags is not GROUP:
        assert events_of(job, EventKind.POD_GIVEN_UP)[0].cause == event.number
    else:
        assert event.number in [broken.cause for broken in events_of(job, EventKind.GROUP_BROKEN)]
    diagnosis = the_trouble(job.job_dir, Trouble.CODE_HANGS)
    assert event.number in diagnosis.events
    assert diagnosis.evidence["part"] == hangs_in.partition("_")[0]
    if flags is not GROUP:
        assert "worker-1" in diagnosis.done
        assert diagnosis.cost.slot_seconds > 0
    else:
        assert "the group formed again" in diagnosis.done.lower()


@pytest.mark.parametrize("hangs_in", ["model", "sample"])
def test_a_process_that_hangs_before_it_is_ready_is_named_and_its_pod_replaced(
    digits: Path, tmp_path: Path, hangs_in: str
) -> None:
    job = job_of(tmp_path, digits, hangs_in, **ALONE, processes_per_worker=2).start()
    assert_exact(job, 1437)
    event = events_of(job, EventKind.WORKER_HUNG)[0]
    assert line_of(event) == "threading.Event().wait()"
    process = re.match(r"process [01]: starting for", event.message)
    assert process is not None, event
    given_up = events_of(job, EventKind.POD_GIVEN_UP)[0]
    assert (given_up.cause, given_up.message) == (event.number, f"{process[0][:9]} is stuck")
    diagnosis = the_trouble(job.job_dir, Trouble.CODE_HANGS)
    assert event.number in diagnosis.events
    assert process[0][:9] in diagnosis.seen


def test_a_script_that_hangs_is_replaced(tmp_path: Path) -> None:
    command = f"{sys.executable} {hanging_script.__file__} {tmp_path / 'mark'} 100"
    flags = {"job_name": "script", "job_command": command, "num_workers": 1, "step_timeout": LIMIT_S}
    job = LocalJob(tmp_path / "job", flags).start()
    assert_exact(job, 100)
    event = events_of(job, EventKind.WORKER_HUNG)[0]
    assert line_of(event) == "threading.Event().wait()"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_a_loader_that_hangs_is_named_by_its_line(tmp_path: Path, method: str) -> None:
    command = f"{sys.executable} {loader_script.__file__} {tmp_path / 'mark'} 100 {method}"
    flags = {"job_name": "loader", "job_command": command, "num_workers": 1, "step_timeout": LIMIT_S}
    job = LocalJob(tmp_path / "job", flags).start()
    assert_exact(job, 100)
    event = events_of(job, EventKind.WORKER_HUNG)[0]
    assert str(event.details["where"]).startswith(f"{loader_script.__file__}:")
    assert line_of(event) in ("while True:", "signal.pause()")
    assert str(event.details["where"]).endswith(" in __getitem__")
    assert the_trouble(job.job_dir, Trouble.CODE_HANGS).evidence["part"] == HangPart.DATASET


def test_a_member_that_stays_in_a_collective_is_named_and_replaced(digits: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, digits, "pause", **GROUP, num_epochs=4, collective_timeout=2)
    job.pace_s = 0.01
    mark, over = tmp_path / "mark", tmp_path / "mark.over"
    os.mkfifo(over)
    job.start()
    job.wait_until("a member that all others wait for", lambda: mark.exists() and bool(mark.read_text()))
    inside = next(pod for pod in job.pods(Role.WORKER) if str(pod.pid) != mark.read_text())
    times: list[tuple[float, float]] = []
    job.wait_until("the other member to wait for it", lambda: is_at_rest(inside.pid, times))
    with frozen_main_thread(inside.pid):
        over.write_bytes(b"")  # opening the pipe lets its reader continue
        job.wait_until("its successor", lambda: any(pod.index == 2 for pod in job.pods(Role.WORKER)))
    job.hurry()
    assert job.wait(120) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(1437, 1437, 0, 0)] * 4
    event = events_of(job, EventKind.WORKER_HUNG)[0]
    assert event.subject == f"worker-{inside.index}"
    assert event.details["activity"] == "world"
    diagnosis = the_trouble(job.job_dir, Trouble.COLLECTIVE_HANGS)
    assert event.number in diagnosis.events
    assert diagnosis.evidence["part"] == HangPart.COLLECTIVE
    assert "worker-2" in diagnosis.done


def is_at_rest(pid: int, seen: list[tuple[float, float]]) -> bool:
    """Whether the main thread of a process has slept for a second; `seen` has when it was last seen otherwise."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    spent = float(fields[11]) + float(fields[12])
    if not seen or seen[-1][1] != spent or fields[0] == "R":  # it may wait for a processor
        seen.append((time.monotonic(), spent))
    return time.monotonic() - seen[-1][0] > 1


def test_a_stopped_worker_has_no_stacks_and_the_event_says_why(digits: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, digits, "loss", num_ps_pods=1, num_workers=1, step_timeout=600, lease_timeout=4).start()
    job.wait_until("a worker that stands still", (tmp_path / "mark").exists)
    worker = job.pods(Role.WORKER)[0]
    os.kill(worker.pid, signal.SIGSTOP)
    job.wait_until("the event", lambda: bool(events_of(job, EventKind.WORKER_HUNG)))
    (event,) = events_of(job, EventKind.WORKER_HUNG)
    assert event.details["state"] == "stopped by SIGSTOP"
    assert event.details["stacks"] == ""
    assert [lost.cause for lost in events_of(job, EventKind.LEASE_LOST)][:1] == [event.number]
    os.kill(worker.pid, signal.SIGKILL)
    assert_exact(job, 1437)
    assert the_trouble(job.job_dir, Trouble.WORKER_SILENT).evidence["state"] == "stopped by SIGSTOP"
