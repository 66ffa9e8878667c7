"""A scripted master that calls groups, and members of them in one process: real sessions, groups and sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from elasticdl.activities import ActivityClock
from elasticdl.collective import ElasticGroup
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.group_session import GroupEnded, GroupSession
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag, StepPlan
from elasticdl.worker.ledger import Ledger, RestoredModel
from elasticdl.worker.master_link import MasterLink
from tests.worker.scripted_master import TOKEN, ScriptedMaster, before_the_deadline

ANSWER_S = 60.0
Answer = TypeVar("Answer")


class GroupMaster(ScriptedMaster):
    """Plans the groups that a test asks for, and grants its leases."""

    def __init__(self, *leases: pb.Lease) -> None:
        self._ready: dict[int, pb.ReadyForGroupRequest] = {}
        self._outside: set[int] = set()
        self._planned = pb.Group()
        self._is_over = False
        self.whole_epochs = self.newest_lease = 0
        self.deaf: set[int] = set()  # workers that hear of no group, as if they were stopped
        super().__init__(*leases, ends=False)

    def grant(self, *leases: pb.Lease) -> None:
        """To rank 0 of the newest group, as with --fixed_global_batch."""
        with self.changed:
            self.leases.extend(leases)
            self.changed.notify_all()

    def plan(self, *workers: int, sources: Sequence[int] = ()) -> int:
        """Calls workers, by rank, into a group once they have been ready for one, this or another; its version."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(workers) <= self._ready.keys(), ANSWER_S), self._ready
            members = [
                pb.GroupMember(
                    worker_id=worker,
                    incarnation=self._ready[worker].incarnation,
                    address=self._ready[worker].address,
                    is_source=worker in sources,
                )
                for worker in workers
            ]
            self._planned = pb.Group(version=self._planned.version + 1, members=members)
            self._outside.difference_update(workers)
            self.changed.notify_all()
            return self._planned.version

    def await_outside(self, *workers: int) -> None:
        """Until they all stand outside of groups, and say so."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(workers) <= self._outside, ANSWER_S), self._outside

    def are_outside_within(self, timeout_s: float, *workers: int) -> bool:
        """Whether they all stand outside of groups by then."""
        with self.changed:
            return self.changed.wait_for(lambda: set(workers) <= self._outside, timeout_s)

    def end(self) -> None:
        """The job is over."""
        with self.changed:
            self._is_over = True
            self.changed.notify_all()

    def stop(self) -> None:
        self.end()
        super().stop()

    def RequestLease(self, request: Any, context: grpc.ServicerContext) -> pb.LeaseReply:  # noqa: N802
        def is_for_it() -> bool:
            first = [member.worker_id for member in self._planned.members[:1]]
            return bool(self.leases) and first == [request.worker_id]

        with self.changed:
            self.changed.wait_for(lambda: is_for_it() or self._is_over, before_the_deadline(context))
            if is_for_it():
                return self._grant()
            return pb.LeaseReply(end=True) if self._is_over else pb.LeaseReply(wait=True)

    def Heartbeat(self, request: Any, context: grpc.ServicerContext) -> pb.HeartbeatReply:  # noqa: N802
        self._note("Heartbeat", request)
        return pb.HeartbeatReply(known=True, whole_epochs=self.whole_epochs, newest_lease=self.newest_lease)

    def ReadyForGroup(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        ack = self._note("ReadyForGroup", request)  # before the answer: tests that wait for it look it up
        with self.changed:
            self._ready[request.worker_id] = request
            self._outside.add(request.worker_id)
            self.changed.notify_all()
        return ack

    def GroupFormed(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("GroupFormed", request)

    def FailTask(self, request: Any, context: grpc.ServicerContext) -> pb.Ack:  # noqa: N802
        return self._note("FailTask", request)

    def WatchGroup(self, request: Any, context: grpc.ServicerContext) -> pb.WatchGroupReply:  # noqa: N802
        def is_newer() -> bool:
            return request.worker_id not in self.deaf and bool(self._planned.version > request.known_version)

        with self.changed:
            self.changed.wait_for(lambda: self._is_over or is_newer(), before_the_deadline(context))
            if self._is_over:
                return pb.WatchGroupReply(end=True)
            return pb.WatchGroupReply(group=self._planned) if is_newer() else pb.WatchGroupReply(wait=True)


class Total:
    """A model: the sum of all minibatches, each worth its number."""

    def __init__(self) -> None:
        self.value = np.full(1, -1.0, np.float32)
        self.restored = RestoredModel(Ledger())
        self.summed = ["the gradient of value (1,)"]

    def sums(self) -> list[str]:
        return self.summed

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {"value": self.value.copy()}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.value = arrays["value"].copy()

    def start_over(self) -> RestoredModel:
        self.value = np.zeros(1, np.float32)
        return self.restored


class SessionMember:
    """A worker's session; a thread of its own calls it."""

    def __init__(self, master: ScriptedMaster, worker_id: int) -> None:
        self.link = MasterLink(master.address, TOKEN, worker_id, f"pod-{worker_id}", ActivityClock(), ANSWER_S)
        self.link.register()
        self.group = ElasticGroup("127.0.0.1", TOKEN)
        self.state = Total()
        self.session = GroupSession(self.link, self.group, self.state, ANSWER_S, most_parts=2)
        self.session.start()
        self._thread = ThreadPoolExecutor(1)

    def does(self, verb: Callable[..., Answer], *args: Any) -> Future[Answer]:
        return self._thread.submit(verb, self, *args)

    def close(self) -> None:
        self.group.abandon("the test is over")
        self._thread.shutdown()
        self.group.close()


@contextmanager
def session_members(master: GroupMaster, count: int) -> Iterator[list[SessionMember]]:
    made = [SessionMember(master, number) for number in range(count)]
    try:
        yield made
    finally:
        master.end()
        for member in made:
            member.close()


def all_do(members: Sequence[SessionMember], verb: Callable[..., Answer], *args: Any) -> list[Answer]:
    """The outcome, by member."""
    begun = [member.does(verb, *args) for member in members]
    return [one.result(ANSWER_S) for one in begun]


def enter(member: SessionMember) -> bool:
    return member.session.enter()


def entered(master: GroupMaster, members: Sequence[SessionMember], sources: Sequence[int] = ()) -> int:
    """All of them are in a new group, ranked as given; its version."""
    begun = [member.does(enter) for member in members]
    workers = [member.link.worker_id for member in members]
    master.await_outside(*workers)
    version = master.plan(*workers, sources=sources)
    assert [one.result(ANSWER_S) for one in begun] == [True] * len(members)
    return version


def name_of(number: int) -> MinibatchName:
    return MinibatchName(0, 0, number)


def summed(member: SessionMember, *numbers: int) -> tuple[StepPlan, npt.NDArray[np.float32]]:
    """A step up to its sum; nothing is applied."""
    plan = member.session.plan_step([BatchRef(name_of(number), 10) for number in numbers])
    buffer = np.array([sum(numbers)], np.float32)
    member.session.finish_reduce([member.session.begin_reduce(buffer)])
    return plan, buffer


def step(member: SessionMember, *numbers: int) -> StepPlan:
    """A whole step, to which this member brings some minibatches."""
    plan, buffer = summed(member, *numbers)
    member.state.value += buffer
    member.session.commit(plan)
    return plan


def ended(member: SessionMember, wishes: StepFlag = StepFlag.NOTHING) -> str:
    """Exchanges headers until the group has ended; why."""
    try:
        while True:
            member.session.plan_step([], wishes)
    except GroupEnded as error:
        return str(error)
