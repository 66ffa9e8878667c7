"""Values of flags that this version does not support: refused by name, never ignored."""

from __future__ import annotations

import json

from elasticdl_client.choices import DistributionStrategy, JobType, NanPolicy, Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.flags import Group
from elasticdl_client.job_spec import JobSpec, changed_flags


def check(spec: JobSpec) -> None:
    """Refuses a job that needs what is not there yet.

    Raises:
        FlagError: naming the flag, and alternatives.
    """
    if spec.distribution_strategy is DistributionStrategy.LOCAL:
        _check_local_strategy(spec)


def _check_local_strategy(spec: JobSpec) -> None:
    if spec.nan_policy is NanPolicy.SKIP:
        raise _missing(
            "--nan_policy=skip with --distribution_strategy=Local",
            "the one worker's model has taken a minibatch before it is looked at",
            "Leave it out: a loss that is not finite fails the job. Or use ParameterServerStrategy.",
        )
    if spec.checkpoint_dir_for_init and spec.job_type is JobType.TRAIN:
        raise _missing(
            "--checkpoint_dir_for_init with --distribution_strategy=Local",
            "the one worker begins with the model's own initial values",
            "Use ParameterServerStrategy; one worker and one server run on one machine, too.",
        )


def _missing(flag: str, why: str, hint: str) -> FlagError:
    return FlagError(f"{flag} is not in this version yet: {why}.", hint)


def notes(spec: JobSpec) -> list[str]:
    """Return the notes on flags that have no effect."""
    found = _notes_on_rounds(spec)
    if spec.runtime is Runtime.KUBERNETES:
        return found + _notes_on_kubernetes(spec)
    names = [
        f"--{name}"
        for name, found in changed_flags(spec).items()
        if found.group is Group.KUBERNETES and name not in ("envs", "restart_policy")
    ]
    if names:
        found.append(f"{', '.join(names)}: for Kubernetes, without effect with --runtime=local.")
    return found


def _notes_on_rounds(spec: JobSpec) -> list[str]:
    most = max(spec.num_workers, spec.max_workers)
    if spec.use_async or spec.grads_to_wait <= most * spec.num_processes_per_worker:
        return []
    name = "max_workers" if spec.max_workers else "num_workers"
    excess = f"--grads_to_wait={spec.grads_to_wait} is more than --{name}={most}"
    return [f"{excess}: a round closes when every worker that trains has sent its gradient."]


def _notes_on_kubernetes(spec: JobSpec) -> list[str]:
    found = []
    if spec.cluster_spec and any(part != "service_spec" for part in json.loads(spec.cluster_spec_json or "{}")):
        found.append("--cluster_spec is given, so the settings of --cluster_spec_json for pods have no effect.")
    if spec.dry_run and spec.yaml:
        found.append("--dry_run and --yaml: the manifests are printed and written; nothing is submitted.")
    return found
