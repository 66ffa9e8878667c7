"""A master's pod that plays a job towards the client: a cluster-specification file that replaces what the pod runs.

The player, which has Python's standard library alone, writes statuses into the job's ConfigMap and ends.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus

RUNNING = JobStatus("job", JobPhase.RUNNING, epoch=1, num_epochs=1, records_done=50, records_total=100, generation=1)
DONE = dataclasses.replace(
    RUNNING,
    phase=JobPhase.SUCCEEDED,
    records_done=100,
    coverage=(EpochCoverage(1, 100, 100),),
    metrics={"accuracy": 0.97},
    metrics_step=10,
    exit_code=0,
)
FAILED = dataclasses.replace(RUNNING, phase=JobPhase.FAILED, exit_code=3, message="feed raised ValueError: broken")

_PLAYER = """
import json, os, signal, ssl, sys, urllib.request

account = "/var/run/secrets/kubernetes.io/serviceaccount/"
host = os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
namespace, job = os.environ["ELASTICDL_NAMESPACE"], os.environ["ELASTICDL_JOB_NAME"]
url = f"https://{host}/api/v1/namespaces/{namespace}/configmaps/elasticdl-{job}-state"
headers = {
    "Authorization": "Bearer " + open(account + "token").read(),
    "Content-Type": "application/merge-patch+json",
}
for status in STATUSES:
    body = json.dumps({"data": {"status.json": status}}).encode()
    request = urllib.request.Request(url, body, headers, method="PATCH")
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=account + "ca.crt"))
if END is None:
    signal.pause()
sys.exit(END)
"""
_FILE = """
class Cluster:
    def with_pod(self, pod):
        if pod.metadata.name.endswith("-master"):
            pod.spec.containers[0].command = ["python", "-c", {script!r}]
        return pod

    def with_service(self, service):
        return service


cluster = Cluster()
"""


def play(directory: Path, statuses: list[JobStatus], end: int | str | None) -> str:
    """Writes the file; its path, for --cluster_spec.

    Args:
        directory: where to.
        statuses: that the player writes, one after the other.
        end: its exit code, or what it says before it ends with 1; None: it stays until it is killed.
    """
    texts = [status.to_json() for status in statuses]
    script = _PLAYER.replace("STATUSES", repr(texts)).replace("END", repr(end))
    file = directory / "player.py"
    file.write_text(_FILE.format(script=script))
    return str(file)
