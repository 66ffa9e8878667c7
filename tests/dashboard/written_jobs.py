"""Job directories as masters leave them, without a job: any number of pods and events, and the numbers of a life."""

from __future__ import annotations

import json
import math
from pathlib import Path

from elasticdl.master.journal import encode
from elasticdl_client.goodput import FIRST_LENGTH_US, PodTimes, SlotState
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, to_journal
from elasticdl_client.job_series import JobSeries, SeriesPoint
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus, LostPod, PodStatus, PsStatus

BEGAN = 1_790_000_000.0


class Story:
    """Collects events and numbers them."""

    def __init__(self, began: float = BEGAN) -> None:
        self.began = began
        self.events: list[JobEvent] = []

    def add(
        self, after_s: float, kind: EventKind, subject: str, message: str = "", cause: int = 0, **more: object
    ) -> int:
        number = len(self.events) + 1
        self.events.append(JobEvent(number, self.began + after_s, kind, subject, message, cause, more))  # type: ignore[arg-type]
        return number

    def pod(self, name: str, created_s: float, running_s: float, working_s: float, cause: int = 0) -> None:
        """A pod from its creation to its first work."""
        ready = EventKind.PS_READY if name.startswith("ps") else EventKind.WORKER_REGISTERED
        created = self.add(created_s, EventKind.POD_CREATED, name, cause=cause)
        self.add(running_s, EventKind.POD_RUNNING, name, cause=created)
        self.add(working_s, ready, name, cause=created)


def write_job(
    directory: Path,
    status: JobStatus,
    events: list[JobEvent] | tuple[JobEvent, ...] = (),
    series: JobSeries | None = None,
    logs: dict[str, str] | None = None,
    times: PodTimes | None = None,
) -> Path:
    """A job's directory; nothing holds its lock, so without an exit code the job counts as stopped."""
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    (directory / "spec.json").write_text(json.dumps({"job_name": status.job_name}))
    (directory / "status.json").write_text(status.to_json())
    core = {"events": to_journal(EventHistory(tuple(events))), "series": (series or JobSeries()).to_journal()}
    accounting = {"began_at": status.started_at, "pods": (times or PodTimes()).to_journal()}
    (directory / "journal.json").write_bytes(encode({"core": {**core, "accounting": accounting}}))
    (directory / "logs").mkdir()
    for pod, text in (logs or {}).items():
        (directory / "logs" / f"elasticdl-{status.job_name}-{pod}.log").write_text(text)
    return directory


def large_job(directory: Path, num_pods: int = 200, num_events: int = 10_000) -> Path:
    """An ended job of many pods, a tenth of them killed, and of as many events."""
    story, name = Story(), "large"
    story.add(0, EventKind.JOB_STARTED, "job")
    pods, lost = [], []
    for worker in range(num_pods):
        story.pod(f"worker-{worker}", 1 + worker * 0.01, 6 + worker % 7, 10 + worker % 11)
    for worker in range(0, num_pods, 10):
        at = 100 + worker
        number = story.add(
            at, EventKind.POD_LOST, f"worker-{worker}", "node n7 is gone", reason="NodeLost", exit_code=137
        )
        story.pod(f"worker-{num_pods + worker // 10}", at + 1, at + 3, at + 6, cause=number)
        lost.append(LostPod(f"elasticdl-{name}-worker-{worker}", "worker", story.began + at, "node n7 is gone"))
    task = 0
    while len(story.events) < num_events - 1:
        task += 1
        at = 20 + task * 580 / num_events
        story.add(at, EventKind.LEASE_LOST, f"worker-{task % num_pods}", f"the lease of task {task} has expired")
    story.events.sort(key=lambda event: event.at)
    story.events = [
        JobEvent(number, one.at, one.kind, one.subject, one.message, 0, one.details)
        for number, one in enumerate(story.events, 1)
    ]
    story.add(601, EventKind.JOB_SUCCEEDED, "job")
    for worker in range(num_pods + len(lost)):
        if worker >= num_pods or worker % 10:
            pods.append(PodStatus(f"elasticdl-{name}-worker-{worker}", "worker", "Succeeded"))
    status = JobStatus(
        name,
        JobPhase.SUCCEEDED,
        epoch=100,
        num_epochs=100,
        records_done=10**8,
        records_total=10**8,
        workers_wanted=num_pods,
        model_version=400_000,
        loss=0.031,
        coverage=tuple(EpochCoverage(epoch, 10**6, 10**6) for epoch in range(1, 101)),
        pods=tuple(pods),
        lost_pods=tuple(lost[-20:]),
        exit_code=0,
        started_at=BEGAN,
        updated_at=BEGAN + 601,
    )
    life, times = a_life(601, num_pods, 10**8, 400_000), times_of(story, 601)
    return write_job(directory, status, story.events, life, times=times)


