"""Elastic scheduling against gang scheduling, on a real cluster: how soon jobs end, how much of the room computes.

``python -m benchmarks.experiments two_jobs|service [--quick] [--json]``: twelve places on the node of KUBECONFIG's
cluster, each a tenth of a processor that a worker may not exceed, for pods that ask for a place.  The workers compute:
each record costs the same processor time.

``two_jobs``: two jobs of seven workers each, the second half a minute after the first.  The peer is the same program
under a gang scheduler, which starts a job when there is a place for each of its workers: the second when the first has
ended.  The ideal is that of the same work without any start: a place computes from the moment it is free.

``service``: one job of twelve workers, and a Deployment of higher priority that is scaled up and down.  Places are used
while the pod of the service runs, or its worker computes.

A worker computes from its first minibatch to its last one, by its own log.  Builds the image of the tests.
``--picture=FILE.svg`` draws how many places were used at each moment.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.e2e_kubernetes.conftest import digits
from tests.e2e_kubernetes.image import ready_image
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import apply, kubectl, list_pods
from tests.e2e_kubernetes.pods import PodView
from tests.e2e_kubernetes.room import ROOM, priority_class, room, tenant
from tests.e2e_kubernetes.space import Space
from tests.e2e_kubernetes.waiting import stay_so_for, wait_until

PLACES = 12
WORKERS = 7
SECOND_AFTER_S = 30.0
CPU = 0.1  # of a worker, at most
WORK_S = 0.002  # of processor time for a record
REPLICAS = (1, 2, 4, 7, 4, 2)  # of the service, as in the original's experiment with 24 places
LONGEST_S = 1800.0
_LOSS = re.compile(r"^(\S+ \S+) INFO .*Loss = ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Interval:
    """In which a place was used, in seconds since 1970."""

    began: float
    ended: float

    def within(self, began: float, ended: float) -> float:
        """Return the seconds of this interval between two moments."""
        return max(0.0, min(self.ended, ended) - max(self.began, began))


def share_used(used: Sequence[Interval], places: int, began: float, ended: float) -> float:
    """Return the share of the places' time between two moments in which they were used."""
    return sum(one.within(began, ended) for one in used) / (places * (ended - began))


