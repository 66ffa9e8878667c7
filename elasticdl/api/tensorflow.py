"""The API for TensorFlow code: a callback, and elastic input for Estimators and custom training loops.

    data = DataShardService(batch_size=32, training_data="iris.csv")
    train_spec = tf.estimator.TrainSpec(input_fn(data, parse))
    train_and_evaluate(estimator, train_spec, eval_spec, data)

An Estimator trains on TensorFlow's own parameter servers (--need_tf_config).  They cannot report which minibatches
they contain, so every record is trained at least once, and the coverage line bounds the number trained twice.
Estimators exist up to TensorFlow 2.15; everything else in this module also works with newer versions.
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
    The rate applies to a minibatch computed on that version.  By epoch: `keras.callbacks.LearningRateScheduler`.

    Args:
        schedule: Maps a model version to a learning rate.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule


def dataset_of(data: DataShardService, parse: Callable[..., Any] | None = None) -> tf.data.Dataset:
    """Return the ledger's minibatches as a `tf.data.Dataset`, one element each; report them in order.

    Do not shuffle, batch or repeat it, since this would break the order; mapping and prefetching are safe.

    Args:
        data: The service that assigns the minibatches.
        parse: Maps an element, in the graph: the records [n] as strings, or their numbers [n] as int64 if the script
            holds the data itself.
    """
    dtype = tf.string if data.has_records else tf.int64

    def elements() -> Iterator[Any]:
        for minibatch in data.stream():
            yield np.array(minibatch.records, object) if data.has_records else np.array(minibatch.indices, np.int64)

    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([None], dtype))
    return dataset if parse is None else dataset.map(parse)


def input_fn(data: DataShardService, parse: Callable[..., Any] | None = None) -> Callable[[], tf.data.Dataset]:
    """Return the input function of a `TrainSpec`; see `dataset_of`.  Use it with an `ElasticDataShardReportHook`."""
    return lambda: dataset_of(data, parse)


def steps(data: DataShardService, parse: Callable[..., Any] | None = None) -> Iterator[Any]:
    """Yield elements for a custom loop (GradientTape): each is reported when the next one is requested."""
    for element in dataset_of(data, parse):
        yield element
        data.report_batch_done()


class ElasticDataShardReportHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Reports a minibatch after each step; on the chief it also reports which model the servers hold.

    Also give the hook's `listener` to the chief's `TrainSpec`, as `train_and_evaluate` does.  Without it the content of
    a checkpoint is unknown, and after the loss of a server or of the chief all data are trained again.
    """

    def __init__(self, data: DataShardService, model_dir: str = "") -> None:
        """
        Args:
            model_dir: Directory of the checkpoints; `train_and_evaluate` sets it.
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
        """Handle the end of the loop without an error: no more data, or a stop by `max_steps` or another hook."""
        if not self._data.is_over and _role() in ("chief", ""):
            self._data.stop_training("TensorFlow's session was asked to stop (max_steps, or a hook)")
        self._data.close()

    def note(self, session: Any) -> None:
        """Report a new session to the master: the chief has restored the newest checkpoint, or has set initial values.

        Raises:
            CheckpointError: The chief has set initial values because it could not find out the newest checkpoint.
        """
        if session is not self._session:
            self._session = session
            if _role() == "chief":
                _check_newest_is_known(self.model_dir)
                self._data.report_session(pb.RESTORED)

    def saves(self, session: Any) -> None:
        """Report that a checkpoint is about to be written."""
        self.note(session)
        self._data.report_session(pb.SAVING)

    def has_saved(self) -> None:
        """Report that the checkpoint is complete."""
        self._data.report_session(pb.SAVED)


class ElasticCheckpointListener(tf.compat.v1.train.CheckpointSaverListener):  # type: ignore[misc]
    """Reports to the job's master, on the chief, between which minibatches a checkpoint was written."""

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
        train_spec: Its input function must come from `input_fn`.
        eval_spec: The evaluator (there is one with --validation_data) evaluates new checkpoints when it sees them, and
            always the last one; a process without a job evaluates at the end.
        data: The service passed to `input_fn`.
    """
    if _role() == "evaluator":
        return _evaluate_to_the_end(estimator, eval_spec, data)
    _look_often_whether_the_model_is_ready()
    if _role() == "worker":
        data.tasks.peek()  # blocks until the chief has made the model
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
        is_last = data.is_training_over()  # asked before looking for a checkpoint: if True, the last one exists
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
    """Return the metrics; None: the chief, which keeps only the newest checkpoints, has removed this one."""
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
    """Shorten the 30 s between two checks of TensorFlow's workers, after the loss of a server, for a restored model."""
    manager = tf.compat.v1.train.SessionManager
    initialize = manager.__init__

    def initialize_hasty(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialize(self, *arguments, **{"recovery_wait_secs": _LOOK_S, **keywords})

    manager.__init__ = initialize_hasty


def _check_newest_is_known(model_dir: str) -> None:
    """Raise where TensorFlow only warns: the job would count the data of the newest checkpoint as trained."""
    path = os.path.join(model_dir, "checkpoint")
    if model_dir and tf.io.gfile.exists(path) and tf.train.get_checkpoint_state(model_dir) is None:
        raise CheckpointError(
            f"{path}, which names the newest checkpoint, cannot be read or is damaged: TensorFlow ignores it",
            "restore it, or write it anew with tf.train.update_checkpoint_state",
        )


def _role() -> str:
    """Return the role of this process in TensorFlow's own cluster: chief, worker, ps, evaluator; empty: no cluster."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return str(config.get("task", {}).get("type", ""))
