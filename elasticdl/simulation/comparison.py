"""A job on a simulated cluster, elastic and as a gang: its duration, its cost and its losses.

A job without elasticity runs as a gang: all of its pods or none of them; the loss of a pod ends all, and the job starts
again from its newest checkpoint once there is room for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.master.settings import settings_of
from elasticdl.protocol import Role, Shard
from elasticdl.simulation.cluster import HOUR, Change, SimulatedCluster, SimulatedPod, Timeline
from elasticdl.simulation.job import SimulatedJob, Workload
from elasticdl.simulation.scenario import Amounts, Scenario, amounts, read_scenario
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes.flags import worker_priorities

LIMIT_S = 90 * 24 * HOUR


@dataclass(frozen=True, slots=True)
class Estimate:
    """Result of a simulated job.

    Attributes:
        seconds: Time from the submission to the end; None if it does not end within `LIMIT_S`.
        cost: Cost of all pods: each has its share of the price of its node.
        mean_workers: Mean number of running workers over the whole time.
        workers_lost: Number of workers that were interrupted, preempted or failed.
        records_again: Number of records computed more than once, or wasted.
        starts: Number of starts of the whole job.
    """

    seconds: float | None
    cost: float
    mean_workers: float
    workers_lost: int
    records_again: int
    starts: int


def elastic(workload: Workload, scenario: Scenario, seed: int, limit_s: float = LIMIT_S) -> Estimate:
    """Run a job under the real core.

    Raises:
        JobError: The core fails the job.
    """
    timeline = Timeline()
    cluster = SimulatedCluster(scenario, timeline, seed)
    job = SimulatedJob(workload, scenario, cluster, timeline)
    if cluster.could_ever_hold(pods_of(workload, num_workers=1)):
        job.begin()
        timeline.run_until(lambda: job.end is not None, limit_s)
    if job.end is not None and job.end.exit_code:
        raise JobError(f"The job would fail after {timeline.now:.0f} s: {job.end.message}")
    job.count_seconds()
    again = job.num_again * workload.settings.minibatch_size
    mean = job.worker_seconds / timeline.now if timeline.now else 0.0
    seconds = timeline.now if job.end is not None else None
    return Estimate(seconds, cluster.total_cost(), mean, job.num_lost, again, 1)


def gang(workload: Workload, scenario: Scenario, seed: int, limit_s: float = LIMIT_S) -> Estimate:
    """Run the same job as a gang on the same cluster."""
    timeline = Timeline()
    cluster = SimulatedCluster(scenario, timeline, seed)
    job = _Gang(workload, scenario, cluster, timeline)
    if cluster.could_ever_hold(pods_of(workload, workload.settings.num_workers)):
        job.wait()
        timeline.run_until(lambda: job.has_ended, limit_s)
    again = round(job.again * workload.settings.minibatch_size)
    mean = job.worker_seconds / timeline.now if timeline.now else 0.0
    seconds = timeline.now if job.has_ended else None
    return Estimate(seconds, cluster.total_cost(), mean, job.num_lost, again, job.num_starts)


def pods_of(workload: Workload, num_workers: int) -> list[tuple[Amounts, int]]:
    """Return the resources and the number of the job's pods, by role."""
    return [(workload.requests[Role.PS], workload.settings.num_ps), (workload.requests[Role.WORKER], num_workers)]


