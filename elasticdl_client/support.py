"""What the flags can say and this version cannot do: refused by name, never ignored."""

from __future__ import annotations

import json

from elasticdl_client.choices import DistributionStrategy, JobType, NanPolicy, Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.flags import Group
from elasticdl_client.job_spec import JobSpec, changed_flags


def check(spec: JobSpec) -> None:
    """Refuses a job that needs what is not there yet.

    Raises:
        FlagError: naming the flag, and what works instead.
    """
    if spec.job_type is not JobType.TRAIN:
        raise FlagError(
            f"`elasticdl {spec.job_type}` is not in this version yet.",
            "`elasticdl train` with --validation_data evaluates, also every --evaluation_steps.",
        )
    if spec.job_command:
        raise _missing("--job_command", "training scripts of your own cannot run yet", "Use --model_def.")
    if spec.log_file_path and spec.runtime is Runtime.KUBERNETES:
        raise _missing("--log_file_path", "pods print to their log alone", "`elasticdl logs JOB` shows it.")
    if spec.distribution_strategy is DistributionStrategy.ALL_REDUCE:
        raise _missing(
            "--distribution_strategy=AllReduceStrategy",
            "workers cannot form a group yet",
            "Use ParameterServerStrategy or Local.",
        )
    if spec.nan_policy is NanPolicy.SKIP:
        raise _missing(
            "--nan_policy=skip",
            "minibatches cannot be left out yet",
            "Leave it out: a loss that is not finite fails the job, and is never in the model.",
        )
    _check_parameter_server(spec)


def _check_parameter_server(spec: JobSpec) -> None:
    if not spec.use_async:
        raise _missing(
            "--use_async=false", "parameter servers do not keep rounds yet", "Leave it out: training is asynchronous."
        )
    if spec.get_model_steps > 1:
        raise _missing(
            f"--get_model_steps={spec.get_model_steps}",
            "dense parameters are fetched in each step",
            "Leave it out: fetching overlaps with the computation.",
        )
    if spec.max_staleness:
        raise _missing(
            f"--max_staleness={spec.max_staleness}",
            "staleness is not bounded yet",
            "Leave it out, or use fewer workers.",
        )
    if spec.lr_staleness_modulation:
        raise _missing(
            "--lr_staleness_modulation",
            "the learning rate does not depend on staleness yet",
            "Leave it out, or choose a lower learning rate.",
        )


def _missing(flag: str, why: str, hint: str) -> FlagError:
    return FlagError(f"{flag} is not in this version yet: {why}.", hint)


def notes(spec: JobSpec) -> list[str]:
    """What to tell the user of flags that have no effect."""
    if spec.runtime is Runtime.KUBERNETES:
        return _notes_on_kubernetes(spec)
    names = [
        f"--{name}"
        for name, found in changed_flags(spec).items()
        if found.group is Group.KUBERNETES and name not in ("envs", "restart_policy")
    ]
    return [f"{', '.join(names)}: for Kubernetes, without effect with --runtime=local."] if names else []


def _notes_on_kubernetes(spec: JobSpec) -> list[str]:
    found = []
    if spec.cluster_spec and any(part != "service_spec" for part in json.loads(spec.cluster_spec_json or "{}")):
        found.append("--cluster_spec is given, so what --cluster_spec_json says of pods is without effect.")
    if spec.dry_run and spec.yaml:
        found.append("--dry_run and --yaml: the manifests are printed and written; nothing is submitted.")
    return found
