"""Compute the permutation importance of columns: how much the loss grows when the values of a column are permuted.

`TO EXPLAIN` runs this module as a program.  The model is an export, so its code is not needed; all inputs made from one
column are permuted together.  The rows are Parquet files or a database table; the result is a file or a table.
Source: Breiman, Random Forests, 2001; Fisher, Rudin and Dominici, arXiv:1801.01489, for any model.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.data.sql import OutputTable, parse
from elasticdl.storage.paths import on_this_machine, path_of
from elasticdl_client.data_sources import is_table

Array = npt.NDArray[Any]
Predict = Callable[[Mapping[str, Array]], Array]
"""Returns the outputs for a batch of rows: [batch] or [batch, classes]."""

_BATCH = 4096  # rows
_LEAST_PROBABILITY = 1e-7  # Keras clips probabilities at the same value


@dataclass(frozen=True, slots=True)
class Importance:
    """How much the predictions depend on a column.

    Attributes:
        importance: Mean increase of the loss when the column is permuted.
        deviation: Standard deviation of the increase over the permutations.
    """

    column: str
    importance: float
    deviation: float


def importances_of(
    predict: Predict,
    rows: Mapping[str, Array],
    loss: Callable[[Array], float],
    columns: Mapping[str, Sequence[str]],
    repeats: int,
    seed: int,
) -> tuple[float, list[Importance]]:
    """Return the loss on rows, and the importance of each column.

    Args:
        predict: The model.
        rows: The values of each input, [rows].
        loss: Returns the loss for the outputs of all rows, in order.
        columns: Maps each column to its inputs.
        repeats: Number of permutations per column, at least 2.
        seed: Seed of the permutations.
    """
    base = loss(_outputs(predict, rows))
    found = []
    for at, (column, inputs) in enumerate(columns.items()):
        growth = []
        for repeat in range(repeats):
            generator = np.random.default_rng([seed, at, repeat])  # independent of the other columns
            order = generator.permutation(len(rows[inputs[0]]))
            permuted = {name: values[order] if name in inputs else values for name, values in rows.items()}
            growth.append(loss(_outputs(predict, permuted)) - base)
        found.append(Importance(column, float(np.mean(growth)), float(np.std(growth, ddof=1))))
    return base, found


def loss_of(labels: Array, task: str, deviation: float, has_own_outputs: bool) -> tuple[str, Callable[[Array], float]]:
    """Return the name of a loss, and a function from the outputs of all rows to the loss.

    Args:
        labels: Indices of classes, or numbers, [rows].
        task: `binary`, `classes` or `regression`.
        deviation: Standard deviation of the label in the training data.
        has_own_outputs: The outputs for several classes may not be probabilities (a model written by the user).
    """
    if task == "regression":
        return "squared error / variance", lambda outputs: _mean(np.square((outputs - labels) / deviation))
    places = labels.astype(np.int64)
    if task == "classes" and has_own_outputs:
        return "share of wrong classes", lambda outputs: _mean(np.argmax(outputs, axis=1) != places)

    def cross_entropy(outputs: Array) -> float:
        if outputs.ndim == 1:
            of_label = np.where(places == 1, outputs, 1 - outputs)
        else:
            of_label = outputs[np.arange(len(places)), places]
        return _mean(-np.log(np.maximum(of_label, _LEAST_PROBABILITY)))

    return "cross-entropy", cross_entropy


def _mean(values: Array) -> float:
    found = float(np.mean(values.astype(np.float64)))
    if not np.isfinite(found):
        raise SystemExit("The loss of the model is not finite on these rows.")
    return found


def _outputs(predict: Predict, rows: Mapping[str, Array]) -> Array:
    num_rows = len(next(iter(rows.values())))
    batches = [
        predict({name: values[start : start + _BATCH] for name, values in rows.items()})
        for start in range(0, num_rows, _BATCH)
    ]
    return np.concatenate(batches)


def exported(path: Path, names: Sequence[str], num_classes: int) -> Predict:
    """Return a function that predicts with an exported model.

    Args:
        path: Directory of the SavedModel.
        names: Names of the inputs in the rows.
        num_classes: Number of classes of the label; 0: it is a number.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    model = tf.saved_model.load(str(path))  # `predict` keeps it: its functions refer to variables weakly
    ((structure,), _) = model.serve.concrete_functions[0].structured_input_signature
    leaves = tf.nest.flatten(structure)
    inputs = dict(
        zip(
            sorted(structure) if isinstance(structure, Mapping) else [leaf.name for leaf in leaves], leaves, strict=True
        )
    )
    given = {name: name for name in inputs}
    if len(inputs) == len(names) == 1:  # an input without a name
        given = dict.fromkeys(inputs, names[0])
    missing = sorted(set(given.values()) - set(names))
    if missing:
        raise SystemExit(f"The model has inputs that no column is for: {', '.join(missing)}.")

    def predict(rows: Mapping[str, Array]) -> Array:
        batch = {}
        for name, spec in inputs.items():
            values = rows[given[name]]
            typed = values if spec.dtype == tf.string else values.astype(spec.dtype.as_numpy_dtype)
            batch[name] = tf.constant(typed.reshape((-1, *[1] * (len(spec.shape) - 1))), spec.dtype)
        outputs = tf.nest.flatten(model.serve(tf.nest.pack_sequence_as(structure, list(batch.values()))))
        if len(outputs) != 1:
            raise SystemExit(f"The model gives {len(outputs)} outputs, not one.")
        return _by_row(outputs[0].numpy(), num_classes)

    return predict


