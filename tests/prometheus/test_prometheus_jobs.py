"""A real Prometheus scrapes a real job, whose master is killed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from prometheus_server import LOOPBACK, running

from elasticdl.master.metrics import FAMILIES, MetricType
from elasticdl.protocol import Role
from elasticdl.rpc.addresses import free_ports
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.kills import Kill
from tests.chaos.scenarios import LEASE_TIMEOUT_S


def test_counters_of_a_job_do_not_go_backwards_when_its_master_is_killed(tmp_path: Path) -> None:
    job = dataclasses.replace(NUMPY_DIGITS, num_epochs=10, pace_s=0.006)
    (port,) = free_ports(LOOPBACK, 1)
    with running(tmp_path / "prometheus", f"{LOOPBACK}:{port}") as prometheus:
        flags = {"metrics_port": port, "checkpoint_steps": 20, "lease_timeout": LEASE_TIMEOUT_S}
        local = job.local_job(tmp_path / "job", job.make_data(tmp_path), **flags).start()
        try:
            prometheus.wait_until("elasticdl_records_processed_total", lambda value: value > 300)
            prometheus.wait_until('elasticdl_checkpoints_total{result="saved"}', lambda value: value > 0)
            Kill(Role.WORKER, 0).strike(local)
            prometheus.wait_until("sum(elasticdl_pods_lost_total)", lambda value: value == 1)
            before = prometheus.wait_until("elasticdl_records_processed_total", lambda value: value > 300)
            Kill(Role.MASTER, 0).strike(local)
            prometheus.wait_until("elasticdl_master_restarts_total", lambda value: value == 1)
            prometheus.wait_until("elasticdl_records_processed_total", lambda value: value > before)
            local.hurry()
            assert local.wait() == 0, local.story()
        finally:
            local.end()
        counters = [family.name for family in FAMILIES if family.type is MetricType.COUNTER]
        scraped = [name for name in counters if prometheus.query(f"last_over_time({name}[10m])")]
        assert {"elasticdl_events_total", "elasticdl_ps_pushes_total", "elasticdl_pods_lost_total"} <= set(scraped)
        assert {
            name: sum(float(one["value"][1]) for one in prometheus.query(f"resets({name}[10m])")) for name in scraped
        } == dict.fromkeys(scraped, 0)
        assert prometheus.value('max_over_time(elasticdl_records{fate="repeated"}[10m])') == 0
        assert prometheus.value('max_over_time(elasticdl_pods{role="worker", phase="Running"}[10m])') == 2
        assert (
            prometheus.value("histogram_quantile(1, max_over_time(elasticdl_gradient_staleness_bucket[10m]))")
            is not None
        )
