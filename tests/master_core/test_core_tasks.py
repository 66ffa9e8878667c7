"""The tasks handed out, their order, and their completion."""

from __future__ import annotations

import json
from functools import reduce
from operator import or_
from typing import Any

import pytest
from core_script import Like, Script, everything, running, train_all
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.applied import CommittedSet, CommittedTask, TaskName, intersection
from elasticdl.master.core.ledger.leases import key_of
from elasticdl.master.core.plan.epoch import Epoch, coverage_of
from elasticdl.master.core.plan.tasks import MAX_COVERAGES, Tasks, cut
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import PodState, TaskType
from elasticdl.protocol import Role, Shard, task_order
from elasticdl_client.choices import DistributionStrategy, NanPolicy
from elasticdl_client.job_status import EpochCoverage


def test_tasks_cut_every_record_of_every_shard_once_in_the_order_of_names() -> None:
    slices = cut([Shard("b", 0, 5), Shard("a", 0, 25)], 10)
    assert slices == (Shard("a", 0, 10), Shard("a", 10, 20), Shard("a", 20, 25), Shard("b", 0, 5))


def test_the_order_of_tasks_depends_on_seed_and_epoch_alone() -> None:
    assert task_order(1, 0, 50) == task_order(1, 0, 50)
    assert sorted(task_order(1, 0, 50)) == list(range(50))
    assert len({tuple(task_order(seed, epoch, 50)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_applied_sets_intersect_over_watermarks_and_extras() -> None:
    assert CommittedTask.of(2, (5, 2, 3)) == CommittedTask(4, frozenset({5}))
    assert CommittedTask.of(2, (5, 7)) & CommittedTask.of(6) == CommittedTask(2, frozenset({5}))
    assert CommittedTask.of(2, (5,)) & CommittedTask.of(0, (0, 1, 5)) == CommittedTask(2, frozenset({5}))
    one = CommittedSet.of([(0, 0, 4, ()), (0, 1, 1, ())], 5)
    other = CommittedSet.of([(0, 0, 2, (3,))], 3)
    assert intersection([one, other]).tasks() == {(0, 0): CommittedTask(2, frozenset({3}))}
    assert CommittedSet.of([(0, 0, 2, ())], 3).num_repeated == 1


HELD = st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 3)), st.frozensets(st.integers(0, 5)), max_size=8)


@given(sets=st.lists(HELD, min_size=1, max_size=3))
def test_an_intersection_holds_the_names_that_all_hold(sets: list[dict[TaskName, frozenset[int]]]) -> None:
    made = [CommittedSet.of([(*name, 0, held) for name, held in one.items()], 0, one) for one in sets]
    common, either = intersection(made), reduce(or_, made)
    for name in ((epoch, task) for epoch in range(2) for task in range(4)):
        held = [one.get(name, frozenset()) for one in sets]
        assert set(common.of_task(*name)) == common.skipped_in(*name) == frozenset.intersection(*held)
        assert set(either.of_task(*name)) == either.skipped_in(*name) == frozenset.union(*held)
    assert common.num_names == common.num_applies == sum(map(len, common.tasks().values()))


@pytest.mark.parametrize("missing", ["ps", "model", "shards", "sets"])
def test_nothing_is_handed_out_before_all_is_known(missing: str) -> None:
    script = Script()
    script.worker_starts()
    assert script.request() is None
    if missing != "ps":
        script.ps_starts()
    if missing == "shards":
        script.ask(e.ModelReported, 0, 7)
        assert script.commands == [c.Persist(), Like(c.ListShards, kind="training"), Like(c.Reply)]
    elif missing != "model":
        script.data_is_known()
    assert script.request() is None


def test_a_task_carries_its_records_and_its_name() -> None:
    script = running(seed=3)
    lease = script.lease()
    assert lease.type is TaskType.TRAINING
    assert lease.task == task_order(3, 0, 2)[0]
    assert lease.shard == Shard("training", 20 * lease.task, 20 * lease.task + 20)
    assert lease.id == (1 << 32) | 1


def test_a_worker_holds_two_leases_and_waits_for_a_third() -> None:
    script = running(records=80)
    first = script.lease()
    script.lease()
    assert script.request() is None
    script.finish(first)
    assert Like(c.LeaseGranted) in [reply.answer for reply in script.told(c.Reply)]


