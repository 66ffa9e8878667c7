"""Damaged manifests of checkpoints: the same checkpoint, or an error, never another one."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest

from elasticdl.frameworks.framework import ModelReport, Variable
from elasticdl.master import checkpoints
from elasticdl.ps.partition import ALL_BUCKETS
from elasticdl.ps.server.restoring import restore
from elasticdl.storage import versions
from elasticdl.worker.checkpoint import CheckpointKind, StateCheckpoints
from elasticdl.worker.inference.worker import check_layout
from elasticdl.worker.ledger import Ledger
from elasticdl_client.errors import CheckpointError
from elasticdl_client.trained_model import look_at
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds
from tests.ps.parts import even_parts, write_checkpoint

_INDEX = b"{}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two parts."""
    found = versions.begin(tmp_path, 70)
    parts = []
    for ps_id in range(2):
        content = _INDEX + struct.pack("<QII8s", len(_INDEX), zlib.crc32(_INDEX), 2, b"ELDLPS02")
        (found / f"ps-{ps_id}").write_bytes(content)
        parts.append(checkpoints.PsPart(ps_id, f"ps-{ps_id}", len(content), zlib.crc32(_INDEX), 1, ((0, 512),)))
    variable = {"name": "w/kernel", "shape": [3, 4], "trainable": True}
    checkpoints.commit(found, checkpoints.Manifest("job", "f" * 64, 70, 5, 2, tuple(parts), (variable,)))
    return found


def test_a_damaged_manifest_is_an_error_and_never_another_checkpoint(directory: Path) -> None:
    good = checkpoints.read(directory)
    path = directory / checkpoints.MANIFEST
    content = path.read_bytes()
    refused = 0
    for seed in range(rounds(4000)):
        path.write_bytes(damage(content, Random(seed)))
        try:
            found = checkpoints.read(directory)
        except CheckpointError:
            refused += 1
        else:
            assert found == good, f"seed {seed}"  # of white space
    assert refused


def test_a_manifest_without_a_checksum_is_read(directory: Path) -> None:
    good = checkpoints.read(directory)
    path = directory / checkpoints.MANIFEST
    values = json.loads(path.read_bytes())
    del values["crc32"]
    path.write_text(json.dumps(values))
    assert checkpoints.read(directory) == good


def change(directory: Path, old: str, new: str) -> None:
    """Changes a manifest as a flipped bit does."""
    path = directory / checkpoints.MANIFEST
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))


def test_a_server_takes_the_next_older_checkpoint_where_one_digit_of_a_manifest_is_another(tmp_path: Path) -> None:
    older, newer = (write_checkpoint(tmp_path, version, even_parts(1)) for version in (3, 4))
    change(newer, '"model_version": 4', '"model_version": 5')
    restored = restore(newer, ALL_BUCKETS, lambda snapshot: snapshot.close())
    assert restored.directory == older
    assert "its checksum is wrong" in restored.damaged[0]
    change(older, '"num_ps": 1', '"num_ps": 3')
    with pytest.raises(versions.NoneIsWhole):
        restore(newer, ALL_BUCKETS, lambda snapshot: snapshot.close())


def test_a_worker_takes_the_next_older_checkpoint_where_one_digit_of_a_manifest_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = StateCheckpoints(str(tmp_path), CheckpointKind("job", "Local", "model.npz", {}))
    for version in (3, 5):
        kept.save(version, {"w": np.arange(3)}, Ledger(steps=version))
    change(tmp_path / "version-5", '"num_records": 0', '"num_records": 1')
    found = kept.newest()
    assert found is not None
    assert (found.directory.name, found.ledger.steps) == ("version-3", 3)
    assert "its checksum is wrong" in caplog.text
    assert kept.initial(str(tmp_path)).directory.name == "version-3"
    assert look_at(tmp_path).path.name == "version-3"


def test_the_manifest_of_a_state_is_read_without_a_checksum_and_an_error_where_it_is_another(tmp_path: Path) -> None:
    kept = StateCheckpoints(str(tmp_path), CheckpointKind("job", "Local", "model.npz", {}))
    kept.save(3, {"w": np.arange(3)}, Ledger(steps=3))
    path = tmp_path / "version-3" / checkpoints.MANIFEST
    values = json.loads(path.read_bytes())
    del values["manifest_crc32"]
    path.write_text(json.dumps(values))
    assert kept.newest() is not None
    damages = [("size_bytes", "x"), ("strategy", None), ("applied_extras", [[1]])]
    for name, wrong in [*damages, *(("applied_runs", runs) for runs in (7, [[1]], [[0, 0, 1 << 40, 1, 1]]))]:
        path.write_text(json.dumps(values | {name: wrong}))
        with pytest.raises(versions.NoneIsWhole, match="can be restored"):  # it must not begin anew
            kept.newest()
    path.write_text("[" * 100_000)
    with pytest.raises(versions.NoneIsWhole):
        kept.newest()
    with pytest.raises(CheckpointError):
        look_at(tmp_path)


def test_a_client_and_a_worker_refuse_a_manifest_of_servers_with_another_digit(directory: Path) -> None:
    report = ModelReport((Variable("w/kernel", (3, 4), True),), (), "", ())
    assert look_at(directory).version == 70
    check_layout(str(directory), report)
    change(directory, '"seed": 5', '"seed": 6')
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        look_at(directory)
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        check_layout(str(directory), report)
