"""Which flags need and exclude each other.  Looks at nothing but the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticdl_client.choices import (
    JobType,
    Precision,
    PredictionFormat,
    Runtime,
    TrackerName,
)
from elasticdl_client.data_sources import is_table
from elasticdl_client.errors import FlagError
from elasticdl_client.flag_groups import COMPUTATION
from elasticdl_client.flags import Group, given_of, names_of
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.resources import exceeding, has_several_mig_devices
from elasticdl_client.storage_kinds import is_remote

if TYPE_CHECKING:
    from elasticdl_client.job_spec import JobSpec

_REQUIRED = {
    "train": ("job_name", "model_def", "training_data"),
    "evaluate": ("job_name", "model_def", "validation_data", "checkpoint_dir_for_init"),
    "predict": ("job_name", "model_def", "prediction_data", "checkpoint_dir_for_init"),
    "analyze": ("job_name", "data", "output"),
}
_EXAMPLES = {
    "job_name": "my-job",
    "model_def": "mnist.mnist_functional_api.custom_model",
    "checkpoint_dir_for_init": "/checkpoints/version-100",
    "output": "/data/statistics.json",
    "image_name": "registry/my-model-zoo:1",
}


def check(spec: JobSpec) -> None:
    """Check a whole specification.

    Raises:
        FlagError: the first thing that does not fit.
    """
    _check_required(spec)
    _check_encryption(spec)
    _check_strategy(spec)
    _check_processes(spec)
    _check_training(spec)
    _check_computation(spec)
    _check_input(spec)
    _check_prediction(spec)
    _check_output_file(spec)
    _check_parameter_server(spec)
    _check_all_reduce(spec)
    _check_code(spec)
    _check_runtime(spec)
    _check_trackers(spec)


def _check_trackers(spec: JobSpec) -> None:
    if spec.runtime is not Runtime.KUBERNETES:
        return
    if TrackerName.TENSORBOARD in spec.trackers and not spec.tensorboard_log_dir:
        raise FlagError("--track=tensorboard needs --tensorboard_log_dir.", "Name a directory on a --volume.")
    if TrackerName.MLFLOW in spec.trackers and "MLFLOW_TRACKING_URI" not in spec.envs_dict():
        raise FlagError(
            "--track=mlflow needs the address of a server: the file system of the master's pod is lost with the pod.",
            "Give --envs=MLFLOW_TRACKING_URI=http://HOST:5000.",
        )


def _check_required(spec: JobSpec) -> None:
    needed = list(_REQUIRED[spec.job_type])
    if spec.job_command:
        needed = ["job_name"]
    if spec.runtime == "kubernetes":
        needed.append("image_name")
    for name in needed:
        if not getattr(spec, name):
            hint = f"For example --{name}={_EXAMPLES.get(name, '/data/' + name)}."
            if name == "image_name":
                hint += " Or --runtime=local: processes of this machine, no image."
            raise FlagError(f"`elasticdl {spec.job_type}` needs --{name}.", hint)


def _check_encryption(spec: JobSpec) -> None:
    if not spec.encrypt:
        return
    if not spec.uses_tls:
        raise FlagError(
            "--encrypt with --tls=false: calls between pods, and the job's token in them, would go in clear.",
            "Leave --tls out.",
        )
    if spec.need_tf_config:
        raise FlagError(
            "--encrypt with --need_tf_config: TensorFlow's own servers, which carry the model, do not encrypt.",
            "Leave --encrypt out, and use a network that encrypts between nodes.",
        )


def _check_strategy(spec: JobSpec) -> None:
    strategy = spec.distribution_strategy
    if strategy == "ParameterServerStrategy" and spec.num_ps_pods == 0 and not spec.job_command:
        raise FlagError(
            "ParameterServerStrategy needs a parameter server, and --num_ps_pods is 0.",
            "Give --num_ps_pods=1, or --distribution_strategy=Local or AllReduceStrategy.",
        )
    if spec.job_command:
        _check_command(spec)
    if strategy == "ParameterServerStrategy" and spec.framework == "torch":
        raise FlagError(
            "ParameterServerStrategy trains Keras models, and --framework=torch.",
            "Give --distribution_strategy=AllReduceStrategy, or Local for one worker.",
        )
    if strategy != "ParameterServerStrategy" and spec.num_ps_pods > 0:
        raise FlagError(
            f"{strategy} has no parameter servers, and --num_ps_pods is {spec.num_ps_pods}.",
            "Leave --num_ps_pods out, or --distribution_strategy=ParameterServerStrategy.",
        )
    _check_range(spec)
    if strategy == "Local" and spec.num_workers != 1:
        raise FlagError(
            f"The Local strategy has one worker, and --num_workers is {spec.num_workers}.",
            "Leave --num_workers out, or choose another --distribution_strategy.",
        )


def _check_range(spec: JobSpec) -> None:
    """Check the range of the number of workers, and the flags that need one."""
    if not spec.max_workers:
        for name in given_of(spec, ("min_gain", "scaling_window")):
            raise FlagError(
                f"--{name} is for a number of workers that follows the gain, and --num_workers={spec.num_workers} is "
                "fixed.",
                f"Give a range, such as --num_workers={spec.num_workers}:{4 * spec.num_workers}, or leave it out.",
            )
        return
    if spec.max_workers < spec.num_workers:
        raise FlagError(
            f"--max_workers={spec.max_workers} is less than --num_workers={spec.num_workers}.",
            f"Give the range --num_workers={spec.max_workers}:{spec.num_workers}.",
        )
    if spec.distribution_strategy == "Local":
        raise FlagError(
            f"The Local strategy has one worker, and --max_workers is {spec.max_workers}.",
            "Give a single number of workers, or choose another --distribution_strategy.",
        )
    if spec.need_tf_config:
        raise FlagError(
            "TF_CONFIG names all workers from the start, and --num_workers is a range.",
            f"Give a single number, such as --num_workers={spec.num_workers}.",
        )


def _check_processes(spec: JobSpec) -> None:
    """No GPU of a worker is idle in silence."""
    given, num_gpus, number = spec.processes_per_worker, spec.num_gpus_per_worker, spec.num_processes_per_worker
    if has_several_mig_devices(spec.worker_resource_request, spec.worker_resource_limit):
        raise FlagError(
            f"--worker_resource_request={spec.worker_resource_request}: CUDA gives a process one MIG device; the "
            "others would be idle.",
            "Ask for one of them, and for more workers: --num_workers.",
        )
    if number > num_gpus > 0:
        raise FlagError(
            f"--processes_per_worker={given} is more than the {num_gpus} GPUs of a worker, and each process needs one.",
            f"Ask for gpu={number} in --worker_resource_request, or leave --processes_per_worker out.",
        )
    if num_gpus > number and (spec.model_def or num_gpus % number):
        why = "a process trains a --model_def on one GPU" if spec.model_def else "they cannot be shared out evenly"
        raise FlagError(
            f"--processes_per_worker={given} with {num_gpus} GPUs of a worker: {why}, and some would be idle.",
            "Leave it out: each GPU gets a process.",
        )
    if number > 1 and num_gpus and "CUDA_VISIBLE_DEVICES" in spec.envs_dict():
        raise FlagError(
            f"--envs has CUDA_VISIBLE_DEVICES, and each of a worker's {number} processes is given GPUs of its own.",
            "Leave it out of --envs.",
        )
    is_local = spec.distribution_strategy == "Local"
    if number == 1 or not (is_local or spec.need_tf_config):
        return
    why = "The Local strategy has one process" if is_local else "TF_CONFIG names one process of each worker"
    if given:
        raise FlagError(
            f"{why}, and --processes_per_worker is {given}.", "Leave it out, or choose another --distribution_strategy."
        )
    raise FlagError(
        f"{why}, and a worker asks for {num_gpus} GPUs: all but one would be idle.",
        "Ask for gpu=1, or choose AllReduceStrategy.",
    )


def _check_command(spec: JobSpec) -> None:
    if spec.model_def:
        raise FlagError(
            "--job_command and --model_def exclude each other: a worker runs one of them.",
            "Leave --model_def out; the command's own arguments say what it trains.",
        )
    if spec.need_tf_config and (spec.distribution_strategy != "ParameterServerStrategy" or not spec.num_ps_pods):
        raise FlagError(
            "--need_tf_config with --job_command is for TensorFlow's own parameter servers, and there are none.",
            "Give --distribution_strategy=ParameterServerStrategy and --num_ps_pods=1, or leave it out.",
        )
    if spec.num_ps_pods and not spec.need_tf_config:
        raise FlagError(
            f"--num_ps_pods={spec.num_ps_pods}: a --job_command cannot use our parameter servers.",
            "Leave --num_ps_pods out; for TensorFlow's own (Estimator) give --need_tf_config.",
        )
    for name in ("output", "max_bad_records", "checkpoint_dir_for_init"):
        if getattr(spec, name):
            raise FlagError(
                f"--{name} is without effect with --job_command: the model is the script's.", "Put it into the command."
            )
    if spec.input_workers:
        raise FlagError(
            f"--input_workers={spec.input_workers} is without effect with --job_command: the script reads its data.",
            "Leave it out, and give the loader of the script num_workers.",
        )
    for name in given_of(spec, COMPUTATION):
        raise FlagError(
            f"--{name} is without effect with --job_command: the script computes its steps itself.",
            "Leave it out, and do it in the script.",
        )
    if spec.strict_feed:
        raise FlagError(
            "--strict_feed is without effect with --job_command: a script has no feed.",
            "Leave it out; the ledger of a script counts the records that it was given.",
        )


def _check_training(spec: JobSpec) -> None:
    if spec.evaluation_steps and not spec.validation_data:
        raise FlagError("--evaluation_steps is given, but nothing to evaluate on.", "Give --validation_data.")
    if spec.evaluation_throttle_secs and not spec.validation_data:
        raise FlagError("--evaluation_throttle_secs is given, but nothing to evaluate on.", "Give --validation_data.")
    if spec.evaluation_start_delay_secs != 100 and not spec.evaluation_throttle_secs:
        raise FlagError(
            "--evaluation_start_delay_secs delays evaluations by time, and there are none.",
            "Give --evaluation_throttle_secs.",
        )
    if spec.model_params and spec.job_command:
        raise FlagError("--model_params is not passed to --job_command.", "Put it into the command.")


def _check_computation(spec: JobSpec) -> None:
    if spec.minibatch_size % spec.accumulate_steps:
        near = max(1, spec.minibatch_size // spec.accumulate_steps) * spec.accumulate_steps
        raise FlagError(
            f"--accumulate_steps={spec.accumulate_steps} does not divide --minibatch_size={spec.minibatch_size}.",
            f"A minibatch is computed in parts of the same size: give --minibatch_size={near}.",
        )
    if spec.precision is Precision.FP16 and spec.skips_not_finite:
        raise FlagError(
            "--precision=fp16 with --nan_policy=skip: a gradient that overflows is no fault of its minibatch, which is "
            "computed again with a smaller loss scale.",
            "Leave --nan_policy out, or give --precision=bf16.",
        )


def _check_input(spec: JobSpec) -> None:
    if not spec.input_workers:
        return
    for name in ("max_bad_records", "strict_feed"):
        if getattr(spec, name):
            raise FlagError(
                f"--input_workers={spec.input_workers} with --{name}: a task is looked through before the next one is "
                "begun, so that one process would work and the others wait.",
                f"Leave --input_workers or --{name} out.",
            )


def _check_prediction(spec: JobSpec) -> None:
    if spec.prediction_columns and not spec.prediction_outputs:
        raise FlagError(
            "--prediction_columns are written beside the predictions, and there is no --prediction_outputs.",
            "Name a directory with --prediction_outputs, or leave --prediction_columns out.",
        )
    if not is_table(spec.prediction_outputs):
        return
    if not spec.prediction_columns:
        raise FlagError(
            "--prediction_outputs is a table, which needs a key: a repeated task finds its rows by it.",
            "Name the column that numbers the rows: --prediction_columns=id. The first one is the primary key.",
        )
    if spec.prediction_format is not PredictionFormat.AUTO:
        raise FlagError(
            f"--prediction_format={spec.prediction_format} is of files, and --prediction_outputs is a table.",
            "Leave --prediction_format out.",
        )


def _check_output_file(spec: JobSpec) -> None:
    """Check that the output names a file: the name of a directory or bucket would fail late, or become an object."""
    is_analysis = spec.job_type is JobType.ANALYZE
    name, example = ("output", "statistics.json") if is_analysis else ("metrics_output", "metrics.json")
    place = getattr(spec, name)
    names_file = bool(place.partition("://")[2].partition("/")[2]) if is_remote(place) else True
    if place.endswith("/") or not names_file:
        raise FlagError(f"--{name}={place} names no file.", f"Give a name behind it: {place.rstrip('/')}/{example}.")


def _check_parameter_server(spec: JobSpec) -> None:
    if spec.distribution_strategy != "ParameterServerStrategy":
        for name in given_of(spec, names_of(type(spec), Group.PARAMETER_SERVER)):
            raise FlagError(
                f"--{name} is for parameter servers, and {spec.distribution_strategy} has none.",
                f"Leave --{name} out, or --distribution_strategy=ParameterServerStrategy.",
            )
    if spec.use_async and spec.grads_to_wait > 1:
        raise FlagError(
            f"--grads_to_wait={spec.grads_to_wait} is for synchronous training, and --use_async is on.",
            "Give --use_async=false, or leave --grads_to_wait out.",
        )
    if spec.use_async and spec.sync_version_tolerance:
        raise FlagError(
            "--sync_version_tolerance is for synchronous training, and --use_async is on.",
            "Give --use_async=false, or leave --sync_version_tolerance out.",
        )
    if not spec.use_async:
        for name in given_of(spec, ("get_model_steps", "max_staleness", "lr_staleness_modulation")):
            raise FlagError(
                f"--{name} is for asynchronous training, and --use_async is off.",
                f"Leave --use_async=false or --{name} out.",
            )
    if 0 < spec.max_staleness < spec.get_model_steps:
        raise FlagError(
            f"--max_staleness={spec.max_staleness} is below --get_model_steps={spec.get_model_steps}, "
            "so no gradient could be taken.",
            f"Give --max_staleness={spec.get_model_steps} or more.",
        )


def _check_all_reduce(spec: JobSpec) -> None:
    if spec.distribution_strategy != "AllReduceStrategy":
        for name in given_of(spec, names_of(type(spec), Group.ALL_REDUCE)):
            raise FlagError(
                f"--{name} is for AllReduceStrategy, and this is {spec.distribution_strategy}.",
                f"Leave --{name} out, or --distribution_strategy=AllReduceStrategy.",
            )
    if spec.fixed_global_batch % spec.minibatch_size and not spec.job_command:  # a script says its own batch size
        near = max(1, spec.fixed_global_batch // spec.minibatch_size) * spec.minibatch_size
        raise FlagError(
            f"--fixed_global_batch={spec.fixed_global_batch} is not a multiple of "
            f"--minibatch_size={spec.minibatch_size}.",
            f"Give --fixed_global_batch={near}, or another --minibatch_size.",
        )
    if spec.min_workers > spec.num_workers:
        raise FlagError(
            f"--min_workers={spec.min_workers} is more than --num_workers={spec.num_workers}.",
            f"Training would never begin: give --num_workers={spec.min_workers} or more.",
        )


def _check_code(spec: JobSpec) -> None:
    for name in ("code_storage", "requirements_cache"):
        if getattr(spec, name) and not spec.code:
            raise FlagError(f"--{name} is for the code of --code, and there is none.", f"Leave --{name} out.")


def _check_runtime(spec: JobSpec) -> None:
    taken = spec.master_port if spec.runtime == "local" else names.MASTER_PORT
    if spec.metrics_port and spec.metrics_port == taken:
        raise FlagError(f"--metrics_port={spec.metrics_port} is the port of the master itself.", "Name another port.")
    if spec.runtime == "local":
        return
    for role in ("master", "ps", "worker"):
        request, limit = getattr(spec, f"{role}_resource_request"), getattr(spec, f"{role}_resource_limit")
        if name := exceeding(request, limit):
            raise FlagError(
                f"--{role}_resource_request={request} is more {name} than --{role}_resource_limit={limit} allows.",
                "A limit is at least as large as what is asked for.",
            )
    if spec.wait and (spec.yaml or spec.dry_run):
        raise FlagError("--wait follows a job, and with --yaml or --dry_run nothing is submitted.", "Leave --wait out.")
    if spec.job_dir and not is_remote(spec.job_dir):
        raise FlagError(
            f"--job_dir={spec.job_dir} is a directory of this machine.",
            "Give --runtime=local, or a URL of storage, such as s3://bucket/directory.",
        )
    for name in ("local_slots", "master_port"):
        if getattr(spec, name):
            raise FlagError(f"--{name} is for the local runtime.", f"Give --runtime=local, or leave --{name} out.")
