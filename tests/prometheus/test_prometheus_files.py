"""The page, the dashboard and the manifest speak of the metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_server import program

from elasticdl.cluster.cluster import PodSpec, RestartPolicy
from elasticdl.master.metrics import FAMILIES, JOB_LABEL, MetricType
from elasticdl.protocol import Role
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.objects import job_manifests
from elasticdl_client.kubernetes.pods import pod_manifest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "prometheus.md").read_text()
DASHBOARD = json.loads((ROOT / "manifests" / "grafana_dashboard.json").read_text())
NAMES = {family.name + ("_bucket" if family.type is MetricType.HISTOGRAM else "") for family in FAMILIES}
LABELS = {label for family in FAMILIES for label in family.labels} | {JOB_LABEL, "le"}


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def plain(expression: str) -> str:
    """An expression of the dashboard as Prometheus takes it."""
    return expression.replace("$__rate_interval", "1m").replace("$job", "digits")


def test_the_page_lists_every_metric_as_it_is() -> None:
    rows = re.findall(r"^\| `(elasticdl_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (f.name, f.type.value, ", ".join(f"`{label}`" for label in f.labels), f.help.rstrip(".")) for f in FAMILIES
    ]


def test_the_dashboard_and_the_page_query_only_what_there_is() -> None:
    asked = {name for text in expressions() for name in re.findall(r"elasticdl_\w+", text)} - {JOB_LABEL}
    assert asked <= NAMES
    assert {f.name for f in FAMILIES if f.type is MetricType.COUNTER} <= asked, "a counter has no panel"
    in_page = set(re.findall(r"elasticdl_\w+", PAGE)) - {JOB_LABEL}
    assert in_page <= NAMES | {family.name for family in FAMILIES}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "job"}
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on each other"
    assert max(x for x, _ in cells) < 24
    used = {name for text in expressions() for name in re.findall(r"(\w+) ?(?:=|!=|=~|!~) ?\"", text)}
    assert used <= LABELS
    legends = (target["legendFormat"] for panel in panels for target in panel.get("targets", []))
    assert {name for legend in legends for name in re.findall(r"{{(\w+)}}", legend)} <= LABELS


def test_promtool_takes_every_query_of_dashboard_and_page(tmp_path: Path) -> None:
    block = PAGE.partition("## Queries")[2]
    queries = [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("    ")]
    queries += re.findall(r"`([^`]+)`", block)
    assert len(queries) == 11
    rules = [{"alert": "A", "expr": plain(one)} for one in [*expressions(), *queries]]
    path = tmp_path / "rules.yml"
    for number, rule in enumerate(rules):
        rule["alert"] = f"A{number}"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run([program("promtool"), "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


FLAGS = {
    "job_name": "digits",
    "namespace": "here",
    "image_name": "i:1",
    "model_def": "m.model",
    "training_data": "/data",
}


def job_pod(role: str, **flags: object) -> dict[str, Any]:
    pod = PodSpec(
        name=names.pod_name("digits", role, 0),
        role=Role(role),
        index=0,
        command=("python",),
        restart_policy=RestartPolicy.NEVER,
    )
    return pod_manifest(JobSpec.from_flags("train", FLAGS | flags), pod)


def test_the_pod_monitor_finds_the_master_by_its_labels_and_its_port_by_name() -> None:
    monitor = yaml.safe_load((ROOT / "manifests" / "pod_monitor.yaml").read_text())["spec"]
    [endpoint] = monitor["podMetricsEndpoints"]
    pod = job_pod("master", metrics_port=9100)
    assert pod["metadata"]["labels"].items() >= monitor["selector"]["matchLabels"].items()
    [container] = pod["spec"]["containers"]
    assert container["ports"] == [{"name": endpoint["port"], "containerPort": 9100, "protocol": "TCP"}]
    assert pod["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9100",
        "prometheus.io/path": endpoint["path"],
    }


@pytest.mark.parametrize(("role", "port"), [("master", 0), ("worker", 9100), ("ps", 9100)])
def test_other_pods_and_jobs_without_the_flag_have_no_port(role: str, port: int) -> None:
    pod = job_pod(role, metrics_port=port)
    assert "annotations" not in pod["metadata"]
    assert "ports" not in pod["spec"]["containers"][0]


def test_annotations_of_the_user_and_those_for_prometheus_are_both_there() -> None:
    mine = json.dumps({"pod_spec": {"annotations": {"mine": "1"}}})
    annotations = job_pod("master", metrics_port=9100, cluster_spec_json=mine)["metadata"]["annotations"]
    assert (annotations["mine"], annotations["prometheus.io/port"]) == ("1", "9100")


@pytest.mark.parametrize("port", [0, 9100])
def test_the_network_policy_opens_the_port_that_the_master_alone_names(port: int) -> None:
    manifests = job_manifests(JobSpec.from_flags("train", FLAGS | {"metrics_port": port}), "token")
    [policy] = [found["spec"]["ingress"] for found in manifests if found["kind"] == "NetworkPolicy"]
    assert policy[1:] == ([{"ports": [{"protocol": "TCP", "port": "metrics"}]}] if port else [])
