"""SQL on a cluster: from a table of PostgreSQL to predictions in a table, with workers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from elasticdl_client.kubernetes.names import USER_ID
from tests.data import postgres
from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl
from tests.e2e_kubernetes.space import Space

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
_PASSWORD = "swordfish=17"
_NUM_ROWS = 900
_TASKS = {"minibatch_size": 16, "num_minibatches_per_task": 2}
_PACED = """
    CREATE TABLE pace (seconds DOUBLE PRECISION);
    INSERT INTO pace VALUES (0.02);
    CREATE FUNCTION paced(value DOUBLE PRECISION) RETURNS DOUBLE PRECISION STABLE LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep((SELECT seconds FROM pace)); RETURN value; END $$
"""
_IRIS = f"""
    CREATE TABLE iris AS SELECT i AS id, 4.3 + i % 36 / 10.0 AS sepal, 1 + i % 7 / 10.0 + i % 3 * 1.5 AS petal,
        (ARRAY['setosa', 'versicolor', 'virginica'])[i % 3 + 1] AS species FROM generate_series(1, {_NUM_ROWS}) AS i
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
            self.run("UPDATE pace SET seconds = 0.02")


def statement(space: Space, shop: Shop, sql: str, **flags: object) -> subprocess.Popen[str]:
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
        env={**os.environ, "ELASTICDL_DATASOURCE": shop.pods_url},
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def ends_after_a_kill(space: Space, shop: Shop, process: subprocess.Popen[str], name: str, prefix: str) -> str:
    """The job's rows are read slowly until a worker is lost when something is done."""
    job = KubernetesJob(space.namespace, name, {}, space.directory, space.recorder, _NUM_ROWS)

    def has_done_something() -> bool:
        status = job.status()
        return runs() and status is not None and status.records_done > 0

    def runs() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return True

    job.wait_until("the rows", lambda: runs() and bool(shop.tables(prefix)), 120)
    (table,) = shop.tables(prefix)
    with shop.slowly(table, "petal"):
        job.wait_until(
            "tasks that are done", lambda: runs() and (s := job.status()) is not None and s.records_done > 0, 240
        )
        assert not showing_the_password()
        host.kill(job.the_pod(job.worker(0)).uid, signal.SIGKILL)
        job.wait_until("the loss of a worker", lambda: (s := job.status()) is not None and bool(s.lost_pods), 120)
    said = ended(process)
    status = job.status()
    assert status is not None
    assert all((one.records, one.repeated, one.lost) == (_NUM_ROWS, 0, 0) for one in status.coverage), job.story()
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


def node_address() -> str:
    addresses = json.loads(kubectl("get", "nodes", "-o", "json"))["items"][0]["status"]["addresses"]
    return str(next(one["address"] for one in addresses if one["type"] == "InternalIP"))


def test_a_table_is_trained_on_evaluated_and_predicted_though_workers_are_killed(open_space: OpenSpace) -> None:
    space, address = open_space("sql"), node_address()
    with postgres.server(address, _PASSWORD) as url:
        shop = Shop(url, address)
        shop.run(f"{_PACED}; {_IRIS}")
        train = "SELECT * FROM iris TO TRAIN DNNClassifier WITH train.num_epochs = 2 LABEL species INTO flowers"
        process = statement(space, shop, train, job_name="train", num_workers=2, num_ps_pods=1, **_TASKS)
        said = ends_after_a_kill(space, shop, process, "train", "elasticdl_train")
        assert "The model flowers@1 is trained: /models/flowers/1/export" in said
        said += ended(statement(space, shop, "SELECT * FROM iris TO EVALUATE accuracy USING flowers INTO found"))
        explain = "SELECT * FROM iris TO EXPLAIN WITH explain.repeats = 2 USING flowers INTO why"
        said += ended(statement(space, shop, explain))
        predict = "SELECT id, sepal, petal FROM iris TO PREDICT guess.species USING flowers"
        several = {"distribution_strategy": "AllReduceStrategy", "num_workers": 2, **_TASKS}
        process = statement(space, shop, predict, job_name="predict", **several)
        said += ends_after_a_kill(space, shop, process, "predict", "elasticdl_inputs")

        ((model, metric, accuracy),) = shop.run("SELECT * FROM found")
        assert (model, metric) == ("flowers@1", "accuracy")
        counts = "count(*), count(DISTINCT id), count(*) FILTER (WHERE g.species = i.species)"
        ((num_rows, num_ids, num_right),) = shop.run(f"SELECT {counts} FROM guess g JOIN iris i USING (id)")
        assert (num_rows, num_ids) == (_NUM_ROWS, _NUM_ROWS)
        assert num_right / num_rows == pytest.approx(accuracy, abs=1e-6)
        assert {name for (name,) in shop.run("SELECT column_name FROM why")} == {"sepal", "petal"}
        ((name,),) = shop.run("SELECT column_name FROM why ORDER BY importance DESC LIMIT 1")
        assert name == "petal"  # which the species follow from
        assert shop.run("SELECT version, state, host, committed, lost FROM elasticdl_models") == [
            (1, "trained", "kubernetes", 2 * _NUM_ROWS, 0)
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
