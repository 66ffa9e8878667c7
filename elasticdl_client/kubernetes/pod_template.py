"""Pod templates, --pod_template and those of one role: any field of a pod, merged over the pod that we make.

The merge is the strategic one of `kubectl patch`: maps are merged, lists of named things (containers, volumes, env, …)
by their names, other lists are replaced, null removes a field.  The container `elasticdl` is ours, others run beside
it.  Fields that a flag sets, or that the master depends on, are refused by their path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.resources import add_tolerations

OURS = "elasticdl"
"""The name in a template of the container that runs the job's process."""

_HINT = "It is YAML or JSON: metadata (labels, annotations) and spec, as in the pod template of a Deployment."
_KEYS = {  # of lists that are merged entry by entry: the key of an entry
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets"), "name"),
    **dict.fromkeys(("resourceClaims", "claims", "schedulingGates"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_WHOLE = frozenset({"env", "volumes"})  # an entry replaces the one of its name: it has one source
_OF_THE_MASTER = "The master sets it: it finds its pods by it and starts their successors."
_REFUSED = {
    "spec.restartPolicy": "The master replaces pods; --restart_policy is that of the master.",
    "spec.terminationGracePeriodSeconds": _OF_THE_MASTER,
    "spec.activeDeadlineSeconds": "Pods that the kubelet ends would be replaced without end; leave it out.",
    "spec.ephemeralContainers": "They are added to running pods, by `kubectl debug`.",
    "spec.serviceAccount": "Use --service_account and --worker_service_account.",
    "spec.serviceAccountName": "Use --service_account and --worker_service_account.",
    "spec.containers[elasticdl].image": "Use --image_name and --worker_image.",
    "spec.containers[elasticdl].imagePullPolicy": "Use --image_pull_policy.",
    "spec.containers[elasticdl].command": _OF_THE_MASTER,
    "spec.containers[elasticdl].args": _OF_THE_MASTER,
    "spec.containers[elasticdl].workingDir": _OF_THE_MASTER,
    "spec.containers[elasticdl].terminationMessagePath": _OF_THE_MASTER,
    "spec.containers[elasticdl].terminationMessagePolicy": _OF_THE_MASTER,
    "spec.containers[elasticdl].resources.requests": "Use --worker_resource_request and those of the other roles.",
    "spec.containers[elasticdl].resources.limits": "Use --worker_resource_limit and those of the other roles.",
}
_OUR_VARIABLES = re.compile(r"(ELASTICDL|MASTER|WORKER|PS)_\w+|HOME|PYTHONUNBUFFERED|MY_POD_IP|TF_CONFIG")
_OUR_VOLUMES = ("elasticdl-token", "elasticdl-job")
_NEEDED = frozenset({"metadata", "spec", "labels", "containers", "volumes", "tolerations", "env", "volumeMounts"})
_LIST = re.compile(r"[Ll]ist\[(.+)\]")


def load(text: str) -> dict[str, Any]:
    """Return the template of a flag: JSON, or the path of a YAML or JSON file; empty text is an empty template.

    Raises:
        FlagError: the file cannot be read, or is no mapping.
    """
    if not text:
        return {}
    import yaml  # here: most jobs have no template

    try:
        is_json = text.lstrip().startswith("{")
        found = json.loads(text) if is_json else yaml.safe_load(Path(text).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{text} cannot be read: {error}", "Name a file of this machine.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise FlagError(f"{text[:80]} is neither YAML nor JSON: {' '.join(str(error).split())}", _HINT) from error
    if not isinstance(found, dict):
        raise FlagError(f"{text[:80]} holds no mapping", _HINT)
    return {key: value for key, value in found.items() if key not in ("apiVersion", "kind")}


def compact(text: str) -> str:
    """Return the template of a flag as JSON, for pods: they have not the client's file."""
    return json.dumps(load(text), separators=(",", ":")) if text else ""


def check(text: str) -> str:
    """Check the flag: fields, their types, and refused ones.

    Raises:
        FlagError: with the path of what is wrong.
    """
    template = load(text)
    if not template:
        return "" if not text else "has neither metadata nor spec"
    _check_fields(template, "V1PodTemplateSpec", "")
    metadata = template.get("metadata") or {}
    for key in metadata:
        if key not in ("labels", "annotations"):
            raise _refused(f"metadata.{key}", "A template has labels and annotations; the master names and owns pods.")
    for label in metadata.get("labels") or {}:
        if label in (names.APP_LABEL, names.STATUS_LABEL) or label.startswith("elasticdl-"):
            raise _refused(f"metadata.labels[{label}]", _OF_THE_MASTER)
    _check_spec(template.get("spec") or {})
    return ""


def apply(manifest: dict[str, Any], template: Mapping[str, Any]) -> None:
    """Merge a template into the manifest of a pod.

    Args:
        manifest: with our container as its only one; changed.
        template: as `load` returns it.
    """
    metadata, spec = template.get("metadata") or {}, dict(template.get("spec") or {})
    for part in ("labels", "annotations"):
        if metadata.get(part):
            manifest["metadata"][part] = {**manifest["metadata"].get(part, {}), **metadata[part]}
    own = manifest["spec"]["containers"][0]["name"]
    containers = [
        {**container, "name": own} if _is_ours(container) else container for container in spec.pop("containers", [])
    ]
    add_tolerations(manifest["spec"], spec.pop("tolerations", []))
    manifest["spec"] = _merged(manifest["spec"], {**spec, "containers": containers})


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in over.items():
        known = found.get(name)
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(known, dict):
            found[name] = _merged(known, value)
        elif isinstance(value, list) and isinstance(known, list) and name in _KEYS:
            found[name] = _merged_list(known, value, name)
        else:
            found[name] = value
    return found


def _merged_list(base: list[Any], over: list[Any], name: str) -> list[Any]:
    key = _KEYS[name]
    found = {entry.get(key): entry for entry in base}
    for entry in over:
        known = {} if name in _WHOLE else found.get(entry.get(key), {})
        found[entry.get(key)] = _merged(known, entry)
    return list(found.values())


def _is_ours(container: Mapping[str, Any]) -> bool:
    return bool(container.get("name", OURS) == OURS)


def _check_spec(spec: Mapping[str, Any]) -> None:
    for field in spec:
        if hint := _REFUSED.get(f"spec.{field}"):
            raise _refused(f"spec.{field}", hint)
    for volume in spec.get("volumes") or []:
        if volume.get("name") in _OUR_VOLUMES:
            raise _refused(f"spec.volumes[{volume['name']}]", _OF_THE_MASTER)
    ours = [container for container in spec.get("containers") or [] if _is_ours(container)]
    if len(ours) > 1:
        raise FlagError(f"spec.containers has the container {OURS} twice", "Write one; others have names of their own.")
    for container in ours:
        _check_ours(container)


def _check_ours(container: Mapping[str, Any]) -> None:
    path = f"spec.containers[{OURS}]"
    resources = container.get("resources") or {}
    for field in (*container, *(f"resources.{field}" for field in resources)):
        if hint := _REFUSED.get(f"{path}.{field}"):
            raise _refused(f"{path}.{field}", hint)
    for variable in container.get("env") or []:
        if _OUR_VARIABLES.fullmatch(str(variable.get("name"))):
            raise _refused(f"{path}.env[{variable['name']}]", _OF_THE_MASTER)
    for mount in container.get("volumeMounts") or []:
        if str(mount.get("mountPath")).rstrip("/") in (names.TOKEN_DIRECTORY, names.JOB_DIRECTORY):
            raise _refused(f"{path}.volumeMounts[{mount['mountPath']}]", _OF_THE_MASTER)


def _refused(path: str, hint: str) -> FlagError:
    return FlagError(f"may not set {path}", hint)


def _check_fields(value: Any, kind: str, path: str) -> None:
    """Compares a value with a type of the API as the package kubernetes describes it.

    Raises:
        FlagError: a field that there is not, or a value of another type.
    """
    import kubernetes.client

    if value is None:
        if path.rpartition(".")[2] in _NEEDED:
            raise FlagError(f"{path} is empty", _HINT)
        return
    if (item := _LIST.fullmatch(kind)) is not None:
        if not isinstance(value, list):
            raise _wrong_type(path, "a list")
        for number, entry in enumerate(value):
            name = entry.get("name") if isinstance(entry, dict) else None
            _check_fields(entry, item[1], f"{path}[{name or number}]")
        return
    if kind.lower().startswith("dict"):
        if not isinstance(value, dict) or not all(isinstance(one, str) for pair in value.items() for one in pair):
            raise _wrong_type(path, "a mapping of texts to texts; numbers and true need quotes")
        return
    model = getattr(kubernetes.client, kind, None)
    if model is None:
        _check_scalar(value, kind, path)
        return
    if not isinstance(value, dict):
        raise _wrong_type(path or "the template", "a mapping")
    fields = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
    for name, content in value.items():
        below = f"{path}.{name}" if path else str(name)
        if name not in fields:
            near = nearest(str(name), list(fields))
            raise FlagError(
                f"has the field {below}, which {path or 'a pod template'} does not have",
                (f"Did you mean {near}? " if near else "") + "A field that is newer than the installed package "
                f"kubernetes {kubernetes.__version__} needs a newer one: pip install --upgrade kubernetes.",
            )
        _check_fields(content, fields[name], below)


def _check_scalar(value: Any, kind: str, path: str) -> None:
    wanted: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
    if kind not in wanted:  # object: a number or a text, as ports of probes are
        return
    if not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "bool"):
        words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
        raise _wrong_type(path, words[kind])


def _wrong_type(path: str, wanted: str) -> FlagError:
    return FlagError(f"{path} is not {wanted}", _HINT)
