"""Keeps the DNS records of the cluster of `../shared/cluster/up`, and waits while nothing changes.

    python -m tests.e2e_kubernetes.dns_records

The keeper that comes with that cluster watches from no version of the resources, which the API server answers with all
of them at once: it reads without a pause, and costs a processor of the two that the tests have.  This one takes over
its file and its pid file, so that `up` and `down` know it as theirs.  Other clusters have a DNS of their own.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import urllib3
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.waiting import wait_until

_RUN = host.CLUSTER_HOME / "run"
_PID = _RUN / "dns-records.pid"
_HEADLESS = "service.kubernetes.io/headless"
_LONGEST_WATCH_S = 30
_CALL_TIMEOUT_S = 10


def take_over() -> None:
    """Puts this keeper in the place of the one that runs, unless that is one like this."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid = int(_PID.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if __spec__.name.encode() in command:
            return
        if b"dns-records" in command:
            os.kill(pid, signal.SIGTERM)
    with (host.CLUSTER_HOME / "log" / "dns-records.log").open("ab") as log:
        # `up` looks for the word dns-records in the command line of the process in the pid file.
        keeper = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--keep", str(_RUN / "dns" / "services"), "dns-records"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    _PID.write_text(f"{keeper.pid}\n")


def keep(hosts: Path) -> None:
    """Writes the records of all services into `hosts`, again after each change; never ends."""
    config.load_kube_config(str(host.CLUSTER_HOME / "kubeconfig"))
    api = client.CoreV1Api()
    while True:
        try:
            _follow(api, hosts)
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            print(error, flush=True)
        wait_until("the API server", lambda: _answers(api), math.inf)


def _follow(api: client.CoreV1Api, hosts: Path) -> None:
    """Keeps the records until the API server is away."""
    written = ""
    while True:
        version, records = _read(api)
        if (text := "".join(f"{record}\n" for record in records)) != written:
            new = hosts.with_name(f"{hosts.name}.new")
            new.write_text(text)
            new.replace(hosts)
            written = text
        endpoints = watch.Watch().stream(
            api.list_endpoints_for_all_namespaces, resource_version=version, timeout_seconds=_LONGEST_WATCH_S,
            _request_timeout=2 * _LONGEST_WATCH_S,
        )  # fmt: skip
        next(endpoints, None)  # every service has its endpoints


def _answers(api: client.CoreV1Api) -> bool:
    try:
        api.list_endpoints_for_all_namespaces(limit=1, _request_timeout=_CALL_TIMEOUT_S)
    except (ApiException, urllib3.exceptions.HTTPError):
        return False
    return True


def _read(api: client.CoreV1Api) -> tuple[str, list[str]]:
    endpoints = api.list_endpoints_for_all_namespaces()
    return endpoints.metadata.resource_version, sorted({*_of_services(api), *_of_headless(endpoints.items)})


def _of_services(api: client.CoreV1Api) -> Iterator[str]:
    for service in api.list_service_for_all_namespaces().items:
        if (address := service.spec.cluster_ip) and address != "None":
            yield f"{address} {_domain(service.metadata)}"


def _of_headless(endpoints: list[client.V1Endpoints]) -> Iterator[str]:
    for one in endpoints:
        headless = _HEADLESS in (one.metadata.labels or {})
        for address in (address for subset in one.subsets or () for address in subset.addresses or ()):
            if address.hostname:
                yield f"{address.ip} {address.hostname}.{_domain(one.metadata)}"
            if headless:
                yield f"{address.ip} {_domain(one.metadata)}"


def _domain(metadata: client.V1ObjectMeta) -> str:
    return f"{metadata.name}.{metadata.namespace}.svc.cluster.local"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        keep(Path(sys.argv[2]))
    elif host.owns_the_cluster():
        take_over()
