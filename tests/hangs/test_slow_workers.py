"""A worker's reading of its processors, and a job in which one worker is throttled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl.rpc.resource_use import cpu_use
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.job_events import EventKind
from tests.chaos.job import REPOSITORY, LocalJob
from tests.explain.explained import the_trouble
from tests.hangs import busy_digits
from tests.hangs.control_group import cpu_quota
from tests.hangs.job_events import events_of

STAT = "cpu  10 0 20 300 4 0 1 {steal} 0 0\ncpu0 10 0 20 300 4 0 1 {steal} 0 0\n"
V1 = ("3:cpu,cpuacct:/pod\n", "cpu", "nr_periods 9\nnr_throttled 4\nthrottled_time 2500000000\n")
V2 = ("0::/pod\n", "", "usage_usec 7\nnr_periods 9\nnr_throttled 4\nthrottled_usec 2500000\n")


@pytest.mark.parametrize(("group", "controller", "stat"), [V1, V2])
def test_throttling_steal_and_load_are_what_the_kernel_says(
    tmp_path: Path, group: str, controller: str, stat: str
) -> None:
    directory = tmp_path / "sys/fs/cgroup" / controller / "pod"
    directory.mkdir(parents=True)
    (directory / "cpu.stat").write_text(stat)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    (tmp_path / "proc/loadavg").write_text("3.25 2.10 1.00 2/345 6789\n")
    (tmp_path / "proc/stat").write_text(STAT.format(steal=100))
    use = cpu_use(tmp_path)
    assert use.throttled_seconds == pytest.approx(2.5)
    assert use.steal_seconds > 0
    assert use.load == 3.25
    assert use.cores >= 1


def test_a_kernel_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    use = cpu_use(tmp_path)
    assert (use.throttled_seconds, use.steal_seconds, use.load) == (0.0, 0.0, 0.0)


def test_a_process_above_its_limit_sees_how_long_it_was_throttled() -> None:
    program = (
        "import os, sys\n"
        "from elasticdl.rpc.resource_use import cpu_use\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "while (throttled := cpu_use().throttled_seconds) == 0: pass\n"
        "print(throttled)"
    )
    with cpu_quota(0.02) as procs:
        done = subprocess.run([sys.executable, "-c", program, str(procs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


@pytest.mark.full  # three minutes: workers are compared over that time
def test_a_throttled_worker_is_an_event_with_the_evidence(digits: Path, tmp_path: Path) -> None:
    job = LocalJob(
        tmp_path / "job",
        {
            "job_name": "slow",
            "model_zoo": REPOSITORY,
            "model_def": f"{busy_digits.__name__}.custom_model",
            "training_data": digits,
            "minibatch_size": 32,
            "num_epochs": 1000,
            "num_workers": 3,
            "num_ps_pods": 1,
            "straggler_action": "replace",
        },
        environment={"BUSY_S": "0.02"},
        pace_s=0.002,
    ).start()
    try:
        job.wait_for_version(50)
        job.wait_until("three workers", lambda: len(job.pods(Role.WORKER)) == 3)
        victim = job.pods(Role.WORKER)[-1]
        with cpu_quota(0.05) as procs:
            procs.write_text(str(victim.pid))
            job.wait_until("the successor", lambda: job.pods(Role.WORKER)[-1].index == 3, 400)
        (event,) = events_of(job, EventKind.WORKER_SLOW)
        assert event.subject == f"worker-{victim.index}"
        assert float(event.details["ratio"]) > 1.5
        assert float(event.details["throttled"]) > 0.1
        assert [given_up.cause for given_up in events_of(job, EventKind.POD_GIVEN_UP)] == [event.number]
        diagnosis = the_trouble(job.job_dir, Trouble.WORKER_THROTTLED)
        assert (diagnosis.subjects, diagnosis.evidence["throttled"]) == ((event.subject,), event.details["throttled"])
        job.wait_until(
            "the successor in the events",
            lambda: "worker-3" in the_trouble(job.job_dir, Trouble.WORKER_THROTTLED).done,
        )
    finally:
        job.end()
