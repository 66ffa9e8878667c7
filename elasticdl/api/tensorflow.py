"""The API of a user's TensorFlow code: a callback, and the elastic input of Estimators and of one's own loops.

    data = DataShardService(batch_size=32, training_data="iris.csv")
    train_spec = tf.estimator.TrainSpec(input_fn(data, parse))
    train_and_evaluate(estimator, train_spec, eval_spec, data)

An Estimator trains on TensorFlow's own parameter servers (--need_tf_config).  They cannot say which minibatches they
hold, so every record is trained at least once, and the coverage bounds what was trained twice.  Estimators are part
of TensorFlow up to 2.15; everything else in here runs on newer ones, too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.errors import CheckpointError

if TYPE_CHECKING:
    from elasticdl.api.data import DataShardService

__all__ = [
    "ElasticCheckpointListener",
    "ElasticDataShardReportHook",
    "LearningRateScheduler",
    "dataset_of",
    "input_fn",
    "steps",
    "train_and_evaluate",
]

_LOOK_S = 1.0
_log = logging.getLogger("elasticdl.api")


class LearningRateScheduler(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate by model version: the number of minibatches in the model so far.
    Synchronous parameter servers count rounds, and AllReduce with --fixed_global_batch counts steps.
    The rate holds for a minibatch that is computed on that version.  By epoch: `keras.callbacks.LearningRateScheduler`.

    Args:
        schedule: model version to learning rate.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule


def dataset_of(data: DataShardService, parse: Callable[..., Any] | None = None) -> tf.data.Dataset:
    """The minibatches of the ledger as a `tf.data.Dataset`, one element each, which is to be reported in order.

    Shuffling, batching or repeating it again would break the order; mapping and prefetching do not.

    Args:
        data: where they come from.
        parse: maps an element, in the graph: the records [n] as strings, or their numbers [n] as int64 where the script
            holds the data itself.
    """
    dtype = tf.string if data.has_records else tf.int64

    def elements() -> Iterator[Any]:
        for minibatch in data.stream():
            yield np.array(minibatch.records, object) if data.has_records else np.array(minibatch.indices, np.int64)

    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([None], dtype))
    return dataset if parse is None else dataset.map(parse)


def input_fn(data: DataShardService, parse: Callable[..., Any] | None = None) -> Callable[[], tf.data.Dataset]:
    """The input function of a `TrainSpec`; see `dataset_of`.  It goes with an `ElasticDataShardReportHook`."""
    return lambda: dataset_of(data, parse)


def steps(data: DataShardService, parse: Callable[..., Any] | None = None) -> Iterator[Any]:
    """Elements for a loop of one's own (GradientTape): each is reported when the next one is asked for."""
    for element in dataset_of(data, parse):
        yield element
        data.report_batch_done()


class ElasticDataShardReportHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Reports a minibatch after each step; on the chief also which model the servers hold.

    Give the chief's `TrainSpec` the hook's `listener`, too; `train_and_evaluate` does.  Without it the content of a
    checkpoint is unknown, and after the loss of a server or of the chief all data are trained again.
    """

    def __init__(self, data: DataShardService, model_dir: str = "") -> None:
        """
        Args:
            model_dir: of the checkpoints; `train_and_evaluate` knows it.
        """
        self.model_dir = model_dir
        self._data = data
        self._session: Any = None
        self.listener = ElasticCheckpointListener(self)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.note(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._data.report_batch_done()

    def end(self, session: Any) -> None:
        """The loop has ended without an error: with the data, or since `max_steps` or another hook asked for it."""
        if not self._data.is_over and _role() in ("chief", ""):
            self._data.stop_training("TensorFlow's session was asked to stop (max_steps, or a hook)")
        self._data.close()

    def note(self, session: Any) -> None:
        """In a new session the chief has restored the newest checkpoint, or has set initial values.

        Raises:
            CheckpointError: it has set initial values since it could not read which checkpoint is the newest.
        """
        if session is not self._session:
            self._session = session
            if _role() == "chief":
                _check_newest_is_known(self.model_dir)
                self._data.report_session(pb.RESTORED)

    def saves(self, session: Any) -> None:
        """A checkpoint is about to be written."""
        self.note(session)
        self._data.report_session(pb.SAVING)

    def has_saved(self) -> None:
        """It is whole."""
        self._data.report_session(pb.SAVED)


class ElasticCheckpointListener(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Tells the job's master, on the chief, between which minibatches a checkpoint was written."""

    def __init__(self, hook: ElasticDataShardReportHook) -> None:
        self._hook = hook

    def before_save(self, session: Any, global_step_value: Any) -> None:
        if _role() == "chief":
            self._hook.saves(session)

    def after_save(self, session: Any, global_step_value: Any) -> None:
        if _role() == "chief":
            self._hook.has_saved()


