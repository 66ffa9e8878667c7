"""Checkpoint parts: what is written comes back, what is damaged is noticed, what cannot be written is said."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.ps.checkpoint import PartFile, read_part, restore_part
from elasticdl.ps.state import PsState
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import CheckpointError
from tests.ps.scenes import (
    ADAM,
    NUM_TRAINABLE,
    TABLES,
    Cluster,
    assert_same_model,
    config,
    initial_parameters,
    make_push,
    ps_cluster,
    push_all,
)


def save(cluster: Cluster, directory: Path) -> list[PartFile]:
    """All parts and the manifest, as the master would."""
    directory.mkdir()
    files = []
    for service in cluster.services:
        request = pb.SaveCheckpointRequest(
            incarnation=service.incarnation, directory=str(directory), num_ps=len(cluster.services)
        )
        reply = service.save_checkpoint(request)
        assert (reply.status, reply.error) == (pb.OK, "")
        files.append(PartFile(reply.file, reply.size_bytes, reply.crc32))
    parts = [
        asdict(file) | {"index_crc32c": file.crc32, "ps_id": ps_id, "incarnation": 10 + ps_id}
        for ps_id, file in enumerate(files)
    ]
    (directory / "MANIFEST.json").write_text(json.dumps({"num_ps": len(parts), "parts": parts}))
    return files


@pytest.mark.ci
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with ps_cluster(2) as one, ps_cluster(2, initialize=False) as other:
        push_all(one.client, [0, 1, 2, 5])
        save(one, tmp_path / "version-4")
        for service in other.services:
            service.state.restore(restore_part(tmp_path / "version-4", service.ps_id, 2), parameters_only=False)
        assert_same_model(one.client, other.client)
        assert other.client.standing(1, 0, 0) == {0, 1, 2, 5}
        for client in (one.client, other.client):
            push_all(client, [2, 3, 4, 6])  # 2 is a repetition
        assert_same_model(one.client, other.client)
        for service in (*one.services, *other.services):
            assert service.state.applied()[0].num_applies == 7


@pytest.mark.ci
def test_another_jobs_checkpoint_gives_values_and_slots_but_no_ledger(tmp_path: Path) -> None:
    with ps_cluster(1) as one, ps_cluster(1, initialize=False) as other:
        push_all(one.client, range(3))
        save(one, tmp_path / "version-3")
        state = other.services[0].state
        state.restore(restore_part(tmp_path / "version-3", 0, 1), parameters_only=True)
        applied, initialized, _ = state.applied()
        assert (list(applied.tasks), applied.num_applies, initialized) == ([], 0, True)
        zeros = initial_parameters()
        zeros.trainable[:] = 0
        other.client.initialize(zeros, TABLES, ADAM, 7)
        assert_same_model(one.client, other.client)
        for client in (one.client, other.client):
            client.exchange(make_push(3), None)
        assert_same_model(one.client, other.client)
        assert other.client.standing(2, 0, 0) == {3}


@pytest.mark.ci
def test_another_jobs_checkpoint_is_trained_on_with_this_jobs_optimizer(tmp_path: Path) -> None:
    with ps_cluster(1) as one, ps_cluster(1, initialize=False) as other:
        save(one, tmp_path / "version-0")
        other.services[0].state.restore(restore_part(tmp_path / "version-0", 0, 1), parameters_only=True)
        other.client.initialize(initial_parameters(), TABLES, config("SGD", learning_rate=1.0), 7)
        other.client.exchange(make_push(0), None)
        snapshot = other.services[0].state.snapshot()
        assert snapshot is not None
        expected = initial_parameters().trainable - make_push(0).gradient
        np.testing.assert_array_equal(snapshot[0].dense.values, expected)
        assert len(expected) == NUM_TRAINABLE


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PartFile]:
    directory = tmp_path_factory.mktemp("checkpoints") / "version-5"
    with ps_cluster(1) as cluster:
        push_all(cluster.client, [0, 1, 4, 7])
        return directory, save(cluster, directory)[0]


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damaged_byte_is_noticed(written: tuple[Path, PartFile], data: st.DataObject) -> None:
    directory, file = written
    whole = (directory / file.file).read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[position] ^= data.draw(st.integers(1, 255))
    path = directory / "damaged.ckpt"
    path.write_bytes(bytes(damaged))
    for expected in (None, PartFile(path.name, file.size_bytes, file.crc32)):
        with pytest.raises(CheckpointError, match=r"damaged\.ckpt"):
            read_part(path, expected)


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_truncated_part_is_noticed(written: tuple[Path, PartFile], data: st.DataObject) -> None:
    directory, file = written
    path = directory / "truncated.ckpt"
    path.write_bytes((directory / file.file).read_bytes()[: data.draw(st.integers(0, file.size_bytes - 1))])
    for expected in (None, PartFile(path.name, file.size_bytes, file.crc32)):
        with pytest.raises(CheckpointError, match=r"truncated\.ckpt is damaged"):
            read_part(path, expected)


@pytest.mark.ci
def test_a_checkpoint_that_is_not_whole_is_refused(written: tuple[Path, PartFile], tmp_path: Path) -> None:
    directory, file = written
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json cannot be read"):
        restore_part(tmp_path, 0, 1)
    (tmp_path / "MANIFEST.json").write_text((directory / "MANIFEST.json").read_text())
    with pytest.raises(CheckpointError, match=rf"{file.file} cannot be read: No such file"):
        restore_part(tmp_path, 0, 1)
    with pytest.raises(CheckpointError, match="written by 1 parameter servers, this job has 3"):
        restore_part(directory, 0, 3)


@pytest.mark.ci
def test_a_directory_that_is_not_there_is_an_error_in_the_reply(tmp_path: Path) -> None:
    with ps_cluster(1) as cluster:
        request = pb.SaveCheckpointRequest(incarnation=10, directory=str(tmp_path / "gone"), num_ps=1)
        reply = cluster.services[0].save_checkpoint(request)
        assert "cannot be written: No such file or directory" in reply.error
        assert cluster.services[0].state.applied()[1]


@pytest.mark.ci
def test_a_full_disk_is_an_error_in_the_reply_and_leaves_no_part(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(tmp_path)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with ps_cluster(1) as cluster:
            push_all(cluster.client, range(20))
            request = pb.SaveCheckpointRequest(incarnation=10, directory=str(tmp_path), num_ps=1)
            reply = cluster.services[0].save_checkpoint(request)
            assert "cannot be written: No space left on device" in reply.error
            assert os.listdir(tmp_path) == []
            push_all(cluster.client, [20])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.ci
def test_an_empty_ps_has_nothing_to_save(tmp_path: Path) -> None:
    with ps_cluster(1, initialize=False) as cluster:
        request = pb.SaveCheckpointRequest(incarnation=10, directory=str(tmp_path), num_ps=1)
        reply = cluster.services[0].save_checkpoint(request)
        assert reply.status == pb.UNINITIALIZED
        assert reply.error
    assert PsState().snapshot() is None