class _Gang:
    """A job whose pods run all together or not at all."""

    def __init__(self, workload: Workload, scenario: Scenario, cluster: SimulatedCluster, timeline: Timeline) -> None:
        self._workload = workload
        self._scenario = scenario
        self._cluster = cluster
        self._timeline = timeline
        self._pods: list[SimulatedPod] = []
        self._num_running = 0
        self._run = 0  # incremented at each start and each end
        self._since: float | None = None  # since when it trains; None if it does not
        self._pace = 0.0  # minibatches per second, of all workers
        self._done = 0.0  # minibatches in the newest checkpoint
        settings = workload.settings
        tasks = [-(-len(shard) // settings.minibatch_size) for shard in workload.shards]
        in_all = sum(tasks) * settings.num_epochs
        limits = [steps for steps in (in_all, settings.max_step) if steps > 0]
        self._planned = min(limits)
        self.again = 0.0
        self.num_lost = 0
        self.num_starts = 0
        self.worker_seconds = 0.0
        self.has_ended = False
        cluster.on_room.append(self.wait)

    def wait(self) -> None:
        """Start if there is room for all pods."""
        if self._pods or self.has_ended:
            return
        slots = [(role, slot) for role, number in self._numbers() for slot in range(number)]
        pods = [self._pod(role, slot) for role, slot in slots]
        self._pods, self._num_running, self._run = pods, 0, self._run + 1
        if not self._cluster.create_all(pods):
            self._pods = []
        else:
            self.num_starts += 1

    def _numbers(self) -> list[tuple[Role, int]]:
        settings = self._workload.settings
        return [(Role.PS, settings.num_ps), (Role.WORKER, settings.num_workers)]

    def _pod(self, role: Role, slot: int) -> SimulatedPod:
        priority = self._workload.priorities(role, slot)
        requests = self._workload.requests[role]
        return SimulatedPod(f"{role}-{slot}", requests, priority, self._changes, may_fail=role is Role.WORKER)

    def _changes(self, pod: SimulatedPod, change: Change, reason: str) -> None:
        if pod not in self._pods:
            return
        if change is Change.STARTED:
            self._num_running += 1
            if self._num_running == len(self._pods):
                self._timeline.after(self._scenario.start, self._if_alive(self._train))
        elif change in (Change.CUT_OFF, Change.ENDED):
            self.num_lost += pod.name.startswith(Role.WORKER)
            self._break()

    def _if_alive(self, action: Callable[[], None]) -> Callable[[], None]:
        run = self._run
        return lambda: action() if run == self._run else None

    def _train(self) -> None:
        workers = [pod for pod in self._pods if pod.name.startswith(Role.WORKER)]
        speeds = [pod.node.pool.speed for pod in workers if pod.node is not None]
        alone, speed = sum(speeds) / self._workload.step_s, self._workload.speed(self._timeline.now, len(workers))
        self._since, self._pace = self._timeline.now, alone * speed
        self._timeline.after((self._planned - self._done) / self._pace, self._if_alive(self._finish))

    def _break(self) -> None:
        """Handle a lost pod: lose the work that the newest checkpoint lacks, and end all pods."""
        if self._since is not None:
            self._count()
            trained = (self._timeline.now - self._since) * self._pace
            kept = self._kept(trained)
            self.again += trained - kept
            self._done += kept
        self._end_all()

    def _kept(self, trained: float) -> float:
        """Return how many of the minibatches trained since the start are in a checkpoint."""
        settings = self._workload.settings
        if not settings.checkpoint_dir:
            return 0.0
        every = settings.checkpoint_steps or settings.checkpoint_interval * self._pace
        return trained // every * every

    def _count(self) -> None:
        assert self._since is not None
        workers = self._workload.settings.num_workers
        self.worker_seconds += workers * (self._timeline.now - self._since + self._scenario.start)

    def _end_all(self) -> None:
        pods, self._pods, self._since, self._run = self._pods, [], None, self._run + 1
        for pod in pods:
            self._cluster.end(pod, "Deleted")

    def _finish(self) -> None:
        self._count()
        self.has_ended = True
        self._end_all()


def estimates_of(spec: JobSpec, path: str, step_s: float, num_records: int) -> dict[str, Estimate]:
    """Estimate a job with parameter servers, elastic and as a gang, which has the most workers of a range.

    Args:
        spec: Specification of the job.
        path: Path of the file that describes the cluster.
        step_s: Seconds of a worker for a minibatch on a node of speed 1.
        num_records: Number of records of the training data.

    Raises:
        FlagError: The file, or a resource, is invalid.
        JobError: The master would fail the job.
    """
    scenario, seed = read_scenario(path), spec.seed
    settings = dataclasses.replace(
        settings_of(spec),
        has_validation_data=False,
        evaluation_steps=0,
        evaluation_throttle=0.0,
        output="",
        checkpoint_dir_for_init="",
    )
    classes = worker_priorities(spec.worker_pod_priority, spec.num_workers)

    def priority(role: Role, slot: int) -> int:
        of_worker = classes[min(slot, spec.num_workers - 1)]
        return scenario.priorities.get(spec.ps_pod_priority if role is Role.PS else of_worker, 0)

    limit = scenario.steps_per_server * spec.num_ps_pods * step_s or float("inf")  # in workers at full speed

    requests = {
        Role.PS: _requests(spec.ps_resource_request, spec.ps_resource_limit),
        Role.WORKER: _requests(spec.worker_resource_request, spec.worker_resource_limit),
    }
    workload = Workload(
        settings,
        (Shard("records", 0, num_records),),
        step_s,
        requests,
        priority,
        speed=lambda at, num_workers: min(1.0, limit / num_workers),
    )
    whole = dataclasses.replace(settings, num_workers=max(spec.num_workers, spec.max_workers))
    return {
        "elastic": elastic(workload, scenario, seed),
        "gang": gang(dataclasses.replace(workload, settings=whole), scenario, seed),
    }


def _requests(request: str, limit: str) -> Amounts:
    """Return the resources of a node that a pod takes: without a request, Kubernetes uses the limit as the request."""
    return {**amounts(limit), **amounts(request)}
