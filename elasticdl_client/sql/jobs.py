"""The jobs that statements stand for: their flags, the command that is printed, and their run on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client import flag_sources, local
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import FlagError, JobFailed
from elasticdl_client.flag_sources import GivenFlags, gather
from elasticdl_client.flags import Group, flag_of
from elasticdl_client.job_spec import JobSpec, flag_fields, unknown_flag
from elasticdl_client.secret_values import hide_in_flag
from elasticdl_client.sql.estimators import Task, is_own
from elasticdl_client.sql.models import StoredModel

_MODULE = "elasticdl.tabular.estimators"
_LONGEST_NAME = 40  # of a job
OF_STATEMENT = frozenset(
    {
        *("model_zoo", "model_def", "model_params", "framework", "feed", "loss", "optimizer", "eval_metrics_fn"),
        *("callbacks", "custom_data_reader", "prediction_outputs_processor", "training_data", "validation_data"),
        *("prediction_data", "prediction_outputs", "prediction_format", "prediction_columns", "data_reader_params"),
        *("columns", "label_column", "output", "metrics_output", "checkpoint_dir_for_init", "job_command"),
        *("need_tf_config", "max_bad_records", "code", "yaml"),
    }
)
"""Flags of jobs that follow from a statement."""


@dataclass(frozen=True, slots=True)
class JobFlags:
    """The flags of jobs that a user gives after the statement.

    Attributes:
        arguments: of the command line.
        environment: with the defaults of flags.
        inferred: where the jobs run if neither says so.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    inferred: Runtime = Runtime.LOCAL

    def check(self, job_types: set[JobType]) -> None:
        """Check the flags before any statement is run.

        Args:
            job_types: of the jobs that the statements stand for.

        Raises:
            FlagError: one is unknown to all of these jobs, or follows from the statement.
        """
        known = {name for job_type in job_types for name in flag_fields(job_type)} | {"runtime"}
        if self.runtime is Runtime.KUBERNETES:  # for TO EXPLAIN, which is no type of job of its own
            known |= self.of_group(Group.KUBERNETES).keys()
        given = self.given
        for name in given:
            if name in OF_STATEMENT:
                raise FlagError(f"--{name} follows from the statement.", "Leave it out.")
            if name not in known and name in flag_fields(JobType.TRAIN) and not job_types:
                raise FlagError(f"--{name} is a flag of jobs, and these statements run none.", "Leave it out.")
            if name not in known:
                raise unknown_flag(name, sorted(job_types)[0] if job_types else JobType.TRAIN)
        if str(given.get("runtime", Runtime.LOCAL)).lower() not in list(Runtime):
            raise FlagError(f"--runtime={given['runtime']} is neither local nor kubernetes.", "Leave it out for local.")

    @property
    def runtime(self) -> Runtime:
        """The runtime of the jobs: from a flag or its variable, else inferred."""
        wanted = str(self.gathered.values.get("runtime", self.inferred)).lower()
        return Runtime.KUBERNETES if wanted == Runtime.KUBERNETES else Runtime.LOCAL

    @property
    def gathered(self) -> GivenFlags:
        """Return the flags of the command line and the environment.

        Raises:
            FlagError: an argument is none.
        """
        return gather(JobType.TRAIN, self.arguments, self.environment)

    @property
    def given(self) -> dict[str, object]:
        """Return the flags of the command line.

        Raises:
            FlagError: an argument is none.
        """
        return gather(JobType.TRAIN, self.arguments, {}).values

    def of(self, job_type: JobType) -> dict[str, object]:
        """Return those that a job of a type has."""
        given = gather(job_type, self.arguments, self.environment)
        own = gather(job_type, self.arguments, {}).values
        known = flag_fields(job_type)
        found = {name: value for name, value in given.values.items() if name in own or name not in OF_STATEMENT}
        return {name: value for name, value in found.items() if name in known and name != "runtime"}

    def of_group(self, group: Group) -> dict[str, object]:
        """Return those of a group, and the name of the job."""
        fields = flag_fields(JobType.TRAIN)
        of_all = self.of(JobType.TRAIN)
        return {
            name: value
            for name, value in of_all.items()
            if name == "job_name" or ((found := flag_of(fields[name])) is not None and found.group is group)
        }


def name_of(kind: str, model: str, suffix: str) -> str:
    """Return the name of a job: letters, digits and dashes, at most as many as a job's name may have."""
    part = model[: _LONGEST_NAME - len(f"sql-{kind}--{suffix}")]
    return re.sub(r"[^a-z0-9]+", "-", f"sql-{kind}-{part}-{suffix}".lower()).strip("-")


def of_model(model: Path) -> dict[str, object]:
    """Return the flags that name the model of a description.

    Raises:
        JobError: the runtime package is not installed.
    """
    local.require_runtime()
    package = importlib.util.find_spec("elasticdl")
    assert package is not None
    assert package.origin is not None
    return {
        "model_zoo": str(Path(package.origin).parents[1]),
        "model_def": f"{_MODULE}.custom_model",
        "model_params": f"description={model}",
    }


def of_own_model(estimator: str, zoo: str, params: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that name a model of the user's.

    Args:
        estimator: package.module.symbol.
        zoo: its --model_zoo.
        params: arguments of its function.
    """
    flags: dict[str, object] = {"model_zoo": os.path.abspath(os.path.expanduser(zoo)), "model_def": estimator}
    if params:
        flags["model_params"] = ";".join(f"{name}={value!r}" for name, value in params.items())
    return flags


def with_trained(job_type: JobType, model: StoredModel, given: JobFlags, suffix: str) -> dict[str, object]:
    """Return the flags of a job with a trained model, but those of its code, data and results.

    Args:
        given: by the user; they come first.
        suffix: of the job's name.
    """
    return {
        "checkpoint_dir_for_init": model.exported,
        "distribution_strategy": "Local",
        "job_name": name_of(str(job_type), model.name, suffix),
        **given.of(job_type),
        "columns": ",".join(one["name"] for one in model.found["inputs"]),
    }


def metrics_flag(estimator: str, task: Task) -> dict[str, object]:
    """Return --eval_metrics_fn of an estimator; none of a model of the user's, whose module has it."""
    return {} if is_own(estimator) else {"eval_metrics_fn": f"{task}_metrics"}


def spec_of(job_type: JobType, flags: Mapping[str, object]) -> JobSpec:
    """Return a job by its flags.

    Raises:
        FlagError: they are wrong, or do not fit together.
    """
    spec = JobSpec.from_flags(job_type, dict(flags))
    flag_sources.check(spec)
    return spec


def command_of(job_type: JobType, flags: Mapping[str, object]) -> str:
    """Return the command that stands for a job."""
    return " ".join(
        [
            "elasticdl",
            str(job_type),
            *(shlex.quote(f"--{name}={hide_in_flag(name, one)}") for name, one in flags.items()),
        ]
    )


def run(spec: JobSpec) -> None:
    """Run a job to its end.

    Raises:
        JobFailed: it has failed.
        ElasticDLError: it cannot be started.
    """
    sys.stdout.flush()
    code = local.run(spec)
    if code > 128:
        raise KeyboardInterrupt
    if code:
        raise JobFailed(
            f"The job {spec.job_name} of the statement has failed.",
            f"`elasticdl explain {spec.job_name} --runtime=local` says why.",
            code,
            "",
        )
