"""A status as metrics, and the server that they are read from."""

from __future__ import annotations

import dataclasses
import gzip
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_server import LOOPBACK, lint

from elasticdl.master.metrics import FAMILIES, JOB_LABEL, JobCollector, MetricType
from elasticdl.master.metrics_server import MAX_SCRAPES, MetricsServer
from elasticdl.rpc.addresses import free_ports, written
from elasticdl_client.errors import JobError
from elasticdl_client.goodput import PsState, SlotState
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import DeviceStatus, JobPhase, JobStatus, PodStatus, PsStatus
from tests.master.actors import wait_until

FLAGS = {"job_name": "digits", "runtime": "local", "model_def": "m.model", "training_data": "/data"}
PS_JOB = JobSpec.from_flags("train", FLAGS)
ALL_REDUCE_JOB = JobSpec.from_flags("train", FLAGS | {"distribution_strategy": "AllReduceStrategy"})
FULL = JobStatus(
    "digits",
    phase=JobPhase.RUNNING,
    generation=3,
    epoch=2,
    num_epochs=5,
    records_done=150,
    records={"committed": 150, "repeated": 8, "lost": 0, "quarantined": 2},
    records_processed=170,
    records_total=500,
    workers_alive=2,
    workers_wanted=3,
    ps_alive=1,
    ps_wanted=1,
    model_version=40,
    loss=0.25,
    learning_rate=0.1,
    metrics={"accuracy": 0.9, 'a "quoted"\nname\\': 1.0},
    metrics_step=30,
    tasks_done=4,
    tasks_total=10,
    pods=(
        PodStatus("w-0", "worker", "Running"),
        PodStatus("w-1", "worker", "Running"),
        PodStatus("w-2", "worker", "Pending"),
        PodStatus("p-0", "ps", "Running"),
    ),
    ps=(
        PsStatus(
            0, rows=5, table_bytes=80, pushes=60, pulls=61, received_bytes=1000, sent_bytes=2000, busy_seconds=1.5
        ),
    ),
    devices=(
        DeviceStatus(0, "cuda:0", "H100", 3 << 30, 80 << 30),
        DeviceStatus(1, "GPU:0", "T4", 2 << 30),
    ),
    world=(0, 1),
    num_worlds=4,
    world_seconds=1.25,
    staleness=(10, 5, 0, 3, 1),
    gradients_refused=7,
    worker_seconds={state.value: 1.0 for state in SlotState},
    ps_seconds={state.value: 1.0 for state in PsState},
    event_counts={"PodLost": 3, "CheckpointSaved": 2},
    pods_lost={"worker": {"Killed": 2, "OOMKilled": 1}},
    checkpoint_at=1700000100.0,
    started_at=1700000000.0,
    updated_at=1700000200.0,
)


def registry(spec: JobSpec, status: JobStatus | None) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(JobCollector(spec, lambda: status, lambda: {("GET", "200"): 12, ("PATCH", "409"): 1}))
    return found


