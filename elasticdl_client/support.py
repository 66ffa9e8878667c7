"""What the flags can say and this version cannot do: refused by name, never ignored."""

from __future__ import annotations

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
    if spec.runtime is Runtime.KUBERNETES:
        raise _missing("--runtime=kubernetes", "jobs cannot be submitted yet", "Give --runtime=local.")
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
    """What to tell the user of flags that have no effect on the local runtime."""
    names = [
        f"--{name}"
        for name, found in changed_flags(spec).items()
        if found.group is Group.KUBERNETES and name not in ("envs", "restart_policy")
    ]
    if not names or spec.runtime is Runtime.KUBERNETES:
        return []
    return [f"{', '.join(names)}: for Kubernetes, without effect with --runtime=local."]