def train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any, data: DataShardService) -> Any:
    """`tf.estimator.train_and_evaluate` over the ledger: adds the hook and its listener, and ends the evaluator.

    Args:
        train_spec: its input function is one of `input_fn`.
        eval_spec: the evaluator (with --validation_data there is one) evaluates each new checkpoint that it meets, and
            always the last one; a process that is alone evaluates at the end.
        data: of that input function.
    """
    if _role() == "evaluator":
        return _evaluate_to_the_end(estimator, eval_spec, data)
    _look_often_whether_the_model_is_ready()
    if _role() == "worker":
        data.tasks.peek()  # nothing is handed out before the chief has made the model
    hooks, listeners = list(train_spec.hooks), list(train_spec.saving_listeners)
    hook = next((found for found in hooks if isinstance(found, ElasticDataShardReportHook)), None)
    if hook is None:
        hook = ElasticDataShardReportHook(data)
        hooks.append(hook)
    hook.model_dir = hook.model_dir or estimator.model_dir
    spec = tf.estimator.TrainSpec(train_spec.input_fn, train_spec.max_steps, hooks, [*listeners, hook.listener])
    return tf.estimator.train_and_evaluate(estimator, spec, eval_spec)


def _evaluate_to_the_end(estimator: Any, eval_spec: Any, data: DataShardService) -> dict[str, Any]:
    pause, evaluated = threading.Event(), ""
    metrics: dict[str, Any] = {}
    while True:
        is_last = data.is_training_over()  # before looking for a checkpoint: the chief has then written its last
        newest = estimator.latest_checkpoint() or ""
        is_new = bool(newest) and newest != evaluated
        if is_new:
            found = _evaluate(estimator, eval_spec, newest)
            if found is None:
                continue
            metrics, evaluated = found, newest
        if is_new or (is_last and evaluated):
            _export(estimator, eval_spec, evaluated, metrics, is_last)
        if is_last:
            return metrics
        pause.wait(_LOOK_S)


def _evaluate(estimator: Any, eval_spec: Any, checkpoint: str) -> dict[str, Any] | None:
    """None: the chief, which keeps the newest few, has removed that checkpoint meanwhile."""
    try:
        metrics: dict[str, Any] = estimator.evaluate(
            eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, checkpoint_path=checkpoint, name=eval_spec.name
        )
    except (ValueError, tf.errors.OpError):
        if tf.io.gfile.exists(f"{checkpoint}.index"):
            raise
        _log.warning("%s was removed before it could be evaluated", checkpoint)
        return None
    shown = {name: float(value) for name, value in metrics.items() if name != "global_step"}
    print(f"Evaluation metrics[step={metrics['global_step']}]: {shown}", flush=True)  # noqa: T201  a log line of the pod
    return metrics


def _export(estimator: Any, eval_spec: Any, checkpoint: str, metrics: dict[str, Any], is_last: bool) -> None:
    for exporter in eval_spec.exporters:
        path = os.path.join(estimator.model_dir, "export", exporter.name)
        exporter.export(estimator, path, checkpoint, metrics, is_last)


def _look_often_whether_the_model_is_ready() -> None:
    """After the loss of a server, TensorFlow's workers would look only every 30 s whether the chief has restored it."""
    manager = tf.compat.v1.train.SessionManager
    initialize = manager.__init__

    def initialize_hasty(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialize(self, *arguments, **{"recovery_wait_secs": _LOOK_S, **keywords})

    manager.__init__ = initialize_hasty


def _check_newest_is_known(model_dir: str) -> None:
    """TensorFlow only warns: the job would count the data of the newest checkpoint as trained."""
    path = os.path.join(model_dir, "checkpoint")
    if model_dir and tf.io.gfile.exists(path) and tf.train.get_checkpoint_state(model_dir) is None:
        raise CheckpointError(
            f"{path}, which names the newest checkpoint, cannot be read or is damaged: TensorFlow ignores it",
            "restore it, or write it anew with tf.train.update_checkpoint_state",
        )


def _role() -> str:
    """Of this process among TensorFlow's own: chief, worker, ps, evaluator; empty: it is alone."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return str(config.get("task", {}).get("type", ""))
