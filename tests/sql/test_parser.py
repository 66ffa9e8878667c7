"""Statements of `elasticdl sql`: their meaning, and the place of an error."""

from __future__ import annotations

import pytest

from elasticdl_client.sql.parser import parse, parse_select
from elasticdl_client.sql.statement import (
    Call,
    DescribeModel,
    DropModel,
    Evaluate,
    Explain,
    Literal,
    Name,
    NameList,
    Predict,
    ShowModels,
    StatementError,
    Train,
)

DIALECTS = ("postgres", "sqlite", "mysql")
LONG = """
WITH people AS (SELECT *, 'TO TRAIN' AS note FROM staff -- LABEL x INTO y
) SELECT label, (SELECT max(a) FROM u) AS m FROM people JOIN b ON b.id = people.id ORDER BY label
TO TRAIN WideAndDeepClassifier
WITH model.hidden_units = [64, -3], train.num_epochs = 5, model.optimizer = adam, train.shuffle = true,
    validation.select = 'SELECT ''x'' AS a', model.learning_rate = 1e-3
COLUMN age, EMBEDDING(CATEGORY_HASH(town, 100), 8), CROSS([age, BUCKET(hours, [1, 2.5])], 50) FOR deep
COLUMN VOCABULARY("odd name", ['a', 'it''s']), NORMALIZE(age, -1, 2)
LABEL "Income" INTO big_model
"""


def wrong(source: str, dialect: str = "postgres") -> StatementError:
    with pytest.raises(StatementError) as caught:
        parse(source, dialect)
    return caught.value


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_short_form_names_a_query_a_label_and_a_model(dialect: str) -> None:
    (found,) = parse("SELECT * FROM employee LABEL income INTO my_elasticdl_model", dialect)
    assert isinstance(found, Train)
    assert found.query.text == "SELECT * FROM employee"
    assert (found.label.text, found.model.name, found.estimator) == ("income", "my_elasticdl_model", None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_long_form_has_all_of_its_clauses(dialect: str) -> None:
    (found,) = parse(LONG.replace('"', "`") if dialect == "mysql" else LONG, dialect)
    assert isinstance(found, Train)
    assert found.query.text.startswith("WITH people")
    assert found.query.text.endswith("ORDER BY label")
    assert found.estimator is not None
    assert found.estimator.text == "WideAndDeepClassifier"
    assert {key: one.value.value for key, one in found.attributes.items()} == {
        "model.hidden_units": [64, -3],
        "train.num_epochs": 5,
        "model.optimizer": "adam",
        "train.shuffle": True,
        "validation.select": "SELECT 'x' AS a",
        "model.learning_rate": 1e-3,
    }
    deep, both = found.columns
    assert (deep.part is not None and deep.part.text, both.part) == ("deep", None)
    embedding, cross = deep.expressions[1:]
    assert isinstance(embedding, Call)
    assert isinstance(embedding.arguments[0], Call)
    assert isinstance(cross, Call)
    assert isinstance(cross.arguments[0], NameList)
    vocabulary, normalize = both.expressions
    assert isinstance(vocabulary, Call)
    assert isinstance(normalize, Call)
    column, values = vocabulary.arguments
    assert isinstance(column, Name)
    assert isinstance(values, Literal)
    assert (column.text, column.is_quoted, values.value) == ("odd name", True, ["a", "it's"])
    assert [one.value for one in normalize.arguments[1:] if isinstance(one, Literal)] == [-1, 2]
    assert (found.label.text, found.label.is_quoted) == ("Income", True)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_statements_are_parted_by_semicolons_outside_of_texts(dialect: str) -> None:
    found = parse(
        "SELECT ';' AS a FROM t TO PREDICT s.t.c USING m@3; SELECT a FROM t TO EVALUATE auc, loss USING m INTO x;"
        "SHOW MODELS; DESCRIBE m@2; DROP MODEL m; SELECT a FROM t TO EXPLAIN WITH explain.rows = 9 USING m INTO s.x;"
        "SELECT a FROM t TO EXPLAIN USING m@4",
        dialect,
    )
    predict, evaluate, show, describe, drop, explain, short = found
    assert isinstance(predict, Predict)
    assert ([name.text for name in predict.table], predict.column.text) == (["s", "t"], "c")
    assert (predict.model.name, predict.model.version) == ("m", 3)
    assert isinstance(evaluate, Evaluate)
    assert [name.text for name in evaluate.metrics] == ["auc", "loss"]
    assert [name.text for name in evaluate.table] == ["x"]
    assert isinstance(show, ShowModels)
    assert isinstance(describe, DescribeModel)
    assert isinstance(drop, DropModel)
    assert isinstance(explain, Explain)
    assert {key: one.value.value for key, one in explain.attributes.items()} == {"explain.rows": 9}
    assert ([name.text for name in explain.table], explain.query.text) == (["s", "x"], "SELECT a FROM t")
    assert isinstance(short, Explain)
    assert (short.attributes, short.table, short.model.version) == ({}, (), 4)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT label FROM t ORDER BY label",
        "SELECT t.label, label AS b FROM t WHERE label = 1",
        "SELECT INTERVAL '1-2' YEAR TO MONTH AS i FROM t",
        "SELECT a FROM t UNION ALL SELECT a FROM u",
        "(SELECT a FROM t) UNION (SELECT a FROM u)",
        'SELECT "TO TRAIN", "LABEL" FROM t',
        "SELECT a /* LABEL b INTO c */ FROM t",
    ],
)
def test_words_of_ours_inside_of_the_select_are_its_own(query: str) -> None:
    (found,) = parse(f"{query} LABEL label INTO m", "postgres")
    assert isinstance(found, Train)
    assert (found.query.text, found.label.text) == (query, "label")


