"""Random schedules of everything that can happen to a job: no record is lost, none is counted twice, it ends."""

from __future__ import annotations

import re

import pytest
from core_simulation import SimWorker, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticdl.master.core.settings import JobSettings, NanPolicy
from elasticdl.master.core.values import Lease, Phase, Role, Shard, TaskType

SHARDS = (Shard("a", 0, 21), Shard("b", 0, 8))
RECORDS = 29

ACTIONS = [
    *["start pod"] * 4,
    *["request"] * 6,
    *["step"] * 24,
    *["deliver"] * 12,
    "deliver again",
    *["shell"] * 4,
    "shell fails",
    *["second"] * 3,
    "long time",
    "kill worker",
    "kill ps",
    "worker fails",
    "worker leaves",
    "ps leaves",
    "out of memory",
    "node lost",
    "blocked",
    "stop worker",
    "continue worker",
    "restart master",
]


def act(world: World, action: str, pick: int) -> None:
    """One thing happens."""
    living = world.living()
    worker: SimWorker | None = living[pick % len(living)] if living else None
    match action:
        case "start pod":
            world.start_pod(pick)
        case "shell" | "shell fails":
            world.shell_work(pick, fail=action == "shell fails")
        case "deliver" | "deliver again":
            world.deliver(pick, again=action == "deliver again")
        case "second":
            world.pass_time(1)
        case "long time":
            world.pass_time(5 + pick % 90)
        case "restart master":
            world.restart_master()
        case "kill ps":
            servers = [pod for pod in world.pods.values() if pod.role is Role.PS and pod.phase is Phase.RUNNING]
            if servers and world.losses < 4:
                world.end_pod(servers[pick % len(servers)], "Killed")
        case "ps leaves":
            if world.ps and world.losses < 4:
                world.leave_ps(list(world.ps.values())[pick % len(world.ps)])
        case "blocked":
            world.block(pick)
        case "node lost" | "out of memory":
            pods = [pod for pod in world.pods.values() if pod.phase is Phase.RUNNING]
            if pods and world.losses < 4:
                world.end_pod(pods[pick % len(pods)], "NodeLost" if action == "node lost" else "OOMKilled")
        case _ if worker is None:
            pass
        case "request":
            world.request(worker)
        case "step":
            world.step(worker, pick)
        case "kill worker":
            world.end_pod(worker.pod, ("Killed", "Preempted", "Evicted")[pick % 3])
        case "worker fails":
            if pick % 8 == 0:
                world.end_pod(worker.pod, "Error")
        case "worker leaves":
            world.leave(worker)
        case "stop worker":
            worker.is_stopped = True
        case "continue worker":
            for one in living:
                one.is_stopped = one.is_leaving


def play(job: JobSettings, schedule: list[tuple[str, int]], filtered: bool, bad: frozenset[int]) -> None:
    """Lets everything happen, then lets the job end, and looks at what the model holds.

    Args:
        job: what is run.
        schedule: what happens to it.
        filtered: tasks have fewer minibatches than their records would make.
        bad: the gradients of these minibatches, counted over epochs and tasks in turn, are not finite.
    """
    world = World(
        job,
        SHARDS,
        (lambda task: task % 3) if filtered else None,
        lambda epoch, task, n: 12 * epoch + 2 * task + n in bad,
    )
    for action, pick in schedule:
        if world.end is not None:
            break
        act(world, action, pick)
    if world.end is None:
        world.drain()
    assert world.end is not None
    assert world.end.exit_code == 0, world.end
    epochs = max(1, job.num_epochs)
    lines = [line for line in world.log if line.startswith("Epoch") and "records" in line]
    for epoch in range(1, epochs + 1):
        newest = [line for line in lines if line.startswith(f"Epoch {epoch}:")][-1]
        skipped = records_of_bad(world, epoch - 1)
        end = f", skipped {skipped}" if skipped else ""
        assert newest == f"Epoch {epoch}: records {RECORDS}, committed {RECORDS - skipped}, repeated 0, lost 0{end}", (
            lines
        )
    if not world.losses:
        assert not any("open again" in line for line in world.log)
    for server in world.ps.values():
        assert server.num_applies == sum(len(names) for names in server.names.values())
    assert any(re.match(r"Evaluation metrics\[step=\d+\]: ", line) for line in world.log)


def records_of_bad(world: World, epoch: int) -> int:
    """Records of the minibatches of an epoch whose gradients are not finite."""
    total = 0
    for task, shard in enumerate(world.job._work.tasks.slices):
        size = world.num_minibatches(Lease(0, TaskType.TRAINING, epoch, task, shard))
        total += sum(min(3, len(shard) - 3 * n) for n in range(size) if world.is_bad(epoch, task, n))
    return total


JOBS = st.builds(
    JobSettings,
    job_name=st.just("j"),
    num_workers=st.integers(1, 3),
    num_ps=st.integers(1, 3),
    has_validation_data=st.just(True),
    minibatch_size=st.just(3),
    num_minibatches_per_task=st.just(2),
    num_epochs=st.integers(1, 3),
    evaluation_steps=st.sampled_from([0, 7]),
    checkpoint_dir=st.sampled_from(["", "checkpoints"]),
    checkpoint_steps=st.sampled_from([0, 4]),
    output=st.sampled_from(["", "export"]),
    max_task_failures=st.just(10_000),
    seed=st.integers(0, 3),
    nan_policy=st.just(NanPolicy.SKIP),
)
BAD = st.frozensets(st.integers(0, 35), max_size=8)
SCHEDULES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), min_size=60, max_size=400)
UNHURRIED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True
)


@pytest.mark.ci
@settings(UNHURRIED, max_examples=150)
@given(job=JOBS, schedule=SCHEDULES, filtered=st.booleans(), bad=BAD)
def test_whatever_happens_every_record_is_committed_exactly_once(
    job: JobSettings, schedule: list[tuple[str, int]], filtered: bool, bad: frozenset[int]
) -> None:
    play(job, schedule, filtered, bad)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(UNHURRIED, max_examples=3000, derandomize=False)
@given(job=JOBS, schedule=SCHEDULES, filtered=st.booleans(), bad=BAD)
def test_whatever_happens_for_long_every_record_is_committed_exactly_once(
    job: JobSettings, schedule: list[tuple[str, int]], filtered: bool, bad: frozenset[int]
) -> None:
    play(job, schedule, filtered, bad)
