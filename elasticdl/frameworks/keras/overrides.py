"""The user's overrides of `keras.Model`: unsupported ones are refused by name.

docs/keras_models.md has the same as a table.
"""

from __future__ import annotations

import logging
from typing import Any

from elasticdl.frameworks.framework import Mode
from elasticdl_client.errors import ModelDefinitionError

_STEP = (
    "Put what is special into call, add_loss or compute_loss, which are honoured; or train in a script with a loop of "
    "your own (docs/estimator.md)."
)
_LOOP = "The workers have the loop; a loop of your own belongs into a script (docs/estimator.md)."
_TEST = "Put metrics into eval_metrics_fn(), and what is special of the loss into compute_loss."
_PREDICT = "Let call return what is to be predicted, or define a prediction_outputs_processor."
REFUSED = {
    Mode.TRAINING: {
        "train_step": _STEP,
        "train_on_batch": _LOOP,
        "make_train_function": _LOOP,
        "fit": _LOOP,
    },
    Mode.EVALUATION: dict.fromkeys(
        ("test_step", "test_on_batch", "make_test_function", "evaluate", "compute_metrics", "get_metrics_result"), _TEST
    ),
    Mode.PREDICTION: dict.fromkeys(("predict_step", "predict_on_batch", "make_predict_function", "predict"), _PREDICT),
}
NOTED = ("metrics", "metrics_names", "reset_metrics")  # change nothing of the model: the log says so
_log = logging.getLogger("elasticdl.keras")


def is_overridden(model: Any, name: str) -> bool:
    """Whether a method of a model is the user's, by its class or put into the object."""
    definer = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
    return name in vars(model) or (definer is not None and definer.__module__.partition(".")[0] != "keras")


def check_overrides(path: str, model: Any, mode: Mode) -> None:
    """
    Args:
        path: of the user's module, for messages.
        mode: of the job's tasks; a job that trains evaluates and exports, too.

    Raises:
        ModelDefinitionError: the model has methods of its own that no worker calls.
    """
    groups = [group for one, group in REFUSED.items() if mode in (one, Mode.TRAINING)]
    hints = {name: hint for group in groups for name, hint in group.items()}
    found = [name for name in hints if is_overridden(model, name)]
    if found:
        raise ModelDefinitionError(
            f"{path}: {type(model).__name__} overrides {', '.join(found)}, which no worker calls.",
            " ".join(dict.fromkeys(hints[name] for name in found)),
        )
    noted = [name for name in NOTED if is_overridden(model, name)]
    if noted:
        _log.warning(
            "%s of %s: workers do not ask for it; metrics that shall be shown belong into eval_metrics_fn()",
            ", ".join(noted),
            type(model).__name__,
        )
