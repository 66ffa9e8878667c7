"""Minibatches of a world that shares its leases: where they stand in the order of steps, and how one of them failed."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb


@dataclass(frozen=True, slots=True)
class Position:
    """A minibatch in the order of steps."""

    name: MinibatchName
    lease: int


@dataclass(frozen=True, slots=True)
class Failure:
    """User code raised on a minibatch, at any member.  The lease may be another one by the time it is told."""

    epoch: int
    task: int
    n: int
    error: str
    details: str
    bad_records: tuple[int, ...] = ()

    def is_of(self, task: MinibatchName | pb.Lease | Failure) -> bool:
        return (task.epoch, task.task) == (self.epoch, self.task)