def values(spec: JobSpec, status: JobStatus | None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By name and labels; each has the job's."""
    found = {}
    for family in parse(generate_latest(registry(spec, status)).decode()):
        for sample in family.samples:
            assert sample.labels[JOB_LABEL] == "digits"
            labels = frozenset((name, value) for name, value in sample.labels.items() if name != JOB_LABEL)
            found[sample.name, labels] = sample.value
    return found


def test_a_status_becomes_metrics_with_labels() -> None:
    found = values(PS_JOB, FULL)

    def value(name: str, **labels: str) -> float:
        return found[f"elasticdl_{name}", frozenset(labels.items())]

    assert value("records", fate="committed") == 150
    assert value("records_processed_total") == 170
    assert value("master_restarts_total") == 2
    assert (value("job_phase", phase="Running"), value("job_phase", phase="Failed")) == (1, 0)
    assert value("evaluation_metric", metric="accuracy") == 0.9
    assert value("evaluation_metric", metric='a "quoted"\nname\\') == 1.0
    assert (value("pods", role="worker", phase="Running"), value("pods", role="worker", phase="Failed")) == (2, 0)
    assert (value("pods_wanted", role="worker"), value("pods_ready", role="worker")) == (3, 2)
    assert value("pods_lost_total", role="worker", reason="OOMKilled") == 1
    assert value("ps_busy_seconds_total", ps="0") == 1.5
    assert value("checkpoints_total", result="saved") == 2
    assert value("checkpoints_total", result="failed") == 0
    assert value("device_memory_used_bytes", worker="1", process="0", device="GPU:0", kind="T4") == 2 << 30
    limits = {labels: limit for (name, labels), limit in found.items() if name == "elasticdl_device_memory_limit_bytes"}
    assert limits == {frozenset({"worker": "0", "process": "0", "device": "cuda:0", "kind": "H100"}.items()): 80 << 30}
    assert value("goodput_ratio") == pytest.approx(1 / len(SlotState))
    assert value("kubernetes_requests_total", method="PATCH", code="409") == 1
    assert not [name for name, _ in found if name.startswith("elasticdl_group_")]


def test_staleness_is_a_cumulative_histogram_with_the_same_buckets_from_the_beginning() -> None:
    def buckets(status: JobStatus) -> dict[str, float]:
        found = values(PS_JOB, status)
        return {dict(labels)["le"]: value for (name, labels), value in found.items() if name.endswith("_bucket")}

    found = buckets(FULL)
    assert [found[bound] for bound in ("0.0", "1.0", "2.0", "4.0", "8.0", "16.0", "1024.0", "+Inf")] == [
        10, 15, 15, 18, 19, 19, 19, 19,
    ]  # fmt: skip
    assert buckets(JobStatus("digits")).keys() == found.keys()
    wide = buckets(dataclasses.replace(FULL, staleness=(0,) * 13 + (2,)))
    assert (wide["2048.0"], wide["4096.0"], wide["+Inf"]) == (0, 2, 2)


def test_a_job_shows_only_what_its_strategy_has() -> None:
    names = {name for name, _ in values(ALL_REDUCE_JOB, dataclasses.replace(FULL, ps=(), ps_seconds={}))}
    assert {"elasticdl_group_members", "elasticdl_group_changes_total"} <= names
    assert not [name for name in names if name.startswith(("elasticdl_ps_", "elasticdl_gradient"))]


def test_before_the_first_status_there_is_a_pending_job() -> None:
    found = values(PS_JOB, None)
    assert found["elasticdl_job_phase", frozenset({("phase", "Pending")})] == 1
    assert not [name for name, _ in found if name in ("elasticdl_loss", "elasticdl_records_planned")]


@pytest.mark.parametrize("spec", [PS_JOB, ALL_REDUCE_JOB])
@pytest.mark.parametrize("status", [FULL, None])
def test_promtool_has_nothing_against_any_metric(spec: JobSpec, status: JobStatus | None) -> None:
    assert lint(generate_latest(registry(spec, status))) == ""


def test_every_metric_is_shown_in_both_formats() -> None:
    shown = set()
    for spec in (PS_JOB, ALL_REDUCE_JOB):
        plain = {sample.name for family in registry(spec, FULL).collect() for sample in family.samples}
        text = generate_openmetrics(registry(spec, FULL)).decode()
        assert {sample.name for family in parse_openmetrics(text) for sample in family.samples} == plain
        shown |= plain
    suffix = {MetricType.HISTOGRAM: "_bucket"}
    assert shown == {family.name + suffix.get(family.type, "") for family in FAMILIES}


@contextmanager
def serving(host: str = LOOPBACK, **options: bool) -> Iterator[tuple[MetricsServer, str, int]]:
    port = free_ports(host, 1)[0]
    server = MetricsServer(host, port, JobCollector(PS_JOB, lambda: FULL), **options)
    try:
        yield server, f"http://{written(host, port)}", port
    finally:
        server.close()


def get(address: str, **headers: str) -> tuple[str, bytes]:
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.headers["Content-Type"], response.read()


def serves(address: str) -> bool:
    try:
        return b"elasticdl_loss" in get(f"{address}/metrics")[1]
    except OSError:
        return False


def test_the_scraper_chooses_format_and_compression() -> None:
    with serving() as (_, address, _):
        kind, text = get(f"{address}/metrics")
        assert kind.startswith("text/plain")
        assert lint(text) == ""
        assert b"\nprocess_resident_memory_bytes " in text
        kind, text = get(f"{address}/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text; version=1.0.0")
        assert text.endswith(b"# EOF\n")
        _, packed = get(f"{address}/metrics", **{"Accept-Encoding": "gzip"})
        assert b"elasticdl_loss" in gzip.decompress(packed)


def test_nothing_but_the_metrics_is_served() -> None:
    with serving() as (_, address, _):
        for path in ("/", "/metrics/x", "/../etc/passwd"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(address + path)
            assert caught.value.code == 404
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{address}/metrics", data=b"x", timeout=10)
        assert caught.value.code == 405


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_on_kubernetes_it_is_reached_by_both_families() -> None:
    with serving("::") as (_, _, port):
        for host in ("127.0.0.1", "::1"):
            assert b"elasticdl_loss" in get(f"http://{written(host, port)}/metrics")[1]


def test_a_port_that_is_taken_is_an_error_unless_pods_train_already() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"--metrics_port={port} cannot be used: Address already in use"):
            MetricsServer(LOOPBACK, port, JobCollector(PS_JOB, lambda: FULL))
        server = MetricsServer(LOOPBACK, port, JobCollector(PS_JOB, lambda: FULL), is_patient=True)
    try:
        wait_until(lambda: serves(f"http://{LOOPBACK}:{port}"), "the port to be served")
    finally:
        server.close()


class ClosedAtItsStart(MetricsServer):
    """The job ends just as the port could be had."""

    def _open(self) -> None:
        super()._open()
        self._closed.set()


def test_a_server_that_is_closed_before_it_has_served_ends() -> None:
    server = ClosedAtItsStart(LOOPBACK, free_ports(LOOPBACK, 1)[0], JobCollector(PS_JOB, lambda: FULL))
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_connections_that_stay_do_not_keep_a_scraper_out() -> None:
    with serving() as (_, address, port):
        silent = [socket.create_connection((LOOPBACK, port), timeout=10) for _ in range(MAX_SCRAPES + 1)]
        assert silent[0].recv(1) == b""  # the oldest makes room
        assert serves(address)
        assert silent[1].recv(1) == b""
        for one in silent:
            one.close()


def test_a_lack_of_threads_costs_no_later_scrape() -> None:
    with serving() as (_, address, _):
        size = threading.stack_size(1 << 47)  # more than a process can have
        try:
            assert not [number for number in range(MAX_SCRAPES) if serves(address)]
        finally:
            threading.stack_size(size)
        assert serves(address)
