"""The job's token: made by the client, kept in a 0600 file (a Secret on Kubernetes), carried by every call."""

from __future__ import annotations

import os
from pathlib import Path

from elasticdl_client.errors import JobError

TOKEN_FILE_VARIABLE = "ELASTICDL_TOKEN_FILE"


def read_token() -> str:
    """The token of the job this pod belongs to.

    Raises:
        JobError: the pod was not started by a master or client of ours.
    """
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if not path:
        raise JobError(f"{TOKEN_FILE_VARIABLE} is not set", "pods are started by `elasticdl train`, not by hand")
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise JobError(f"the job's token cannot be read: {error}") from error
