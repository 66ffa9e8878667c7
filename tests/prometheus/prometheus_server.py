"""A Prometheus of its own for a test: it scrapes one address and answers PromQL; gone at the end.  And promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticdl.rpc.addresses import free_ports
from tests.master.actors import wait_until

LOOPBACK = "127.0.0.1"
_CONFIGURATION = """
global:
  scrape_interval: 200ms
  scrape_timeout: 200ms
scrape_configs:
  - job_name: elasticdl
    static_configs:
      - targets: ["{target}"]
"""


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; CI has both, so its run fails if this skips."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: install Prometheus (Debian: apt-get install prometheus)")
    return found


def lint(metrics: bytes) -> str:
    """Return the errors of `promtool check metrics` for metrics of the text format; empty: none."""
    done = subprocess.run([program("promtool"), "check", "metrics"], input=metrics, capture_output=True)
    return (done.stdout + done.stderr).decode() or ("" if done.returncode == 0 else f"exit code {done.returncode}")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str
    directory: Path

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': promql})}"
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{promql}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, promql: str) -> float | None:
        """The value of a query with one answer; None: it has none."""
        found = self.query(promql)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def wait_until(self, promql: str, holds: Callable[[float], bool]) -> float:
        """The first value of a query that fulfils a condition."""

        def found() -> tuple[float, ...]:
            value = self.value(promql)
            return (value,) if value is not None and holds(value) else ()

        (value,) = wait_until(found, f"{promql} to hold; the log is {self.directory / 'log'}")
        return float(value)


@contextmanager
def running(directory: Path, target: str) -> Iterator[Prometheus]:
    """A server that scrapes an address five times a second."""
    directory.mkdir()
    configuration = directory / "prometheus.yml"
    configuration.write_text(_CONFIGURATION.format(target=target))
    address = f"{LOOPBACK}:{free_ports(LOOPBACK, 1)[0]}"
    command = [program("prometheus"), f"--config.file={configuration}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://{address}", directory)
        _await_ready(server, process)
        yield server
    finally:
        process.kill()
        process.wait()


def _await_ready(server: Prometheus, process: subprocess.Popen[bytes]) -> None:
    def is_ready() -> bool:
        try:
            urllib.request.urlopen(f"{server.url}/-/ready", timeout=10).close()
        except OSError:
            assert process.poll() is None, (server.directory / "log").read_text()
            return False
        return True

    wait_until(is_ready, f"Prometheus to answer; its log is {server.directory / 'log'}")
