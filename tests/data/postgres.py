"""A PostgreSQL server of its own for tests: in a short directory, on a Unix socket, gone at the end."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def program(name: str) -> str:
    """The path of one of PostgreSQL's programs; Debian does not put them on PATH."""
    found = shutil.which(name)
    if found:
        return found
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    assert installed, f"there is no {name}: install PostgreSQL (Debian: apt-get install postgresql)"
    return str(installed[-1])


@contextmanager
def short_directory(user: str) -> Iterator[Path]:
    """A directory whose path is short enough for sockets in it, and which belongs to a user if this one is root."""
    directory = Path(tempfile.mkdtemp(prefix="db"))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, user)
            directory.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def server() -> Iterator[str]:
    """The URL of a database; PostgreSQL does not run as root, so then it runs as `postgres`."""
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    with short_directory(user) as directory:

        def run(*command: str) -> None:
            subprocess.run(
                command, check=True, cwd=directory, user=user if os.geteuid() == 0 else None, stdout=subprocess.DEVNULL
            )

        data = directory / "data"
        run(
            *(program("initdb"), "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"),
            *("--username=reader", str(data)),
        )
        options = f"-c listen_addresses= -c unix_socket_directories={directory} -c fsync=off -c max_connections=10"
        run(
            *(program("pg_ctl"), "start", "--wait", f"--pgdata={data}"),
            *(f"--log={directory / 'log'}", f"--options={options}"),
        )
        try:
            yield f"postgresql://reader@/postgres?host={directory}"
        finally:
            run(program("pg_ctl"), "stop", "--wait", "--mode=immediate", f"--pgdata={data}")
