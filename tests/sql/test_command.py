"""`elasticdl sql` up to the job: its output, its errors and the job it would run; nothing is trained here."""

from __future__ import annotations

import random
import re
import shlex
import sqlite3
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from elasticdl_client.choices import JobType
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.sql import command, train
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.models import ModelRegistry
from elasticdl_client.sql.parser import parse
from elasticdl_client.sql.statement import StatementError, Train

SELECT = "SELECT * FROM staff"


@pytest.fixture
def database(tmp_path: Path) -> str:
    random.seed(1)
    with sqlite3.connect(tmp_path / "staff.db") as found:
        found.execute(
            "CREATE TABLE staff (id INTEGER PRIMARY KEY, age INTEGER, town TEXT, pay REAL, income TEXT, odd TEXT)"
        )
        for _ in range(100):
            row = (random.randint(18, 60), random.choice("abc"), random.random(), random.choice(["low", "high"]), None)
            found.execute("INSERT INTO staff (age, town, pay, income, odd) VALUES (?, ?, ?, ?, ?)", row)
    found.close()
    return f"sqlite:///{tmp_path}/staff.db"


def run(database: str, *arguments: str, **environment: str) -> None:
    models = Path(database.removeprefix("sqlite:///")).parent / "models"
    command.run([*arguments, f"--datasource={database}", f"--models_dir={models}"], environment)


def dry(capsys: pytest.CaptureFixture[str], database: str, *arguments: str) -> tuple[str, JobSpec]:
    """Return the output, and the job of the command that is printed last."""
    run(database, *arguments, "--dry_run")
    said = capsys.readouterr().out
    program, job_type, *flags = shlex.split(said.splitlines()[-1])
    assert program == "elasticdl"
    given = dict(flag[2:].split("=", 1) for flag in flags)
    return said, JobSpec.from_flags(JobType(job_type), given)


def test_a_dry_run_prints_the_clause_and_a_command_that_elasticdl_takes(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path
) -> None:
    said, spec = dry(capsys, database, f"{SELECT} LABEL income INTO m", "--num_workers=3")
    assert "DNNClassifier for 100 rows: the label has 2 different texts." in said
    assert "The column id is left out: it numbers the rows." in said
    assert "The column odd is left out: it has no value." in said
    assert re.search(
        r"COLUMN NORMALIZE\(age, [\d.]+, [\d.]+\), BUCKET\(age, .*\), VOCABULARY\(town, \['a', 'b', 'c'\]\)", said
    )
    assert (spec.num_workers, spec.columns, spec.eval_metrics_fn) == (3, "age,town,pay", "binary_metrics")
    assert not (tmp_path / "models").exists()


def test_the_explicit_statement_stands_for_the_same_job(capsys: pytest.CaptureFixture[str], database: str) -> None:
    said, short = dry(capsys, database, f"{SELECT} LABEL income INTO m")
    clause = next(line for line in said.splitlines() if line.startswith("COLUMN"))
    _, explicit = dry(capsys, database, f"{SELECT} TO TRAIN DNNClassifier {clause} LABEL income INTO m")
    assert explicit == short


@pytest.mark.parametrize(
    ("label", "estimator"), [("income", "DNNClassifier"), ("pay", "DNNRegressor"), ("AGE % 3 AS c", "DNNClassifier")]
)
def test_the_label_chooses_the_estimator(
    capsys: pytest.CaptureFixture[str], database: str, label: str, estimator: str
) -> None:
    said, _ = dry(capsys, database, f"SELECT town, {label} FROM staff LABEL {label.split()[-1]} INTO m")
    assert f"\n{estimator} for 100 rows" in f"\n{said}"


def test_keys_of_with_become_flags_of_the_job(capsys: pytest.CaptureFixture[str], database: str) -> None:
    statement = (
        f"{SELECT} TO TRAIN LinearClassifier WITH train.num_epochs = 7, train.shuffle = false, model.optimizer = SGD, "
        "validation.select = 'SELECT * FROM staff LIMIT 5' COLUMN age LABEL income INTO m"
    )
    _, spec = dry(capsys, database, statement)
    assert (spec.num_epochs, spec.shuffle, spec.columns) == (7, False, "age")
    assert spec.validation_data.endswith("/data/validation")


