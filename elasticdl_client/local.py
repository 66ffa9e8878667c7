"""The front of the local runtime: starts a job on this machine, follows it in the foreground, and ends all of it.

The agent, a child, owns the pods; the master, a pod, runs the job.  This module only starts, shows and ends.  The
runtime package is imported when a job starts, never before: the client can be installed without it.

`AgentProcess`: the agent of the local runtime as a child of the client, started, and ended with everything that it
runs.

Its standard input is a pipe from this process, so it learns of this process's end, whatever ends it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Self

from elasticdl_client import last_checkpoint, progress, report
from elasticdl_client.choices import LOG_FORMAT_VARIABLE, RUN_MODULE, JobType
from elasticdl_client.errors import JobError
from elasticdl_client.job_dir import DELETED, JobDir, is_elsewhere, path_of, register, tail
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import EXIT_SUPERSEDED, Ended, JobPhase, JobStatus
from elasticdl_client.local_checks import check_local
from elasticdl_client.news import News
from elasticdl_client.script_output import Shown
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.stored_job import stored_job, with_places, withdraw_quietly

MASTER_COMMAND = (sys.executable, *RUN_MODULE, "elasticdl.master")
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asks for the end of the job."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(spec: JobSpec, master_command: Sequence[str] = MASTER_COMMAND, shown: Shown = Shown.GLANCE) -> int:
    """Run a job to its end; return the exit code for the shell.

    Args:
        spec: The job.
        master_command: its master's command.
        shown: the part of its workers' output that is shown.

    Raises:
        ElasticDLError: it could not be started.
    """
    spec, job_dir = prepare(spec, _note)
    print(f"Job {spec.job_name} starts on this machine; its directory is {job_dir.path}", flush=True)
    return run_prepared(spec, job_dir, master_command, shown)


def prepare(spec: JobSpec, note: Callable[[str], None]) -> tuple[JobSpec, JobDir]:
    """Check a job, and take and fill its directory; nothing of it runs yet.

    Args:
        spec: The job.
        note: Receives messages for the user.

    Returns:
        The job with absolute paths, and its directory, which this process has locked.

    Raises:
        ElasticDLError: the job cannot be started.
    """
    require_runtime()
    spec = with_places(check_local(spec))
    stored = stored_job(spec)
    if stored is None:
        return _fill(spec, note)
    stored.check_free()
    stored.publish(spec)
    try:
        return _fill(spec, note)
    except BaseException:
        withdraw_quietly(stored)
        raise


def _fill(spec: JobSpec, note: Callable[[str], None]) -> tuple[JobSpec, JobDir]:
    """Take and fill the directory of a job that is checked."""
    path = path_of(spec)
    spec = dataclasses.replace(
        spec,
        job_dir=spec.job_dir if is_remote(spec.job_dir) else str(path),
        checkpoint_dir=spec.checkpoint_dir or (str(path / "checkpoints") if spec.job_type is JobType.TRAIN else ""),
        tensorboard_log_dir=spec.tensorboard_log_dir or _event_files(spec, path),
    )
    job_dir = JobDir.take(path)
    try:
        if job_dir.prepare(spec):
            note(f"an earlier run's logs and checkpoints are now in {path / 'previous'}.")
    except BaseException:
        os.close(job_dir.lock_fd)
        raise
    if is_elsewhere(path):
        try:
            register(path)
        except OSError as error:
            why = f"{error.filename} cannot be written ({error.strerror})"
            note(f"`elasticdl list` does not show this job: {why}; give --job_dir={path}.")
    return spec, job_dir


def run_prepared(
    spec: JobSpec, job_dir: JobDir, master_command: Sequence[str] = MASTER_COMMAND, shown: Shown = Shown.GLANCE
) -> int:
    """Run a job that `prepare` has returned to its end; return the exit code for the shell.

    Raises:
        ElasticDLError: it could not be started.
    """
    return _run_to_its_end(spec, job_dir, master_command, News(), shown)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def go_on(spec: JobSpec, job_dir: JobDir, master_command: Sequence[str] = MASTER_COMMAND) -> int:
    """Continue an interrupted job to its end, from the journal and the checkpoints in its directory.

    Args:
        spec: the one of the directory.
        job_dir: taken, and not prepared anew.
        master_command: its master's command.

    Raises:
        ElasticDLError: it could not be started.
    """
    require_runtime()
    print(f"Job {spec.job_name} continues on this machine; its directory is {job_dir.path}", flush=True)
    return _run_to_its_end(spec, job_dir, master_command, _news_of_earlier_runs(job_dir), Shown.GLANCE)


def take_over(spec: JobSpec, master_command: Sequence[str] = MASTER_COMMAND) -> int:
    """Continue a job of another machine to its end, from its directory in storage; return the exit code.

    Args:
        spec: the one in that directory, with its secrets.
        master_command: its master's command.

    Raises:
        ElasticDLError: it cannot be run on this machine.
    """
    require_runtime()
    # Its own earlier predictions are in --prediction_outputs.
    checked = check_local(dataclasses.replace(spec, prediction_outputs=""))
    spec, job_dir = _fill(dataclasses.replace(checked, prediction_outputs=spec.prediction_outputs), _note)
    print(f"Job {spec.job_name} continues here from {spec.job_dir}; its directory is {job_dir.path}", flush=True)
    return _run_to_its_end(spec, job_dir, master_command, News(), Shown.GLANCE)


def _news_of_earlier_runs(job_dir: JobDir) -> News:
    """Skip the news that earlier runs have printed; the master reports a damaged journal."""
    status, history = job_dir.status(), None
    with suppress(JobError):
        history = job_dir.events()
    return News(status, history)


def _run_to_its_end(spec: JobSpec, job_dir: JobDir, master_command: Sequence[str], news: News, shown: Shown) -> int:
    try:
        with _Signals() as signals:
            ended = _run(spec, job_dir, master_command, news, shown, signals)
    except Interrupted as interruption:
        _drop_full_outputs()
        return 128 + interruption.number
    if spec.on_end and ended.exit_code != EXIT_SUPERSEDED:
        _post_end(spec, ended)
    return ended.exit_code


def _post_end(spec: JobSpec, ended: Ended) -> None:
    phase = JobPhase.FAILED if ended.exit_code else JobPhase.SUCCEEDED
    status = ended.status or JobStatus(spec.job_name)
    status = dataclasses.replace(status, phase=phase, exit_code=ended.exit_code, message=hide(ended.message))
    from elasticdl_client import end_hook  # HTTP's modules, for few jobs

    delivery = end_hook.post(spec, status)
    if delivery is not None and not delivery.is_done:
        _note(delivery.text)


def _run(
    spec: JobSpec, job_dir: JobDir, master_command: Sequence[str], news: News, shown: Shown, signals: _Signals
) -> Ended:
    from elasticdl_client.local_job import LocalFollower, start_master

    agent = AgentProcess.start(spec, job_dir)
    display = progress.open_display(sys.stdout, news)
    try:
        cluster = start_master(spec, job_dir, agent.socket, master_command)
        ended = LocalFollower(spec, job_dir, cluster, display, shown).follow()
    except Interrupted as interruption:
        _leave(spec, job_dir, agent, display, interruption.number, signals)
        raise
    finally:
        signals.ignore()  # the end of all processes is not to be interrupted
        display.close()
        agent.end()
    _report(spec, job_dir, ended)
    return ended


def _leave(
    spec: JobSpec, job_dir: JobDir, agent: AgentProcess, display: progress.Display, number: int, signals: _Signals
) -> None:
    """Prepare the end of the job: after Ctrl-C, write a checkpoint, unless Ctrl-C is pressed again."""
    signals.count()
    name, outcome = signal.Signals(number).name, ""
    if number == signal.SIGINT and last_checkpoint.can_be_written(spec, job_dir.status()):
        _say(display, f"{name}: writing a checkpoint before the end; Ctrl-C again ends the job at once …")
        version = _save(spec, job_dir, agent, signals)
        if version:
            outcome = f"A checkpoint of {version:,} minibatches is written."
        elif signals.num_counted:
            outcome = "The checkpoint is not waited for."
        else:
            outcome = "There is no new checkpoint."
    signals.ignore()
    if outcome:
        _say(display, outcome)
    is_deleted = (job_dir.path / DELETED).exists()
    _say(display, f"{'`elasticdl delete`' if is_deleted else name}: ending the job and all its processes …")
    if not is_deleted and (job_dir.path / "journal.json").exists():
        _say(display, f"`elasticdl resume {spec.job_name} --runtime=local` continues it.")


def _say(display: progress.Display, line: str) -> None:
    """Print a line; continue without output where Ctrl-C has ended the reader, too, such as tee."""
    try:
        display.say(line)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _save(spec: JobSpec, job_dir: JobDir, agent: AgentProcess, signals: _Signals) -> int:
    """Return the number of minibatches in a checkpoint that is being written; 0: there is none."""
    from elasticdl_client.local_job import find_master

    master = last_checkpoint.SignalledMaster(partial(find_master, spec, agent.socket))
    is_given_up = lambda: bool(signals.num_counted)  # noqa: E731
    return last_checkpoint.write(spec, job_dir.status, job_dir.events, master.ask, is_given_up)


def _event_files(spec: JobSpec, path: Path) -> str:
    """Return the default directory of a job's TensorBoard files; empty if nothing could write them."""
    is_written = spec.job_type is JobType.TRAIN and importlib.util.find_spec("tensorboard") is not None
    return str(path / "tensorboard") if is_written else ""


