"""The agent, the kubelet of this machine: serves the port `Cluster` over a Unix socket to the client and the master.

Run it as ``python -m elasticdl.cluster.local.agent --job_dir DIR --slots N``; it prints ``{"socket": PATH}`` when it
serves.  At the end of its standard input (the client is gone), or at SIGTERM and SIGINT, it kills all pods and ends.
`kubelet` decides about pods; the agent decides nothing.  It must have a single thread (see `process_group`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import selectors
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from elasticdl.cluster.cluster import EventType, PodEvent
from elasticdl.cluster.local.adapter import MAX_LINE_BYTES, Message, decode, encode, spec_from_message
from elasticdl.cluster.local.kubelet import Kubelet
from elasticdl.cluster.local.process_group import adopt_orphans
from elasticdl_client.errors import ElasticDLError

_LOG = logging.getLogger("elasticdl.agent")
_MAX_SOCKET_PATH_BYTES = 100  # the system's limit is 107
_PIPE_READ_BYTES = 4096


class Agent:
    """Serves the connections to a kubelet.

    Args:
        loop: The event loop; it must run in the thread that forks.
        logs: An existing directory for the logs of pods.
        slots: How many PS and worker pods may run at once; None: unlimited.
        log_fd: The agent's own log.
        standby_timeout_s: A pod forked from the standby without progress for this long is started plainly instead.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, logs: Path, slots: int | None, log_fd: int, standby_timeout_s: float
    ) -> None:
        self.kubelet = Kubelet(loop, logs, slots, log_fd, self._publish, standby_timeout_s)
        self._watchers: set[asyncio.StreamWriter] = set()

    async def serve(self, path: str) -> None:
        """Start to listen."""
        await asyncio.start_unix_server(self._connected, path, limit=MAX_LINE_BYTES)

    async def end(self) -> None:
        """Kill all pods, then close all connections."""
        self.kubelet.end()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                if b'"watch"' in line and decode(line).get("verb") == "watch":
                    await self._watch(reader, writer)
                    return
                writer.write(encode(await self._answer(line)))
                await writer.drain()
        except (ConnectionError, ValueError) as error:  # ValueError: a line beyond the limit
            _LOG.info("a connection has ended: %s", error)
        except asyncio.CancelledError:
            return  # the agent is ending
        finally:
            writer.close()

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for pod in self.kubelet.list():
            writer.write(encode(asdict(PodEvent(EventType.ADDED, pod))))
        self._watchers.add(writer)
        try:
            await reader.read()  # until the watcher closes the connection
        finally:
            self._watchers.discard(writer)

    def _publish(self, event: PodEvent) -> None:
        line = encode(asdict(event))
        for writer in list(self._watchers):
            if writer.transport.get_write_buffer_size() > MAX_LINE_BYTES:
                _LOG.warning("a watcher that does not read is dropped")
                self._watchers.discard(writer)
                writer.transport.abort()
            else:
                writer.write(line)

    async def _answer(self, line: bytes) -> Message:
        try:
            return {"ok": await self._execute(decode(line))}
        except ElasticDLError as error:
            return {"error": {"what": error.what, "hint": error.hint}}
        except (KeyError, TypeError, ValueError) as error:
            _LOG.warning("malformed request: %r", error)
            what = f"The agent does not understand a request: {error!r}."
            return {"error": {"what": what, "hint": "Client and agent must be of the same version."}}

    async def _execute(self, request: Message) -> object:
        match request["verb"]:
            case "create":
                return asdict(self.kubelet.create(spec_from_message(request["spec"])))
            case "delete":
                self.kubelet.delete(request["name"], request["grace_s"])
                return None
            case "list":
                return [asdict(pod) for pod in self.kubelet.list()]
            case "log_path":
                return str(self.kubelet.log_path(request["name"]))
            case "set_slots":
                self.kubelet.set_slots(request["slots"])
                return None
            case "wait_for_standby":
                await self.kubelet.standby_ready()
                return None
            case verb:
                raise ValueError(f"no verb {verb!r}")


def _socket_directory() -> str:
    directory = tempfile.mkdtemp(prefix="elasticdl-")  # mode 0700
    if len(os.fsencode(directory)) < _MAX_SOCKET_PATH_BYTES - len("/agent.sock"):
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="elasticdl-", dir="/tmp")


def _log_to(path: Path) -> int:
    file = path.open("a")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    return file.fileno()


def run(job_dir: Path, slots: int | None, standby_timeout_s: float) -> None:
    """Serve until the client is gone, or a signal comes; afterwards no process of the job is left."""
    logs = job_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log_fd = _log_to(logs / "agent.log")
    adopt_orphans()
    directory = _socket_directory()
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())  # poll takes any kind of file for stdin
    agent = Agent(loop, logs, slots, log_fd, standby_timeout_s)
    over = asyncio.Event()
    try:
        loop.add_signal_handler(signal.SIGCHLD, agent.kubelet.reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        path = os.path.join(directory, "agent.sock")
        loop.run_until_complete(agent.serve(path))
        loop.add_reader(0, _read_client, loop, over)
        sys.stdout.write(json.dumps({"socket": path}) + "\n")
        sys.stdout.flush()
        loop.run_until_complete(over.wait())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        loop.run_until_complete(agent.end())
        loop.close()


def _read_client(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    if not os.read(0, _PIPE_READ_BYTES):
        _LOG.info("the client is gone")
        loop.remove_reader(0)
        over.set()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.cluster.local.agent", description=__doc__.split("\n")[0])
    parser.add_argument("--job_dir", type=Path, required=True, help="logs of the pods go to its directory logs")
    parser.add_argument("--slots", type=int, default=0, help="PS and worker pods that may run at once; 0: any number")
    parser.add_argument(
        "--standby_timeout_s",
        type=float,
        default=10.0,
        help="after it a forked pod without progress is started plainly",
    )
    arguments = parser.parse_args()
    if arguments.slots < 0:
        parser.error("--slots must not be negative")
    run(arguments.job_dir.resolve(), arguments.slots or None, arguments.standby_timeout_s)


if __name__ == "__main__":
    main()
