"""Whole statements on the local runtime: from a table to a model, its metrics, and a table of predictions."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from IPython.core.interactiveshell import InteractiveShell

from elasticdl.protocol import Role
from tests.chaos.job import LocalJob
from tests.chaos.scenarios import coverage_of
from tests.data import mariadb
from tests.data.conftest import test_data as census_data
from tests.house.documents import REPOSITORY, bash_blocks, clone, run_page

__all__ = ["census_data"]
PAGE = REPOSITORY / "docs" / "sql.md"
PASSWORD = "swordfish-17"
INJECTION = "x\"'; DROP TABLE staff; --"
NUM_ROWS = 300
NAMES = (
    "age workclass fnlwgt education education_num marital_status occupation relationship race sex capital_gain "
    "capital_loss hours_per_week native_country income"
)


def elasticdl_sql(home: Path, source: str, *arguments: str) -> str:
    """Run statements as a user would; return the output."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "sql", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "HOME": str(home), "ELASTICDL_DATASOURCE": source, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_predictions_are_a_table_with_each_row_once_whatever_its_names_and_values(server: str, tmp_path: Path) -> None:
    """Names and values that want to be SQL, a schema of its own, and a password that must be nowhere."""
    quoted = '"' + INJECTION.replace('"', '""') + '"'
    with psycopg.connect(server) as connection:
        connection.execute('CREATE SCHEMA "results"')
        columns = f'id INTEGER PRIMARY KEY, "from" NUMERIC(5, 2), {quoted} TEXT, pay TEXT'
        connection.execute(f"CREATE TABLE staff ({columns})")
        with connection.cursor() as cursor:
            rows = [(i, i / 4, INJECTION if i % 2 else None, INJECTION if i % 3 else "low") for i in range(NUM_ROWS)]
            cursor.executemany("INSERT INTO staff VALUES (%s, %s, %s, %s)", rows)
    source = server.replace("reader@", f"reader:{PASSWORD}@")
    train = "SELECT * FROM staff TO TRAIN WideAndDeepClassifier WITH train.num_epochs = 1 LABEL pay INTO m"
    predict = 'SELECT * FROM staff WHERE id >= 100 ORDER BY id DESC TO PREDICT results."x""; y"."pay""s" USING m'
    explain = 'SELECT * FROM staff TO EXPLAIN WITH explain.rows = 200 USING m INTO results."why\'; --"'
    flags = ("--distribution_strategy=Local", "--models_table")
    said = elasticdl_sql(tmp_path, source, f"{train}; {predict}; {explain}; DESCRIBE m", *flags)
    assert f"records {NUM_ROWS}, committed {NUM_ROWS}, repeated 0, lost 0" in said
    ledger = f"epochs 1, committed {NUM_ROWS}, repeated 0, lost 0"
    assert re.search(rf"^ledger: +{ledger}$", said, re.MULTILINE), said
    assert f"schema:      id int64, from float64, {INJECTION} string, pay string\n" in said
    with psycopg.connect(server) as connection:
        found = connection.execute('SELECT * FROM results."x""; y"').fetchall()
        reasons = connection.execute('SELECT * FROM results."why\'; --"').fetchall()
        models = connection.execute("SELECT name, version, state, committed, lost FROM elasticdl_models").fetchall()
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname IN ('public', 'results')"
        ).fetchall()
        assert connection.execute("SELECT count(*) FROM staff").fetchone() == (NUM_ROWS,)
    assert sorted(row[0] for row in found) == list(range(100, NUM_ROWS))
    assert {row[2] for row in found} == {INJECTION, None}
    assert {row[4] for row in found} <= {INJECTION, "low"}
    assert {(model, column) for model, column, _, _ in reasons} == {("m@1", "from"), ("m@1", INJECTION)}
    assert reasons[0][2] >= reasons[1][2] > -0.1
    assert all(deviation > 0 for _, _, _, deviation in reasons)
    assert f"m@1 on 200 of {NUM_ROWS} rows, chosen at random (seed 0): cross-entropy 0." in said
    assert {name for (name,) in tables if name.startswith("elasticdl")} == {"elasticdl_models"}
    assert models == [("m", 1, "trained", NUM_ROWS, 0)]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]
    assert PASSWORD not in said


