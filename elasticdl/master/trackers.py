"""MLflow and Weights & Biases as trackers (see `Tracker`): a run is found again by its id, or by a tag that holds it.

Where they are, and the credentials, are said by their own variables (--envs): MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME, WANDB_API_KEY, WANDB_PROJECT, WANDB_MODE, …
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elasticdl_client.job_spec import JobSpec, changed_flags
from elasticdl_client.job_status import JobPhase

_PROJECT = "elasticdl"  # unless the user's variables name another
_RUN_TAG = "elasticdl.run"
_MAX_PARAM = 500  # letters of a parameter's value that every MLflow takes
_STATUS = {JobPhase.SUCCEEDED: "FINISHED", JobPhase.FAILED: "FAILED"}


class MlflowTracker:
    """See `Tracker`; without MLFLOW_TRACKING_URI a local job has its runs in its directory."""

    def __init__(self, spec: JobSpec, run_id: str) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{Path(spec.job_dir) / 'mlruns'}"
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

        metrics = [Metric(name, value, int(1000 * at), step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def tag(self, name: str, text: str) -> None:
        """See `Tracker`."""
        self._client.set_tag(self._run_id, name, text)

    def close(self, phase: JobPhase) -> None:
        """See `Tracker`."""
        if phase in _STATUS:
            self._client.set_terminated(self._run_id, _STATUS[phase])


class WandbTracker:
    """See `Tracker`; steps that a killed life of the master has logged already are passed over by the package."""

    def __init__(self, spec: JobSpec, run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            id=run_id,
            name=spec.job_name,
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            resume="allow",
            config=_flags(spec),
            dir=os.environ.get("WANDB_DIR") or spec.job_dir or None,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def tag(self, name: str, text: str) -> None:
        """See `Tracker`."""
        self._run.summary[name] = text

    def close(self, phase: JobPhase) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=int(phase is JobPhase.FAILED))


def _flags(spec: JobSpec) -> dict[str, object]:
    """The flags of the job that differ from their defaults, without what is secret in them."""
    public = spec.public()
    return {name: getattr(public, name) for name in changed_flags(public)}
