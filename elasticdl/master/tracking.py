"""--track: the job's progress for experiment trackers, written by the master; one run for all its generations.

Every tracker has a thread and a bounded queue of its own.  A tracker that hangs or fails costs points and a line in the
log, but never affects the job, and no decision of the job depends on it.

MLflow and Weights & Biases are the adapters of the port `Tracker`: a run is found again by its id, or by a tag with the
id.  Their addresses and credentials come from their own variables (--envs): MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME, WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE, …
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from elasticdl.master.tensorboard import EVALUATION_PREFIX, ProgressScalars, Watcher
from elasticdl_client.choices import TrackerName
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec, changed_flags
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.storage_kinds import is_remote

_MAX_QUEUED = 1000
_CLOSE_S = 10.0  # for the last points; a deleted pod has 30 s
_RETRY_S = 30.0  # after a failure

logger = logging.getLogger("elasticdl.master")


class Tracker(Protocol):
    """A run of a job in an experiment tracker; called in one thread, may raise anything."""

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Record numbers of a model version, at a time in seconds since the Unix epoch."""
        ...

    def tag(self, name: str, text: str) -> None:
        """Set a property of the run."""
        ...

    def close(self, phase: JobPhase) -> None:
        """End the run, or leave it to the master's next generation if the job continues."""
        ...


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


class TrackerThread:
    """A `Watcher` that feeds a tracker.

    Args:
        name: Name of the tracker, for the log.
        open_tracker: Opens or resumes the run; called in the thread, and again after a failure.
        max_queued: Most points that wait; more are dropped.
        close_s: Seconds that `close` waits for the last points.
        retry_s: Seconds after a failure in which points are dropped.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        max_queued: int = _MAX_QUEUED,
        close_s: float = _CLOSE_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._name = name
        self._open = open_tracker
        self._close_s, self._retry_s = close_s, retry_s
        self._points: queue.Queue[_Point | None] = queue.Queue(max_queued)
        self._is_dropping = False
        self._scalars = ProgressScalars()
        self._lost: Mapping[str, int] = {}
        self._phase = JobPhase.RUNNING
        self._thread = threading.Thread(target=self._run, name=f"track {name}", daemon=True)
        self._thread.start()

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Watcher`."""
        self._put(_Point(step, {EVALUATION_PREFIX + name: value for name, value in metrics.items()}))

    def on_status(self, status: JobStatus) -> None:
        """See `Watcher`."""
        self._phase = status.phase
        values, tags = self._scalars.of(status), {}
        lost = {f"{role}.{why}": n for role, reasons in status.pods_lost.items() for why, n in reasons.items()}
        if lost != self._lost:
            self._lost = lost
            values["pods_lost"] = sum(lost.values())
            tags = {f"pods_lost.{name}": str(count) for name, count in lost.items()}
        if values:
            self._put(_Point(status.model_version, values, tags))

    def close(self) -> None:
        """See `Watcher`."""
        try:
            self._points.put_nowait(None)
        except queue.Full:
            """It hangs: queued values are lost with this process."""
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            logger.warning("--track=%s: the last points are left out, as it does not answer", self._name)

    def _put(self, point: _Point) -> None:
        try:
            self._points.put_nowait(point)
        except queue.Full:
            if not self._is_dropping:
                logger.warning("--track=%s: points are left out, as it does not take them in time", self._name)
            self._is_dropping = True
        else:
            self._is_dropping = False

    def _run(self) -> None:
        tracker: Tracker | None = None
        retry_at = float("-inf")
        while (point := self._points.get()) is not None:
            if tracker is None and time.monotonic() < retry_at:
                continue
            try:
                tracker = tracker or self._open()
                tracker.log(point.step, point.values, point.at)
                for name, text in point.tags.items():
                    tracker.tag(name, text)
            except Exception as error:  # noqa: BLE001  any error of packages and servers; none may end the job
                logger.warning("--track=%s: points are left out for %.0f s: %s", self._name, self._retry_s, error)
                tracker, retry_at = None, time.monotonic() + self._retry_s
        try:
            # A run that a failure has left open; if the job continues, the next generation opens it.
            if tracker is None and retry_at > float("-inf") and self._phase in _STATUS:
                tracker = self._open()
            if tracker is not None:
                tracker.close(self._phase)
        except Exception as error:  # noqa: BLE001
            logger.warning("--track=%s: the run was not closed: %s", self._name, error)


