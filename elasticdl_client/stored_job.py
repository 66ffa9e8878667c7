"""The directory of a job in storage, which --job_dir=URL names: what outlives the job's machine, or its namespace.

Layout: ``spec.json``, published when the job is started, without what is secret in it; ``status.json`` and
``journal/``, of its masters; ``checkpoints/``, ``bad_records/`` and ``code/``, unless flags name other places.  Lock,
socket, token and logs belong to a machine, or to pods, and are not here.

`with_places` and `with_secrets`: the job's flags as they follow from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticdl_client.choices import JobType
from elasticdl_client.errors import ElasticDLError, FlagError, JobError, StorageError, StorageFileMissing
from elasticdl_client.flag_sources import PREFIX
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.kubernetes.names import SPEC_KEY, STATUS_KEY
from elasticdl_client.params import parse_envs
from elasticdl_client.secret_values import HIDDEN, hide_in_flag
from elasticdl_client.storage_kinds import check_installed, is_remote, scheme_of

if TYPE_CHECKING:
    from elasticdl.storage.port import Storage

_CODE = "code"
_PATIENCE_S = 30.0  # while the user waits for the command


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job's directory in storage.

    Attributes:
        url: without a slash at its end.
    """

    url: str

    def check_free(self) -> None:
        """Check that a new job can have the directory.

        Raises:
            JobError: it holds a job, or something else.
            StorageError: it cannot be read, or a package for it is not installed here.
        """
        storage = self._storage()
        entries = {status.url.rpartition("/")[2] for status in storage.list(self.url)}
        if SPEC_KEY not in entries:
            if entries - {_CODE}:  # of a job that could not be started
                raise JobError(f"{self.url} is not empty and not a job's directory.", "Name another --job_dir.")
            return
        name = self.read().job_name
        status = self.status()
        if status is not None and status.exit_code is not None:
            raise JobError(
                f"--job_dir={self.url} holds the job {name}, which has ended.",
                "Name another --job_dir, or remove that directory.",
            )
        if status is None and not storage.list(self._file("journal")):
            raise JobError(
                f"--job_dir={self.url} holds the job {name}, which no master has begun.",
                "If it was only written (--yaml), remove that directory; else wait for its master.",
            )
        raise JobError(
            f"--job_dir={self.url} holds the job {name}, which has not ended.",
            f"`elasticdl resume --job_dir={self.url}` continues it; a new job needs another --job_dir.",
        )

    def publish(self, spec: JobSpec) -> None:
        """Write down the job, without what is secret in it.

        Raises:
            StorageError: the storage cannot be written.
        """
        try:
            self._storage().publish(self._file(SPEC_KEY), (spec.public().to_json() + "\n").encode())
        except StorageError as error:
            raise StorageError(f"--job_dir={self.url} cannot be written: {error.what}", error.hint) from error

    def withdraw(self) -> None:
        """Remove the job's specification: it could not be started.

        Raises:
            StorageError: the storage cannot be written.
        """
        self._storage().delete(self._file(SPEC_KEY))

    def read(self) -> JobSpec:
        """Return the job, without what is secret in it.

        Raises:
            JobError: there is none, or it is damaged.
            StorageError: the storage cannot be read, or a package for it is not installed here.
        """
        try:
            text = self._read(SPEC_KEY)
        except StorageFileMissing as error:
            raise JobError(
                f"{self.url} is not a job's directory: it has no {SPEC_KEY}.", "Give the --job_dir that the job had."
            ) from error
        try:
            return JobSpec.from_json(text)
        except FlagError as error:
            raise JobError(f"{self._file(SPEC_KEY)} is damaged: {error.what}", error.hint) from error

    def status(self) -> JobStatus | None:
        """Return the last status that a master has stored; None before the first, or if it cannot be read.

        Raises:
            StorageError: the storage cannot be read.
        """
        try:
            return JobStatus.from_json(self._read(STATUS_KEY))
        except (StorageFileMissing, ValueError, TypeError, KeyError):
            return None

    def _file(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _read(self, name: str) -> str:
        storage, url = self._storage(), self._file(name)
        return storage.read(url, 0, storage.stat(url).size_bytes).decode(errors="replace")

    def _storage(self) -> Storage:
        check_installed(self.url)
        try:
            from elasticdl.storage.fsspec_storage import FsspecStorage, RetryPolicy
        except ImportError as error:
            raise StorageError(
                f"--job_dir={self.url} cannot be used: the package elasticdl2, which does it, is not installed here.",
                "pip install elasticdl2",
            ) from error
        return FsspecStorage(scheme_of(self.url), RetryPolicy(total_s=_PATIENCE_S))


def stored_job(spec: JobSpec) -> StoredJob | None:
    """Return the directory of a job in storage; None: it has none there."""
    return StoredJob(spec.job_dir.rstrip("/")) if is_remote(spec.job_dir) else None


def with_places(spec: JobSpec) -> JobSpec:
    """Return a job with checkpoints, bad records and code in its directory in storage, unless flags say otherwise."""
    stored = stored_job(spec)
    if stored is None:
        return spec
    is_trained = spec.job_type is JobType.TRAIN
    return dataclasses.replace(
        spec,
        job_dir=stored.url,
        checkpoint_dir=spec.checkpoint_dir or (f"{stored.url}/checkpoints" if is_trained else ""),
        bad_records_dir=spec.bad_records_dir or (f"{stored.url}/bad_records" if spec.max_bad_records else ""),
        code_storage=spec.code_storage or (f"{stored.url}/{_CODE}" if spec.code else ""),
    )


def with_secrets(
    public: JobSpec, envs: str, environment: Mapping[str, str], note: Callable[[str], None] = lambda text: None
) -> JobSpec:
    """Return a job with the secrets that storage does not keep.

    Args:
        public: the job without them.
        envs: of --envs; they replace those of the job.
        environment: of this process: has the other variables of --envs, and flags as ``ELASTICDL_<FLAG>``.
        note: Receives messages for the user.

    Raises:
        FlagError: naming what is missing, or is not what the job began with.
    """
    missing: list[str] = []
    variables = public.envs_dict() | parse_envs(environment.get(f"{PREFIX}ENVS", "")) | parse_envs(envs)
    for name, value in variables.items():
        if value == HIDDEN and name not in environment:
            missing.append(f"{name} of --envs")
        elif value == HIDDEN:
            variables[name] = environment[name]
            note(f"{name} of --envs has its value from the environment of this command.")
    changes = {"envs": ",".join(f"{name}={value}" for name, value in variables.items())}
    for field in dataclasses.fields(public):
        hidden = getattr(public, field.name)
        if field.name == "envs" or type(hidden) is not str or HIDDEN not in hidden:
            continue
        variable = f"{PREFIX}{field.name.upper()}"
        if variable not in environment:
            missing.append(f"--{field.name}={hidden} by the variable {variable}")
            continue
        given = _as_stored(field.name, environment[variable])
        if hide_in_flag(field.name, given) != hidden:
            raise FlagError(f"{variable} is another --{field.name} than the job's, {hidden}.", "Give the job's own.")
        changes[field.name] = given
    if missing:
        raise FlagError(
            f"Storage keeps nothing that is secret, and these are missing here: {', '.join(missing)}.",
            "Set the variables in the environment of this command, or give --envs=NAME=VALUE,….",
        )
    return dataclasses.replace(public, **changes)  # type: ignore[arg-type]


def _as_stored(name: str, value: str) -> str:
    """Return the value of a flag in the form that storage has: of a pod template it is the content."""
    if not name.endswith("pod_template"):
        return value
    from elasticdl_client.kubernetes.pod_template import compact

    return compact(value)


def withdraw_quietly(stored: StoredJob | None) -> None:
    """Remove the specification of a job that could not be started; an error before it is the one that counts."""
    if stored is not None:
        try:
            stored.withdraw()
        except ElasticDLError:
            return
