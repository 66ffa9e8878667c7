"""Find flaws in the data of a minibatch: the columns or labels behind a failed or non-finite loss or gradient.

Wrong labels are texts, class numbers beyond the model's outputs, and values that are not probabilities. Correct labels
cost nothing: they are checked only after a loss failed or is not finite. The exception is binary crossentropy, whose
loss is finite but wrong for a label outside [0, 1]; its labels are checked before each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Batch, LabelError

_SHOWN = 60  # longest quoted text, in characters
_SAID = 100  # longest quoted error of a framework, in characters
_NODE = "[["  # marks the lines of a TensorFlow error that name a node of the graph
_ROUNDING = 1e-3  # tolerance for computed probabilities, such as pixel values
_NUM_TEXTS = 3  # shown in a hint
_LEAVES_OUT = "--max_bad_records=N leaves such records out"


@dataclass(frozen=True, slots=True)
class ClassLabels:
    """The labels that a loss accepts: class numbers.

    Attributes:
        count: Number of classes; labels are in [0, count).
        ignored: The label that the loss ignores; None: there is none.
        takes_fractions: Labels may have a floating-point type.
    """

    count: int
    ignored: int | None
    takes_fractions: bool


@dataclass(frozen=True, slots=True)
class ProbabilityLabels:
    """The labels that binary crossentropy accepts: numbers from 0 to 1."""


@dataclass(frozen=True, slots=True)
class LabelFlaw:
    """The first wrong label of a minibatch.

    Attributes:
        position: Index of its sample in the minibatch; None: more than one sample is affected.
    """

    what: str
    hint: str
    position: int | None

    def error(self, first_sample: int | None, cause: Exception | None) -> LabelError:
        """Return the flaw as an exception.

        Args:
            first_sample: Index of the minibatch's first sample in its task; None: samples are not records.
            cause: The framework's exception, if there was one.
        """
        raised = "" if cause is None else f" ({type(cause).__name__}: {_last_line(cause)})"
        sample = None if first_sample is None or self.position is None else first_sample + self.position
        return LabelError(f"{self.what}{raised}\n  → {self.hint}", sample)

    def explained(self) -> str:
        """Return the end of a message about a value that is not finite."""
        where = "" if self.position is None else f", first in sample {self.position}"
        return f": {self.what}{where}\n  → {self.hint}"


def label_flaw(
    labels: Any,
    taken: ClassLabels | ProbabilityLabels | None,
    column: str,
    lookup: str,
    array: Callable[[Any], npt.NDArray[Any] | None],
) -> LabelFlaw | None:
    """Return the flaw of labels that a loss rejected; None if it is unknown.

    Args:
        labels: The labels of a minibatch.
        taken: The labels that the loss accepts; None: unknown.
        column: The label column; empty: it has no name.
        lookup: The layer or function that maps texts to numbers, with `{}` for a JSON list of the texts.
        array: Returns the values of a leaf; None: it is not an ordinary tensor.
    """
    if _is_texts(labels):
        return _text_flaw(labels, _called(column), column, lookup)
    named = named_parts(labels, _called(column))
    for name, part in named.items():
        values = part if _is_texts(part) else array(part)
        if values is None:
            continue
        if _is_texts(values) or values.dtype.kind in "OSU":
            return _text_flaw(list(np.ravel(values)), name, column, lookup)
        if isinstance(taken, ClassLabels) and len(named) == 1:
            return _class_flaw(values, taken, name, column)
        if isinstance(taken, ProbabilityLabels) and len(named) == 1:
            return _probability_flaw(values, name)
    return None


@contextmanager
def labels_blamed(
    batches: Sequence[Batch],
    flaw_of: Callable[[Batch], LabelFlaw | None],
    samples_per_batch: int | None,
    at_once: bool,
) -> Iterator[None]:
    """Return the context of a step: an error caused by wrong labels is raised with their column.

    Args:
        batches: The minibatches of the step.
        flaw_of: Returns the flaw in the labels of a minibatch, if any.
        samples_per_batch: None: samples are not records.
        at_once: Labels are known to be wrong, but the step itself would not fail: raise before it.

    Raises:
        LabelError: The labels are wrong.
    """

    def blame(cause: Exception | None) -> None:
        for batch in batches:
            if (flaw := flaw_of(batch)) is not None:
                first_sample = None if samples_per_batch is None else batch.n * samples_per_batch
                raise flaw.error(first_sample, cause) from cause

    if at_once:
        blame(None)
    try:
        yield
    except Exception as error:
        blame(error)
        raise


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and _NODE not in line]
    return lines[-1].strip()[:_SAID] if lines else ""


def _called(column: str) -> str:
    return f"the label column {column}" if column else "the label"


def _is_texts(part: Any) -> bool:
    return isinstance(part, list | tuple) and bool(part) and all(isinstance(one, str) for one in part)


def _text_flaw(texts: Sequence[Any], name: str, column: str, lookup: str) -> LabelFlaw:
    decoded = [one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in texts]
    what = f"{name[:1].upper()}{name[1:]} holds texts, such as {decoded[0][:_SHOWN]!r}, and the loss takes numbers"
    # Same order as everywhere else (False 0, True 1); an empty cell is not a class.
    kinds = sorted({text[:_SHOWN] for text in decoded if text.strip()})
    if column and all(_is_number(kind) for kind in kinds):
        hint = f'Read it as numbers: --data_reader_params=\'column_dtypes={{"{column}": "int64"}}\'; {_LEAVES_OUT}.'
        return LabelFlaw(what, hint, 0)
    shown = json.dumps(kinds[:_NUM_TEXTS], ensure_ascii=False)[:-1] + (", …]" if len(kinds) > _NUM_TEXTS else "]")
    hint = (
        f"Write class numbers, from 0, into the data, or map the texts in a feed of your own: {lookup.format(shown)}."
    )
    return LabelFlaw(what, hint, 0)


def _class_flaw(values: npt.NDArray[Any], classes: ClassLabels, name: str, column: str) -> LabelFlaw | None:
    flat, num_classes = values.reshape(len(values), -1), classes.count
    with np.errstate(invalid="ignore"):
        is_missing = np.isnan(flat) if values.dtype.kind == "f" else np.zeros(flat.shape, bool)
        is_wrong = ((flat < 0) | (flat >= num_classes)) & (flat != classes.ignored)
    named = f"{name[:1].upper()}{name[1:]}"
    if is_missing.any() or (values.dtype.kind == "f" and not classes.takes_fractions):
        return _missing_flaw(named, is_missing, column)
    if not is_wrong.any():
        return None
    position = int(is_wrong.any(axis=1).argmax())
    wrong = flat[is_wrong]
    what = (
        f"{named} holds {_numbers(wrong)}, and the model has {num_classes} outputs, for the classes 0 to "
        f"{num_classes - 1}"
    )
    if int(flat.min()) >= 1 and int(flat.max()) == num_classes:
        hint = "Classes are counted from 0: subtract 1 from the labels, in the data, in feed or in loss."
    elif (wrong < 0).any():
        hint = "Give such records a class number, or leave them out: no class has a number below 0."
    else:
        hint = f"Give the last layer {int(flat.max()) + 1} outputs or more, or map the labels to classes in feed."
    return LabelFlaw(what, hint, position)


def are_probabilities(values: npt.NDArray[Any] | None) -> bool:
    """Return whether binary crossentropy accepts these labels; True for None (not an ordinary tensor)."""
    if values is None or values.dtype.kind not in "iuf" or not values.size:
        return True
    return bool(values.min() >= -_ROUNDING and values.max() <= 1 + _ROUNDING)


def _probability_flaw(values: npt.NDArray[Any], name: str) -> LabelFlaw | None:
    flat = values.reshape(len(values), -1)
    is_wrong = (flat < -_ROUNDING) | (flat > 1 + _ROUNDING)
    if not is_wrong.any():  # some are NaN, which the message about the loss reports
        return None
    what = f"{name[:1].upper()}{name[1:]} holds {_numbers(flat[is_wrong])}, and binary crossentropy takes 0 to 1"
    kinds = {float(kind) for kind in np.unique(flat)}
    hint = "Write probabilities from 0 to 1, in the data or in feed, or take another loss."
    if kinds <= {1.0, 2.0}:
        hint = "Write 0 and 1 for 1 and 2: subtract 1 from the labels, in the data or in feed."
    elif kinds <= {-1.0, 1.0}:
        hint = "Write 0 for -1, in the data or in feed; or take a loss for -1 and 1, such as hinge."
    elif all(kind >= 0 and kind.is_integer() for kind in kinds):
        hint = (
            f"Are they {int(max(kinds)) + 1} classes? Then give the last layer an output for each and take a loss of "
            "classes. Else write 0 and 1, in the data or in feed."
        )
    return LabelFlaw(what, hint, int(is_wrong.any(axis=1).argmax()))


def _missing_flaw(named: str, is_missing: npt.NDArray[np.bool_], column: str) -> LabelFlaw:
    found = "has no value (NaN)" if is_missing.any() else "holds fractions, or values are missing in it"
    hint = "Give such records a whole number, or leave them out in feed."
    if column:
        read = f'--data_reader_params=\'column_dtypes={{"{column}": "int64"}}\''
        hint = f"Give such records a whole number. {read} makes bad records of them, and {_LEAVES_OUT}."
    position = int(is_missing.any(axis=1).argmax()) if is_missing.any() else None
    return LabelFlaw(f"{named} {found}, and the loss takes class numbers", hint, position)


def _numbers(values: Iterable[Any]) -> str:
    kinds = sorted({float(value) for value in values})
    return ", ".join(f"{kind:.6g}" for kind in kinds[:_NUM_TEXTS]) + (" and others" if len(kinds) > _NUM_TEXTS else "")


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


_HINT = "Fill them in, in the data or in feed; --nan_policy=skip leaves such minibatches out."


def data_flaws(
    features: Any, labels: Any, array: Callable[[Any], npt.NDArray[Any] | None], label_column: str = ""
) -> str:
    """Return the end of a message: the features with NaN or infinity, and in how many samples; empty if all are finite.

    Args:
        features: The features of a minibatch; the keys of a dictionary are their names.
        array: Returns the values of a leaf; None: it is not an ordinary tensor.
        label_column: Empty: the label column has no name.
    """
    columns = named_parts(features, "the features") | named_parts(labels, label_column or "the label")
    found = [words for name, part in columns.items() if (words := _flaw(name, array(part)))]
    if not found:
        return ""
    what = f": the data hold NaN or infinity, {', '.join(found)} (a missing cell of a table is NaN)"
    return f"{what}\n  → {_HINT}"


def named_parts(parts: Any, name: str) -> dict[str, Any]:
    """Return the leaves of features or labels, by the name to use in messages."""
    if isinstance(parts, Mapping):
        return {str(key): part for key, part in parts.items()}
    if isinstance(parts, list | tuple):
        return {f"{name}[{k}]": part for k, part in enumerate(parts)}
    return {name: parts}


def _flaw(name: str, values: npt.NDArray[Any] | None) -> str:
    if values is None or values.dtype.kind != "f" or not values.ndim:
        return ""
    wrong = int((~np.isfinite(values).reshape(len(values), -1).all(axis=1)).sum())
    return f"{name} in {wrong} of {len(values)} samples" if wrong else ""
