"""Where the time of wanted workers and servers goes: one script for each rule of docs/goodput.md."""

from __future__ import annotations

import pytest
from core_script import Script, running
from group_script import GroupScript, standing

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import PodState, PsUsage
from elasticdl.protocol import Role
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.goodput import PsState, SlotState


def split(script: Script, later: float = 0.0) -> dict[SlotState, float]:
    """Seconds of all workers by state, of those that have any; they are all that there are."""
    script.job.validate_state()
    seconds = script.job.status(script.now + later).worker_seconds
    assert round(sum(seconds.values()), 6) == round((script.now + later) * script.settings.num_workers, 6)
    return {SlotState(state): round(value, 3) for state, value in seconds.items() if value}


def of_pods(script: Script, *workers: int) -> dict[SlotState, float]:
    """Seconds of pods by state, as far as they are settled."""
    found: dict[SlotState, float] = {}
    for worker in workers:
        for cell in script.job._workers.times.pods.cells(worker).values():
            for state, us in cell.items():
                found[state] = found.get(state, 0) + us / 1e6
    return {state: round(value, 3) for state, value in found.items() if value}


def of_servers(script: Script) -> dict[PsState, float]:
    seconds = script.job.status(script.now).ps_seconds
    assert round(sum(seconds.values()), 6) == round(script.now * script.settings.num_ps, 6)
    return {PsState(state): round(value, 3) for state, value in seconds.items() if value}


def tick(script: Script, at: float) -> None:
    script.now = at
    script.tell(e.Tick())


def beat(script: Script, at: float, worker_id: int = 0, **seconds: float) -> None:
    """A heartbeat that says how the time of the process was split so far."""
    script.now = at
    leases = tuple(lease.id for lease in script.job._work.leases.of_worker(worker_id))
    script.heartbeat(worker_id, leases, seconds=seconds)


def test_a_slot_is_unscheduled_until_its_pod_has_a_node_and_starting_until_it_says_more() -> None:
    script = Script()
    script.ps_starts()
    script.now = 3.0
    name = script.settings.pod_name(Role.WORKER, 0)
    script.tell(e.PodChanged(name, Role.WORKER, 0, "uid", PodState.PENDING, node="n7"))  # its image is pulled
    assert split(script, later=1.0) == {SlotState.UNSCHEDULED: 3.0, SlotState.STARTING: 1.0}
    script.now = 5.0
    script.worker_starts()
    beat(script, 6.0, start=0.5, compile=0.25)
    assert split(script) == {SlotState.UNSCHEDULED: 3.0, SlotState.STARTING: 3.0}


def test_a_pod_that_finds_no_room_is_unscheduled() -> None:
    script = Script()
    tick(script, 4.0)
    script.pod(Role.WORKER, 0, PodState.PENDING)
    tick(script, 9.0)
    assert split(script) == {SlotState.UNSCHEDULED: 9.0}


def test_the_beginning_of_a_process_is_not_counted_twice() -> None:
    script = running()
    beat(script, 2.0, start=5.0, input=1.0)  # it began before its pod was seen to run
    assert split(script) == {SlotState.STARTING: 1.0, SlotState.INPUT: 1.0}


def test_each_activity_is_a_state() -> None:
    script = running()
    beat(script, 0.0, start=0.0)
    for number, activity in enumerate(("ps", "world", "join", "input", "evaluate", "export", "checkpoint", "idle")):
        script.heartbeat(0, seconds={})  # says nothing, and changes nothing
        script.now = number + 1.0
        done = dict.fromkeys(("ps", "world", "join", "input", "evaluate", "export", "checkpoint", "idle")[:number], 1.0)
        beat(script, script.now, **done, **{activity: 1.0})
    beat(
        script, 9.0, **dict.fromkeys(("ps", "world", "join", "input", "evaluate", "export", "checkpoint"), 1.0), idle=2
    )
    beat(script, 10.0, **done, idle=2, dreaming=1.0)
    assert split(script) == {
        SlotState.WAITING_PS: 1.0,
        SlotState.WAITING_GROUP: 2.0,
        SlotState.INPUT: 1.0,
        SlotState.EVALUATING: 1.0,
        SlotState.SAVING: 2.0,
        SlotState.IDLE: 2.0,
        SlotState.UNKNOWN: 1.0,
    }


