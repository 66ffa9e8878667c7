"""Flags that were not given: the runtime follows from the cluster configuration, the strategy from the model.

Each is said in a note; giving the flag overrides it.  Reads files, and sends nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from elasticdl_client.choices import DistributionStrategy, FrameworkName, Runtime
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.flag_sources import GivenFlags
from elasticdl_client.flags import Group, flag_of, parse
from elasticdl_client.job_spec import JobSpec, flag_fields
from elasticdl_client.kubernetes import api
from elasticdl_client.model_framework import framework_of
from elasticdl_client.model_source import dataset_flags

_OF_BOTH = ("envs", "restart_policy")  # flags of Kubernetes that the local runtime has, too


def infer(job_type: str, given: GivenFlags) -> GivenFlags:
    """Return the flags of a job with those that follow from them, and notes on what differs from the defaults.

    Raises:
        FlagError: --framework is none that there is.
    """
    inferred: dict[str, object] = {}
    notes = []
    if "runtime" not in given.values:
        inferred["runtime"], why = infer_runtime(job_type, given)
        if inferred["runtime"] is Runtime.LOCAL:
            notes.append(f"--runtime=local, since {why}.")
    for name in _of_module(job_type, given.values):
        inferred[name] = OF_MODULE
        notes.append(f"--{name}={OF_MODULE}, since the module has one.")
    if why := _why_all_reduce(given.values):
        inferred["distribution_strategy"] = DistributionStrategy.ALL_REDUCE
        notes.append(f"--distribution_strategy=AllReduceStrategy, since {why}.")
    return replace(given, values={**given.values, **inferred}, notes=(*given.notes, *notes))


def infer_runtime(command: str, given: GivenFlags) -> tuple[Runtime, str]:
    """Return where a job runs that does not say it, and why.

    A flag of one runtime chooses it, unless it comes from the environment; else it is Kubernetes if there is a cluster.
    """
    chosen = runtime_of_flags(command, given)
    if chosen is not None:
        return chosen
    if not api.is_configured():
        return Runtime.LOCAL, "no cluster is configured (no kubeconfig)"
    try:
        connection = api.connect()
    except ElasticDLError:  # what `kind delete cluster` leaves behind
        return Runtime.LOCAL, f"{os.environ.get('KUBECONFIG') or '~/.kube/config'} names no cluster"
    if connection.context == api.IN_CLUSTER:
        return Runtime.KUBERNETES, "this is a pod of a cluster"
    return Runtime.KUBERNETES, f"a cluster is configured (context {connection.context})"


def runtime_of_flags(command: str, given: GivenFlags) -> tuple[Runtime, str] | None:
    """Return the runtime whose flags are given, not in the environment, and which is; None: none of one runtime is."""
    for name, field in flag_fields(command).items():
        flag = flag_of(field)
        if flag is None or name not in given.values or name in _OF_BOTH or given.is_from_environment(name):
            continue
        if flag.group is Group.LOCAL:
            return Runtime.LOCAL, f"--{name} is given"
        if flag.group is Group.KUBERNETES:
            return Runtime.KUBERNETES, f"--{name} is given"
    return None


def _of_module(job_type: str, values: Mapping[str, object]) -> list[str]:
    """Return the data flags that the module's `dataset()` stands for: none where the job's own data are named."""
    main = {"train": "training_data", "evaluate": "validation_data", "predict": "prediction_data"}.get(job_type)
    if main is None or values.get(main) or not values.get("model_def") or values.get("job_command"):
        return []
    zoo, model_def = str(values.get("model_zoo") or "."), str(values["model_def"])
    framework = parse("framework", values.get("framework", FrameworkName.AUTO), FrameworkName.AUTO)
    if framework_of(JobSpec(model_zoo=zoo, model_def=model_def, framework=framework)) is not FrameworkName.TENSORFLOW:
        return []
    found = dataset_flags(job_type, Path(os.path.expanduser(zoo)), model_def)
    return [name for name in found if not values.get(name)] if main in found else []


def _why_all_reduce(values: Mapping[str, object]) -> str:
    """Return why a job without a strategy has AllReduce; empty: it has the default."""
    if "distribution_strategy" in values or not values.get("model_def"):
        return ""
    if "num_ps_pods" in values:
        return "--num_ps_pods is 0" if str(values["num_ps_pods"]).strip() == "0" else ""
    framework = parse("framework", values.get("framework", FrameworkName.AUTO), FrameworkName.AUTO)
    zoo, model_def = str(values.get("code") or values.get("model_zoo", "")), str(values["model_def"])
    if framework_of(JobSpec(model_zoo=zoo, model_def=model_def, framework=framework)) is FrameworkName.TORCH:
        return f"{model_def} is written for PyTorch"
    return ""
