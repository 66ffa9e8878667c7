"""The cluster specification given as JSON: its keys, checked before anything is submitted."""

from __future__ import annotations

import json

_POD_KEYS = {"labels", "annotations", "affinity", "tolerations", "env"}
_PARTS = {"pod_spec", "master_pod_spec", "ps_pod_spec", "worker_pod_spec", "service_spec"}


def check_cluster_spec_json(text: str) -> str:
    """The check of the flag: what is wrong with it, or nothing."""
    try:
        spec = json.loads(text)
    except ValueError as error:
        return f"is not JSON: {error}"
    if not isinstance(spec, dict):
        return "must be a JSON object"
    for part, content in spec.items():
        if part not in _PARTS:
            return f"has the key '{part}', which is none of {', '.join(sorted(_PARTS))}"
        if not isinstance(content, dict):
            return f"'{part}' must be a JSON object"
        unknown = set() if part == "service_spec" else set(content) - _POD_KEYS
        if unknown:
            return f"'{part}' has the key '{min(unknown)}', which is none of {', '.join(sorted(_POD_KEYS))}"
    return ""
