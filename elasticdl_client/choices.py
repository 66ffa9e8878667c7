"""The values of flags that are one of a few words."""

from __future__ import annotations

from enum import StrEnum


class JobType(StrEnum):
    """The type of a job."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    ANALYZE = "analyze"


class Runtime(StrEnum):
    """Where pods run."""

    KUBERNETES = "kubernetes"
    LOCAL = "local"


class DistributionStrategy(StrEnum):
    """The place of the model: parameter servers, or every worker."""

    PARAMETER_SERVER = "ParameterServerStrategy"
    ALL_REDUCE = "AllReduceStrategy"
    LOCAL = "Local"


class FrameworkName(StrEnum):
    """The framework of a model definition."""

    AUTO = "auto"
    TENSORFLOW = "tensorflow"
    TORCH = "torch"
    CUSTOM = "custom"


class NanPolicy(StrEnum):
    """The response to a loss that is not finite."""

    FAIL = "fail"
    SKIP = "skip"


class Precision(StrEnum):
    """The data type that a model computes in; its parameters are float32 in any case."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Remedy(StrEnum):
    """The response to a worker that hangs, or computes more slowly than the others."""

    REPLACE = "replace"
    REPORT = "report"


class PredictionFormat(StrEnum):
    """Of the files that predictions are written to."""

    AUTO = "auto"
    PARQUET = "parquet"
    CSV = "csv"
    RECORDIO = "recordio"


class WireDtype(StrEnum):
    """How gradients, parameters and rows travel between workers and parameter servers."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Tls(StrEnum):
    """Whether calls between pods are encrypted and both ends proved by the job's certificate."""

    AUTO = "auto"
    ON = "true"
    OFF = "false"


class LogLevel(StrEnum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


RUN_MODULE = ("-P", "-m")  # of Python: else a queue.py in the working directory hides that of the standard library
LOG_FORMAT_VARIABLE = "ELASTICDL_LOG_FORMAT"  # in the environment of every pod
PROCESS_VARIABLE = "ELASTICDL_PROCESS"  # in a worker of several processes: the number of one, and how many there are
NUM_PROCESSES_VARIABLE = "ELASTICDL_NUM_PROCESSES"
CODE_ERROR_VARIABLE = "ELASTICDL_CODE_ERROR"  # of a master, in JSON: why its pod lacks the code, a hint, may it pass


class LogFormat(StrEnum):
    """Of the log entries of all pods."""

    TEXT = "text"
    JSON = "json"


class ImagePullPolicy(StrEnum):
    AUTO = "auto"
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class MasterRestartPolicy(StrEnum):
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


class TrackerName(StrEnum):
    """Experiment trackers; the values are the names of their packages, too."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