def test_a_model_of_ones_own_gets_columns_as_they_are_and_its_arguments(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path
) -> None:
    statement = (
        f"{SELECT} TO TRAIN mine.tables.custom_model WITH model.units = [4, 2], model.name = 'it''s', "
        f"train.model_zoo = '{tmp_path}' COLUMN town, age LABEL income INTO m"
    )
    said, spec = dry(capsys, database, statement)
    assert "COLUMN town, age" in said
    assert (spec.model_zoo, spec.model_def) == (str(tmp_path), "mine.tables.custom_model")
    assert spec.model_params_dict() == {"units": [4, 2], "name": "it's"}
    assert (spec.columns, spec.eval_metrics_fn) == ("town,age", "eval_metrics_fn")


def test_a_variable_of_the_environment_of_jobs_is_not_printed(
    capsys: pytest.CaptureFixture[str], database: str
) -> None:
    said, _ = dry(capsys, database, f"{SELECT} LABEL income INTO m", "--envs=PGPASSWORD=swordfish")
    assert "--envs=PGPASSWORD=***" in said
    assert "swordfish" not in said


@pytest.mark.parametrize(
    ("statement", "marked", "hint"),
    [
        ("TO TRAIN DNNClasifier LABEL income INTO m", "DNNClasifier", "'DNNClassifier'"),
        ("TO TRAIN mine. LABEL income INTO m", "LABEL", "name"),
        ("TO TRAIN mine.model COLUMN NORMALIZE(age) LABEL income INTO m", "NORMALIZE(age)", "age"),
        ("TO TRAIN mine.model COLUMN age FOR deep LABEL income INTO m", "deep", "FOR"),
        ("TO TRAIN mine.model WITH model.x = 'a;b' LABEL income INTO m", "'a;b'", "--model_params"),
        ("TO TRAIN mine.model WITH train.model_zoo = '/nowhere' LABEL income INTO m", "'/nowhere'", "directory"),
        ("TO TRAIN DNNClassifier WITH train.model_zoo = '/' LABEL income INTO m", "train.model_zoo", "train."),
        (
            "TO TRAIN DNNClassifier WITH model.hiden_units = [3] LABEL income INTO m",
            "model.hiden_units",
            "'hidden_units'",
        ),
        ("TO TRAIN LinearClassifier WITH model.dropout = 0.5 LABEL income INTO m", "model.dropout", "model.optimizer"),
        ("TO TRAIN DNNClassifier WITH model.dropout = 1 LABEL income INTO m", "1", "0.0"),
        ("TO TRAIN DNNClassifier WITH train.num_epoch = 3 LABEL income INTO m", "train.num_epoch", "train.num_epochs"),
        ("TO TRAIN DNNClassifier WITH train.num_epochs = x LABEL income INTO m", "x", "--num_epochs=1"),
        ("TO TRAIN DNNClassifier WITH train.output = x LABEL income INTO m", "train.output", "train."),
        ("TO TRAIN DNNClassifier WITH train.seed = [1] LABEL income INTO m", "[1]", "number"),
        ("TO TRAIN DNNClassifier WITH seed = 1 LABEL income INTO m", "seed", "model.NAME"),
        ("TO TRAIN DNNClassifier WITH validation.select = 3 LABEL income INTO m", "3", "SELECT"),
        ("TO TRAIN DNNRegressor LABEL income INTO m", "income", "DNNClassifier"),
        ("TO TRAIN DeepFMClassifier COLUMN NUMERIC(age) LABEL income INTO m", SELECT, "BUCKET"),
        ("TO TRAIN DeepFMClassifier COLUMN EMBEDDING(town, 3) LABEL income INTO m", SELECT, "model.embedding_dim = 3"),
        ("TO TRAIN WideAndDeepClassifier COLUMN age FOR wide LABEL income INTO m", SELECT, "FOR deep"),
        ("LABEL incme INTO m", "incme", "'income'"),
        ("LABEL odd INTO m", "odd", "IS NOT NULL"),
        ("WHERE age < 0 LABEL income INTO m", f"{SELECT} WHERE age < 0", "WHERE"),
        ("WHERE income = 'low' LABEL income INTO m", "income", "WHERE"),
        ("TO PREDICT r.c USING m", "m", "none yet"),
    ],
)
def test_what_cannot_be_trained_is_pointed_at(
    database: str, tmp_path: Path, statement: str, marked: str, hint: str
) -> None:
    with pytest.raises(StatementError) as caught:
        run(database, f"{SELECT} {statement}")
    assert caught.value.place.text == marked, str(caught.value)
    assert hint in caught.value.hint
    assert not (tmp_path / "models").exists()


