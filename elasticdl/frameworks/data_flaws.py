"""Which columns of a minibatch are not finite, where its loss or gradient is not: then the data are to blame first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_HINT = "Fill them in, in the data or in feed; --nan_policy=skip leaves such minibatches out."


def data_flaws(
    features: Any, labels: Any, array: Callable[[Any], npt.NDArray[Any] | None], label_column: str = ""
) -> str:
    """The end of a message: which features hold NaN or infinity, in how many samples; empty: none.

    Args:
        features: of a minibatch; a dictionary names them.
        array: the values of a leaf; None: it is no ordinary tensor.
        label_column: empty: it has no name.
    """
    columns = named_parts(features, "the features") | named_parts(labels, label_column or "the label")
    found = [words for name, part in columns.items() if (words := _flaw(name, array(part)))]
    if not found:
        return ""
    what = f": the data hold NaN or infinity, {', '.join(found)} (a missing cell of a table is NaN)"
    return f"{what}\n  → {_HINT}"


def named_parts(parts: Any, name: str) -> dict[str, Any]:
    """The leaves of features or labels, by what to call them."""
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
