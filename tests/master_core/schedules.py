"""Schedules of what can happen to a simulated job: how they are drawn, played to the end, and what must be so then."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from core_simulation import SimJob
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from elasticdl.master.core import overview
from elasticdl_client.job_series import SeriesPoint

Schedule = list[tuple[str, int]]
Job = TypeVar("Job", bound=SimJob)

UNHURRIED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True
)


def schedules_of(actions: Sequence[str]) -> st.SearchStrategy[Schedule]:
    """Actions, each with a number that chooses its target and its kind."""
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 1000)), min_size=60, max_size=400)


def happen(job: SimJob, action: str, pick: int) -> None:
    """One thing happens that can happen to every job."""
    living = job.living()
    worker = living[pick % len(living)] if living else None
    match action:
        case "start pod":
            job.start_pod(pick)
        case "shell":
            job.shell_work(pick)
        case "deliver" | "deliver again":
            job.deliver(pick, again=action == "deliver again")
        case "second":
            job.pass_time(1)
        case "long time":
            job.pass_time(5 + pick % 90)
        case "scale":
            fewest = job.settings.min_workers if job.settings.has_groups else 0
            job.scale(fewest + pick % 5)
        case "restart master":
            job.restart_master()
        case _ if worker is None:
            pass
        case "request":
            job.request(worker)
        case "step":
            job.step(worker, pick)
        case "kill worker":
            job.end_pod(worker.pod, ("Killed", "Preempted", "Evicted")[pick % 3])
        case "worker fails":
            if pick % 8 == 0:
                job.end_pod(worker.pod, "Error")
        case "worker leaves":
            job.leave(worker)
        case "stop worker":
            worker.is_stopped = True
        case "continue worker":
            for one in living:
                one.is_stopped = one.is_leaving
        case _:
            raise AssertionError(action)


def play(job: Job, schedule: Schedule, act: Callable[[Job, str, int], None]) -> None:
    """Lets everything happen, then lets the job end."""
    for action, pick in schedule:
        if job.end is not None:
            break
        act(job, action, pick)
    if job.end is None:
        job.drain()
    assert job.end is not None
    assert job.end.exit_code == 0, job.end
    core = job.job
    point = overview.series_point(core._state, core._work, core._fleet, core._accounting, core._unix_now)
    assert point == SeriesPoint.of(core.status(), core._unix_now)
    assert any(re.match(r"Evaluation metrics\[step=\d+\]: ", line) for line in job.log)


def check_coverage(job: SimJob, epoch: int, skipped: int = 0) -> None:
    """The numbers of an epoch in the log, counted from 0: records = samples + filtered - augmented."""
    slices = job.job._work.tasks.slices
    made = [len(shard) if job.feed is None else job.feed(task) for task, shard in enumerate(slices)]
    records = sum(len(shard) for shard in slices)
    counts = {
        "skipped": skipped,
        "filtered": sum(max(0, len(shard) - samples) for shard, samples in zip(slices, made, strict=True)),
        "augmented": sum(max(0, samples - len(shard)) for shard, samples in zip(slices, made, strict=True)),
    }
    assert records == sum(made) + counts["filtered"] - counts["augmented"]
    committed = records - skipped - counts["filtered"]
    expected = f"Epoch {epoch + 1}: records {records}, committed {committed}, repeated 0, lost 0"
    expected += "".join(f", {name} {count}" for name, count in counts.items() if count)
    lines = [line for line in job.log if line.startswith(f"Epoch {epoch + 1}: records")]
    assert lines[-1] == expected, lines
    told = [line for line in job.log if line.startswith("feed makes ")]
    assert bool(told) == bool(counts["filtered"] + counts["augmented"])
