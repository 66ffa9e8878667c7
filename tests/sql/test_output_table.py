"""Outputs of jobs in tables of real databases: each row once, however often its task is done."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psycopg
import pytest

from elasticdl.activities import ActivityClock
from elasticdl.data.sql import OutputTable, check_unused_table
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.inference.prediction import PredictionWork, TableParts
from elasticdl.worker.tasks import HeldLease, LeaseLost
from elasticdl_client.choices import JobType
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.job_spec import JobSpec
from tests.data import mariadb

NUM_ROWS, NUM_WRITERS = 400, 4


@pytest.fixture(params=["server", "mariadb_server"], ids=["postgresql", "mariadb"])
def database(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def selected(database: str, sql: str) -> list[tuple[Any, ...]]:
    if database.startswith("mysql"):
        return list(mariadb.execute(database, sql))
    with psycopg.connect(database) as connection:
        return connection.execute(sql).fetchall()  # type: ignore[call-overload, no-any-return]


def rows(start: int, end: int, scale: float = 1.0) -> dict[str, Any]:
    ids = np.arange(start, end)
    return {"id": ids, "prediction": np.stack([ids * scale, ids * -scale], axis=1)}


def held(number: int) -> HeldLease:
    return HeldLease(pb.Lease(id=number, type=pb.PREDICTION, task=number))


def test_a_task_that_is_done_twice_leaves_each_row_once(database: str) -> None:
    url = f"{database}&table=twice"
    check_unused_table(url)
    for start, end, scale in ((0, 100, 7.0), (100, 200, 1.0), (0, 100, 1.0)):
        OutputTable(url, "id").replace(rows(start, end, scale))
    found = selected(database, "select id, prediction_0, prediction_1 from twice order by id")
    assert found == [(i, float(i), float(-i)) for i in range(200)]
    with pytest.raises(FlagError, match="has rows"):
        check_unused_table(url)


def test_a_prediction_that_is_no_number_has_a_row(database: str) -> None:
    url = f"{database}&table=no_numbers"
    OutputTable(url, "id").replace({"id": np.arange(2), "prediction": np.array([0.5, np.nan])})
    (first,), (second,) = selected(database, "select prediction from no_numbers order by id")
    assert first == 0.5
    assert second is None if database.startswith("mysql") else np.isnan(second)


def test_texts_of_a_model_are_texts(database: str) -> None:
    url = f"{database}&table=texts"
    labels = np.array(["döner".encode(), b"\xff", "text"], object)  # as Keras and tables give them
    OutputTable(url, "id").replace({"id": np.arange(3), "prediction": labels})
    assert [row[0] for row in selected(database, "select prediction from texts order by id")] == [
        "döner",
        "\\xff",
        "text",
    ]


def test_records_with_the_same_key_are_an_error_in_one_task_and_at_the_end(database: str) -> None:
    table = OutputTable(f"{database}&table=keys", "id")
    table.check_num_rows(0)
    with pytest.raises(DataError) as caught:
        table.replace({"id": np.array([1, 2, 1])})
    assert "another value in each record" in caught.value.hint
    for _ in range(2):  # tasks of two files with the same ids
        table.replace(rows(0, 50))
    table.check_num_rows(50)
    with pytest.raises(DataError, match="50 rows for 100 records: several have the same id"):
        table.check_num_rows(100)


def test_a_constraint_of_the_users_own_is_not_explained_by_the_key(server: str) -> None:
    with psycopg.connect(server) as connection:
        columns = "id BIGINT, prediction_0 DOUBLE PRECISION, prediction_1 DOUBLE PRECISION CHECK (prediction_1 > -3)"
        connection.execute(f"CREATE TABLE checked ({columns})")
    with pytest.raises(DataError, match="violates check constraint") as caught:
        OutputTable(f"{server}&table=checked", "id").replace(rows(0, 5))
    assert "another value in each record" not in caught.value.hint


def test_workers_that_write_the_same_rows_at_once_leave_each_row_once(database: str) -> None:
    """None of them finds the table; all write the same keys, each in another order."""
    barrier, failures = threading.Barrier(NUM_WRITERS), []

    def write(number: int) -> None:
        table = OutputTable(f"{database}&table=together", "id")
        order = np.random.default_rng(number).permutation(NUM_ROWS)
        barrier.wait()
        try:
            table.replace({name: values[order] for name, values in rows(0, NUM_ROWS).items()})
        except DataError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(NUM_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = selected(database, "select id, prediction_0 from together order by id")
    assert found == [(i, float(i)) for i in range(NUM_ROWS)]


def test_a_lease_that_is_lost_writes_nothing(database: str) -> None:
    url = f"{database}&table=leased"
    with TableParts(url, "id", lambda number: True).writing(held(8)) as written:
        written.write(rows(0, 3))
        written.write(rows(3, 5))
    with pytest.raises(LeaseLost), TableParts(url, "id", lambda number: False).writing(held(7)) as written:
        written.write(rows(0, 9))
    assert selected(database, "select id from leased order by id") == [(i,) for i in range(5)]


def test_a_prediction_ends_well_where_each_record_has_a_row(server: str, tmp_path: Path) -> None:
    """The master says how many there are: files may have come since it planned them."""
    (tmp_path / "rows.csv").write_text("id,x\n1,2\n")
    url, link = (
        f"{server}&table=ended",
        SimpleNamespace(worker_id=0, confirm=lambda number: True, clock=ActivityClock()),
    )
    spec = JobSpec(prediction_data=str(tmp_path), prediction_columns="id", prediction_outputs=url)
    definition = SimpleNamespace(prediction_outputs_processor=None, custom_data_reader=None)
    failures: Any = SimpleNamespace(link=link, clock=link.clock)
    nothing: Any = None
    work = PredictionWork(failures, nothing, nothing, spec, cast(Any, definition))
    OutputTable(url, "id").replace(rows(0, 3))
    work.end(HeldLease(pb.Lease(type=pb.TRAIN_END, shard=pb.ShardMessage(end=3))))
    with pytest.raises(DataError, match="3 rows for 4 records"):
        work.end(HeldLease(pb.Lease(type=pb.TRAIN_END, shard=pb.ShardMessage(end=4))))


def test_a_table_with_other_columns_is_refused(database: str) -> None:
    OutputTable(f"{database}&table=other", "id").replace({"id": np.arange(3), "word": np.array(["a", "b", "c"])})
    with pytest.raises(DataError, match="has the columns id, word, the predictions id, prediction_0, prediction_1"):
        OutputTable(f"{database}&table=other", "id").replace(rows(0, 3))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"prediction_columns": "id", "prediction_outputs": "postgresql://me@db/shop"}, "names no table"),
        ({"prediction_outputs": "postgresql://me@db/shop?table=t"}, "needs a key"),
        (
            {"prediction_columns": "id", "prediction_outputs": "mysql://db/shop?table=t", "prediction_format": "csv"},
            "is of files",
        ),
    ],
    ids=["no-table", "no-key", "a-format"],
)
def test_a_table_of_outputs_that_cannot_be_is_refused(tmp_path: Path, flags: dict[str, str], said: str) -> None:
    common = {"runtime": "local", "job_name": "p", "model_zoo": str(tmp_path), "model_def": "a.b"}
    given = {**common, "prediction_data": "d.csv", "checkpoint_dir_for_init": "c", **flags}
    with pytest.raises(FlagError, match=said):
        JobSpec.from_flags(JobType.PREDICT, given)
