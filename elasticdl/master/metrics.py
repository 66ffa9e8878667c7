"""Metrics: a job's status for Prometheus: names, types, labels and help of every metric, and their values.

Values come from the status that was last written with the journal, in this or an earlier generation of the master.  So
a counter never shows something that a crash could undo, and it does not fall when the master restarts.
metrics_server.py serves them; docs/prometheus.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.goodput import goodput
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import DeviceStatus, JobPhase, JobStatus, PsStatus
from elasticdl_client.version import VERSION

JOB_LABEL = "elasticdl_job"  # Prometheus has its own label `job`: the name of the scrape configuration
_POD_PHASES = ("Pending", "Running", "Succeeded", "Failed")
_STALENESS_BUCKETS = 12  # up to 1,024 updates; more if a gradient has missed more
_CHECKPOINTS = {"saved": EventKind.CHECKPOINT_SAVED, "failed": EventKind.CHECKPOINT_FAILED}

ApiCalls = Mapping[tuple[str, str], int]  # by HTTP method and status
Sample = tuple[tuple[str, ...], float]  # values of the labels, value


class MetricType(StrEnum):
    """Types of metrics, by Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values behind the metrics.

    Attributes:
        api_calls: Calls of the Kubernetes API by this generation of the master.
    """

    spec: JobSpec
    status: JobStatus
    api_calls: ApiCalls

    @property
    def has_groups(self) -> bool:
        return self.spec.distribution_strategy is DistributionStrategy.ALL_REDUCE

    @property
    def has_ps(self) -> bool:
        return self.spec.num_ps_pods > 0 and not self.spec.job_command  # a script uses TensorFlow's servers


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric.

    Attributes:
        name: Name in queries; of a histogram without `_bucket`.
        samples: Returns the values; empty if the job has none, or none yet.
        labels: Labels beside `JOB_LABEL`.
    """

    type: MetricType
    name: str
    help: str
    samples: Callable[[Snapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    def collected(self, snapshot: Snapshot) -> Metric | None:
        """Return the metric with its values; None without values."""
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
    """Computes all metrics at each scrape; thread-safe.

    Args:
        spec: Specification of the job.
        read_status: Returns the last written status; None before the first.
        read_api_calls: Returns the calls of the Kubernetes API so far.
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


# Functions that read values from the status


def _one(value: Callable[[JobStatus], float | None]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Read a metric without labels; None means no value yet."""

    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        found = value(snapshot.status)
        if found is not None:
            yield (), found

    return samples


def _each(values: Callable[[JobStatus], Mapping[str, float]]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Read a metric with one label."""
    return lambda snapshot: [((name,), value) for name, value in values(snapshot.status).items()]


def _of_roles(values: Callable[[JobStatus], tuple[int, int]]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Read a metric of workers and parameter servers."""
    return lambda snapshot: zip([("worker",), ("ps",)], values(snapshot.status), strict=True)


def _of_groups(value: Callable[[JobStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Read a metric that only AllReduce jobs have."""
    return lambda snapshot: [((), value(snapshot.status))] if snapshot.has_groups else []


def _of_ps(value: Callable[[PsStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Read a metric of each parameter server."""
    return lambda snapshot: [((str(ps.id),), value(ps)) for ps in snapshot.status.ps]


def _of_devices(value: Callable[[DeviceStatus], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    """Read a metric of the device of each worker's process that has one; 0 means unknown and is left out."""
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
    """Yield every phase of the job's roles, those without a pod too, so that queries see no gaps."""
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
    """Yield cumulative buckets for Prometheus; those of the status are 0, 1, 2, 3-4, 5-8, …"""
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


_counter, _gauge = partial(MetricFamily, MetricType.COUNTER), partial(MetricFamily, MetricType.GAUGE)
FAMILIES: tuple[MetricFamily, ...] = (
    _gauge(
        "elasticdl_job_info", "Always 1; the kind of the job.", _info, ("job_type", "strategy", "runtime", "version")
    ),
    _gauge("elasticdl_job_phase", "1 for the phase that the job is in, else 0.", _each(_phases), ("phase",)),
    _gauge(
        "elasticdl_job_start_time_seconds",
        "When the master started first, since the Unix epoch.",
        _one(lambda status: status.started_at or None),
    ),
    _gauge(
        "elasticdl_status_time_seconds",
        "When these values were journalled, since the Unix epoch.",
        _one(lambda status: status.updated_at or None),
    ),
    _counter(
        "elasticdl_master_restarts_total", "Restarts of the master.", _one(lambda status: max(0, status.generation - 1))
    ),
    _counter("elasticdl_events_total", "Events of the job, by kind.", _each(lambda s: s.event_counts), ("kind",)),
    _gauge(
        "elasticdl_records", "Records of all epochs so far, by fate.", _each(lambda status: status.records), ("fate",)
    ),
    _counter(
        "elasticdl_records_processed_total",
        "Records that went into the model, were skipped or filtered; each time, if that is done again.",
        _one(lambda status: status.records_processed),
    ),
    _gauge(
        "elasticdl_records_planned",
        "Records of all epochs; absent if there is no end.",
        _one(lambda status: status.records_total or None),
    ),
    _gauge("elasticdl_tasks_done", "Tasks that are complete, over all epochs.", _one(lambda s: s.tasks_done)),
    _gauge(
        "elasticdl_tasks_planned",
        "Tasks of all epochs; absent if there is no end.",
        _one(lambda status: status.tasks_total or None),
    ),
    _gauge("elasticdl_epoch", "The newest epoch that has begun, from 1.", _one(lambda s: s.epoch)),
    _gauge(
        "elasticdl_epochs_planned",
        "Epochs; absent if there is no end.",
        _one(lambda status: status.num_epochs if status.num_epochs > 0 else None),
    ),
    _gauge("elasticdl_model_steps", "Minibatches in the model.", _one(lambda status: status.model_version)),
    _gauge("elasticdl_loss", "The newest finite loss.", _one(lambda status: status.loss)),
    _gauge(
        "elasticdl_learning_rate",
        "The learning rate in use, of the first group of parameters.",
        _one(lambda status: status.learning_rate),
    ),
    _gauge(
        "elasticdl_evaluation_metric",
        "Metrics of the newest evaluation.",
        _each(lambda status: status.metrics),
        ("metric",),
    ),
    _gauge(
        "elasticdl_evaluation_steps",
        "Minibatches in the model that was evaluated last.",
        _one(lambda status: status.metrics_step if status.metrics else None),
    ),
    _gauge(
        "elasticdl_worker_seconds",
        "Where the time of the wanted workers has gone; it moves from useful to repeated when the model loses it.",
        _each(lambda status: status.worker_seconds),
        ("state",),
    ),
    _gauge(
        "elasticdl_ps_seconds",
        "Where the time of the wanted parameter servers has gone.",
        _each(lambda status: status.ps_seconds),
        ("state",),
    ),
    _gauge(
        "elasticdl_goodput_ratio",
        "Useful share of the time of the wanted workers, since the job began.",
        _one(lambda status: goodput(status.worker_seconds) if status.worker_seconds else None),
    ),
    _gauge("elasticdl_pods", "Pods that the cluster shows.", _pods, ("role", "phase")),
    _gauge(
        "elasticdl_pods_wanted",
        "Pods that the job asks for.",
        _of_roles(lambda status: (status.workers_wanted, status.ps_wanted)),
        ("role",),
    ),
    _gauge(
        "elasticdl_pods_ready",
        "Workers that are registered, parameter servers that serve.",
        _of_roles(lambda status: (status.workers_alive, status.ps_alive)),
        ("role",),
    ),
    _counter(
        "elasticdl_pods_lost_total",
        "Pods that ended unasked or were given up, and got a successor.",
        _pods_lost,
        ("role", "reason"),
    ),
    _gauge(
        "elasticdl_device_memory_used_bytes",
        "Bytes of the accelerator's memory that a worker's process takes.",
        _of_devices(lambda device: device.used_bytes),
        ("worker", "process", "device", "kind"),
    ),
    _gauge(
        "elasticdl_device_memory_limit_bytes",
        "Bytes of the accelerator's memory; absent if not known.",
        _of_devices(lambda device: device.total_bytes),
        ("worker", "process", "device", "kind"),
    ),
    _gauge(
        "elasticdl_group_members",
        "Workers of the current AllReduce group; 0: there is none.",
        _of_groups(lambda status: len(status.world)),
    ),
    _counter(
        "elasticdl_group_changes_total",
        "AllReduce groups that have formed.",
        _of_groups(lambda status: status.num_worlds),
    ),
    _counter(
        "elasticdl_group_change_seconds_total",
        "Seconds from a group's end, or the call for the first one, until the next one formed.",
        _of_groups(lambda status: status.world_seconds),
    ),
    _counter("elasticdl_ps_pushes_total", "Gradients that a server received.", _of_ps(lambda ps: ps.pushes), ("ps",)),
    _counter("elasticdl_ps_pulls_total", "Times that a server sent values.", _of_ps(lambda ps: ps.pulls), ("ps",)),
    _counter(
        "elasticdl_ps_received_bytes_total",
        "Bytes of tensors that a server received.",
        _of_ps(lambda ps: ps.received_bytes),
        ("ps",),
    ),
    _counter(
        "elasticdl_ps_sent_bytes_total",
        "Bytes of tensors that a server sent.",
        _of_ps(lambda ps: ps.sent_bytes),
        ("ps",),
    ),
    _counter(
        "elasticdl_ps_busy_seconds_total",
        "Seconds of a server's threads in calls.",
        _of_ps(lambda ps: ps.busy_seconds),
        ("ps",),
    ),
    _gauge("elasticdl_ps_table_rows", "Rows of all embedding tables of a server.", _of_ps(lambda ps: ps.rows), ("ps",)),
    _gauge(
        "elasticdl_ps_table_bytes",
        "Bytes of all embedding tables of a server.",
        _of_ps(lambda ps: ps.table_bytes),
        ("ps",),
    ),
    MetricFamily(
        MetricType.HISTOGRAM,
        "elasticdl_gradient_staleness",
        "Gradients that servers took, by the updates that each had missed.",
        _staleness,
    ),
    _counter(
        "elasticdl_gradients_refused_total",
        "Gradients that were too stale or too late, and are computed again.",
        _refused,
    ),
    _counter("elasticdl_checkpoints_total", "Checkpoints, as the events count them.", _each(_checkpoints), ("result",)),
    _gauge(
        "elasticdl_checkpoint_time_seconds",
        "When the newest checkpoint was complete, since the Unix epoch.",
        _one(lambda status: status.checkpoint_at or None),
    ),
    _counter(
        "elasticdl_kubernetes_requests_total",
        "Answers of the Kubernetes API since this master started.",
        lambda snapshot: snapshot.api_calls.items(),
        ("method", "code"),
    ),
)