def test_computing_is_useful_once_it_is_committed_and_repeated_if_its_worker_is_lost() -> None:
    script = running()
    lease = script.lease()
    beat(script, 2.0, compute=2.0)
    script.progress(lease, 0)
    beat(script, 5.0, compute=4.0, ps=1.0)
    assert split(script) == {SlotState.USEFUL: 4.0, SlotState.WAITING_PS: 1.0}
    script.kill(0)
    assert split(script) == {SlotState.USEFUL: 2.0, SlotState.REPEATED: 2.0, SlotState.WAITING_PS: 1.0}


def test_a_commit_between_two_heartbeats_divides_what_was_computed() -> None:
    script = running()
    lease = script.lease()
    beat(script, 1.0, compute=1.0)
    script.progress(lease, 0)
    script.now = 1.75
    script.progress(lease, 1)
    script.now = 2.0
    script.kill(0)  # before it could say what it did since the last heartbeat
    assert split(script) == {SlotState.USEFUL: 1.75, SlotState.REPEATED: 0.25}


def test_the_lane_of_a_pod_has_its_own_time_and_what_it_lost_where_it_was_computed() -> None:
    script = running(num_workers=2)
    lease = script.lease()
    beat(script, 2.0, compute=2.0)
    script.progress(lease, 0)
    beat(script, 4.0, compute=4.0)
    beat(script, 4.0, 1, input=4.0)
    script.now = 4.5
    script.kill(0)
    pods = script.job._workers.times.pods
    assert of_pods(script, 0) == {SlotState.USEFUL: 2.0, SlotState.REPEATED: 2.5}
    assert [sorted(cell) for cell in pods.cells(0).values()][1:4] == [
        [SlotState.USEFUL], [SlotState.REPEATED, SlotState.USEFUL], [SlotState.REPEATED, SlotState.USEFUL],
    ]  # fmt: skip
    assert of_pods(script, 1) == {SlotState.INPUT: 4.0}
    assert split(script) == {SlotState.USEFUL: 2.0, SlotState.REPEATED: 2.5, SlotState.INPUT: 4.5}


def test_the_lanes_of_pods_are_in_the_journal_and_later_losses_change_them_there() -> None:
    script = running(strategy=DistributionStrategy.LOCAL, num_ps=0)
    beat(script, 3.0, compute=3.0)
    restart(script, 5.0, 0)
    assert of_pods(script, 0) == {SlotState.USEFUL: 3.0}
    script.worker_joins(0)
    beat(script, 6.0, compute=6.0)
    script.kill(0)
    assert of_pods(script, 0) == {SlotState.REPEATED: 6.0}


def test_a_lost_worker_counts_for_two_seconds_as_doing_what_it_did_and_then_as_lost() -> None:
    script = running()
    beat(script, 1.0, input=0.5, ps=0.5)
    script.now = 8.0
    script.kill(0, "NodeLost")
    tick(script, 8.0)
    assert split(script) == {SlotState.INPUT: 1.5, SlotState.WAITING_PS: 1.5, SlotState.RECOVERING: 5.0}


def test_after_a_loss_a_slot_recovers_until_its_successor_is_created_and_then_starts() -> None:
    script = running()
    beat(script, 1.0, input=1.0)
    script.kill(0, "Error")  # its own fault: the successor waits a second
    tick(script, 1.5)
    assert split(script) == {SlotState.INPUT: 1.0, SlotState.RECOVERING: 0.5}
    tick(script, 2.0)
    assert script.told(c.CreatePod)
    tick(script, 3.0)
    script.worker_starts(1)
    script.now = 5.0
    script.heartbeat(1, seconds={"start": 1.0})
    assert split(script) == {
        SlotState.INPUT: 1.0,
        SlotState.RECOVERING: 1.0,
        SlotState.UNSCHEDULED: 1.0,
        SlotState.STARTING: 2.0,
    }


