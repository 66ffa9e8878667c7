"""A whole simulated AllReduce job: the real core, the worker's real code, scripted faults, and what must hold.

No process, no thread, no clock of the machine: a seed decides everything, and replays it
(`python -m tests.engine SEED`).
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.callback_rules import Rules
from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.values import PodState
from elasticdl.master.settings import settings_of
from elasticdl.protocol import Shard
from elasticdl_client.job_spec import JobSpec
from tests.engine.arithmetic import Plan, ShardedArithmetic, Troubles
from tests.engine.collectives import Links
from tests.engine.master_calls import MasterCalls
from tests.engine.member import Member, Room, Written
from tests.engine.scheduler import Process, Scheduler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "master_core"))
from simulated_processes import SimPod, SimWorker
from simulated_shell import SimShell

_TICK_S = 0.5
_START_S = 1.0
_GRACE_S = 10.0


class EngineJob(SimShell):
    """The simulated master, and its pods with the worker's code in them.

    Attributes:
        is_checked_whole: after each event the whole state of the core is checked, not the ledger alone.
    """

    def __init__(self, scheduler: Scheduler, plan: Plan, troubles: Troubles) -> None:
        self.scheduler = scheduler
        self.calls_of_workers = MasterCalls(scheduler, self)
        written = Written(scheduler, bool(plan.spec.checkpoint_dir), self._version_of)
        self.room = Room(scheduler, Links(scheduler), self.calls_of_workers, plan, troubles, written)
        self.members: dict[Process, Member] = {}
        self.finished: list[Member] = []
        self.job_spec = ""
        self.is_checked_whole = True
        self._continued = (0, 0)  # the last group that formed: version, least steps
        self._newest_lease = 0  # before the present event
        self._given_up: set[int] = set()
        self._pods: dict[Process, SimPod] = {}
        self._terminating: set[Process] = set()
        super().__init__(settings_of(plan.spec), plan.shards)
        scheduler.at(_TICK_S, self._tick)

    # The core's shell -------------------------------------------------------------------------------------------------

    def ask(self, make: Callable[[int], e.Event], handler: Callable[[Any], None]) -> int:
        self.call(make, handler)
        return self.num_calls

    def give_up(self, call: int) -> bool:
        if self.calls.pop(call, None) is None:
            return False
        self._given_up.add(call)
        return True

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.Reply) and command.call in self._given_up:
            return
        super().execute(command)

    def tell(self, event: e.Event) -> None:
        self.now = self.scheduler.now
        if not self.calls_of_workers.is_down:
            super().tell(event)

    def check(self) -> None:
        if self.is_checked_whole:
            super().check()
        else:
            self.check_ledger()

    def _tick(self) -> None:
        self.tell(e.Tick())
        while self.jobs_for_shell and not self.calls_of_workers.is_down:
            self.shell_work(self.scheduler.random.randrange(100))
        for pod in list(self.pods.values()):
            if pod.phase is PodState.PENDING:
                self._run(pod)
        if self.end is None:
            self.scheduler.at(_TICK_S, self._tick)

    def _run(self, pod: SimPod) -> None:
        """Start a pending pod unless the core is down: events of that time come when it is back."""
        if not self.calls_of_workers.is_down:
            self.start_pod([p for p in self.pods.values() if p.phase is PodState.PENDING].index(pod))

    def scale(self, num_workers: int) -> None:
        self.now = self.scheduler.now
        super().scale(num_workers)

    def stop_master(self, down_s: float) -> None:
        """Kill the master; after a time it is back, with what its journal holds."""
        if not self.calls_of_workers.is_down and self.end is None:
            self.calls_of_workers.go_down()
            self.scheduler.at(down_s, self._start_master)

    def _start_master(self) -> None:
        self.calls_of_workers.is_down = False
        self.now = self.scheduler.now
        self._given_up.clear()
        self.restart_master()

    # Processes --------------------------------------------------------------------------------------------------------

    def begin_process(self, pod: SimPod, number: int) -> None:
        for worker_id in self.settings.ids_in(pod.index):
            self._begin_member(pod, worker_id, number)

    def _begin_member(self, pod: SimPod, worker_id: int, number: int) -> None:
        process = Process(f"worker-{worker_id}.{number}", lambda code: self._exited(process, code))
        worker = SimWorker(pod, worker_id, number)
        worker.began = self.now
        self.workers.append(worker)
        self.members[process] = Member(self.room, process, worker_id, pod.name)
        self._pods[process] = pod

    def living_processes(self) -> list[Process]:
        return [process for process in self.members if not process.is_over]

    def kill(self, process: Process, reason: str) -> None:
        """The pod of a process is gone, and the process with it."""
        self._end_process(process)
        self.end_pod(self._pods[process], reason)

    def _exited(self, process: Process, code: int) -> None:
        if process.is_over:
            return
        pod = self._pods[process]
        if code == 0:
            self.finished.append(self.members[process])
        self._end_process(process)
        is_last = all(one.is_over for one, its in self._pods.items() if its is pod)
        if not is_last and (code == 0 or process in self._terminating):
            return  # its pod waits for the others
        if code == 0:
            self.end_pod(pod, "Completed", PodState.SUCCEEDED)
        else:
            self.end_pod(pod, "Error")

    def _end_process(self, process: Process) -> None:
        if not process.is_over:
            self.scheduler.end(process)
            self.room.links.die(process)
            self.calls_of_workers.die(process)

    def end_pod(self, pod: SimPod, reason: str, phase: PodState = PodState.FAILED) -> None:
        for process, its in list(self._pods.items()):
            if its is pod:
                self._end_process(process)
        super().end_pod(pod, reason, phase)

    def leave(self, worker: SimWorker) -> None:
        """SIGTERM to all processes of its pod; SIGKILL after the grace."""
        for process, pod in self._pods.items():
            if pod is worker.pod and not process.is_over and process not in self._terminating:
                self._terminating.add(process)
                self.members[process].terminate()
                self.scheduler.at(_GRACE_S, lambda process=process: self._kill_late(process))

    def _kill_late(self, process: Process) -> None:
        if not process.is_over:
            self.kill(process, "Error")

    def check_time(self) -> None:
        """Compare the accounted seconds with the wanted ones; the last second of a killed process is unknown."""
        num_processes = self.num_wanted * self.settings.processes_per_worker
        wanted = self.wanted_seconds + num_processes * (self.now + 0.3 - self.wanted_since)
        seconds = self.job._accounting.worker_seconds(self.now + 0.3)
        assert abs(sum(seconds.values()) - wanted) < 1e-3, (wanted, seconds)
        assert min(seconds.values()) >= 0.0, seconds

    # Invariants -------------------------------------------------------------------------------------------------------

    def check_ledger(self) -> None:
        """Check that committed work is in the model of every member, as long as its group stands."""
        formed = self.job._groups.formed
        if formed is None:
            return
        self._check_continuation(formed.version)
        self._newest_lease = self.job._work.leases.newest
        if not self.job._is_open:
            return
        committed: list[tuple[tuple[int, int], int, frozenset[int]]] | None = None
        for process, member in self.members.items():
            session = member.loop._session if member.loop is not None and not process.is_over else None
            if session is None or session.version != formed.version or session._is_forming:
                continue
            if not session._holds_model or self._is_synchronizing(member):
                continue
            if committed is None:
                committed = self._committed()
            applied = session.ledger.applied
            for key, watermark, extras in committed:
                has = applied.watermarks[key]
                if watermark > has or extras:
                    missing = {*range(has, watermark), *(n for n in extras if n >= has)}
                    missing -= applied.extras.get(key, set())
                    assert not missing, f"committed, and not in the model of {process.name}: {key} {missing}"

    def _committed(self) -> list[tuple[tuple[int, int], int, frozenset[int]]]:
        """Return (task, watermark, minibatches beyond it) of all tasks of which something is committed."""
        return [
            ((epoch.number, task), watermark, epoch._extras.get(task, frozenset()))
            for epoch in self.job._work.tasks.epochs
            for task, watermark in enumerate(epoch._watermarks)
            if watermark or task in epoch._extras
        ]

    def _check_continuation(self, version: int) -> None:
        """A group continues after all steps that all members of the last one had, or no earlier lease is in force."""
        last, least = self._continued
        if version == last:
            return
        seats = self.room.links.groups[version].seats
        session = self.members[seats[0].process].loop._session
        if last in self.room.links.groups:
            least = max(least, self.room.links.groups[last].num_proven)
        if version in self.room.written.begun_anew:
            least = 0
            old = [lease.id for lease in self.job._work.leases.all() if lease.id <= self._newest_lease]
            assert not old, f"the model is an older one, and leases are in force: {old}"
        steps = session.ledger.steps
        assert steps >= least, f"the group continues after step {steps}: all members of the last one had {least}"
        self._continued = (version, least)

    def _version_of(self, process: Process) -> int:
        loop = self.members[process].loop
        assert loop is not None
        return loop._session.version

    @staticmethod
    def _is_synchronizing(member: Member) -> bool:
        clock = member.loop._clock if member.loop is not None else None
        return clock is not None and clock._now == "join"

    def check_end(self) -> None:
        """The models of those that were there at the end hold every record once."""
        assert self.end is not None
        assert self.end.exit_code == 0, f"{self.end} {self.log[-5:]}"
        formed = self.job._groups.formed
        assert formed is not None
        seats = self.room.links.groups[formed.version].seats
        found = [(self.members[seat.process].steps, seat.process) for seat in seats.values()]
        newest = max((steps for steps, _ in found), default=0)
        survivors = [self.members[process] for steps, process in found if steps == newest]
        for member in [one for one in survivors if one in self.finished]:
            self._check_model(member)
        if self.room.written.is_wanted and self.members[seats[0].process] in self.finished:
            self._check_checkpoint(self.members[seats[0].process])

    def _check_checkpoint(self, member: Member) -> None:
        """The newest one is what rank 0 ended with."""
        loop = member.loop
        if loop is not None and loop._session.ledger.applied.num_names in self.room.written.failed:
            return
        newest = self.room.written.latest()
        if isinstance(member.framework, ShardedArithmetic):
            for found in self.room.written.found:
                member.framework.check_checkpoint(found.arrays)
            if member.loop is not None and member.loop.lacks_checkpoint:
                return  # a member that had the rest was lost as the job ended
        assert newest is not None, "no checkpoint was written"
        assert (newest.arrays["counts"] == member.framework.counts).all(), f"it is of {newest.counts}"

    def _check_model(self, member: Member) -> None:
        """It holds what the coverage lines say, and of all other records none."""
        plan, troubles = self.room.plan, self.room.troubles
        counts = member.framework.counts.reshape((plan.spec.num_epochs, plan.num_records))
        for epoch, found in enumerate(counts):
            lines = [line for line in self.log if line.startswith(f"Epoch {epoch + 1}: records")]
            if not lines and plan.rules is not None:
                assert not found.any(), f"{member.process.name}: epoch {epoch + 1} has not begun: {found}"
                continue
            line = lines[-1]
            numbers = {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", line.partition(": ")[2])}
            out = sorted(troubles.bad | troubles.dropped | troubles.not_finite)
            assert not found[out].any(), f"{member.process.name} holds what was left out: {line} {found}"
            assert numbers["lost"] == 0, line
            assert numbers["committed"] == found.sum(), f"{member.process.name}: {line} {found}"
            if not troubles.not_finite and not numbers.get("unplanned"):
                assert found.sum() == len(found) - len(out), f"{member.process.name}: {line} {found}"
        if plan.rules is not None:
            self._check_calls(counts, plan)

    def _check_calls(self, counts: npt.NDArray[np.int64], plan: Plan) -> None:
        """The callbacks were called in order, with the whole of each epoch, the last ones with the whole model."""
        assert plan.rules is not None
        epochs = [epoch for epoch, _ in plan.calls]
        assert epochs[-1:] == [-1], f"the end of training was not seen: {epochs}"
        assert (plan.calls[-1][1].reshape(counts.shape) == counts).all(), "training ended with another model"
        num_ended = sum(
            any(line.startswith(f"Epoch {k + 1}: records") for line in self.log) for k in range(len(counts))
        )
        expected = [*range(num_ended), -1] if plan.rules.calls_epoch_end else [-1]
        assert list(dict.fromkeys(epochs)) == expected, f"{epochs} instead of {expected}"
        for epoch, called_with in plan.calls[:-1]:
            if epoch >= 0:
                row = called_with.reshape(counts.shape)[epoch]
                assert (row == counts[epoch]).all(), (
                    f"the end of epoch {epoch + 1} was seen with {row}: {counts[epoch]}"
                )


def make_job(
    seed: int, spec: JobSpec, shards: tuple[Shard, ...], troubles: Troubles, rules: Rules | None = None
) -> EngineJob:
    scheduler = Scheduler(random.Random(f"threads {seed}"))
    return EngineJob(scheduler, Plan(spec, shards, rules), troubles)