def a_life(seconds: int, workers: int, records: int, steps: int, began: float = BEGAN) -> JobSeries:
    """The numbers of a job that learns, loses a third of its workers in the middle and gets them back."""
    series, done, spent = (
        JobSeries(),
        0.0,
        dict.fromkeys(("starting", "useful", "input", "waiting_ps", "recovering"), 0.0),
    )
    shape = [0.0 if i < 8 else 0.62 if 0.45 < i / seconds < 0.55 else 1.0 for i in range(seconds + 1)]
    rate = records / sum(shape)
    for i, share in enumerate(shape):
        done += rate * share * (1 + 0.05 * math.sin(i))
        part = min(1.0, done / records)
        if i < 8:
            spent[SlotState.STARTING] += workers
        else:
            spent[SlotState.RECOVERING] += workers * (1 - share)
            spent[SlotState.INPUT] += workers * share * (0.06 + 0.02 * math.sin(i / 9))
            spent[SlotState.WAITING_PS] += workers * share * (0.08 + 0.03 * math.sin(i / 5))
            spent[SlotState.USEFUL] += workers * share * (0.86 - 0.02 * math.sin(i / 9) - 0.03 * math.sin(i / 5))
        evaluated = int(part * 8)
        series.add(
            SeriesPoint(
                at=began + i,
                step=int(steps * part),
                records=int(records * part),
                loss=None if i < 8 else 0.05 + 2.2 * math.exp(-5 * part) + 0.03 * math.sin(i * 1.7),
                workers=round(workers * share) if i >= 8 else 0,
                ps=2 if i >= 5 else 0,
                ps_busy=0.9 * share + 0.1 * math.sin(i / 4),
                metrics={"accuracy": 0.97 - 0.7 * math.exp(-0.9 * evaluated)} if evaluated else {},
                metrics_step=int(steps * evaluated / 8),
                worker_seconds=dict(spent),
            )
        )
    return series


def times_of(story: Story, until: int) -> PodTimes:
    """The activity of workers each second: the last work before a loss is computed again, without ps-1 they wait."""
    times, starts, works = PodTimes(), dict[str, int](), dict[str, int]()
    ends = {event.subject: round(event.at - story.began) for event in story.events if event.kind == EventKind.POD_LOST}
    missing = range(ends.get("ps-1", until), ends.get("ps-1", until) + 9)
    for event in story.events:
        at = round(event.at - story.began)
        if event.kind == EventKind.POD_RUNNING:
            starts[event.subject] = at
        elif event.kind == EventKind.WORKER_REGISTERED:
            works[event.subject] = at
    for name, working in works.items():
        worker, end = int(name.partition("-")[2]), ends.get(name, until)
        for second in range(starts[name], end):
            slow = 0.05 + 0.04 * math.sin(second / 5 + worker) + (0.3 if worker == 3 and second > 380 else 0.0)
            shares = {SlotState.INPUT: 0.07 + 0.03 * math.sin(second / 9 + worker), SlotState.WAITING_PS: slow}
            if second < working:
                shares = {SlotState.STARTING: 1.0}
            elif second in missing:
                shares = {SlotState.WAITING_PS: 0.9}
            parts = {state: int(share * FIRST_LENGTH_US) for state, share in shares.items()}
            computed = SlotState.REPEATED if end - 6 < second < until - 6 else SlotState.USEFUL
            parts[computed] = FIRST_LENGTH_US - sum(parts.values())
            times.add(worker, second * FIRST_LENGTH_US, (second + 1) * FIRST_LENGTH_US, parts)
    return times


