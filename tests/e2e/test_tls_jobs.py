"""Whole jobs whose processes speak to each other by the job's certificate alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from elasticdl.protocol import Role
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from tests.chaos.job import LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.kills import Kill, run_life
from tests.chaos.scenarios import assert_exact


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return NUMPY_DIGITS.make_data(tmp_path_factory.mktemp("data"))


def assert_a_stranger_with_the_token_gets_nothing(running: LocalJob) -> None:
    [line] = [line for line in running.master_log().splitlines() if "The port of the master server is" in line]
    address, token = f"127.0.0.1:{line.rpartition(' ')[2]}", (running.job_dir / "token").read_text()
    with connect(address, token) as channel, pytest.raises(grpc.RpcError) as refused:
        pb_grpc.MasterStub(channel).RequestLease(pb.LeaseRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.timeout(240)
def test_a_job_by_tls_survives_the_loss_of_each_role_and_is_exact(tmp_path: Path, digits: Path) -> None:
    job = replace(NUMPY_DIGITS, pace_s=0.003)
    running = job.local_job(tmp_path / "job", digits, tls="true", checkpoint_steps=50).start()
    running.wait_for_version(5)
    assert_a_stranger_with_the_token_gets_nothing(running)
    run_life(running, [Kill(Role.WORKER, 20), Kill(Role.MASTER, 40), Kill(Role.PS, 120)])
    assert running.wait(180) == 0, running.story()
    assert_exact(running, job)
    for name in ("tls.key", "tls.crt", "ca.crt", "token"):
        assert (running.job_dir / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.full
@pytest.mark.timeout(240)
def test_an_all_reduce_job_by_tls_is_exact(tmp_path: Path, digits: Path) -> None:
    flags = {"distribution_strategy": "AllReduceStrategy", "tls": "true"}
    job = replace(NUMPY_DIGITS, num_workers=3, num_ps_pods=0)
    running = job.local_job(tmp_path / "job", digits, **flags).start()
    running.wait_for_version(10)
    run_life(running, [Kill(Role.WORKER, 20), Kill(Role.MASTER, 40)])
    assert running.wait(180) == 0, running.story()
    assert_exact(running, job)
