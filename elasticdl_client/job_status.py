"""JobStatus: the status that the master writes at most once a second, and the client reads and shows.

Locally it is the file ``<job_dir>/status.json``, on Kubernetes a key of the ConfigMap with the job's state.  This
module owns its shape and its JSON; it never computes anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

EXIT_SUPERSEDED = 3
"""The exit code of a master whose job another master has."""
WAITS_FOR_STORAGE = "the job waits for its storage"
"""Begins the message of a job whose journal in storage cannot be written; other messages are of every job's start."""
MASTER_RESTARTED = "the master has restarted"
"""Begins the message of a job whose pods run, and are to register with the next generation of the master."""
RUNS_AGAIN = "started again; "
"""Begins the message of a pod whose container runs after an earlier run has ended."""
_PASSES = {"evaluated": "evaluation", "predicted": "prediction", "analyzed": "analysis"}


class JobPhase(StrEnum):
    """Where the job as a whole is."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class EpochCoverage:
    """The coverage of one epoch; ``records`` is the sum of all others but `repeated` and `augmented`."""

    epoch: int  # from 1
    records: int  # planned
    committed: int  # in the model
    repeated: int = 0  # in the model more than once
    lost: int = 0  # in no model
    quarantined: int = 0  # excluded by --max_bad_records
    skipped: int = 0  # left out by --nan_policy=skip
    unplanned: int = 0  # left out because training ended early
    filtered: int = 0  # records of which `feed` made no sample
    augmented: int = 0  # samples that `feed` made beyond one a record
    verb: str = "committed"  # the verb for them; one of `_PASSES` in a job that makes one pass
    is_bound: bool = False  # `repeated` is an upper bound
    since: int = 0  # these are the sums of the epochs from here to `epoch`; 0: it is one epoch

    def counts(self) -> dict[str, int]:
        """Return the number of records by outcome."""
        return {name: getattr(self, name) for name in _COUNTS}

    @classmethod
    def total(cls, parts: Sequence[EpochCoverage]) -> EpochCoverage:
        """Return the sums of epochs that follow one another."""
        counts = {name: sum(getattr(one, name) for one in parts) for name in _COUNTS}
        first, last = parts[0], parts[-1]
        return cls(last.epoch, **counts, verb=last.verb, is_bound=last.is_bound, since=first.since or first.epoch)

    @property
    def title(self) -> str:
        if self.since:
            return f"epochs {self.since} to {self.epoch}"
        return _PASSES.get(self.verb, f"epoch {self.epoch}")

    def __str__(self) -> str:
        line = f"records {self.records}, {self.verb} {self.committed}, "
        line += f"repeated {'at most ' if self.is_bound else ''}{self.repeated}, lost {self.lost}"
        for name in ("quarantined", "skipped", "filtered", "augmented", "unplanned"):
            if getattr(self, name):
                line += f", {name} {getattr(self, name)}"
        return line


_COUNTS = (
    *("records", "committed", "repeated", "lost", "quarantined"),
    *("skipped", "unplanned", "filtered", "augmented"),
)


@dataclass(frozen=True, slots=True)
class PodStatus:
    """One pod of the job, as the cluster last showed it."""

    name: str  # of the pod
    role: str  # master, ps or worker
    phase: str  # Pending, Running, Succeeded, Failed
    message: str = ""  # why it is pending, or why it ended
    restarts: int = 0  # in place; a successor is another pod


@dataclass(frozen=True, slots=True)
class LostPod:
    """A pod that failed, or was deleted, while the job ran."""

    name: str  # of the pod; a parameter server's successor has the same
    role: str  # ps or worker
    at: float  # when the master saw it
    message: str = ""  # why, as far as the cluster says


@dataclass(frozen=True, slots=True)
class UncreatedPods:
    """Wanted pods of one role that could not be created, for a quota or another refusal; the master tries again."""

    role: str  # ps or worker
    count: int  # how many there are
    name: str  # of the one that was tried last
    message: str  # why, in the words of the API server; one line


@dataclass(frozen=True, slots=True)
class PsStatus:
    """The load of one parameter server in the last seconds, with rates per second, and totals over all incarnations."""

    id: int  # from 0
    pushes_per_second: float = 0.0  # gradients received
    pulls_per_second: float = 0.0  # values sent
    received_per_second: float = 0.0  # bytes
    sent_per_second: float = 0.0  # bytes
    busy: float = 0.0  # seconds of its threads in calls, per second: 1.5 are one and a half threads
    rows: int = 0  # of all its embedding tables
    table_bytes: int = 0  # that those take
    pushes: int = 0  # gradients received, in all its incarnations
    pulls: int = 0  # values sent, in all its incarnations
    received_bytes: int = 0  # in all its incarnations
    sent_bytes: int = 0  # in all its incarnations
    busy_seconds: float = 0.0  # of its threads in calls, in all its incarnations
    throttled: float = 0.0  # share of the time for which its CPU limit held it back


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The accelerator that the model of one worker's process is on."""

    worker: int  # its id
    name: str  # as the framework has it: cuda:0, GPU:0
    kind: str  # the product, such as NVIDIA H100 80GB HBM3
    used_bytes: int = 0  # of its memory, by the worker's process
    total_bytes: int = 0  # of its memory; 0: not known
    process: int = 0  # of the worker, from 0


