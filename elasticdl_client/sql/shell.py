"""The shell of `elasticdl sql`: statements from a terminal, with history and completion.

A statement ends with a semicolon and may have several lines.  An error is printed, and the next statement is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from elasticdl_client.errors import ElasticDLError
from elasticdl_client.sql.columns import FUNCTIONS
from elasticdl_client.sql.estimators import ESTIMATORS, METRICS
from elasticdl_client.sql.explain import OPTIONS
from elasticdl_client.sql.parser import VERBS
from elasticdl_client.sql.runtime import Session
from elasticdl_client.sql.statement import StatementError
from elasticdl_client.sql.tokens import statements_of

HISTORY = "~/.elasticdl/sql_history"
_PROMPT, _MORE = "elasticdl> ", "........-> "
_ENDINGS = ("exit", "quit", "\\q")
_KEYWORDS = (
    *("SELECT", "FROM", "WHERE", "JOIN", "GROUP BY", "ORDER BY", "LIMIT", "WITH", "TO TRAIN", "TO PREDICT"),
    *("TO EVALUATE", "TO EXPLAIN", "COLUMN", "FOR", "LABEL", "INTO", "USING", "SHOW MODELS", "DESCRIBE", "DROP MODEL"),
)


class StatementCompleter(Completer):
    """Completes keywords, tables, columns, models, estimators and functions, by the word before."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names: list[str] | None = None

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor
        typed = re.search(r"[\w.@]*$", before)
        prefix = typed[0] if typed else ""
        for word in dict.fromkeys(self._words(before[: len(before) - len(prefix)].upper().split())):
            if word.upper().startswith(prefix.upper()) and word != prefix:
                yield Completion(word, -len(prefix))

    def forget(self) -> None:
        """Read the names of tables and columns again when they are next needed."""
        self._names = None

    def _words(self, before: list[str]) -> list[str]:
        last = before[-1] if before else ""
        if last in ("USING", "DESCRIBE", "MODEL"):
            with suppress(ElasticDLError):  # of --models_table: the statement will say it
                return list(dict.fromkeys(model.name for model in self._session.models.all()))
            return []
        if last == "TO":
            return list(VERBS)
        if last == "TRAIN":
            return list(ESTIMATORS)
        if before[-2:] == ["EXPLAIN", "WITH"]:
            return list(OPTIONS)
        if last == "EVALUATE":
            return list(dict.fromkeys(name for names in METRICS.values() for name in names))
        if self._names is None:
            self._names = self._session.known_names()
        functions = list(FUNCTIONS) if "COLUMN" in before else []
        return [*functions, *_KEYWORDS, *self._names] if last not in ("FROM", "JOIN") else self._names


def run(session: Session, execute: Callable[[str], object], dialect: str) -> int:
    """Read and run statements until the input ends; return the exit code.

    Args:
        session: Runs the statements.
        execute: checks and runs a text of statements.
        dialect: sqlglot's name of the database's SQL.

    Raises:
        DataError: the database cannot be opened.
    """
    if session.connect is not None:
        session.database.check()
    history = Path(HISTORY).expanduser()
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    completer = StatementCompleter(session)
    reader: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        completer=completer,
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(dialect),
        prompt_continuation=_MORE,
    )
    print(
        "Statements end with a semicolon, Tab completes, Ctrl-D or exit ends. docs/sql.md has the grammar.", flush=True
    )
    while True:
        try:
            text = reader.prompt(_PROMPT)
        except KeyboardInterrupt:  # the statement is given up, not the shell
            continue
        except EOFError:
            return 0
        if text.strip().rstrip(";").lower() in _ENDINGS:
            return 0
        if not text.strip():
            continue
        try:
            execute(text)
        except KeyboardInterrupt:
            print("The statement is interrupted.", file=sys.stderr, flush=True)
        except ElasticDLError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        completer.forget()


def is_whole(text: str, dialect: str) -> bool:
    """Return whether a text is one to be run: it ends with a semicolon, or with what ends the shell."""
    stripped = text.strip()
    if not stripped or stripped.lower() in _ENDINGS:
        return True
    if not stripped.endswith(";"):
        return False
    try:
        statements_of(text, dialect)
    except StatementError as error:
        return "not closed" not in error.message
    return True


def _keys(dialect: str) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_whole(buffer.text, dialect):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    return keys
