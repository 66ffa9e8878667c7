"""Checkpoints of parameter servers at work: training continues from them, on any number of servers, exactly once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from elasticdl.ps.client import PsUnavailable, Pull
from elasticdl.ps.part_file import PartFile
from elasticdl.ps.partition import even_buckets
from elasticdl.ps.server.restoring import restore, restore_other
from elasticdl.ps.server.service import JobBounds
from elasticdl.ps.server.state import ServerState
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl_client.errors import JobError
from tests.ps.parts import commit
from tests.ps.scenes import (
    ADAM,
    NUM_TRAINABLE,
    TABLES,
    TOKEN,
    Cluster,
    assert_same_model,
    config,
    initial_parameters,
    make_push,
    ps_cluster,
    push_all,
)


def save(cluster: Cluster, directory: Path, between: Iterable[int] = ()) -> list[PartFile]:
    """All parts and the manifest, as the master would.

    Args:
        between: minibatches that are pushed, one before each part.
    """
    directory.mkdir()
    files = []
    pushes = iter(between)
    for service in cluster.services:
        push_all(cluster.client, islice(pushes, 1))
        service.job = JobBounds(str(directory.parent))
        request = pb.SaveCheckpointRequest(
            incarnation=service.incarnation, directory=str(directory), num_ps=len(cluster.services)
        )
        reply = service.save_checkpoint(request)
        assert (reply.status, reply.error) == (pb.OK, "")
        files.append(PartFile(reply.file, reply.size_bytes, reply.crc32))
    commit(directory, 4, files)
    return files


def begin_from(cluster: Cluster, directory: Path) -> None:
    """Restore each PS of a cluster, as at its start."""
    for service in cluster.services:
        own = even_buckets(service.ps_id, len(cluster.services))
        restored = restore(
            directory, own, lambda snapshot, it=service: it.state.restore(snapshot, parameters_only=False)
        )
        assert restored.damaged == ()


def begin_with_parameters_of(cluster: Cluster, directory: Path) -> None:
    """The same with another job's checkpoint."""
    for service in cluster.services:
        own = even_buckets(service.ps_id, len(cluster.services))
        restore_other(directory, own, lambda snapshot, it=service: it.state.restore(snapshot, parameters_only=True))


def test_training_continues_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with ps_cluster(2) as one, ps_cluster(2, initialize=False) as other:
        push_all(one.client, [0, 1, 2, 5])
        save(one, tmp_path / "version-4")
        begin_from(other, tmp_path / "version-4")
        assert_same_model(one.client, other.client)
        assert other.client.standing(1, 0, 0) == {0, 1, 2, 5}
        for client in (one.client, other.client):
            push_all(client, [2, 3, 4, 6])  # 2 is a repetition
        assert_same_model(one.client, other.client)
        for service in (*one.services, *other.services):
            assert service.state.applied()[0].num_applies == 7


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2), (2, 4)])
def test_training_continues_with_any_number_of_servers(tmp_path: Path, before: int, after: int) -> None:
    """Each part holds one minibatch more than the one before it; a repeated push counts where it lacked."""
    with ps_cluster(before) as one, ps_cluster(after, initialize=False) as other, ps_cluster(1) as undisturbed:
        push_all(one.client, [0, 1, 4])
        save(one, tmp_path / "version-4", between=range(5, 5 + before))
        begin_from(other, tmp_path / "version-4")
        assert other.client.standing(1, 0, 0) == {0, 1, 4, 5}
        order = [0, 1, 4, *range(5, 5 + before), 2, 3, 20]
        push_all(undisturbed.client, order)
        push_all(other.client, [*order, *order], lease=2)
        assert_same_model(other.client, undisturbed.client)
        for service in other.services:
            applied, _, _ = service.state.applied()
            assert applied.num_applies == len(order)


def test_a_second_change_of_number_is_exact_as_well(tmp_path: Path) -> None:
    with ps_cluster(2) as one, ps_cluster(3, initialize=False) as two, ps_cluster(1, initialize=False) as three:
        push_all(one.client, [0, 1])
        save(one, tmp_path / "version-2", between=[2, 3])
        begin_from(two, tmp_path / "version-2")
        push_all(two.client, [5], lease=2)
        save(two, tmp_path / "version-3")
        begin_from(three, tmp_path / "version-3")
        assert three.client.standing(1, 0, 0) == {0, 1, 2, 5}
        for client in (two.client, three.client):
            push_all(client, [3, 2, 1, 0, 6], lease=3)
        assert_same_model(two.client, three.client)
        assert [s.state.applied()[0].num_applies for s in (*two.services, *three.services)] == [6] * 4


