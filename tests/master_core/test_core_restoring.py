"""Reports of parameter servers about the checkpoints that they restore, and servers that never become ready."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_script import Like, Script, running

from elasticdl.master.core import commands as c
from elasticdl.master.core.values import Level, PodState
from elasticdl.protocol import Role

DAMAGED = "version-300 is damaged: variables-1-of-2.ckpt is shorter than its manifest says"


def test_a_damaged_checkpoint_that_was_passed_over_is_warned_of() -> None:
    script = Script()
    script.ps_starts(restored_from="/c/version-200", damaged=(DAMAGED,))
    text = f"PS 0 restored its part from /c/version-200: {DAMAGED}"
    assert c.Log(Level.WARNING, text) in script.history
    assert script.job.status().ps_alive == 1


def test_a_checkpoint_that_was_whole_is_named() -> None:
    script = Script()
    script.ps_starts(restored_from="/c/version-200")
    assert c.Log(Level.INFO, "PS 0 restored its part from /c/version-200") in script.history


def test_when_no_checkpoint_can_be_restored_the_job_fails_with_the_reason_and_what_to_do() -> None:
    script = Script()
    script.ps_starts(error="no checkpoint in /c is whole", damaged=(DAMAGED,))
    assert script.last(c.Reply).answer == Like(c.Accepted)
    status = script.job.status()
    assert status.phase == "Failed"
    assert status.message.startswith("PS 0 cannot restore its part of the model: no checkpoint in /c is whole")
    assert DAMAGED in status.message
    assert "--checkpoint_dir_for_init" in status.message
    assert status.ps_alive == 0


def test_a_server_that_dies_while_it_restores_again_and_again_ends_the_job_with_its_log() -> None:
    script = running()
    script.lease()
    for life in range(1, 4):
        script.ps_dies(life=life, reason="Error")
        script.pass_time(10, alive=(0,))
        if life < 3:
            script.pod(Role.PS, 0, PodState.RUNNING, life=life + 1)
            script.ps_joins(life=life + 1)
    assert script.job.status().phase == "Failed"
    assert "3 pods in a row ended by their own fault" in script.job.status().message
    assert script.last(c.EndJob).pod == "elasticdl-j-ps-0"


@pytest.mark.parametrize("reason", ["Error", "Killed"])
def test_servers_that_die_by_their_own_fault_where_others_did_end_the_job(reason: str) -> None:
    script = running(num_ps=2)
    for life in range(1, 4):
        script.progress(script.lease(), 0)
        assert script.job.status().phase == "Running"
        for ps_id in (0, 1):  # together: one failure
            script.ps_dies(ps_id, life, reason)
        script.pass_time(3, alive=(0,))
        for ps_id in (0, 1) if life < 3 else ():
            script.ps_starts(ps_id, life + 1)
        if life < 3:
            script.sets_are_read({})
    status = script.job.status()
    assert (status.phase == "Failed") is (reason == "Error")
    assert ("3 parameter servers in a row failed" in status.message) is (reason == "Error")


@pytest.mark.parametrize(
    "order",
    [
        ((Role.PS, "Error"), (Role.WORKER, "Error")),
        ((Role.WORKER, "Error"), (Role.PS, "Error")),
        ((Role.WORKER, "Killed"), (Role.PS, "Error")),  # preempted, the only one: the server alone counts
    ],
)
def test_a_server_and_a_worker_that_fail_together_are_one_failure(order: Sequence[tuple[Role, str]]) -> None:
    script = running()
    for life in range(1, 4):
        script.progress(script.lease(life - 1), 0, worker_id=life - 1)
        assert script.job.status().phase == "Running"
        for role, reason in order:
            if role is Role.PS:
                script.ps_dies(life=life, reason=reason)
            else:
                script.kill(life - 1, reason)
        if life < 3:
            script.ps_starts(life=life + 1)
            script.worker_starts(life)
            script.sets_are_read({})
    assert script.job.status().phase == "Failed"


def test_so_does_one_that_always_becomes_ready_and_dies_before_anything_is_committed() -> None:
    script = running()
    for life in range(1, 4):
        script.ps_dies(life=life, reason="Error")
        script.pass_time(10, alive=(0,))
        if life < 3:
            script.ps_starts(life=life + 1)
            script.sets_are_read({})
    assert script.job.status().phase == "Failed"


def test_one_that_serves_between_its_deaths_is_started_again_as_often_as_it_takes() -> None:
    script, held = running(records=400), {}
    for life in range(1, 6):
        lease = script.lease()
        script.finish(lease)
        held[0, lease.task] = range(2)
        script.ps_dies(life=life, reason="Error")
        script.pass_time(2, alive=(0,))
        script.ps_starts(life=life + 1)
        script.sets_are_read({**held})
    assert script.job.status().phase == "Running"


def test_how_often_a_server_has_died_for_nothing_outlives_the_master() -> None:
    script = running()
    script.finish(script.lease())
    script.ps_dies(reason="Error")
    script.pass_time(2, alive=(0,))
    script.ps_starts(life=2)
    script.restart_master()
    script.ps_joins(life=2, held=2)
    script.pod(Role.PS, 0, PodState.RUNNING, life=2)
    script.ps_dies(life=2, reason="Error")
    assert script.job._work.retry_budget.num_faults == 1
