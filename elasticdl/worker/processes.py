"""``python -m elasticdl.worker.processes N GPUS MODULE ARGUMENT …``: a worker pod of N processes that run a module.

The main process forks them, forwards their output, and ends them together.  Each process has its own id (WORKER_ID and
the following numbers), sees its share of the pod's GPUs, and is a worker of the master like any other.  The cluster
sees and replaces the pod as a whole: SIGTERM goes to all processes, and when one fails, the others are killed and the
pod ends with its exit code.  Each line that they print begins with `[process P]`.  The main process trains nothing and
does not communicate with the master.
"""

from __future__ import annotations

import logging
import os
import runpy
import selectors
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from elasticdl.cluster.local.gpus import VARIABLE, Gpus
from elasticdl.cluster.local.process_group import die_with_parent
from elasticdl.cluster.local.process_title import name_process
from elasticdl.cluster.local.standby import READY_VARIABLE
from elasticdl.rpc.logs import log_to_stdout
from elasticdl.rpc.signals import signal_pipe
from elasticdl_client.choices import LOG_FORMAT_VARIABLE, NUM_PROCESSES_VARIABLE, PROCESS_VARIABLE, LogFormat
from elasticdl_client.errors import ElasticDLError

_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_TERMINATED = 128 + signal.SIGTERM
_FROM_OUTSIDE = (_TERMINATED, 128 + signal.SIGKILL)
_KEPT_LINES = 60  # of each process, repeated at the end of the pod's log, which is searched for the cause
_MAX_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_LAST_READS = 16  # of an ended process's pipe, which holds at most 1 MiB; an orphan may print more
_JSON_ENTRY = b'{"time": "'  # a JSON entry names its process itself

_log = logging.getLogger("elasticdl.worker")


def environments(environment: Mapping[str, str], number: int, num_gpus: int) -> list[dict[str, str]]:
    """Return the variables that each process adds to the environment of the pod.

    Args:
        environment: The environment of the pod, with the id of the first process.
        number: Number of processes.
        num_gpus: Number of GPUs that the pod asks for; on the local runtime it may see more.

    Raises:
        ElasticDLError: the GPUs cannot be divided evenly, or are fewer than the pod asks for.
    """
    first, gpus = int(environment["WORKER_ID"]), Gpus.of(environment)
    if not gpus.shares(1)[0] and VARIABLE not in environment:  # GPUs of another vendor
        gpus = Gpus(map(str, range(num_gpus)))
    seen = gpus.shares(1)[0]
    if len(seen) < num_gpus:
        if VARIABLE in environment:
            hint = f"Leave {VARIABLE} out of --envs and of the image: each process is given its own."
        else:  # a device plugin that time-slices GPUs counts their users
            hint = "A worker of several processes needs GPUs of its own: ask for gpu=1 where workers share them."
        names = f": {', '.join(seen)}" if seen else ""
        raise ElasticDLError(f"The pod asks for {num_gpus} GPUs and sees {len(seen)}{names}.", hint)
    return [
        {"WORKER_ID": str(first + process), PROCESS_VARIABLE: str(process), NUM_PROCESSES_VARIABLE: str(number)}
        | ({VARIABLE: ",".join(names)} if names else {})
        for process, names in enumerate(gpus.shares(number))
    ]


@dataclass(slots=True)
class _WorkerProcess:
    """A process of the pod.

    Attributes:
        output: The read end of the pipe that it prints to.
        exit_code: 128 + signal number after a signal; None while it runs.
        line: The start of a line that it has not ended yet.
        last_lines: The last lines that it has printed.
    """

    number: int
    pid: int
    output: int
    exit_code: int | None = None
    line: bytes = b""
    last_lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


def fork(added: Sequence[Mapping[str, str]]) -> list[_WorkerProcess] | None:
    """Fork the processes; return them in the parent, and None in each process.

    The caller must block signals until the main process has handlers; each process unblocks them.
    """
    parent, processes = os.getpid(), []
    for number, variables in enumerate(added):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become(parent, writer, variables)
            return None
        os.close(writer)
        os.set_blocking(reader, False)
        processes.append(_WorkerProcess(number, pid, reader))
    return processes


