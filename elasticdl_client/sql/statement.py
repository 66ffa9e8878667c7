"""The statements of `elasticdl sql` as values; docs/sql.md has their grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl_client.sql.places import Place


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
        part: of the model that it is for; None: all of it.
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
        table: of the metrics; empty: none.
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
        table: of the importances; empty: none.
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
