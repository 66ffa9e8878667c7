"""Exactly once, whatever happens: several PS, workers that come back from the dead, restores, in any order.

No network: the services' own methods are called with frames.  Every minibatch adds 1 to an element of its own of the
non-trainable values, so that the values themselves say how often a PS has applied it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from elasticdl.ps.applied import AppliedSet
from elasticdl.ps.partition import PartSnapshot
from elasticdl.ps.server.service import PsService
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.wire import ExchangeCall, InitializeCall, PushCall, decode_reply, exchange_frame, initialize_frame
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.ps.scenes import config

NUM_PS = 3
NUM_TASKS = 2
TASK_MINIBATCHES = 4
NUM_NAMES = NUM_TASKS * TASK_MINIBATCHES
PS = st.integers(0, NUM_PS - 1)
MINIBATCH = st.integers(0, TASK_MINIBATCHES - 1)
SGD = config("SGD", learning_rate=0.0)


def push_frame(incarnation: int, lease: int, task: int, minibatch: int) -> bytes:
    change = np.zeros(NUM_NAMES, np.float32)
    change[task * TASK_MINIBATCHES + minibatch] = 1.0
    header = pb.Push(lease=lease, epoch=0, task=task, minibatch=minibatch, dense=True)
    return exchange_frame(ExchangeCall(incarnation, PushCall(header, np.ones(2, np.float32), change, ()), None)).whole()


class ParameterServers(RuleBasedStateMachine):
    """Leases are never forgotten: each may push again at any time, as a zombie would."""

    leases: Bundle[tuple[int, int]] = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.newest_lease = 0
        self.services = [PsService(ps_id, ServerState()) for ps_id in range(NUM_PS)]
        for service in self.services:
            service.incarnation = 1
            self.begin(service)
        self.saved: list[PartSnapshot | None] = [None] * NUM_PS
        self.fences: list[dict[int, int]] = [{} for _ in range(NUM_PS)]

    def begin(self, service: PsService) -> None:
        header = pb.InitializeHeader(
            incarnation=service.incarnation,
            optimizer=SGD,
            num_trainable=2,
            total_trainable=2,
            num_non_trainable=NUM_NAMES,
            total_non_trainable=NUM_NAMES,
        )
        call = InitializeCall(header, np.zeros(2, np.float32), np.zeros(NUM_NAMES, np.float32))
        assert decode_reply(service.initialize(initialize_frame(call).whole()))[0].status == pb.OK

    def counts(self, ps_id: int) -> Any:
        snapshot = self.services[ps_id].state.snapshot()
        assert snapshot is not None
        snapshot.close()
        return snapshot.non_trainable

    @rule(target=leases, task=st.integers(0, NUM_TASKS - 1))
    def grant(self, task: int) -> tuple[int, int]:
        self.newest_lease += 1
        return self.newest_lease, task

    @rule(target=leases, lease=leases, ps_id=PS)
    def take_over(self, lease: tuple[int, int], ps_id: int) -> Any:
        """One PS of those that a successor asks; others may be asked later, or never."""
        number, task = lease
        service = self.services[ps_id]
        reply = service.task_standing(
            pb.TaskStandingRequest(incarnation=service.incarnation, lease=number, epoch=0, task=task)
        )
        stale = number < self.fences[ps_id].get(task, 0)
        assert (reply.status == pb.LEASE_REFUSED) == stale
        if not stale:
            self.fences[ps_id][task] = number
            here = set(range(reply.applied.watermark)) | set(reply.applied.extras)
            of_task = self.counts(ps_id)[task * TASK_MINIBATCHES : (task + 1) * TASK_MINIBATCHES]
            assert here == set(np.flatnonzero(of_task).tolist())
        return multiple()

    @rule(lease=leases, ps_id=PS, minibatch=MINIBATCH, times=st.integers(1, 3))
    def push(self, lease: tuple[int, int], ps_id: int, minibatch: int, times: int) -> None:
        number, task = lease
        service = self.services[ps_id]
        for _ in range(times):
            before = self.counts(ps_id)
            reply, _ = decode_reply(service.exchange(push_frame(service.incarnation, number, task, minibatch)))
            stale = number < self.fences[ps_id].get(task, 0)
            assert (reply.status == pb.LEASE_REFUSED) == stale
            if stale:
                np.testing.assert_array_equal(self.counts(ps_id), before)
                return
            self.fences[ps_id][task] = number
            name = task * TASK_MINIBATCHES + minibatch
            assert reply.repeated_push == (before[name] == 1)
            assert self.counts(ps_id)[name] == 1

    @rule(lease=leases, ps_id=PS, minibatch=MINIBATCH)
    def push_to_an_earlier_life(self, lease: tuple[int, int], ps_id: int, minibatch: int) -> None:
        service, before = self.services[ps_id], self.counts(ps_id)
        frame = push_frame(service.incarnation - 1, lease[0], lease[1], minibatch)
        assert decode_reply(service.exchange(frame))[0].status == pb.WRONG_INCARNATION
        np.testing.assert_array_equal(self.counts(ps_id), before)

    @rule(lease=leases, ps_id=PS, minibatch=MINIBATCH, cut=st.integers(1, 60))
    def push_half_a_frame(self, lease: tuple[int, int], ps_id: int, minibatch: int, cut: int) -> None:
        service, before = self.services[ps_id], self.counts(ps_id)
        frame = push_frame(service.incarnation, lease[0], lease[1], minibatch)
        with pytest.raises(ValueError):
            service.exchange(frame[:-cut])
        np.testing.assert_array_equal(self.counts(ps_id), before)

    @rule(ps_id=PS)
    def save(self, ps_id: int) -> None:
        service = self.services[ps_id]
        snapshot = service.state.snapshot()
        assert snapshot is not None
        snapshot.close()
        self.saved[ps_id] = snapshot

    @rule(ps_id=PS)
    def die_and_restore(self, ps_id: int) -> None:
        """The others stay as they are; fences are forgotten with the process."""
        successor = PsService(ps_id, ServerState())
        successor.incarnation = self.services[ps_id].incarnation + 1
        part = self.saved[ps_id]
        if part is None:
            self.begin(successor)
        else:
            successor.state.restore(part, parameters_only=False)
        self.services[ps_id] = successor
        self.fences[ps_id] = {}

    @invariant()
    def each_name_is_in_the_values_once_or_not_at_all(self) -> None:
        for ps_id, service in enumerate(self.services):
            counts = self.counts(ps_id)
            applied, _, version = service.state.applied()
            names = {name.task * TASK_MINIBATCHES + name.n for name in AppliedSet.from_message(applied)}
            assert set(np.flatnonzero(counts).tolist()) == names
            assert counts.max() <= 1
            assert applied.num_applies == len(names) == version

    def teardown(self) -> None:
        """The last successor of each task finishes it."""
        if not hasattr(self, "services"):
            return
        for task in range(NUM_TASKS):
            lease, common = self.newest_lease + 1 + task, set(range(TASK_MINIBATCHES))
            for service in self.services:
                reply = service.task_standing(
                    pb.TaskStandingRequest(incarnation=service.incarnation, lease=lease, epoch=0, task=task)
                )
                assert reply.status == pb.OK
                common &= set(range(reply.applied.watermark)) | set(reply.applied.extras)
            for minibatch in set(range(TASK_MINIBATCHES)) - common:
                for service in self.services:
                    frame = push_frame(service.incarnation, lease, task, minibatch)
                    assert decode_reply(service.exchange(frame))[0].status == pb.OK
        for ps_id in range(NUM_PS):
            assert (self.counts(ps_id) == 1).all()
        self.each_name_is_in_the_values_once_or_not_at_all()


ParameterServers.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEveryNameOnce = ParameterServers.TestCase
