"""Jobs, servers and groups whose addresses are of IPv6: real sockets at ::1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest

from elasticdl.collective.nccl import use_family_of
from elasticdl.master.kubernetes.environment import _PS_ENV
from elasticdl.ps.tensor_sockets import TensorClient, TensorServer
from elasticdl.rpc import addresses
from elasticdl.rpc.addresses import free_ports
from elasticdl.rpc.channels import connect
from elasticdl.rpc.frames import Frame, decode
from elasticdl.rpc.servers import Flow, serve
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from tests.chaos.job import REPOSITORY
from tests.chaos.jobs import DIGITS
from tests.ps.masters import OnePsMaster, connected, serving, start
from tests.ps.scenes import ADAM, TABLES, TOKEN, assert_same_model, initial_parameters, ps_cluster, push_all
from tests.ps.tensor_peers import echo

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
RUN = (
    "import sys; from elasticdl_client import local, main; from elasticdl_client.job_spec import JobSpec\n"
    "master = (sys.executable, '-m', 'tests.e2e.master_on_ipv6')\n"
    "main.exit_with(lambda: sys.exit(local.run(JobSpec.from_json(sys.argv[1]), master)))"
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.1.2.3:80", "10.1.2.3", 80), ("[fd00::1]:2222", "fd00::1", 2222), ("a.b.svc:1", "a.b.svc", 1)],
)
def test_addresses_are_read_as_they_are_written(text: str, host: str, port: int) -> None:
    assert addresses.parse(text) == (host, port)
    assert addresses.written(host, port) == text


def test_what_listens_everywhere_is_reached_over_both_families() -> None:
    server, port = serve(lambda server: None, addresses.any_host(), 0, TOKEN, 2)
    try:
        for host in ("127.0.0.1", "::1"):
            channel = connect(addresses.written(host, port), TOKEN)
            grpc.channel_ready_future(channel).result(timeout=20)
            channel.close()
        with pytest.raises(JobError, match=rf"cannot listen on \[::\]:{port}: Address already in use"):
            serve(lambda server: None, "::", port, TOKEN, 2)
    finally:
        server.stop(None).wait()
    with addresses.listen(addresses.any_host(), 0, 8) as listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.getsockname()[1]), 20).close()
    assert free_ports("::1", 2)


def test_a_worker_that_reaches_the_master_over_ipv6_is_reached_over_it() -> None:
    assert addresses.own_host("[::1]:50001") == "::1"
    assert addresses.own_host("127.0.0.1:50001") == "127.0.0.1"
    assert addresses.numeric_host("localhost") == "127.0.0.1"  # IPv4 first, where there is both


def test_nccl_takes_the_family_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_FAMILY", raising=False)
    use_family_of("[fd00::1]:7000")
    assert os.environ["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    use_family_of("10.0.0.1:7000")
    assert os.environ["NCCL_SOCKET_FAMILY"] == "AF_INET6"  # a set value stays


def test_tensors_go_over_tcp_of_ipv6() -> None:
    server = TensorServer("::1", TOKEN, {"Exchange": echo}, Flow(8, 0))
    try:
        client = TensorClient("::1", f"{server.port}", TOKEN, 20.0)  # no name: not by the Unix socket
        header, (array,) = decode(client.call("Exchange", Frame(b"x", [np.arange(1 << 20)]), 20.0))
        assert header == b"seen x"
        np.testing.assert_array_equal(array, np.arange(1 << 20))
        client.close()
    finally:
        server.close()


def test_training_on_servers_at_ipv6_is_the_same_to_the_bit() -> None:
    with ps_cluster(2, host="::1") as one, ps_cluster(2) as other:
        assert all(ps.address.startswith("[::1]:") for ps in one.partition.ps)
        push_all(one.client, range(5))
        push_all(other.client, range(5))
        assert_same_model(one.client, other.client)


def test_a_pod_of_ipv6_listens_everywhere_and_tells_its_own_address(stack: ExitStack, tmp_path: Path) -> None:
    """The environment is that of the master on Kubernetes, with the address that the kubelet puts in."""
    environment = {**_PS_ENV, "PS_PORT": "0", "PS_ADVERTISED_HOST": "::1"}
    master = OnePsMaster()
    port = stack.enter_context(serving(master, host="::1"))
    start(stack, port, tmp_path, MASTER_ADDR=f"[::1]:{port}", **environment)
    master.wait(lambda: master.readies)
    assert master.registrations[0].address.startswith("[::1]:")
    connected(stack, master).initialize(initial_parameters(), TABLES, ADAM, 7)


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "flags",
    [
        {"distribution_strategy": "ParameterServerStrategy", "num_ps_pods": 2, "tls": "true"},
        {"distribution_strategy": "AllReduceStrategy", "num_ps_pods": 0},
    ],
    ids=["servers", "group"],
)
def test_a_whole_job_at_ipv6_trains_every_record_once(flags: dict[str, object], tmp_path: Path) -> None:
    running = DIGITS.local_job(tmp_path / "job", DIGITS.make_data(tmp_path), num_epochs=1, num_workers=2, **flags)
    given = {name: str(value) for name, value in running.flags.items()}
    spec = JobSpec.from_flags("train", {**given, "runtime": "local", "job_dir": str(tmp_path / "job")})
    ended = subprocess.run(
        [sys.executable, "-c", RUN, spec.to_json()], cwd=REPOSITORY, capture_output=True, text=True, timeout=170
    )
    logs = "".join(file.read_text() for file in (tmp_path / "job" / "logs").iterdir())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    status = JobStatus.from_json((tmp_path / "job" / "status.json").read_text())
    (coverage,) = status.coverage
    assert (coverage.committed, coverage.repeated, coverage.lost) == (1437, 0, 0)
    assert "127.0.0.1:" not in logs
