"""`ModelDefinition`: what the user's module says, as plain callables.  It knows no framework and calls nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """The symbols of a model-definition module.

    Attributes:
        path: the module's file, for messages.
        symbol: the model's name in it.
        model: makes the model; `--model_params` are bound already.
        feed: ``feed(dataset, mode, metadata)``; of PyTorch ``feed(records, mode, metadata)``, or ``dataset``.
        dataset: of Keras alone, where the job's data are the module's own: from a mode to arrays, a
            `keras.utils.PyDataset` or a `tf.data.Dataset`; the same object for the same mode.
        loss: ``loss(labels, predictions)``; of Keras also what `compile` takes: a name, a config, one for each output.
        loss_weights: of Keras alone: those of a `loss` that `compile` was given.
        optimizer: ``optimizer()``; of PyTorch ``optimizer(model)`` or ``optimizer(params)``; of Keras also a name or
            a config.
        eval_metrics_fn: ``eval_metrics_fn()``.
        callbacks: ``callbacks()``.
        custom_data_reader: ``custom_data_reader(data_origin, records_per_task=None, **params)``.
        prediction_outputs_processor: class whose ``process(predictions, worker_id)`` takes predictions.
        collate_fn: of PyTorch alone: ``collate_fn(samples)`` makes a minibatch.
        lr_scheduler: of PyTorch alone: ``lr_scheduler(optimizer)``.
        framework: of an adapter of the module's own: ``framework(definition, minibatch_size, seed, metadata,
            on_parameter_server, mode)`` makes an `elasticdl.frameworks.framework.Framework`.
    """

    path: str
    symbol: str
    model: Callable[[], Any]
    feed: Callable[..., Any] | None = None
    dataset: Callable[[str], Any] | None = None
    loss: Any = None
    loss_weights: Any = None
    optimizer: Any = None
    eval_metrics_fn: Callable[[], Any] | None = None
    callbacks: Callable[[], Any] | None = None
    custom_data_reader: Callable[..., Any] | None = None
    prediction_outputs_processor: Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    lr_scheduler: Callable[..., Any] | None = None
    framework: Callable[..., Any] | None = None

    @property
    def has_data(self) -> bool:
        """The module reads the data itself, so that a worker has to list them."""
        return self.custom_data_reader is not None or self.dataset is not None
