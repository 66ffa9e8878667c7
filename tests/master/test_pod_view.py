"""How the state of a pod fits one line."""

from __future__ import annotations

import logging

import pytest

from elasticdl.master.core.events import PodChanged, PodsListed
from elasticdl.master.core.values import PodState
from elasticdl.master.pod_specs import MAX_ENDED, MAX_LOST, PodView
from elasticdl.protocol import Role
from elasticdl_client.job_status import LostPod


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ('exit code 1: TypeError: no\n  File "train.py", line 3', "Error, exit code 1: TypeError: no"),
        ("exit code 1; its last lines:\nfirst\nlast", "Error, exit code 1, last"),
        ("", "Error, exit code 1"),
    ],
)
def test_why_a_pod_has_failed_is_one_line(message: str, told: str) -> None:
    view = PodView()
    view.changed(PodChanged("w", Role.WORKER, 0, "u", PodState.FAILED, "Error", 1, message))
    assert [pod.message for pod in view.statuses()] == [told]


def pod(index: int, phase: PodState, reason: str = "", uid: str = "") -> PodChanged:
    return PodChanged(f"w-{index}", Role.WORKER, index, uid or f"uid-{index}", phase, reason)


def test_pods_that_were_alive_and_failed_or_went_away_are_lost_once() -> None:
    view = PodView(clock=lambda: 7.0)
    for index in range(4):
        view.changed(pod(index, PodState.RUNNING))
    view.changed(pod(0, PodState.FAILED, "OOMKilled"))
    view.changed(pod(0, PodState.DELETED))
    view.changed(pod(1, PodState.DELETED, "Preempted"))
    view.changed(pod(2, PodState.SUCCEEDED))
    view.changed(pod(2, PodState.DELETED))
    assert view.lost() == (
        LostPod("w-0", "worker", 7.0, "OOMKilled"),
        LostPod("w-1", "worker", 7.0, "Preempted"),
    )
    view.listed(PodsListed(()))
    view.listed(PodsListed(()))
    assert view.lost()[2:] == (LostPod("w-3", "worker", 7.0, "gone from the cluster"),)


def test_what_a_program_said_is_left_to_the_error_of_the_job() -> None:
    view = PodView(clock=lambda: 7.0)
    ends = ("exit code 1: TypeError: no", "exit code 1; its last lines:\nno", "killed by SIGKILL")
    for index, message in enumerate(ends):
        view.changed(pod(index, PodState.RUNNING))
        view.changed(PodChanged(f"w-{index}", Role.WORKER, index, f"uid-{index}", PodState.FAILED, "Error", 1, message))
    assert [one.message for one in view.lost()] == [
        "Error, exit code 1",
        "Error, exit code 1",
        "Error, exit code 1, killed by SIGKILL",
    ]


def test_a_master_that_starts_does_not_tell_old_losses_again() -> None:
    view = PodView()
    view.listed(PodsListed((pod(0, PodState.FAILED), pod(1, PodState.RUNNING))))
    assert view.lost() == ()


def test_only_the_newest_losses_are_kept() -> None:
    view = PodView()
    for index in range(MAX_LOST + 1):
        view.changed(pod(index, PodState.RUNNING))
        view.changed(pod(index, PodState.FAILED))
    assert [one.name for one in view.lost()] == [f"w-{index}" for index in range(1, MAX_LOST + 1)]


def test_a_list_says_nothing_anew_of_pods_that_have_ended_and_keeps_the_newest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view, ended = PodView(), [pod(index, PodState.FAILED, "Killed") for index in range(2 * MAX_ENDED)]
    for one in ended:
        view.changed(one)
    newest = [f"w-{index}" for index in range(MAX_ENDED, 2 * MAX_ENDED)]
    with caplog.at_level(logging.INFO, "elasticdl.master"):
        for _ in range(2):
            view.listed(PodsListed(tuple(reversed(ended))))
            assert [one.name for one in view.statuses()] == newest
    assert caplog.messages == []
    view.changed(pod(2 * MAX_ENDED, PodState.FAILED, "Killed"))
    assert [one.name for one in view.statuses()] == [*newest[1:], f"w-{2 * MAX_ENDED}"]
