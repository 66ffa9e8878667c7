"""The shell of a simulated master: its commands executed, its disk, its mail, its pods; no process and no clock."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from simulated_processes import Names, SimPod, SimPs, SimWorker

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Lease, PodState
from elasticdl.protocol import Role, Shard


class SimShell(ABC):
    """Executes what the core commands."""

    def __init__(
        self,
        settings: JobSettings,
        shards: Sequence[Shard],
        feed: Callable[[int], int] | None = None,
        is_bad: Callable[[int, int, int], bool] = lambda epoch, task, n: False,
    ) -> None:
        """Makes a job.

        Args:
            feed: how many samples it makes of a task, by task; None: one a record.
            is_bad: whether the gradient of (epoch, task, n) is not finite.
        """
        self.is_bad = is_bad
        self.settings = settings
        self.shards = tuple(shards)
        self.feed = feed
        self.now = 0.0
        self.generation = 1
        self.job = Job(settings, 1, 0.0)
        self.disk: dict[str, Any] = {}  # no later event may change it; few schedules read it
        self.written_at = 0.0
        self.pods: dict[str, SimPod] = {}
        self.ps: dict[int, SimPs] = {}
        self.workers: list[SimWorker] = []
        self.calls: dict[int, Callable[[Any], None]] = {}
        self.mail: list[tuple[SimWorker | None, Callable[[int], e.Event], Callable[[Any], None]]] = []
        self.jobs_for_shell: list[c.Command | e.Event] = []
        self.checkpoints: dict[str, dict[int, tuple[Names, int]]] = {}
        self.num_calls = 0
        self.num_uids = 0
        self.log: list[str] = []
        self.end: c.EndJob | None = None
        self.grants: dict[int, Lease] = {}
        self.losses = 0
        self.num_failed_checkpoints = 0
        self.num_wanted = settings.num_workers + settings.has_evaluator
        self.wanted_since = 0.0
        self.wanted_seconds = 0.0  # until then, of all wanted workers
        self.memory_factors: dict[tuple[Role, int], float] = {}  # of the newest pod of each slot
        self._persist()
        self.tell(e.PodsListed(()))

    @abstractmethod
    def begin_process(self, pod: SimPod, number: int) -> None:
        """A pod runs; the number is no other process's."""

    @abstractmethod
    def leave(self, worker: SimWorker) -> None:
        """A worker is asked to end."""

    @abstractmethod
    def check_ledger(self) -> None:
        """Holds after every event."""

    # The shell ------------------------------------------------------------------------------------------------------

    def tell(self, event: e.Event) -> None:
        if self.end is not None:
            return
        for command in self.job.handle(event, self.now):
            self.execute(command)
        self.check()
        if self.now - self.written_at >= 1.0:
            self._persist()

    def check(self) -> None:
        """Check what holds after every event."""
        self.job.validate_state()
        self.check_ledger()
        self.check_time()
        self.check_slots()

    def check_time(self) -> None:
        """The time of the wanted workers and servers is that of the wall, and no state has less than none."""
        now, settings = self.now + 0.3, self.settings
        wanted = self.wanted_seconds + self.num_wanted * settings.processes_per_worker * (now - self.wanted_since)
        workers, servers = self.job._accounting.worker_seconds(now), self.job._accounting.ps_seconds(now)
        assert abs(sum(workers.values()) - wanted) < 1e-3, workers
        assert abs(sum(servers.values()) - settings.num_own_servers * now) < 1e-3, servers
        assert min(*workers.values(), *servers.values()) >= 0.0, (workers, servers)
        assert workers["unknown"] == 0.0, workers

    def check_slots(self) -> None:
        """Every wanted worker lives, is planned, or has done its work; there are no others."""
        pods = self.job._fleet.pods
        if self.end is None and pods.is_listed and not self.job._ending.is_decided:
            assert {*pods._filled(Role.WORKER), *pods._done} == pods.worker_slots
            assert len(pods.worker_slots) == self.num_wanted

    def scale(self, num_workers: int) -> None:
        """The user wants another number of workers."""
        if self.end is not None or self.job._ending.is_decided:
            return
        num_processes = self.num_wanted * self.settings.processes_per_worker
        self.wanted_seconds += num_processes * (self.now - self.wanted_since)
        self.wanted_since, self.num_wanted = self.now, num_workers
        self.tell(e.ScaleRequested(num_workers))

    def _persist(self) -> None:
        self.disk = self.job.snapshot()
        self.written_at = self.now

    def execute(self, command: c.Command) -> None:
        match command:
            case c.Reply(call, answer):
                handler = self.calls.pop(call, None)
                assert handler is not None, f"answered twice or never asked: {command}"
                handler(answer)
            case c.Persist():
                self._persist()
            case c.CreatePod():
                self.create_pod(command)
            case c.DeletePod(name):
                if name in self.pods:
                    self.jobs_for_shell.append(command)
            case c.ListShards() | c.ReadAppliedSets() | c.SaveCheckpoint():
                self.jobs_for_shell.append(command)
            case c.Log(_, text):
                self.log.append(text)
            case c.EndJob():
                self.end = command

    def call(self, make: Callable[[int], e.Event], handler: Callable[[Any], None]) -> None:
        self.num_calls += 1
        self.calls[self.num_calls] = handler
        self.tell(make(self.num_calls))

    def shell_work(self, pick: int = 0, fail: bool = False) -> None:
        """Executes one of the commands that take time, and tells the core what came of it."""
        if not self.jobs_for_shell:
            return
        command = self.jobs_for_shell.pop(pick % len(self.jobs_for_shell))
        match command:
            case e.PodNotCreated():
                self.tell(command)
            case c.ListShards(kind):
                self.tell(e.ShardsListed(kind, self.shards))
            case c.DeletePod(name, grace_s):
                if name in self.pods:
                    self.delete_pod(self.pods[name], grace_s)
            case c.ReadAppliedSets(question, partition):
                reached = all(self._is_at(address.ps_id, address.incarnation) for address in partition)
                if fail or not reached:
                    self.tell(e.AppliedSetsUnreadable(question, "no answer"))
                else:  # the answer takes its time, and others report meanwhile
                    sets = {k: self.ps[k].applied() for k in self.ps}
                    self.jobs_for_shell.append(e.AppliedSetsRead(question, sets))
            case e.AppliedSetsRead():
                self.tell(command)
            case c.SaveCheckpoint(version, partition):
                reached = all(self._is_at(address.ps_id, address.incarnation) for address in partition)
                if fail or not reached:
                    self.num_failed_checkpoints += 1
                    self.tell(e.CheckpointFailed(version, "disk full"))
                else:
                    parts = {k: (copy.deepcopy(p.names), p.num_applies) for k, p in self.ps.items()}
                    self.checkpoints[f"version-{version}"] = parts
                    self.tell(e.CheckpointSaved(version, f"version-{version}"))

    def _is_at(self, ps_id: int, incarnation: int) -> bool:
        server = self.ps.get(ps_id)
        return server is not None and server.is_ready and server.incarnation == incarnation

    def restart_master(self) -> None:
        """The master is killed and starts again from what is on disk; the outstanding calls and commands are lost."""
        self.generation += 1
        self.calls.clear()
        self.jobs_for_shell.clear()
        for worker in self.workers:
            worker.has_request = False
        saved = json.loads(json.dumps(self.disk))
        self.job = Job.restore(self.settings, saved, self.generation, self.now)
        self.job.validate_state()
        self.tell(e.PodsListed(tuple(self._pod_event(pod) for pod in self.pods.values())))
        self.tell(e.ScaleRequested(self.num_wanted))  # it is written down where every life reads it

    # Pods -----------------------------------------------------------------------------------------------------------

    def _pod_event(self, pod: SimPod) -> e.PodChanged:
        return e.PodChanged(pod.name, pod.role, pod.index, pod.uid, pod.phase, pod.reason)

    def create_pod(self, command: c.CreatePod) -> None:
        place = (command.role, command.slot)
        before = self.memory_factors.get(place, 1.0)
        assert before <= command.memory_factor <= min(4.0, 1.5 * before), command
        self.memory_factors[place] = command.memory_factor
        old = self.pods.get(command.name)
        if old is not None and old.is_stuck:
            self.jobs_for_shell.append(e.PodNotCreated(command.name, "it exists already"))
            return
        assert old is None or old.phase not in (PodState.PENDING, PodState.RUNNING), command
        self.num_uids += 1
        self.pods[command.name] = SimPod(
            command.name, command.role, command.index, f"uid-{self.num_uids}", command.slot
        )

    def delete_pod(self, pod: SimPod, grace_s: float | None) -> None:
        if not pod.is_stuck:
            record = self.job._fleet.pods.get(pod.role, pod.index)
            for worker in [one for one in self.workers if one.pod is pod and not one.is_gone]:
                if record is not None and record.is_released:
                    self.leave(worker)
            self.end_pod(pod, "Deleted")
        elif grace_s == 0:
            pod.phase = PodState.DELETED
            del self.pods[pod.name]
            self.tell(self._pod_event(pod))

    def block(self, pick: int) -> None:
        """The image of a pending pod cannot be pulled, although it could before."""
        pending = [pod for pod in self.pods.values() if pod.phase is PodState.PENDING]
        if pending and self.job._fleet.pods.has_run(pending[pick % len(pending)].role):
            event = self._pod_event(pending[pick % len(pending)])
            self.tell(replace(event, blocked="ImagePullBackOff"))

    def start_pod(self, pick: int = 0) -> None:
        pending = [pod for pod in self.pods.values() if pod.phase is PodState.PENDING]
        if not pending:
            return
        pod = pending[pick % len(pending)]
        pod.phase = PodState.RUNNING
        self.tell(self._pod_event(pod))
        if self.end is not None:
            return
        self.num_uids += 1
        self.begin_process(pod, self.num_uids)

    def start_pods(self) -> None:
        """Start all that can be started."""
        while any(pod.phase is PodState.PENDING for pod in self.pods.values()):
            self.start_pod()

    def end_pod(self, pod: SimPod, reason: str, phase: PodState = PodState.FAILED) -> None:
        if pod.phase not in (PodState.PENDING, PodState.RUNNING):
            return
        pod.phase, pod.reason = phase, reason
        pod.is_stuck = reason == "NodeLost"
        num_faults = self.job._work.retry_budget.num_faults
        forgiven = False
        if reason == "Deleted":
            pod.phase = PodState.DELETED
            del self.pods[pod.name]
        processes = [worker for worker in self.workers if worker.pod is pod]
        for worker in processes:
            worker.is_gone = True
            forgiven = all(one.is_leaving for one in processes)
        server = self.ps.get(pod.index)
        if pod.role is Role.PS and server is not None and server.pod is pod:
            forgiven = server.leaving is not None
            del self.ps[pod.index]
            self.losses += 1
        self.tell(self._pod_event(pod))
        assert not forgiven or self.job._work.retry_budget.num_faults <= num_faults, pod

    # Mail -------------------------------------------------------------------------------------------------------------

    def deliver(self, pick: int = 0, again: bool = False) -> None:
        """Hands one piece of mail over, not always the oldest, sometimes twice."""
        if not self.mail:
            return
        index = pick % len(self.mail)
        _, make, handler = self.mail[index]
        if not again:
            self.mail.pop(index)
        self.call(make, handler)

    def deliver_all(self, worker: SimWorker) -> None:
        for item in [item for item in self.mail if item[0] is worker]:
            if item in self.mail:
                self.mail.remove(item)
                self.call(item[1], item[2])
