"""`elasticdl chaos` on real local jobs: they stand it, the table is right, and nothing of a fault stays."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.job_dir import read_journal
from elasticdl_client.job_events import EventKind
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import LEASE_TIMEOUT_S, assert_exact
from tests.lines import next_line
from tests.master.small_disk import small_disk

JOB = replace(NUMPY_DIGITS, num_epochs=10)
NEVER = "10h"


def chaos(job: LocalJob, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "elasticdl_client.main", "chaos", JOB.name, f"--job_dir={job.job_dir}", *flags]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LocalJob]:
    job = JOB.local_job(tmp_path / "job", JOB.make_data(tmp_path), checkpoint_steps=10, lease_timeout=LEASE_TIMEOUT_S)
    job.pace_s = 0.02  # longer than all faults, up to `hurry`, in few minibatches: the rest costs processor time
    yield job
    job.end()


@pytest.mark.timeout(400)
def test_a_job_stands_kills_of_every_role_and_a_stopped_worker(running: LocalJob) -> None:
    running.start().wait_for_version(1)
    done = chaos(running, "--kill=worker,ps,master", "--stop=worker", "--stop_for=4s", "--every=5s", "--for=20s",
                 "--yes", "-o=json")  # fmt: skip
    out, err = done.communicate(timeout=300)
    assert done.returncode == 0, err + running.story()
    found = json.loads(out)
    assert found["complaints"] == []
    assert found["records"]["lost"] == found["records"]["repeated"] == 0
    assert {name: (one["injected"], one["recovered"]) for name, one in found["recovery"].items()} == dict.fromkeys(
        ("kill master", "kill ps", "kill worker", "stop worker"), (1, 1)
    )
    running.hurry()
    assert running.wait() == 0, running.story()
    assert_exact(running, JOB)
    kinds = [event.kind for event in read_journal(running.job_dir).history.events]
    assert kinds.count(EventKind.MASTER_RESTARTED) == 1
    assert kinds.count(EventKind.POD_LOST) == 2


@pytest.mark.timeout(300)
def test_a_disk_that_others_use_is_not_filled_and_after_ctrl_c_a_stopped_pod_continues_and_the_table_is_printed(
    running: LocalJob,
) -> None:
    running.start().wait_until("a checkpoint", (running.job_dir / "checkpoints").is_dir)
    refused = chaos(running, "--fill_disk", "--yes")
    out, err = refused.communicate(timeout=60)
    assert refused.returncode == 2, out + err
    assert "--fill_disk would fill the file system of" in err
    done = chaos(running, "--stop=ps", f"--stop_for={NEVER}", f"--every={NEVER}", f"--for={NEVER}", "--yes")
    (server,) = running.victims(Role.PS)
    assert "stop ps: ps-0" in next_line(done)
    running.wait_until("the stop of ps-0", lambda: state_of(server.pid) == "T")  # each thread stops by itself
    done.send_signal(signal.SIGINT)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 128 + signal.SIGINT, out + err
    assert re.search(r"^stop ps   1 +[01] ", out, re.MULTILINE), out  # a server that continues may train on at once
    running.wait_until("ps-0 to continue", lambda: state_of(server.pid) != "T")
    running.hurry()
    assert running.wait() == 0, running.story()
    assert_exact(running, JOB)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", ["ParameterServerStrategy", pytest.param("AllReduceStrategy", marks=pytest.mark.full)]
)
def test_a_full_disk_of_the_checkpoints_is_freed_and_the_next_checkpoint_is_the_recovery(
    strategy: str, running: LocalJob, tmp_path: Path
) -> None:
    has_servers, job = strategy == "ParameterServerStrategy", replace(JOB, num_epochs=6)  # each step writes
    running.flags |= {"distribution_strategy": strategy, "num_ps_pods": int(has_servers), "num_epochs": 6}
    with small_disk(tmp_path / "disk", 32 << 10) as disk:
        # Some while the disk is full; none is removed: that would make room for the next.
        running.flags |= {"checkpoint_dir": disk, "checkpoint_steps": 3, "keep_checkpoint_max": 0}
        running.start().wait_for_version(12)
        done = chaos(running, "--fill_disk", "--stop_for=3s", "--every=4s", "--for=4s", "--yes", "-o=json")
        out, err = done.communicate(timeout=200)
        assert done.returncode == 0, err + running.story()
        assert json.loads(out)["recovery"]["fill disk"]["recovered"] == 1
        assert not list(disk.glob(".elasticdl-chaos*"))
        running.hurry()
        assert running.wait() == 0, running.story()
    assert_exact(running, job)
    events = read_journal(running.job_dir).history.events
    assert EventKind.CHECKPOINT_FAILED in [event.kind for event in events], events


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