@pytest.mark.full  # two jobs; differences between databases are in test_database.py
@pytest.mark.timeout(300)
def test_predictions_on_mariadb_are_a_table_with_each_row_once(mariadb_server: str, tmp_path: Path) -> None:
    mariadb.execute(
        mariadb_server,
        "CREATE DATABASE results",
        f"CREATE OR REPLACE USER reader IDENTIFIED BY '{PASSWORD}'",
        "GRANT ALL ON *.* TO reader",
        "CREATE TABLE staff (id INTEGER PRIMARY KEY, age DECIMAL(5, 2), `a``; b` TEXT, is_new TINYINT(1), "
        "since DATETIME, size BIGINT UNSIGNED, pay TEXT)",
        f"INSERT INTO staff SELECT seq, seq / 4, IF(seq % 2, 'a\\'b', NULL), seq % 2, NOW(), "
        f"9223372036854775807 - seq, IF(seq % 3, 'HIGH', 'high') FROM seq_1_to_{NUM_ROWS}",
    )
    source = mariadb_server.replace("root@", f"reader:{PASSWORD}@")
    train = "SELECT * FROM staff TO TRAIN WideAndDeepClassifier WITH train.num_epochs = 1 LABEL pay INTO m"
    predict = 'SELECT * FROM staff WHERE id > 100 ORDER BY id DESC TO PREDICT results.`x"``y`.`pay"s` USING m'
    said = elasticdl_sql(tmp_path, source, f"{train}; {predict}", "--distribution_strategy=Local")
    assert f"records {NUM_ROWS}, committed {NUM_ROWS}, repeated 0, lost 0" in said
    found = mariadb.execute(mariadb_server, 'SELECT id, size, `a``; b`, `pay"s` FROM results.`x"``y`')
    tables = mariadb.execute(mariadb_server, "SELECT table_name FROM information_schema.tables")
    assert sorted(row[:2] for row in found) == [(i, 2**63 - 1 - i) for i in range(101, NUM_ROWS + 1)]
    assert {row[2] for row in found} == {"a'b", None}
    assert {row[3] for row in found} <= {"high", "HIGH"}
    assert {name for (name,) in tables if name.startswith("elasticdl")} == set()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]
    assert PASSWORD not in said


@pytest.mark.full  # two jobs of several processes, with a kill in each
@pytest.mark.timeout(600)
def test_killed_workers_cost_no_row_of_a_training_and_leave_none_twice_in_a_prediction(tmp_path: Path) -> None:
    num_rows, models = 20_000, tmp_path / "models"
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute("CREATE TABLE r (id INTEGER PRIMARY KEY, a INTEGER, y TEXT)")
        database.executemany("INSERT INTO r VALUES (?, ?, ?)", [(i, i * 7 % 100, "ab"[i % 2]) for i in range(num_rows)])
    database.close()
    flags = {
        "datasource": f"sqlite:///{tmp_path}/rows.db",
        "models_dir": models,
        "num_workers": 2,
        "minibatch_size": 16,
        "num_minibatches_per_task": 4,
    }
    train = "SELECT * FROM r TO TRAIN LinearClassifier WITH train.num_epochs = 1 LABEL y INTO m"
    training = LocalJob(tmp_path / "train", flags, "sql", arguments=(train,)).start()
    training.wait_for_version(50)
    training.kill(training.victims(Role.WORKER)[0])
    assert training.wait(400) == 0, training.story()
    assert [(one.committed, one.repeated, one.lost) for one in coverage_of(training)] == [(num_rows, 0, 0)]
    more = {"distribution_strategy": "AllReduceStrategy"}
    predict = "SELECT id, a FROM r ORDER BY id TO PREDICT out.y USING m"
    predicting = LocalJob(tmp_path / "predict", flags | more, "sql", arguments=(predict,)).start()
    predicting.wait_until("a finished task", lambda: any(models.glob(".*/predictions/part-*")))
    predicting.kill(predicting.victims(Role.WORKER)[0])
    assert predicting.wait(400) == 0, predicting.story()
    with sqlite3.connect(tmp_path / "rows.db") as database:
        found = database.execute("SELECT count(*), count(DISTINCT id), count(y) FROM out").fetchone()
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    database.close()
    assert found == (num_rows, num_rows, num_rows)
    assert sorted(name for (name,) in tables) == ["out", "r"]
    assert not list(models.glob(".*"))


