"""Damaged manifests of checkpoints: the same checkpoint, or an error, never another one."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from random import Random

import pytest

from elasticdl.master import checkpoints
from elasticdl_client.errors import CheckpointError
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds

pytestmark = pytest.mark.ci

_INDEX = b"{}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two parts."""
    found = checkpoints.begin(tmp_path, 70)
    parts = []
    for ps_id in range(2):
        content = _INDEX + struct.pack("<QII8s", len(_INDEX), zlib.crc32(_INDEX), 2, b"ELDLPS02")
        (found / f"ps-{ps_id}").write_bytes(content)
        parts.append(checkpoints.Part(ps_id, f"ps-{ps_id}", len(content), zlib.crc32(_INDEX), 1, ((0, 512),)))
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
