"""`elasticdl dashboard`: options to a socket, an address with a token, and a server that runs until Ctrl-C."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import secrets
import socket
import sys
import webbrowser
from types import FrameType
from typing import TYPE_CHECKING

from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.stores import JobStores

if TYPE_CHECKING:
    import uvicorn

    from elasticdl_client.dashboard.server import Dashboard

TOKEN_VARIABLE = "ELASTICDL_DASHBOARD_TOKEN"
FIRST_PORT = 8265
_NUM_PORTS = 20
_MIN_TOKEN = 32  # characters: 128 bits of hex
_GRACE_S = 1  # for what is still answered


def run(options: Options, places: JobStores) -> int:
    """Serve until Ctrl-C; return the exit code.

    Raises:
        FlagError: the address or the token is of no use.
        JobError: a package is missing, the port is taken, or the job is not there.
    """
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise JobError(
                f"The dashboard needs the package {package}, which is not installed here.",
                "pip install 'elasticdl2-client[dashboard]', or pip install starlette uvicorn",
            )
    from elasticdl_client.dashboard.access import Keys, hosts_of
    from elasticdl_client.dashboard.observer import Observer, id_of
    from elasticdl_client.dashboard.server import Dashboard

    only = id_of(places.find(options.jobs[0])) if options.jobs else ""
    token = _token()
    listening = _listen(options.listen, options.port)
    host, port = listening.getsockname()[:2]
    is_public = not ipaddress.ip_address(host).is_loopback
    keys = Keys(token, hosts_of(options.hosts), port, is_public)
    observer = Observer(places, only, offers_actions=not options.read_only)
    server = _server(Dashboard(observer, options, keys))
    shown = f"[{host}]" if ":" in host else host
    secret = "" if TOKEN_VARIABLE in os.environ else f"?token={token}"  # one that was given is not printed
    address = f"http://{shown}:{port}/{secret}{f'#/job/{only}' if only else ''}"
    print(f"Dashboard of jobs {places.where}: {address}", flush=True)
    print("Ctrl-C ends it." + ("" if secret else f" Its token is that of {TOKEN_VARIABLE}."), flush=True)
    if options.browser and not is_public and secret and _has_display():
        webbrowser.open(address)
    with listening:
        server.run(sockets=[listening])
    return 0


def _server(dashboard: Dashboard) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Ends the streams first, whose end it would wait for."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            dashboard.leave()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        dashboard.application(),
        http="h11", ws="none", loop="asyncio", log_level="warning", access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=_GRACE_S,
    )  # fmt: skip
    return Server(config)


def _token() -> str:
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_hex(32)
    if len(given.strip()) < _MIN_TOKEN:
        raise FlagError(
            f"The token in {TOKEN_VARIABLE} has fewer than {_MIN_TOKEN} characters.", "Make one: openssl rand -hex 32"
        )
    return given.strip()


def _listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Args:
        port: 0: the first free one.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        raise FlagError(f"--listen={address} is not an IP address.", "For example 127.0.0.1, or 0.0.0.0.") from None
    problem = OSError()
    for one in [port] if port else range(FIRST_PORT, FIRST_PORT + _NUM_PORTS):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, one))
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            problem = error
    raise JobError(f"The dashboard cannot listen on {address}: {problem.strerror}.", "Give another --port or --listen.")


def _has_display() -> bool:
    """Return whether the user at the terminal would see a browser window that is opened here."""
    return sys.stdout.isatty() and (sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)))