def test_the_explicit_statement_has_all_that_the_statement_says(database: str) -> None:
    attributes = "train.num_epochs = 7, model.hidden_units = [4, 2], validation.select = 'SELECT * FROM staff'"
    source = f"{SELECT} TO TRAIN DNNClassifier WITH {attributes} LABEL income INTO m"
    (statement,) = parse(source, "sqlite")
    assert isinstance(statement, Train)
    with Database(database).snapshot() as reader:
        (again,) = parse(train._plan(reader, statement, "sqlite").statement, "sqlite")
    assert isinstance(again, Train)
    assert {key: one.value.value for key, one in again.attributes.items()} == {
        key: one.value.value for key, one in statement.attributes.items()
    }
    assert (again.query.text, len(again.columns)) == (statement.query.text, 1)


def test_names_that_are_keywords_are_quoted_in_the_explicit_statement(
    capsys: pytest.CaptureFixture[str], database: str
) -> None:
    select = """SELECT age AS "to", pay AS "using", town AS "Von", age % 7 AS "it's", income AS "label" FROM staff"""
    said, short = dry(capsys, database, f'{select} LABEL "label" INTO m')
    clause = next(line for line in said.splitlines() if line.startswith("COLUMN"))
    _, explicit = dry(capsys, database, f'{select} TO TRAIN DNNClassifier {clause} LABEL "label" INTO m')
    assert explicit == short
    with pytest.raises(StatementError, match="NULL in 100 of 100") as caught:
        run(database, 'SELECT age, odd AS "the pay" FROM staff LABEL "the pay" INTO m')
    assert caught.value.hint == 'Leave them out: WHERE "the pay" IS NOT NULL.'


def test_a_label_that_is_not_finite_is_refused(database: str) -> None:
    select = "SELECT age, CASE WHEN id % 3 = 0 THEN 9e999 ELSE id END AS y FROM staff"
    with pytest.raises(StatementError, match="is not finite in some rows") as caught:
        run(database, f"{select} LABEL y INTO m")
    assert caught.value.place.text == "y"


def test_why_no_column_is_left_is_said(database: str) -> None:
    with pytest.raises(StatementError, match="No column is left") as caught:
        run(database, "SELECT id, odd, income FROM staff LABEL income INTO m")
    assert caught.value.hint.endswith("id: it numbers the rows. odd: it has no value.")


def test_a_column_of_a_type_that_no_model_takes_is_left_out_and_refused_where_it_is_named(
    capsys: pytest.CaptureFixture[str], database: str
) -> None:
    select = "SELECT age, income, x'00ff' AS raw FROM staff"
    said, spec = dry(capsys, database, f"{select} LABEL income INTO m")
    assert "The column raw is left out: it is of a type that no model takes, bytes." in said
    assert spec.columns == "age"
    for clause, place in (("LABEL raw", "raw"), ("TO TRAIN DNNClassifier COLUMN INDICATOR(raw) LABEL income", "raw")):
        with pytest.raises(StatementError, match="of a type that no model takes") as caught:
            run(database, f"{select} {clause} INTO m")
        assert caught.value.place.text == place


def stored(tmp_path: Path) -> None:
    """Write a model of two columns as if a job had trained it."""
    inputs = [{"name": "age", "column": "age", "form": "number"}, {"name": "town", "column": "town", "form": "text"}]
    about = {"estimator": "DNNClassifier", "task": "binary", "label": "income", "classes": ["high", "low"]}
    ModelRegistry(tmp_path / "models").add("m", about | {"inputs": inputs}).export.mkdir()


@pytest.mark.parametrize(
    ("statement", "marked", "hint"),
    [
        ("TO EXPLAIN WITH explain.row = 9 USING m", "explain.row", "'explain.rows'"),
        ("TO EXPLAIN WITH rows = 9 USING m", "rows", "explain."),
        ("TO EXPLAIN WITH model.seed = 9 USING m", "model.seed", "explain."),
        ("TO EXPLAIN WITH explain.rows = 1 USING m", "1", "10,000"),
        ("TO EXPLAIN WITH explain.rows = 9.5 USING m", "9.5", "10,000"),
        ("TO EXPLAIN WITH explain.repeats = true USING m", "true", "5"),
        ("TO EXPLAIN WITH explain.repeats = [5] USING m", "[5]", "5"),
        ("TO EXPLAIN WITH explain.seed = -1 USING m", "-1", "0"),
        ("TO EXPLAIN WITH explain.seed = '1; DROP TABLE staff' USING m", "'1; DROP TABLE staff'", "0"),
        ("TO EXPLAIN USING n", "n", "m"),
        ("TO EXPLAIN USING m@2", "m@2", "m@1"),
        ("TO EXPLAIN USING m INTO staff", "staff", "--overwrite"),
        ("TO EXPLAIN USING m INTO nowhere.why", "nowhere", "main"),
        ("WHERE age < 0 TO EXPLAIN USING m", f"{SELECT} WHERE age < 0", "WHERE"),
        ("LIMIT 1 TO EXPLAIN USING m", f"{SELECT} LIMIT 1", "WHERE"),
    ],
)
def test_what_cannot_be_explained_is_pointed_at(
    database: str, tmp_path: Path, statement: str, marked: str, hint: str
) -> None:
    stored(tmp_path)
    with pytest.raises(StatementError) as caught:
        run(database, f"{SELECT} {statement}")
    assert caught.value.place.text == marked, str(caught.value)
    assert hint in caught.value.hint
    assert not list((tmp_path / "models").glob(".*"))