class Watchers:
    """Several watchers, used as one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Watcher`."""
        for one in self._watchers:
            one.on_evaluation(step, metrics)

    def on_status(self, status: JobStatus) -> None:
        """See `Watcher`."""
        for one in self._watchers:
            one.on_status(status)

    def close(self) -> None:
        """See `Watcher`."""
        for one in self._watchers:
            one.close()


def check_packages(spec: JobSpec) -> None:
    """Check that the master can write to the trackers of --track.

    Raises:
        JobError: A package is missing, or the run would be lost with this pod.
    """
    for name in spec.trackers:
        if importlib.util.find_spec(name.value) is None:
            raise JobError(
                f"--track={name}: the master has no package {name}",
                f"install it where the master runs: pip install {name}; in an image: RUN pip install {name}",
            )


def trackers(spec: JobSpec, run_id: str) -> list[Watcher]:
    """Return the watchers for --track, without TensorBoard's.

    Args:
        spec: Specification of the job.
        run_id: Id of the job's run, the same in all generations of its master.
    """

    kinds = {TrackerName.MLFLOW: MlflowTracker, TrackerName.WANDB: WandbTracker}
    return [
        TrackerThread(name.value, lambda kind=kinds[name]: kind(spec, run_id))  # type: ignore[misc]
        for name in spec.trackers
        if name in kinds
    ]


_PROJECT = "elasticdl"  # unless the user's variables name another
_RUN_TAG = "elasticdl.run"
_REFUSED = re.compile(r"[^\w.\- :/]+")  # characters that MLflow refuses in a metric's name, such as recall@10
_AXIS = "model_version"  # of the charts of Weights & Biases
_MAX_PARAM = 500  # characters of a parameter's value that every MLflow version accepts
_STATUS = {JobPhase.SUCCEEDED: "FINISHED", JobPhase.FAILED: "FAILED"}


def _directory(spec: JobSpec) -> str:
    """Return the job's directory on this machine; empty if it has none."""
    return os.environ.get("ELASTICDL_JOB_DIR", "") if is_remote(spec.job_dir) else spec.job_dir


class MlflowTracker:
    """`Tracker` for MLflow; without MLFLOW_TRACKING_URI a local job has its runs in its directory."""

    def __init__(self, spec: JobSpec, run_id: str) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{Path(_directory(spec)) / 'mlruns'}"
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        found = self._client.get_experiment_by_name(experiment)
        where = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        runs = self._client.search_runs([where], f"tags.`{_RUN_TAG}` = '{run_id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(where, tags={_RUN_TAG: run_id}, run_name=spec.job_name)
        self._run_id = run.info.run_id
        params = [Param(name, str(value)[:_MAX_PARAM]) for name, value in _flags(spec).items()]
        self._client.log_batch(self._run_id, params=params)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        metrics = [Metric(_REFUSED.sub("_", name), value, int(1000 * at), step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def tag(self, name: str, text: str) -> None:
        """See `Tracker`."""
        self._client.set_tag(self._run_id, name, text)

    def close(self, phase: JobPhase) -> None:
        """See `Tracker`."""
        if phase in _STATUS:
            self._client.set_terminated(self._run_id, _STATUS[phase])


class WandbTracker:
    """`Tracker` for Weights & Biases.

    The model version is a value of each point: the package drops a point with an older step than its newest, such as
    an evaluation that ended while training continued.
    """

    def __init__(self, spec: JobSpec, run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            id=run_id,
            name=spec.job_name,
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            resume="allow",
            config=_flags(spec),
            dir=os.environ.get("WANDB_DIR") or _directory(spec) or None,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        self._run.define_metric("*", step_metric=_AXIS)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See `Tracker`."""
        self._run.log({**values, _AXIS: step})

    def tag(self, name: str, text: str) -> None:
        """See `Tracker`."""
        self._run.summary[name] = text

    def close(self, phase: JobPhase) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=int(phase is JobPhase.FAILED))


def _flags(spec: JobSpec) -> dict[str, object]:
    """Return the flags of the job that differ from their defaults, without secrets."""
    public = spec.public()
    return {name: getattr(public, name) for name in changed_flags(public)}
