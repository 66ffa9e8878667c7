"""JobSpec: one train, evaluate or predict job, every flag once with its type, default, help and check.

Client, master, parameter servers and workers all import it, so it imports the standard library alone.  How text
becomes a value is in flags.py, which flags go together in contradictions.py, what this version lacks in support.py.
"""

from __future__ import annotations

# ruff: noqa: RUF009 (`flag` gives a `dataclasses.field`)
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from elasticdl_client import contradictions, flags
from elasticdl_client.checks import (
    above,
    at_least,
    between,
    check_columns,
    check_endpoint,
    check_job_command,
    check_job_name,
    check_readable_path,
    check_writable_directory,
)
from elasticdl_client.choices import (
    DistributionStrategy,
    JobType,
    LogFormat,
    LogLevel,
    NanPolicy,
    Remedy,
    Runtime,
    Tls,
    TrackerName,
)
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import FlagError
from elasticdl_client.flag_groups import (
    COMPUTATION,
    ComputationFlags,
    ModelFlags,
    OnePassFlags,
    StrategyFlags,
    fields_of_analysis,
)
from elasticdl_client.flags import TRAIN_ONLY, WITH_MODEL, Flag, Group, flag_of, nearest, parses
from elasticdl_client.flags import check as check_flag
from elasticdl_client.flags import parse as parse_flag
from elasticdl_client.kubernetes.flags import KubernetesFlags
from elasticdl_client.kubernetes.resources import num_gpus
from elasticdl_client.params import parse_envs, parse_params, parse_size, parse_trackers
from elasticdl_client.secret_values import hide_in_flag, is_secret_env
from elasticdl_client.worker_range import MAX_WORKERS, parse_flags

_EVALUATED = frozenset({JobType.TRAIN, JobType.EVALUATE})
_PREDICTED = frozenset({JobType.PREDICT})
_WRITING = frozenset({JobType.TRAIN, JobType.ANALYZE})
RUN = "run"
"""The command that trains a script of the user's; its flags are those of `train` that a script can have."""
_NOT_OF_SCRIPTS = frozenset(  # set by run, or by the script itself
    {
        *("job_command", "distribution_strategy", "num_ps_pods", "need_tf_config", "wait"),
        *("output", "checkpoint_dir_for_init", "label_column", "max_bad_records", "bad_records_dir", "strict_feed"),
        *("ps_resource_request", "ps_resource_limit", "ps_pod_priority"),
        *COMPUTATION,
    }
)
_GROUPS_NOT_OF_SCRIPTS = (Group.MODEL, Group.PARAMETER_SERVER)


