"""Docker Engine: the connection to it, and errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elasticdl_client.zoo.errors import ImageError

_CONNECT_TIMEOUT_S = 10
_SILENCE_TIMEOUT_S = 900  # the builder says nothing while pip unpacks a large wheel, a registry while it stores a layer


@contextmanager
def connected() -> Iterator[Any]:
    """A `DockerClient` by DOCKER_HOST and the like; its errors become `ImageError`.

    Raises:
        ImageError: the package docker is missing, there is no engine, or it went away.
    """
    try:
        from docker.client import DockerClient
        from docker.errors import APIError, DockerException
    except ImportError as error:  # `import docker` alone finds any folder of this name
        raise ImageError(
            f"Images are built and pushed through the package docker, which is not installed in this Python: {error}.",
            "Install it: pip install 'docker>=7'.",
        ) from error
    from urllib3.exceptions import HTTPError

    try:
        client = DockerClient.from_env(timeout=_CONNECT_TIMEOUT_S, use_ssh_client=True)
    except (DockerException, OSError, HTTPError, ValueError) as error:
        raise _unreachable(error) from error
    try:
        client.api.timeout = _SILENCE_TIMEOUT_S
        yield client
    except APIError as error:
        said = error.explanation or str(error)
        raise ImageError(f"Docker Engine at {_address()} refuses: {said}") from error
    except (DockerException, OSError, HTTPError) as error:
        raise ImageError(
            f"Docker Engine at {_address()} does not continue: {_reason(error)}.",
            "Does `docker info` work? Then again.",
        ) from error
    finally:
        client.close()


def _address() -> str:
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _reason(error: BaseException) -> str:
    """Return the operating system's message, if there is one; packages wrap it in each other's words."""
    reason = str(error).rstrip(".")
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            reason = inner.strerror
        inner = inner.__cause__ or inner.__context__
    return reason


def _unreachable(error: Exception) -> ImageError:
    reason = _reason(error)
    if "ermission denied" in reason:
        hint = "This user may not use it: join the group docker (sudo usermod -aG docker $USER) and log in again."
    else:
        hint = (
            "Start Docker, or let DOCKER_HOST name an engine that runs (minikube: eval $(minikube docker-env)); "
            "`docker info` must work."
        )
    return ImageError(f"There is no Docker Engine at {_address()}: {reason}.", hint)
