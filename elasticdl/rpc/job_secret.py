"""A pod's view of its job's secret: files made by the client, in one directory, for the job's pods only.

Every call carries the token.  A certificate, if the job has one, encrypts all calls and authenticates both ends.  Flags
with secrets never leave the files: processes send each other the public part of the job, and each adds the secret part
here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elasticdl_client.choices import Tls
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes.names import CERTIFICATE_KEYS, SECRET_FLAGS_KEY
from elasticdl_client.secret_values import HIDDEN

TOKEN_FILE_VARIABLE = "ELASTICDL_TOKEN_FILE"


def read_token() -> str:
    """Return the token of this pod's job.

    Raises:
        JobError: the pod was not started by ElasticDL.
    """
    path = _token_file()
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise JobError(f"the job's token cannot be read: {error}") from error
    if token == HIDDEN:
        raise JobError("the job's objects are what --dry_run has printed, without its secrets", "apply those of --yaml")
    return token


@dataclass(frozen=True, slots=True)
class Certificate:
    """The job's certificate, as PEM; the job has its own authority."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def read_certificate(directory: Path | None = None) -> Certificate | None:
    """Return the job's certificate; None if it has none, so that its calls are not encrypted.

    Args:
        directory: The directory of the job's secret; None: that of this pod, if this process is one.

    Raises:
        JobError: a part of it is missing or unreadable.
    """
    if directory is None:
        if not os.environ.get(TOKEN_FILE_VARIABLE):
            return None
        directory = _token_file().parent
    files = [directory / name for name in CERTIFICATE_KEYS]
    if not any(file.exists() for file in files):
        return None
    try:
        return Certificate(*(file.read_bytes() for file in files))
    except OSError as error:
        raise JobError(f"the job's certificate cannot be read: {error}") from error


def read_secret_flags(directory: Path | None = None) -> Mapping[str, str] | None:
    """Return the flags with secrets; None if the client has stored none separately.

    Args:
        directory: The directory of the job's secret; None: that of this pod.

    Raises:
        JobError: they cannot be read.
    """
    path = (directory or _token_file().parent) / SECRET_FLAGS_KEY
    try:
        flags: Mapping[str, str] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise JobError(f"the secret part of the job's flags cannot be read: {path}: {error}") from error
    return flags


def whole_spec(public: str, directory: Path | None = None) -> JobSpec:
    """Return the job, from the JSON of its public part.

    Args:
        directory: The directory of the job's secret; None: that of this pod.

    Raises:
        FlagError: the JSON is damaged.
        JobError: the secret part cannot be read, or the job should have a certificate and has none.
    """
    spec = JobSpec.from_json(public).with_secrets(read_secret_flags(directory) or {})
    if (spec.tls is Tls.ON or spec.encrypt) and read_certificate(directory) is None:
        flag = "--encrypt" if spec.encrypt else "--tls=true"
        raise JobError(f"the job has {flag}, and there is no certificate with its token", "submit the job again")
    return spec


def _token_file() -> Path:
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        raise JobError(f"{TOKEN_FILE_VARIABLE} is not set", "pods are started by `elasticdl train`, not by hand")
    return Path(path)
