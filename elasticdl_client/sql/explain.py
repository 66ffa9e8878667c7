"""`TO EXPLAIN`: the columns that a model's predictions depend on, printed, and as a table.

The loss is measured on rows of the SELECT, then with each column permuted among them, by a program:
elasticdl.tabular.importance.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from elasticdl_client.choices import RUN_MODULE
from elasticdl_client.sql import snapshot
from elasticdl_client.sql.columns import written
from elasticdl_client.sql.database import SnapshotReader
from elasticdl_client.sql.models import StoredModel
from elasticdl_client.sql.predict import fields_of
from elasticdl_client.sql.runtime import RowStore, Session, check_target, create
from elasticdl_client.sql.snapshot import LABEL
from elasticdl_client.sql.statement import Explain, StatementError, suggestion

_MODULE = "elasticdl.tabular.importance"
_COLUMNS = {
    "model": "TEXT",
    "column_name": "TEXT",  # COLUMN is a reserved word in PostgreSQL
    "importance": "DOUBLE PRECISION",
    "deviation": "DOUBLE PRECISION",
}
_BAR = 30  # characters of the most important column


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A key of WITH that takes a whole number.

    Attributes:
        default: Value if the key is not given.
        least: Smallest allowed value.
        most: Largest allowed value.
    """

    default: int
    least: int
    most: int


OPTIONS = {
    "explain.rows": WholeNumber(10_000, 2, 1_000_000),
    "explain.repeats": WholeNumber(5, 2, 1_000),
    "explain.seed": WholeNumber(0, 0, 2**32 - 1),
}


@dataclass(frozen=True, slots=True)
class ModelImportances:
    """The columns of a model, the most important first.

    Attributes:
        columns: name, importance and deviation of each.
    """

    head: ClassVar = ("model", "column", "importance", "deviation")
    model: StoredModel
    columns: tuple[tuple[str, float, float], ...]

    @property
    def rows(self) -> list[tuple[str | float, ...]]:
        """Return the same as rows of a table."""
        return [(self.model.title, *one) for one in self.columns]


def check(statement: Explain) -> None:
    """Check the keys of WITH.

    Raises:
        StatementError: one is unknown, or has a value that it cannot have.
    """
    for key, attribute in statement.attributes.items():
        if key not in OPTIONS:
            raise StatementError(f"There is no key {key!r}.", suggestion(key, OPTIONS), attribute.key.place)
        value, allowed = attribute.value.value, OPTIONS[key]
        if type(value) is not int or not allowed.least <= value <= allowed.most:
            raise StatementError(
                f"{key} is a whole number from {allowed.least:,} to {allowed.most:,}.",
                f"Without it {key} is {allowed.default:,}.",
                attribute.value.place,
            )


def run(session: Session, statement: Explain) -> ModelImportances | None:
    """Explain a model; None in a dry run.

    Raises:
        ElasticDLError: it cannot be explained.
    """
    model = session.models.find(statement.model)
    if statement.table:
        check_target(session, statement.table)
    options = {key: _option(statement, key) for key in OPTIONS}
    with session.scratch() as scratch, session.runtime.rows(session.database, scratch) as store:
        program = session.runtime.program(model, _arguments(store, options), session.flags, scratch)
        with session.database.snapshot() as reader:
            names, fields = fields_of(model, reader, statement.query, with_label=True)
            if session.is_dry_run:
                session.say(program.command)
                return None
            program.check()
            num_rows = _count(reader, statement, next(one.column for one in fields if one.name == LABEL))
            parts = reader.rows(statement.query, snapshot.only_numbers(fields))
            rows = _sampled(parts, num_rows, options)
            num_sampled = store.write("inputs", rows, names, fields, model.found["classes"])
        session.say(program.command)
        program.run()
        (loss, value, _), *columns = store.results()
    result = ModelImportances(model, tuple(sorted(columns, key=lambda one: (-one[1], one[0]))))
    if statement.table:
        rows_of_table = [dict(zip(_COLUMNS, row, strict=True)) for row in result.rows]
        create(session, statement.table, _COLUMNS, rows_of_table)
    of_all = f" of {num_rows:,} rows, chosen at random" if num_sampled < num_rows else " rows"
    where = f"on {num_sampled:,}{of_all} (seed {options['explain.seed']})"
    session.say(f"{model.title} {where}: {loss} {value:.6f}.")
    session.say(f"Permuting a column adds, on average of {options['explain.repeats']} times:")
    for line in _chart(result.columns):
        session.say(line)
    return result


def _option(statement: Explain, key: str) -> int:
    attribute = statement.attributes.get(key)
    value = attribute.value.value if attribute is not None else OPTIONS[key].default
    assert isinstance(value, int)
    return value


def _arguments(store: RowStore, options: Mapping[str, int]) -> list[str]:
    return [
        *RUN_MODULE,
        _MODULE,
        f"--rows={store.source('inputs')}",
        f"--label_column={LABEL}",
        f"--repeats={options['explain.repeats']}",
        f"--seed={options['explain.seed']}",
        f"--output={store.result()}",
    ]


def _count(reader: SnapshotReader, statement: Explain, label: str) -> int:
    """Return the number of rows.

    Raises:
        StatementError: there are too few, or a label is NULL.
    """
    num_rows, num_labels, _ = reader.count(statement.query, label)
    if num_rows < 2:
        what = "has no row" if not num_rows else "has one row, which nothing can be permuted with"
        raise StatementError(f"The SELECT {what}.", "Check its WHERE.", statement.query.place)
    if num_labels < num_rows:
        raise StatementError(
            f"The label {label!r} is NULL in {num_rows - num_labels:,} of {num_rows:,} rows.",
            f"Leave them out: WHERE {written(label, reader.dialect)} IS NOT NULL.",
            statement.query.place,
        )
    return num_rows


def _sampled(parts: Iterable[Any], num_rows: int, options: Mapping[str, int]) -> Iterator[Any]:
    """Yield the rows that are chosen by the seed, in their order: parts as the database gives them."""
    size = options["explain.rows"]
    if num_rows <= size:
        yield from parts
        return
    chosen = sorted(random.Random(options["explain.seed"]).sample(range(num_rows), size))
    start = 0
    for part in parts:
        first, end = bisect.bisect_left(chosen, start), bisect.bisect_left(chosen, start + len(part))
        if end > first:
            places = [at - start for at in chosen[first:end]]
            yield [part[at] for at in places] if isinstance(part, list) else part.take(places)
        start += len(part)


def _chart(columns: Sequence[tuple[str, float, float]]) -> Iterator[str]:
    width = max(len(name) for name, _, _ in columns)
    most = max(importance for _, importance, _ in columns)
    for name, importance, deviation in columns:
        bar = "#" * round(_BAR * importance / most) if importance > 0 else ""
        yield f"  {name:<{width}}  {importance:>9.6f} ± {deviation:.6f}  {bar}".rstrip()