def test_another_jobs_checkpoint_gives_values_and_slots_but_no_ledger(tmp_path: Path) -> None:
    with ps_cluster(1) as one, ps_cluster(1, initialize=False) as other:
        push_all(one.client, range(3))
        save(one, tmp_path / "version-3")
        begin_with_parameters_of(other, tmp_path / "version-3")
        applied, initialized, _ = other.services[0].state.applied()
        assert (list(applied.tasks), applied.num_applies, initialized) == ([], 0, True)
        zeros = initial_parameters()
        zeros.trainable[:] = 0
        other.client.initialize(zeros, TABLES, ADAM, 7)
        assert_same_model(one.client, other.client)
        for client in (one.client, other.client):
            client.exchange(make_push(3), None)
        assert_same_model(one.client, other.client)
        assert other.client.standing(2, 0, 0) == {3}


def lose(path: Path) -> None:
    """Every read through what this process has open of a file fails with EIO, as after its server was replaced."""
    lost = os.open("/proc/self/mem", os.O_RDONLY)  # nothing is mapped at its beginning
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # another thread has closed it
            continue
        if target == str(path):
            os.dup2(lost, int(link.name))
    os.close(lost)


def test_another_jobs_checkpoint_is_opened_again_where_its_volume_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ps_cluster(1) as one, ps_cluster(1, initialize=False) as other:
        push_all(one.client, range(3))
        (file,) = save(one, tmp_path / "version-3")
        begin_with_parameters_of(other, tmp_path / "version-3")
        lose(tmp_path / "version-3" / file.file)
        with pytest.raises(PsUnavailable, match=f"{file.file} cannot be read: Input/output error$"):
            other.client.initialize(initial_parameters(), TABLES, ADAM, 7)
        assert f"{file.file} cannot be read: Input/output error" in caplog.text
        other.client.initialize(initial_parameters(), TABLES, ADAM, 7)
        assert_same_model(one.client, other.client)


def test_another_jobs_checkpoint_that_stays_unreadable_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticdl.ps.server.service.PATIENCE_S", 0.0)
    with ps_cluster(1) as one, ps_cluster(1, initialize=False) as other:
        push_all(one.client, range(3))
        (file,) = save(one, tmp_path / "version-3")
        begin_with_parameters_of(other, tmp_path / "version-3")
        lose(tmp_path / "version-3" / file.file)
        with pytest.raises(JobError, match=f"{file.file} cannot be read: Input/output error"):
            other.client.initialize(initial_parameters(), TABLES, ADAM, 7)


def test_another_jobs_checkpoint_is_trained_on_with_this_jobs_optimizer(tmp_path: Path) -> None:
    with ps_cluster(1) as one, ps_cluster(1, initialize=False) as other:
        save(one, tmp_path / "version-0")
        begin_with_parameters_of(other, tmp_path / "version-0")
        other.client.initialize(initial_parameters(), TABLES, config("SGD", learning_rate=1.0), 7)
        other.client.exchange(make_push(0), None)
        snapshot = other.services[0].state.snapshot()
        assert snapshot is not None
        expected = initial_parameters().trainable - make_push(0).gradient
        np.testing.assert_array_equal(snapshot.trainable, expected)
        assert len(expected) == NUM_TRAINABLE


@pytest.mark.parametrize("before", [ADAM, config("Ftrl", learning_rate=0.5), config("Adagrad", learning_rate=0.1)])
def test_the_first_update_of_ftrl_keeps_another_jobs_weights_and_rows(tmp_path: Path, before: str) -> None:
    with ps_cluster(1, initialize=False) as one, ps_cluster(1, initialize=False) as other:
        one.client.initialize(initial_parameters(), TABLES, before, 7)
        push_all(one.client, range(3))
        save(one, tmp_path / "version-3")
        begin_with_parameters_of(other, tmp_path / "version-3")
        ftrl = config("Ftrl", learning_rate=0.001, initial_accumulator_value=1.0)
        other.client.initialize(initial_parameters(), TABLES, ftrl, 7)
        other.client.exchange(make_push(3), None)
        pull = Pull(dense=True, ids={"deep": one.client.known_ids("deep")}, read_only=True)
        kept, trained = one.client.exchange(None, pull), other.client.exchange(None, pull)
        assert kept.parameters is not None
        assert trained.parameters is not None
        # No step is longer than rate · g / √(a + g²), so shorter than the rate.
        np.testing.assert_allclose(trained.parameters.trainable, kept.parameters.trainable, rtol=0, atol=0.001)
        np.testing.assert_allclose(trained.rows["deep"], kept.rows["deep"], rtol=0, atol=0.001)
        assert not np.array_equal(trained.parameters.trainable, kept.parameters.trainable)


