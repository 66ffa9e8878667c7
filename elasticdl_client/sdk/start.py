"""`train`, `evaluate` and `predict`: keyword arguments to a `JobSpec`, as on the command line, and the job started.

`start` starts the front of a local job: a process of its own (`__main__.py`), so that the job outlives this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from elasticdl_client import flag_sources, local
from elasticdl_client.choices import RUN_MODULE, JobType, Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.job_dir import JobDir
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.jobs.local_jobs import LocalJobs
from elasticdl_client.jobs.store import JobStore
from elasticdl_client.sdk.job import JobHandle

FlagValue = str | int | float | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, object]
"""A flag's value: a list stands for texts with commas between, a mapping for NAME=VALUE pairs."""

_PARAMS = ("data_reader_params", "model_params")  # their pairs have semicolons between
_OF_THE_COMMAND = {  # flag → what to do in Python
    "wait": "Call .wait() on the job that is returned.",
    "dry_run": "Use the command: elasticdl train --dry_run.",
    "yaml": "Use the command: elasticdl train --yaml=FILE.",
}


def train(*, progress: bool = False, **flags: FlagValue) -> JobHandle:
    """Start a training job.

    Args:
        progress: print notes now, and show the job while `JobHandle.wait` waits.
        **flags: those of `elasticdl train`; `ELASTICDL_*` variables are their defaults.

    Returns:
        The job, which runs on.

    Raises:
        ElasticDLError: a flag is wrong, or the job cannot be started.
    """
    return start(JobType.TRAIN, flags, progress=progress)


def evaluate(*, progress: bool = False, **flags: FlagValue) -> JobHandle:
    """Start the evaluation of a trained model; see `train`."""
    return start(JobType.EVALUATE, flags, progress=progress)


def predict(*, progress: bool = False, **flags: FlagValue) -> JobHandle:
    """Start a trained model's predictions for data; see `train`."""
    return start(JobType.PREDICT, flags, progress=progress)


def start(
    job_type: JobType,
    flags: Mapping[str, FlagValue],
    *,
    progress: bool = False,
    master_command: Sequence[str] = local.MASTER_COMMAND,
    ends_with_caller: bool = False,
) -> JobHandle:
    """Start a job.

    Args:
        job_type: which command's flags these are.
        flags: by name.
        progress: print notes now, and show the job while `JobHandle.wait` waits.
        master_command: the command of a local job's master.
        ends_with_caller: a local job ends when this process does.

    Raises:
        ElasticDLError: a flag is wrong, or the job cannot be started.
    """
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if progress:
            print(f"note: {text}", file=sys.stderr)

    spec = spec_of(job_type, flags, note)
    store: JobStore
    if spec.runtime is Runtime.KUBERNETES:
        store, has_ended = _submit(spec, note), None
    else:
        store, has_ended = _start_here(spec, note, master_command, ends_with_caller)
    return JobHandle.of(store, spec.job_name, notes=tuple(notes), progress=progress, has_ended=has_ended)


def spec_of(job_type: JobType, flags: Mapping[str, FlagValue], note: Callable[[str], None]) -> JobSpec:
    """Return the job that flags of Python's types describe.

    Raises:
        FlagError: an unknown flag, a wrong value, a contradiction, or one missing.
    """
    for name in _OF_THE_COMMAND:
        if name in flags:
            raise _of_the_command(name)
    arguments = [f"--{name}={_text(name, value)}" for name, value in flags.items()]
    given = flag_sources.gather(job_type, arguments, os.environ)
    try:
        inferred = flag_sources.infer(job_type, given)
        spec = JobSpec.from_flags(job_type, inferred.values)
    except FlagError as error:
        raise given.located(error) from None
    for name in ("dry_run", "yaml"):
        if getattr(spec, name):  # from a file, or the environment
            raise given.located(_of_the_command(name))
    flag_sources.check(spec)
    for text in [*inferred.notes, *flag_sources.notes(spec)]:
        note(text)
    return spec


def _of_the_command(name: str) -> FlagError:
    return FlagError(f"--{name} is for the command line alone.", _OF_THE_COMMAND[name])


def _text(name: str, value: object) -> str:
    """Return the value of a flag as the command line has it."""
    if isinstance(value, str | int | float | os.PathLike):
        return str(os.fspath(value) if isinstance(value, os.PathLike) else value)
    separator = ";" if name in _PARAMS else ","
    if isinstance(value, Mapping) and name.endswith("pod_template"):
        return json.dumps(value)
    if isinstance(value, Mapping):
        parts = [f"{key}={_part(name, one, separator)}" for key, one in value.items()]
    elif isinstance(value, list | tuple):
        parts = [_part(name, one, separator) for one in value]
    else:
        kind = "None" if value is None else f"a {type(value).__name__}"
        hint = "Leave it out." if value is None else "Give a text, a number, a path, a list of texts or a mapping."
        raise FlagError(f"{name} is {kind}.", hint)
    return separator.join(parts)


def _part(name: str, value: object, separator: str) -> str:
    text = str(os.fspath(value)) if isinstance(value, os.PathLike) else str(value)
    if separator in text and name != "envs":  # there a comma separates only where NAME= follows
        raise FlagError(f"{name} has {text!r} in it, and '{separator}' is what separates.", "Give the flag's text.")
    return text


def _submit(spec: JobSpec, note: Callable[[str], None]) -> JobStore:
    from elasticdl_client.jobs.kubernetes_jobs import KubernetesJobs
    from elasticdl_client.kubernetes import submit

    connection, placed = submit.submit(spec, note)
    return KubernetesJobs(connection, placed.namespace, placed.context)


def _start_here(
    spec: JobSpec, note: Callable[[str], None], master_command: Sequence[str], ends_with_caller: bool
) -> tuple[JobStore, threading.Event]:
    _, job_dir = local.prepare(spec, note)
    return LocalJobs(job_dir.path), start_front(job_dir, master_command, ends_with_caller)


LOG = "front.log"


def start_front(job_dir: JobDir, master_command: Sequence[str], ends_with_caller: bool) -> threading.Event:
    """Start the front of a prepared job, to which the lock of its directory passes.

    Returns:
        An event that is set when the front has ended.
    """
    command = [sys.executable, *RUN_MODULE, "elasticdl_client.sdk", str(job_dir.path), str(job_dir.lock_fd)]
    try:
        with (job_dir.logs / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*command, *master_command],
                stdin=subprocess.PIPE if ends_with_caller else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(job_dir.lock_fd,),
                start_new_session=True,  # a Ctrl-C in the terminal or the notebook does not reach the job
            )
    finally:
        os.close(job_dir.lock_fd)
    has_ended = threading.Event()

    def reap() -> None:
        process.wait()
        has_ended.set()

    threading.Thread(target=reap, name=f"front of {job_dir.path.name}", daemon=True).start()
    return has_ended
