"""Metrics: a job's status as Prometheus reads it: names, types, labels and help of every metric, and their values.

Values come from the status that was written with the journal last, in this generation of the master or an earlier one.
So a counter never shows what a crash could take back, and it does not fall when the master starts again.  How
Prometheus gets them is in metrics_server.py; docs/prometheus.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.goodput import goodput
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import DeviceStatus, JobPhase, JobStatus, PsStatus
from elasticdl_client.version import VERSION

JOB_LABEL = "elasticdl_job"  # Prometheus has a label `job` of its own: the scrape configuration's name
_POD_PHASES = ("Pending", "Running", "Succeeded", "Failed")
_STALENESS_BUCKETS = 12  # up to 1,024 updates; more where a gradient has missed more
_CHECKPOINTS = {"saved": EventKind.CHECKPOINT_SAVED, "failed": EventKind.CHECKPOINT_FAILED}

ApiCalls = Mapping[tuple[str, str], int]  # by HTTP method and status
Sample = tuple[tuple[str, ...], float]  # values of the labels, value


class MetricType(StrEnum):
    """As Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values behind the metrics.

    Attributes:
        api_calls: to the Kubernetes API, of this generation of the master.
    """

    spec: JobSpec
    status: JobStatus
    api_calls: ApiCalls

    @property
    def has_groups(self) -> bool:
        return self.spec.distribution_strategy is DistributionStrategy.ALL_REDUCE

    @property
    def has_ps(self) -> bool:
        return self.spec.num_ps_pods > 0 and not self.spec.job_command  # a script has TensorFlow's own


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric.

    Attributes:
        name: as queries have it; of a histogram without `_bucket`.
        labels: beside `JOB_LABEL`.
        samples: its values; none: the job has no such thing, or not yet.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Iterable[Sample]]

    def collected(self, snapshot: Snapshot) -> Metric | None:
        """Return it with its values; None: there are none."""
        samples = list(self.samples(snapshot))
        if not samples:
            return None
        job, labels = snapshot.spec.job_name, [JOB_LABEL, *self.labels]
        if self.type is MetricType.HISTOGRAM:
            found = HistogramMetricFamily(self.name, self.help, labels=[JOB_LABEL])
            found.add_metric([job], [(bound, value) for (bound,), value in samples], None)
            return found
        kind = CounterMetricFamily if self.type is MetricType.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.help, labels=labels)
        for values, value in samples:
            family.add_metric([job, *values], value)
        return family


class JobCollector(Collector):
    """Makes all metrics anew at each scrape; any thread may call it.

    Args:
        spec: of the job.
        read_status: the status that was written last; None: none was yet.
        read_api_calls: to the Kubernetes API so far.
    """

    def __init__(
        self,
        spec: JobSpec,
        read_status: Callable[[], JobStatus | None],
        read_api_calls: Callable[[], ApiCalls] = dict,
    ) -> None:
        self._spec = spec
        self._read_status = read_status
        self._read_api_calls = read_api_calls

    def collect(self) -> Iterator[Metric]:
        status = self._read_status() or JobStatus(self._spec.job_name)
        snapshot = Snapshot(self._spec, status, self._read_api_calls())
        for family in FAMILIES:
            metric = family.collected(snapshot)
            if metric is not None:
                yield metric


# How values are read off the status


def _one(value: Callable[[JobStatus], float | None]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A metric without labels; None: it has no value yet."""

    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        found = value(snapshot.status)
        if found is not None:
            yield (), found

    return samples


