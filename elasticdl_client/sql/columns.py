"""Features of a model from a table's columns: the functions of COLUMN, and the clause that the statistics suggest.

A feature is a plain dictionary, which is written into the model's description and read by `elasticdl.tabular`.  Numbers
and texts are the two forms in which a column reaches a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticdl_client.sql.database import find_name
from elasticdl_client.sql.statement import (
    Call,
    ColumnClause,
    Expression,
    Literal,
    Name,
    NameList,
    StatementError,
    suggestion,
)
from elasticdl_client.sql.statistics import TYPES, unusable_type
from elasticdl_client.sql.tokens import CLAUSES, quoted_name, quoted_text

Feature = dict[str, Any]
PARTS = {"wide": "wide", "linear_feature_columns": "wide", "deep": "deep", "dnn_feature_columns": "deep"}
_IDS = ("VOCABULARY", "CATEGORY_HASH", "CATEGORY_ID", "BUCKET", "CROSS")
FUNCTIONS = {  # name: how it is written
    "NUMERIC": "NUMERIC(column)",
    "NORMALIZE": "NORMALIZE(column[, mean, deviation])",
    "BUCKET": "BUCKET(column[, [boundaries]])",
    "VOCABULARY": "VOCABULARY(column[, ['value', …]])",
    "CATEGORY_HASH": "CATEGORY_HASH(column, size)",
    "CATEGORY_ID": "CATEGORY_ID(column, size)",
    "CROSS": "CROSS([columns or categories], size)",
    "EMBEDDING": "EMBEDDING(category, dimension)",
    "INDICATOR": "INDICATOR(category)",
}
_MOST_VOCABULARY = 50  # longer ones are hashed, which keeps the clause readable
_MOST_HASHES = 100_000
_HASHES_PER_VALUE = 4  # every fifth value shares its id
_LARGEST = 10_000_000


@dataclass(frozen=True, slots=True)
class ColumnFeatures:
    """The features of a model.

    Attributes:
        features: in the order of the clause.
        left_out: columns that are no features, with the reason.
    """

    features: tuple[Feature, ...]
    left_out: Mapping[str, str]


def inferred(statistics: Mapping[str, Any], label: str) -> ColumnFeatures:
    """Return the features that the statistics of a table's columns ask for.

    Args:
        statistics: of `elasticdl analyze`, by column.
        label: a column that is none.
    """
    features: list[Feature] = []
    left_out: dict[str, str] = {}
    for name, found in statistics.items():
        if name == label:
            continue
        reason = _useless(name, found)
        if reason:
            left_out[name] = reason
        else:
            features += _by_statistics(name, found)
    return ColumnFeatures(tuple(features), left_out)


def resolved(clauses: Sequence[ColumnClause], statistics: Mapping[str, Any], label: str) -> ColumnFeatures:
    """Return the features of COLUMN clauses.

    Args:
        statistics: of `elasticdl analyze`, by column.
        label: a column that is none.

    Raises:
        StatementError: a clause is wrong.
    """
    features: list[Feature] = []
    for clause in clauses:
        part = ""
        if clause.part is not None:
            if clause.part.text not in PARTS:
                raise StatementError(
                    f"{clause.part.text!r} is no part of a model.",
                    suggestion(clause.part.text, PARTS),
                    clause.part.place,
                )
            part = PARTS[clause.part.text]
        for expression in clause.expressions:
            made = _Resolver(statistics, label).features(expression)
            features += [feature | {"part": part} for feature in made]
    return ColumnFeatures(tuple(features), {})


def as_they_are(clauses: Sequence[ColumnClause], statistics: Mapping[str, Any], label: str) -> ColumnFeatures:
    """Return the columns of a model of the user's: those that COLUMN names, else all that have a value.

    Raises:
        StatementError: a clause has more than names.
    """
    left_out = {name: _without_values(found) for name, found in statistics.items() if not found["count"]}
    names = [name for name in statistics if name != label and name not in left_out]
    if clauses:
        names, left_out = [], {}
        for clause in clauses:
            if clause.part is not None:
                hint = "Leave FOR out."
                raise StatementError("A model of your own has no parts.", hint, clause.part.place)
            names += [_Resolver(statistics, label).column(one) for one in clause.expressions]
    features = [
        {"kind": "raw", "column": name, "form": "text" if statistics[name]["type"] == "string" else "number"}
        for name in dict.fromkeys(names)
    ]
    return ColumnFeatures(tuple(features), left_out)


def inputs_of(features: Sequence[Feature]) -> list[tuple[str, str]]:
    """Return the columns that features read, each with its form, `number` or `text`, once."""
    found: dict[tuple[str, str], None] = {}
    for feature in features:
        if feature["kind"] == "raw":
            found[feature["column"], feature["form"]] = None
            continue
        for ids in [feature] if feature["kind"] == "number" else _leaves(feature["ids"]):
            found[ids["column"], "text" if ids["kind"] in ("vocabulary", "hash") else "number"] = None
    return list(found)


def clause_of(features: Sequence[Feature], dialect: str) -> str:
    """Return the COLUMN clauses that say what features are, in a dialect of sqlglot."""
    writer = _ClauseWriter(dialect)
    by_part: dict[str, list[str]] = {}
    for feature in features:
        by_part.setdefault(feature.get("part", ""), []).append(writer.feature(feature))
    return " ".join(f"COLUMN {', '.join(texts)}{f' FOR {part}' if part else ''}" for part, texts in by_part.items())


def _leaves(ids: Feature) -> list[Feature]:
    return [leaf for one in ids["of"] for leaf in _leaves(one)] if ids["kind"] == "cross" else [ids]


def _useless(name: str, found: Mapping[str, Any]) -> str:
    """Return why a column says nothing about the label; empty: it may."""
    if not found["count"]:
        return _without_values(found)
    count, distinct = found["count"], found["distinct_count"]
    if distinct == 1 and not found["missing"]:
        return "all rows have the same value"
    if distinct == count and count > 10:
        is_id = re.search(r"(^|_)id$", name.lower())
        if found["type"] == "int64" and (is_id or found["max"] - found["min"] + 1 == count):
            return "it numbers the rows"
    if found["type"] == "string" and distinct > max(_MOST_VOCABULARY, count / 2):
        return "most rows have a value of their own"
    return ""


def _without_values(found: Mapping[str, Any]) -> str:
    unusable = unusable_type(found)
    return f"it is of a type that no model takes, {unusable}" if unusable else "it has no value"


def _by_statistics(name: str, found: Mapping[str, Any]) -> list[Feature]:
    if found["type"] == "string":
        distinct = found["distinct_count"]
        if distinct <= _MOST_VOCABULARY:
            return [_category({"kind": "vocabulary", "column": name, "values": sorted(found["vocab"])})]
        return [_category({"kind": "hash", "column": name, "size": min(_MOST_HASHES, _HASHES_PER_VALUE * distinct)})]
    made = [_normalized(name, found)]
    boundaries = _boundaries(found)
    if boundaries and found["distinct_count"] > 2:
        made.append(_category({"kind": "bucket", "column": name, "boundaries": boundaries}))
    return made


def _boundaries(found: Mapping[str, Any]) -> list[float]:
    """Return the boundaries of buckets that rows fall into: none below the smallest value."""
    return [one for one in found["boundaries"] if one > found["min"]]


def _normalized(name: str, found: Mapping[str, Any]) -> Feature:
    deviation = found["stddev"] or 1.0
    return {"kind": "number", "column": name, "mean": _short(found["avg"]), "deviation": _short(deviation)}


def _category(ids: Feature) -> Feature:
    return {"kind": "category", "ids": ids}


def _short(number: float) -> float:
    return float(f"{number:.6g}")


class _Resolver:
    """Makes features of the expressions of COLUMN."""

    def __init__(self, statistics: Mapping[str, Any], label: str) -> None:
        self._statistics = statistics
        self._label = label

    def features(self, expression: Expression) -> list[Feature]:
        if isinstance(expression, Name):
            name = self.column(expression)
            return _by_statistics(name, self._statistics[name])
        call = self._call(expression)
        function = self._function(call)
        if function == "NUMERIC":
            (column,) = self._arguments(call, 1, 1)
            return [{"kind": "number", "column": self._number(column), "mean": 0.0, "deviation": 1.0}]
        if function == "NORMALIZE":
            return [self._normalize(call)]
        if function == "EMBEDDING":
            ids, dimension = self._arguments(call, 2, 2)
            return [{"kind": "embedding", "ids": self._ids(ids), "dimension": self._size(dimension, 4096)}]
        if function == "INDICATOR":
            (ids,) = self._arguments(call, 1, 1)
            return [{"kind": "indicator", "ids": self._ids(ids)}]
        return [_category(self._ids(expression))]

    def _normalize(self, call: Call) -> Feature:
        column, *given = self._arguments(call, 1, 3)
        name = self._number(column)
        if not given:
            return _normalized(name, self._statistics[name])
        if len(given) == 1:
            raise StatementError(
                "NORMALIZE has a mean, and no deviation.", f"Write {FUNCTIONS['NORMALIZE']}.", call.place
            )
        mean, deviation = (self._value(one, int | float, "a number") for one in given)
        if deviation <= 0:
            raise StatementError("A deviation is above 0.", "Leave both out to use those of the table.", given[1].place)
        return {"kind": "number", "column": name, "mean": float(mean), "deviation": float(deviation)}

    def _ids(self, expression: Expression) -> Feature:
        """Return the ids of a category; those of a plain column name depend on its type."""
        if isinstance(expression, Name):
            name = self.column(expression)
            if self._statistics[name]["type"] == "string":
                ids: Feature = _by_statistics(name, self._statistics[name])[0]["ids"]
                return ids
            return self._bucket(Call(expression, (expression,), expression.place))
        call = self._call(expression)
        function = self._function(call)
        if function not in _IDS:
            raise StatementError(
                f"{function} makes no category.", f"These do: {', '.join(_IDS)}, or the name of a column.", call.place
            )
        makers: dict[str, Callable[[Call], Feature]] = {
            "VOCABULARY": self._vocabulary,
            "CATEGORY_HASH": self._hash,
            "CATEGORY_ID": self._identity,
            "BUCKET": self._bucket,
            "CROSS": self._cross,
        }
        return makers[function](call)

    def _vocabulary(self, call: Call) -> Feature:
        column, *given = self._arguments(call, 1, 2)
        name = self.column(column)
        if given:
            values = self._value(given[0], list, "a list of values")
            texts = [_text(value) for value in values]
            if not texts or len(set(texts)) < len(texts) or "" in texts:
                raise StatementError("A vocabulary lists values, each once.", "For example ['a', 'b'].", given[0].place)
            return {"kind": "vocabulary", "column": name, "values": texts}
        values = self._statistics[name].get("vocab")
        if not values:
            raise StatementError(f"{name!r} has fractions, or no value.", "Use BUCKET.", column.place)
        return {"kind": "vocabulary", "column": name, "values": sorted(values)}

    def _hash(self, call: Call) -> Feature:
        column, size = self._arguments(call, 2, 2)
        return {"kind": "hash", "column": self.column(column), "size": self._size(size, _LARGEST)}

    def _identity(self, call: Call) -> Feature:
        column, size = self._arguments(call, 2, 2)
        return {"kind": "identity", "column": self._number(column), "size": self._size(size, _LARGEST)}

    def _bucket(self, call: Call) -> Feature:
        column, *given = self._arguments(call, 1, 2)
        name = self._number(column)
        if not given:
            boundaries = _boundaries(self._statistics[name])
            if not boundaries:
                hint = f"Write boundaries: BUCKET({name}, [1, 2])."
                raise StatementError(f"Most rows have one value of {name!r}.", hint, column.place)
            return {"kind": "bucket", "column": name, "boundaries": boundaries}
        boundaries = self._value(given[0], list, "a list of boundaries")
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in boundaries):
            raise StatementError("Boundaries are numbers.", "For example [10, 20.5, 30].", given[0].place)
        if not boundaries or sorted(set(boundaries)) != boundaries:
            raise StatementError("Boundaries go up.", "For example [10, 20.5, 30].", given[0].place)
        return {"kind": "bucket", "column": name, "boundaries": [float(one) for one in boundaries]}

    def _cross(self, call: Call) -> Feature:
        columns, size = self._arguments(call, 2, 2)
        items = columns.items if isinstance(columns, NameList) else ()
        if len(items) < 2:
            raise StatementError("CROSS is of two columns or more.", f"Write {FUNCTIONS['CROSS']}.", columns.place)
        of = [self._ids(item) for item in items]
        if any(one["kind"] == "cross" for one in of):
            raise StatementError("CROSS is not of a CROSS.", "Name all columns in one list.", columns.place)
        return {"kind": "cross", "of": of, "size": self._size(size, _LARGEST)}

    def _call(self, expression: Expression) -> Call:
        if isinstance(expression, Call):
            return expression
        raise StatementError(
            "A column or a function is expected.", "For example age, or NORMALIZE(age).", expression.place
        )

    def _function(self, call: Call) -> str:
        name = call.function.text.upper()
        if name not in FUNCTIONS:
            hint = suggestion(name, FUNCTIONS, f"The functions are {', '.join(FUNCTIONS)}.")
            raise StatementError(f"There is no function {call.function.text!r}.", hint, call.function.place)
        return name

    def _arguments(self, call: Call, least: int, most: int) -> tuple[Expression, ...]:
        if not least <= len(call.arguments) <= most:
            raise StatementError(
                f"{call.function.text.upper()} cannot have {len(call.arguments)} arguments.",
                f"Write {FUNCTIONS[call.function.text.upper()]}.",
                call.place,
            )
        return call.arguments

    def column(self, expression: Expression) -> str:
        """Return the column of a name."""
        if not isinstance(expression, Name):
            raise StatementError("The name of a column is expected.", "For example age.", expression.place)
        found = find_name(list(self._statistics), expression)
        if not found:
            known = [name for name in self._statistics if name != self._label]
            hint = suggestion(expression.text, known)
            raise StatementError(f"The SELECT has no column {expression.text!r}.", hint, expression.place)
        if found == self._label:
            raise StatementError(f"{found!r} is the label.", "A model must not see it: leave it out.", expression.place)
        if not self._statistics[found]["count"]:
            hint = f"Leave it out. Models take {TYPES}."
            why = _without_values(self._statistics[found])
            raise StatementError(f"The column {found!r} is of no use: {why}.", hint, expression.place)
        return found

    def _number(self, expression: Expression) -> str:
        name = self.column(expression)
        if self._statistics[name]["type"] == "string":
            raise StatementError(
                f"The column {name!r} holds texts.",
                "Use VOCABULARY or CATEGORY_HASH, or CAST it in the SELECT.",
                expression.place,
            )
        return name

    def _value(self, expression: Expression, kinds: Any, expected: str) -> Any:
        if isinstance(expression, Literal) and isinstance(expression.value, kinds) and expression.value is not True:
            return expression.value
        raise StatementError(
            f"{expected.capitalize()} is expected.", "See docs/sql.md for the function.", expression.place
        )

    def _size(self, expression: Expression, largest: int) -> int:
        size = self._value(expression, int, "a whole number")
        if not 0 < size <= largest:
            raise StatementError(f"{size} is not between 1 and {largest}.", "Write another number.", expression.place)
        return int(size)


class _ClauseWriter:
    """Writes features as a dialect has their names and texts."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect

    def feature(self, feature: Feature) -> str:
        if feature["kind"] == "raw":
            return self._name(feature)
        if feature["kind"] == "number":
            if (feature["mean"], feature["deviation"]) == (0.0, 1.0):
                return f"NUMERIC({self._name(feature)})"
            return f"NORMALIZE({self._name(feature)}, {feature['mean']:.6g}, {feature['deviation']:.6g})"
        ids = self._ids(feature["ids"])
        if feature["kind"] == "embedding":
            return f"EMBEDDING({ids}, {feature['dimension']})"
        return f"INDICATOR({ids})" if feature["kind"] == "indicator" else ids

    def _ids(self, ids: Feature) -> str:
        match ids["kind"]:
            case "vocabulary":
                values = ", ".join(quoted_text(value, self._dialect) for value in ids["values"])
                return f"VOCABULARY({self._name(ids)}, [{values}])"
            case "hash":
                return f"CATEGORY_HASH({self._name(ids)}, {ids['size']})"
            case "identity":
                return f"CATEGORY_ID({self._name(ids)}, {ids['size']})"
            case "bucket":
                return f"BUCKET({self._name(ids)}, [{', '.join(f'{one:.15g}' for one in ids['boundaries'])}])"
        return f"CROSS([{', '.join(self._ids(one) for one in ids['of'])}], {ids['size']})"

    def _name(self, feature: Feature) -> str:
        return written(feature["column"], self._dialect)


def written(name: str, dialect: str) -> str:
    """Return a name as a statement has it, in quotes where it needs them."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.upper() not in CLAUSES:
        return name
    return quoted_name(name, dialect)


def _text(value: object) -> str:
    """Return a value of a vocabulary as the texts of a column have it."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()
