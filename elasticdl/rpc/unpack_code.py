"""`python -m elasticdl.rpc.unpack_code DIGEST COMMAND…`: unpacks the code of --code, then becomes a pod's command.

The archive lies in files, the parts of the job's ConfigMaps.  What is not what was submitted is not run.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

from elasticdl_client.kubernetes import names


def unpack(source: Path, target: Path, digest: str) -> str:
    """Unpack an archive; return what is wrong with it, or nothing.

    Args:
        source: the directory of its parts.
        target: where its files go.
        digest: SHA-256 of the archive as it was submitted, in hexadecimal digits.
    """
    data = b"".join(part.read_bytes() for part in sorted(source.glob("[0-9]*")))
    if not data:
        return "the ConfigMaps with the code of the job are gone"
    if hashlib.sha256(data).hexdigest() != digest:
        return "the code in the ConfigMaps of the job is not the code that was submitted"
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:  # its `filter` is newer than Python 3.11.0
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            path = target / member.name
            if content is None or member.name.startswith("/") or ".." in path.parts:
                return f"{member.name} is not a file below the directory"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
            path.chmod(member.mode)
    return ""


def main() -> None:
    digest, *command = sys.argv[1:]
    if wrong := unpack(Path(names.CODE_DIRECTORY), Path(names.ZOO_DIRECTORY), digest):
        sys.exit(f"--code: {wrong}. Submit the job again.")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
