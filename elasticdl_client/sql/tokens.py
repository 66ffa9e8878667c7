"""A text of statements as tokens of the database's own dialect, and names and texts as that dialect quotes them.

sqlglot decides what is a string, a quoted name or a comment; it is imported here and in parser.py alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from elasticdl_client.errors import DataError
from elasticdl_client.sql.statement import Place, StatementError

CLAUSES = ("WITH", "COLUMN", "FOR", "LABEL", "INTO", "USING", "TO")
"""Keywords that a name of our clauses cannot be without quotes."""

_OPENING = {"(": ")", "[": "]", "{": "}"}
_HINT = "Close it, or remove it."


class Kind(Enum):
    """The role of a token in the clauses around the SELECT."""

    WORD = auto()  # a name or a keyword, without quotes
    QUOTED_NAME = auto()
    TEXT = auto()
    NUMBER = auto()
    SYMBOL = auto()


@dataclass(frozen=True, slots=True)
class Token:
    """A token.

    Attributes:
        text: Text of the token; names and strings without their quotes.
        depth: Number of open brackets around the token.
    """

    kind: Kind
    text: str
    place: Place
    depth: int

    def is_word(self, *words: str) -> bool:
        """Return whether it is one of the keywords, in capitals."""
        return self.kind is Kind.WORD and self.text.upper() in words

    def is_symbol(self, symbol: str) -> bool:
        """Return whether it is a punctuation mark."""
        return self.kind is Kind.SYMBOL and self.text == symbol


def load(package: str, pip_name: str = "") -> Any:
    """Import a package of the extra `sql`.

    Raises:
        DataError: it is not installed.
    """
    top_level = package.partition(".")[0]
    if importlib.util.find_spec(top_level) is None:
        raise DataError(
            f"`elasticdl sql` needs the package {pip_name or top_level}, which is not installed.",
            "pip install 'elasticdl2-client[sql]'",
        )
    return importlib.import_module(package)


def quoted_name(name: str, dialect: str) -> str:
    """Return a name in the quotes of a dialect."""
    quote = "`" if dialect == "mysql" else '"'
    return quote + name.replace(quote, 2 * quote) + quote


def quoted_text(text: str, dialect: str) -> str:
    """Return a text as a literal of a dialect."""
    if dialect == "mysql":
        text = text.replace("\\", "\\\\")
    return "'" + text.replace("'", "''") + "'"


def statements_of(source: str, dialect: str) -> list[list[Token]]:
    """Return the tokens of each statement, which semicolons part.

    Args:
        source: statements.
        dialect: sqlglot's name of the database's SQL.

    Raises:
        StatementError: a string, a quoted name, a comment or a bracket is not closed.
    """
    found: list[list[Token]] = [[]]
    for token in _tokens(source, dialect):
        if token.is_symbol(";"):
            found.append([])
        else:
            found[-1].append(token)
    return [statement for statement in found if statement]


def _tokens(source: str, dialect: str) -> list[Token]:
    errors = load("sqlglot.errors")
    try:
        raw = _tokenizer(dialect).tokenize(source)
    except errors.TokenError as error:
        place = _unclosed(source)
        raise StatementError("This is not closed.", _HINT, place) from error
    tokens: list[Token] = []
    opened: list[Token] = []
    for one in raw:
        text = source[one.start : one.end + 1]
        place = Place(source, one.start, one.end + 1)
        closing = text in _OPENING.values() and bool(opened) and _OPENING[opened[-1].text] == text
        if text in _OPENING.values() and not closing:
            raise StatementError(f"There is no {_opening_of(text)} that this closes.", "Remove it.", place)
        if closing:
            opened.pop()
        if text == ";" and opened:
            break
        token = Token(_kind(one, text), one.text, place, len(opened))
        tokens.append(token)
        if text in _OPENING:
            opened.append(token)
    if opened:
        raise StatementError(f"This {opened[-1].text} is not closed.", _HINT, opened[-1].place)
    return tokens


@functools.cache
def _tokenizer(dialect: str) -> Any:
    """Return the dialect's tokenizer, by which SHOW is a word as any other, and brackets are not quotes."""
    found = load("sqlglot.dialects.dialect").Dialect.get_or_raise(dialect)
    own = type(found).tokenizer_class
    changes = {
        "COMMANDS": set(),
        "COMMAND_PREFIX_TOKENS": set(),
        "IDENTIFIERS": [quote for quote in own.IDENTIFIERS if quote != ("[", "]")],
    }
    return type(own)("StatementTokenizer", (own,), changes)(dialect=found)


def _kind(token: Any, text: str) -> Kind:
    name = token.token_type.name
    if name == "IDENTIFIER":
        return Kind.QUOTED_NAME
    if name.endswith("STRING"):
        return Kind.TEXT
    if name == "NUMBER":
        return Kind.NUMBER
    return Kind.WORD if text.replace("_", "a").replace("$", "a").isalnum() and not text[0].isdigit() else Kind.SYMBOL


def _opening_of(closing: str) -> str:
    return next(one for one, other in _OPENING.items() if other == closing)


def _unclosed(source: str) -> Place:
    """Return what is not closed, after sqlglot has found that something is not: it does not say where."""
    at = 0
    while at < len(source):
        rest = source[at:]
        closing = "*/" if rest.startswith("/*") else rest[0] if rest[0] in "'\"`" else ""
        if rest.startswith("--"):
            end = source.find("\n", at)
            at = len(source) if end < 0 else end
            continue
        if not closing:
            at += 1
            continue
        end = source.find(closing, at + len(closing))
        if end < 0:
            return Place(source, at, at + len(closing))
        at = end + len(closing)
    return Place(source, max(0, len(source) - 1), len(source))
