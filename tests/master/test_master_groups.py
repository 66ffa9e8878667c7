"""Groups of an AllReduce job over the wire, with a real master and scripted workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from tests.master.actors import MasterJob, ScriptedWorker, applied_set, running, wait_until

pytestmark = pytest.mark.timeout(120)


class Member(ScriptedWorker):
    """Says what a member of a group says; it has no group."""

    def __init__(self, job: MasterJob, worker_id: int) -> None:
        super().__init__(job, worker_id)
        self.group = pb.Group()

    def _fields(self) -> dict[str, Any]:
        return {"worker_id": self.id, "incarnation": self.incarnation}

    def sample(self) -> pb.SampleReply:
        return self.call("Sample", pb.SampleRequest(**self._fields()))

    def ready(self, reason: str = "") -> pb.Ack:
        address = f"host-{self.id}:1"
        request = pb.ReadyForGroupRequest(**self._fields(), address=address, left=self.group.version, reason=reason)
        return self.call("ReadyForGroup", request)

    def watch(self) -> pb.WatchGroupReply:
        """Until there is a newer group, or the job is over."""
        while True:
            request = pb.WatchGroupRequest(**self._fields(), known_version=self.group.version)
            reply = self.call("WatchGroup", request, 20.0)
            if reply.WhichOneof("answer") != "wait":
                self.group = reply.group if reply.HasField("group") else self.group
                return reply

    def formed(self, steps: int = 1) -> pb.Ack:
        request = pb.GroupFormedRequest(
            **self._fields(), version=self.group.version, applied=applied_set(self.model), steps=steps
        )
        return self.call("GroupFormed", request)

    def lease_at_once(self, only: int = 0) -> pb.LeaseReply:
        return self.call("RequestLease", pb.LeaseRequest(**self._fields(), at_once=True, only=only))

    def ranks(self) -> list[int]:
        return [member.worker_id for member in self.group.members]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MasterJob]:
    made = MasterJob(tmp_path, distribution_strategy="AllReduceStrategy", num_workers=2, checkpoint_dir="")
    with running(made) as found:
        yield found


def member(job: MasterJob, worker_id: int) -> Member:
    wait_until(lambda: any(p.name.endswith(f"worker-{worker_id}") for p in job.cluster.list()), "the pod")
    made = Member(job, worker_id)
    assert made.register().accepted
    assert made.report_model().accepted
    return made


def test_two_workers_form_a_group_train_in_it_lose_one_and_end(job: MasterJob) -> None:
    first, second = member(job, 0), member(job, 1)
    shard = first.sample().shard
    assert (shard.start, shard.end) == (0, 8)
    assert second.lease_at_once().wait
    assert first.ready().accepted
    assert second.ready().accepted
    assert first.watch().WhichOneof("answer") == "group"
    assert second.watch().group == first.group
    assert first.ranks() == [0, 1]
    assert not second.formed().accepted
    assert first.formed(steps=0).accepted

    lease = first.lease_at_once().lease
    assert first.progress(lease, 0).accepted
    assert second.lease_at_once(pb.EVALUATION).wait
    version = first.group.version

    first.leave()  # its pod is gone
    assert second.ready("worker 0 is gone").accepted
    assert second.watch().group.version > version
    assert second.ranks() == [1]
    assert second.group.members[0].is_source
    second.model = {(lease.epoch, lease.task): {0}}
    assert second.formed().accepted
    heartbeat = pb.HeartbeatRequest(role=pb.WORKER, id=1, incarnation=second.incarnation)
    assert second.call("Heartbeat", heartbeat).group_version == second.group.version
    status = wait_until(lambda: job.status().num_worlds == 2 and job.status(), "the status")
    assert status.world == (1,)

    over: list[str | None] = []
    watching = threading.Thread(target=lambda: over.append(second.watch().WhichOneof("answer")))
    watching.start()
    assert second.train_all() == 4
    watching.join(30)
    assert over == ["end"]
    for pod in job.cluster.list():
        if "worker-2" in pod.name:
            job.cluster.delete(pod.name)
    assert job.wait() == 0
    assert "Group 2 of 1 worker has formed in" in job.log()
    assert "records 64, committed 64, repeated 0, lost 0" in job.log()


def test_a_watch_survives_the_master(job: MasterJob) -> None:
    first = member(job, 0)
    assert first.ready().accepted
    assert first.watch().WhichOneof("answer") == "group"
    assert first.formed(steps=0).accepted
    version = first.group.version
    job.kill()
    job.start()
    assert first.watch().WhichOneof("answer") == "unknown"
    assert first.register().accepted
    assert first.watch().group.version > version
    assert first.group.members[0].is_source
    assert first.formed(steps=0).accepted
