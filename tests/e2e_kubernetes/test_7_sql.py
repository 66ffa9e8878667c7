"""SQL on a cluster: from a join of two tables to predictions in a table, with workers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from elasticdl_client.kubernetes.names import USER_ID
from tests.data import mariadb, postgres
from tests.data.conftest import test_data as census_data
from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl
from tests.e2e_kubernetes.space import Space

__all__ = ["census_data"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
_PASSWORD = "swordfish=17"
_NUM_EPOCHS = 2
_OF_PEOPLE = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex"),
)
_OF_INCOMES = ("capital_gain", "capital_loss", "hours_per_week", "native_country", "income")
_WHOLE_NUMBERS = {"age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"}
_PACED = """
    CREATE TABLE pace (seconds DOUBLE PRECISION);
    INSERT INTO pace VALUES (0.001);
    CREATE FUNCTION paced(value DOUBLE PRECISION) RETURNS DOUBLE PRECISION STABLE LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep((SELECT seconds FROM pace)); RETURN value; END $$
"""


class Shop:
    """The database of the test, which listens on the node's address, and is looked at by its socket."""

    def __init__(self, url: str, address: str) -> None:
        self._url = url
        (port,) = re.findall(r"port=(\d+)", url)
        self.pods_url = f"postgresql://reader:{_PASSWORD}@{address}:{port}/postgres"

    def run(self, sql: str, **values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            found = connection.execute(sql, values or None)  # type: ignore[call-overload]
            return list(found.fetchall()) if found.description else []

    def tables(self, prefix: str) -> list[str]:
        sql = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE %(prefix)s ORDER BY 1"
        return [name for (name,) in self.run(sql, prefix=f"{prefix}%")]

    def load_census(self, directory: Path) -> dict[str, int]:
        """Make the tables people and incomes, which share ids; the number of rows of each part of the census."""
        counts: dict[str, int] = {}
        with psycopg.connect(self._url) as connection, connection.cursor() as cursor:
            for table, columns in (("people", _OF_PEOPLE), ("incomes", _OF_INCOMES)):
                listed = ", ".join(f"{name} {'INTEGER' if name in _WHOLE_NUMBERS else 'TEXT'}" for name in columns)
                cursor.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, is_test BOOLEAN, {listed})")  # type: ignore[arg-type]
            rows = []
            for part in ("train", "test"):
                lines = (directory / f"adult-{part}.csv").read_text().splitlines()
                cells = [[cell.strip().rstrip(".") for cell in line.split(",")] for line in lines]
                whole = [row for row in cells if len(row) == len(_OF_PEOPLE) + len(_OF_INCOMES) and row[0].isdigit()]
                rows += [(part == "test", [None if cell == "?" else cell for cell in row]) for row in whole]
                counts[part] = len(whole)
            for table, of_table in (("people", slice(0, len(_OF_PEOPLE))), ("incomes", slice(len(_OF_PEOPLE), None))):
                with cursor.copy(f"COPY {table} FROM STDIN") as copy:  # type: ignore[arg-type]
                    for number, (is_test, row) in enumerate(rows):
                        copy.write_row([number, is_test, *row[of_table]])
        return counts

    @contextlib.contextmanager
    def slowly(self, table: str, column: str) -> Iterator[None]:
        """While reading this column of a table takes its time for each row; then jobs finish at full speed."""
        columns = self.run("SELECT column_name FROM information_schema.columns WHERE table_name = %(n)s", n=table)
        listed = ", ".join(f'paced("{name}") AS "{name}"' if name == column else f'"{name}"' for (name,) in columns)
        self.run(
            f"BEGIN; ALTER TABLE {table} RENAME TO hidden; CREATE VIEW {table} AS SELECT {listed} FROM hidden; COMMIT"
        )
        try:
            yield
        finally:
            self.run("UPDATE pace SET seconds = 0")
            self.run(f"BEGIN; DROP VIEW {table}; ALTER TABLE hidden RENAME TO {table}; COMMIT")
            self.run("UPDATE pace SET seconds = 0.001")