@pytest.mark.full  # two jobs at once
@pytest.mark.timeout(400)
def test_two_clients_that_train_one_model_at_once_make_two_versions(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "d.db") as database:
        database.execute("CREATE TABLE d (age REAL, kind TEXT)")
        database.executemany("INSERT INTO d VALUES (?, ?)", [(i % 7, "ab"[i % 7 > 3]) for i in range(NUM_ROWS)])
    database.close()
    statement = "SELECT * FROM d TO TRAIN LinearClassifier WITH train.num_epochs = 2 LABEL kind INTO m"
    flags = ["--distribution_strategy=Local", "--models_table"]
    homes = [tmp_path / name for name in ("one", "other")]
    for home in homes:
        home.mkdir()
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda home: elasticdl_sql(home, f"sqlite:///{tmp_path}/d.db", statement, *flags), homes))
    with sqlite3.connect(tmp_path / "d.db") as database:
        columns = "version, state, epochs, committed, repeated, lost, export"
        rows = sorted(database.execute(f"SELECT {columns} FROM elasticdl_models").fetchall())
    database.close()
    assert [row[:-1] for row in rows] == [(version, "trained", 2, 2 * NUM_ROWS, 0, 0) for version in (1, 2)]
    assert {Path(row[-1]).parents[4] for row in rows} == set(homes)
    assert sorted(re.findall(r"The model (m@\d) is trained", "".join(said))) == ["m@1", "m@2"]


@pytest.mark.full  # three jobs on all rows of the census
@pytest.mark.timeout(600)
def test_the_short_form_on_the_census_reaches_an_auc_of_90_percent_and_does_not_look_at_noise(
    census_data: Path, tmp_path: Path
) -> None:
    names = NAMES.split()
    whole = {"age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"}
    listed = ", ".join(f"{name} {'INTEGER' if name in whole else 'TEXT'}" for name in names)
    with sqlite3.connect(tmp_path / "census.db") as database:
        for split in ("train", "test"):
            database.execute(f"CREATE TABLE {split} (id INTEGER PRIMARY KEY, {listed}, noise REAL)")
            lines = (census_data / "census" / f"adult-{split}.csv").read_text().splitlines()
            rows = [[cell.strip().rstrip(".") for cell in line.split(",")] for line in lines]
            kept = [[None if cell == "?" else cell for cell in row] for row in rows if len(row) == len(names)]
            marks, noise = ", ".join("?" * (len(names) + 1)), random.Random(split)
            numbered = [[*row, noise.gauss(0, 1)] for row in kept]
            database.executemany(f"INSERT INTO {split} ({', '.join(names)}, noise) VALUES ({marks})", numbered)
            database.execute(f"DELETE FROM {split} WHERE typeof(age) <> 'integer'")
    database.close()
    statements = (
        "SELECT * FROM train LABEL income INTO census; SELECT * FROM test TO EVALUATE auc USING census INTO found;"
        "SELECT * FROM test TO EXPLAIN WITH explain.rows = 5000 USING census INTO why"
    )
    elasticdl_sql(tmp_path, f"sqlite:///{tmp_path}/census.db", statements, "--distribution_strategy=Local")
    with sqlite3.connect(tmp_path / "census.db") as database:
        ((model, metric, value),) = database.execute("SELECT * FROM found").fetchall()
        reasons = database.execute("SELECT column_name, importance, deviation FROM why").fetchall()
    database.close()
    columns = [column for column, _, _ in reasons]
    assert {"capital_gain", "marital_status", "age"} <= set(columns[:4]), reasons
    assert "noise" in columns[-5:], reasons
    assert abs(dict(zip(columns, reasons, strict=True))["noise"][1]) < reasons[0][1] / 50, reasons
    assert (model, metric) == ("census@1", "auc")
    assert value >= 0.90
    about = json.loads((tmp_path / ".elasticdl" / "models" / "census" / "1" / "model.json").read_text())
    assert about["rows"] == 32_561


OWN = """
import keras

def custom_model(units=1):
    inputs = {"age": keras.Input((1,), name="age"), "hours": keras.Input((1,), name="hours")}
    hidden = keras.layers.Dense(units, activation="relu")(keras.layers.Concatenate()(list(inputs.values())))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

def loss(labels, predictions):
    return keras.ops.sparse_categorical_crossentropy(labels, predictions)

def optimizer():
    return keras.optimizers.Adam(0.03)

def eval_metrics_fn():
    return {"right": keras.metrics.SparseCategoricalAccuracy()}
"""


