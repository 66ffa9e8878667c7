"""JobSettings: what the core needs to know of a JobSpec.  Made by the shell, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Strategy(StrEnum):
    LOCAL = "Local"
    PARAMETER_SERVER = "ParameterServerStrategy"


class NanPolicy(StrEnum):
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Fields are named as the flags of `elasticdl` are, times in seconds.

    Attributes:
        has_training_data: and so on: the job has such a source.  An evaluate job has only validation data.
        num_epochs: 0 or less: endless, until `max_step`.
        max_step: 0: no limit.
        checkpoint_steps: 0: every `checkpoint_interval` seconds.
        silence_timeout: a worker or PS that is silent for this long beyond `lease_timeout` is deleted and replaced.
        long_poll: after this long a request for a lease is answered with `NoLeaseNow`.
    """

    job_name: str
    strategy: Strategy = Strategy.PARAMETER_SERVER
    num_workers: int = 1
    num_ps: int = 1
    has_training_data: bool = True
    has_validation_data: bool = False
    has_prediction_data: bool = False
    minibatch_size: int = 64
    num_minibatches_per_task: int = 8
    num_epochs: int = 1
    max_step: int = 0
    seed: int = 0
    evaluation_steps: int = 0
    output: str = ""
    checkpoint_dir: str = ""
    checkpoint_steps: int = 0
    checkpoint_interval: float = 60.0
    checkpoint_dir_for_init: str = ""
    lease_timeout: float = 10.0
    step_timeout: float = 600.0
    silence_timeout: float = 60.0
    long_poll: float = 15.0  # below the deadline of the call
    max_task_failures: int = 3
    max_bad_records: int = 0
    nan_policy: NanPolicy = NanPolicy.FAIL

    @property
    def trains(self) -> bool:
        """The ledger of a job that trains is with its model; of one that only predicts, with the master."""
        return self.has_training_data

    @property
    def records_per_task(self) -> int:
        return self.minibatch_size * self.num_minibatches_per_task

    def pod_name(self, role: str, index: int) -> str:
        return f"elasticdl-{self.job_name}-{role}-{index}"