def _each(values: Callable[[JobStatus], Mapping[str, float]]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A metric with one label."""
    return lambda snapshot: [((name,), value) for name, value in values(snapshot.status).items()]


def _of_roles(values: Callable[[JobStatus], tuple[int, int]]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A metric of workers and of parameter servers."""
    return lambda snapshot: zip([("worker",), ("ps",)], values(snapshot.status), strict=True)


def _of_groups(value: Callable[[JobStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A metric that only AllReduce jobs have."""
    return lambda snapshot: [((), value(snapshot.status))] if snapshot.has_groups else []


def _of_ps(value: Callable[[PsStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A metric of each parameter server."""
    return lambda snapshot: [((str(ps.id),), value(ps)) for ps in snapshot.status.ps]


def _of_devices(value: Callable[[DeviceStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    """A metric of the device of each worker's process that has one; 0: not known."""
    return lambda snapshot: [
        ((str(device.worker), str(device.process), device.name, device.kind), value(device))
        for device in snapshot.status.devices
        if value(device)
    ]


def _info(snapshot: Snapshot) -> Iterator[Sample]:
    spec = snapshot.spec
    yield (spec.job_type.value, spec.distribution_strategy.value, spec.runtime.value, VERSION), 1


def _phases(status: JobStatus) -> Mapping[str, float]:
    return {phase.value: float(status.phase is phase) for phase in JobPhase}


def _pods(snapshot: Snapshot) -> Iterator[Sample]:
    """Every phase of a role that the job has, those without a pod too: a query need not reckon with gaps."""
    pods = snapshot.status.pods
    wanted = {"worker": snapshot.status.workers_wanted, "ps": snapshot.status.ps_wanted}
    for role in ("worker", "ps"):
        if wanted[role] or any(pod.role == role for pod in pods):
            for phase in _POD_PHASES:
                yield (role, phase), sum(pod.role == role and pod.phase == phase for pod in pods)


def _pods_lost(snapshot: Snapshot) -> Iterator[Sample]:
    for role, reasons in snapshot.status.pods_lost.items():
        for reason, number in reasons.items():
            yield (role, reason), number


def _checkpoints(status: JobStatus) -> Mapping[str, float]:
    return {result: status.event_counts.get(kind.value, 0) for result, kind in _CHECKPOINTS.items()}


def _staleness(snapshot: Snapshot) -> Iterator[Sample]:
    """Cumulative, as Prometheus has its buckets; those of the status are 0, 1, 2, 3-4, 5-8, …"""
    if not snapshot.has_ps:
        return
    found = snapshot.status.staleness
    counts = [*found, *[0] * (_STALENESS_BUCKETS - len(found))]
    for position, number in enumerate(accumulate(counts)):
        yield (str(float(position if position < 2 else 2 ** (position - 1))),), number
    yield ("+Inf",), sum(counts)


def _refused(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.has_ps:
        yield (), snapshot.status.gradients_refused


def _api_calls(snapshot: Snapshot) -> Iterator[Sample]:
    yield from snapshot.api_calls.items()


_COUNTER, _GAUGE = MetricType.COUNTER, MetricType.GAUGE
FAMILIES: tuple[MetricFamily, ...] = (
    MetricFamily(
        "elasticdl_job_info",
        _GAUGE,
        "Always 1; the kind of the job.",
        ("job_type", "strategy", "runtime", "version"),
        _info,
    ),
    MetricFamily(
        "elasticdl_job_phase", _GAUGE, "1 for the phase that the job is in, else 0.", ("phase",), _each(_phases)
    ),
    MetricFamily(
        "elasticdl_job_start_time_seconds",
        _GAUGE,
        "When the master started first, since the Unix epoch.",
        (),
        _one(lambda status: status.started_at or None),
    ),
    MetricFamily(
        "elasticdl_status_time_seconds",
        _GAUGE,
        "When these values were journalled, since the Unix epoch.",
        (),
        _one(lambda status: status.updated_at or None),
    ),
    MetricFamily(
        "elasticdl_master_restarts_total",
        _COUNTER,
        "Restarts of the master.",
        (),
        _one(lambda status: max(0, status.generation - 1)),
    ),
    MetricFamily(
        "elasticdl_events_total", _COUNTER, "Events of the job, by kind.", ("kind",), _each(lambda s: s.event_counts)
    ),
    MetricFamily(
        "elasticdl_records",
        _GAUGE,
        "Records of all epochs so far, by fate.",
        ("fate",),
        _each(lambda status: status.records),
    ),
    MetricFamily(
        "elasticdl_records_processed_total",
        _COUNTER,
        "Records that went into the model, were skipped or filtered; each time, if that is done again.",
        (),
        _one(lambda status: status.records_processed),
    ),
    MetricFamily(
        "elasticdl_records_planned",
        _GAUGE,
        "Records of all epochs; absent if there is no end.",
        (),
        _one(lambda status: status.records_total or None),
    ),
    MetricFamily(
        "elasticdl_tasks_done", _GAUGE, "Tasks that are complete, over all epochs.", (), _one(lambda s: s.tasks_done)
    ),
    MetricFamily(
        "elasticdl_tasks_planned",
        _GAUGE,
        "Tasks of all epochs; absent if there is no end.",
        (),
        _one(lambda status: status.tasks_total or None),
    ),
    MetricFamily("elasticdl_epoch", _GAUGE, "The newest epoch that has begun, from 1.", (), _one(lambda s: s.epoch)),
    MetricFamily(
        "elasticdl_epochs_planned",
        _GAUGE,
        "Epochs; absent if there is no end.",
        (),
        _one(lambda status: status.num_epochs if status.num_epochs > 0 else None),
    ),
    MetricFamily(
        "elasticdl_model_steps", _GAUGE, "Minibatches in the model.", (), _one(lambda status: status.model_version)
    ),
    MetricFamily("elasticdl_loss", _GAUGE, "The newest finite loss.", (), _one(lambda status: status.loss)),
    MetricFamily(
        "elasticdl_learning_rate",
        _GAUGE,
        "The learning rate in use, of the first group of parameters.",
        (),
        _one(lambda status: status.learning_rate),
    ),
    MetricFamily(
        "elasticdl_evaluation_metric",
        _GAUGE,
        "Metrics of the newest evaluation.",
        ("metric",),
        _each(lambda status: status.metrics),
    ),
    MetricFamily(
        "elasticdl_evaluation_steps",
        _GAUGE,
        "Minibatches in the model that was evaluated last.",
        (),
        _one(lambda status: status.metrics_step if status.metrics else None),
    ),
    MetricFamily(
        "elasticdl_worker_seconds",
        _GAUGE,
        "Where the time of the wanted workers has gone; it moves from useful to repeated when the model loses it.",
        ("state",),
        _each(lambda status: status.worker_seconds),
    ),
    MetricFamily(
        "elasticdl_ps_seconds",
        _GAUGE,
        "Where the time of the wanted parameter servers has gone.",
        ("state",),
        _each(lambda status: status.ps_seconds),
    ),
    MetricFamily(
        "elasticdl_goodput_ratio",
        _GAUGE,
        "Useful share of the time of the wanted workers, since the job began.",
        (),
        _one(lambda status: goodput(status.worker_seconds) if status.worker_seconds else None),
    ),
    MetricFamily("elasticdl_pods", _GAUGE, "Pods that the cluster shows.", ("role", "phase"), _pods),
    MetricFamily(
        "elasticdl_pods_wanted",
        _GAUGE,
        "Pods that the job asks for.",
        ("role",),
        _of_roles(lambda status: (status.workers_wanted, status.ps_wanted)),
    ),
    MetricFamily(
        "elasticdl_pods_ready",
        _GAUGE,
        "Workers that are registered, parameter servers that serve.",
        ("role",),
        _of_roles(lambda status: (status.workers_alive, status.ps_alive)),
    ),
    MetricFamily(
        "elasticdl_pods_lost_total",
        _COUNTER,
        "Pods that ended unasked or were given up, and got a successor.",
        ("role", "reason"),
        _pods_lost,
    ),
    MetricFamily(
        "elasticdl_device_memory_used_bytes",
        _GAUGE,
        "Bytes of the accelerator's memory that a worker's process takes.",
        ("worker", "process", "device", "kind"),
        _of_devices(lambda device: device.used_bytes),
    ),
    MetricFamily(
        "elasticdl_device_memory_limit_bytes",
        _GAUGE,
        "Bytes of the accelerator's memory; absent if not known.",
        ("worker", "process", "device", "kind"),
        _of_devices(lambda device: device.total_bytes),
    ),
    MetricFamily(
        "elasticdl_group_members",
        _GAUGE,
        "Workers of the current AllReduce group; 0: there is none.",
        (),
        _of_groups(lambda status: len(status.world)),
    ),
    MetricFamily(
        "elasticdl_group_changes_total",
        _COUNTER,
        "AllReduce groups that have formed.",
        (),
        _of_groups(lambda status: status.num_worlds),
    ),
    MetricFamily(
        "elasticdl_group_change_seconds_total",
        _COUNTER,
        "Seconds from a group's end, or the call for the first one, until the next one formed.",
        (),
        _of_groups(lambda status: status.world_seconds),
    ),
    MetricFamily(
        "elasticdl_ps_pushes_total",
        _COUNTER,
        "Gradients that a server received.",
        ("ps",),
        _of_ps(lambda ps: ps.pushes),
    ),
    MetricFamily(
        "elasticdl_ps_pulls_total", _COUNTER, "Times that a server sent values.", ("ps",), _of_ps(lambda ps: ps.pulls)
    ),
    MetricFamily(
        "elasticdl_ps_received_bytes_total",
        _COUNTER,
        "Bytes of tensors that a server received.",
        ("ps",),
        _of_ps(lambda ps: ps.received_bytes),
    ),
    MetricFamily(
        "elasticdl_ps_sent_bytes_total",
        _COUNTER,
        "Bytes of tensors that a server sent.",
        ("ps",),
        _of_ps(lambda ps: ps.sent_bytes),
    ),
    MetricFamily(
        "elasticdl_ps_busy_seconds_total",
        _COUNTER,
        "Seconds of a server's threads in calls.",
        ("ps",),
        _of_ps(lambda ps: ps.busy_seconds),
    ),
    MetricFamily(
        "elasticdl_ps_table_rows",
        _GAUGE,
        "Rows of all embedding tables of a server.",
        ("ps",),
        _of_ps(lambda ps: ps.rows),
    ),
    MetricFamily(
        "elasticdl_ps_table_bytes",
        _GAUGE,
        "Bytes of all embedding tables of a server.",
        ("ps",),
        _of_ps(lambda ps: ps.table_bytes),
    ),
    MetricFamily(
        "elasticdl_gradient_staleness",
        MetricType.HISTOGRAM,
        "Gradients that servers took, by the updates that each had missed.",
        (),
        _staleness,
    ),
    MetricFamily(
        "elasticdl_gradients_refused_total",
        _COUNTER,
        "Gradients that were too stale or too late, and are computed again.",
        (),
        _refused,
    ),
    MetricFamily(
        "elasticdl_checkpoints_total",
        _COUNTER,
        "Checkpoints of the parameter servers.",
        ("result",),
        _each(_checkpoints),
    ),
    MetricFamily(
        "elasticdl_checkpoint_time_seconds",
        _GAUGE,
        "When the newest checkpoint was complete, since the Unix epoch.",
        (),
        _one(lambda status: status.checkpoint_at or None),
    ),
    MetricFamily(
        "elasticdl_kubernetes_requests_total",
        _COUNTER,
        "Answers of the Kubernetes API since this master started.",
        ("method", "code"),
        _api_calls,
    ),
)
