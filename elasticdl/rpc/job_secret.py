"""What a pod knows of its job's secret: files that the client made, next to each other and for the job's pods alone.

The token is carried by every call; the flags with something secret in them never leave the files: processes send each
other the public part of the job, and each completes it here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes.names import SECRET_FLAGS_KEY

TOKEN_FILE_VARIABLE = "ELASTICDL_TOKEN_FILE"


def read_token() -> str:
    """The token of the job this pod belongs to.

    Raises:
        JobError: the pod was not started by a master or client of ours.
    """
    path = _token_file()
    try:
        return path.read_text().strip()
    except OSError as error:
        raise JobError(f"the job's token cannot be read: {error}") from error


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
        JobError: the secret part cannot be read.
    """
    return JobSpec.from_json(public).with_secrets(read_secret_flags(directory) or {})


def _token_file() -> Path:
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        raise JobError(f"{TOKEN_FILE_VARIABLE} is not set", "pods are started by `elasticdl train`, not by hand")
    return Path(path)
