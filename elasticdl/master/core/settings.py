"""JobSettings: the parts of a JobSpec that the core needs.  Made by the shell, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from elasticdl.master.core.values import TaskType
from elasticdl.protocol import pod_and_process
from elasticdl_client.choices import DistributionStrategy, NanPolicy, Remedy


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Fields are named as the flags of `elasticdl` are, times in seconds.

    Attributes:
        has_training_data: and so on: the job has such a source.  An evaluate job has only validation data.
        processes_per_worker: of each worker's pod.  Each is a worker of the core, with an id and leases of its own;
            pods and their slots, and `num_workers`, count what the user calls workers.
        num_epochs: 0 or less: endless, until `max_step`.
        max_step: 0: no limit.
        checkpoint_steps: 0: every `checkpoint_interval` seconds.
        silence_timeout: a worker or PS that is silent for this long beyond `lease_timeout` is deleted and replaced.
        runs_command: workers run the user's own command (--job_command), whose end is theirs; the data may be known
            from its report alone.
        expects_data: of a command: one that has taken no data has not done what the flags say.
        has_tensorflow_servers: the pods of the role PS run that command, too, and hold the model (TF_CONFIG).
        has_evaluator: one more worker, in the last slot, trains nothing and evaluates.
        verb: for the records of the plan, as in the coverage line.
        model_version: of a job that trains nothing: of the trained model that it loads.
        has_last_task: a job that trains nothing: TRAIN_END is granted once when all is covered, to put the outputs of
            all tasks together.
        collective_timeout: AllReduce: a member that is silent for this long is out of the group.
        min_workers: AllReduce: the fewest workers of a group, each with all its processes.
        fixed_global_batch: AllReduce: records of every step, of the whole group; 0: each member brings a minibatch.
        shard_optimizer: AllReduce: a member may be the only one with a part of the model, so that all are called.
        input_workers: processes of each worker that make minibatches, each of a task of its own; 0: there are none.
        hang_timeout: a worker with a history hangs after this long in one minibatch, at the earliest.
        straggler_window: seconds over which workers are compared; minutes, so that neither one large file nor the
            checkpoint of a neighbour on its node makes a straggler.
        max_workers: the number follows the gain from `num_workers` up to this; 0: it is fixed.
        min_gain: the least that another worker must add, as a share of what one computes alone.
        scaling_window: seconds over which a rate is measured before the number changes.
        has_queue: servers and workers are admitted by one queue, in an order of its own.
        queues_differ: they are not, so the quota of a worker is of no use to a server.
        long_poll: after this long a request for a lease is answered with `NoLeaseNow`.
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
    evaluation_throttle: float = 0.0  # 0: never by time
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
    long_poll: float = 15.0  # below the deadline of the call
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
        """The ledger of a job that trains is with its model; of one that makes one pass, with the master."""
        return self.has_training_data

    @property
    def evaluates_alone(self) -> bool:
        """The plan is one pass over the validation data of a trained model; the metrics are all that comes of it."""
        return self.has_validation_data and not (self.has_training_data or self.has_prediction_data)

    @property
    def planned_type(self) -> TaskType:
        """Of the tasks of the plan."""
        if self.trains:
            return TaskType.TRAINING
        return TaskType.EVALUATION if self.evaluates_alone else TaskType.PREDICTION

    @property
    def has_groups(self) -> bool:
        """The model is with the members of an AllReduce group."""
        return self.has_training_data and self.strategy is DistributionStrategy.ALL_REDUCE

    @property
    def holds_model_in_workers(self) -> bool:
        """The model is with the workers, which write its checkpoints."""
        return self.trains and self.strategy is not DistributionStrategy.PARAMETER_SERVER and not self.runs_command

    @property
    def records_per_task(self) -> int:
        return self.minibatch_size * self.num_minibatches_per_task

    @property
    def num_own_servers(self) -> int:
        """Parameter servers of ours."""
        return 0 if self.runs_command else self.num_ps

    @property
    def start_timeout(self) -> float:
        """Seconds after which a worker that runs and has not registered is given up."""
        return self.step_timeout + self.lease_timeout + self.silence_timeout

    def pod_name(self, role: str, index: int) -> str:
        return f"elasticdl-{self.job_name}-{role}-{index}"

    def ids_in(self, pod_index: int) -> range:
        """Ids of the processes in a worker's pod."""
        return range(pod_index * self.processes_per_worker, (pod_index + 1) * self.processes_per_worker)

    def pod_of(self, worker_id: int) -> int:
        """Index of the pod that a process is in."""
        return pod_and_process(worker_id, self.processes_per_worker)[0]

    def number_in_pod(self, worker_id: int) -> int:
        """Which process of its pod one is, from 0."""
        return pod_and_process(worker_id, self.processes_per_worker)[1]

    def subject_of(self, worker_id: int) -> str:
        """Of the events about a process: its pod."""
        return f"worker-{self.pod_of(worker_id)}"

    def process_of(self, worker_id: int) -> str:
        """Return which process of its pod one is, for people; empty where a pod has one."""
        return f"process {self.number_in_pod(worker_id)}" if self.processes_per_worker > 1 else ""

    def name_of(self, worker_id: int) -> str:
        """Return the name of a process for people, as it follows the word worker."""
        process = self.process_of(worker_id)
        return f"{self.pod_of(worker_id)} ({process})" if process else str(worker_id)