def test_a_successor_that_the_quota_does_not_let_in_is_unscheduled() -> None:
    script = running()
    beat(script, 1.0, input=1.0)
    script.kill(0)
    script.tell(e.PodNotCreated(script.settings.pod_name(Role.WORKER, 1), "exceeded quota"))
    script.now = 1.5
    assert split(script) == {SlotState.INPUT: 1.0, SlotState.UNSCHEDULED: 0.5}


def test_what_was_computed_under_a_lease_that_was_not_renewed_is_repeated() -> None:
    script = running()
    script.lease()
    beat(script, 1.0, compute=1.0)
    for second in range(2, 14):
        script.now = float(second)
        script.heartbeat(0, (), seconds={"compute": float(second)})  # it names no lease
        script.tell(e.Tick())
    assert split(script) == {SlotState.REPEATED: 12.0, SlotState.USEFUL: 1.0}  # the last second may still be committed


def test_a_task_whose_user_code_raised_was_computed_for_nothing() -> None:
    script = running(num_workers=2)
    beat(script, 2.0, compute=2.0)
    script.fail(script.lease())
    assert split(script)[SlotState.REPEATED] == 2.0


def test_a_worker_that_was_asked_to_end_is_stopped() -> None:
    script = running()
    beat(script, 1.0, input=1.0)
    script.now = 2.0
    script.heartbeat(0, seconds={"input": 2.0}, leaving=True)
    tick(script, 5.0)
    assert split(script) == {SlotState.INPUT: 2.0, SlotState.STOPPED: 3.0}


def test_a_model_that_falls_back_moves_the_average_of_its_lost_minibatches() -> None:
    script = running()
    first, second = script.lease(), script.lease()
    beat(script, 4.0, compute=4.0)
    script.finish(first)
    script.progress(second, 0)
    assert split(script) == {SlotState.USEFUL: 4.0}
    script.ps_dies()
    script.ps_starts(life=2)
    script.sets_are_read({(0, first.task): range(1)})  # one of three is left
    assert split(script) == {SlotState.USEFUL: 1.334, SlotState.REPEATED: 2.666} or split(script) == {
        SlotState.USEFUL: 1.333,
        SlotState.REPEATED: 2.667,
    }


def test_a_worker_without_a_task_while_servers_are_missing_waits_for_them() -> None:
    script = Script()
    script.worker_starts()
    beat(script, 2.0, idle=2.0)
    script.ps_starts()
    beat(script, 3.0, idle=3.0)
    beat(script, 5.0, idle=5.0)
    assert split(script) == {SlotState.WAITING_PS: 3.0, SlotState.IDLE: 2.0}


def test_a_process_that_begins_anew_in_its_pod_recovers() -> None:
    script = running()
    beat(script, 2.0, input=2.0)
    script.now = 5.0
    script.worker_joins(0, incarnation=8)
    script.now = 6.0
    script.ask(e.HeartbeatReceived, Role.WORKER, 0, 8, seconds={"start": 1.5})
    assert split(script) == {SlotState.INPUT: 2.0, SlotState.RECOVERING: 2.5, SlotState.STARTING: 1.5}


def restart(script: Script, at: float, *living: int, resumed_at: float = 0.0) -> None:
    """The master's next life, which finds these workers."""
    script.now = at
    script.restart_master(resumed_at)
    pods = [script.settings.pod_name(Role.WORKER, index) for index in living]
    script.tell(
        e.PodsListed(
            tuple(
                e.PodChanged(n, Role.WORKER, i, f"{n}/1", PodState.RUNNING) for i, n in zip(living, pods, strict=True)
            )
        )
    )


def test_a_worker_that_lived_on_says_what_it_did_while_the_master_was_away() -> None:
    script = running(strategy=DistributionStrategy.LOCAL, num_ps=0)
    beat(script, 1.0, compute=1.0)
    restart(script, 5.0, 0)
    assert split(script) == {SlotState.USEFUL: 1.0, SlotState.MASTER_AWAY: 4.0}
    script.worker_joins(0)
    beat(script, 6.0, compute=3.0, idle=3.0)  # nothing could be asked for
    assert split(script) == {SlotState.USEFUL: 3.0, SlotState.MASTER_AWAY: 3.0}