def require_runtime() -> None:
    """Check that the runtime package is installed, and that its kernels are built for this Python.

    Raises:
        JobError: it is not, or they are not.
    """
    if importlib.util.find_spec("elasticdl") is None:
        raise JobError(
            "--runtime=local needs the runtime package, which is not installed in this Python.",
            "Install it from the repository: pip install ./elasticdl_client -e '.[tensorflow]'.",
        )
    try:
        importlib.util.find_spec("elasticdl.kernels._native")  # imports the package
    except ImportError as error:
        what, _, hint = str(error).partition("\n")
        raise JobError(f"--runtime=local cannot run a job: {what}", hint.strip()) from error


def _is_hangup_ignored(number: signal.Signals) -> bool:
    """Return whether it is SIGHUP under nohup; SIGINT and SIGTERM come from `elasticdl stop` and `delete`, too."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class _Signals:
    """Inside, an ending signal raises `Interrupted` until `count`, from which on signals are counted.

    Python drops an exception that is raised in a destructor or a callback, so the wait for a checkpoint looks at the
    number of signals.

    Attributes:
        num_counted: the signals since `count`.
    """

    def __init__(self) -> None:
        self.num_counted = 0
        self._are_counted = False

    def __enter__(self) -> Self:
        taken = [number for number in _ENDING_SIGNALS if not _is_hangup_ignored(number)]
        self._before = {number: signal.signal(number, self._take) for number in taken}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def count(self) -> None:
        """Count signals from here on instead of raising."""
        self._are_counted = True

    def ignore(self) -> None:
        """Ignore signals from here on."""
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._are_counted:
            raise Interrupted(number)
        self.num_counted += 1


def _report(spec: JobSpec, job_dir: JobDir, ended: Ended) -> None:
    log = job_dir.logs / f"elasticdl-{spec.job_name}-master.log"
    hint = f"The master's log is {log}; those of other pods are next to it."
    history = None
    with suppress(JobError):
        history = job_dir.events()
    try:
        report.print_end(spec, ended, history, logs=str(job_dir.logs), hint=hint)
    except BrokenPipeError:
        raise
    except OSError:  # ENOSPC or EIO of the output: the exit code and --on_end still say how the job has ended
        _drop_full_outputs()


def _drop_full_outputs() -> None:
    """Send what cannot be written to /dev/null: Python's last flush would make the exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A running agent; `socket` is where it listens."""

    process: subprocess.Popen[bytes]
    socket: str

    @classmethod
    def start(cls, spec: JobSpec, job_dir: JobDir) -> AgentProcess:
        """Start the agent, which shares the lock of the job's directory.

        Raises:
            JobError: it does not come up.
        """
        log_path = job_dir.logs / "agent.log"
        command = [sys.executable, *RUN_MODULE, "elasticdl.cluster.local.agent"]
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
        """End every process of the job, and return when the agent has ended."""
        _end(self.process)


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
