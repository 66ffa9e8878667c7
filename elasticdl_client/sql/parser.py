"""The parser of `elasticdl sql`: statements by the grammar of docs/sql.md, errors at their place.

The SELECT is sqlglot's matter: it is checked that it is one, and only reads.  It reaches the database as it was
written.  No database is asked here.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from elasticdl_client.flags import nearest
from elasticdl_client.sql.statement import (
    Attribute,
    Call,
    ColumnClause,
    DescribeModel,
    DropModel,
    Evaluate,
    Explain,
    Expression,
    Literal,
    ModelName,
    Name,
    NameList,
    Place,
    Predict,
    Query,
    ShowModels,
    Statement,
    StatementError,
    Train,
    suggestion,
)
from elasticdl_client.sql.tokens import CLAUSES, Kind, Token, load, quoted_name, statements_of

T = TypeVar("T")
S = TypeVar("S", bound=Statement)

VERBS = ("TRAIN", "PREDICT", "EVALUATE", "EXPLAIN")
_FIRST = ("SELECT", "WITH", "SHOW", "DESCRIBE", "DROP")
_FIELDS = ("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND")  # INTERVAL '1-2' YEAR TO MONTH
_BEFORE_A_NAME = ("SELECT", "DISTINCT", "AS", "BY", "AND", "OR", "NOT", "WHERE", "HAVING", "ON", "WHEN", "THEN", "ELSE")
_AFTER_A_NAME = ("FROM", "AS", "ASC", "DESC", "IS", "IN", "LIKE", "BETWEEN", "AND", "OR", "WHERE", "GROUP", "ORDER")
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # as PostgreSQL does
_MODEL_LENGTH = 40  # the names of jobs hold that of the model
_LITERALS: dict[str, object] = {"TRUE": True, "FALSE": False}
_ENDINGS = (
    "Write after the SELECT: LABEL column INTO model; TO TRAIN estimator … LABEL column INTO model; "
    "TO PREDICT table.column USING model; TO EVALUATE metric, … USING model; or TO EXPLAIN USING model."
)


def parse(source: str, dialect: str) -> list[Statement]:
    """Return the statements of a text.

    Args:
        source: statements, with semicolons between.
        dialect: sqlglot's name of the database's SQL.

    Raises:
        StatementError: one is wrong.
    """
    found = statements_of(source, dialect)
    if not found:
        raise StatementError("There is no statement.", _ENDINGS, Place(source or " ", 0, 1))
    return [_Parser(source, dialect, tokens).statement() for tokens in found]


def parse_select(source: str, dialect: str) -> Query:
    """Return a text that is a SELECT and nothing else.

    Raises:
        StatementError: it is not.
    """
    found = statements_of(source, dialect)
    if len(found) != 1:
        raise StatementError("One SELECT is expected.", "Write SELECT … .", Place(source or " ", 0, 1))
    return _Parser(source, dialect, found[0]).select()


class _Parser:
    """Reads one statement from its tokens."""

    def __init__(self, source: str, dialect: str, tokens: Sequence[Token]) -> None:
        self._source = source
        self._dialect = dialect
        self._tokens = tokens
        self._at = 0

    def statement(self) -> Statement:
        first = self._tokens[0]
        if first.is_word("SHOW"):
            self._at = 1
            self._keyword("MODELS", "SHOW MODELS lists the models.")
            return self._ended(ShowModels(self._text()))
        if first.is_word("DESCRIBE", "DESC"):
            self._at = 1
            return self._ended(DescribeModel(self._text(), self._model()))
        if first.is_word("DROP"):
            self._at = 1
            self._keyword("MODEL", "DROP MODEL is the only statement with DROP; tables are the database's own matter.")
            return self._ended(DropModel(self._text(), self._model()))
        if not first.is_word("SELECT", "WITH") and not first.is_symbol("("):
            raise StatementError(
                f"A statement cannot begin with {first.text!r}.",
                suggestion(first.text, _FIRST, "It begins with SELECT, WITH, SHOW MODELS, DESCRIBE or DROP MODEL."),
                first.place,
            )
        self._at = self._end_of_query()
        query = self._query()
        if self._accept("TO"):
            verb = self._take("TRAIN, PREDICT, EVALUATE or EXPLAIN")
            if verb.is_word("TRAIN"):
                return self._train(query, self._dotted("the estimator"))
            if verb.is_word("PREDICT"):
                return self._predict(query)
            return self._evaluate(query) if verb.is_word("EVALUATE") else self._explain(query)
        return self._train(query, None)

    # The SELECT

    def select(self) -> Query:
        """Parse all tokens as a SELECT."""
        self._at = len(self._tokens)
        return self._query()

    def _end_of_query(self) -> int:
        """Return the place of the first token after the SELECT."""
        labels = []
        for at, token in enumerate(self._tokens[1:], 1):
            if token.depth or token.kind is not Kind.WORD:
                continue
            following = self._tokens[at + 1] if at + 1 < len(self._tokens) else None
            if token.is_word("TO") and not (following and following.is_word(*_FIELDS)):
                if following is None or not following.is_word(*VERBS):
                    place = token.place if following is None else following.place
                    near = nearest(following.text, list(VERBS)) if following else ""
                    hint = f"Did you mean 'TO {near}'?" if near else _ENDINGS
                    raise StatementError("TRAIN, PREDICT, EVALUATE or EXPLAIN is expected after TO.", hint, place)
                return at
            if token.is_word("LABEL") and self._may_be_clause(at, following):
                labels.append(at)
        ends = [at for at in range(1, len(self._tokens) - 3) if self._is_last_clause(at)]
        if ends or labels:
            return (ends or labels)[-1]
        raise self._without_clause()

    def _is_last_clause(self, at: int) -> bool:
        """Return whether LABEL column INTO model stands there, and nothing but a version behind it."""
        label, column, into = self._tokens[at : at + 3]
        is_last = at + 4 == len(self._tokens) or self._tokens[at + 4].is_symbol("@")
        is_clause = label.is_word("LABEL") and into.is_word("INTO") and column.kind in (Kind.WORD, Kind.QUOTED_NAME)
        return is_clause and is_last and not label.depth

    def _may_be_clause(self, at: int, following: Token | None) -> bool:
        """Return whether LABEL is our keyword there, not a column of this name."""
        before = self._tokens[at - 1]
        if before.is_word(*_BEFORE_A_NAME) or (before.kind is Kind.SYMBOL and before.text not in (")", "*")):
            return False
        if before.is_symbol("*") and not (at >= 2 and self._tokens[at - 2].text.upper() in ("SELECT", ".", ",")):
            return False
        if following is None or following.is_word("INTO"):
            return True
        return following.kind is not Kind.SYMBOL and not following.is_word(*_AFTER_A_NAME)

    def _without_clause(self) -> StatementError:
        outer = [token for token in self._tokens[1:] if not token.depth]
        for token in reversed(outer[-8:]):
            if token.kind is Kind.WORD and nearest(token.text, ["LABEL"]) and not token.is_word("LABEL"):
                return StatementError(f"{token.text!r} is no clause.", "Did you mean 'LABEL'?", token.place)
        for token in outer:
            if token.is_word("INTO"):
                return StatementError("LABEL column is expected before INTO.", _ENDINGS, token.place)
            if token.is_word("USING") and token is outer[-2 if len(outer) > 1 else -1]:
                verbs = "TO PREDICT, TO EVALUATE or TO EXPLAIN"
                return StatementError(f"{verbs} is expected before USING.", _ENDINGS, token.place)
        end = self._tokens[-1].place.end
        return StatementError("The statement names no action.", _ENDINGS, Place(self._source, end - 1, end))

    def _query(self) -> Query:
        first, last = self._tokens[0].place, self._tokens[self._at - 1].place
        place = first.to(last)
        sqlglot, errors, exp = load("sqlglot"), load("sqlglot.errors"), load("sqlglot.expressions")
        try:
            trees = sqlglot.parse(place.text, dialect=self._dialect)
        except errors.ParseError as error:
            raise self._unparsable(place, error.errors[0] if error.errors else {}) from error
        except RecursionError as error:
            raise StatementError("The SELECT is nested too deeply.", "Make a view of a part of it.", place) from error
        tree = trees[0]
        if len(trees) != 1 or not isinstance(tree, exp.Query):
            raise StatementError("This is no SELECT.", "Begin with SELECT, or WITH … SELECT.", place)
        for kinds, what in ((exp.DML | exp.DDL, "changes data"), (exp.Into, "creates a table"), (exp.Lock, "locks")):
            if any(node for node in tree.find_all(kinds) if not isinstance(node, exp.Query)):
                word = {"locks": ("FOR",), "creates a table": ("INTO",)}.get(
                    what, ("INSERT", "UPDATE", "DELETE", "MERGE", "CREATE", "DROP", "ALTER")
                )
                culprit = next((one for one in self._tokens[: self._at] if one.is_word(*word)), self._tokens[0])
                raise StatementError(
                    f"The SELECT {what}: it may only read.", "Remove this from the SELECT.", culprit.place
                )
        if isinstance(tree, exp.Select) and not tree.expressions:
            raise StatementError("The SELECT names no columns.", "Write SELECT * FROM table, or name columns.", first)
        return Query(place.text, place)

    def _unparsable(self, place: Place, found: dict[str, Any]) -> StatementError:
        marked = str(found.get("highlight") or "")
        before = place.text.split("\n")[: max(0, int(found.get("line") or 1) - 1)]
        end = place.start + sum(len(line) + 1 for line in before) + int(found.get("col") or 0)
        begin = max(place.start, min(end, place.end) - max(1, len(marked)))
        wrong = Place(self._source, begin, max(begin + 1, min(end, place.end)))
        return StatementError(
            "The SELECT cannot be parsed here.", f"Check the text before it; it is read as {self._dialect}.", wrong
        )

    # The clauses after it

    def _train(self, query: Query, estimator: Name | None) -> Train:
        attributes: dict[str, Attribute] = {}
        columns: list[ColumnClause] = []
        if estimator is not None:
            if self._accept("WITH"):
                attributes = self._attributes()
            while self._at < len(self._tokens) and self._tokens[self._at].is_word("COLUMN"):
                columns.append(self._column_clause())
        before = ("WITH", "COLUMN") if estimator is not None else ()
        self._keyword("LABEL", "LABEL column INTO model ends a statement that trains.", before)
        label = self._name("the column of the label")
        self._keyword("INTO", "LABEL column INTO model ends a statement that trains.")
        model = self._model(is_new=True)
        return self._ended(Train(self._text(), query, estimator, attributes, tuple(columns), label, model))

    def _attributes(self) -> dict[str, Attribute]:
        found: dict[str, Attribute] = {}
        for key, value in self._list(self._attribute):
            if key.text in found:
                raise StatementError(f"{key.text} is given twice.", "Give it once.", key.place)
            found[key.text] = Attribute(key, value)
        return found

    def _attribute(self) -> tuple[Name, Literal]:
        key = self._dotted("a key such as model.hidden_units")
        self._symbol("=")
        return key, self._value()

    def _value(self) -> Literal:
        token = self._take("a value")
        if token.is_symbol("["):
            return self._bracketed(token)
        if token.is_symbol("-"):
            number = self._take("a number")
            if number.kind is Kind.NUMBER:
                found = _number(number)
                return Literal(-found, token.place.to(number.place))
            raise StatementError("A number is expected after -.", "Write, for example, -1.5.", number.place)
        if token.kind is Kind.NUMBER:
            return Literal(_number(token), token.place)
        if token.kind is Kind.WORD and token.text.upper() not in CLAUSES:
            return Literal(_LITERALS.get(token.text.upper(), token.text), token.place)
        if token.kind is Kind.TEXT:
            return Literal(token.text, token.place)
        raise StatementError(
            f"A value is expected, not {token.text!r}.",
            "Write a number, a 'text', true, false or a [list].",
            token.place,
        )

    def _bracketed(self, opening: Token) -> Literal:
        items: list[Literal] = []
        while not self._accept_symbol("]"):
            if items:
                self._symbol(",")
            items.append(self._value())
        return Literal([item.value for item in items], opening.place.to(self._tokens[self._at - 1].place))

    def _column_clause(self) -> ColumnClause:
        keyword = self._take("COLUMN")
        expressions = tuple(self._list(self._expression))
        part = self._name("the part of the model") if self._accept("FOR") else None
        return ColumnClause(expressions, part, keyword.place.to(self._tokens[self._at - 1].place))

    def _expression(self) -> Expression:
        token = self._peek("a column or a function")
        following = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else None
        if token.kind is Kind.WORD and following is not None and following.is_symbol("("):
            function = self._name("a function")
            self._symbol("(")
            arguments = [] if self._peek("an argument").is_symbol(")") else self._list(self._expression)
            return Call(function, tuple(arguments), token.place.to(self._symbol(")").place))
        if token.is_symbol("["):
            self._at += 1
            if self._peek("a name or a value").kind in (Kind.NUMBER, Kind.TEXT) or self._peek("").text in ("-", "]"):
                return self._bracketed(token)
            items = tuple(self._list(self._expression))
            return NameList(items, token.place.to(self._symbol("]").place))
        if token.kind in (Kind.NUMBER, Kind.TEXT) or token.is_symbol("-"):
            return self._value()
        return self._name("a column or a function")

    def _predict(self, query: Query) -> Predict:
        table, column = self._target()
        self._keyword("USING", "TO PREDICT table.column USING model.")
        return self._ended(Predict(self._text(), query, table, column, self._model()))

    def _target(self) -> tuple[tuple[Name, ...], Name]:
        names = self._new_path("the table and the column of the predictions")
        if len(names) < 2:
            raise StatementError(
                f"{names[0].text!r} is a table without a column.", "Write TO PREDICT table.column.", names[0].place
            )
        if len(names) > 3:
            raise StatementError("A table has at most a schema.", "Write schema.table.column.", names[3].place)
        return tuple(names[:-1]), names[-1]

    def _evaluate(self, query: Query) -> Evaluate:
        metrics = tuple(self._list(lambda: self._name("a metric")))
        self._keyword("USING", "TO EVALUATE metric, … USING model.")
        model = self._model()
        return self._ended(Evaluate(self._text(), query, metrics, model, self._into("the table of the metrics")))

    def _explain(self, query: Query) -> Explain:
        attributes = self._attributes() if self._accept("WITH") else {}
        self._keyword("USING", "TO EXPLAIN [WITH key = value, …] USING model.", () if attributes else ("WITH",))
        model = self._model()
        table = self._into("the table of the importances")
        return self._ended(Explain(self._text(), query, attributes, model, table))

    def _into(self, expected: str) -> tuple[Name, ...]:
        """Return the names of a table of results and its schema; none without INTO."""
        table = tuple(self._new_path(expected)) if self._accept("INTO") else ()
        if len(table) > 2:
            raise StatementError("A table has at most a schema.", "Write INTO schema.table.", table[2].place)
        return table

    def _model(self, is_new: bool = False) -> ModelName:
        name = self._name("the name of a model")
        if not (name.text.isascii() and name.text.isidentifier() and len(name.text) <= _MODEL_LENGTH):
            raise StatementError(
                f"{name.text!r} cannot be the name of a model.",
                f"Names are letters, digits and underscores, not beginning with a digit, at most {_MODEL_LENGTH}.",
                name.place,
            )
        if not self._accept_symbol("@"):
            return ModelName(name.text, 0, name.place)
        version = self._take("a version")
        if is_new:
            raise StatementError(
                "A new model cannot be given a version.",
                f"Write INTO {name.text}; versions are counted.",
                version.place,
            )
        if version.kind is not Kind.NUMBER or not version.text.isdigit() or int(version.text[:9]) < 1:
            raise StatementError(f"{version.text!r} is no version.", f"For example: {name.text}@1.", version.place)
        return ModelName(name.text, int(version.text), name.place.to(version.place))

    # Tokens

    def _peek(self, expected: str) -> Token:
        if self._at < len(self._tokens):
            return self._tokens[self._at]
        end = self._tokens[-1].place.end
        raise StatementError(
            f"The statement ends where {expected} is expected.", _ENDINGS, Place(self._source, end - 1, end)
        )

    def _take(self, expected: str) -> Token:
        token = self._peek(expected)
        self._at += 1
        return token

    def _accept(self, word: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at].is_word(word)
        self._at += found
        return found

    def _accept_symbol(self, symbol: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at].is_symbol(symbol)
        self._at += found
        return found

    def _keyword(self, word: str, hint: str, before: Sequence[str] = ()) -> Token:
        """Take a keyword.

        Args:
            before: keywords of clauses that may stand before it.
        """
        token = self._take(word)
        if not token.is_word(word):
            near = nearest(token.text, [*before, word]) if token.kind is Kind.WORD else ""
            is_late = token.is_word("WITH") and "COLUMN" in before
            order = " WITH comes before COLUMN, and each but COLUMN once." if is_late else ""
            raise StatementError(
                f"{word} is expected, not {token.text!r}.",
                f"Did you mean '{near}'?" if near and not order else f"{hint}{order}",
                token.place,
            )
        return token

    def _symbol(self, symbol: str) -> Token:
        token = self._take(f"'{symbol}'")
        if not token.is_symbol(symbol):
            raise StatementError(f"'{symbol}' is expected, not {token.text!r}.", f"Write '{symbol}' here.", token.place)
        return token

    def _name(self, expected: str) -> Name:
        token = self._take(expected)
        if token.kind is Kind.QUOTED_NAME and token.text:
            return Name(token.text, token.place, is_quoted=True)
        if token.kind is Kind.WORD and (token.text.upper() not in CLAUSES or self._is_column_label(token)):
            return Name(token.text, token.place)
        quoted = quoted_name("name", self._dialect)
        hint = f"Write a name, or {quoted} if it has other characters than letters, digits and underscores."
        raise StatementError(f"{expected.capitalize()} is expected, not {token.text!r}.", hint, token.place)

    def _is_column_label(self, token: Token) -> bool:
        """Return whether the LABEL that was taken is a column of this name: no other name follows."""
        following = self._tokens[self._at] if self._at < len(self._tokens) else None
        is_end = following is None or following.kind is Kind.SYMBOL or following.text.upper() in CLAUSES
        return token.is_word("LABEL") and is_end and self._tokens[self._at - 2].is_word("LABEL")

    def _path(self, expected: str) -> list[Name]:
        names = [self._name(expected)]
        while self._accept_symbol("."):
            names.append(self._name(expected))
        return names

    def _new_path(self, expected: str) -> list[Name]:
        """Take the name of what a statement makes, in the case in which the database finds it again without quotes."""
        names = self._path(expected)
        if self._dialect != "postgres":
            return names
        return [one if one.is_quoted else replace(one, text=one.text.translate(_LOWER)) for one in names]

    def _dotted(self, expected: str) -> Name:
        names = self._path(expected)
        return Name(".".join(name.text for name in names), names[0].place.to(names[-1].place))

    def _list(self, item: Callable[[], T]) -> list[T]:
        found = [item()]
        while self._accept_symbol(","):
            found.append(item())
        return found

    def _text(self) -> str:
        return self._tokens[0].place.to(self._tokens[-1].place).text

    def _ended(self, statement: S) -> S:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            raise StatementError(
                f"The statement should end before {token.text!r}.", "Remove it, or part statements by ';'.", token.place
            )
        return statement


def _number(token: Token) -> int | float:
    try:
        found = ast.literal_eval(token.text)
    except (ValueError, SyntaxError):
        found = None
    if isinstance(found, int | float) and not isinstance(found, bool):
        return found
    raise StatementError(f"{token.text!r} is no number.", "Write, for example, 10 or 1e-3.", token.place)
