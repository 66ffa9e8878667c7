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

import psycopg
from psycopg import sql

from elasticdl.rpc.addresses import free_ports


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
def server(address: str = "", password: str = "") -> Iterator[str]:
    """The URL of a database; PostgreSQL does not run as root, so then it runs as `postgres`.

    Args:
        address: of this machine, that it listens on as well; the URL is that of its socket.
        password: of its user there.
    """
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
        with open(data / "pg_hba.conf", "a") as rules:
            rules.write("host all all all scram-sha-256\n")
        port = free_ports(address, 1)[0] if address else 5432
        settings = {
            "listen_addresses": address,
            "port": port,
            "unix_socket_directories": directory,
            "fsync": "off",
            "max_connections": 40 if address else 10,
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        run(
            *(program("pg_ctl"), "start", "--wait", f"--pgdata={data}"),
            *(f"--log={directory / 'log'}", f"--options={options}"),
        )
        try:
            url = f"postgresql://reader@/postgres?host={directory}&port={port}"
            if password:
                with psycopg.connect(url) as connection:
                    connection.execute(sql.SQL("ALTER ROLE reader PASSWORD {}").format(password))
            yield url if address else f"postgresql://reader@/postgres?host={directory}"
        finally:
            run(program("pg_ctl"), "stop", "--wait", "--mode=immediate", f"--pgdata={data}")
