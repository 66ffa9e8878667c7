"""The manifest that makes a directory a checkpoint: written with a checksum of its contents, and read by all alike.

There are two: of parameter servers, with ``parts``, and of a model in a worker.  The modules that write and
use them define their other keys.  In every format, ``parts``, the checksum and ``format`` are what they are here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from elasticdl_client.errors import CheckpointError
from elasticdl_client.storage_kinds import AnyPath

MANIFEST = "MANIFEST.json"
SERVERS_FORMAT = 2
STATE_FORMAT = 1  # also of those without a number, of earlier versions
_HINT = "take another checkpoint, or train again from the beginning"


class NewerFormat(CheckpointError):
    """A later version wrote the checkpoint: it is not damaged, is not removed, and no older one takes its place."""


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same contents and their checksum."""
    return {**values, _key_of(values): _checksum(values)}


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """Return the contents of a manifest, without their checksum, which earlier versions did not write.

    Raises:
        OSError: it cannot be read.
        NewerFormat: this version cannot read the checkpoint.
        CheckpointError: it is damaged.
    """
    content = path.read_bytes()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", _HINT) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object", _HINT)
    checksum = values.pop(_key_of(values), None)
    if checksum not in (None, _checksum(values)):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong", _HINT)
    newest, found = SERVERS_FORMAT if "parts" in values else STATE_FORMAT, values.get("format")
    if isinstance(found, int) and found > newest:
        raise NewerFormat(
            f"{path} has format {found}; this version reads {newest}",
            "continue with the version of ElasticDL that wrote it, or a later one; to begin anew, name another "
            "--checkpoint_dir",
        )
    return values


def _key_of(values: Mapping[str, Any]) -> str:
    """Return the key of the checksum: without parts, ``crc32`` is that of the state beside the manifest."""
    return "crc32" if "parts" in values else "manifest_crc32"


def _checksum(values: Mapping[str, Any]) -> int:
    """Return the checksum of the contents, which does not depend on their formatting."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