def shown_job(directory: Path) -> Path:
    """The job of the pictures: eight workers, three of which are preempted together and come back."""
    story, name = Story(), "frappe-deepfm"
    story.add(0, EventKind.JOB_STARTED, "job")
    for ps in range(2):
        story.pod(f"ps-{ps}", 0.4, 3 + ps, 5 + ps)
    for worker in range(8):
        story.pod(f"worker-{worker}", 0.8, 4 + worker * 0.6, 8 + worker * 0.7)
    for epoch in range(1, 11):
        started = story.add(9 + 57 * (epoch - 1), EventKind.EPOCH_STARTED, f"epoch-{epoch}", records=57722)
        if epoch % 2 == 0:
            text = f"Epoch {epoch - 1}: records 57722, committed 57722, repeated 0, lost 0"
            story.add(10 + 57 * (epoch - 1), EventKind.EPOCH_COVERED, f"epoch-{epoch - 1}", text, cause=started)
    for index, worker in enumerate((1, 4, 6)):
        at = 270 + index * 0.3
        drained = story.add(at, EventKind.POD_DRAINING, f"worker-{worker}", "was asked to end")
        text = "the node n7 is preempted"
        lost = story.add(
            at + 4, EventKind.POD_LOST, f"worker-{worker}", text, drained, reason="Preempted", exit_code=143
        )
        if index < 2:
            story.pod(f"worker-{8 + index}", at + 5, at + 52, at + 57, cause=lost)
        else:
            created = story.add(at + 5, EventKind.POD_CREATED, "worker-10", cause=lost)
            waits = "0/4 nodes are available: 4 Insufficient cpu"
            story.add(at + 6, EventKind.POD_PENDING, "worker-10", waits, created, reason="Unschedulable")
            story.add(at + 88, EventKind.POD_RUNNING, "worker-10", cause=created)
            story.add(at + 94, EventKind.WORKER_REGISTERED, "worker-10", cause=created)
    story.add(447, EventKind.CHECKPOINT_SAVED, "checkpoint-16000", "saved")
    killed = "OOMKilled: the container used more memory than its limit of 2Gi"
    story.add(470, EventKind.POD_LOST, "ps-1", killed, reason="OOMKilled", exit_code=137)
    story.pod("ps-1", 471, 474, 479, cause=len(story.events))
    prefix = f"elasticdl-{name}-"
    live = ("worker-0", "worker-2", "worker-3", "worker-5", "worker-7", "worker-8", "worker-9", "worker-10")
    pods = [
        PodStatus(f"{prefix}{pod}", pod.partition("-")[0], "Succeeded") for pod in ("master", "ps-0", "ps-1", *live)
    ]
    life = a_life(570, 8, 577_220, 9019)
    status = JobStatus(
        name,
        JobPhase.SUCCEEDED,
        epoch=10,
        num_epochs=10,
        records_done=577_220,
        records_total=577_220,
        workers_alive=8,
        workers_wanted=8,
        ps_alive=2,
        ps_wanted=2,
        model_version=9019,
        loss=life.points[-1].loss,
        metrics={"auc": 0.9703},
        metrics_step=9019,
        coverage=tuple(EpochCoverage(epoch, 57722, 57722) for epoch in range(1, 11)),
        pods=tuple(pods),
        ps=tuple(
            PsStatus(i, 210.0 - 40 * i, 420.0 - 70 * i, 9e6, 18e6, 0.41 - 0.1 * i, 180_000, 41 * 10**6) for i in (0, 1)
        ),
        staleness=(5200, 2400, 900, 420, 99),
        worker_seconds=dict(life.points[-1].worker_seconds),
        ps_seconds={"busy": 400.0, "idle": 690.0, "absent": 14.0, "restoring": 6.0},
        exit_code=0,
        started_at=BEGAN,
        updated_at=BEGAN + 570,
    )
    story.add(570, EventKind.JOB_SUCCEEDED, "job")
    log = "".join(f"2026-09-21 10:{i // 60:02}:{i % 60:02},120 INFO Task:{i} completed\n" for i in range(200))
    logs = {"master": log, "worker-0": "worker says hello\n"}
    return write_job(directory, status, story.events, life, logs, times_of(story, 570))