def test_of_a_worker_that_did_not_live_on_the_master_was_away() -> None:
    script = running(num_workers=2, strategy=DistributionStrategy.LOCAL, num_ps=0)
    beat(script, 1.0, 0, input=1.0)
    beat(script, 1.0, 1, input=1.0)
    restart(script, 5.0, 1)
    assert split(script) == {SlotState.INPUT: 2.0, SlotState.MASTER_AWAY: 8.0}
    beat(script, 6.0, 1, input=6.0)
    assert split(script)[SlotState.INPUT] == 7.0
    assert split(script)[SlotState.MASTER_AWAY] == 4.0


def test_time_counts_from_the_submission_and_before_the_first_answer_there_is_no_pod() -> None:
    job = Job(JobSettings("j", num_workers=2, num_ps=1), now=100.0, began_at=93.0)
    job.handle(e.PodsListed(()), 101.0)
    job.validate_state()
    status = job.status(103.0)
    assert status.elapsed_seconds == 10.0
    assert (status.worker_seconds[SlotState.UNSCHEDULED], sum(status.worker_seconds.values())) == (20.0, 20.0)
    assert status.ps_seconds[PsState.ABSENT] == 10.0


def test_a_submission_by_a_clock_that_is_ahead_costs_no_negative_time() -> None:
    job = Job(JobSettings("j", num_workers=2), now=100.0, began_at=110.0)
    job.handle(e.PodsListed(()), 101.0)
    job.validate_state()
    assert job.status(105.0).elapsed_seconds == 0.0
    job.handle(e.Tick(), 112.0)
    job.validate_state()
    assert sum(job.status(112.0).worker_seconds.values()) == 4.0


def test_the_pause_of_a_stopped_job_is_stopped_and_its_servers_are_absent() -> None:
    script = running(num_workers=2)
    for worker_id in (0, 1):
        beat(script, 4.0, worker_id, input=4.0)
    job = Job.restore(script.settings, script.job.snapshot(), 2, now=70.0, resumed_at=64.0)
    for now in (70.0, 71.0):
        job.handle(e.PodsListed(()), now)
        job.validate_state()
    found = job.status(71.0)
    assert found.elapsed_seconds == 71.0
    assert found.worker_seconds[SlotState.STOPPED] == 2 * 60.0
    assert found.worker_seconds[SlotState.MASTER_AWAY] == 2 * 6.0
    assert round(sum(found.worker_seconds.values()), 6) == 2 * 71.0
    assert found.ps_seconds[PsState.ABSENT] >= 60.0
    assert round(sum(found.ps_seconds.values()), 6) == 71.0


def test_a_worker_that_outlived_the_stop_says_what_it_did_meanwhile() -> None:
    script = running(strategy=DistributionStrategy.LOCAL, num_ps=0)
    beat(script, 4.0, input=4.0)
    restart(script, 20.0, 0, resumed_at=14.0)
    script.worker_joins(0)
    beat(script, 24.0, input=12.0)
    assert split(script) == {SlotState.INPUT: 12.0, SlotState.STOPPED: 10.0, SlotState.MASTER_AWAY: 2.0}


def test_a_place_that_waited_for_room_before_the_master_was_lost_waited_for_room() -> None:
    script = Script(num_workers=1, num_ps=0, strategy=DistributionStrategy.LOCAL)
    script.now = 30.0
    script.tell(e.Tick())
    restart(script, 33.0)
    assert split(script) == {SlotState.UNSCHEDULED: 30.0, SlotState.MASTER_AWAY: 3.0}


