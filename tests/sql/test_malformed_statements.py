"""More than 200 malformed statements: each is refused with a message that names the place."""

from __future__ import annotations

import pytest

from elasticdl_client.sql.parser import parse
from elasticdl_client.sql.statement import StatementError
from elasticdl_client.sql.tokens import statements_of

TRAIN = "SELECT * FROM staff TO TRAIN DNNClassifier"
VALID = [
    "SELECT age , town FROM staff WHERE age > 3 LABEL income INTO m",
    f"{TRAIN} WITH model . dropout = 0.5 , train . num_epochs = - 1 COLUMN age FOR deep LABEL income INTO m",
    f"{TRAIN} COLUMN CROSS ( [ a , b ] , 10 ) , BUCKET ( a , [ 1 , 2 ] ) LABEL income INTO m",
    f"{TRAIN} COLUMN EMBEDDING ( CATEGORY_HASH ( town , 10 ) , 4 ) LABEL income INTO m",
    "SELECT * FROM staff TO PREDICT public . result . income USING m @ 3",
    "WITH s AS ( SELECT a FROM t ) SELECT * FROM s TO EVALUATE auc , loss USING m INTO result",
    "SELECT * FROM staff TO EXPLAIN WITH explain.rows = 10 , explain.seed = 1 USING m @ 2 INTO public . why",
    "DESCRIBE m @ 3",
    "DROP MODEL m @ 2",
    "SHOW MODELS",
]
BROKEN = ["(", ")", "]", ",", "=", "@", "'", '"', "/*", "5", ";", "TO", "COLUMN", "USING"]


def variants(statement: str) -> list[str]:
    """The statement without each of its tokens, and with something that does not belong there in its place."""
    tokens = statement.split(" ")
    found = []
    for at in range(len(tokens)):
        found.append(" ".join([*tokens[:at], *tokens[at + 1 :]]))
        for number in range(3):
            junk = BROKEN[(3 * at + number) % len(BROKEN)]
            found.append(" ".join([*tokens[:at], junk, *tokens[at + 1 :]]))
    return found


def error_of(source: str, dialect: str) -> StatementError | None:
    try:
        parse(source, dialect)
    except StatementError as error:
        return error
    return None


@pytest.mark.parametrize("dialect", ["postgres", "sqlite", "mysql"])
def test_malformed_statements_are_refused_at_a_place_in_them(dialect: str) -> None:
    refused = 0
    for statement in VALID:
        parse(statement, dialect)
        for source in variants(statement):
            error = error_of(source, dialect)
            if error is None:
                continue
            refused += 1
            assert error.hint, source
            assert 0 <= error.place.start < error.place.end <= max(1, len(source)), source
            line, carets = error.what.splitlines()[-2:]
            assert set(carets.strip()) == {"^"}, source
            assert len(carets) <= len(line) + 1, source
    assert refused >= 200, refused


@pytest.mark.parametrize(
    ("source", "marked"),
    [
        ("SELECT (a FROM t LABEL y INTO m", "("),
        ("SELECT a) FROM t LABEL y INTO m", ")"),
        ("SELECT 'a FROM t LABEL y INTO m", "'"),
        ("SELECT a FROM t /* LABEL y INTO m", "/*"),
        ("SELECT a b c FROM t LABEL y INTO m", "c"),
        ("SELECT a FROM WHERE LABEL y INTO m", "WHERE"),
        ("SELECT a FROM t LABEL y INTO m now", "now"),
        ("SELECT a FROM t LABEL y", "y"),
        ("SELECT a FROM t LABEL INTO m", "INTO"),
        ("SELECT a FROM t LABEL y INTO m@1", "1"),
        ("SELECT a FROM t INTO m", "INTO"),
        ("SELECT a FROM t", "t"),
        ("SELECT a FROM t TO", "TO"),
        ("SELECT a FROM t TO EXPLAIN", "N"),
        ("SELECT a FROM t TO EXPLAIN m", "m"),
        ("SELECT a FROM t TO EXPLAIN USING", "G"),
        ("SELECT a FROM t TO EXPLAIN USING m USING n", "USING"),
        ("SELECT a FROM t TO EXPLAIN USING m INTO a.b.c", "c"),
        ("SELECT a FROM t TO EXPLAIN WITH USING m", "USING"),
        ("SELECT a FROM t TO EXPLAIN WITH explain.rows USING m", "USING"),
        ("SELECT a FROM t TO EXPLAIN WITH explain.seed = 1, explain.seed = 1 USING m", "explain.seed"),
        ("SELECT a FROM t TO EXPLAIN USING m WITH explain.rows = 3", "WITH"),
        ("SELECT a FROM t TO EXPLIAN USING m", "EXPLIAN"),
        ("SELECT a FROM t TO PREDICT r USING m", "r"),
        ("SELECT a FROM t TO PREDICT a.b.c.d USING m", "d"),
        ("SELECT a FROM t TO PREDICT r.c", "c"),
        ("SELECT a FROM t TO EVALUATE USING m", "USING"),
        ("SELECT a FROM t TO EVALUATE auc USING m@0", "0"),
        ("SELECT a FROM t TO EVALUATE auc USING m@x", "x"),
        ("SELECT a FROM t TO TRAIN D WITH x = LABEL y INTO m", "LABEL"),
        ("SELECT a FROM t TO TRAIN D WITH x = 1, x = 2 LABEL y INTO m", "x"),
        ("SELECT a FROM t TO TRAIN D WITH x = - a LABEL y INTO m", "a"),
        ("SELECT a FROM t TO TRAIN D COLUMN LABEL y INTO m", "LABEL"),
        ("SELECT a FROM t TO TRAIN D COLUMN a COLUMN LABEL y INTO m", "LABEL"),
        ("SELECT a FROM t TO TRAIN D COLUMN a FOR LABEL y INTO m", "LABEL"),
        ("SELECT a FROM t TO TRAIN LABEL y INTO m", "LABEL"),
        ("VALUES (1) LABEL y INTO m", "VALUES"),
        ("SHOW", "W"),
        ("DROP MODEL", "L"),
        ("DROP MODEL m; DROP TABLE t", "TABLE"),
    ],
)
@pytest.mark.parametrize("dialect", ["postgres", "sqlite", "mysql"])
def test_the_place_is_the_first_thing_that_is_wrong(source: str, marked: str, dialect: str) -> None:
    with pytest.raises(StatementError) as caught:
        parse(source, dialect)
    assert caught.value.place.text == marked, str(caught.value)


def test_nothing_is_an_error_as_well() -> None:
    for source in ("", "  \n", ";", "-- a comment"):
        with pytest.raises(StatementError):
            parse(source, "sqlite")
    assert statements_of(";;", "sqlite") == []
