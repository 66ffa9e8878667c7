"""A pod's view of its job's secret: files that the client made, next to each other and for the job's pods alone.

The token is carried by every call.  A certificate, if the job has one, encrypts all calls and proves both ends.  The
flags with something secret in them never leave the files: processes send each other the public part of the job, and
each completes it here.
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
    """The token of the job this pod belongs to.

    Raises:
        JobError: the pod was not started by a master or client of ours.
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
    """The job's, PEM; the authority is the job's own."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def read_certificate(directory: Path | None = None) -> Certificate | None:
    """None: the job has none, and its calls are not encrypted.

    Args:
        directory: of the job's secret; None: where this pod has it, if this process is one.

    Raises:
        JobError: a part of it is missing or cannot be read.
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
    """The flags with something secret in them; None: the client that made the job kept none apart.

    Args:
        directory: of the job's secret; None: where this pod has it.

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
    """The job, from the JSON of its public part.

    Args:
        directory: of the job's secret; None: where this pod has it.

    Raises:
        FlagError: that is damaged.
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