def test_a_worker_with_input_processes_holds_a_lease_more_for_each() -> None:
    script = running(records=400, num_epochs=2, input_workers=3)
    leases = [script.lease() for _ in range(5)]
    assert script.request() is None
    script.finish(leases[0])
    assert script.request() is not None
    assert script.request() is None


def test_a_worker_may_say_for_how_many_tasks_it_has_processes_of_its_own() -> None:
    """As a script whose loader has them; no more than `MOST_AHEAD`, whatever it says."""
    script = running(2, records=800, num_epochs=2)
    for number in range(5):
        assert isinstance(script.ask(e.LeaseRequested, 0, 7, ahead=3), c.LeaseGranted), number
    assert script.request(0) is None
    script.lease(1)
    script.lease(1)
    assert script.request(1) is None


def test_near_the_end_a_worker_prepares_no_more_than_its_share() -> None:
    """Of eight tasks two workers would else hold five and three."""
    script = running(2, records=160, input_workers=3)
    held = {0: 0, 1: 0}
    while script.request(0) is not None:
        held[0] += 1
    while script.request(1) is not None:
        held[1] += 1
    assert held == {0: 4, 1: 3}


def test_near_the_end_the_share_is_that_of_the_workers_that_have_come_since() -> None:
    script = running(1, records=160, input_workers=3)
    script.tell(e.ScaleRequested(4))
    for worker_id in (1, 2, 3):
        script.worker_starts(worker_id)
    held = 0
    while script.request(0) is not None:
        held += 1
    assert held == 3


def test_a_worker_without_a_lease_is_served_before_one_that_prefetches() -> None:
    script = running(2)
    script.lease(0)
    lease = script.lease(1)
    assert script.request(0) is None
    assert script.request(1) is None
    script.kill(1)
    replies = [reply.answer for reply in script.told(c.Reply)]
    assert replies == [Like(c.LeaseGranted)]
    assert replies[0].lease.task == lease.task
    assert replies[0].lease.id > lease.id


def test_epochs_overlap_and_say_when_they_start() -> None:
    script = running(2, num_epochs=2)
    leases = [script.lease(0), script.lease(0), script.lease(1)]
    assert [lease.epoch for lease in leases] == [0, 0, 1]
    assert [line for line in script.log() if "Starting" in line] == ["Starting epoch 1", "Starting epoch 2"]


def test_a_finished_task_says_how_many_remain() -> None:
    script = running()
    lease = script.lease()
    script.finish(lease)
    assert f"Task:{lease.task} completed, 1 remaining tasks" in script.log()


def test_progress_that_is_reported_twice_counts_once() -> None:
    script = running()
    lease = script.lease()
    assert script.progress(lease, 0) == c.Accepted(1)
    assert script.progress(lease, 0) == c.Accepted(1)
    assert script.progress(lease, 0, 1) == c.Accepted(2)
    assert script.finish(lease) == c.Accepted(2)


def test_a_repeated_report_of_a_tasks_end_is_accepted_and_changes_nothing() -> None:
    script = running()
    lease = script.lease()
    script.finish(lease)
    assert script.progress(lease, 0, 1) == c.Accepted(2)  # of one message, the answer to which was lost
    assert script.finish(lease) == c.Accepted(2)
    assert script.job.status().records_done == 20


def test_a_task_that_a_filter_left_without_minibatches_is_done() -> None:
    script = running()
    script.finish(script.lease(), num_minibatches=0)
    assert script.job.status().records_done == 20


def test_a_message_is_answered_once_up_to_its_first_refused_part_and_after_the_journal() -> None:
    script, call = running(2), 1000
    lease = script.lease()
    leaves = e.HeartbeatReceived(call, Role.WORKER, 0, 7, leaving=True)
    report, end = e.ProgressReported(call, 0, 7, lease.id, (0,), None), e.TaskFinished(call, 0, 7, lease.id, 2)
    script.tell(e.MessageReceived(call, (report, leaves, report, end)))
    kinds = [type(command) for command in script.commands if isinstance(command, c.Persist | c.Reply)]
    assert kinds == [c.Persist, c.Reply]
    accepted, beat, refused = script.answer(call).parts
    assert accepted == c.Accepted(1)
    assert isinstance(beat, c.HeartbeatAnswer)
    assert isinstance(refused, c.Refused)