QUOTED_NAME, QUOTED_TEXT = '"x""\'; DROP TABLE staff; --"', "'x\"''; DROP TABLE staff; --'"


@pytest.mark.parametrize(
    ("statement", "is_refused"),
    [
        (f"SELECT age, income AS {QUOTED_NAME} FROM staff LABEL {QUOTED_NAME} INTO n", False),
        (f"SELECT age AS {QUOTED_NAME}, income FROM staff LABEL income INTO n", False),
        (f"SELECT age, {QUOTED_TEXT} || income AS y FROM staff LABEL y INTO n", False),
        (f"{SELECT} TO TRAIN DNNClassifier COLUMN VOCABULARY(town, [{QUOTED_TEXT}]) LABEL income INTO n", False),
        (f"{SELECT} TO TRAIN DNNClassifier COLUMN {QUOTED_NAME} LABEL income INTO n", True),
        (f"{SELECT} TO TRAIN DNNClassifier COLUMN age FOR {QUOTED_NAME} LABEL income INTO n", True),
        (f"{SELECT} TO TRAIN {QUOTED_NAME} LABEL income INTO n", True),
        (f"{SELECT} TO TRAIN DNNClassifier WITH {QUOTED_NAME} = 1 LABEL income INTO n", True),
        (f"{SELECT} TO TRAIN DNNClassifier WITH validation.select = {QUOTED_TEXT} LABEL income INTO n", True),
        (f"{SELECT} LABEL {QUOTED_NAME} INTO n", True),
        (f"{SELECT} LABEL income INTO {QUOTED_NAME}", True),
        (f"{SELECT} TO PREDICT {QUOTED_NAME}.{QUOTED_NAME} USING m", False),
        (f"{SELECT} TO PREDICT {QUOTED_NAME}.r.c USING m", True),
        (f"{SELECT} TO EVALUATE auc USING m INTO {QUOTED_NAME}", False),
        (f"{SELECT} TO EVALUATE {QUOTED_NAME} USING m", True),
        (f"{SELECT} TO EXPLAIN USING m INTO {QUOTED_NAME}", False),
        (f"{SELECT} TO EXPLAIN USING {QUOTED_NAME}", True),
        (f"DESCRIBE {QUOTED_NAME}", True),
        (f"DROP MODEL {QUOTED_NAME}", True),
        (f"{SELECT}; DROP TABLE staff; -- LABEL income INTO n", True),
    ],
)
def test_names_and_texts_that_want_to_be_sql_are_names_and_texts(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path, statement: str, is_refused: bool
) -> None:
    stored(tmp_path)
    if is_refused:
        with pytest.raises(StatementError):
            run(database, statement, "--dry_run")
    else:
        run(database, statement, "--dry_run")
        assert shlex.split(capsys.readouterr().out.splitlines()[-1])[0] in ("elasticdl", "python")
    with sqlite3.connect(tmp_path / "staff.db") as found:
        assert found.execute("SELECT name FROM sqlite_master").fetchall() == [("staff",)]
        assert found.execute("SELECT count(*) FROM staff").fetchone() == (100,)
    found.close()


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("SELECT age, income FROM staff", "lacks the column 'town'"),
        ("SELECT age, town FROM staff", "lacks the label 'income'"),
        ("SELECT town AS age, town, income FROM staff", "takes numbers there"),
        ("SELECT age, town, CASE id WHEN 7 THEN NULL ELSE income END AS income FROM staff", "NULL in 1 of 100 rows"),
    ],
)
def test_rows_that_a_model_cannot_be_explained_on_are_refused(
    database: str, tmp_path: Path, select: str, said: str
) -> None:
    stored(tmp_path)
    with pytest.raises(StatementError, match=said):
        run(database, f"{select} TO EXPLAIN USING m")


