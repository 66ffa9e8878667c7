"""The shell of `elasticdl sql`, typed into as on a terminal."""

from __future__ import annotations

import os
import pty
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from elasticdl_client.errors import DataError
from elasticdl_client.sql import command, shell
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.jobs import JobFlags
from elasticdl_client.sql.models import ModelRegistry
from elasticdl_client.sql.models_table import ModelsTable
from elasticdl_client.sql.runtime import Session
from tests.house.documents import REPOSITORY

ENTER, CTRL_C, CTRL_D, UP = "\r", "\x03", "\x04", "\x1b[A"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("HOME", str(tmp_path))
    with sqlite3.connect(tmp_path / "staff.db") as database:
        database.execute("CREATE TABLE staff (age INTEGER, income TEXT)")
    database.close()
    models = ModelRegistry(tmp_path / "models")
    models.add("big_model", {"label": "income"})
    url = f"sqlite:///{tmp_path}/staff.db"
    return Session(lambda: Database(url), models, JobFlags((), {}), is_dry_run=False, is_overwriting=False)


def typed(session: Session, keys: str) -> int:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        return shell.run(session, lambda text: command.execute(session, "sqlite", text), "sqlite")


def completions(session: Session, text: str) -> list[str]:
    found = shell.StatementCompleter(session).get_completions(Document(text), CompleteEvent())
    return [text[: len(text) + one.start_position] + one.text for one in found]


def test_a_statement_of_several_lines_is_run_at_its_semicolon(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(session, f"DESCRIBE{ENTER}big_model{ENTER};{ENTER}{CTRL_D}") == 0
    assert "model:       big_model@1" in capsys.readouterr().out


def test_an_error_does_not_end_the_shell(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(session, f"DROP TABLE x;{ENTER}SHOW MODELS;{ENTER}exit{ENTER}") == 0
    said = capsys.readouterr()
    assert "error: MODEL is expected, not 'TABLE'." in said.err
    assert "     ^^^^^" in said.err
    assert "big_model@1" in said.out


def test_ctrl_c_gives_up_the_statement_and_history_outlives_the_shell(
    session: Session, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert typed(session, f"DROP MODEL{CTRL_C}SHOW MODELS;{ENTER}{CTRL_D}") == 0
    assert "big_model@1" in capsys.readouterr().out
    assert (tmp_path / ".elasticdl" / "sql_history").stat().st_mode & 0o777 == 0o600
    assert typed(session, f"{UP}{ENTER}{CTRL_D}") == 0
    assert "big_model@1" in capsys.readouterr().out


def test_completion_knows_what_may_follow(session: Session) -> None:
    assert completions(session, "SELECT * FROM st") == ["SELECT * FROM staff"]
    assert completions(session, "SELECT inc") == ["SELECT income"]
    assert completions(session, "SELECT age TO TRAIN dnn") == [
        "SELECT age TO TRAIN DNNClassifier",
        "SELECT age TO TRAIN DNNRegressor",
    ]
    assert completions(session, "x TO TRAIN D COLUMN cat") == [
        "x TO TRAIN D COLUMN CATEGORY_HASH",
        "x TO TRAIN D COLUMN CATEGORY_ID",
    ]
    assert completions(session, "SELECT age TO EVALUATE au") == ["SELECT age TO EVALUATE auc"]
    assert completions(session, "x TO EXP") == ["x TO EXPLAIN"]
    assert completions(session, "x TO EXPLAIN WITH explain.r") == [
        "x TO EXPLAIN WITH explain.rows",
        "x TO EXPLAIN WITH explain.repeats",
    ]
    assert completions(session, "x TO EXPLAIN USING ") == ["x TO EXPLAIN USING big_model"]
    assert completions(session, "x USING ") == ["x USING big_model"]


def test_a_table_of_models_that_cannot_be_read_completes_nothing(session: Session, tmp_path: Path) -> None:
    table = ModelsTable(lambda: Database(f"sqlite:///{tmp_path}/staff.db"), "staff")
    session.models = ModelRegistry(tmp_path / "models", table)
    assert completions(session, "x USING ") == []


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("SHOW MODELS", False),
        ("SHOW MODELS;", True),
        ("SELECT 'a;", False),
        ("SELECT (1;", False),
        ("", True),
        ("quit", True),
    ],
)
def test_a_statement_is_whole_at_a_semicolon_outside_of_texts_and_brackets(text: str, is_whole: bool) -> None:
    assert shell.is_whole(text, "sqlite") is is_whole


def test_a_database_that_is_not_there_is_said_before_the_first_statement(session: Session) -> None:
    session.connect = lambda: Database("sqlite:///nowhere.db")
    with pytest.raises(DataError, match=r"nowhere\.db does not exist"):
        typed(session, CTRL_D)


def read_until(terminal: int, wanted: bytes) -> bytes:
    said = b""
    while wanted not in said:
        said += os.read(terminal, 4096)
    return said


@pytest.mark.timeout(60)
def test_on_a_terminal_the_command_without_a_statement_is_the_shell_and_tab_completes(
    session: Session, tmp_path: Path
) -> None:
    user, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "elasticdl_client.main", "sql", f"--models_dir={tmp_path}/models"]
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdin=terminal, stdout=terminal, env=environment) as process:
        os.close(terminal)
        read_until(user, b"elasticdl>")
        os.write(user, b"DESCRIBE big\t")
        read_until(user, b"_model")
        os.write(user, b";\r")
        read_until(user, b"label:       income")
        os.write(user, b"exit\r")
        assert process.wait(30) == 0
    os.close(user)
