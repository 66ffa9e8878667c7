"""Behaviour of the local agent alone: its socket, its files, its answers to bad requests."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_agent import TIMEOUT_S, LocalAgent, Observer

from elasticdl.cluster.cluster import PodSpec
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.cluster.local.kubelet import OomKills
from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LocalAgent]:
    agent = LocalAgent(tmp_path)
    yield agent
    agent.stop()


def ask(agent: LocalAgent, line: bytes) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(agent.socket)
        connection.sendall(line)
        return json.loads(connection.makefile("rb").readline())


def test_only_its_user_can_reach_the_agent(agent: LocalAgent) -> None:
    assert stat.S_IMODE(os.stat(Path(agent.socket).parent).st_mode) == 0o700


def test_logs_lie_in_the_job_directory(agent: LocalAgent) -> None:
    agent.cluster.create(PodSpec("w-0", Role.WORKER, 0, ("echo", "hello")))
    Observer(agent.cluster).ended_pod("w-0")
    assert (agent.job_dir / "logs" / "w-0.log").read_text() == "hello\n"


def test_of_a_long_log_the_end_is_read(agent: LocalAgent) -> None:
    agent.cluster.create(PodSpec("w-0", Role.WORKER, 0, ("echo", "hello")))
    Observer(agent.cluster).ended_pod("w-0")
    with (agent.job_dir / "logs" / "w-0.log").open("r+b") as log:
        log.seek(1 << 38)  # a hole
        log.write(b"the end\n")
    found = agent.cluster.logs("w-0")
    assert found.endswith("the end\n")
    assert len(found) == 1 << 20


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"[]\n", b"{}\n", b'{"verb":"dance"}\n', b'{"verb":"create","spec":{"name":"w"}}\n']
)
def test_a_malformed_request_is_answered_and_harms_no_other(agent: LocalAgent, line: bytes) -> None:
    assert "does not understand" in ask(agent, line)["error"]["what"]
    assert agent.cluster.list() == []


def test_a_connection_outlives_an_error(agent: LocalAgent) -> None:
    with pytest.raises(ElasticDLError, match="no pod x"):
        agent.cluster.logs("x")
    assert agent.cluster.list() == []


def test_many_threads_may_use_one_cluster(agent: LocalAgent) -> None:
    def create(index: int) -> None:
        agent.cluster.create(PodSpec(f"w-{index}", Role.WORKER, index, ("true",)))

    threads = [threading.Thread(target=create, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(pod.index for pod in agent.cluster.list()) == list(range(8))


def test_a_gone_agent_is_an_error_that_says_so(agent: LocalAgent) -> None:
    watch = agent.cluster.watch()
    agent.cluster.create(PodSpec("w-0", Role.WORKER, 0, ("sleep", "1000")))
    assert next(watch).pod.name == "w-0"
    agent.process.kill()
    agent.process.wait(TIMEOUT_S)
    with pytest.raises(ElasticDLError, match="the job has ended"):
        list(watch)
    with pytest.raises(ElasticDLError, match="the job has ended"):
        agent.cluster.list()
    with pytest.raises(ElasticDLError, match="the job has ended"):
        ProcessCluster(agent.socket).list()


def test_a_kill_by_the_kernel_is_new_once(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 3\noom_kill 2\n")
    kills = OomKills(counter)
    assert not kills.is_new()
    counter.write_text("oom 4\noom_kill 3\n")
    assert kills.is_new()
    assert not kills.is_new()


def test_without_a_counter_no_kill_is_the_kernels() -> None:
    assert not OomKills(None).is_new()
