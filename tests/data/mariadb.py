"""A MariaDB server of its own for tests: in a short directory, on a Unix socket or also on TCP, gone at the end."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pymysql

from elasticdl.rpc.addresses import free_ports
from tests.data.postgres import short_directory
from tests.lines import line_with

_OF_MYSQL_8 = (  # its default modes, under which a server takes fewer statements than MariaDB does by default
    "ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,"
    "NO_ENGINE_SUBSTITUTION"
)
_SMALL = (
    *("--skip-log-bin", "--skip-innodb-doublewrite", "--innodb-flush-method=nosync"),
    f"--sql-mode={_OF_MYSQL_8}",
    *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M", "--aria-pagecache-buffer-size=8M"),
)


@contextmanager
def server(address: str = "", password: str = "") -> Iterator[str]:
    """The URL of an empty database; MariaDB does not run as root, so then it runs as `mysql`.

    Args:
        address: it listens there, too, for the user `reader`; the port is that of the URL.
        password: of `reader`.
    """
    user = "mysql" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    daemon = shutil.which("mariadbd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert daemon, "there is no mariadbd: install MariaDB (Debian: apt-get install mariadb-server)"
    port = free_ports(address, 1)[0] if address else 0
    listening = (f"--bind-address={address}", f"--port={port}") if address else ("--skip-networking",)
    with short_directory(user) as directory:
        process_user = user if os.geteuid() == 0 else None
        data, socket = f"--datadir={directory}/data", f"{directory}/s"
        how = ("--no-defaults", "--skip-test-db", "--auth-root-authentication-method=normal")
        make = ["mariadb-install-db", *how, data]
        subprocess.run(make, check=True, cwd=directory, user=process_user, stdout=subprocess.DEVNULL)
        process = subprocess.Popen(
            [daemon, "--no-defaults", data, f"--socket={socket}", f"--pid-file={directory}/pid", *_SMALL, *listening],
            cwd=directory, user=process_user, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            line_with(process, "ready for connections")
            url = f"mysql://root@{f'{address}:{port}' if address else ''}/staff?unix_socket={socket}"
            with connect(url.replace("/staff", "/mysql")) as connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE staff")
                if address:
                    cursor.execute("GRANT ALL ON staff.* TO reader@'%%' IDENTIFIED BY %s", [password])
            yield url
        finally:
            process.kill()
            process.communicate()


def connect(url: str) -> Any:
    """A connection to a server that `server` has made, as root."""
    parts = urlsplit(url)
    (socket,) = parse_qs(parts.query)["unix_socket"]
    return pymysql.connect(unix_socket=socket, user="root", database=parts.path[1:], autocommit=True)


def execute(url: str, *statements: str) -> tuple[tuple[Any, ...], ...]:
    """Run statements as another program would; the rows of the last one."""
    with connect(url) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return tuple(cursor.fetchall())
