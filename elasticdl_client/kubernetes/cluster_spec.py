"""The cluster specification given as JSON: its keys, checked before anything is submitted, and what they change.

`pod_spec` is for all pods, `master_pod_spec`, `ps_pod_spec` and `worker_pod_spec` for one role each; `service_spec`
holds fields of the specification of every Service.  The one given as a Python file is in cluster_plugin.py.
"""

from __future__ import annotations

import json
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes.placement import add_tolerations

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
    """Puts what the JSON says of a role's pods into a pod's manifest; what we set ourselves stays."""
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