@dataclass(frozen=True, slots=True)
class StandingWorker:
    """A worker's process that has done the same for longer than usual; waiting for others does not count."""

    worker: int  # its id
    seconds: float  # for which it has done that
    activity: str  # start, compile, compute, repeat, input, idle, evaluate, export, checkpoint
    where: str = ""  # the innermost line of the user's code, "file:line in function"; empty: not known
    process: int = 0  # of the worker, from 0


@dataclass(frozen=True, slots=True)
class ScalingStatus:
    """How the number of workers follows the gain: the increase of the job's rate by another worker."""

    workers: str  # the range of the number, such as 2:16
    state: str  # measuring, growing, refining, shrinking, settled, waiting for room, ending
    gain: float | None = None  # of each worker beyond the present ones, of what one computes alone; null: not measured
    bottleneck: str = ""  # why another worker adds little: `worker_range.Bottleneck`


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of a job.  Times are seconds since the Unix epoch, rates are per second."""

    job_name: str
    phase: JobPhase = JobPhase.PENDING
    message: str = ""  # why it waits or failed; one paragraph
    generation: int = 0  # how often the master has started
    epoch: int = 0  # the newest that has begun, from 1; 0 before the first
    num_epochs: int = 0  # how many there are; 0 or less: endless
    records_done: int = 0  # committed, skipped or filtered, over all epochs
    records: dict[str, int] = field(default_factory=dict)  # by fate, over all epochs; the names are those of `coverage`
    records_processed: int = 0  # like `records_done`, with what is computed again counted again; it only grows
    records_skipped: int = 0  # left out by --nan_policy=skip
    records_total: int = 0  # planned, over all epochs; 0 while unknown or endless
    records_per_second: float = 0.0  # throughput, of all workers
    elapsed_seconds: float = 0.0  # from the submission to `updated_at`
    eta_seconds: float | None = None  # for the rest of the records; null while unknown, if endless, after the end
    workers_alive: int = 0  # pods that run
    workers_wanted: int = 0  # --num_workers, or what `elasticdl scale` has made of it
    processes_per_worker: int = 1  # that compute in the pod of each worker
    ps_alive: int = 0  # pods that run
    ps_wanted: int = 0  # --num_ps_pods
    model_version: int = 0  # steps: minibatches in the model, in every mode
    loss: float | None = None  # the newest finite one
    learning_rate: float | None = None  # in use, of the first group of parameters
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest evaluation
    metrics_step: int = 0  # of the model that was evaluated
    coverage: tuple[EpochCoverage, ...] = ()  # of the newest complete epochs; of many, the sums of those before first
    tasks_done: int = 0  # committed, over all epochs
    tasks_total: int = 0  # planned, over all epochs; 0 while unknown or endless
    pods: tuple[PodStatus, ...] = ()  # master, servers, workers; those that have ended too while the cluster shows them
    lost_pods: tuple[LostPod, ...] = ()  # since the master started; the newest 20, newest last
    not_created: tuple[UncreatedPods, ...] = ()  # wanted pods that the API server has not taken, by role
    scaling: ScalingStatus | None = None  # null while the number of workers is fixed
    ps: tuple[PsStatus, ...] = ()  # each parameter server
    devices: tuple[DeviceStatus, ...] = ()  # each worker whose model is on an accelerator
    standing: tuple[StandingWorker, ...] = ()  # workers that have done the same for half a minute or more; at most 16
    num_standing: int = 0  # how many there are, with those that are not listed
    world: tuple[int, ...] = ()  # AllReduce: the group that stands, by rank: process P of N in worker W is W * N + P
    num_worlds: int = 0  # AllReduce: how many groups have formed
    engine: str = ""  # AllReduce: the engine of the current group, such as NCCL 2.28.9; empty: it has one member
    optimizer_shares: tuple[float, ...] = ()  # that each member of `world` holds of the optimizer's state; empty: all
    world_seconds: float = 0.0  # AllReduce: that the changes of the group took, altogether
    staleness: tuple[int, ...] = ()  # gradients by the updates that they missed: 0, 1, 2, 3-4, 5-8, … over all servers
    gradients_refused: int = 0  # too stale, or too late for their round: computed again
    worker_seconds: dict[str, float] = field(default_factory=dict)  # by `goodput.SlotState`, summed over wanted workers
    ps_seconds: dict[str, float] = field(default_factory=dict)  # by `goodput.PsState`, the same of parameter servers
    event_counts: dict[str, int] = field(default_factory=dict)  # of all events, by kind
    pods_lost: dict[str, dict[str, int]] = field(default_factory=dict)  # that ended unasked, by role and reason
    saving_seconds: float = 0.0  # for which the parameter servers have been writing a checkpoint; 0: less than 30
    checkpoint_at: float = 0.0  # when the newest checkpoint was complete; 0: there is none
    exit_code: int | None = None  # null until the job has ended
    started_at: float = 0.0  # first start of the master
    updated_at: float = 0.0  # last status of the master

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobStatus:
        """Read the output of `to_json`; missing fields of another version have their defaults, added ones are ignored.

        Raises:
            ValueError: the text is not a status.
        """
        values = json.loads(text)
        if not isinstance(values, dict) or "job_name" not in values:
            raise ValueError("not a job status")
        values = _known(cls, values)
        values["phase"] = JobPhase(values.get("phase", JobPhase.PENDING))
        values["coverage"] = tuple(EpochCoverage(**_known(EpochCoverage, one)) for one in values.get("coverage", ()))
        values["pods"] = tuple(PodStatus(**_known(PodStatus, one)) for one in values.get("pods", ()))
        values["lost_pods"] = tuple(LostPod(**_known(LostPod, one)) for one in values.get("lost_pods", ()))
        refused = values.get("not_created", ())
        values["not_created"] = tuple(UncreatedPods(**_known(UncreatedPods, one)) for one in refused)
        values["ps"] = tuple(PsStatus(**_known(PsStatus, one)) for one in values.get("ps", ()))
        values["devices"] = tuple(DeviceStatus(**_known(DeviceStatus, one)) for one in values.get("devices", ()))
        values["standing"] = tuple(StandingWorker(**_known(StandingWorker, one)) for one in values.get("standing", ()))
        if values.get("scaling") is not None:
            values["scaling"] = ScalingStatus(**_known(ScalingStatus, values["scaling"]))
        values["world"] = tuple(values.get("world", ()))
        values["optimizer_shares"] = tuple(values.get("optimizer_shares", ()))
        values["staleness"] = tuple(values.get("staleness", ()))
        return cls(**values)


def _known(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"not a {kind.__name__}: {values!r}")
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, as the client tells it; `message` says why it failed."""

    exit_code: int
    message: str
    status: JobStatus | None


def finite(value: object) -> object:
    """Return plain values with null for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