def test_a_dry_run_of_explain_prints_the_command_and_makes_no_table(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path
) -> None:
    stored(tmp_path)
    run(database, f"{SELECT} TO EXPLAIN WITH explain.repeats = 9 USING m INTO why", "--dry_run")
    words = shlex.split(capsys.readouterr().out)
    assert words[:4] == ["python", "-P", "-m", "elasticdl.tabular.importance"]
    assert {"--repeats=9", "--seed=0", f"--export={tmp_path}/models/m/1/export"} < set(words)
    with sqlite3.connect(tmp_path / "staff.db") as found:
        assert found.execute("SELECT name FROM sqlite_master").fetchall() == [("staff",)]
    found.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no statement"),
        (("SHOW MODELS", "-f", "x.sql"), "cannot be read"),
        (("SHOW MODELS; SHOW MODELS", "SHOW MODELS"), "more than once"),
        ((f"{SELECT} LABEL income INTO m", "--training_data=x"), "--training_data follows from the statement"),
        ((f"{SELECT} LABEL income INTO m", "--num_epoch=3"), "Unknown flag --num_epoch"),
        ((f"{SELECT} LABEL income INTO m", "--runtime=kubernetes"), "is a file of this machine"),
        ((f"{SELECT} LABEL income INTO m", "--runtime=slurm"), "neither local nor kubernetes"),
        ((f"{SELECT} LABEL income INTO m", "--num_workers=0"), "--num_workers"),
        (("SHOW MODELS", "--num_workers=2"), "these statements run none"),
        ((f"{SELECT} LABEL income INTO m", "--dry_run=maybe"), "true or false"),
    ],
)
def test_a_wrong_command_line_is_refused(database: str, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(FlagError) as caught:
        run(database, *arguments)
    assert said in str(caught.value)
    assert not (tmp_path / "models").exists()


def test_a_flag_that_the_statement_gives_as_well_is_refused(database: str) -> None:
    statement = f"{SELECT} TO TRAIN DNNClassifier WITH train.num_epochs = 3 LABEL income INTO m"
    with pytest.raises(StatementError, match="given twice"):
        run(database, statement, "--num_epochs=2")


def test_all_statements_of_a_file_are_checked_before_the_first_is_run(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path
) -> None:
    file = tmp_path / "statements.sql"
    file.write_text(f"SHOW MODELS;\n{SELECT} TO TRAIN Magic LABEL income INTO m")
    with pytest.raises(StatementError) as caught:
        run(database, "-f", str(file))
    assert "2 | SELECT" in caught.value.what
    assert not capsys.readouterr().out


def test_models_are_listed_described_and_dropped_without_a_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    models = ModelRegistry(tmp_path)
    models.add(
        "m",
        {"label": "income", "classes": ["a", "b"], "rows": 5, "metrics": {"auc": 0.5}, "job": "sql-train-m-1"}
        | {"statement": "SELECT *\nFROM t\nLABEL income INTO m"},
    )
    command.run([f"--models_dir={tmp_path}", "SHOW MODELS; DESCRIBE m; DROP MODEL m; SHOW MODELS"], {})
    said = capsys.readouterr().out
    assert re.search(r"m@1 .* income +5 +not trained +auc 0\.5000", said)
    assert "classes:     a, b" in said
    assert "statement:   SELECT *\n             FROM t\n             LABEL income INTO m\n" in said
    assert "job:         sql-train-m-1" in said
    assert "Removed m: 1 version." in said
    assert said.rstrip().endswith(f"There is no model in {tmp_path}.")


def test_the_password_of_the_variable_is_taken_from_the_environment_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("ELASTICDL_DATASOURCE", "postgresql://u:swordfish@/none?host=/none")
    with pytest.raises(Exception, match=r"u:\*\*\*@") as caught:
        command.run([f"{SELECT} LABEL income INTO m"])
    assert "swordfish" not in str(caught.value)
    assert "ELASTICDL_DATASOURCE" not in os.environ


def test_a_cell_of_a_notebook_is_statements_and_a_mistake_has_no_traceback(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path
) -> None:
    ModelRegistry(tmp_path / "models").add("m", {"label": "income"})
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "elasticdl_client.sql.notebook")
    flags = f"--datasource={database} --models_dir={tmp_path}/models"
    assert shell.run_cell_magic("elasticdl", flags, "SHOW MODELS;\nDESCRIBE m") is None
    assert "label:       income" in capsys.readouterr().out
    assert shell.run_cell_magic("elasticdl", f"{flags} --dry_run", f"{SELECT}\nLABEL incme INTO x") is None
    assert "\nerror: The SELECT has no column 'incme'." in capsys.readouterr().err