@pytest.mark.parametrize("resumed_at", [0.0, 20.0])
def test_pods_that_end_with_the_stop_of_a_job_are_not_lost(resumed_at: float) -> None:
    script = running(num_workers=2)
    beat(script, 4.0, 0, input=4.0)
    restart(script, 22.0, resumed_at=resumed_at)
    script.pass_time(3)
    counts = script.job.status().event_counts
    stopped = 3 if resumed_at else 0
    assert (counts.get("PodStopped", 0), counts.get("PodLost", 0)) == (stopped, 3 - stopped)
    resumed = int(resumed_at > 0)
    assert (counts.get("JobResumed", 0), counts.get("MasterRestarted", 0)) == (resumed, 1 - resumed)
    script.ps_starts(life=2)
    script.worker_starts(2)
    script.kill(2)
    assert script.job.status().event_counts["PodLost"] == 4 - stopped


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("resumed_at", [3.0, 21.0])  # before, and after the newest journal, as clocks have it
def test_a_run_that_is_known_to_be_another_one_is_resumed_whatever_the_clocks_say(
    is_resumed: bool, resumed_at: float
) -> None:
    script = running(num_workers=2)
    beat(script, 4.0, 0, input=4.0)
    script.now = 22.0
    script.restart_master(resumed_at, is_resumed)
    script.tell(e.PodsListed(()))
    counts = script.job.status().event_counts
    assert (counts.get("JobResumed", 0), counts.get("MasterRestarted", 0)) == (is_resumed, not is_resumed)
    assert (counts.get("PodStopped", 0), counts.get("PodLost", 0)) == ((3, 0) if is_resumed else (0, 3))


@pytest.mark.parametrize("unix_offset", [0.0, -3600.0])  # after, and before the job's beginning
def test_the_clock_of_the_wall_may_be_set_back_between_two_lives(unix_offset: float) -> None:
    script = running()
    beat(script, 9.0, input=9.0)
    script.tell(e.Tick())
    snapshot = script.job.snapshot()
    job = Job.restore(script.settings, snapshot, 2, 4.0, unix_offset)
    job.handle(e.PodsListed(()), 6.0)
    job.validate_state()
    assert round(sum(job.status(7.0).worker_seconds.values()), 3) == 12.0
    num_points = len(job.series.points)
    job.handle(e.Tick(), 8.0)
    job.handle(e.Tick(), 9.0)
    assert len(job.series.points) == num_points + 2


def test_a_job_whose_journal_knows_no_times_counts_from_its_next_life() -> None:
    script = running()
    snapshot = script.job.snapshot()
    del snapshot["accounting"]
    job = Job.restore(script.settings, snapshot, 2, now=100.0)
    job.handle(e.PodsListed(()), 101.0)
    job.validate_state()
    assert round(sum(job.status(102.0).worker_seconds.values()), 3) == 2.0


def test_a_job_may_go_on_with_another_number_of_workers() -> None:
    script = running(num_workers=2, strategy=DistributionStrategy.LOCAL, num_ps=0)
    beat(script, 2.0, 0, input=2.0)
    snapshot = script.job.snapshot()
    for num_workers, expected in ((1, 4.0 + 3.0), (4, 4.0 + 4 * 3.0)):
        settings = Script(num_workers=num_workers, strategy=DistributionStrategy.LOCAL, num_ps=0).settings
        job = Job.restore(settings, snapshot, 2, now=2.0)
        job.handle(e.PodsListed(()), 4.0)
        job._accounting.validate()
        assert round(sum(job.status(5.0).worker_seconds.values()), 3) == expected


def test_the_time_of_a_command_that_has_ended_well_is_over() -> None:
    script = Script(num_workers=2, num_ps=0, strategy=DistributionStrategy.LOCAL, runs_command=True)
    script.worker_starts(0)
    script.pod(Role.WORKER, 1, PodState.RUNNING)  # speaks to no master
    beat(script, 2.0, start=1.0, compute=1.0)
    script.now = 4.0
    script.pod(Role.WORKER, 1, PodState.SUCCEEDED)
    beat(script, 10.0, start=1.0, compute=9.0)
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED)
    tick(script, 12.0)
    seconds = script.job.status(script.now).worker_seconds
    assert {state: value for state, value in seconds.items() if value} == {"starting": 1.0, "useful": 9.0 + 4.0}
    assert "time: 93 % useful, 7 % starting" in script.log()


