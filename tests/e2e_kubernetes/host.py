"""This machine, which is the cluster's node: processes of pods, and the cluster's own daemons."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl
from tests.e2e_kubernetes.waiting import wait_until

CLUSTER = REPOSITORY.parent / "shared" / "cluster"
CLUSTER_HOME = Path(os.environ.get("CLUSTER_HOME", Path.home() / ".cache" / "devcluster"))


def owns_the_cluster() -> bool:
    """Whether the cluster is the one of `../shared/cluster/up`, whose daemons may be stopped."""
    return (CLUSTER / "up").exists() and (CLUSTER_HOME / "run" / "kube-apiserver.pid").exists()


def node_address() -> str:
    """The address of this machine that pods reach."""
    addresses = json.loads(kubectl("get", "nodes", "-o", "json"))["items"][0]["status"]["addresses"]
    return str(next(one["address"] for one in addresses if one["type"] == "InternalIP"))


def process_of(pod_uid: str) -> int:
    """The id, on this machine, of the process that a pod's container runs."""
    found = _docker("ps", "-q", "--no-trunc", "--filter", f"label=io.kubernetes.pod.uid={pod_uid}",
                    "--filter", "label=io.kubernetes.docker.type=container").split()  # fmt: skip
    assert len(found) == 1, f"pod {pod_uid} has the running containers {found}"
    return int(_docker("inspect", "--format", "{{.State.Pid}}", found[0]))


def kill(pod_uid: str, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Signals the process of a pod from outside of it, as the node's kernel or its administrator would."""
    os.kill(process_of(pod_uid), signal_number)


def kill_child(pod_uid: str) -> None:
    """Kill one of the processes that a pod's main process has started."""
    main = process_of(pod_uid)
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)


def inside_network(pod_uid: str) -> list[str]:
    """How a command begins that runs on this machine, in the network of the pod."""
    return ["nsenter", "--net", f"--target={process_of(pod_uid)}"]


@contextlib.contextmanager
def cut_off(pod_uid: str) -> Iterator[None]:
    """While nothing that the pod sends leaves it, and nothing reaches it: its connections stay open and are silent."""
    inside = [*inside_network(pod_uid), "iptables"]
    rules = [[chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j", "DROP"] for chain in ("INPUT", "OUTPUT")]
    for rule in rules:
        subprocess.run([*inside, "--append", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run([*inside, "--delete", *rule], check=False)


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def stopped(daemon: str) -> Iterator[None]:
    """While a daemon of the cluster (kube-apiserver, kubelet, …) is stopped; afterwards it has been started again."""
    pid = int((CLUSTER_HOME / "run" / f"{daemon}.pid").read_text())
    assert daemon.encode() in Path(f"/proc/{pid}/cmdline").read_bytes(), f"process {pid} is not the {daemon}"
    os.kill(pid, signal.SIGKILL)
    wait_until(f"the end of the {daemon}", lambda: _ended(pid), 30)
    print(f"{time.strftime('%H:%M:%S')} the {daemon} is stopped", flush=True)
    try:
        yield
    finally:
        bring_up()
        print(f"{time.strftime('%H:%M:%S')} the {daemon} is up again", flush=True)


def bring_up() -> None:
    """Starts whatever of the cluster does not run."""
    done = subprocess.run([CLUSTER / "up"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