@pytest.mark.full  # four jobs
@pytest.mark.timeout(400)
def test_a_model_of_ones_own_is_trained_evaluated_and_predicts_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tables.py").write_text(OWN)
    with sqlite3.connect(tmp_path / "d.db") as database:
        database.execute("CREATE TABLE d (id INTEGER PRIMARY KEY, age REAL, hours REAL, kind TEXT)")
        rows = [(i % 7 / 7, i % 11 / 11, "low" if i % 7 < 2 else "mid" if i % 7 < 5 else "top") for i in range(1200)]
        database.executemany("INSERT INTO d (age, hours, kind) VALUES (?, ?, ?)", rows)
    database.close()
    statements = (
        f"SELECT * FROM d TO TRAIN mine.tables.custom_model WITH model.units = 16, train.model_zoo = '{tmp_path}' "
        "COLUMN age, hours LABEL kind INTO own;"
        "SELECT * FROM d TO EVALUATE right USING own INTO found; SELECT * FROM d TO PREDICT guess.found USING own"
    )
    elasticdl_sql(tmp_path, f"sqlite:///{tmp_path}/d.db", statements, "--distribution_strategy=Local")
    with sqlite3.connect(tmp_path / "d.db") as database:
        ((_, metric, value),) = database.execute("SELECT * FROM found").fetchall()
        ((num_rows, num_right),) = database.execute("SELECT count(*), sum(found = kind) FROM guess").fetchall()
    database.close()
    assert (metric, num_rows) == ("right", 1200)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ELASTICDL_DATASOURCE", f"sqlite:///{tmp_path}/d.db")
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "elasticdl_client.sql.notebook")
    table = shell.run_cell_magic("elasticdl", "", "SELECT * FROM d TO EVALUATE right USING own")
    assert table.rows == (("own@1", "right", pytest.approx(value)),)
    assert f"<td>own@1</td><td>right</td><td>{value:.6g}</td>" in table._repr_html_()
    assert num_right / num_rows == pytest.approx(value, abs=1e-6)
    assert value > 0.8


def test_the_commands_of_the_page_are_sound_bash() -> None:
    script = "\n".join(bash_blocks(PAGE))
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    assert len(re.findall(r"^elasticdl sql ", script, re.MULTILINE)) == 5


@pytest.mark.full  # three jobs
@pytest.mark.timeout(400)
def test_the_page_works_word_for_word(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    said = run_page(PAGE, clone(tmp_path / "elasticdl"), Path(sys.executable).parent, 360, HOME=str(home))
    assert "records 500, committed 500, repeated 0, lost 0" in said, said
    (accuracy,) = re.findall(r"^  accuracy +(\d\.\d+)$", said, re.MULTILINE)
    assert float(accuracy) > 0.9
    assert set(re.findall(r"^  (\w+) +\d\.\d+ ± \d\.\d+  #+$", said, re.MULTILINE)) == {"age", "sector", "hours"}
    assert "100 rows with predictions of my_model@1 are in forecast." in said, said
    assert "Removed my_model: 1 version." in said, said


@pytest.mark.full  # three jobs
@pytest.mark.timeout(500)
def test_the_tutorial_works_word_for_word(server: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    page, directory = REPOSITORY / "docs" / "tutorials" / "sql.md", clone(tmp_path / "elasticdl")
    said = run_page(page, directory, Path(sys.executable).parent, 450, HOME=str(home), ELASTICDL_DATASOURCE=server)
    assert "records 960, committed 960, repeated 0, lost 0" in said, said
    (auc,) = re.findall(r"^  auc +(\d\.\d+)$", said, re.MULTILINE)
    assert float(auc) > 0.9
    columns = re.findall(r"^  (\w+) +-?\d\.\d+ ± \d\.\d+", said, re.MULTILINE)
    assert sorted(columns) == ["minutes", "months", "num_calls", "plan"]
    assert "num_calls" in columns[:2], said
    assert "300 rows with predictions of churn@1 are in churn_forecast." in said, said
    stay, leave = re.findall(r"^leaves: (?:False|True), customers: (\d+), calls: ", said, re.MULTILINE)
    assert int(stay) + int(leave) == 300
    assert "Removed churn: 1 version." in said, said