def statement(space: Space, datasource: str, sql: str, **flags: object) -> subprocess.Popen[str]:
    """`elasticdl sql` as a user runs it; the password is in the environment."""
    models = space.directory / "models"
    if not models.exists():
        models.mkdir()
        os.chown(models, USER_ID, USER_ID)
    common = {
        "runtime": "kubernetes",
        "namespace": space.namespace,
        "image_name": space.image,
        "image_pull_policy": "Never",
        "volume": f"host_path={models},mount_path=/models",
        "models_dir": "/models",
        "master_resource_request": "cpu=0.02,memory=128Mi",
        "worker_resource_request": "cpu=0.02,memory=256Mi",
        "worker_resource_limit": "memory=2Gi",
        **flags,
    }
    given = [f"--{name}={one}" for name, one in common.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "elasticdl_client.main", "sql", sql, *given],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "ELASTICDL_DATASOURCE": datasource},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def ends_after_a_kill(
    space: Space,
    shop: Shop,
    process: subprocess.Popen[str],
    name: str,
    prefix: str,
    num_rows: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> str:
    """The job's rows are read slowly until a worker is lost when something is done."""
    job = KubernetesJob(space.namespace, name, {}, space.directory, space.recorder, num_rows)

    def has_done_something() -> bool:
        status = job.status()
        return runs() and status is not None and status.records_done > 0

    def runs() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return True

    job.wait_until("the rows", lambda: runs() and bool(shop.tables(prefix)), 120)
    (table,) = shop.tables(prefix)
    with shop.slowly(table, "age"):
        meanwhile()
        job.wait_until(
            "tasks that are done", lambda: runs() and (s := job.status()) is not None and s.records_done > 0, 240
        )
        assert not showing_the_password()
        host.kill(job.the_pod(job.worker(0)).uid, signal.SIGKILL)
        job.wait_until("the loss of a worker", lambda: (s := job.status()) is not None and bool(s.lost_pods), 120)
    said = ended(process)
    status = job.status()
    assert status is not None
    assert all((one.records, one.repeated, one.lost) == (num_rows, 0, 0) for one in status.coverage), job.story()
    assert status.lost_pods, job.story()
    return said


def showing_the_password() -> list[str]:
    """The processes of this machine, pods among them, whose command lines show it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [text] if _PASSWORD in text else []
    return found


def test_a_join_is_trained_on_evaluated_and_predicted_though_workers_are_killed(
    open_space: OpenSpace, census_data: Path
) -> None:
    """The short form on the whole census, which two tables share."""
    space, address = open_space("sql"), host.node_address()
    with postgres.server(address, _PASSWORD) as url:
        shop = Shop(url, address)
        shop.run(_PACED)
        counts = shop.load_census(census_data / "census")
        joined = f"people JOIN (SELECT id, {', '.join(_OF_INCOMES)} FROM incomes) AS i USING (id)"
        train = f"SELECT * FROM {joined} WHERE NOT is_test LABEL income INTO census"
        flags = {"job_name": "train", "num_workers": 2, "num_ps_pods": 1, "num_epochs": _NUM_EPOCHS}
        process = statement(space, shop.pods_url, train, **flags)
        said = ends_after_a_kill(space, shop, process, "train", "elasticdl_train", counts["train"])
        assert "The model census@1 is trained: /models/census/1/export" in said
        test = f"SELECT * FROM {joined} WHERE is_test"
        explain = "TO EXPLAIN WITH explain.rows = 2000, explain.repeats = 2 USING census INTO why"
        evaluate = "TO EVALUATE auc, accuracy USING census INTO found"
        several = {"distribution_strategy": "AllReduceStrategy", "num_workers": 2, "num_minibatches_per_task": 4}
        process = statement(
            space, shop.pods_url, f"{test} TO PREDICT guess.guessed USING census", job_name="predict", **several
        )
        others: list[subprocess.Popen[str]] = []

        def begin_others() -> None:
            others.extend(statement(space, shop.pods_url, f"{test} {what}") for what in (evaluate, explain))

        said += ends_after_a_kill(
            space, shop, process, "predict", "elasticdl_inputs", counts["test"], meanwhile=begin_others
        )
        said += "".join(map(ended, others))

        found = {metric: value for model, metric, value in shop.run("SELECT * FROM found") if model == "census@1"}
        assert found["auc"] >= 0.90
        counted = "count(*), count(DISTINCT id), count(*) FILTER (WHERE guessed = income)"
        ((num_rows, num_ids, num_right),) = shop.run(f"SELECT {counted} FROM guess")
        assert (num_rows, num_ids) == (counts["test"], counts["test"])
        assert num_right / num_rows == pytest.approx(found["accuracy"], abs=1e-6)
        leading = shop.run("SELECT column_name FROM why ORDER BY importance DESC LIMIT 4")
        assert {("capital_gain",), ("marital_status",)} <= {*leading}
        assert shop.run("SELECT version, state, host, committed, lost FROM elasticdl_models") == [
            (1, "trained", "kubernetes", _NUM_EPOCHS * counts["train"], 0)
        ]
        assert shop.tables("elasticdl_") == ["elasticdl_models"]
        objects = "pods,configmaps,services,events,networkpolicies"
        seen = said + kubectl("-n", space.namespace, "get", objects, "-o", "yaml") + space.recorder.ends_of_logs()
        seen += json.dumps(shop.run("SELECT * FROM elasticdl_models"))
        assert _PASSWORD not in seen
        assert "secretKeyRef" in seen
        assert _PASSWORD not in "".join(path.read_text() for path in (space.directory / "logs").iterdir())
        secrets = json.loads(kubectl("-n", space.namespace, "get", "secrets", "-o", "json"))["items"]
        ours = [one for one in secrets if "env.PGPASSWORD" in one["data"]]
        assert len(ours) == 4
        assert all(one["metadata"]["ownerReferences"][0]["kind"] == "ConfigMap" for one in ours)


def test_a_table_of_mariadb_is_trained_on_and_predicted(open_space: OpenSpace) -> None:
    space, address = open_space("mariadb"), host.node_address()
    with mariadb.server(address, _PASSWORD) as url:
        mariadb.execute(
            url,
            "CREATE TABLE plants (id INT PRIMARY KEY, height DOUBLE, `leaf width` DOUBLE, kind VARCHAR(9))",
            "INSERT INTO plants SELECT seq, seq % 20, seq % 7, IF(seq % 20 > 9, 'tree', 'herb') FROM seq_1_to_2000",
        )
        pods_url = f"mysql://reader:{_PASSWORD}@{address}:{urlsplit(url).port}/staff"
        flags = {"job_name": "train", "num_workers": 2, "num_ps_pods": 1, "num_epochs": 5}
        said = ended(statement(space, pods_url, "SELECT * FROM plants LABEL kind INTO plant", **flags))
        assert "The model plant@1 is trained: /models/plant/1/export" in said
        several = {"job_name": "predict", "distribution_strategy": "AllReduceStrategy", "num_workers": 2}
        ended(statement(space, pods_url, "SELECT * FROM plants TO PREDICT guess.guessed USING plant", **several))
        found = mariadb.execute(url, "SELECT count(*), count(DISTINCT id), sum(guessed = kind) FROM guess")
        assert found[0][:2] == (2000, 2000)
        assert found[0][2] >= 1900
        names = mariadb.execute(url, "SHOW TABLES")
        assert sorted(name for (name,) in names) == ["elasticdl_models", "guess", "plants"]
