"""Changes by the user to the objects of a job: pod templates, and the cluster specification.

Pod templates, --pod_template and those of one role: any field of a pod, merged over the pod that we make.  The merge is
the strategic one of `kubectl patch`: maps are merged, lists of named things (containers, volumes, env, …) by their
names, other lists are replaced, null removes a field.  The container `elasticdl` is ours, others run beside it.  Fields
that a flag sets, or that the master depends on, are refused by their path.

The cluster specification, as JSON or as a Python file: checked before anything is submitted, and its changes.

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
import re
import traceback
from collections.abc import Callable, Mapping
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
    """Compare a value with a type of the API as the package kubernetes describes it.

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


_OBJECTS = {"labels", "annotations", "affinity"}
_LISTS = {"tolerations", "env"}
_POD_KEYS = _OBJECTS | _LISTS
_SPEC_HINT = (
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
        raise FlagError(f"is not JSON: {error}", _SPEC_HINT) from error
    if not isinstance(spec, dict):
        raise FlagError("must be a JSON object", _SPEC_HINT)
    for part, content in spec.items():
        if part not in _PARTS:
            raise FlagError(f"has the key '{part}', which is none of {', '.join(sorted(_PARTS))}", _SPEC_HINT)
        if not isinstance(content, dict):
            raise FlagError(f"'{part}' must be a JSON object", _SPEC_HINT)
        if part != "service_spec" and (complaint := _wrong_with(part, content)):
            raise FlagError(complaint, _SPEC_HINT)
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
    """Apply the part of the JSON about Services to a Service's manifest."""
    service["spec"] |= parse_cluster_spec_json(text).get("service_spec", {})


_PLUGIN_HINT = "It needs an object `cluster` with the methods with_pod(pod) and with_service(service), which return it."


def with_pod(path: str, pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod's manifest as the file changes it.

    Raises:
        FlagError: the file cannot be used, or raises.
    """
    return _changed(path, "with_pod", "V1Pod", pod)


def with_service(path: str, service: dict[str, Any]) -> dict[str, Any]:
    """Return a Service's manifest as the file changes it.

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
    """Run the user's code; its errors name its file and line."""
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