@dataclass(frozen=True, slots=True)
class JobSpec(ModelFlags, ComputationFlags, OnePassFlags, StrategyFlags, KubernetesFlags):
    """See the module; the attributes have the flags' names, and `--help` describes each."""

    job_type: JobType = JobType.TRAIN

    # The job
    job_name: str = Group.JOB.flag(
        "", "Name of the job, unique in its namespace; part of every pod's name.", check=check_job_name
    )
    runtime: Runtime = Group.JOB.flag(
        Runtime.KUBERNETES,
        "Where pods run: kubernetes, or local: processes of this machine, the default where no cluster is configured.",
    )
    distribution_strategy: DistributionStrategy = Group.JOB.flag(
        DistributionStrategy.PARAMETER_SERVER,
        "ParameterServerStrategy, AllReduceStrategy (also AllreduceStrategy), which PyTorch models have by default, or "
        "Local: one worker, no servers.",
        jobs=WITH_MODEL,
    )
    num_workers: int = Group.JOB.flag(
        2,
        "Number of workers; the job runs with those that are available. 1 with the Local strategy. A range, 2:16, or "
        "auto: the number follows what another worker adds to the rate.",
        check=between(1, MAX_WORKERS),
    )
    max_workers: int = Group.JOB.flag(
        0,
        "Most workers of a job whose number follows the gain from --num_workers on; --num_workers=2:16 is short for "
        "both. 0: the number is fixed.",
        check=between(0, MAX_WORKERS),
    )
    min_gain: float = Group.JOB.flag(
        0.3,
        "With a range of workers: another worker must add more than this share of what one computes alone.",
        check=between(0.01, 1),
    )
    scaling_window: float = Group.JOB.flag(
        30.0,
        "With a range of workers: seconds over which the rate is measured before their number changes.",
        check=between(1, 86_400),
    )
    processes_per_worker: int = Group.JOB.flag(
        0,
        "Processes in the pod of each worker, which share its GPUs; each is a member of the group; 0: one for each GPU "
        "of --worker_resource_request, or one. A --job_command without AllReduceStrategy has one.",
        check=between(0, 64),
    )
    num_ps_pods: int = Group.JOB.flag(
        1, "Parameter servers; 0 with the Local and AllReduce strategies.", jobs=WITH_MODEL, check=between(0, 1024)
    )
    job_command: str = Group.JOB.flag(
        "",
        'Workers run this command, a script of your own, instead of a --model_def: "python train.py --rate=0.1".',
        jobs=TRAIN_ONLY,
        check=check_job_command,
    )
    need_tf_config: bool = Group.JOB.flag(
        False,
        "With --job_command: TensorFlow's own parameter servers (Estimator), found by TF_CONFIG.",
        jobs=TRAIN_ONLY,
    )
    tls: Tls = Group.JOB.flag(
        Tls.AUTO,
        "Encrypt calls between pods, which prove to each other by a certificate of the job that they belong to it: "
        "true, false, or auto: on Kubernetes, and with --encrypt.",
    )
    encrypt: bool = Group.JOB.flag(
        False, "Also encrypt what --tls does not: tensors to and from parameter servers, and the sums of AllReduce."
    )
    seed: int = Group.JOB.flag(
        0, "Seed of initial values, task order, shuffles and dropout.", check=between(0, 2**31 - 1)
    )
    log_level: LogLevel = Group.JOB.flag(LogLevel.INFO, "Log level of all pods.")
    log_format: LogFormat = Group.JOB.flag(
        LogFormat.TEXT, "Log entries of all pods as lines of text, or each as a JSON object in a line."
    )
    metrics_port: int = Group.JOB.flag(
        0, "Port at which the master serves metrics for Prometheus, as /metrics; 0: none.", check=between(0, 65535)
    )
    on_end: str = Group.JOB.flag(
        "",
        "URL (http, https) to which the job's status is posted as JSON when it has ended, well or not.",
        check=check_endpoint,
    )

    # Data
    training_data: str = Group.DATA.flag(
        "",
        "What to train on: files, a directory, a pattern, a table (sqlite:///…?table=…), or several, with commas.",
        jobs=TRAIN_ONLY,
    )
    validation_data: str = Group.DATA.flag(
        "", "Data to evaluate on: the same kinds of sources as to train on.", jobs=_EVALUATED
    )
    prediction_data: str = Group.DATA.flag(
        "", "Data to predict for: the same kinds of sources as to train on.", jobs=_PREDICTED
    )
    data_reader_params: str = Group.DATA.flag(
        "",
        'Parameters of the reader: "k=v;k2=v2", like --model_params.',
        check=parses(partial(parse_params, "data_reader_params")),
    )
    columns: str = Group.DATA.flag(
        "", "Columns of tables to read, with commas between; empty: all.", check=check_columns
    )
    label_column: str = Group.DATA.flag(
        "", "The column that is the label, where the module has no feed.", jobs=WITH_MODEL
    )
    records_per_shard: int = Group.DATA.flag(
        0, "Cut files and tables into shards of at most this many records; 0: do not cut.", check=at_least(0)
    )
    minibatch_size: int = Group.DATA.flag(
        64, "Records per minibatch of a worker.", jobs=WITH_MODEL, check=between(1, 2**31 - 1)
    )
    num_minibatches_per_task: int = Group.DATA.flag(
        8, "Minibatches per task, the unit handed to a worker.", jobs=WITH_MODEL, check=between(1, 2**31 - 1)
    )
    shuffle: bool = Group.DATA.flag(
        False, "Also permute the records inside each task; tasks are always permuted.", jobs=TRAIN_ONLY
    )

    # Training
    num_epochs: int = Group.TRAINING.flag(1, "Passes over the training data; 0 or less: endless.")
    max_step: int = Group.TRAINING.flag(0, "End training after this many minibatches; 0: no limit.", check=at_least(0))
    evaluation_steps: int = Group.TRAINING.flag(
        0, "Also evaluate every N model versions; 0: only at the end.", check=at_least(0)
    )
    evaluation_throttle_secs: float = Group.TRAINING.flag(
        0.0, "Also evaluate every N seconds; 0: never by time.", check=at_least(0)
    )
    evaluation_start_delay_secs: float = Group.TRAINING.flag(
        100.0,
        "With --evaluation_throttle_secs: seconds of training before the first such evaluation.",
        check=at_least(0),
    )
    tensorboard_log_dir: str = Group.TRAINING.flag(
        "",
        "Directory of event files for TensorBoard, also of storage (s3://…); empty: none, on the local runtime in the "
        "job's directory.",
        check=check_writable_directory,
    )
    track: str = Group.TRAINING.flag(
        "",
        "Experiment trackers that the master feeds, with commas between: tensorboard, mlflow, wandb. Their addresses "
        "and credentials are in their own variables, by --envs.",
        check=parses(parse_trackers),
    )
    log_loss_steps: int = Group.TRAINING.flag(100, "Log the loss every N model versions.", check=at_least(1))
    nan_policy: NanPolicy = Group.TRAINING.flag(
        NanPolicy.FAIL, "What to do if a loss or gradient is not finite: fail the job, or skip the minibatch."
    )

    # Checkpoints and output
    output: str = Group.CHECKPOINTS.flag(
        "",
        "Directory of the exported model, a URL of storage, too; or the file of an analysis; empty: none.",
        jobs=_WRITING,
        check=check_writable_directory,
    )
    checkpoint_dir: str = Group.CHECKPOINTS.flag(
        "",
        "Directory of checkpoints, a URL of storage, too; by default in the directory of --job_dir, if there is one.",
        jobs=TRAIN_ONLY,
        check=check_writable_directory,
    )
    checkpoint_steps: int = Group.CHECKPOINTS.flag(
        0, "Checkpoint every N model versions; 0: every 60 s.", jobs=TRAIN_ONLY, check=at_least(0)
    )
    keep_checkpoint_max: int = Group.CHECKPOINTS.flag(
        3, "Number of most recent checkpoints to keep; 0: all.", jobs=TRAIN_ONLY, check=at_least(0)
    )
    checkpoint_dir_for_init: str = Group.CHECKPOINTS.flag(
        "",
        "Initial model: a checkpoint (a version directory, or a directory of versions); evaluate and predict "
        "also load what --output wrote, a .keras file, a .pt file with a state_dict. A path, or a URL of storage.",
        jobs=WITH_MODEL,
        check=check_readable_path,
    )

    # Faults
    max_task_failures: int = Group.FAULTS.flag(
        3,
        "Fail the job after this many failures of one task, or this many consecutive worker crashes; after two, if "
        "both are the same error in the code of a --job_command before the first step.",
        check=at_least(1),
    )
    max_bad_records: int = Group.FAULTS.flag(
        0, "Number of records that may be excluded because feed raises on them.", check=at_least(0)
    )
    bad_records_dir: str = Group.FAULTS.flag(
        "",
        "Directory for these records and their errors, also of storage (s3://…); by default in the directory "
        "of --job_dir, if there is one.",
        check=check_writable_directory,
    )
    strict_feed: bool = Group.FAULTS.flag(
        False,
        "Fail the job when feed makes more or fewer samples of a task than it has records, before they are trained on.",
        jobs=WITH_MODEL,
    )
    lease_timeout: float = Group.FAULTS.flag(
        10.0, "Seconds without a heartbeat after which a worker's task is given to another worker.", check=above(0)
    )
    step_timeout: float = Group.FAULTS.flag(
        600.0,
        "Seconds in one minibatch after which a worker hangs in any case: while it compiles or exports, too.",
        check=above(0),
    )
    hang_timeout: float = Group.FAULTS.flag(
        300.0,
        "Seconds in one minibatch after which a worker hangs that has finished others, unless 20 times the longest of "
        "them is more; at most --step_timeout.",
        check=above(0),
    )
    hang_action: Remedy = Group.FAULTS.flag(
        Remedy.REPLACE,
        "What to do about a worker that hangs, after the stacks of its threads are in the master's log: replace it, or "
        "only report it.",
    )
    straggler_action: Remedy = Group.FAULTS.flag(
        Remedy.REPORT,
        "What to do about a worker that computes 1.5 times as long as the others for minutes: report it, or also "
        "replace it, at most one in 10 minutes.",
    )
    master_timeout: float = Group.FAULTS.flag(
        300.0, "Seconds that workers and parameter servers run without a master before they end.", check=above(0)
    )

    # Local runtime
    job_dir: str = Group.LOCAL.flag(
        "",
        "Directory of logs and state; empty: ~/.elasticdl/jobs/JOB. Or a URL of storage (s3://…) for state and "
        "checkpoints, on Kubernetes too, from which the job can be resumed on another machine or in another namespace.",
        check=check_writable_directory,
    )
    local_slots: int = Group.LOCAL.flag(
        0,
        "Maximum number of parameter servers and workers that run at once, others stay pending; 0: no limit.",
        check=at_least(0),
    )
    master_port: int = Group.LOCAL.flag(0, "Port of the master; 0: a free one.", check=between(0, 65535))

    @classmethod
    def from_flags(cls, job_type: str, mapping: Mapping[str, object]) -> JobSpec:
        """Make a job from flags: texts or typed values by name.

        Raises:
            FlagError: an unknown flag, a value of a wrong type or out of range, a contradiction, or one missing.
        """
        given = parse_flags(flags.resolve_retired(mapping))
        values: dict[str, object] = {}
        known = flag_fields(job_type)
        for name, value in given.items():
            if name not in known:
                raise unknown_flag(name, job_type)
            field = known[name]
            parsed = parse_flag(name, value, field.default)
            check_flag(name, parsed, field.default, _flag(field))
            values[name] = parsed
        strategy = values.get("distribution_strategy", DistributionStrategy.PARAMETER_SERVER)
        if strategy != DistributionStrategy.PARAMETER_SERVER:
            values.setdefault("num_ps_pods", 0)
        if strategy == DistributionStrategy.LOCAL:
            values.setdefault("num_workers", 1)
        if job_type == JobType.ANALYZE:
            values |= fields_of_analysis(values)
        if values.get("job_command") and not values.get("need_tf_config"):
            values.setdefault("num_ps_pods", 0)
        spec = cls(job_type=JobType(job_type), **values)  # type: ignore[arg-type]
        contradictions.check(spec)
        return spec

    def to_json(self) -> str:
        """Return all fields as a JSON object on one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Read the output of `to_json`.

        Raises:
            FlagError: not a job.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise FlagError(f"The job's specification is not JSON: {error}.") from error
        return cls._from_plain(values)

    def model_params_dict(self) -> dict[str, object]:
        """`model_params` as arguments by name."""
        return parse_params("model_params", self.model_params)

    def data_reader_params_dict(self) -> dict[str, object]:
        """`data_reader_params` as arguments by name."""
        return parse_params("data_reader_params", self.data_reader_params)

    @property
    def skips_not_finite(self) -> bool:
        """Whether minibatches with a NaN or an infinity are not applied to the model; else they end the job."""
        return self.nan_policy is NanPolicy.SKIP

    @property
    def has_default_feed(self) -> bool:
        """Whether the flags describe the data well enough for a module without a `feed`."""
        params = self.data_reader_params_dict()
        has_label = bool(self.label_column or params.get("label_col") or params.get("image_size"))
        return has_label or self.job_type is JobType.PREDICT

    @property
    def takes_dataset(self) -> bool:
        """Whether the data come from the module's `dataset()`."""
        return OF_MODULE in (self.training_data, self.validation_data, self.prediction_data)

    def envs_dict(self) -> dict[str, str]:
        """`envs` by name."""
        return parse_envs(self.envs)

    def secret_envs_dict(self) -> dict[str, str]:
        """Return the entries of `envs_dict` whose values are secret."""
        return {name: value for name, value in self.envs_dict().items() if is_secret_env(value)}

    def public(self) -> JobSpec:
        """Return the same job with all secret values hidden, so that it may be printed and stored unprotected."""
        hidden = {name: hide_in_flag(name, value) for name, value in self._texts().items()}
        return dataclasses.replace(self, **hidden)  # type: ignore[arg-type]

    def secrets(self) -> dict[str, str]:
        """Return the full values of flags with secrets; `with_secrets` puts them back into the `public` job."""
        return {name: value for name, value in self._texts().items() if hide_in_flag(name, value) != value}

    def with_secrets(self, secrets: Mapping[str, str]) -> JobSpec:
        """Return the complete job from its `public` part and its `secrets`."""
        return dataclasses.replace(self, **secrets)  # type: ignore[arg-type]

    @property
    def expires(self) -> bool:
        """Whether its master deletes the job some time after its end."""
        return self.ttl_after_finished >= 0

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """The names of `track`."""
        return parse_trackers(self.track)

    @property
    def uses_tls(self) -> bool:
        """Whether calls are encrypted, by `tls` and the runtime."""
        return self.tls is Tls.ON or (self.tls is Tls.AUTO and (self.encrypt or self.runtime is Runtime.KUBERNETES))

    @property
    def num_gpus_per_worker(self) -> int:
        """GPUs that the pod of each worker asks for; 0 on the local runtime, which asks for nothing."""
        if self.runtime is Runtime.LOCAL:
            return 0
        return num_gpus(self.worker_resource_request, self.worker_resource_limit)

    @property
    def num_processes_per_worker(self) -> int:
        """`processes_per_worker`, or one for each GPU; a command that trains in no group uses GPUs as it will."""
        has_group = self.distribution_strategy is DistributionStrategy.ALL_REDUCE
        default = self.num_gpus_per_worker if has_group or not self.job_command else 1
        return self.processes_per_worker or max(1, default)

    @property
    def embedding_threshold_bytes(self) -> int:
        """`embedding_threshold` in bytes."""
        return parse_size("embedding_threshold", self.embedding_threshold)

    def _texts(self) -> dict[str, str]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if flag_of(field)}
        return {name: value for name, value in values.items() if type(value) is str and value}

    @classmethod
    def _from_plain(cls, values: object) -> JobSpec:
        if not isinstance(values, dict) or values.get("job_type") not in list(JobType):
            raise FlagError("The job's specification is not an object with a job_type.")
        fields = {field.name: field for field in dataclasses.fields(cls) if flag_of(field)}
        parsed: dict[str, object] = {}
        for name, value in values.items():
            if name == "job_type":
                continue
            if name not in fields:
                raise unknown_flag(name, values["job_type"])
            parsed[name] = parse_flag(name, value, fields[name].default)
        if values["job_type"] == JobType.ANALYZE:
            parsed |= fields_of_analysis(parsed)
        return cls(job_type=JobType(values["job_type"]), **parsed)  # type: ignore[arg-type]


