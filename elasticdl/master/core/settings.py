"""JobSettings: the parts of a JobSpec that the core needs.  Made by the shell, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.master.core.values import TaskType
from elasticdl.protocol import pod_and_process
from elasticdl_client.choices import DistributionStrategy, NanPolicy, Remedy


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of a job; fields have the names of the flags of `elasticdl`, times are in seconds.

    Attributes:
        has_training_data: The job has training data; likewise the next two.  An evaluate job only has validation data.
        processes_per_worker: Number of processes of each worker's pod.  Each is a worker of the core, with its own id
            and leases; pods and their slots, and `num_workers`, count workers of the user.
        num_epochs: 0 or less means endless, until `max_step`.
        max_step: 0 means no limit.
        checkpoint_steps: 0 means every `checkpoint_interval` seconds.
        silence_timeout: A worker or PS that is silent for this long beyond `lease_timeout` is deleted and replaced.
        runs_command: Workers run the user's own command (--job_command), which ends by itself; the data may be known
            only from the command's report.
        expects_data: For a command: one that has taken no data has failed.
        has_tensorflow_servers: The PS pods run the same command, as TensorFlow's servers with the model (TF_CONFIG).
        has_evaluator: One more worker, in the last slot, only evaluates.
        verb: Verb for the records of the plan in the coverage line.
        model_version: For a job without training: version of the trained model that it loads.
        has_last_task: For a job without training: TRAIN_END is granted once when all records are covered, to combine
            the outputs of all tasks.
        collective_timeout: AllReduce: a member that is silent for this long is excluded from the group.
        min_workers: AllReduce: least number of workers in a group, each with all its processes.
        fixed_global_batch: AllReduce: records of each step of the whole group; 0: one minibatch of each member.
        shard_optimizer: AllReduce: a member may be the only one with a part of the model, so all join a group.
        input_workers: Number of processes of each worker that prepare minibatches, each for its own task; 0 for none.
        hang_timeout: A worker with a history hangs after this long in one minibatch, at the earliest.
        straggler_window: Seconds over which workers are compared; minutes, so that neither one large file nor the
            checkpoint of a neighbour on its node makes a straggler.
        max_workers: Upper bound for autoscaling from `num_workers`; 0 means a fixed number of workers.
        min_gain: The least that another worker must add, as a share of what one computes alone.
        scaling_window: Seconds over which a rate is measured before the number changes.
        has_queue: Servers and workers are admitted by one queue, in the queue's order.
        queues_differ: Servers and workers have different queues, so a server cannot use the quota of a worker.
        long_poll: Seconds after which a lease request is answered with `NoLeaseNow`.
    """

    job_name: str
    strategy: DistributionStrategy = DistributionStrategy.PARAMETER_SERVER
    num_workers: int = 1
    processes_per_worker: int = 1
    max_workers: int = 0
    min_gain: float = 0.3
    scaling_window: float = 30.0
    num_ps: int = 1
    has_queue: bool = False
    queues_differ: bool = False
    has_training_data: bool = True
    has_validation_data: bool = False
    has_prediction_data: bool = False
    minibatch_size: int = 64
    num_minibatches_per_task: int = 8
    num_epochs: int = 1
    max_step: int = 0
    seed: int = 0
    evaluation_steps: int = 0
    evaluation_start_delay: float = 0.0
    evaluation_throttle: float = 0.0  # 0 means no evaluation by time
    output: str = ""
    checkpoint_dir: str = ""
    checkpoint_steps: int = 0
    checkpoint_interval: float = 60.0
    checkpoint_dir_for_init: str = ""
    lease_timeout: float = 10.0
    step_timeout: float = 600.0
    hang_timeout: float = 300.0
    hang_action: Remedy = Remedy.REPLACE
    straggler_action: Remedy = Remedy.REPORT
    straggler_window: float = 180.0
    silence_timeout: float = 60.0
    collective_timeout: float = 5.0
    min_workers: int = 1
    fixed_global_batch: int = 0
    shard_optimizer: bool = False
    input_workers: int = 0
    long_poll: float = 15.0  # less than the deadline of the call
    max_task_failures: int = 3
    max_bad_records: int = 0
    bad_records_dir: str = ""
    nan_policy: NanPolicy = NanPolicy.FAIL
    runs_command: bool = False
    expects_data: bool = False
    has_tensorflow_servers: bool = False
    has_evaluator: bool = False
    verb: str = "committed"
    model_version: int = 0
    has_last_task: bool = False

    @property
    def trains(self) -> bool:
        """Whether the job trains: then the model has the ledger; in a job of one pass the master has it."""
        return self.has_training_data

    @property
    def evaluates_alone(self) -> bool:
        """Whether the plan is one pass over the validation data of a trained model, with metrics as the only result."""
        return self.has_validation_data and not (self.has_training_data or self.has_prediction_data)

    @property
    def planned_type(self) -> TaskType:
        """Type of the plan's tasks."""
        if self.trains:
            return TaskType.TRAINING
        return TaskType.EVALUATION if self.evaluates_alone else TaskType.PREDICTION

    @property
    def has_groups(self) -> bool:
        """Whether the model is held by the members of an AllReduce group."""
        return self.has_training_data and self.strategy is DistributionStrategy.ALL_REDUCE

    @property
    def holds_model_in_workers(self) -> bool:
        """Whether workers hold the model and write its checkpoints."""
        return self.trains and self.strategy is not DistributionStrategy.PARAMETER_SERVER and not self.runs_command

    @property
    def records_per_task(self) -> int:
        return self.minibatch_size * self.num_minibatches_per_task

    @property
    def num_own_servers(self) -> int:
        """Number of our own parameter servers, not TensorFlow's."""
        return 0 if self.runs_command else self.num_ps

    @property
    def start_timeout(self) -> float:
        """Seconds after which a running worker that has not registered is given up."""
        return self.step_timeout + self.lease_timeout + self.silence_timeout

    def pod_name(self, role: str, index: int) -> str:
        return f"elasticdl-{self.job_name}-{role}-{index}"

    def ids_in(self, pod_index: int) -> range:
        """Return the ids of the processes in a worker's pod."""
        return range(pod_index * self.processes_per_worker, (pod_index + 1) * self.processes_per_worker)

    def pod_of(self, worker_id: int) -> int:
        """Return the index of a process's pod."""
        return pod_and_process(worker_id, self.processes_per_worker)[0]

    def number_in_pod(self, worker_id: int) -> int:
        """Return the number of a process in its pod, from 0."""
        return pod_and_process(worker_id, self.processes_per_worker)[1]

    def subject_of(self, worker_id: int) -> str:
        """Return the subject of events about a process: its pod."""
        return f"worker-{self.pod_of(worker_id)}"

    def process_of(self, worker_id: int) -> str:
        """Return the name of a process within its pod, for logs; empty if a pod has only one."""
        return f"process {self.number_in_pod(worker_id)}" if self.processes_per_worker > 1 else ""

    def name_of(self, worker_id: int) -> str:
        """Return the name of a process for logs, to be put after the word worker."""
        process = self.process_of(worker_id)
        return f"{self.pod_of(worker_id)} ({process})" if process else str(worker_id)
