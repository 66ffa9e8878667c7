"""The lives of pods as spans, from events and, where there are none, from the status."""

from __future__ import annotations

from elasticdl_client.dashboard.lanes import MAX_LANES, LaneEnd, LaneState, lanes_of
from elasticdl_client.job_events import EventHistory, EventKind
from elasticdl_client.job_status import JobStatus, LostPod, PodStatus
from tests.dashboard.written_jobs import BEGAN, Story


def lanes(
    story: Story, until: float = 100, **status: object
) -> dict[str, tuple[list[tuple[str, float, float]], list[object]]]:
    """By pod: spans with seconds since the beginning, and endings."""
    job = JobStatus("job", started_at=BEGAN, **status)  # type: ignore[arg-type]
    found = lanes_of(job, EventHistory(tuple(story.events)), BEGAN + until)
    return {
        lane.name: (
            [(span.state.value, span.begin - BEGAN, span.end - BEGAN) for span in lane.spans],
            [(one.how, one.at - BEGAN, one.why, one.event) for one in lane.endings],
        )
        for lane in found
    }


def test_a_lost_worker_and_its_successor_have_a_lane_each() -> None:
    story = Story()
    story.add(0, EventKind.JOB_STARTED, "job")
    story.pod("worker-0", 1, 2, 5)
    lost = story.add(40, EventKind.POD_LOST, "worker-0", "killed by SIGKILL", reason="Killed", exit_code=137)
    story.pod("worker-1", 41, 43, 47, cause=lost)
    assert lanes(story) == {
        "master": ([("working", 0, 100)], []),
        "worker-0": (
            [("waiting", 1, 2), ("starting", 2, 5), ("working", 5, 40)],
            [(LaneEnd.LOST, 40, "Killed, exit code 137, killed by SIGKILL", lost)],
        ),
        "worker-1": ([("waiting", 41, 43), ("starting", 43, 47), ("working", 47, 100)], []),
    }


def test_a_server_of_the_same_name_has_a_gap_in_its_lane() -> None:
    story = Story()
    story.pod("ps-0", 1, 2, 3)
    story.add(10, EventKind.POD_LOST, "ps-0", "gone")
    story.pod("ps-0", 20, 21, 25)
    spans, endings = lanes(story)["ps-0"]
    assert [span[1:] for span in spans] == [(1, 2), (2, 3), (3, 10), (20, 21), (21, 25), (25, 100)]
    assert len(endings) == 1


def test_a_pod_that_ended_with_the_stop_of_its_job_is_done_and_not_lost() -> None:
    story = Story()
    story.pod("worker-0", 1, 2, 3)
    resumed = story.add(50, EventKind.JOB_RESUMED, "job", seconds=40.0)
    story.add(50, EventKind.POD_STOPPED, "worker-0", cause=resumed)
    ((how, at, *_),) = lanes(story)["worker-0"][1]
    assert (how, at) == (LaneEnd.DONE, 50)
    assert lanes(story)["master"] == ([("working", 50, 100)], [])


def test_a_pod_that_is_asked_to_end_leaves_and_a_worker_that_registers_again_works_on() -> None:
    story = Story()
    story.pod("worker-0", 1, 2, 3)
    story.add(5, EventKind.MASTER_RESTARTED, "master", generation=2)
    story.add(7, EventKind.WORKER_REGISTERED, "worker-0")
    story.add(30, EventKind.POD_DRAINING, "worker-0")
    story.add(33, EventKind.POD_COMPLETED, "worker-0")
    spans, endings = lanes(story)["worker-0"]
    assert spans[2:] == [("working", 3, 30), ("leaving", 30, 33)]
    assert endings == [(LaneEnd.DONE, 33, "completed", len(story.events))]


def test_lanes_stand_in_the_order_of_pods_and_events_of_other_things_have_none() -> None:
    story = Story()
    for pod in ("worker-10", "worker-9", "ps-0"):
        story.pod(pod, 1, 2, 3)
    story.add(4, EventKind.GROUP_FORMED, "group-1", before=0, after=2, seconds=0.1)
    story.add(4, EventKind.LEASE_LOST, "worker-77", "an event of a pod that was never seen")
    story.add(5, EventKind.JOB_STARTED, "job")
    assert list(lanes(story)) == ["master", "ps-0", "worker-9", "worker-10"]


def test_without_events_the_status_is_shown_as_far_as_it_goes() -> None:
    pods = (
        PodStatus("elasticdl-job-worker-0", "worker", "Running"),
        PodStatus("elasticdl-job-worker-1", "worker", "Pending", "Insufficient cpu"),
        PodStatus("elasticdl-job-worker-2", "worker", "Succeeded"),
    )
    lost = (LostPod("elasticdl-job-worker-3", "worker", BEGAN + 60, "preempted"),)
    assert lanes(Story(), pods=pods, lost_pods=lost) == {
        "worker-0": ([("working", 0, 100)], []),
        "worker-1": ([("waiting", 0, 100)], []),
        "worker-2": ([("working", 0, 100)], [(LaneEnd.DONE, 100, "", 0)]),
        "worker-3": ([("working", 0, 60)], [(LaneEnd.LOST, 60, "preempted", 0)]),
    }


def test_of_too_many_pods_the_newest_are_shown() -> None:
    story = Story()
    for worker in range(MAX_LANES + 5):
        story.pod(f"worker-{worker}", worker, worker + 1, worker + 2)
        story.add(worker + 3, EventKind.POD_LOST, f"worker-{worker}", "gone")
    found = lanes(story)
    assert len(found) == MAX_LANES
    assert "worker-4" not in found
    assert f"worker-{MAX_LANES + 4}" in found
    assert LaneState.WORKING.value == found["worker-5"][0][-1][0]
