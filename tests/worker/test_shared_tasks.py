"""--fixed_global_batch: a step is the next G minibatches of the epoch's order, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from elasticdl.activities import ActivityClock
from elasticdl.ps.applied import MinibatchName
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.global_batch_source import GlobalBatches
from elasticdl.worker.allreduce.prefetchers import BatchPrefetcher, InterruptibleLeases, LeasePrefetcher, LocalLeases
from elasticdl.worker.allreduce.step_header import StepFlag, StepPlan
from elasticdl.worker.ledger import UNKNOWN, Ledger, RestoredModel
from elasticdl.worker.reporter import Reporter, TaskFailures
from elasticdl.worker.tasks import TaskStream
from elasticdl_client.choices import NanPolicy
from elasticdl_client.job_spec import JobSpec
from tests.worker.counting import Counting, Numbers, lease
from tests.worker.group_master import ANSWER_S, GroupMaster, SessionMember, ended

MINIBATCH, PER_STEP = 2, 3
Steps = list[list[list[int]]]
"""Of one member: of each step, the records of each of its own minibatches."""


class Sharing(SessionMember):
    """A member whose minibatches are those of the group."""

    def __init__(self, master: GroupMaster, worker_id: int, num_per_epoch: int = 0, skips: bool = False) -> None:
        super().__init__(master, worker_id)
        self.made: Steps = []
        self.framework = Counting(MINIBATCH)
        framework: Any = self.framework
        clock = ActivityClock()
        self.local = local = LocalLeases()
        tasks = TaskStream(local, lambda kind: Numbers(), lambda held: None, 1, False, clock)
        self.reporter = Reporter(self.link, 1)
        failures = TaskFailures(self.link, self.reporter)
        spec = JobSpec(
            minibatch_size=MINIBATCH,
            fixed_global_batch=MINIBATCH * PER_STEP,
            nan_policy=NanPolicy.SKIP if skips else NanPolicy.FAIL,
        )
        drawer = LeasePrefetcher(InterruptibleLeases(self.link))
        feeder = BatchPrefetcher(tasks, local, framework)
        self.supply = GlobalBatches(spec, self.session, drawer, local, feeder, failures, num_per_epoch)

    def close(self) -> None:
        super().close()
        self.reporter.drain(ANSWER_S)

    def begin(self) -> None:
        """Leases are asked for from now on; enters its first group."""
        self.supply.start()
        self.again()

    def again(self) -> None:
        """Enters the next group."""
        assert self.session.enter()
        self.supply.entered()

    def planned(self) -> StepPlan | None:
        """One exchange of headers; the plan if it is one of a step."""
        supply = self.supply
        plan = self.session.plan_step(supply.offer(0.0), supply.wish)
        supply.confirmed(self.session.take_confirmed())
        return plan if supply.agree(plan) else None

    def round(self) -> None:
        """One exchange of headers, and the step if it is one."""
        plan = self.planned()
        if plan is not None:
            self.session.commit(plan, self.supply.reported(plan))
            self.made.append([self.supply.batch(part).data for part in plan.own if part.num_records])
            self.supply.applied(plan, 0.5)

    def fail_in_the_update(self) -> None:
        """Of the next step; the master takes its leases back, as no member holds the model any more."""
        while self.planned() is None:
            pass
        self.session.abandon("user code raised", is_model_whole=False)
        self.supply.fail(ValueError("ugly"))
        self.link.leases.revoke([held.id for held in self.link.leases.held()])

    def until_settled(self, flaws: Mapping[int, str], lost: Sequence[int] = ()) -> bool:
        """Rounds until a step of which something is not finite, then leases are lost; whether it is applied."""
        plan = None
        while plan is None:
            plan = self.planned()
        self.link.leases.revoke(lost)
        return self.supply.settle(plan, self.session.all_flawed(plan, flaws), flaws)

    def steps(self, count: int) -> Steps:
        """Rounds until this number of steps is made."""
        self.made = []
        while len(self.made) < count:
            self.round()
        return self.made


class Life:
    """Members and their master."""

    def __init__(self, leases: tuple[pb.Lease, ...], size: int, **others: Any) -> None:
        self.stack = ExitStack()
        self.master = GroupMaster(*leases)
        self.stack.callback(self.master.stop)
        self.members = [Sharing(self.master, number, **others) for number in range(size)]
        for member in self.members:
            self.stack.callback(member.close)
        self.stack.callback(self.master.end)

    def begin(self) -> None:
        begun = [member.does(Sharing.begin) for member in self.members]
        self.master.plan(*range(len(self.members)))
        for one in begun:
            one.result(ANSWER_S)

    def cut_to(self, number: int) -> None:
        """Of two members one is cut off; the other continues alone."""
        stays, leaves = self.members[number], self.members[1 - number]
        self.members = [stays]
        leaves.does(lambda member: member.session.abandon("it was cut off")).result()
        stays.does(ended).result(ANSWER_S)
        again = stays.does(Sharing.again)
        self.master.plan(number, sources=[number])
        again.result(ANSWER_S)

    def steps(self, count: int) -> Steps:
        """The minibatches of each step, of all members by rank."""
        made = self.all_do(Sharing.steps, count)
        return [[minibatch for own in step for minibatch in own] for step in zip(*made, strict=True)]

    def all_do(self, verb: Callable[..., Any], *arguments: Any) -> list[Any]:
        begun = [member.does(verb, *arguments) for member in self.members]
        return [one.result(ANSWER_S) for one in begun]

    def told(self) -> dict[int, tuple[set[int], int]]:
        """By lease, once the last step is proven: minibatches that were reported, and the length of a whole task."""
        self.all_do(Sharing.round)
        for member in self.members:
            member.reporter.drain()
        found: dict[int, tuple[set[int], int]] = {}
        for method, request in self.master.told:
            if method == "progress":
                done, length = found.get(request.lease, (set(), 0))
                found[request.lease] = done.union(request.committed), length
            if method == "finished":
                found[request.lease] = found.get(request.lease, (set(), 0))[0], request.num_minibatches
        return found

    def surpluses(self) -> dict[int, int]:
        """By lease, once `told` has been asked for: samples beyond one a record, of whole tasks."""
        self.told()
        return {request.lease: request.surplus.count for method, request in self.master.told if method == "finished"}


Make = Callable[..., Life]


@pytest.fixture
def life() -> Iterator[Callable[..., Life]]:
    made: list[Life] = []

    def make(*leases: pb.Lease, size: int = 2, **others: Any) -> Life:
        made.append(Life(leases, size, **others))
        return made[-1]

    yield make
    for one in made:
        one.stack.close()


def name(task: int, n: int) -> MinibatchName:
    return MinibatchName(0, task, n)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_steps_are_the_same_for_every_group_and_rank_0_reports_them(life: Make, size: int) -> None:
    one = life(lease(0), lease(1), lease(2, length=6), size=size, num_per_epoch=7)
    one.begin()
    assert one.steps(3) == [
        [[0, 1], [2, 3], [100, 101]],
        [[102, 103], [200, 201], [202, 203]],
        [[204, 205]],
    ]
    assert one.told() == {1000: ({0, 1}, 2), 1001: ({0, 1}, 2), 1002: ({0, 1, 2}, 3)}
    assert {r.worker_id for method, r in one.master.told if method in ("progress", "finished")} == {0}
    assert [member.session.ledger.num_records for member in one.members] == [14] * size


def test_what_the_model_holds_of_a_lease_that_comes_later_is_reported_and_not_made_again(life: Make) -> None:
    one = life(lease(0), lease(1), lease(2), num_per_epoch=6)
    held = Ledger(steps=1, num_records=6)
    for position in ((0, 0), (0, 1), (1, 0)):
        held.applied.add(name(*position))
    one.members[0].state.restored = RestoredModel(held, "checkpoints/1")
    one.begin()
    assert one.steps(1) == [[[102, 103], [200, 201], [202, 203]]]
    assert one.told() == {1000: ({0, 1}, 2), 1001: ({0, 1}, 2), 1002: ({0, 1}, 2)}


def test_remaining_members_continue_where_all_were(life: Make) -> None:
    one = life(lease(0), lease(1), lease(2), num_per_epoch=6)
    one.begin()
    assert one.steps(1) == [[[0, 1], [2, 3], [100, 101]]]
    one.cut_to(0)
    assert one.steps(1) == [[[102, 103], [200, 201], [202, 203]]]
    assert one.told() == {1000: ({0, 1}, 2), 1001: ({0, 1}, 2), 1002: ({0, 1}, 2)}


def test_remaining_members_make_the_rest_of_the_epoch(life: Make) -> None:
    one = life(lease(0, length=8), num_per_epoch=4)
    one.begin()
    assert one.steps(1) == [[[0, 1], [2, 3], [4, 5]]]
    one.cut_to(0)
    assert one.steps(1) == [[[6, 7]]]
    assert one.told() == {1000: ({0, 1, 2, 3}, 4)}


def test_a_task_of_which_two_leases_are_held_is_made_once(life: Make) -> None:
    one = life(size=1, num_per_epoch=6)
    taken_back = (lease(0), lease(1))  # the worker does not know it
    for held in (*taken_back, lease(0, life=1), lease(1, life=1), lease(2)):
        one.members[0].link.leases.add(held)
    one.begin()
    assert one.steps(2) == [[[0, 1], [2, 3], [100, 101]], [[102, 103], [200, 201], [202, 203]]]
    told = one.told()
    assert [told[granted] for granted in (5000, 5001, 1002)] == [({0, 1}, 2)] * 3


def test_a_second_lease_on_minibatches_of_the_newest_step_is_reported_once_all_hold_them(life: Make) -> None:
    one = life(lease(0), lease(1), num_per_epoch=6)
    one.begin()
    assert one.steps(1) == [[[0, 1], [2, 3], [100, 101]]]
    begun = one.members[0].does(lambda member: member.supply.offer(ANSWER_S))
    one.master.grant(lease(0, life=1))
    assert begun.result(ANSWER_S) == []
    one.members[0].reporter.drain()
    assert 5000 not in {request.lease for method, request in one.master.told if method == "progress"}
    assert one.told()[5000] == ({0, 1}, 2)


def test_what_rank_0_has_to_share_is_not_kept_until_more_comes(life: Make) -> None:
    one = life(lease(0), size=1, num_per_epoch=6)
    one.begin()
    (member,) = one.members
    while not member.supply.wish & StepFlag.SHARING:
        assert member.does(lambda member: member.supply.offer(0.0)).result(ANSWER_S) == []
    assert member.does(lambda member: member.supply.offer(10 * ANSWER_S)).result(ANSWER_S) == []


def test_leases_that_are_worked_off_are_forgotten(life: Make) -> None:
    one = life(*(lease(number) for number in range(12)), num_per_epoch=24)
    one.begin()
    one.steps(8)
    assert one.told().keys() == {1000 + number for number in range(12)}
    assert [member.local.leases.held() for member in one.members] == [[], []]


def test_the_next_rank_0_continues_with_leases_of_its_own(life: Make) -> None:
    one = life(lease(0), lease(1), lease(2), num_per_epoch=6)
    one.begin()
    assert one.steps(1) == [[[0, 1], [2, 3], [100, 101]]]
    one.master.grants_all()  # to the one that leaves
    one.cut_to(1)
    one.master.grant(lease(1, life=1), lease(2, life=1))
    assert one.steps(1) == [[[102, 103], [200, 201], [202, 203]]]
    told = one.told()
    assert told[5001] == ({0, 1}, 2)
    assert told[5002] == ({0, 1}, 2)


def test_a_task_whose_code_raises_anywhere_is_reported_by_rank_0_and_made_again_later(life: Make) -> None:
    one = life(lease(0), lease(1), lease(2), num_per_epoch=6)
    for member in one.members:
        member.framework.bad = {100}  # in the piece of rank 1
    one.begin()
    begun = [member.does(Sharing.steps, 2) for member in one.members]
    (told,) = one.master.hears("FailTask")
    assert (told.worker_id, told.lease, told.minibatch) == (0, 1001, 0)
    assert told.error == "ValueError: ugly 100 (record 100 of s: '100')."
    assert "FeedError" in told.details
    for member in one.members:
        member.framework.bad = set()
    one.master.grant(lease(1, life=1))
    made = [one_more.result(ANSWER_S) for one_more in begun]
    steps = [[*mine, *others] for mine, others in zip(*made, strict=True)]
    assert steps == [[[0, 1], [2, 3], [200, 201]], [[202, 203], [100, 101], [102, 103]]]


def test_a_failure_waits_for_its_task_where_training_continues_from_an_older_model(life: Make) -> None:
    one = life(lease(0, length=6), lease(1, length=6), size=1, num_per_epoch=6)
    one.begin()
    assert one.steps(1) == [[[0, 1], [2, 3], [4, 5]]]
    (member,) = one.members
    member.does(Sharing.fail_in_the_update).result(ANSWER_S)
    member.state.restored = RestoredModel(Ledger())
    again = member.does(Sharing.again)
    one.master.plan(0)
    again.result(ANSWER_S)
    one.master.grant(lease(0, length=6, life=1))
    assert one.steps(1) == [[[0, 1], [2, 3], [4, 5]]]
    begun = member.does(Sharing.steps, 1)
    one.master.grant(lease(1, length=6, life=1))
    (told,) = one.master.hears("FailTask")
    assert (told.lease, told.minibatch, told.error) == (5001, 0, "ValueError: ugly")
    one.master.grant(lease(1, length=6, life=2))
    assert begun.result(ANSWER_S) == [[[100, 101], [102, 103], [104, 105]]]


def test_a_minibatch_of_which_a_filter_leaves_nothing_counts_as_made(life: Make) -> None:
    one = life(lease(0), lease(1), num_per_epoch=4)
    for member in one.members:
        member.framework.dropped = {2, 3, 100, 101}
    one.begin()
    assert one.steps(2) == [[[0, 1], [102, 103]], []]
    assert one.told() == {1000: ({0, 1}, 2), 1001: ({0, 1}, 2)}
    assert one.surpluses() == {1000: -2, 1001: -2}


def test_the_samples_of_a_task_are_counted_over_all_members_and_groups(life: Make) -> None:
    one = life(lease(0, length=8), num_per_epoch=4)
    for member in one.members:
        member.framework.dropped = {1, 7}
    one.begin()
    assert one.steps(1) == [[[0, 2], [3, 4], [5, 6]]]
    one.cut_to(1)
    one.master.grant(lease(0, length=8, life=1))
    assert one.steps(1) == [[]]
    assert one.told()[4000 + 1000] == ({0, 1, 2, 3}, 4)
    assert one.surpluses()[5000] == -2


def test_samples_whose_number_a_checkpoint_does_not_know_are_not_spoken_of(life: Make) -> None:
    one = life(lease(0), lease(1), num_per_epoch=4)
    for member in one.members:
        member.framework.dropped = {2, 3, 102, 103}
    held = Ledger(steps=1, num_records=2)
    held.num_samples[0, 0] = UNKNOWN
    held.applied.add(name(0, 0))
    one.members[0].state.restored = RestoredModel(held, "checkpoints/1")
    one.begin()
    assert one.steps(1) == [[[100, 101]]]
    assert one.surpluses() == {1000: 0, 1001: -2}


def test_more_minibatches_than_are_planned_fail_their_task(life: Make) -> None:
    one = life(lease(0), num_per_epoch=2)
    for member in one.members:
        member.framework.repeated = {2, 3}
    one.begin()
    begun = [member.does(Sharing.steps, 1) for member in one.members]
    (told,) = one.master.hears("FailTask")
    assert told.error.startswith("feed makes 6 samples of 4 records: 3 minibatches instead of 2. --fixed_global_batch")
    assert (told.lease, told.details) == (1000, "")
    for member in one.members:
        member.framework.repeated = set()
    one.master.grant(lease(0, life=1))
    assert [step.result(ANSWER_S) for step in begun] == [[[[0, 1]]], [[[2, 3]]]]


def test_an_epoch_of_which_the_plan_says_nothing_ends_when_the_master_says_so(life: Make) -> None:
    one = life(lease(0), lease(1))
    one.begin()
    one.master.whole_epochs, one.master.newest_lease = 1, 1001
    one.members[0].link.start_heartbeat()
    assert one.steps(2) == [[[0, 1], [2, 3], [100, 101]], [[102, 103]]]


def test_tasks_of_another_kind_are_for_the_loop(life: Make) -> None:
    one = life(lease(0, task_type=pb.EVALUATION), lease(1), lease(2, length=2), size=1)
    one.begin()
    assert one.steps(1) == [[[100, 101], [102, 103], [200, 201]]]
    other = one.members[0].supply.take_other()
    assert other is not None
    assert other.id == 1000
    one.members[0].supply.other_is_done()
    assert one.members[0].supply.take_other() is None


def test_a_minibatch_that_is_not_finite_under_a_lost_lease_waits_for_the_next_one(life: Make) -> None:
    one = life(lease(0), lease(1), num_per_epoch=4, skips=True)
    one.begin()
    begun = [
        member.does(Sharing.until_settled, flaws, lost)
        for member, flaws, lost in zip(one.members, ({}, {0: "the loss is nan"}), ([1000], []), strict=True)
    ]
    assert [settled.result(ANSWER_S) for settled in begun] == [False, False]
    one.master.grant(lease(0, life=1))
    assert one.steps(1) == [[[100, 101], [102, 103], [0, 1]]]


def test_a_task_whose_lease_is_held_stays_if_another_one_of_the_step_is_lost(life: Make) -> None:
    """The master grants it to none while rank 0 holds it."""
    one = life(lease(0), lease(1), num_per_epoch=4, skips=True)
    one.begin()
    begun = [
        member.does(Sharing.until_settled, flaws, lost)
        for member, flaws, lost in zip(one.members, ({}, {0: "nan", 1: "nan"}), ([1000], []), strict=True)
    ]
    assert [settled.result(ANSWER_S) for settled in begun] == [False, False]
    one.master.grant(lease(0, life=1))
    assert one.steps(1) == [[[100, 101], [102, 103], [0, 1]]]


@pytest.mark.parametrize("skips", [True, False])
def test_minibatches_that_are_not_finite_are_reported_by_rank_0_before_the_step_is_applied(
    life: Make, skips: bool
) -> None:
    one = life(lease(0), lease(1), num_per_epoch=4, skips=skips)
    one.begin()
    begun = [
        member.does(Sharing.until_settled, flaws)
        for member, flaws in zip(one.members, ({}, {0: "the loss is nan"}), strict=True)
    ]
    assert [settled.result(ANSWER_S) for settled in begun] == [skips, skips]
    if skips:
        told = [report for report in one.master.hears("progress") if report.skipped]
        assert [(t.worker_id, t.lease, list(t.skipped), t.not_finite) for t in told] == [
            (0, 1000, [1], "the loss is nan")
        ]
    else:
        (told,) = one.master.hears("progress")
        assert (told.worker_id, told.lease, list(told.committed)) == (0, 1000, [])
        assert told.not_finite == "the loss is nan, in minibatch 1"