def ideal_end(work_s: Sequence[float], starts: Sequence[float], workers: int, places: int) -> float:
    """Return when two jobs end if their workers compute as soon as a place is free, the first job's first.

    Args:
        work_s: Work of each job, in seconds of one place.
        starts: When each job is submitted; the second not before the first.
        workers: Maximum number of workers of each job.
        places: Number of places that both share.
    """
    first_ends = starts[0] + work_s[0] / workers
    beside = min(workers, places - workers)
    done = max(0.0, first_ends - starts[1]) * beside
    if done >= work_s[1]:
        return max(first_ends, starts[1] + work_s[1] / beside)
    return max(first_ends, starts[1]) + (work_s[1] - done) / workers


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the picture: the users of places between two moments."""

    title: str
    used: dict[str, list[Interval]]
    began: float
    ended: float

    def share(self) -> float:
        """Return the share of the places' time in which they were used."""
        every = [one for intervals in self.used.values() for one in intervals]
        return share_used(every, PLACES, self.began, self.ended)


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw the number of used places against time, a panel below the other, with the same scale of time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "experiments"  # the same ids in each run
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 2.6 * len(panels)), sharex=True, squeeze=False)
    for (axis,), panel in zip(axes, panels, strict=True):
        seconds = range(int(panel.ended - panel.began) + 1)
        counts = [
            [sum(one.began <= panel.began + second < one.ended for one in intervals) for second in seconds]
            for intervals in panel.used.values()
        ]
        axis.stackplot(seconds, counts, labels=list(panel.used), step="post", colors=["#3f6fd8", "#e0a030"])
        axis.axhline(PLACES, color="#b02a2a", linewidth=1)
        axis.set_title(
            f"{panel.title}: {panel.share():.0%} of {PLACES} places used in {panel.ended - panel.began:.0f} s",
            loc="left",
        )
        axis.set_ylabel("places")
        axis.legend(loc="lower right", frameon=True)
    axes[-1][0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


class Submitted:
    """A job that computes, from its submission on."""

    def __init__(self, space: Space, name: str, epochs: int, **flags: object) -> None:
        self.job: KubernetesJob = space.job(
            name,
            num_epochs=epochs,
            minibatch_size=16,
            num_ps_pods=1,
            worker_resource_request=f"cpu={CPU},memory=64Mi,{ROOM}=1",
            worker_resource_limit=f"cpu={CPU},memory=1Gi,{ROOM}=1",
            envs="OMP_NUM_THREADS=1,OPENBLAS_NUM_THREADS=1",
            **flags,
        )
        for flag in ("validation_data", "checkpoint_dir", "checkpoint_steps"):
            del self.job.flags[flag]
        self.job.hurry()
        (self.job.directory / "work").write_text(str(WORK_S))
        self.at = time.time()
        self.job.submit()

    def wait(self) -> float:
        """Until it has ended, each record counted once; when it trained its last minibatch."""
        self.job.assert_ends_exactly(LONGEST_S)
        return max(one.ended for one in self.computed())

    def wait_for_computed(self, number: int) -> None:
        """Wait until `number` workers have trained something, removed ones included."""
        wait_until(f"{number} workers", lambda: len(self.computed()) >= number, 120, self.job.story)

    def began(self) -> float:
        """Return when its first worker began to compute."""
        return min(one.began for one in self.computed())

    def computed(self) -> list[Interval]:
        """Return an interval for each worker that has trained something so far, the first worker first."""
        logs = sorted(self.job.recorder.directory.glob(f"{self.job.worker(0).removesuffix('0')}*.log"))
        found = []
        for log in logs:
            times = [
                datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp()
                for stamp in _LOSS.findall(log.read_text())
            ]
            if times:
                found.append(Interval(times[0], times[-1]))
        return sorted(found, key=lambda one: one.began)


Found = tuple[dict[str, float], list[Panel]]


def two_jobs(space: Space, epochs: int) -> Found:
    """Return the figures of both ways to schedule the same two jobs."""
    say("elastic: the second job begins with the places that are free")
    first = Submitted(space, "first", epochs, num_workers=WORKERS)
    stay_so_for(SECOND_AFTER_S)
    second = Submitted(space, "second", epochs, num_workers=WORKERS)
    ends = [first.wait(), second.wait()]
    elastic = Panel("Elastic", {"first job": first.computed(), "second job": second.computed()}, first.at, max(ends))

    say("gang: the second job begins when the first has ended")
    alone = Submitted(space, "alone", epochs, num_workers=WORKERS)
    alone_end = alone.wait()
    after = Submitted(space, "after", epochs, num_workers=WORKERS)
    after_end = after.wait()
    gang = Panel("Gang", {"first job": alone.computed(), "second job": after.computed()}, alone.at, after_end)

    work = [sum(one.ended - one.began for one in job.computed()) for job in (alone, after)]
    ideal_s = ideal_end(work, (0.0, second.at - first.at), WORKERS, PLACES)
    in_queue_s = max(0.0, after.at - alone.at - SECOND_AFTER_S)
    elastic_s, gang_s = (panel.ended - panel.began for panel in (elastic, gang))
    figures = {
        "elastic_both_end_s": elastic_s,
        "gang_both_end_s": gang_s,
        "elastic_to_gang": elastic_s / gang_s,
        "ideal_both_end_s": ideal_s,
        "ideal_to_elastic": ideal_s / elastic_s,
        "elastic_first_ends_s": ends[0] - first.at,
        "gang_first_ends_s": alone_end - alone.at,
        "elastic_second_computes_after_s": second.began() - second.at,
        "gang_second_computes_after_s": in_queue_s + after.began() - after.at,
        "elastic_places_used": elastic.share(),
        "gang_places_used": gang.share(),
    }
    return figures, [gang, elastic]


class Service:
    """A Deployment of higher priority than the job's workers; the use of its pods is observed."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._used: dict[str, Interval] = {}

    def look(self) -> int:
        """Return how many of its pods run."""
        now = time.time()
        pods = [PodView.of(pod) for pod in list_pods(self._space.namespace, "app=tenant")]
        running = [pod.uid for pod in pods if pod.running]
        for uid in running:
            self._used[uid] = Interval(self._used[uid].began if uid in self._used else now, now)
        return len(running)

    def wait_for(self, replicas: int) -> None:
        wait_until(f"{replicas} pods of the service", lambda: self.look() == replicas, 120)

    def used(self) -> list[Interval]:
        return list(self._used.values())


def service(space: Space, phase_s: float) -> Found:
    """Return the figures of a job that fills the places that a service leaves free."""
    job = Submitted(
        space,
        "filler",
        0,
        num_workers=PLACES,
        master_pod_priority="high",
        ps_pod_priority="high",
        worker_pod_priority="low",
    )
    job.job.wait_for_running("worker", PLACES)
    job.wait_for_computed(PLACES)
    the_service = Service(space)
    space.apply(tenant(0, space.image))
    began = time.time()
    up: list[float] = []
    freed: list[float] = []
    before = 0
    for replicas in REPLICAS:
        said, num_computed = time.time(), len(job.computed())
        kubectl("-n", space.namespace, "scale", "deployment/tenant", f"--replicas={replicas}")
        the_service.wait_for(replicas)
        if replicas > before:
            up.append(time.time() - said)
        else:
            gone = time.time()
            goal = num_computed + before - replicas
            job.wait_for_computed(goal)
            freed += [one.began - gone for one in job.computed()[num_computed:]]
        while time.time() < said + phase_s:
            the_service.look()
            stay_so_for(0.25)
        before = replicas
        say(f"{replicas} pods of the service: {len(job.job.running('worker'))} workers")
    panel = Panel("Elastic", {"service": the_service.used(), "job": job.computed()}, began, time.time())
    status = job.job.status()
    assert status is not None, job.job.story()
    figures = {
        "places_used": panel.share(),
        "service_runs_after_max_s": max(up),
        "freed_place_computes_after_median_s": sorted(freed)[len(freed) // 2],
        "freed_place_computes_after_max_s": max(freed),
        "records_done": status.records_done,
        "records_repeated": sum(epoch.repeated for epoch in status.coverage),
        "records_lost": sum(epoch.lost for epoch in status.coverage),
    }
    return figures, [panel]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("two_jobs", "service"))
    parser.add_argument("--quick", action="store_true", help="a third of the time")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--picture", type=Path, help="an SVG file to write; needs matplotlib")
    arguments = parser.parse_args()
    apply(priority_class("high", 1_000_000), priority_class("low", 1_000))
    space = Space.open("experiment", ready_image(), digits())
    ended_well = False
    try:
        with room(PLACES):
            if arguments.experiment == "two_jobs":
                figures, panels = two_jobs(space, 12 if arguments.quick else 36)
            else:
                figures, panels = service(space, 20.0 if arguments.quick else 60.0)
        ended_well = True
    finally:
        say(space.recorder.timeline())
        space.close(ended_well)
    if arguments.picture:
        draw(panels, arguments.picture)
    if arguments.json:
        print(json.dumps({"benchmark": arguments.experiment, "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:44} {value:10.3f}")


if __name__ == "__main__":
    main()
