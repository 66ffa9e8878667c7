"""`python -m elasticdl.storage.tensorboard_copy URL ARGUMENT…`: TensorBoard over event files in storage.

TensorBoard itself reads only file systems that its own packages know.  So the files are copied to a directory of this
machine, and new bytes are added while TensorBoard, a child of this process, shows them.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from elasticdl.storage.paths import RemotePath, place_below
from elasticdl.storage.remote_file import RemoteFile
from elasticdl_client.errors import StorageError

_REFRESH_S = 15.0

_log = logging.getLogger("elasticdl.storage")


def refresh(source: RemotePath, target: Path) -> int:
    """Update a copy of event files, which only grow.

    Returns:
        The number of files.

    Raises:
        StorageError: the storage cannot be read, or a name leads out of the copy.
    """
    names = [name for name in source.files() if "tfevents" in name]
    for name in names:
        copy = place_below(target, name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        file = RemoteFile((source / name).url)
        known = copy.stat().st_size if copy.exists() else 0
        if file.size_bytes > known:
            with copy.open("ab") as appended:
                appended.write(file.pread(file.size_bytes - known, known))
    return len(names)


def main() -> int:
    """Show the files until TensorBoard ends or a signal comes; return TensorBoard's exit code."""
    url, *arguments = sys.argv[1:]
    logging.basicConfig(format="%(levelname)s: %(message)s")
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="elasticdl-tensorboard-") as directory:
        source, target = RemotePath(url.rstrip("/")), Path(directory)
        try:
            if not refresh(source, target):
                _log.warning("There are no event files in %s yet.", url)
        except StorageError as error:
            sys.exit(f"error: {error}")
        child = subprocess.Popen([sys.executable, "-P", "-m", "tensorboard.main", f"--logdir={directory}", *arguments])
        try:
            return _show(child, source, target)
        finally:
            child.terminate()
            child.wait()


def _show(child: subprocess.Popen[bytes], source: RemotePath, target: Path) -> int:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            return child.wait(_REFRESH_S)
        try:
            refresh(source, target)
        except StorageError as error:
            _log.warning("%s", error.what)


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
