"""The cluster specification given as a Python file: an object `cluster` with `with_pod` and `with_service`.

Each takes a model object of the kubernetes package, V1Pod or V1Service, and returns it, changed.  The file is the
user's code: it runs in the client at submission and in the master, which makes the other pods.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import traceback
from collections.abc import Callable
from typing import Any

from elasticdl_client.errors import FlagError

_HINT = "It needs an object `cluster` with the methods with_pod(pod) and with_service(service), which return it."


def with_pod(path: str, pod: dict[str, Any]) -> dict[str, Any]:
    """A pod's manifest as the file changes it.

    Raises:
        FlagError: the file cannot be used, or raises.
    """
    return _changed(path, "with_pod", "V1Pod", pod)


def with_service(path: str, service: dict[str, Any]) -> dict[str, Any]:
    """A Service's manifest as the file changes it.

    Raises:
        FlagError: the file cannot be used, or raises.
    """
    return _changed(path, "with_service", "V1Service", service)


def _changed(path: str, method: str, kind: str, manifest: dict[str, Any]) -> dict[str, Any]:
    from kubernetes.client import ApiClient

    client = ApiClient()
    # The class's converter of plain objects: its public one takes an answer of the server, in each version another.
    model = client._ApiClient__deserialize(manifest, kind)
    change = getattr(_load(path), method, None)
    if not callable(change):
        raise FlagError(f"--cluster_spec: `cluster` of {path} has no method {method}.", _HINT)
    changed = client.sanitize_for_serialization(_guarded(path, f"{method} of {path}", lambda: change(model)))
    if not isinstance(changed, dict) or "metadata" not in changed or "spec" not in changed:
        raise FlagError(f"--cluster_spec: {method} of {path} did not return what it was given.", _HINT)
    return changed


@functools.lru_cache(maxsize=1)  # the file may keep something from pod to pod
def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("elasticdl_cluster_spec", path)
    if not os.path.isfile(path) or spec is None or spec.loader is None:
        raise FlagError(f"--cluster_spec: {path} is not a Python file.", _HINT)
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _guarded(path, path, lambda: loader.exec_module(module))
    if not hasattr(module, "cluster"):
        raise FlagError(f"--cluster_spec: {path} defines no `cluster`.", _HINT)
    return module.cluster


def _guarded(path: str, what: str, action: Callable[[], Any]) -> Any:
    """The user's code, whose errors name its file and line."""
    try:
        return action()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else 0
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise FlagError(
            f"--cluster_spec: {what} raised {type(error).__name__} in line {line}: {said}",
            "Fix the file.",
        ) from error