def test_a_lease_that_a_message_asks_for_comes_with_its_answer_once_a_report_in_it_makes_room() -> None:
    script, call = running(num_epochs=2), 1000
    first, _ = script.lease(), script.lease()

    def message(number: int, *parts: Any) -> Any:
        script.tell(e.MessageReceived(number, parts, e.LeaseRequested(number, 0, 7, at_once=True)))
        assert [reply.call for reply in script.told(c.Reply)] == [number]
        return script.answer(number)

    assert message(call) == c.MessageAnswer((), c.NoLeaseNow())  # it holds as many as it may
    report = e.ProgressReported(call + 1, 0, 7, first.id, (0, 1), None)
    answer = message(call + 1, report, e.TaskFinished(call + 1, 0, 7, first.id, 2))
    assert answer.parts == (c.Accepted(2), c.Accepted(2))
    granted = answer.lease.lease
    assert granted.epoch == 1
    assert message(call + 2).lease == c.NoLeaseNow()
    script.tell(e.CallAbandoned(call + 1))  # the answer was not heard
    again = message(call + 3).lease.lease
    assert (again.epoch, again.task) == (granted.epoch, granted.task)


def test_a_lease_whose_answer_was_lost_comes_back_with_the_workers_next_request() -> None:
    script = running(2, num_epochs=2)

    def ask(number: int, oldest: int, *held: int) -> Any:
        call = 1000 + len(script.history)
        script.tell(e.MessageReceived(call, (), e.LeaseRequested(call, 0, 7, True, None, 0, number, oldest, held)))
        answer = script.answer(call).lease
        return answer.lease if isinstance(answer, c.LeaseGranted) else answer

    first = ask(1, 1)
    second = ask(2, 2, first.id)
    assert ask(3, 3, first.id, second.id) == c.NoLeaseNow()
    again = ask(4, 4, first.id)  # of the second lease the answer was lost
    assert (again.id, key_of(again)) == (script.job._work.leases.newest, key_of(second))
    assert isinstance(script.progress(second, 0), c.Refused)
    assert ask(5, 4, first.id) == c.NoLeaseNow()  # the answer is under way, to another of its requests
    assert ask(3, 3, first.id) == c.NoLeaseNow()  # an earlier message comes late
    script.heartbeat(0, (first.id, again.id))
    assert ask(6, 6, first.id) == c.NoLeaseNow()  # it has named the lease before


def test_a_message_of_a_worker_that_is_not_known_is_answered_with_all_its_parts_refused() -> None:
    script = running()
    beat = e.HeartbeatReceived(1000, Role.WORKER, 5, 1)
    script.tell(e.MessageReceived(1000, (beat,), e.LeaseRequested(1000, 5, 1, at_once=True)))
    answer = script.answer(1000)
    assert not answer.parts[0].known
    assert answer.lease == c.UnknownWorker("register first")


def test_a_report_under_an_old_lease_is_refused() -> None:
    script = running()
    lease = script.lease()
    script.pass_time(12, alive=(0,))
    assert isinstance(script.progress(lease, 0), c.Refused)
    assert script.heartbeat(0, (lease.id,)).revoked == (lease.id,)
    assert script.lease().task == lease.task


def test_another_workers_lease_is_not_mine() -> None:
    script = running(2)
    lease = script.lease(0)
    assert isinstance(script.finish(lease, worker_id=1), c.Refused)


def test_a_lease_whose_grant_was_never_heard_goes_back_at_once() -> None:
    script = running()
    lease = script.lease()
    script.tell(e.CallAbandoned(script._num_calls))
    assert script.lease().task == lease.task


def test_a_long_poll_is_answered_before_the_caller_gives_up() -> None:
    script = running(2)
    held = (script.lease(0).id, script.lease(0).id)
    assert script.request(1) is None
    call = script._num_calls
    script.pass_time(16, alive=(0, 1), holding={0: held})
    assert script.answer(call) == c.NoLeaseNow()


