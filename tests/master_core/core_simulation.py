"""A simulated job around the real core: pods, workers, parameter servers, mail and time; no process and no clock.

Workers and PS keep to the protocol of architecture §4: fencing by lease, incarnations, idempotent names, a push counts
when every PS has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from simulated_processes import Leaving, SimLease, SimPod, SimPs, SimWorker
from simulated_shell import SimShell

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.ledger.leases import most_per_worker
from elasticdl.master.core.values import Array, Lease, MetricArrays, PodState, Position, ReportedLease, TaskType
from elasticdl.protocol import Role


class SimJob(SimShell):
    """Everything outside the core.  The mischief is over once `drain` is called."""

    def begin_process(self, pod: SimPod, number: int) -> None:
        if pod.role is Role.PS:
            self.ps[pod.index] = SimPs(pod, number)
            self.join_ps(self.ps[pod.index])
        else:
            workers = [self.new_worker(pod, worker_id, number) for worker_id in self.settings.ids_in(pod.index)]
            self.workers += workers
            for worker in workers:
                worker.began = self.now
                if not worker.is_gone:  # with another process of its pod
                    self.register(worker)

    def new_worker(self, pod: SimPod, worker_id: int, number: int) -> SimWorker:
        return SimWorker(pod, worker_id, number)

    # Parameter servers ----------------------------------------------------------------------------------------------

    def join_ps(self, server: SimPs) -> None:
        def joined(answer: Any) -> None:
            if not isinstance(answer, c.PsAdmitted):
                self.mail.append((None, lambda call: e.Tick(), lambda _: None))
                return
            if answer.incarnation != server.incarnation:
                server.incarnation = answer.incarnation
                part = self.checkpoints.get(answer.restore_from, {}).get(server.pod.index)
                if part is not None:
                    server.names, server.num_applies = copy.deepcopy(part[0]), part[1]
            server.is_ready = True

        held = server.incarnation
        self.call(
            lambda call: e.PsJoined(call, server.pod.index, server.pod.name, "address", server.nonce, held), joined
        )
        if server.is_ready and self.ps.get(server.pod.index) is server:
            self.call(lambda call: e.PsReady(call, server.pod.index, server.incarnation), lambda _: None)

    # Workers --------------------------------------------------------------------------------------------------------

    def living(self) -> list[SimWorker]:
        return [worker for worker in self.workers if not worker.is_gone]

    def register(self, worker: SimWorker) -> None:
        def joined(answer: Any) -> None:
            if isinstance(answer, c.Registered):
                worker.is_registered = True
                worker.partition = answer.partition or worker.partition
            else:
                worker.is_gone = True

        held = tuple(ReportedLease(one.lease, tuple(one.committed)) for one in worker.held.values())
        self.call(lambda call: e.WorkerJoined(call, worker.id, worker.incarnation, worker.pod.name, held), joined)
        if worker.is_registered and not worker.is_gone:
            self.call(
                lambda call: e.ModelReported(call, worker.id, worker.incarnation, has_metrics=True), lambda _: None
            )
        if worker.is_gone and self.end is None:
            self.end_pod(worker.pod, "Error")

    def request(self, worker: SimWorker) -> None:
        if worker.has_request or worker.is_stopped or len(worker.held) >= self.most_held(worker):
            return

        def answered(answer: Any) -> None:
            worker.has_request = False
            if isinstance(answer, c.LeaseGranted):
                assert answer.lease.id not in self.grants
                assert answer.lease.id > max(self.grants, default=0), "lease ids must grow"
                self.grants[answer.lease.id] = answer.lease
                worker.held[answer.lease.id] = SimLease(answer.lease)
            elif isinstance(answer, c.UnknownWorker):
                worker.is_registered = False
            elif isinstance(answer, c.JobOver):
                worker.is_stopped = True

        worker.has_request = True
        fields = self.request_fields(worker)
        self.call(lambda call: e.LeaseRequested(call, worker.id, worker.incarnation, **fields), answered)
        if not worker.is_registered and not worker.is_gone:
            self.register(worker)

    def most_held(self, worker: SimWorker) -> int:
        return most_per_worker(self.settings)

    def request_fields(self, worker: SimWorker) -> dict[str, Any]:
        return {}

    def heartbeat_fields(self, worker: SimWorker) -> dict[str, Any]:
        return {}

    def step(self, worker: SimWorker, pick: int = 0) -> None:
        """Works a little on one of the leases that the worker holds; a stopped one does not."""
        open_leases = [one for one in worker.held.values() if not one.is_told]
        if worker.is_stopped or not open_leases:
            return
        held = open_leases[pick % len(open_leases)]
        match held.lease.type:
            case TaskType.TRAINING:
                self._train(worker, held, pick)
            case TaskType.EVALUATION:
                held.is_told = True
                data = Array((1,), b"\0" * 8)
                state = () if held.lease.merged else (MetricArrays("accuracy", (data,)),)
                results = {"accuracy": 0.5} if held.lease.merged else {}
                self.post(
                    worker,
                    held,
                    lambda call: e.EvaluationReported(
                        call, worker.id, worker.incarnation, held.lease.id, state, results
                    ),
                )
            case _:
                held.is_told = True
                self.post(
                    worker, held, lambda call: e.TaskFinished(call, worker.id, worker.incarnation, held.lease.id, 0)
                )

    def num_samples(self, lease: Lease) -> int:
        return len(lease.shard) if self.feed is None else self.feed(lease.task)

    def num_minibatches(self, lease: Lease) -> int:
        return -(-self.num_samples(lease) // self.settings.minibatch_size)

    def finished(self, worker: SimWorker, held: SimLease) -> None:
        """The worker tells that a task is in the model, and what `feed` has made of it."""
        held.is_told = True
        lease, size = held.lease, self.num_minibatches(held.lease)
        surplus = self.num_samples(lease) - len(lease.shard)
        self.post(
            worker, held, lambda call: e.TaskFinished(call, worker.id, worker.incarnation, lease.id, size, surplus)
        )

    def _train(self, worker: SimWorker, held: SimLease, pick: int) -> None:
        if worker.partition is None:
            return
        servers = [self.ps.get(address.ps_id) for address in worker.partition.ps]
        addresses = [address.incarnation for address in worker.partition.ps]
        reached = [s for s, inc in zip(servers, addresses, strict=True) if s and s.is_ready and s.incarnation == inc]
        if len(reached) < len(servers):
            return  # it waits for the new partition
        if not held.has_asked:
            if not all(server.standing(held.lease) for server in reached):
                worker.held.pop(held.lease.id)
                return
            held.has_asked = True
        size = self.num_minibatches(held.lease)
        key = (held.lease.epoch, held.lease.task)
        for n in range(size):
            if n in held.committed:
                continue
            lacking = [server for server in reached if n not in server.names.get(key, ())]
            if lacking and self.is_bad(*key, n) and n not in held.skipped:
                self._skip(worker, held, n)
                return
            if lacking and pick % 3:
                lacking = lacking[:1]  # not every push arrives at once
            if not all(server.push(held.lease, n) for server in lacking):
                worker.held.pop(held.lease.id)
                return
            if all(n in server.names.get(key, ()) for server in reached):
                held.committed.add(n)
                self.post(
                    worker,
                    held,
                    lambda call, n=n: e.ProgressReported(call, worker.id, worker.incarnation, held.lease.id, (n,), 0.5),
                )
            return
        self.finished(worker, held)

    def _skip(self, worker: SimWorker, held: SimLease, n: int) -> None:
        """Tells that a minibatch is left out; only once that is acknowledged is its name pushed."""

        def answered(answer: Any) -> None:
            if isinstance(answer, c.Accepted):
                held.skipped.add(n)
            else:
                worker.held.pop(held.lease.id, None)

        def make(call: int) -> e.ProgressReported:
            what = "The loss is nan"
            return e.ProgressReported(call, worker.id, worker.incarnation, held.lease.id, (), None, (n,), what)

        self.mail.append((worker, make, answered))

    def post(self, worker: SimWorker, held: SimLease, make: Callable[[int], e.Event]) -> None:
        def answered(answer: Any) -> None:
            if not isinstance(answer, c.Accepted) or held.is_told:
                worker.held.pop(held.lease.id, None)

        self.mail.append((worker, make, answered))

    def heartbeat(self, worker: SimWorker) -> None:
        def answered(answer: Any) -> None:
            for lease_id in answer.revoked:
                worker.held.pop(lease_id, None)
            worker.partition = answer.partition or worker.partition
            worker.is_registered = answer.known
            worker.is_stopped = worker.is_stopped or answer.stop

        positions = tuple(Position(i, len(one.committed)) for i, one in worker.held.items())
        seen = worker.partition.version if worker.partition is not None else 0
        self.call(
            lambda call: e.HeartbeatReceived(
                call,
                Role.WORKER,
                worker.id,
                worker.incarnation,
                positions,
                "compute",
                worker.seconds(self.now),
                seen,
                **self.heartbeat_fields(worker),
            ),
            answered,
        )
        if not worker.is_registered and not worker.is_gone:
            self.register(worker)

    def leave(self, worker: SimWorker) -> None:
        """A worker is asked to end: it gives up what it has, says so once, and ends some time later."""
        worker.is_stopped, worker.is_leaving = True, True
        worker.held.clear()

        def answered(answer: Any) -> None:
            worker.is_leaving = answer.known

        self.call(
            lambda call: e.HeartbeatReceived(
                call, Role.WORKER, worker.id, worker.incarnation, seconds=worker.seconds(self.now), leaving=True
            ),
            answered,
        )

    def leave_ps(self, server: SimPs) -> None:
        """A PS is asked to end."""
        if server.is_ready and server.leaving is None:
            ledger = self.job._work.tasks.ledger() if self.job._is_open else CommittedSet()
            server.leaving = Leaving(ledger, self._mischief())

    def _mischief(self) -> tuple[int, int, int]:
        """Changes with everything that excuses a checkpoint for not being written."""
        return (self.generation, self.losses, self.num_failed_checkpoints)

    def ps_heartbeat(self, server: SimPs) -> None:
        answers: list[c.HeartbeatAnswer] = []
        leaving = server.leaving is not None
        self.call(
            lambda call: e.HeartbeatReceived(call, Role.PS, server.pod.index, server.incarnation, leaving=leaving),
            answers.append,
        )
        if not answers or self.ps.get(server.pod.index) is not server:
            return
        if not answers[0].known:
            self.join_ps(server)
        elif answers[0].stop and self.end is None:
            assert server.leaving is not None
            self.check_saved(server.leaving)
            self.end_pod(server.pod, "Error")

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for worker in self.living():
                if not worker.is_stopped and not worker.is_leaving:
                    self.heartbeat(worker)
            for server in list(self.ps.values()):
                self.ps_heartbeat(server)
            self.tell(e.Tick())

    # Invariants -----------------------------------------------------------------------------------------------------

    def check_ledger(self) -> None:
        """Check that committed work is in every PS, as long as the core does not doubt it."""
        if not self.job._is_open or len(self.ps) < self.settings.num_ps:
            return
        partition = self.job._fleet.servers.partition
        if partition is None or not all(self._is_at(a.ps_id, a.incarnation) for a in partition.ps):
            return
        for (epoch, task), applied in self.job._work.tasks.ledger().tasks().items():
            for server in self.ps.values():
                missing = set(applied) - server.names.get((epoch, task), set())
                assert not missing, (epoch, task, missing)

    def check_saved(self, leaving: Leaving) -> None:
        """A PS that was asked to end leaves when what was committed before that is in the newest checkpoint."""
        if not self.settings.checkpoint_dir or leaving.mischief != self._mischief():
            return
        parts = self.checkpoints.get(self.job._checkpoints.newest, {})
        for (epoch, task), applied in leaving.committed.tasks().items():
            for names, _ in parts.values():
                assert set(applied) <= names.get((epoch, task), set()), (epoch, task)
            assert parts or not len(applied)

    def drain(self, rounds: int = 2000) -> None:
        """No more mischief: the job must come to its end."""
        for worker in self.living():
            worker.is_stopped = worker.is_leaving
            if worker.is_leaving:
                self.end_pod(worker.pod, "Error")
        if not self.num_wanted:
            self.scale(1)
        for _ in range(rounds):
            if self.end is not None:
                return
            self.start_pods()
            while self.jobs_for_shell:
                self.shell_work()
            self.everybody_works()
            self.pass_time(1)
            if self.job.status().phase == "Succeeded":
                for worker in self.living():
                    if worker.is_stopped:
                        self.end_pod(worker.pod, "Completed", PodState.SUCCEEDED)
        raise AssertionError(f"the job does not end: {self.job.status()} {self.log[-8:]}")

    def everybody_works(self) -> None:
        for worker in self.living():
            self.request(worker)
            self.step(worker)
            self.step(worker, 1)
        while self.mail:
            self.deliver()
