"""The cluster specification, as JSON or as a Python file: checked before anything is submitted, and its changes.

In JSON `pod_spec` is for all pods, `master_pod_spec`, `ps_pod_spec` and `worker_pod_spec` for one role each;
`service_spec` holds fields of the specification of every Service.

A Python file has an object `cluster` with `with_pod` and `with_service`. Each takes a model object of the kubernetes
package, V1Pod or V1Service, and returns it, changed. The file is the user's code: it runs in the client at submission
and in the master, which makes the other pods.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes.resources import add_tolerations

_OBJECTS = {"labels", "annotations", "affinity"}
_LISTS = {"tolerations", "env"}
_POD_KEYS = _OBJECTS | _LISTS
_HINT = (
    'For example --cluster_spec_json=\'{"worker_pod_spec": {"labels": {"team": "a"}}}\'. '
    "Other fields of pods: --pod_template, a YAML file."
)
_PARTS = {"pod_spec", "master_pod_spec", "ps_pod_spec", "worker_pod_spec", "service_spec"}


def parse_cluster_spec_json(text: str) -> dict[str, dict[str, Any]]:
    """Return the parts of the flag's value; empty text is an empty dict.

    Raises:
        FlagError: it is not JSON, or has keys that are not known.
    """
    try:
        spec = json.loads(text) if text else {}
    except ValueError as error:
        raise FlagError(f"is not JSON: {error}", _HINT) from error
    if not isinstance(spec, dict):
        raise FlagError("must be a JSON object", _HINT)
    for part, content in spec.items():
        if part not in _PARTS:
            raise FlagError(f"has the key '{part}', which is none of {', '.join(sorted(_PARTS))}", _HINT)
        if not isinstance(content, dict):
            raise FlagError(f"'{part}' must be a JSON object", _HINT)
        if part != "service_spec" and (complaint := _wrong_with(part, content)):
            raise FlagError(complaint, _HINT)
    return spec


def _wrong_with(part: str, content: dict[str, Any]) -> str:
    for key, value in content.items():
        if key not in _POD_KEYS:
            return f"'{part}' has the key '{key}', which is none of {', '.join(sorted(_POD_KEYS))}"
        if key in _OBJECTS and not isinstance(value, dict):
            return f"'{key}' of '{part}' must be a JSON object"
        if key in _LISTS and not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
            return f"'{key}' of '{part}' must be a list of JSON objects"
        if key == "env" and not all(isinstance(entry.get("name"), str) for entry in value):
            return f"'env' of '{part}' has an entry without a name"
    return ""


def adapt_pod(pod: dict[str, Any], role: str, text: str) -> None:
    """Put the JSON's fields for a role's pods into a pod's manifest; fields that we set stay."""
    spec = parse_cluster_spec_json(text)
    for part in (spec.get("pod_spec", {}), spec.get(f"{role}_pod_spec", {})):
        metadata = pod["metadata"]
        metadata["labels"] = {**part.get("labels", {}), **metadata["labels"]}
        if "annotations" in part:
            metadata["annotations"] = {**metadata.get("annotations", {}), **part["annotations"]}
        if "affinity" in part:
            pod["spec"]["affinity"] = part["affinity"]
        if "tolerations" in part:
            add_tolerations(pod["spec"], part["tolerations"])
        container = pod["spec"]["containers"][0]
        taken = {entry["name"] for entry in container["env"]}
        container["env"] = container["env"] + [entry for entry in part.get("env", []) if entry["name"] not in taken]


def adapt_service(service: dict[str, Any], text: str) -> None:
    """Puts what the JSON says of Services into a Service's manifest."""
    service["spec"] |= parse_cluster_spec_json(text).get("service_spec", {})


_PLUGIN_HINT = "It needs an object `cluster` with the methods with_pod(pod) and with_service(service), which return it."


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
        raise FlagError(f"--cluster_spec: `cluster` of {path} has no method {method}.", _PLUGIN_HINT)
    changed = client.sanitize_for_serialization(_guarded(path, f"{method} of {path}", lambda: change(model)))
    if not isinstance(changed, dict) or "metadata" not in changed or "spec" not in changed:
        raise FlagError(f"--cluster_spec: {method} of {path} did not return what it was given.", _PLUGIN_HINT)
    return changed


@functools.lru_cache(maxsize=1)  # the file may keep something from pod to pod
def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("elasticdl_cluster_spec", path)
    if not os.path.isfile(path) or spec is None or spec.loader is None:
        raise FlagError(f"--cluster_spec: {path} is not a Python file.", _PLUGIN_HINT)
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _guarded(path, path, lambda: loader.exec_module(module))
    if not hasattr(module, "cluster"):
        raise FlagError(f"--cluster_spec: {path} defines no `cluster`.", _PLUGIN_HINT)
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
