"""The estimators of `elasticdl sql`: which one a label asks for, their parameters, and their requirements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticdl_client.checks import check_model_def
from elasticdl_client.sql.columns import Feature
from elasticdl_client.sql.snapshot import natural
from elasticdl_client.sql.statement import Attribute, Name, Place, StatementError, suggestion

ESTIMATORS = (
    "DNNClassifier",
    "DNNRegressor",
    "LinearClassifier",
    "LinearRegressor",
    "WideAndDeepClassifier",
    "DeepFMClassifier",
)
OPTIMIZERS = ("adam", "sgd", "adagrad")
_FEW = 20  # different numbers of a label that are taken for classes
_MOST_CLASSES = 1000
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 0.002,
    "optimizer": "adam",
    "hidden_units": [64, 32],
    "embedding_dim": 8,
    "dropout": 0.0,
}
_OF_LINEAR = ("learning_rate", "optimizer")


class Task(StrEnum):
    """The kind of a model's prediction for a row."""

    BINARY = "binary"
    CLASSES = "classes"
    REGRESSION = "regression"


METRICS = {
    Task.BINARY: ("auc", "accuracy", "precision", "recall", "loss"),
    Task.CLASSES: ("accuracy", "loss"),
    Task.REGRESSION: ("mse", "rmse", "mae"),
}


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a table.

    Attributes:
        classes: its values, in order; empty: it is a number.
        mean: Mean of a numeric column.
        deviation: Standard deviation of a numeric column.
        reason: why the task is what it is.
    """

    column: str
    task: Task
    classes: tuple[Any, ...]
    mean: float
    deviation: float
    reason: str


def label_of(
    column: str,
    statistics: Mapping[str, Any],
    values: Sequence[Any],
    num_distinct: int,
    estimator: Name | None,
    place: Place,
) -> Label:
    """Return what a column is as the label of an estimator.

    Args:
        statistics: of the column, by `elasticdl analyze`.
        values: all that differ, in order, where these are at most `num_values_wanted`; else none.
        num_distinct: how many differ.
        estimator: that is given.
        place: of the label in the statement.

    Raises:
        StatementError: it cannot be the label of such an estimator.
    """
    is_text = statistics["type"] == "string" or any(isinstance(value, bool) for value in values)
    if num_distinct < 2:
        raise StatementError(
            f"The label {column!r} has {'one value' if num_distinct else 'no value'} only.",
            "There is nothing to learn; check the WHERE of the SELECT.",
            place,
        )
    if estimator is not None and estimator.text.endswith("Regressor"):
        if is_text:
            raise StatementError(
                f"{estimator.text} predicts numbers, and the label {column!r} is none.", "Use DNNClassifier.", place
            )
        is_regression, reason = True, f"{estimator.text} predicts numbers"
    elif estimator is not None and not is_own(estimator.text):
        is_regression, reason = False, f"{estimator.text} predicts classes"
    else:
        is_regression = not is_text and num_distinct > _FEW
        kind = "texts" if is_text else "numbers"
        reason = f"the label has {num_distinct:,} different {kind}"
    if is_regression:
        return Label(column, Task.REGRESSION, (), statistics["avg"], statistics["stddev"] or 1.0, reason)
    if num_distinct > _MOST_CLASSES:
        raise StatementError(
            f"The label {column!r} has {num_distinct:,} different values; {_MOST_CLASSES:,} classes are the most.",
            "Use a Regressor for numbers; group other values in the SELECT.",
            place,
        )
    classes = tuple(sorted((natural(value) for value in values), key=lambda one: (str(type(one)), one)))
    return Label(column, Task.BINARY if len(classes) == 2 else Task.CLASSES, classes, 0.0, 1.0, reason)


def num_values_wanted() -> int:
    """Return the number of a label's values that can be classes."""
    return _MOST_CLASSES


def is_own(estimator: str) -> bool:
    """Return whether an estimator is a model of the user's: package.module.symbol."""
    return "." in estimator


def check_estimator(estimator: Name) -> None:
    """Check the name of an estimator.

    Raises:
        StatementError: there is none of that name.
    """
    if is_own(estimator.text):
        complaint = check_model_def(estimator.text)
        if complaint:
            raise StatementError(f"{estimator.text!r} {complaint}.", "Write package.module.symbol.", estimator.place)
    elif estimator.text not in ESTIMATORS:
        otherwise = f"The estimators are {', '.join(ESTIMATORS)}; a model of your own is package.module.symbol."
        hint = suggestion(estimator.text, ESTIMATORS, otherwise)
        raise StatementError(f"There is no estimator {estimator.text!r}.", hint, estimator.place)


