"""A worker of an evaluate or predict job, and the loop of all jobs that train nothing: take a lease, work it off,
report.

A `PassWork` processes the minibatches of a task.  An error of user code fails its task, never the worker.

The trained model comes from its own files or from the parameter servers: a checkpoint of parameter servers is restored
by those of this job; a worker reads from them and never writes.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import grpc
import numpy as np

from elasticdl.frameworks.framework import FeedError, Framework, Inference, ModelReport, Parameters, TrainsWithServers
from elasticdl.model_def import ModelDefinition
from elasticdl.protocol import Activity
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.resource_use import keep_large_buffers
from elasticdl.storage.paths import on_this_machine, path_of
from elasticdl.worker.factories import MODES, TASK_TYPES, Readers, load_framework
from elasticdl.worker.inference.output_parts import confirmed_file
from elasticdl.worker.inference.prediction import PredictionWork
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.task_reporting import as_json, evaluate_task, merged_results, said_of
from elasticdl.worker.tasks import HeldLease, LeaseLost, TaskBatches, TaskStream, Values
from elasticdl_client.checkpoint_manifest import MANIFEST, read_manifest
from elasticdl_client.choices import JobType
from elasticdl_client.errors import CheckpointError, DataError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.trained_model import ModelKind, TrainedModel, look_at, state_file

_log = logging.getLogger("elasticdl.worker")
_HINT = "Use the module that the model was trained with, and its --model_params and --embedding_threshold."


def load_trained(spec: JobSpec, definition: ModelDefinition, readers: Readers) -> Inference:
    """The job's model; one on parameter servers has no values yet.

    Raises:
        CheckpointError: it cannot be loaded, or is of another model than the module's.
        ModelDefinitionError: the module cannot be used.
    """
    if spec.num_ps_pods:
        return load_framework(spec, definition, readers)
    with on_this_machine(path_of(spec.checkpoint_dir_for_init)) as path:
        found = look_at(path)
        if found.kind in (ModelKind.SAVED_MODEL, ModelKind.KERAS_FILE):
            from elasticdl.frameworks.keras.saving.loaded_model import LoadedKeras

            metadata = readers.of(TASK_TYPES[spec.job_type]).metadata()
            model: Inference = LoadedKeras(
                definition, Path(str(found.path)), spec.minibatch_size, metadata, MODES[spec.job_type]
            )
        else:
            framework = load_framework(spec, definition, readers)
            _load_values(framework, found)
            model = framework
    _log.info("Loaded the model from %s", spec.checkpoint_dir_for_init)
    return model


def _load_values(framework: Framework, found: TrainedModel) -> None:
    if found.kind is ModelKind.TORCH_STATE:
        from elasticdl.frameworks.torch import TorchFramework

        assert isinstance(framework, TorchFramework)  # the master has looked
        framework.load_file(str(found.path))
        return
    with state_file(found.path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        framework.load_weights(dict(arrays))


def make_one_pass_loop(
    link: MasterLink,
    model: Inference,
    report: ModelReport,
    readers: Readers,
    spec: JobSpec,
    definition: ModelDefinition,
    token: str,
) -> OnePassLoop:
    """The loop of a worker whose model is loaded."""
    work: PassWork
    if spec.job_type is JobType.PREDICT:
        work = PredictionWork(link, model, spec, definition)
    else:
        work = EvaluationWork(link, model, spec.metrics_output)
    tasks = TaskStream.of(spec, link, readers.of, link.clock)
    if not spec.num_ps_pods:
        return OnePassLoop(link, tasks, model, lambda held: Values(), work)
    session = PsSession(link, cast(TrainsWithServers, model), report, token, spec)
    values = ServedValues(session).values
    return OnePassLoop(link, tasks, model, values, work, session.close)


class ServedValues:
    """A model on idle parameter servers: dense parameters are fetched once, rows as they are needed."""

    def __init__(self, session: PsSession) -> None:
        self._session = session
        self._parameters: Parameters | None = None

    def values(self, held: HeldLease) -> Values:
        """For a task."""
        values = self._session.values(held, self._parameters)
        self._parameters = values.parameters
        return values


def check_layout(checkpoint: str, report: ModelReport) -> None:
    """That the module's model is the one of a checkpoint of parameter servers, where that can be read here.

    Raises:
        CheckpointError: naming what differs.
    """
    try:
        manifest = read_manifest(path_of(checkpoint) / MANIFEST)
    except OSError:
        _log.info("%s is not mounted here, so it is not checked against the module", checkpoint)
        return
    try:
        theirs = {v["name"]: list(v["shape"]) for v in manifest["variables"]}
        theirs |= {t["name"]: [t["input_dim"], t["dim"]] for t in manifest["tables"]}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint}/{MANIFEST} is damaged: {error!r}", _HINT) from error
    ours = {v.name: list(v.shape) for v in report.variables}
    ours |= {t.name: [t.input_dim, t.dim] for t in report.tables}
    wrong = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if wrong:
        raise CheckpointError(f"The checkpoint in {checkpoint} is of another model: {', '.join(wrong)}.", _HINT)


class PassWork(Protocol):
    """The work on each task, and at the end."""

    def run(self, held: HeldLease, values: Values, batches: TaskBatches, check: Callable[[], None]) -> None:
        """Works a task off and tells the master.

        Args:
            check: called when all minibatches are taken and before anything is final; raises if records are missing.
        """
        ...

    def end(self, held: HeldLease) -> None:
        """The last task of the job, or in an evaluation the one that computes the numbers."""
        ...


class EvaluationWork:
    """See `PassWork`."""

    def __init__(self, link: MasterLink, model: Inference, metrics_output: str) -> None:
        self._link, self._clock = link, link.clock
        self._model = model
        self._output = metrics_output

    def run(self, held: HeldLease, values: Values, batches: TaskBatches, check: Callable[[], None]) -> None:
        with self._clock.during(Activity.EVALUATE):
            states = evaluate_task(self._model, values, held, batches)
        check()
        self._link.report_evaluation(held.id, states, {}, batches.surplus)

    def end(self, held: HeldLease) -> None:
        with self._clock.during(Activity.EVALUATE):
            results = merged_results(self._model, held.lease.merged)
        if self._output:
            with confirmed_file(held, path_of(self._output), self._link.confirm) as path:
                path.write_text(as_json(held.lease.model_version, results))
        self._link.report_evaluation(held.id, [], results)


class OnePassLoop:
    """Everything a worker of such a job does between its registration and its end."""

    def __init__(
        self,
        link: MasterLink,
        tasks: TaskStream,
        model: Inference,
        values: Callable[[HeldLease], Values],
        work: PassWork,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            values: of the model, for a task.
            close: called at the end.
        """
        self._link, self._clock = link, link.clock
        self._tasks = tasks
        self._model = model
        self._values = values
        self._work = work
        self._close = close

    def run(self) -> None:
        """Returns when the master says that the job is over."""
        self._clock.switch(Activity.COMPUTE)
        while (held := self._next()) is not None:
            if held.lease.type == pb.TRAIN_END or held.lease.merged:
                self._guarded(held, partial(self._end, held))
            else:
                self._work_off(held.lease.type)
        self._close()

    def leave(self, is_idle: bool) -> None:
        """After SIGTERM, in another thread: held tasks go to others at once."""
        self._link.say_farewell()

    def _next(self) -> HeldLease | None:
        with self._clock.during(Activity.IDLE):
            return self._tasks.peek()

    def _end(self, held: HeldLease) -> None:
        self._work.end(held)
        if held.lease.type == pb.TRAIN_END:
            self._link.finish(held.id, 0)

    def _work_off(self, task_type: pb.TaskType) -> None:
        """Consecutive tasks through one run of the input pipeline."""
        try:
            for held, taken in self._tasks.by_task(self._model, task_type):
                keep_large_buffers()  # once more: TensorFlow tunes malloc when its pipeline gives the first minibatch
                self._guarded(held, partial(self._run, held, taken))
        except FeedError as error:
            self._feed_failed(error)

    def _run(self, held: HeldLease, batches: TaskBatches) -> None:
        with self._clock.during(Activity.EVALUATE):
            values = self._values(held)
        self._work.run(held, values, batches, lambda: self._check_read(held))

    def _check_read(self, held: HeldLease) -> None:
        error = self._tasks.errors.get(held.id)
        if error is not None:
            raise error

    def _guarded(self, held: HeldLease, action: Callable[[], None]) -> None:
        """Do something under a lease and close it; an error is the task's failure."""
        try:
            action()
        except LeaseLost:
            _log.info("Lease %d (%s) is lost; the task goes to another worker", held.id, held.task_name)
            self._link.leases.revoke((held.id,))
        except DataError as error:
            self._link.fail(held.id, 0, str(error), "", [])
        except (FeedError, JobError, grpc.RpcError):
            raise
        except Exception as error:  # noqa: BLE001  the user's model, metrics and processor run in here
            _log.error("%s", traceback.format_exc())
            self._link.fail(held.id, held.minibatch, *said_of(error, held), [])
        self._link.leases.remove(held.id)
        self._tasks.close(held)

    def _feed_failed(self, error: FeedError) -> None:
        _log.error("%s", error.details or error)
        held = self._link.leases.get(error.lease)
        if held is not None:
            self._link.fail(held.id, error.n, str(error), error.details, list(error.bad_records))
            self._link.leases.remove(held.id)
            self._tasks.close(held)
