"""A job's objects as YAML, for `kubectl apply` and for people."""

from __future__ import annotations

import os
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes.pods import Manifest


def to_yaml(manifests: list[Manifest]) -> str:
    """One document for each object, nothing abbreviated."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes every object in full: people read this, and kubectl's readers differ over aliases."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return str(yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def write(path: str, text: str) -> None:
    """Writes a file that only the user can read: the job's token is in it.

    Raises:
        FlagError: it cannot be written.
    """
    draft = f"{path}.tmp"
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        raise FlagError(f"--yaml={path} cannot be written: {error.strerror}.", "Name another file.") from error
