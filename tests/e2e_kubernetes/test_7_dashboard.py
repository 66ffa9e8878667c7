"""`manifests/dashboard.yaml` as a pod: behind a port-forward a browser sees a running job, and no action upon it."""

from __future__ import annotations

import re
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("playwright", reason="the extra dev is not installed")

from playwright.sync_api import Browser, Page, TimeoutError, expect

from tests.dashboard.browsers import browser, chromium
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl
from tests.e2e_kubernetes.space import Space

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
_NAME = "elasticdl-dashboard"
_WAIT_MS = 60_000


def deploy(space: Space, token: str) -> None:
    """As docs/dashboard.md says it, in the test's namespace and with its image."""
    kubectl("-n", space.namespace, "create", "secret", "generic", _NAME, f"--from-literal=token={token}")
    manifest = (REPOSITORY / "manifests" / "dashboard.yaml").read_text()
    manifest = manifest.replace("namespace: default", f"namespace: {space.namespace}")
    kubectl("apply", "-f", "-", stdin=manifest.replace("image: elasticdl-zoo:dev", f"image: {space.image}"))


@contextmanager
def forwarded(namespace: str) -> Iterator[str]:
    """The address at which `kubectl port-forward` has the Service on this machine."""
    command = ["kubectl", "-n", namespace, "port-forward", f"service/{_NAME}", ":8265"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:\d+", line)
            assert found, line
            yield f"http://{found[0]}/"
        finally:
            process.kill()


def asked(address: str, path: str, token: str, method: str = "GET") -> int:
    """The status with which a request is answered."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, headers=headers, method=method)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def opened(chrome: Browser, url: str) -> Page:
    """The page with its list of jobs; loaded once more if the port-forward has lost one of its files, as users do."""
    page = chrome.new_page()
    page.set_default_timeout(_WAIT_MS)
    page.on("requestfailed", lambda request: print("failed:", request.url.partition("?")[0], request.failure))
    page.on("pageerror", lambda error: print("error:", error))
    page.goto(url)
    try:
        page.get_by_role("link", name="watched").wait_for()
    except TimeoutError:
        print("loaded once more:", page.locator("body").inner_text())
        page.reload()
    return page


def test_the_dashboard_of_a_namespace_shows_a_running_job_and_offers_no_action(open_space: OpenSpace) -> None:
    if not chromium():
        pytest.skip("Chromium is not installed")
    space, token = open_space("dashboard"), secrets.token_hex(32)
    deploy(space, token)
    job = space.job("watched", num_workers=1, num_ps_pods=1).submit()
    kubectl("-n", space.namespace, "rollout", "status", f"deployment/{_NAME}", "--timeout=90s")
    job.wait_for_progress()
    with forwarded(space.namespace) as address, browser() as chrome:
        assert asked(address, "api/jobs", "0" * 64) == 403
        page = opened(chrome, f"{address}?token={token}")
        page.get_by_role("link", name="watched").click()
        expect(page.locator(".head .badge")).to_have_text("Running", timeout=_WAIT_MS)
        expect(page.locator(".lane[data-pod=worker-0]")).to_be_visible(timeout=_WAIT_MS)
        assert page.locator(".head").get_by_role("button").count() == 0
        page.get_by_role("link", name="Logs").click()
        expect(page.locator(".log")).to_contain_text("Starting epoch", timeout=_WAIT_MS)
        job_id = page.url.partition("#/job/")[2].partition("/")[0]
        assert asked(address, f"api/jobs/{job_id}", token) == 200
        assert asked(address, f"api/jobs/{job_id}/delete", token, "POST") == 403
    account = f"--as=system:serviceaccount:{space.namespace}:{_NAME}"
    granted = kubectl("-n", space.namespace, "auth", "can-i", "--list", "--no-headers", account)
    rights = {line.split()[0]: line.rpartition("[")[2].rstrip("]\n ") for line in granted.splitlines()}
    assert {name: rights[name] for name in ("pods", "configmaps", "events", "pods/log")} == {
        "pods": "get list", "configmaps": "list", "events": "list", "pods/log": "get",
    }  # fmt: skip
    assert "secrets" not in rights
