"""One worker pod, from its environment to its exit code.

Exit codes: 0: the job is over, or the master said stop; 1: an error here, or the master is gone; 143: SIGTERM.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

from elasticdl.activities import ActivityClock
from elasticdl.cluster.local.framework_import import no_garbage_collection
from elasticdl.cluster.local.standby import FRAMEWORK_VARIABLE, report_ready
from elasticdl.frameworks.callback_rules import check_job
from elasticdl.frameworks.framework import ModelReport
from elasticdl.frameworks.internals import check_internals
from elasticdl.model_def import framework_of, load_model_definition
from elasticdl.ps.client import check_model
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import read_master_timeout_s
from elasticdl.rpc.job_secret import read_token, whole_spec
from elasticdl.rpc.logs import log_to_stdout
from elasticdl.rpc.resource_use import available_bytes, keep_large_buffers
from elasticdl.worker.export.exporter import announce_export
from elasticdl.worker.factories import Readers, first_op, load_framework, on_parameter_servers
from elasticdl.worker.local import LocalStrategy
from elasticdl.worker.loop import TaskWork, TrainingTasks, TrainingWork, WorkerLoop
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.ps.strategy import ParameterServerStrategy
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.termination import Termination
from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import CheckpointError, ElasticDLError, JobError, ModelDefinitionError

_log = logging.getLogger("elasticdl.worker")


class WorkerProcess:
    """Builds and runs the parts of one worker process."""

    def __init__(self, clock: ActivityClock, termination: Termination) -> None:
        self._clock = clock
        self._termination = termination
        self._token = read_token()
        self._link = MasterLink(
            _environment("MASTER_ADDR"),
            self._token,
            int(_environment("WORKER_ID")),
            os.environ.get("ELASTICDL_POD_NAME", ""),
            self._clock,
            read_master_timeout_s(),
        )

    def run(self) -> None:
        """Register, load the user's module, and work until the job is over."""
        self._spec = whole_spec(self._link.register().job_spec)
        logging.getLogger().setLevel(self._spec.log_level)
        self._termination.before_end(lambda is_idle: self._link.say_farewell())
        self._link.start_heartbeat()
        self._failures = TaskFailures.of(self._spec, self._link)
        _log.info("Starting worker %d", self._link.worker_id)
        if self._spec.job_type is JobType.TRAIN:
            self._train()
        elif self._spec.job_type is JobType.ANALYZE:
            self._analyze()
        else:
            self._evaluate_or_predict()
        self._link.report_time()
        _log.info("Worker %d is done", self._link.worker_id)

    def _evaluate_or_predict(self) -> None:
        """Evaluate or predict with a trained model."""
        from elasticdl.worker.inference.worker import check_layout, load_trained, make_work  # only these jobs need it

        spec = self._spec
        try:
            check_internals(framework_of(self._spec))
            self._definition = load_model_definition(spec)
            self._readers = Readers(spec, self._definition)
            model = load_trained(spec, self._definition, self._readers)
            report = model.report()
            if on_parameter_servers(spec):
                check_model(report)
                check_layout(spec.checkpoint_dir_for_init, report)
            loop = self._loop_of(make_work(self._failures, model, report, spec, self._definition, self._token))
            message = self._describe(report)
            message.callbacks = ""  # callbacks are for training
        except ElasticDLError as error:
            self._refuse(error)
            raise
        self._link.report_model(message)
        self._link.carry_device(model.device_meter)
        loop.run()

    def _analyze(self) -> None:
        """Compute statistics of the data; there is no model."""
        from elasticdl.worker.inference.analysis import AnalysisWork  # a package that not every image has

        self._readers = Readers(self._spec, None)
        try:
            loop = self._loop_of(AnalysisWork.of(self._spec, self._failures, self._readers.of))
        except ElasticDLError as error:
            self._refuse(error)
            raise
        self._link.report_model(pb.ModelReport())
        loop.run()

    def _train(self) -> None:
        try:
            check_internals(framework_of(self._spec))
            if self._spec.distribution_strategy is DistributionStrategy.ALL_REDUCE:
                _import_collectives()
            self._definition = load_model_definition(self._spec)
            self._readers = Readers(self._spec, self._definition)
            self._framework = load_framework(self._spec, self._definition, self._readers)
            report = self._framework.report()
            self._check_callbacks(report)
            if on_parameter_servers(self._spec):
                check_model(report)
            if self._spec.output:
                announce_export(report.tables, available_bytes(), self._spec.output, self._spec.checkpoint_dir)
            message = self._describe(report)
        except ElasticDLError as error:
            self._refuse(error)
            raise
        self._link.carry_device(self._framework.device_meter)
        try:
            if self._spec.distribution_strategy is DistributionStrategy.ALL_REDUCE:
                self._link.report_model(message)
                run = self._all_reduce()
            else:
                strategy = self._strategy(report)
                self._link.report_model(message)
                run = self._one_by_one(strategy, report)
            self._begin_training()
            run()
        except (CheckpointError, ModelDefinitionError) as error:  # another worker would fail as well
            self._refuse(error)
            raise

    def _check_callbacks(self, report: ModelReport) -> None:
        spec = self._spec
        has_validation = bool(spec.validation_data)
        check_job(self._definition.path, report.rules, has_validation, spec.skips_not_finite, spec.checkpoint_dir)

    def _begin_training(self) -> None:
        if self._spec.training_data:
            self._link.carry_rate(self._framework.rate_in_use)
            try:
                self._framework.begin_training()
            except ElasticDLError as error:
                self._refuse(error)
                raise

    def _all_reduce(self) -> Callable[[], None]:
        from elasticdl.worker.allreduce.loop import make_all_reduce_loop  # only this strategy needs it

        loop = make_all_reduce_loop(
            self._failures,
            self._framework,
            self._readers.of,
            self._spec,
            self._termination,
            _environment("MASTER_ADDR"),
        )
        self._termination.before_end(loop.leave)
        return loop.run

    def _one_by_one(self, strategy: LocalStrategy | ParameterServerStrategy, report: ModelReport) -> Callable[[], None]:
        tasks = TrainingTasks.of(self._spec, self._failures, self._framework, strategy)
        keeps_state = isinstance(strategy, LocalStrategy) and not all(v.trainable for v in report.variables)
        tasks.try_metrics(self._spec, self._readers.of, keeps_state)
        work = TrainingWork(tasks, strategy, self._termination)
        self._termination.before_end(work.leave)
        return WorkerLoop.of(self._spec, self._readers.of, work, self._termination, strategy.begin).run

    def _loop_of(self, work: TaskWork) -> WorkerLoop:
        return WorkerLoop.of(self._spec, self._readers.of, work, self._termination)

    def _strategy(self, report: ModelReport) -> LocalStrategy | ParameterServerStrategy:
        spec = self._spec
        if on_parameter_servers(spec):
            return ParameterServerStrategy.of(spec, self._link, self._framework, report, self._token)
        local = LocalStrategy.of(spec, self._framework, self._clock, lambda: self._link.register().plan.num_records)
        self._link.on_checkpoint_request(local.request_checkpoint)
        self._link.carry_checkpoints(local.newest_try)
        local.restore()
        self._link.carry_ledger(local.ledger, local.restored_from, local.restored_records)
        self._link.register()
        return local

    def _describe(self, report: ModelReport) -> pb.ModelReport:
        message = pb.ModelReport(
            variables=[pb.Variable(name=v.name, shape=v.shape, trainable=v.trainable) for v in report.variables],
            tables=[
                pb.Table(
                    name=t.name, dim=t.dim, initializer=t.initializer, input_dim=t.input_dim, constraint=t.constraint
                )
                for t in report.tables
            ],
            optimizer=report.optimizer,
            metrics=report.metrics,
            has_callbacks=report.has_callbacks,
            callbacks=report.rules.to_json(),
        )
        if self._definition.has_data:
            if self._spec.job_type is JobType.TRAIN:
                message.has_training_shards = True
                message.training_shards.extend(self._shards(pb.TRAINING))
            if self._spec.prediction_data:
                message.has_prediction_shards = True
                message.prediction_shards.extend(self._shards(pb.PREDICTION))
            if self._spec.validation_data:
                message.has_validation_shards = True
                message.validation_shards.extend(self._shards(pb.EVALUATION))
        return message

    def _shards(self, task_type: pb.TaskType) -> list[pb.ShardMessage]:
        shards = self._readers.of(task_type).shards()
        return [pb.ShardMessage(name=s.name, start=s.start, end=s.end, identity=s.identity) for s in shards]

    def _refuse(self, error: ElasticDLError) -> None:
        cause, details = error.__cause__, error.details if isinstance(error, ModelDefinitionError) else ""
        if cause is not None and not details:
            details = "".join(traceback.format_exception(cause))
        self._link.report_model(pb.ModelReport(error=str(error), error_details=details))


