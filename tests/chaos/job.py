"""A job on the local runtime, started as a user would, and watched from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elasticdl.cluster.cluster import Pod, PodPhase
from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl.protocol import Role
from elasticdl_client.chaos.faults import Fault, FaultKind, Victim
from elasticdl_client.chaos.local_faults import LocalFaults
from elasticdl_client.job_status import JobStatus

REPOSITORY = Path(__file__).resolve().parents[2]
_LOOK_S = 0.05
_OF_EACH_STEP = re.compile(r"INFO (Task:\d+ completed|Loss = |Epoch \d+|Starting epoch)")


class JobTimeout(AssertionError):
    """Something that had to happen did not; the message holds the ends of the job's logs."""


@dataclass(slots=True)
class LocalJob:
    """``elasticdl train --runtime=local …`` as a subprocess.

    Attributes:
        pace_s: seconds that a model with a pace takes for a record, until `hurry`.
        launcher: a command that runs the one given to it as arguments.
        arguments: of the command, after its flags.
    """

    job_dir: Path
    flags: dict[str, object]
    command: str = "train"
    environment: dict[str, str] = field(default_factory=dict)
    pace_s: float = 0
    launcher: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None
    output: list[str] = field(default_factory=list)
    _reader: threading.Thread | None = None

    def start(self) -> LocalJob:
        if self.pace_s:
            self._pace_file.write_text(str(self.pace_s))
        flags = {"runtime": "local", "job_dir": str(self.job_dir), **self.flags}
        argv = [*self.launcher, sys.executable, "-m", "elasticdl_client.main", self.command]
        argv += [*(f"--{name}={value}" for name, value in flags.items()), *self.arguments]
        self.process = subprocess.Popen(
            argv,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PACE_FILE": str(self._pace_file), **self.environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))

    @property
    def _pace_file(self) -> Path:
        return self.job_dir.with_name(f"{self.job_dir.name}.pace")

    def hurry(self) -> None:
        """The test has seen what it came for: the rest of the job at full speed."""
        self._pace_file.write_text("0")

    def status(self) -> JobStatus | None:
        try:
            return JobStatus.from_json((self.job_dir / "status.json").read_text())
        except (OSError, ValueError):
            return None

    def cluster(self) -> ProcessCluster:
        return ProcessCluster(json.loads((self.job_dir / "agent.json").read_text())["socket"])

    def pods(self, role: Role) -> list[Pod]:
        """Running pods of a role, oldest first."""
        found = [p for p in self.cluster().list() if p.role is role and p.phase is PodPhase.RUNNING and p.pid]
        return sorted(found, key=lambda pod: pod.index)

    def victims(self, role: Role) -> list[Victim]:
        """Running pods of a role as `elasticdl chaos` finds them, oldest first."""
        return self._faults.running(role.value)

    def kill(self, victim: Victim) -> None:
        """Kill a pod as `elasticdl chaos` does; returns when its process has ended."""
        self._faults.inject(Fault(FaultKind.KILL, victim.role), victim)

    def stop(self, victim: Victim) -> None:
        """Stop the processes of a pod as `elasticdl chaos` does, until `resume`."""
        self._faults.inject(Fault(FaultKind.STOP, victim.role), victim)

    def resume(self, victim: Victim) -> None:
        """Let the processes of a stopped pod continue."""
        self._faults.undo(Fault(FaultKind.STOP, victim.role), victim)

    @property
    def _faults(self) -> LocalFaults:
        return LocalFaults(self.job_dir)

    def running(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def wait_until(
        self, what: str, condition: Callable[[], bool], timeout_s: float = 120.0, look_s: float = _LOOK_S
    ) -> None:
        """Looks until a condition holds; the job's end ends the wait too.

        Args:
            look_s: between two looks; more than usual for a condition that takes processor time.

        Raises:
            JobTimeout: it did not hold in time, or the job ended first.
        """
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not condition():
            if time.monotonic() > deadline or not self.running():
                if condition():
                    return
                raise JobTimeout(f"waited for: {what}\n{self.story()}")
            pause.wait(look_s)

    def wait_for_version(self, version: int, timeout_s: float = 120.0) -> None:
        """Until that many minibatches are committed."""
        self.wait_until(
            f"model version {version}",
            lambda: (s := self.status()) is not None and s.model_version >= version,
            timeout_s,
        )

    def wait(self, timeout_s: float = 300.0) -> int:
        """The exit code of the client."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise JobTimeout(f"the job did not end\n{self.story()}") from None
        finally:
            self.end()
        assert self._reader is not None
        self._reader.join(10)
        return code

    def end(self) -> None:
        """Ends it, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def log(self, pod: str) -> str:
        path = self.job_dir / "logs" / f"{pod}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def master_log(self) -> str:
        return "".join(p.read_text(errors="replace") for p in (self.job_dir / "logs").glob("*-master.log"))

    def metrics(self) -> dict[str, float]:
        """Of the last evaluation that the master printed."""
        lines = re.findall(r"Evaluation metrics\[step=\d+\]: (\{.*\})", self.master_log())
        assert lines, f"no evaluation\n{self.story()}"
        return dict(json.loads(lines[-1].replace("'", '"')))

    def story(self) -> str:
        """The client's output and the ends of all logs without the lines of each step, for a failed test."""
        parts = ["--- client", *self.output[-40:]]
        for path in sorted((self.job_dir / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            parts += [f"--- {path.name}", *[line for line in lines if not _OF_EACH_STEP.search(line)][-60:]]
        return "\n".join(parts)