def check_fits(
    estimator: str, label: Label, features: Sequence[Feature], params: Mapping[str, Any], place: Place
) -> None:
    """Check that an estimator can be built for a label and features.

    Raises:
        StatementError: it cannot.
    """
    if is_own(estimator):
        return
    if estimator == "DeepFMClassifier":
        if label.task is not Task.BINARY:
            raise StatementError(
                f"DeepFMClassifier is for labels of two values; {label.column!r} has {len(label.classes)}.",
                "Use DNNClassifier.",
                place,
            )
        sizes = {one["dimension"] for one in features if one["kind"] == "embedding"} - {params["embedding_dim"]}
        if sizes:
            raise StatementError(
                f"The vectors of DeepFMClassifier are of one size: {params['embedding_dim']}, not {sorted(sizes)[0]}.",
                f"Write WITH model.embedding_dim = {sorted(sizes)[0]}, or other EMBEDDINGs.",
                place,
            )
        if not any(one["kind"] in ("category", "embedding") and one.get("part") != "wide" for one in features):
            raise StatementError("DeepFMClassifier needs categories.", "Use BUCKET for numbers.", place)
    needed = {"WideAndDeepClassifier": ("wide", "deep"), "DeepFMClassifier": ("wide", "deep")}.get(estimator)
    for part in needed or (("wide",) if estimator.startswith("Linear") else ("deep",)):
        if not any(one.get("part", "") in ("", part) for one in features):
            raise StatementError(
                f"No column is for the part {part} of {estimator}.",
                f"Write COLUMN … FOR {part}, or without FOR.",
                place,
            )


def params_of(estimator: str, attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    """Return the parameters of an estimator, by the `model.` keys of WITH and defaults.

    Raises:
        StatementError: it has no such parameter, or not of that value.
    """
    if is_own(estimator):
        return _own_params(attributes)
    names = _OF_LINEAR if estimator.startswith("Linear") else tuple(_DEFAULTS)
    found = dict(_DEFAULTS)
    for key, attribute in attributes.items():
        prefix, _, name = key.partition(".")
        if prefix != "model":
            continue
        if name not in names:
            hint = suggestion(name, names, f"{estimator} has: {', '.join(f'model.{one}' for one in names)}.")
            raise StatementError(f"{estimator} has no parameter {name!r}.", hint, attribute.key.place)
        value = attribute.value.value
        wrong = _complaint(name, value)
        if wrong:
            raise StatementError(
                f"{key} is {wrong}.", f"For example: {key} = {_DEFAULTS[name]}.", attribute.value.place
            )
        found[name] = value.lower() if isinstance(value, str) else value
    return found


def _own_params(attributes: Mapping[str, Attribute]) -> dict[str, Any]:
    """Return the arguments of the user's model function."""
    found = {}
    for key, attribute in attributes.items():
        prefix, _, name = key.partition(".")
        if prefix == "model":
            if not name.isidentifier():
                raise StatementError(f"{name!r} is no argument.", "Write model.NAME = value.", attribute.key.place)
            if ";" in repr(attribute.value.value):
                hint = "--model_params, which it becomes, cannot hold one."
                raise StatementError("The value has a semicolon in it.", hint, attribute.value.place)
            found[name] = attribute.value.value
    return found


def _complaint(name: str, value: Any) -> str:
    """Return what a parameter should be if it is not; empty: it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match name:
        case "learning_rate":
            return "" if is_number and 0 < value <= 10 else "a number above 0, at most 10"
        case "optimizer":
            return "" if isinstance(value, str) and value.lower() in OPTIMIZERS else f"one of {', '.join(OPTIMIZERS)}"
        case "dropout":
            return "" if is_number and 0 <= value < 1 else "a number from 0, below 1"
        case "embedding_dim":
            return "" if type(value) is int and 0 < value <= 4096 else "a whole number from 1 to 4096"
    is_list = isinstance(value, list) and 0 < len(value) <= 100
    is_sizes = is_list and all(type(one) is int and 0 < one <= 65536 for one in value)
    return "" if is_sizes else "a list of whole numbers from 1 to 65536, such as [64, 32]"