def main(clock: ActivityClock, termination: Termination) -> int:
    """Run a worker, and return its exit code."""
    log_to_stdout()
    threading.excepthook = _end_on_thread_error
    keep_large_buffers()
    # `check_internals` raises it again later, when the worker can report it to the master.
    with suppress(ElasticDLError), no_garbage_collection():
        first_op(os.environ.get(FRAMEWORK_VARIABLE, ""))
    report_ready()
    process = os.getpid()
    try:
        WorkerProcess(clock, termination).run()
    except ElasticDLError as error:
        _log.error("%s", error)
        return 1
    except SystemExit as end:
        if os.getpid() != process:  # a child that user code has forked
            raise
        _log.error("The code of the job has ended this process by sys.exit(%r)", end.code, exc_info=True)
        return exit_code_of(end)
    return 0


def exit_code_of(end: SystemExit) -> int:
    """Return the exit code of a worker that user code ends; never 0, which would mean that the work is done."""
    code = end.code & 0xFF if isinstance(end.code, int) else 1  # the system keeps eight bits, so 256 would become 0
    return code or 1


def _import_collectives() -> None:
    """Import PyTorch for the collectives before any user code, whose garbage must still be collected.

    Raises:
        ElasticDLError: it is missing, or of a version that cannot be used; raised before a model is compiled.
    """
    from elasticdl.collective.nccl import engine_module

    with no_garbage_collection():
        engine_module()


def _environment(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise JobError(f"{name} is not set", "workers are started by the master of a job, not by hand")
    return value


def _end_on_thread_error(args: threading.ExceptHookArgs) -> None:
    """End the worker when a background thread dies, with the reason in its log: it could hang otherwise."""
    if isinstance(args.exc_value, ElasticDLError):
        _log.error("%s", args.exc_value)
    else:
        _log.error("Thread %s died", args.thread and args.thread.name, exc_info=args.exc_value)
    logging.shutdown()
    os._exit(1)