def _become(parent: int, output: int, variables: Mapping[str, str]) -> None:
    """Set a forked child up like the process of a pod with one process, just before its module runs."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(variables)
    if variables[PROCESS_VARIABLE] != "0":
        os.environ.pop(READY_VARIABLE, None)  # the agent reads one message per pod
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # otherwise every process would draw the same numbers


class Supervisor:
    """Watches the processes until all have ended.

    Args:
        processes: The processes, just forked.
        signals: The read end of a pipe with the numbers of signals.
        passes_json: Whether log entries are JSON objects, which name their process themselves.
    """

    def __init__(self, processes: Sequence[_WorkerProcess], signals: int, passes_json: bool) -> None:
        self._processes = processes
        self._signals = signals
        self._passes_json = passes_json
        self._is_terminating = False
        self._failed: _WorkerProcess | None = None

    def run(self) -> int:
        """Return the exit code of the pod: that of the first failed process, or 0."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            for process in self._processes:
                selector.register(process.output, selectors.EVENT_READ, process)
            while any(process.exit_code is None for process in self._processes):
                for key, _ in selector.select():
                    if key.data is None:
                        self._on_signals()
                    elif not self._forward(key.data):
                        selector.unregister(key.fd)
        for process in self._processes:
            for _ in range(_LAST_READS):
                self._forward(process)
            self._end_line(process, b"\n")
        failed = self._failed
        if failed is None or failed.exit_code is None:
            return 0
        self._explain(failed, failed.exit_code)
        return failed.exit_code

    def _on_signals(self) -> None:
        received = os.read(self._signals, _READ_BYTES)
        if signal.SIGTERM in received:
            self._is_terminating = True
            self._signal_all(signal.SIGTERM)
        with suppress(ChildProcessError):  # no children left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._on_end(*ended)

    def _on_end(self, pid: int, status: int) -> None:
        process = next((one for one in self._processes if one.pid == pid), None)
        if process is None:  # an orphan of a process
            return
        code = os.waitstatus_to_exitcode(status)
        process.exit_code = code if code >= 0 else 128 - code
        if not process.exit_code or self._failed is not None:
            return
        self._failed = process
        if not self._is_terminating:  # the other processes cannot continue without it
            self._signal_all(signal.SIGTERM if process.exit_code == _TERMINATED else signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.exit_code is None:
                os.kill(process.pid, number)

    def _forward(self, process: _WorkerProcess) -> bool:
        """Forward a piece of a process's output, so that none blocks the others; False at its end."""
        with suppress(BlockingIOError):
            data = os.read(process.output, _READ_BYTES)
            self._split(process, data)
            return bool(data)
        return True

    def _split(self, process: _WorkerProcess, data: bytes) -> None:
        """Split output into lines; a carriage return ends a line, too, since progress bars overwrite themselves."""
        for part in data.splitlines(keepends=True):
            process.line += part
            if part.endswith((b"\n", b"\r")):
                self._end_line(process, b"")
            elif len(process.line) >= _MAX_LINE_BYTES:  # it comes in pieces, each a line
                self._end_line(process, b"\n")

    def _end_line(self, process: _WorkerProcess, end: bytes) -> None:
        line, process.line = process.line, b""
        if not line:
            return
        process.last_lines.append(line + end)
        is_entry = self._passes_json and line.startswith(_JSON_ENTRY)
        _write(line + end if is_entry else b"[process %d] %s%s" % (process.number, line, end))

    def _explain(self, failed: _WorkerProcess, exit_code: int) -> None:
        number = len(self._processes)
        together = "" if self._is_terminating else "; the others were ended with it"
        text = f"Process {failed.number} of {number} has ended with exit code {exit_code}{together}"
        _log.log(logging.WARNING if self._is_terminating else logging.ERROR, "%s", text)
        if exit_code not in _FROM_OUTSIDE:
            for line in failed.last_lines:
                _write(line)


def _write(data: bytes) -> None:
    """Write to stdout; a full disk loses lines of the log, but does not fail the job."""
    with suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def run(number: int, num_gpus: int) -> int | None:
    """Fork the processes and wait for their end.

    Args:
        number: Number of processes.
        num_gpus: Number of GPUs that the pod asks for.

    Returns:
        The pod's exit code; None in each forked process, which must then run its module.
    """
    try:
        added = environments(os.environ, number, num_gpus)
    except ElasticDLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    processes = fork(added)
    if processes is None:
        return None
    name_process()
    log_to_stdout()
    signals = signal_pipe(*_SIGNALS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return Supervisor(processes, signals, os.environ.get(LOG_FORMAT_VARIABLE) == LogFormat.JSON).run()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python -m elasticdl.worker.processes N GPUS MODULE ARGUMENT …")
    code = run(int(sys.argv[1]), int(sys.argv[2]))
    if code is not None:
        sys.exit(code)
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
