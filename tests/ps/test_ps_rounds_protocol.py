"""Rounds whatever happens: workers that leave at any moment, zombies, PS that are restored, messages told late.

Every minibatch adds 1 to an element of its own, so a round, which is a mean, adds 1 in all.  Committable updates must
be in every PS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from elasticdl.ps.applied import AppliedSet, MinibatchName
from elasticdl.ps.partition import PartSnapshot
from elasticdl.ps.server.state import ServerState
from elasticdl.ps.server.synchronous import UpdateSettings
from elasticdl.ps.wire import ExchangeCall, InitializeCall, PushCall
from elasticdl.rpc import elasticdl_pb2 as pb
from tests.ps.scenes import config

NUM_PS = 3
NUM_TASKS = 3
TASK_MINIBATCHES = 3
NUM_NAMES = NUM_TASKS * TASK_MINIBATCHES
PS = st.integers(0, NUM_PS - 1)
SGD = config("SGD", learning_rate=0.0)
UPDATES = UpdateSettings(use_async=False, grads_to_wait=2, sync_version_tolerance=100)


class Rounds(RuleBasedStateMachine):
    """`told` are replies of PS 0 that workers still carry about."""

    leases: Bundle[tuple[int, int]] = Bundle("leases")
    told: Bundle[tuple[int, int, pb.Rounds]] = Bundle("told")

    @initialize()
    def start(self) -> None:
        self.newest_lease = 0
        self.valid: dict[int, int] = {}  # task to the lease that the master accepts reports of
        self.lives = [1] * NUM_PS
        self.saved: list[PartSnapshot | None] = [None] * NUM_PS
        self.states = [self.fresh() for _ in range(NUM_PS)]
        self.held: dict[tuple[int, int], set[int]] = {}  # lease and minibatch to the PS that said OK in this life
        self.carried: dict[tuple[int, int], set[int]] = {}  # … and that have received its round since

    def fresh(self) -> ServerState:
        state = ServerState(UPDATES)
        header = pb.InitializeHeader(
            optimizer=SGD,
            num_trainable=1,
            total_trainable=1,
            num_non_trainable=NUM_NAMES,
            total_non_trainable=NUM_NAMES,
        )
        state.initialize(InitializeCall(header, np.zeros(1, np.float32), np.zeros(NUM_NAMES, np.float32)))
        return state

    @rule(target=leases, task=st.integers(0, NUM_TASKS - 1))
    def grant(self, task: int) -> tuple[int, int]:
        self.newest_lease += 1
        self.valid[task] = self.newest_lease
        return self.newest_lease, task

    @rule(lease=leases, ps_id=PS)
    def take_over(self, lease: tuple[int, int], ps_id: int) -> None:
        self.states[ps_id].standing(lease[0], 0, lease[1])

    @rule(lease=leases, n=st.integers(0, TASK_MINIBATCHES - 1), to=st.sets(PS, min_size=1))
    def push(self, lease: tuple[int, int], n: int, to: set[int]) -> None:
        for ps_id in sorted(to):
            if self.pushed(lease, n, ps_id) == pb.OK:
                self.held.setdefault((lease[0], n), set()).add(ps_id)

    @rule(lease=leases, n=st.integers(0, TASK_MINIBATCHES - 1))
    def push_to_all(self, lease: tuple[int, int], n: int) -> None:
        self.push(lease, n, set(range(NUM_PS)))

    def pushed(self, lease: tuple[int, int], n: int, ps_id: int) -> int:
        number, task = lease
        change = np.zeros(NUM_NAMES, np.float32)
        change[task * TASK_MINIBATCHES + n] = 1.0
        header = pb.Push(lease=number, epoch=0, task=task, minibatch=n, dense=True, num_records=1 + n)
        call = PushCall(header, np.ones(1, np.float32), change, ())
        return self.states[ps_id].exchange(ExchangeCall(0, call, None)).status

    @rule(target=told, lease=leases, n=st.integers(0, TASK_MINIBATCHES - 1), pushing=st.integers(1, 2))
    def confirm(self, lease: tuple[int, int], n: int, pushing: int) -> Any:
        """Only when every PS has said that it holds it."""
        if len(self.held.get((lease[0], n), ())) < NUM_PS:
            return multiple()
        name = MinibatchName(0, lease[1], n)
        known = self.states[0].exchange(ExchangeCall(0, None, None)).applied_round
        done = self.states[0].confirm(lease[0], name, 0, known, lambda: pushing, 0.0)
        if done.status != pb.OK or done.wait:
            assert done.status in (pb.OK, pb.LEASE_REFUSED)
            return multiple()
        assert any((one.task, one.n) == (name.task, n) for told in done.rounds for one in told.names)
        self.carried.setdefault((lease[0], n), set())
        return lease[0], n, pb.Rounds(coordinator=self.lives[0], rounds=done.rounds)

    @rule(told=told, ps_id=PS)
    def carry(self, told: tuple[int, int, pb.Rounds], ps_id: int) -> None:
        lease, n, rounds = told
        self.states[ps_id].exchange(ExchangeCall(0, None, None, rounds=rounds))
        if (lease, n) in self.carried and rounds.coordinator == self.lives[0]:
            self.carried[lease, n].add(ps_id)

    @rule(told=told)
    def carry_to_all(self, told: tuple[int, int, pb.Rounds]) -> None:
        for ps_id in range(NUM_PS):
            self.carry(told, ps_id)

    @rule(ps_id=PS)
    def save(self, ps_id: int) -> None:
        snapshot = self.states[ps_id].snapshot()
        assert snapshot is not None
        snapshot.close()
        self.saved[ps_id] = snapshot

    @rule(ps_id=PS)
    def die_and_restore(self, ps_id: int) -> None:
        """The master revokes all leases, and the others hear of the new partition, or not yet."""
        self.valid.clear()
        self.held.clear()
        self.carried.clear()
        self.lives[ps_id] = max(self.lives) + 1
        part = self.saved[ps_id]
        self.states[ps_id] = self.fresh() if part is None else ServerState(UPDATES)
        if part is not None:
            self.states[ps_id].restore(part, parameters_only=False)

    @rule(ps_id=PS)
    def hear_of_the_partition(self, ps_id: int) -> None:
        self.states[ps_id].accept_coordinator(self.lives[0])

    def applied(self, ps_id: int) -> AppliedSet:
        return AppliedSet.from_message(self.states[ps_id].applied()[0])

    @invariant()
    def what_is_committed_is_in_every_ps(self) -> None:
        for (lease, n), carried in self.carried.items():
            tasks = [task for task, valid in self.valid.items() if valid == lease]
            if len(carried) == NUM_PS and tasks:
                for ps_id in range(NUM_PS):
                    assert MinibatchName(0, tasks[0], n) in self.applied(ps_id)

    @invariant()
    def every_update_has_the_weight_one(self) -> None:
        for ps_id, state in enumerate(self.states):
            snapshot = state.snapshot()
            assert snapshot is not None
            snapshot.close()
            applied = self.applied(ps_id)
            names = {name.task * TASK_MINIBATCHES + name.n for name in applied}
            assert set(np.flatnonzero(snapshot.non_trainable).tolist()) == names
            assert snapshot.non_trainable.max(initial=0.0) <= 1.0
            np.testing.assert_allclose(snapshot.non_trainable.sum(), snapshot.pieces[0].version, rtol=1e-5)
            assert applied.num_applies == len(names)

    def teardown(self) -> None:
        """The last successor of each task finishes it, as a worker does."""
        if not hasattr(self, "states"):
            return
        for ps_id in range(NUM_PS):
            self.hear_of_the_partition(ps_id)
        for task in range(NUM_TASKS):
            lease = self.grant(task)
            for ps_id in range(NUM_PS):
                self.take_over(lease, ps_id)
            for n in range(TASK_MINIBATCHES):
                self.push_to_all(lease, n)
                told = self.confirm(lease, n, 1)
                assert isinstance(told, tuple)
                self.carry_to_all(told)
        self.what_is_committed_is_in_every_ps()
        self.every_update_has_the_weight_one()
        assert all(self.applied(ps_id).num_names == NUM_NAMES for ps_id in range(NUM_PS))


Rounds.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEveryNameOnceInRounds = Rounds.TestCase
