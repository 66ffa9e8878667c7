"""The standby: a process that has imported the framework and nothing else, and forks pods.

It executes no op, opens no channel, has no second thread and runs no user code, because a child of a process that did
so may hang.  Only the agent starts it: ``python -m elasticdl.cluster.local.standby CONTROL_FD AGENT_PID FRAMEWORK``.
Each request on the control socket has a module and three descriptors; the answer is the pid of a process that is, by a
double fork, a child of the agent, so the agent learns exactly how it ends.

A forked pod calls `report_ready` when the framework works in it; a pod that does not in time is replaced.  Cost, with
TensorFlow 2.21: 580 MB resident, 240 MB of them private; in return, a forked pod has 45 MB of private memory instead of
247 MB after a plain start, because children share pages until they write to them.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl.cluster.local.framework_import import import_less_with_keras, no_garbage_collection
from elasticdl.cluster.local.process_group import die_with_parent, pass_gate, redirect_output
from elasticdl.cluster.local.process_title import name_process

READY_VARIABLE = "ELASTICDL_READY_FD"
FRAMEWORK_VARIABLE = "ELASTICDL_FRAMEWORK"  # of a worker pod: the framework to import
ENGINE = "+torch"  # suffix of a framework that is used with the collectives of torch
PRELOADED = {
    "tensorflow": ("tensorflow", "keras"),
    f"tensorflow{ENGINE}": ("tensorflow", "keras", "torch"),
    "torch": ("torch", "torch._dynamo"),  # imported by PyTorch when the first optimizer is created
    "custom": ("numpy",),
    f"custom{ENGINE}": ("numpy", "torch"),
}
PRELOADED_PACKAGES = {
    "tensorflow": ("elasticdl.frameworks.keras", "elasticdl.worker"),
    f"tensorflow{ENGINE}": ("elasticdl.frameworks.keras", "elasticdl.worker", "elasticdl.collective"),
    "torch": ("elasticdl.frameworks.torch", "elasticdl.worker", "elasticdl.collective"),
    "custom": ("elasticdl.worker",),
    f"custom{ENGINE}": ("elasticdl.worker", "elasticdl.collective"),
}
_MAX_REQUEST_BYTES = 1 << 18


def report_ready() -> None:
    """Report to the agent that this process has executed its first framework op.

    Do nothing in a process that was not forked from a standby, and at a second call.
    """
    value = os.environ.pop(READY_VARIABLE, "")
    if value:
        os.write(int(value), b"\n")
        os.close(int(value))


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A module to run as a pod, with its arguments, complete environment, and descriptors."""

    number: int
    module: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    log_fd: int
    gate_fd: int
    ready_fd: int

    def send(self, control: socket.socket) -> None:
        """Send the request to the standby.

        Raises:
            OSError: the standby is gone, does not read, or the request is too large.
        """
        words = {"number": self.number, "module": self.module, "arguments": self.arguments, "env": self.env}
        socket.send_fds(control, [json.dumps(words).encode()], [self.log_fd, self.gate_fd, self.ready_fd])

    @staticmethod
    def receive(control: socket.socket) -> ForkRequest | None:
        """Wait for the next request; None when the agent is gone."""
        data, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
        if not data:
            return None
        words = json.loads(data)
        return ForkRequest(words["number"], words["module"], tuple(words["arguments"]), words["env"], *fds)


def _preload(framework: str) -> None:
    """Import the modules of the framework's pods.  The pods themselves report missing modules of ElasticDL."""
    import_less_with_keras()
    for name in PRELOADED[framework]:
        importlib.import_module(name)
    for package in PRELOADED_PACKAGES[framework]:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, prefix=f"{package}."):
            try:
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
            except (ImportError, AttributeError) as error:  # also for an unusable version of the framework
                sys.stderr.write(f"standby: {module.name} is not preloaded: {error}\n")


def _fork_for_agent() -> int:
    """Fork a child whose parent becomes the agent; return its pid, and 0 in the child."""
    pid_reader, pid_writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(pid_reader)
        pid = os.fork()
        if pid:
            os.write(pid_writer, str(pid).encode())
            os._exit(0)
        os.close(pid_writer)
        return 0
    os.close(pid_writer)
    answer = os.read(pid_reader, 32)
    os.close(pid_reader)
    os.waitpid(middle, 0)  # from now on, the agent is the parent
    return int(answer)


def serve(control: socket.socket) -> ForkRequest | None:
    """Answer requests until the agent is gone, then return None; in each forked child, return its request."""
    while request := ForkRequest.receive(control):
        pid = _fork_for_agent()
        if pid == 0:
            control.close()
            return request
        for fd in (request.log_fd, request.gate_fd, request.ready_fd):
            os.close(fd)
        control.send(json.dumps({"number": request.number, "pid": pid}).encode())
    return None


def become(request: ForkRequest, agent: int, env: Mapping[str, str]) -> None:
    """Give this forked child the descriptors, environment and random seeds of a plain start."""
    pass_gate(request.gate_fd, agent)
    redirect_output(request.log_fd)
    os.close(request.log_fd)
    os.environ.clear()
    os.environ.update(env)
    os.environ[READY_VARIABLE] = str(request.ready_fd)
    threading.current_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 keeps the parent's
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)  # was created by the import
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # otherwise all children would draw the same numbers
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # generators of GPUs begin with a constant


def main() -> None:
    """Run the standby; in a forked child, the pod's module."""
    control_fd, agent, framework = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent()
    if os.getppid() != agent:
        return
    control = socket.socket(fileno=control_fd)
    with no_garbage_collection():
        _preload(framework)
    control.send(b"{}")
    request = serve(control)
    if request is None:
        return
    become(request, agent, request.env)
    sys.argv = [request.module, *request.arguments]
    name_process()
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
