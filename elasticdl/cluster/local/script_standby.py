"""The standby of a script: ``python -m elasticdl.cluster.local.script_standby FD AGENT_PID MODULES SCRIPT ARGUMENT …``.

It is started like the script, with the same interpreter, options, directory and environment.  It imports the script's
first imports (MODULES, separated by commas) and forks, like `elasticdl.cluster.local.standby`; it runs no line of the
script.  For a script, a fork differs little from a plain start: warnings of those imports are in the agent's log, all
forks share the hash seed, and frames of this module are below the script's.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from elasticdl.cluster.local.framework_import import no_garbage_collection
from elasticdl.cluster.local.process_group import die_with_parent
from elasticdl.cluster.local.process_title import write_arguments
from elasticdl.cluster.local.standby import become, report_ready, serve

_OF_COMMANDS = ("PATH", "PYTHONPATH")  # extended by `elasticdl.worker.command`, which has started this process


class _Environment:
    """The changes of the environment by a script's imports."""

    def __init__(self) -> None:
        entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
        self._initial = dict(entry.split("=", 1) for entry in entries if "=" in entry)

    def of(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a pod after the same imports as in this process.

        Args:
            env: The environment of the pod, before `elasticdl.worker.command`.
        """
        added = {name: value for name, value in os.environ.items() if self._initial.get(name) != value}
        of_command = {name: self._initial[name] for name in _OF_COMMANDS if name in self._initial}
        return {**env, **of_command, **added}


def _run(command: Sequence[str], words: Sequence[str]) -> None:
    """Run a script like the interpreter.

    Args:
        command: The whole command.
        words: The script and its arguments.
    """
    path = os.path.join(os.getcwd(), words[0])
    sys.argv, sys.orig_argv = list(words), list(command)
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):  # the script was removed or changed meanwhile
        os.execvp(command[0], list(command))  # the interpreter reports it
    module = ModuleType("__main__")
    names = {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
    vars(module).update(names, __annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    except SystemExit:
        raise
    except BaseException:
        _hide_frames_below(code)
        raise


def _hide_frames_below(code: CodeType) -> None:
    """Hide the frames below the script's in tracebacks that the interpreter prints."""
    hook = sys.excepthook

    def hide(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        sys.excepthook = hook
        while frames is not None and frames.tb_frame.f_code is not code:
            frames = frames.tb_next
        hook(kind, error.with_traceback(frames), frames)

    sys.excepthook = hide


def main() -> None:
    """Run the standby; in a forked child, the script."""
    control_fd, agent, modules, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:]
    die_with_parent()
    if os.getppid() != agent:
        return
    control = socket.socket(fileno=control_fd)
    environment = _Environment()
    write_arguments(b"elasticdl standby")
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    with no_garbage_collection():
        for name in modules:
            importlib.import_module(name)
    if threading.active_count() > 1:
        sys.exit(f"standby: {', '.join(modules)} or sitecustomize has started a thread, which no fork would have")
    control.send(b"{}")
    request = serve(control)
    del control  # `finalize_at_exit` would find the socket alive, and collections at the exit pass over all of PyTorch
    if request is None:
        return
    become(request, agent, environment.of(request.env))
    report_ready()
    command = request.arguments[1:]  # after the directory
    write_arguments(" ".join(command).encode(errors="surrogateescape"))
    importlib.invalidate_caches()
    _run(command, command[len(command) - len(words) :])


if __name__ == "__main__":
    main()
