"""The statements of `elasticdl sql` as values; docs/sql.md has their grammar.

`Place` and `StatementError`: places in a statement, and errors that point at them with a caret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest


@dataclass(frozen=True, slots=True)
class Name:
    """An identifier.

    Attributes:
        text: without its quotes.
        is_quoted: it matches a name of the same letters alone, not one in another case.
    """

    text: str
    place: Place
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Literal:
    """A number, a text, true, false, or a list of them."""

    value: object
    place: Place


@dataclass(frozen=True, slots=True)
class NameList:
    """Names and calls in brackets."""

    items: tuple[Expression, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a COLUMN clause with its arguments."""

    function: Name
    arguments: tuple[Expression, ...]
    place: Place


Expression = Name | Literal | NameList | Call


@dataclass(frozen=True, slots=True)
class Query:
    """The SELECT of a statement, for the database as it stands."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model of the registry.

    Attributes:
        version: 0: the newest.
    """

    name: str
    version: int
    place: Place


@dataclass(frozen=True, slots=True)
class ColumnClause:
    """A COLUMN clause.

    Attributes:
        part: Part of the model that uses these columns; None: the whole model.
    """

    expressions: tuple[Expression, ...]
    part: Name | None
    place: Place


@dataclass(frozen=True, slots=True)
class Attribute:
    """A `key = value` of WITH."""

    key: Name
    value: Literal


@dataclass(frozen=True, slots=True)
class Train:
    """`SELECT … TO TRAIN estimator … LABEL column INTO model`, or the short form, which names no estimator."""

    text: str
    query: Query
    estimator: Name | None
    attributes: Mapping[str, Attribute]
    columns: tuple[ColumnClause, ...]
    label: Name
    model: ModelName


@dataclass(frozen=True, slots=True)
class Predict:
    """`SELECT … TO PREDICT table.column USING model`.

    Attributes:
        table: its name, after that of its schema if there is one.
    """

    text: str
    query: Query
    table: tuple[Name, ...]
    column: Name
    model: ModelName


@dataclass(frozen=True, slots=True)
class Evaluate:
    """`SELECT … TO EVALUATE metric, … USING model [INTO table]`.

    Attributes:
        table: Table for the metrics; empty: none.
    """

    text: str
    query: Query
    metrics: tuple[Name, ...]
    model: ModelName
    table: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Explain:
    """`SELECT … TO EXPLAIN [WITH key = value, …] USING model [INTO table]`.

    Attributes:
        table: Table for the importances; empty: none.
    """

    text: str
    query: Query
    attributes: Mapping[str, Attribute]
    model: ModelName
    table: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class ShowModels:
    """`SHOW MODELS`."""

    text: str


@dataclass(frozen=True, slots=True)
class DescribeModel:
    """`DESCRIBE model`."""

    text: str
    model: ModelName


@dataclass(frozen=True, slots=True)
class DropModel:
    """`DROP MODEL model`: one version if it is named, else all."""

    text: str
    model: ModelName


Statement = Train | Predict | Evaluate | Explain | ShowModels | DescribeModel | DropModel


_WIDTH = 100  # characters of a line that are shown
_LISTED = 12


@dataclass(frozen=True, slots=True)
class Place:
    """The characters [start, end) of a text of statements."""

    source: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source[self.start : self.end]

    def to(self, other: Place) -> Place:
        """Return the place from here to the end of another one."""
        return Place(self.source, self.start, max(self.end, other.end))

    def shown(self) -> str:
        """Return its first line with carets below it, and the line's number where there are several."""
        begin = self.source.rfind("\n", 0, self.start) + 1
        end = self.source.find("\n", self.start)
        line = self.source[begin : len(self.source) if end < 0 else end]
        column = self.start - begin
        length = max(1, min(self.end, begin + len(line)) - self.start)
        cut = max(0, column + min(length, _WIDTH) - _WIDTH)
        if cut:
            line, column = "…" + line[cut + 1 :], column - cut
        line = line[:_WIDTH].replace("\t", " ").replace("\r", " ")
        carets = "^" * max(1, min(length, _WIDTH - column))
        number = self.source.count("\n", 0, begin) + 1
        head = f"  {number} | " if "\n" in self.source.strip() else "  "
        return f"{head}{line}\n{' ' * (len(head) + column)}{carets}"


class StatementError(FlagError):
    """A statement is wrong.

    Attributes:
        place: the wrong part of it.
        message: why, without the picture of the place.
    """

    def __init__(self, message: str, hint: str, place: Place) -> None:
        super().__init__(f"{message}\n{place.shown()}", hint)
        self.message = message
        self.place = place


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint of an error about an unknown name: the nearest known one, else `otherwise`, else all of them."""
    names = list(dict.fromkeys(known))
    near = nearest(name, names)
    if near:
        return f"Did you mean '{near}'?"
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return otherwise or f"There are: {', '.join(names[:_LISTED])}{more}."