def flag_fields(command: str) -> dict[str, dataclasses.Field[object]]:
    """Return the flags of a command, a job's type or `RUN`, in the order of their groups."""
    kind = JobType.TRAIN if command == RUN else JobType(command)
    fields = [field for field in dataclasses.fields(JobSpec) if field.name != "job_type" and kind in _flag(field).jobs]
    if command == RUN:
        fields = [field for field in fields if _is_of_scripts(field)]
    groups = list(Group)
    return {field.name: field for field in sorted(fields, key=lambda field: groups.index(_flag(field).group))}


def _is_of_scripts(field: dataclasses.Field[object]) -> bool:
    is_of_models = _flag(field).group in _GROUPS_NOT_OF_SCRIPTS and field.name != "model_zoo"
    return not is_of_models and field.name not in _NOT_OF_SCRIPTS


def flag_defaults(command: str) -> dict[str, object]:
    """Default values by flag."""
    return {name: field.default for name, field in flag_fields(command).items()}


def changed_flags(spec: JobSpec) -> dict[str, Flag]:
    """Return the flags of a job that differ from their defaults."""
    fields = flag_fields(spec.job_type)
    return {name: _flag(field) for name, field in fields.items() if getattr(spec, name) != field.default}


def _flag(field: dataclasses.Field[object]) -> Flag:
    found = flag_of(field)
    assert found is not None, field.name
    return found


def unknown_flag(name: str, command: str) -> FlagError:
    """Return the error of a flag that a command does not have."""
    commands = [kind.value for kind in JobType if name in flag_fields(kind)]
    if commands:
        return FlagError(f"--{name} is a flag of {' and '.join(commands)}, not of {command}.", "Leave it out.")
    near = nearest(name, list(flag_fields(command)))
    return FlagError(
        f"Unknown flag --{name}.",
        f"Did you mean --{near}?" if near else f"`elasticdl {command} --help` lists all flags.",
    )