def test_a_directory_that_is_not_there_is_an_error_in_the_reply(tmp_path: Path) -> None:
    with ps_cluster(1) as cluster:
        cluster.services[0].job = JobBounds(str(tmp_path))
        request = pb.SaveCheckpointRequest(incarnation=10, directory=str(tmp_path / "version-1"), num_ps=1)
        reply = cluster.services[0].save_checkpoint(request)
        assert "cannot be written: No such file or directory" in reply.error
        assert cluster.services[0].state.applied()[1]


def test_a_checkpoint_that_has_waited_for_an_earlier_one_is_not_written_for_an_old_master(tmp_path: Path) -> None:
    with ps_cluster(1) as cluster:
        (service,) = cluster.services
        service.job = JobBounds(str(tmp_path))
        service.accept_lease(1 << 32)
        (tmp_path / "version-1").mkdir()

        class EarlierSave:
            """Ends when a new master has come."""

            def acquire(self, timeout: float) -> bool:
                service.accept_lease(2 << 32)
                return True

            def release(self) -> None:
                pass

        service._saving = EarlierSave()  # type: ignore[assignment]
        request = pb.SaveCheckpointRequest(
            generation=1, incarnation=10, directory=str(tmp_path / "version-1"), num_ps=1
        )
        assert service.save_checkpoint(request).status == pb.OLD_GENERATION
        assert list((tmp_path / "version-1").iterdir()) == []


def test_an_empty_ps_has_nothing_to_save(tmp_path: Path) -> None:
    with ps_cluster(1, initialize=False) as cluster:
        cluster.services[0].job = JobBounds(str(tmp_path))
        request = pb.SaveCheckpointRequest(incarnation=10, directory=str(tmp_path / "version-1"), num_ps=1)
        reply = cluster.services[0].save_checkpoint(request)
        assert reply.status == pb.UNINITIALIZED
        assert reply.error
    assert ServerState().snapshot() is None


def refusal(cluster: Cluster, **fields: Any) -> str:
    """Why a PS does not write its part, as the caller is told."""
    request = pb.SaveCheckpointRequest(incarnation=10, **{"num_ps": 1, **fields})
    with connect(cluster.partition.ps[0].address, TOKEN) as channel, pytest.raises(grpc.RpcError) as refused:
        pb_grpc.ParameterServerStub(channel).SaveCheckpoint(request, timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(refused.value.details())


def test_a_part_is_written_to_no_place_but_a_version_of_this_job(tmp_path: Path) -> None:
    ours, others = tmp_path / "checkpoints", tmp_path / "others"
    for directory in (ours / "version-1", ours / "mine", others / "version-1"):
        directory.mkdir(parents=True)
    (ours / "version-2").symlink_to(others / "version-1")
    (tmp_path / "link").symlink_to(ours)
    with ps_cluster(1) as cluster:
        service = cluster.services[0]
        assert "directory is" in refusal(cluster, directory=str(ours / "version-1"))  # the job has none
        service.job = JobBounds(str(ours))
        for wrong in (
            others / "version-1",
            ours / "version-2",
            ours / "version-1" / ".." / ".." / "others" / "version-1",
            ours / "mine",
            ours / "version-1" / "version-1",
            ours,
            "",
            "version-1",
        ):
            assert f"SaveCheckpointRequest.directory is {str(wrong)!r}, no version" in refusal(
                cluster, directory=str(wrong)
            )
        assert refusal(cluster, directory="a\0b")
        service.accept_partition(cluster.partition)
        assert "num_ps is 3" in refusal(cluster, directory=str(ours / "version-1"), num_ps=3)
        good = tmp_path / "link" / "version-1"  # the same place by another name
        written = service.save_checkpoint(pb.SaveCheckpointRequest(incarnation=10, directory=str(good), num_ps=1))
        assert (written.error, (ours / "version-1" / written.file).is_file()) == ("", True)
        (ours / "version-1" / "MANIFEST.json").write_text("{}")
        assert "is complete" in refusal(cluster, directory=str(ours / "version-1"))
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == [written.file]