def test_max_step_cuts_the_plan_short_and_the_coverage_says_so() -> None:
    script = running(max_step=3, num_epochs=5)
    leases = [script.lease(), script.lease()]
    assert [len(lease.shard) for lease in leases] == [20, 10]
    for lease in leases:
        script.finish(lease, num_minibatches=len(lease.shard) // 10)
    script.sets_are_read({(0, lease.task): range(len(lease.shard) // 10) for lease in leases})
    assert "Epoch 1: records 40, committed 30, repeated 0, lost 0, unplanned 10" in script.log()
    assert script.job.status().records_total == 30


def test_an_endless_job_ends_at_max_step() -> None:
    script = running(max_step=10, num_epochs=0)
    train_all(script)
    status = script.job.status()
    assert (status.records_done, status.phase) == (100, "Succeeded")
    assert status.tasks_done == status.tasks_total > 0


def test_an_endless_job_without_max_step_continues() -> None:
    tasks = Tasks(JobSettings("j", num_epochs=0, minibatch_size=10), [Shard("a", 0, 40)])
    for _ in range(20):
        assert tasks.can_begin
        tasks.begin_epoch()
    assert tasks.planned_records == 0


def test_a_report_does_not_look_at_the_minibatches_that_are_committed_already() -> None:
    most = 10**9  # one by one they would take minutes
    settings = JobSettings("j", minibatch_size=2, num_minibatches_per_task=most)
    epoch = Epoch(0, [Shard("a", 0, 2 * most - 1)], settings, None)
    epoch.change(0, CommittedTask(most - 3, frozenset({most - 1})))
    assert epoch.committed_records == 2 * (most - 3) + 1
    epoch.change(0, CommittedTask(most - 1))
    assert epoch.committed_records == 2 * (most - 1)


@given(st.integers(-25, 25), st.integers(0, 4), st.sets(st.integers(0, 6)))
def test_the_committed_records_of_an_open_task_are_those_of_its_minibatches(
    surplus: int, watermark: int, extras: set[int]
) -> None:
    epoch = Epoch(0, [Shard("a", 0, 25)], JobSettings("j", minibatch_size=10, num_minibatches_per_task=3), None)
    epoch.change(0, CommittedTask(6), 6, surplus)
    epoch.change(0, CommittedTask.of(watermark, extras))  # the model has lost some
    whole = epoch.records if epoch.is_done(0) else epoch.records_of_minibatches(0, epoch.applied(0))
    assert epoch.committed_records == whole


def test_no_event_looks_at_the_epochs_that_are_covered() -> None:
    script = running(num_ps=0, num_epochs=0, strategy=DistributionStrategy.LOCAL)
    for _ in range(7):
        script.finish(script.lease())
    lease = script.lease()
    tasks = script.job._work.tasks
    tasks.epochs[:3] = [None] * 3  # type: ignore[list-item]
    script.job.handle(e.ProgressReported(100, 0, 7, lease.id, (0,)), 1.0)
    script.job.handle(e.TaskFinished(101, 0, 7, lease.id, 2), 1.0)
    script.job.handle(e.Tick(), 2.0)
    assert (tasks.records_done, tasks.num_remaining, tasks.num_whole(())) == (160, 0, 4)
    status = script.job.status()
    assert (status.records_done, [epoch.committed for epoch in status.coverage]) == (160, [40] * 4)
    assert script.job.snapshot()["tasks"]["epochs"] == [{"plain": 4}]


def test_epochs_that_are_covered_are_summed_up_anew_only_if_the_model_holds_other_minibatches_of_them() -> None:
    script = running(num_epochs=4, nan_policy=NanPolicy.SKIP)
    leases = [script.lease(), script.lease()]
    script.skip(leases[0], 1)
    skipped = {(0, leases[0].task): frozenset({1})}
    tasks, coverage = script.job._work.tasks, list[EpochCoverage]()
    for number in range(1, 4):
        for lease in leases:
            script.finish(lease)
        leases = [script.lease(), script.lease()]
        script.sets_are_read(everything(script, number), skipped=skipped)
        coverage = [*coverage, tasks.settled_coverage()[-1]]
        assert all(one is before for one, before in zip(tasks.settled_coverage(), coverage, strict=True)), number
    held = everything(script, 3)
    script.ps_dies()
    script.ps_starts(life=2)
    script.sets_are_read({**held, (1, 0): (0,)}, skipped={**skipped, (2, 0): frozenset({0})})
    status = script.job.status()
    assert (status.records_done, tasks.num_skipped, tasks.num_covered) == (110, 2, 1)
    assert [(epoch.committed, epoch.skipped) for epoch in status.coverage] == [(30, 10), (30, 10)]
    script.restart_master()
    assert script.job.status().coverage == status.coverage


def test_user_code_that_raises_is_tried_on_another_worker_then_fails_the_job() -> None:
    script = running(2, records=20)
    lease = script.lease(0)
    script.fail(lease, 0)
    assert script.request(0) is None
    again = script.lease(1)
    assert again.task == lease.task
    script.fail(again, 1)
    replies = [reply.answer for reply in script.told(c.Reply)]
    third = next(answer.lease for answer in replies if isinstance(answer, c.LeaseGranted))
    script.fail(third, 0, "ValueError: no such column")
    assert script.job.status().phase == "Failed"
    message = script.job.status().message
    assert "failed 3 times" in message
    assert "ValueError: no such column" in message
    assert "Traceback" in message


def test_the_only_worker_gets_the_failed_task_again() -> None:
    script = running(records=20)
    lease = script.lease()
    script.fail(lease)
    assert script.lease().task == lease.task


def test_lost_leases_are_never_failures() -> None:
    script = running(records=20, max_task_failures=1)
    for worker_id in range(6):
        script.lease(worker_id)
        script.kill(worker_id, "Preempted")
        script.pass_time(61)
        script.worker_starts(worker_id + 1)
    assert script.job.status().phase == "Running"


def test_a_model_that_cannot_be_trained_fails_the_job_by_name() -> None:
    script = Script()
    script.worker_starts()
    script.ask(e.ModelReported, 0, 7, "The layer Foo is not supported.", "Traceback …")
    assert script.job.status().message.startswith("The layer Foo is not supported.")


def test_an_empty_data_source_fails_the_job() -> None:
    script = running(records=0)
    assert script.job.status().phase == "Failed"
    assert "--training_data" in script.job.status().message


def test_unreadable_data_fails_the_job() -> None:
    script = Script()
    script.tell(e.ShardsUnreadable("training", "/data does not exist"))
    assert "/data does not exist" in script.job.status().message


def test_shards_of_a_custom_reader_come_from_the_worker() -> None:
    script = Script(num_ps=0, strategy=DistributionStrategy.LOCAL)
    script.worker_starts()
    script.ask(e.ModelReported, 0, 7, shards={"training": (Shard("table", 0, 20),)})
    assert script.told(c.ListShards) == []
    assert script.lease().shard == Shard("table", 0, 20)


def test_a_prediction_job_hands_every_record_out_once() -> None:
    script = running(has_training_data=False, has_prediction_data=True)
    lease = script.lease()
    assert lease.type is TaskType.PREDICTION
    script.finish(lease)
    script.finish(script.lease())
    assert "Epoch 1: records 40, committed 40, repeated 0, lost 0" in script.log()
    assert script.job.status().phase == "Succeeded"


def test_at_the_end_the_coverage_is_what_the_parameter_servers_hold() -> None:
    script = running()
    script.heartbeat(0, seconds={"start": 0.0})
    script.now = 8.0
    first, second = script.lease(), script.lease()
    script.finish(first)
    assert script.told(c.ReadAppliedSets) == []
    script.heartbeat(0, seconds={"compute": 6.0, "ps": 2.0})
    script.finish(second)
    assert script.commands[-1] == Like(c.ReadAppliedSets)
    assert script.request() is None
    waiting = script._num_calls
    script.sets_are_read(everything(script), num_applies=5)
    assert "Epoch 1: records 40, committed 40, repeated 10, lost 0" in script.log()
    assert script.answer(waiting) == c.JobOver()
    assert script.told(c.EndJob) == []
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED, "Completed")
    assert script.commands[-1] == c.EndJob(0)
    assert script.told(c.DeletePod) == []  # the server that is heard leaves by itself
    assert script.log()[-2:] == ["time: 75 % useful, 25 % waiting for PS", "time of servers: 100 % idle"]


def test_what_the_parameter_servers_lack_at_the_end_is_handed_out_again() -> None:
    script = running()
    leases = [script.lease(), script.lease()]
    for lease in leases:
        script.finish(lease)
    script.sets_are_read({(0, 0): range(2), (0, 1): (0,)})
    assert script.lease().task == 1
    assert any("Epoch 1 is open again" in line for line in script.log())


def test_a_worker_that_does_not_leave_is_given_up() -> None:
    script = running()
    train_all(script)
    script.pass_time(31, alive=(0,))
    assert script.last(c.EndJob) == c.EndJob(0)


def test_a_stopped_job_says_why_and_sends_all_processes_away() -> None:
    script = running()
    script.tell(e.StopRequested("interrupted by the user"))
    assert script.heartbeat(0).stop
    assert script.request() is None
    assert script.last(c.Reply).answer == c.JobOver()
    script.pass_time(6, alive=(0,))
    assert script.last(c.EndJob) == c.EndJob(1, "interrupted by the user")


def test_what_is_committed_while_the_sets_are_read_is_not_taken_back() -> None:
    script = running(num_epochs=2)
    for _ in range(2):
        script.finish(script.lease())
    finished, begun = script.lease(), script.lease()
    script.finish(finished)
    script.progress(begun, 0)
    script.sets_are_read(everything(script))
    assert script.job.status().records_done == 40 + 20 + 10
    assert not any("open again" in line for line in script.log())
    assert script.finish(begun) == c.Accepted(8)


def test_epochs_whose_records_were_all_committed_once_are_a_number_in_the_journal() -> None:
    settings = JobSettings("job", minibatch_size=4, num_minibatches_per_task=2, num_epochs=300)
    shards = [Shard("a", 0, 20), Shard("b", 0, 9)]
    tasks = Tasks(settings, shards)
    for number in range(200):
        epoch = tasks.begin_epoch()
        for task in epoch.order:
            size = -(-len(epoch.slice(task)) // 4)
            if (number, task) == (60, 1):
                epoch.skip(task, [0])
            epoch.change(task, CommittedTask(size), size, -1 if (number, task) == (70, 0) else 0)
        epoch.num_repeated = 4 if number == 50 else 0
        epoch.cover()
    tasks.begin_epoch().change(0, CommittedTask(1))
    saved = json.loads(json.dumps(tasks.snapshot()))
    assert [entry.get("plain") for entry in saved["epochs"]] == [50, None, 9, None, 9, None, 129, None]
    for epochs in (saved["epochs"], [epoch.snapshot() for epoch in tasks.epochs]):  # as earlier versions wrote them
        restored = Tasks(settings, shards)
        restored.restore(saved | {"epochs": epochs})
        restored.validate()
        assert restored.snapshot() == saved
        assert [vars_of(epoch) for epoch in restored.epochs] == [vars_of(epoch) for epoch in tasks.epochs]


def test_of_many_epochs_the_coverage_is_summed_up_and_lacks_nothing() -> None:
    tasks = Tasks(JobSettings("job", minibatch_size=4, num_minibatches_per_task=2), [Shard("a", 0, 20)])
    for number in range(3 * MAX_COVERAGES):
        epoch = tasks.begin_epoch()
        epoch.num_repeated = number
        epoch.finish()
    expected = [coverage_of(epoch) for epoch in tasks.epochs]
    found = tasks.settled_coverage()
    assert MAX_COVERAGES // 2 <= len(found) <= MAX_COVERAGES
    assert found[1:] == expected[1 - len(found) :]
    assert EpochCoverage.total(found) == EpochCoverage.total(expected)
    tasks.reconcile(CommittedSet())
    assert tasks.settled_coverage() == []


def vars_of(epoch: Epoch) -> list[object]:
    counts = [epoch.num_done, epoch.num_minibatches, epoch.committed_records, epoch.processed_records, epoch.num_todo]
    return [*counts, epoch.covered, epoch.snapshot(), coverage_of(epoch)]
