"""The table of models: versions for clients on several machines."""

from __future__ import annotations

import json
import sqlite3
import threading
from functools import partial
from pathlib import Path

import pytest

from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.sql import command, models
from elasticdl_client.sql.arguments import split
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.models import ModelRegistry, StoredModel
from elasticdl_client.sql.models_table import ModelsTable
from elasticdl_client.sql.statement import ModelName, Place, StatementError

NUM_CLIENTS, NUM_MODELS = 4, 3
ABOUT = {"estimator": "DNNClassifier", "label": "income", "rows": 5, "schema": {"age": "int64"}, "job": "sql-train-m-1"}


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "mariadb":
        return str(request.getfixturevalue("mariadb_server"))
    if request.param == "postgresql":
        return str(request.getfixturevalue("server"))
    sqlite3.connect(tmp_path / "d.db").close()
    (tmp_path / "d.db").touch()
    return f"sqlite:///{tmp_path}/d.db"


def registry(source: str, root: Path, table: str = "elasticdl_models") -> ModelRegistry:
    return ModelRegistry(root, ModelsTable(partial(Database, source), table))


def named(name: str, version: int = 0) -> ModelName:
    return ModelName(name, version, Place("DESCRIBE m", 9, 10))


def trained(made: ModelRegistry, model: StoredModel) -> StoredModel:
    model.export.mkdir()
    model.found["ledger"] = {"epochs": 3, "committed": 15, "repeated": 0, "lost": 0}
    made.record(model)
    return model


def selected(source: str, columns: str, table: str = "elasticdl_models") -> list[tuple[object, ...]]:
    with Database(source).transaction() as writer:
        found = writer._connection.exec_driver_sql(f"SELECT {columns} FROM {table} ORDER BY name, version")
        return [tuple(row) for row in found]


def test_clients_that_train_one_model_at_once_get_versions_of_their_own(source: str, tmp_path: Path) -> None:
    """Half of them share a directory; the table does not exist before."""
    found: list[int] = []
    begin = threading.Barrier(NUM_CLIENTS)

    def client(root: Path) -> None:
        made = registry(source, root)
        begin.wait()
        for _ in range(NUM_MODELS):
            found.append(trained(made, made.add("m", ABOUT)).version)

    threads = [threading.Thread(target=client, args=(tmp_path / str(number // 2),)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = list(range(1, NUM_CLIENTS * NUM_MODELS + 1))
    assert sorted(found) == expected
    assert selected(source, "version, state") == [(version, "trained") for version in expected]


def test_a_row_names_the_user_the_training_and_its_ledger(source: str, tmp_path: Path) -> None:
    made = registry(source, tmp_path)
    model = made.add("m", ABOUT | {"statement": "SELECT ':x', '100 %' FROM t LABEL y INTO m"})
    assert selected(source, "state, committed") == [("training", None)]
    trained(made, model)
    columns = "state, statement, input_schema, num_rows, epochs, committed, repeated, lost, trained_by, job, export"
    assert selected(source, columns) == [
        ("trained", model.found["statement"], '{"age": "int64"}', 5, 3, 15, 0, 0, model.found["trained_by"],
         "sql-train-m-1", str(model.export)),
    ]  # fmt: skip
    assert json.loads(str(selected(source, "description")[0][0])) == model.found


def test_models_of_other_machines_are_listed_and_refused_where_their_files_are_not(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = registry(source, tmp_path / "here"), registry(source, tmp_path / "there")
    first = trained(here, here.add("m", ABOUT))
    with monkeypatch.context() as patch:
        patch.setattr(models.socket, "gethostname", lambda: "far-away")
        second = trained(there, there.add("m", ABOUT))
    assert (first.version, second.version) == (1, 2)
    assert here.find(named("m", 1)).directory == first.directory
    with pytest.raises(StatementError, match=r"far-away:.*/there/m/2/export"):
        here.find(named("m"))
    flags = [f"--datasource={source}", f"--models_dir={tmp_path / 'here'}", "--models_table"]
    command.run([*flags, "SHOW MODELS; DESCRIBE m@2; DROP MODEL m"], {})
    said = capsys.readouterr().out
    assert "not trained" not in said
    assert "state:       trained on far-away" in said
    assert "ledger:      epochs 3, committed 15, repeated 0, lost 0" in said
    assert f"Removed m: 2 versions.\nThe files of m@2 stay on far-away: {second.directory}." in said
    assert selected(source, "*") == []
    assert not first.directory.exists()
    assert second.directory.exists()


def test_a_model_of_another_directory_of_this_machine_is_used(source: str, tmp_path: Path) -> None:
    one, other = registry(source, tmp_path / "one"), registry(source, tmp_path / "other")
    model = trained(one, one.add("m", ABOUT))
    assert other.find(named("m")).export == model.export


def test_a_model_that_was_resumed_is_marked_when_models_are_listed(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry(source, tmp_path).add("m", ABOUT).export.mkdir()
    flags = [f"--datasource={source}", f"--models_dir={tmp_path}", "--models_table"]
    command.run([*flags, "SHOW MODELS", "--dry_run"], {})
    assert selected(source, "state") == [("training",)]
    command.run([*flags, "SHOW MODELS"], {})
    assert selected(source, "state") == [("trained",)]


def test_a_version_whose_directory_cannot_be_made_leaves_no_row(source: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        registry(source, tmp_path / "file").add("m", ABOUT)
    assert selected(source, "*") == []


def test_one_version_in_two_places_is_an_error_not_a_guess(source: str, tmp_path: Path) -> None:
    made = registry(source, tmp_path / "with")
    trained(made, made.add("m", ABOUT))
    ModelRegistry(tmp_path / "without").add("m", {"host": "elsewhere"})
    with pytest.raises(DataError, match="m@1 is two models"):
        list(registry(source, tmp_path / "without").all())


@pytest.mark.parametrize("table", ["x\"'; DROP TABLE m; --", "a$b c :p"])
def test_the_name_of_the_table_is_only_a_name(source: str, tmp_path: Path, table: str) -> None:
    made = registry(source, tmp_path, table)
    trained(made, made.add("m", ABOUT))
    assert [row.name for row in ModelsTable(partial(Database, source), table).rows()] == ["m"]


def test_a_table_of_something_else_is_refused(source: str, tmp_path: Path) -> None:
    with Database(source).transaction() as writer:
        writer.run("CREATE TABLE staff (name TEXT, version INTEGER)")
    with pytest.raises(FlagError, match="none of models; it lacks committed, created"):
        registry(source, tmp_path, "staff").add("m", ABOUT)


def test_the_flag_takes_a_name_or_nothing_and_needs_a_database(tmp_path: Path) -> None:
    given = split(["--models_table", "SHOW MODELS"])
    assert (given.own["models_table"], given.source) == ("elasticdl_models", "SHOW MODELS")
    assert split(["--models_table=s.t"]).own["models_table"] == "s.t"
    with pytest.raises(FlagError, match="--datasource"):
        command.run(["--models_table", "SHOW MODELS", f"--models_dir={tmp_path}"], {})
    for name in ("a.b.c", ".", "a."):
        with pytest.raises(FlagError, match="no name of a table"):
            ModelsTable(partial(Database, "sqlite:///x"), name)