def test_to_evaluate_is_the_work_of_a_job_that_does_nothing_else() -> None:
    script = Script(num_ps=0, has_training_data=False, has_validation_data=True, strategy=DistributionStrategy.LOCAL)
    script.worker_starts()
    beat(script, 3.0, start=1.0, evaluate=2.0)
    assert split(script) == {SlotState.STARTING: 1.0, SlotState.USEFUL: 2.0}


def test_a_worker_that_waits_for_a_group_after_a_loss_recovers() -> None:
    script: GroupScript = standing(2)
    beat(script, 1.0, 0, join=1.0)
    beat(script, 1.0, 1, join=1.0)
    assert split(script) == {SlotState.WAITING_GROUP: 2.0}
    script.kill(1)
    beat(script, 2.0, 0, join=2.0)
    assert split(script)[SlotState.WAITING_GROUP] == 2.0
    assert split(script)[SlotState.RECOVERING] == 1.0


def test_a_step_that_broke_with_its_group_is_computed_again() -> None:
    script = standing(2)
    lease = script.lease()
    for worker_id in (0, 1):
        beat(script, 2.0, worker_id, compute=2.0)
    script.progress(lease, 0)
    for worker_id in (0, 1):
        beat(script, 3.0, worker_id, compute=3.0)
    script.kill(1)
    script.all_leave(0)
    script.moment()
    script.forms({(0, lease.task): (0,)})
    assert split(script)[SlotState.USEFUL] >= 4.0
    assert split(script)[SlotState.REPEATED] == 2.0


def test_servers_are_absent_restoring_busy_saving_or_idle() -> None:
    script = Script(checkpoint_dir="checkpoints", checkpoint_steps=1)
    script.worker_starts()
    script.data_is_known()
    script.now = 1.0
    script.pod(Role.PS, 0, PodState.RUNNING)
    answer = script.ps_joins()
    script.now = 3.0
    script.ask(e.PsReady, 0, answer.incarnation)
    script.sets_are_read({})
    assert of_servers(script) == {PsState.ABSENT: 1.0, PsState.RESTORING: 2.0}

    def serve(at: float, busy: float) -> None:
        script.now = at
        script.ask(e.HeartbeatReceived, Role.PS, 0, answer.incarnation, load=PsUsage(busy_seconds=busy))

    serve(7.0, busy=3.0)
    assert of_servers(script) == {PsState.ABSENT: 1.0, PsState.RESTORING: 2.0, PsState.BUSY: 3.0, PsState.IDLE: 1.0}
    script.progress(script.lease(), 0)
    (saving,) = script.told(c.SaveCheckpoint)
    script.now = 9.0
    script.tell(e.CheckpointSaved(saving.version, "version-1"))
    serve(10.0, busy=3.5)
    assert of_servers(script) == {
        PsState.ABSENT: 1.0,
        PsState.RESTORING: 2.0,
        PsState.BUSY: 3.5,
        PsState.SAVING: 2.0,
        PsState.IDLE: 1.5,
    }
    serve(12.0, busy=99.0)  # of several threads
    assert of_servers(script)[PsState.BUSY] == 5.5
    script.ps_dies()
    tick(script, 13.0)
    assert of_servers(script)[PsState.ABSENT] == 2.0


def test_a_failed_job_says_where_its_time_went() -> None:
    script = running()
    beat(script, 4.0, compute=1.0, input=3.0)
    script.tell(e.StopRequested("enough"))
    script.pod(Role.WORKER, 0, PodState.SUCCEEDED)
    assert any(line.startswith("time: 0 % useful, ") for line in script.log())
    assert script.last(c.EndJob).exit_code == 1


def test_a_local_pod_starts_as_soon_as_there_is_a_slot_for_it() -> None:
    script = Script()
    script.ps_starts()
    name = script.settings.pod_name(Role.WORKER, 0)
    for at, has_slot in ((1.0, True), (3.0, False), (6.0, True)):
        script.now = at
        script.tell(e.PodChanged(name, Role.WORKER, 0, "uid", PodState.PENDING, has_slot=has_slot))
    assert split(script, later=4.0) == {SlotState.UNSCHEDULED: 4.0, SlotState.STARTING: 6.0}