def _by_row(outputs: Array, num_classes: int) -> Array:
    """Return outputs as [rows] or [rows, classes]."""
    found = outputs.reshape(len(outputs), -1)
    if found.shape[1] == 1 and num_classes <= 2:
        return found[:, 0]
    if found.shape[1] != num_classes:
        raise SystemExit(f"The model gives {found.shape[1]} numbers a row, for {num_classes} classes.")
    return found


def read(source: str) -> dict[str, Array]:
    """Return the columns of a directory of Parquet files, or of a table; texts are arrays of objects.

    Args:
        source: Path, or the URL of a table with `table=` and `key=` in its query; the key column is not returned.
    """
    if not is_table(source):
        import pyarrow.parquet  # imported only here: an image for tables does not need pyarrow

        table = pyarrow.parquet.read_table(source)
        return {name: table.column(name).to_numpy() for name in table.column_names}
    sql, url, query = parse(source)
    engine = sql.create_engine(url, poolclass=sql.pool.NullPool)
    found = sql.Table(query["table"], sql.MetaData(), schema=query.get("schema"), autoload_with=engine)
    columns = [column for column in found.columns if column.name != query["key"]]
    with engine.connect() as connection:
        rows = connection.execute(sql.select(*columns).order_by(found.c[query["key"]])).all()
    values = zip(*rows, strict=True)
    return {one.name: _values(one.type.python_type, of_one) for one, of_one in zip(columns, values, strict=True)}


def _values(kind: type, values: Sequence[Any]) -> Array:
    if kind is str:
        return np.array(values, object)
    if kind is int:
        return np.array(values, np.int64)
    return np.array([np.nan if value is None else float(value) for value in values])  # MySQL has no NaN: NULL


def write(output: str, loss: Importance, columns: Sequence[Importance]) -> None:
    """Write a result as rows (name, importance, deviation): first the loss, then each column.

    Args:
        output: Path of a JSON file, or the URL of a table with `key=` in its query; the key column numbers the rows.
    """
    rows = [loss, *columns]
    if not is_table(output):
        Path(output).write_text(json.dumps([asdict(one) for one in rows], allow_nan=False))
        return
    _, _, query = parse(output)
    OutputTable(output, query["key"]).replace(
        {
            query["key"]: np.arange(len(rows)),
            "column_name": np.array([one.column for one in rows], object),
            "importance": np.array([one.importance for one in rows]),
            "deviation": np.array([one.deviation for one in rows]),
        }
    )


def main() -> None:
    """Write the loss of a model and the importance of its columns to a file or table."""
    parser = argparse.ArgumentParser(prog="python -m elasticdl.tabular.importance", description=main.__doc__)
    parser.add_argument("--export", required=True, help="the SavedModel: a directory, or a URL of storage")
    parser.add_argument("--description", type=Path, required=True, help="model.json of `elasticdl sql`")
    parser.add_argument("--rows", required=True, help="directory of Parquet files, or the URL of a table")
    parser.add_argument("--label_column", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output", required=True, help="file of JSON, or the URL of a table")
    given = parser.parse_args()
    about = json.loads(given.description.read_text())
    rows = read(given.rows)
    labels = rows.pop(given.label_column)
    columns: dict[str, list[str]] = {}
    for one in about["inputs"]:
        columns.setdefault(one["column"], []).append(one["name"])
    name, loss = loss_of(labels, about["task"], about["deviation"], "." in about["estimator"])
    with on_this_machine(path_of(given.export)) as path:
        predict = exported(path, list(rows), about["num_classes"])
        base, found = importances_of(predict, rows, loss, columns, given.repeats, given.seed)
    write(given.output, Importance(name, base, 0.0), found)


if __name__ == "__main__":
    main()
