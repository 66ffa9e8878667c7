"""Where the flags of a job come from: the command line, a file, the environment; the first that has one holds.

`-f job.yaml` is a mapping of flags to values.  `ELASTICDL_NAMESPACE=team-a` is the default of --namespace, and so on
for every flag but those that name one job.

`infer` adds flags that were not given: the runtime by the cluster configuration, the strategy by the model.

Each is said in a note; giving the flag overrides it.  Reads files, and sends nothing.

Values that this version does not support are refused by name, never ignored.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from elasticdl_client.choices import DistributionStrategy, FrameworkName, JobType, Runtime
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import ElasticDLError, FlagError
from elasticdl_client.flags import Group, flag_of, notes_on_retired, parse, resolve_retired, split_arguments
from elasticdl_client.job_spec import JobSpec, changed_flags, flag_defaults, flag_fields
from elasticdl_client.kubernetes import api
from elasticdl_client.model_source import dataset_flags
from elasticdl_client.secret_values import hide_in_flag
from elasticdl_client.storage_kinds import is_remote
from elasticdl_client.zoo_modules import framework_of

PREFIX = "ELASTICDL_"
FILE = ("-f", "--filename")
SHORT = {"-n": "--namespace"}
_NEAR = 0.93  # of the whole names, which begin alike
_OF_ONE_JOB = ("job_name", "job_dir")
_HINT = "It holds one flag a line: `num_workers: 4`."


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """The flags of a job.

    Attributes:
        values: by name; texts, or plain values of a file.
        origins: the file or variable that a value comes from, if that is not the command line.
        notes: messages for the user.
    """

    values: dict[str, object]
    origins: dict[str, str]
    notes: tuple[str, ...]

    def is_from_environment(self, name: str) -> bool:
        """Return whether a flag has its value from the environment, as a default of all jobs."""
        return self.origins.get(name) == f"{PREFIX}{name.upper()}"

    def located(self, error: FlagError) -> FlagError:
        """Return the same error with the file or variable that sets the flag."""
        flag = re.search(r"--(\w+)", error.what)
        origin = self.origins.get(flag[1]) if flag else None
        return FlagError(f"{origin}: {error.what}", error.hint) if origin else error


def gather(job_type: str, arguments: Sequence[str], environment: Mapping[str, str]) -> GivenFlags:
    """Return the flags of a job from all sources.

    Args:
        arguments: Arguments of the command line after the command.

    Raises:
        FlagError: an argument that is no flag; a file that cannot be read, or is of another command.
    """
    defaults = flag_defaults(job_type)
    path, rest = _split_file(arguments)
    filed = _read(path, job_type, defaults) if path else {}
    given = split_arguments(rest, defaults)
    variables = {name: f"{PREFIX}{name.upper()}" for name in defaults if name not in _OF_ONE_JOB}
    set_outside = {name: environment[variable] for name, variable in variables.items() if variable in environment}
    values, origins = resolve_retired(set_outside), {name: variables[name] for name in set_outside}
    for source, flags in ((path, resolve_retired(filed)), ("", resolve_retired(given))):
        values |= flags
        origins |= dict.fromkeys(flags, source)
    notes = notes_on_retired({**filed, **given})
    notes += [
        f"--{name}={hide_in_flag(name, value)} comes from {origins[name]}."
        for name, value in set_outside.items()
        if origins[name] == variables[name]
    ]
    notes += _notes_on_slips(environment, variables.values())
    return GivenFlags(values, origins, tuple(notes))


def _notes_on_slips(environment: Mapping[str, str], variables: Collection[str]) -> list[str]:
    """Return notes on variables that are almost those of flags: in a pod there are others with this prefix."""
    known = {f"{PREFIX}{field.name.upper()}" for field in fields(JobSpec)}
    found = []
    for name in sorted(name for name in environment if name.startswith(PREFIX) and name not in known):
        near = get_close_matches(name, variables, n=1, cutoff=_NEAR)
        if near and not name.startswith(f"{near[0]}_"):
            found.append(f"{name} is the variable of no flag; {near[0]} would be.")
    return found


def _split_file(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the file of -f, empty if there is none, and the other arguments."""
    path, rest, remaining = "", [], iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name not in FILE:
            rest.append(f"{SHORT.get(name, name)}{equals}{value}")
            continue
        if path:
            raise FlagError("-f is given twice.", "Give it once.")
        path = value if equals else next(remaining, "")
        if not path:
            raise FlagError("-f needs a file.", "Write -f job.yaml, or -f - for standard input.")
    return path, rest


def _read(path: str, job_type: str, defaults: Mapping[str, object]) -> dict[str, object]:
    import yaml  # here: most commands need none

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        found, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{path} cannot be read: {error}.", "Give the path of a YAML file to -f.") from error
    except (yaml.YAMLError, ValueError) as error:  # of a date
        raise FlagError(f"{path} is not YAML: {error}.", _HINT) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise FlagError(f"{path} is not a mapping of flags to values.", _HINT)
    if repeated := _repeated(node):
        raise FlagError(f"{path}: {repeated} is given twice.", "Give it once.")
    written = _texts(node)
    described = found.pop("job_type", job_type)
    if described != job_type:
        raise FlagError(
            f"{path} describes a job of `elasticdl {described}`.", f"Run `elasticdl {described} -f {path}`."
        )
    for name, value in found.items():
        is_text = isinstance(defaults.get(name.replace("-", "_")), str) or ":" in written.get(name, "")
        if is_text and name in written and value is not None:
            found[name] = written[name]
        elif isinstance(value, dict) and name.replace("-", "_").endswith(("pod_template", "cluster_spec_json")):
            found[name] = json.dumps(value)
        elif not isinstance(value, str | int | float):
            raise FlagError(f"{path}: {name} is {_kind(value)}, not one value.", _text_hint(name, value))
    return {name.replace("-", "_"): value for name, value in found.items()}


