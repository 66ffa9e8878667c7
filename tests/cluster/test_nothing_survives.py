"""No process of the job is left after any kill of the client or the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import TIMEOUT_S, LocalAgent, Observer, Wire, have_ended, socket_of

from elasticdl.cluster.cluster import PodPhase, PodSpec, RestartPolicy
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.protocol import Role

# A pod with a child and a grandchild, which ignore what can be ignored; the whole group is stopped afterwards.
FAMILY = """
trap '' TERM INT HUP
sh -c 'trap "" TERM INT HUP; sleep 1000 & echo $$ $! > {wire}; wait' &
wait
"""

CLIENT = """
import subprocess, sys
command = [sys.executable, "-m", "elasticdl.cluster.local.agent", "--job_dir", sys.argv[1]]
agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(agent.pid, agent.stdout.readline(), flush=True)
agent.wait()
"""


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path / "wire")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LocalAgent]:
    agent = LocalAgent(tmp_path)
    yield agent
    agent.stop()


def start_families(cluster: ProcessCluster, wire: Wire) -> list[int]:
    """A stopped pod, a running one and a master; the pids of all their processes."""
    observer = Observer(cluster)
    pids = []
    for name, role in [("stopped", Role.WORKER), ("running", Role.PS), ("master", Role.MASTER)]:
        command = ("sh", "-c", FAMILY.format(wire=wire.path))
        cluster.create(PodSpec(name, role, 0, command, restart_policy=RestartPolicy.ON_FAILURE))
        leader = observer.phase(name, PodPhase.RUNNING).pid
        pids += [leader, *map(int, wire.read())]
        if name == "stopped":
            os.killpg(leader, signal.SIGSTOP)
    return pids


def test_nothing_survives_the_end_of_the_client(agent: LocalAgent, wire: Wire) -> None:
    pids = start_families(agent.cluster, wire)
    agent.stop()
    assert have_ended(pids)
    assert agent.process.returncode == 0
    assert not Path(agent.socket).parent.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_an_agent_that_is_asked_to_end(agent: LocalAgent, wire: Wire, number: signal.Signals) -> None:
    pids = start_families(agent.cluster, wire)
    agent.process.send_signal(number)
    assert have_ended([*pids, agent.process.pid])
    assert not Path(agent.socket).parent.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_nothing_survives_a_killed_agent(agent: LocalAgent, wire: Wire, number: signal.Signals) -> None:
    pids = start_families(agent.cluster, wire)
    agent.process.send_signal(number)
    assert have_ended([*pids, agent.process.pid])


def test_nothing_survives_an_agent_killed_while_a_pod_is_being_deleted(agent: LocalAgent, wire: Wire) -> None:
    pids = start_families(agent.cluster, wire)
    agent.cluster.delete("running", grace_s=1000)
    agent.process.kill()
    assert have_ended(pids)


def test_nothing_survives_a_killed_client(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLIENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        agent_pid, line = client.stdout.readline().split(maxsplit=1)
        cluster = ProcessCluster(socket_of(line))
        pids = start_families(cluster, Wire(tmp_path / "wire"))
        client.kill()
        assert have_ended([*pids, int(agent_pid)])
        cluster.close()


def sentinels_of(agent: LocalAgent, pods: list[int]) -> set[int]:
    """The children of the agent that are no leaders of pods.  Asking it once lets it deal with its signals."""
    agent.cluster.list()
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
    return {int(pid) for pid in children.read_text().split()} - set(pods)


def test_a_killed_sentinel_is_replaced(agent: LocalAgent, wire: Wire) -> None:
    pids = start_families(agent.cluster, wire)
    before = sentinels_of(agent, pids)
    for sentinel in before:
        os.kill(sentinel, signal.SIGKILL)
    assert have_ended(list(before))
    deadline = time.monotonic() + TIMEOUT_S
    while len(sentinels_of(agent, pids) - before) < len(before):
        assert time.monotonic() < deadline
    agent.process.kill()
    assert have_ended(pids)
