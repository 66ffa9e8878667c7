"""The agent of the local runtime as a child of the client: started, and ended with everything that it runs.

Its standard input is a pipe from this process, so it learns of this process's end, whatever ends it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elasticdl_client.choices import LOG_FORMAT_VARIABLE
from elasticdl_client.errors import JobError
from elasticdl_client.job_dir import JobDir
from elasticdl_client.job_spec import JobSpec

_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A running agent; `socket` is where it listens."""

    process: subprocess.Popen[bytes]
    socket: str

    @classmethod
    def start(cls, spec: JobSpec, job_dir: JobDir) -> AgentProcess:
        """Starts the agent, which shares the lock of the job's directory.

        Raises:
            JobError: it does not come up.
        """
        log_path = job_dir.logs / "agent.log"
        command = [sys.executable, "-m", "elasticdl.cluster.local.agent"]
        command += ["--job_dir", str(job_dir.path), "--slots", str(spec.local_slots)]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(job_dir.lock_fd,),
                env={**os.environ, **spec.envs_dict(), LOG_FORMAT_VARIABLE: spec.log_format},
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            address = _first_line(process.stdout)
            agent = cls(process, str(json.loads(address)["socket"]))
        except (ValueError, KeyError, TypeError) as error:
            _end(process)
            raise JobError(
                f"The local runtime's agent did not start: {tail(log_path) or 'it said nothing.'}",
                f"Its log is {log_path}.",
            ) from error
        except BaseException:
            _end(process)
            raise
        (job_dir.path / "agent.json").write_text(address + "\n")
        return agent

    def end(self) -> None:
        """Ends every process of the job, and returns when the agent is gone."""
        _end(self.process)


def tail(log: Path) -> str:
    """The last lines of a log."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _first_line(stream: IO[bytes]) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(_START_TIMEOUT_S):
            raise ValueError("no answer")
    return stream.readline().decode().strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