def _texts(mapping: Any) -> dict[str, str]:
    """The plain values of a mapping as they are written: YAML 1.1 takes 2:16 for 136, 1.10 for 1.1, yes for true."""
    return {key.value: value.value for key, value in mapping.value if isinstance(value.value, str)}


def _repeated(mapping: Any) -> str:
    """Return the first flag that a mapping has twice, though its value shows one; empty: none."""
    keys = [key.value.replace("-", "_") for key, _ in mapping.value]
    return next((name for number, name in enumerate(keys) if name in keys[:number]), "")


def _text_hint(name: str, value: object) -> str:
    if not isinstance(value, dict):
        return 'Write lists as texts: "a.csv,b.csv".'
    example = "units=64;name=wide" if name.endswith(("_params", "-params")) else "A=1,B=2"
    return f'Write mappings as texts: {name}: "{example}".'


def _kind(value: object) -> str:
    return {"NoneType": "empty", "list": "a list", "dict": "a mapping"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


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
    except ElasticDLError:  # after `kind delete cluster`
        return Runtime.LOCAL, f"{os.environ.get('KUBECONFIG') or '~/.kube/config'} names no cluster"
    if connection.context == api.IN_CLUSTER:
        return Runtime.KUBERNETES, "this is a pod of a cluster"
    return Runtime.KUBERNETES, f"a cluster is configured (context {connection.context})"


def runtime_of_flags(command: str, given: GivenFlags) -> tuple[Runtime, str] | None:
    """Return the runtime whose flags are given, not in the environment, and which is; None: none of one runtime is."""
    for name, field in flag_fields(command).items():
        flag = flag_of(field)
        if flag is None or name in _OF_BOTH or given.is_from_environment(name):
            continue
        if str(given.values.get(name, "")) == "":  # left out, or as `--job_dir=$DIR` without DIR
            continue
        if flag.group is Group.LOCAL and not (name == "job_dir" and is_remote(str(given.values[name]))):
            return Runtime.LOCAL, f"--{name} is given"
        if flag.group is Group.KUBERNETES:
            return Runtime.KUBERNETES, f"--{name} is given"
    return None


def _of_module(job_type: str, values: Mapping[str, object]) -> list[str]:
    """Return the data flags that the module's `dataset()` stands for: none where the job's own data are named."""
    main = {"train": "training_data", "evaluate": "validation_data", "predict": "prediction_data"}.get(job_type)
    if main is None or values.get(main) or not values.get("model_def") or values.get("job_command"):
        return []
    if _framework(values) is not FrameworkName.TENSORFLOW:
        return []
    found = dataset_flags(job_type, Path(_zoo(values)), str(values["model_def"]))
    return [name for name in found if not values.get(name)] if main in found else []


def _why_all_reduce(values: Mapping[str, object]) -> str:
    """Return why a job without a strategy has AllReduce; empty: it has the default."""
    if "distribution_strategy" in values or not values.get("model_def"):
        return ""
    if "num_ps_pods" in values:
        return "--num_ps_pods is 0" if str(values["num_ps_pods"]).strip() == "0" else ""
    return f"{values['model_def']} is written for PyTorch" if _framework(values) is FrameworkName.TORCH else ""


def _framework(values: Mapping[str, object]) -> FrameworkName:
    framework = parse("framework", values.get("framework", FrameworkName.AUTO), FrameworkName.AUTO)
    return framework_of(JobSpec(model_zoo=_zoo(values), model_def=str(values["model_def"]), framework=framework))


def _zoo(values: Mapping[str, object]) -> str:
    """Return the directory of this machine that holds the model's module."""
    return os.path.expanduser(str(values.get("code") or values.get("model_zoo") or "."))


def check(spec: JobSpec) -> None:
    """Refuse a job that needs something that does not exist yet.

    Raises:
        FlagError: naming the flag, and alternatives.
    """
    if spec.distribution_strategy is DistributionStrategy.LOCAL:
        _check_local_strategy(spec)


def _check_local_strategy(spec: JobSpec) -> None:
    if spec.skips_not_finite:
        raise _missing(
            "--nan_policy=skip with --distribution_strategy=Local",
            "the one worker's model has taken a minibatch before it is looked at",
            "Leave it out: a loss that is not finite fails the job. Or use ParameterServerStrategy.",
        )
    if spec.checkpoint_dir_for_init and spec.job_type is JobType.TRAIN:
        raise _missing(
            "--checkpoint_dir_for_init with --distribution_strategy=Local",
            "the one worker begins with the model's own initial values",
            "Use AllReduceStrategy, which takes one worker, too; a model of Keras trains with "
            "ParameterServerStrategy as well.",
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