@pytest.mark.parametrize(
    ("source", "marked", "hint"),
    [
        ("SELECT a FROM t TO TRIAN D LABEL y INTO m", "TRIAN", "TRAIN"),
        ("SELECT a FROM t LABLE y INTO m", "LABLE", "LABEL"),
        ("SELEC a FROM t LABEL y INTO m", "SELEC", "SELECT"),
        ("SELECT a FROM t TO TRAIN D WTIH x = 1 LABEL y INTO m", "WTIH", "WITH"),
        ("SELECT a FROM t TO TRAIN D COLUM x LABEL y INTO m", "COLUM", "COLUMN"),
        ("SELECT a FROM t TO EXPLIAN USING m", "EXPLIAN", "TO EXPLAIN"),
        ("SELECT a FROM t TO EXPLAIN WTIH explain.rows = 9 USING m", "WTIH", "WITH"),
        ("SELECT a FROM t TO EXPLAIN USIGN m", "USIGN", "USING"),
        ("SELECT a FROM t USING m", "USING", "TO EXPLAIN"),
        ("SHOW MODEL", "MODEL", "MODELS"),
    ],
)
def test_a_slip_is_pointed_at_and_corrected(source: str, marked: str, hint: str) -> None:
    error = wrong(source)
    assert error.place.text == marked
    assert hint in error.hint


@pytest.mark.parametrize("verb", ["INSERT INTO t VALUES (1)", "UPDATE t SET a = 1", "DROP TABLE t", "DELETE FROM t"])
def test_only_a_select_is_run(verb: str) -> None:
    assert wrong(f"{verb} LABEL y INTO m").place.start == (0 if not verb.startswith("DROP") else 5)
    assert wrong(f"SELECT a FROM t LABEL y INTO m; {verb}").place.start >= 32


@pytest.mark.parametrize(
    ("query", "marked"),
    [
        ("WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x", "DELETE"),
        ("WITH x AS (INSERT INTO t VALUES (1) RETURNING *) SELECT * FROM x", "INSERT"),
        ("SELECT a INTO b FROM t", "INTO"),
        ("SELECT a FROM t FOR UPDATE", "FOR"),
    ],
)
def test_a_select_that_writes_is_refused(query: str, marked: str) -> None:
    assert wrong(f"{query} LABEL y INTO m").place.text == marked


def test_the_caret_stands_below_its_place_in_the_line_of_a_file() -> None:
    error = wrong("SHOW MODELS;\nSELECT a\nFROM t\n\tLABEL y INTO 'x'")
    line, carets = error.what.splitlines()[1:]
    assert line.startswith("  4 | ")
    assert line[carets.index("^") :].startswith("'x'")
    assert carets.count("^") == 3


def test_the_caret_of_a_long_line_is_in_the_part_that_is_shown() -> None:
    columns = ", ".join(f"column_{i}" for i in range(100))
    line, carets = wrong(f"SELECT {columns} FROM t LABEL y INTO 'x'").what.splitlines()[1:]
    assert len(line) < 110
    assert line[carets.index("^") :].startswith("'x'")


def test_a_select_alone_is_a_select() -> None:
    assert parse_select("SELECT a FROM t;", "sqlite").text == "SELECT a FROM t"
    for source in ("", "SELECT a FROM t; SELECT b FROM t", "DELETE FROM t", "SELECT a FROM t LABEL y INTO m"):
        with pytest.raises(StatementError):
            parse_select(source, "sqlite")


@pytest.mark.parametrize("name", ["../x", "m; DROP TABLE t", "", "a" * 41, "1m", "é"])
def test_the_name_of_a_model_is_a_plain_identifier(name: str) -> None:
    assert wrong(f'SELECT a FROM t LABEL y INTO "{name}"').place.text.strip('"') == name
