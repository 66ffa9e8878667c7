"""Statements whose jobs run on Kubernetes, up to the cluster: unreachable sources, and the way of a password."""

from __future__ import annotations

import base64
import json
import shlex
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psycopg
import pytest

from elasticdl.data.factory import create_reader
from elasticdl.data.sql import OutputTable
from elasticdl.protocol import Shard
from elasticdl.tabular import importance
from elasticdl.tabular.importance import Importance
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.data_sources import ROW
from elasticdl_client.errors import DataError, FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs.store import JobInfo, Phase
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.kubernetes.objects import job_manifests, public_manifests
from elasticdl_client.sql import command
from elasticdl_client.sql.cluster import TABLES, ClusterModels, KubernetesRuntime, StagedRows
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.jobs import JobFlags, command_of
from elasticdl_client.sql.models import ModelRegistry, PodPlace, StoredModel
from elasticdl_client.sql.models_table import ModelsTable
from elasticdl_client.sql.runtime import Session
from elasticdl_client.sql.snapshot import Field
from elasticdl_client.sql.statement import ModelName, Place, Query, StatementError
from tests.data import mariadb

PASSWORD = "swordfish, =17;"
STATEMENT = "SELECT * FROM staff LABEL pay INTO m"
NAME = ModelName("m", 0, Place("DESCRIBE m", 9, 10))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///staff.db", "a file of this machine"),
        ("postgresql://me@/shop", "a socket of this machine"),
        ("postgresql://me@/shop?host=/run/postgresql", "a socket of this machine"),
        ("mysql://me@db.example/shop?unix_socket=/run/s", "a socket of this machine"),
        ("postgresql://me@localhost/shop", "localhost is this machine here"),
        ("postgresql://me@127.0.0.53:5433/shop", "127.0.0.53 is this machine here"),
        ("postgresql://me@[::1]/shop", "::1 is this machine here"),
        ("postgresql://me@/shop?host=db.example,localhost", "localhost is this machine here"),
        ("postgresql://me@db.example/shop?sslrootcert=ca.pem", "sslrootcert names something of this machine"),
    ],
)
def test_a_database_that_pods_cannot_reach_is_refused_before_it_is_connected(url: str, said: str) -> None:
    flags = [f"--datasource={url}", "--runtime=kubernetes", "--models_dir=/models"]
    with pytest.raises(FlagError) as caught:
        command.run([STATEMENT, *flags], {})
    assert said in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize("place", ["", "--models_dir=models", "--models_dir=https://host/models"])
def test_models_that_pods_could_not_keep_are_refused(place: str) -> None:
    flags = ["--datasource=postgresql://me@db.example/shop", "--runtime=kubernetes", *filter(None, [place])]
    with pytest.raises(FlagError, match="--models_dir"):
        command.run([STATEMENT, *flags], {})


def test_a_model_on_no_volume_is_refused(server: str) -> None:
    cluster = KubernetesRuntime(partial(Database, server))
    for volume in ("", "claim_name=c,mount_path=/data", "empty_dir=1Gi,mount_path=/models"):
        with pytest.raises(FlagError, match="on no volume that outlives them"):
            cluster.flags({"output": "/models/m/1/export", "volume": volume})
    assert cluster.flags({"output": "/models/m/1", "volume": "claim_name=c,mount_path=/models"})["runtime"]
    assert cluster.flags({"output": "s3://bucket/m/1"})["runtime"] == Runtime.KUBERNETES


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: farm
clusters: [{name: farm, cluster: {server: "https://127.0.0.1:9"}}]
users: [{name: me, user: {}}]
contexts: [{name: farm, context: {cluster: farm, user: me}}]
"""
SHOP, STORAGE = "--datasource=postgresql://me@db.example/shop", "--models_dir=s3://bucket/models"


@pytest.mark.parametrize(
    ("arguments", "runtime", "said"),
    [
        ([SHOP, STORAGE], Runtime.KUBERNETES, "a cluster is configured (context farm)"),
        ([SHOP, "--models_dir=/m", "--volume=claim_name=c,mount_path=/m"], Runtime.KUBERNETES, "--volume is given"),
        ([SHOP], Runtime.LOCAL, "--models_dir is missing"),
        ([SHOP, "--models_dir=/m"], Runtime.LOCAL, "on no volume that outlives them, though a cluster is configured"),
        (["--datasource=sqlite:///staff.db"], Runtime.LOCAL, "a file of this machine"),
        (["--datasource=mysql://me@localhost/shop"], Runtime.LOCAL, "localhost is this machine here"),
        ([SHOP, "--num_workers=2", "--job_dir=d"], Runtime.LOCAL, "--job_dir is given"),
    ],
)
def test_the_runtime_follows_from_the_cluster_and_the_database_and_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    runtime: Runtime,
    said: str,
) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    _, session, _ = command.prepare(["SHOW MODELS", *arguments], {})
    assert session.flags.runtime is runtime
    assert isinstance(session.models, ClusterModels) == (runtime is Runtime.KUBERNETES)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: --runtime={runtime}, since ")
    assert said in line


def test_a_flag_of_kubernetes_with_a_database_of_this_machine_is_refused() -> None:
    with pytest.raises(FlagError, match="a file of this machine"):
        command.prepare(["SHOW MODELS", "--datasource=sqlite:///staff.db", "--image_name=i"], {})


def test_models_of_this_machine_are_in_no_storage() -> None:
    with pytest.raises(FlagError, match="only pods write models"):
        command.prepare(["SHOW MODELS", "--datasource=sqlite:///staff.db", STORAGE, "--runtime=local"], {})


def test_the_runtime_may_be_a_variable_and_a_flag_comes_first() -> None:
    variable = {"ELASTICDL_RUNTIME": "kubernetes"}
    with pytest.raises(FlagError, match="a file of this machine"):
        command.run([STATEMENT, "--datasource=sqlite:///staff.db"], variable)
    assert JobFlags((), variable).runtime is Runtime.KUBERNETES
    assert JobFlags(("--runtime=local",), variable).runtime is Runtime.LOCAL
    assert JobFlags((), {}).runtime is Runtime.LOCAL


def test_a_password_reaches_pods_by_the_secret_alone(server: str) -> None:
    url = server.replace("reader@", "reader:swordfish%2C%20%3D17%3B@")
    given = {"job_name": "j", "image_name": "i", "envs": "MODE=a,b", "volume": "claim_name=c,mount_path=/models"}
    common = {"model_def": "a.b", "training_data": "/models/rows", "output": "/models/m", **given}
    flags = {**common, **KubernetesRuntime(partial(Database, url)).flags(given)}
    assert "swordfish" not in command_of(JobType.TRAIN, flags)
    spec = JobSpec.from_flags(JobType.TRAIN, flags)
    assert spec.envs_dict() == {"MODE": "a,b", "PGPASSWORD": PASSWORD}
    assert PASSWORD not in repr(spec.public())
    manifests = job_manifests(spec, "token", {})
    holding = [one["kind"] for one in manifests if PASSWORD in json.dumps(one) or _encoded() in json.dumps(one)]
    assert holding == ["Secret"]
    pod = next(one for one in manifests if one["kind"] == "Pod")
    (variable,) = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == "PGPASSWORD"]
    reference = {"name": names.token_object("j"), "key": names.env_key("PGPASSWORD")}
    assert variable == {"name": "PGPASSWORD", "valueFrom": {"secretKeyRef": reference}}
    assert PASSWORD not in json.dumps(public_manifests(spec))
    assert "swordfish" not in repr(Database(url).pod_access())
    assert "swordfish" not in StagedRows(Database(url)).source("train")


def test_a_password_of_a_file_of_options_goes_to_pods_and_the_file_does_not(
    mariadb_server: str, tmp_path: Path
) -> None:
    mariadb.execute(
        mariadb_server, f"CREATE OR REPLACE USER reader IDENTIFIED BY '{PASSWORD}'", "GRANT ALL ON *.* TO reader"
    )
    (tmp_path / "my.cnf").write_text(f'[client]\nuser = reader\npassword = "{PASSWORD}"\n')
    url = mariadb_server.replace("root@", "").replace("?", f"?read_default_file={tmp_path}/my.cnf&")
    access = Database(url).pod_access()
    assert (access.variable, access.password) == ("MYSQL_PWD", PASSWORD)
    assert unquote(access.url) == mariadb_server.replace("root@", "reader@")


def _encoded() -> str:
    return base64.b64encode(PASSWORD.encode()).decode()


@pytest.mark.parametrize("password", ["a$(MODE)b", "a,MODE=b"])
def test_a_password_that_would_not_arrive_as_it_is_is_refused(server: str, password: str) -> None:
    """Kubernetes replaces $(NAME), and only in what stands in the pod itself, where it would be seen."""
    quoted = password.replace("$", "%24").replace("(", "%28").replace(")", "%29").replace(",", "%2C")
    cluster = KubernetesRuntime(partial(Database, server.replace("reader@", f"reader:{quoted.replace('=', '%3D')}@")))
    with pytest.raises(FlagError, match="cannot be passed to pods") as caught:
        cluster.flags({})
    assert password not in str(caught.value)
    with pytest.raises(FlagError, match="--envs names PGPASSWORD"):
        cluster.flags({"envs": "PGPASSWORD=x"})


@pytest.fixture(params=["server", "mariadb_server"], ids=["postgresql", "mariadb"])
def source(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def rows_of(database: Database) -> StagedRows:
    """Some rows of forms that a model has, written as a statement writes them."""
    fields = [Field("age", "age", "number"), Field("town", "town", "text"), Field("elasticdl_label", "pay", "class")]
    rows = [
        (i / 4 if i % 3 else None, f'"it\'s", {i}\n' if i % 2 else None, "low" if i % 5 else "high") for i in range(9)
    ]
    store = StagedRows(database)
    assert store.write("train", [rows[:4], rows[4:]], ["age", "town", "pay"], fields, ["high", "low"]) == 9
    return store


def test_workers_read_the_rows_of_a_statement_by_their_numbers(source: str) -> None:
    """As the job reads them: from the URL of the store, here on the server's socket."""
    database = Database(source)
    store = rows_of(database)
    reader = create_reader(store.source("train"), columns=["age", "town"], label_column="elasticdl_label")
    (shard,) = reader.shards()
    assert (shard.start, shard.end) == (0, 9)
    types = {"age": "float64", "town": "string", "elasticdl_label": "int64"}
    assert dict(reader.metadata().column_dtypes) == types
    records = reader.read(Shard(shard.name, 0, 9))
    assert [f'"it\'s", {i}'.encode() in record for i, record in enumerate(records)] == [bool(i % 2) for i in range(9)]
    store.close()
    assert not database.has_table([store.source("train").partition("table=")[2].partition("&")[0]])


def test_rows_that_cannot_be_written_leave_no_table(source: str) -> None:
    database = Database(source)
    with (
        pytest.raises(Exception, match="takes numbers"),
        KubernetesRuntime(lambda: database).rows(database, Path()) as store,
    ):
        store.write("rows", [[(1,), ("many",)]], ["age"], [Field("age", "age", "number")])
    assert not [name for name in database.known_names() if name.startswith("elasticdl")]


def test_rows_that_the_database_refuses_leave_no_table(server: str) -> None:
    database = Database(server)
    parts = [[("a",)] * 50_000, [("b\0",)] * 50_000, [("c",)] * 50_000]  # each is written while the next one is read
    with pytest.raises(DataError, match="invalid byte sequence"):
        StagedRows(database).write("rows", parts, ["town"], [Field("town", "town", "text")])
    assert not database.known_names()


def test_predictions_come_back_from_the_table_of_the_job(source: str) -> None:
    import numpy as np

    store = StagedRows(Database(source))
    table = OutputTable(str(store.output_flags()["prediction_outputs"]), ROW)
    table.replace({ROW: np.arange(1, 4), "prediction": np.arange(33.0).reshape(3, 11)})
    ((numbers, outputs),) = store.outputs()
    assert [*numbers] == [1, 2, 3]
    assert outputs == [[float(11 * row + k) for k in range(11)] for row in range(3)]
    store.remove()


def test_a_program_reads_its_rows_from_a_table_and_leaves_its_result_in_one(source: str) -> None:
    store = rows_of(Database(source))
    rows = importance.read(store.source("train"))
    assert list(rows) == ["age", "town", "elasticdl_label"]
    assert [None if age != age else age for age in rows["age"]] == [i / 4 if i % 3 else None for i in range(9)]
    assert [*rows["town"]] == [f'"it\'s", {i}' if i % 2 else "" for i in range(9)]
    assert [*rows["elasticdl_label"]] == [1 if i % 5 else 0 for i in range(9)]
    columns = [Importance("town", 0.25, 0.5), Importance("age", -0.125, 0.0)]
    importance.write(store.result(), Importance("cross-entropy", 0.75, 0.0), columns)
    assert store.results() == [("cross-entropy", 0.75, 0.0), ("town", 0.25, 0.5), ("age", -0.125, 0.0)]
    store.close()


def test_a_model_is_explained_where_a_program_of_pods_can_load_it(server: str, tmp_path: Path) -> None:
    flags = JobFlags(("--image_name=i", "--volume=claim_name=c,mount_path=/other"), {})
    runtime = KubernetesRuntime(partial(Database, server))
    model = StoredModel("m", 1, tmp_path, {}, place=PodPlace("/models/m/1", is_trained=True))
    with pytest.raises(FlagError, match="on no volume"):
        runtime.program(model, ["-m", "elasticdl.tabular.importance"], flags, tmp_path / "s")
    for place in ("/other/m/1", "s3://bucket/m/1"):
        model = StoredModel("m", 1, tmp_path, {"label": "pay"}, place=PodPlace(place, is_trained=True))
        command = runtime.program(model, ["-m", "elasticdl.tabular.importance"], flags, tmp_path / "s").command
        assert f"--export={place}/export --description=/model_zoo/model.json" in command


def test_a_job_that_the_cluster_does_not_take_costs_no_row(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement is checked against the cluster first; here there is none."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with psycopg.connect(server) as connection:
        connection.execute(
            "CREATE TABLE staff AS SELECT i AS id, i % 7 AS age, i % 2 AS pay FROM generate_series(1, 90) i"
        )
    flags = JobFlags(("--image_name=i", "--volume=claim_name=c,mount_path=/models"), {})
    database = Database(server)
    table = ModelsTable(lambda: database, "models")
    models, runtime = ClusterModels("/models", table, lambda: database), KubernetesRuntime(lambda: database)
    session = Session(lambda: database, models, flags, is_dry_run=False, is_overwriting=False, runtime=runtime)
    with pytest.raises(ClusterError):
        command.execute(session, "postgres", STATEMENT)
    assert set(database.known_names()) == {"staff", "id", "age", "pay"}


def models_of(path: Path, jobs: dict[str, JobInfo]) -> tuple[ClusterModels, Database]:
    sqlite3.connect(path / "d.db").close()
    (path / "d.db").touch()
    database = Database(f"sqlite:///{path}/d.db")
    table = ModelsTable(lambda: database, "models")
    return ClusterModels("/models", table, lambda: database, lambda found: jobs.get(found.get("job", ""))), database


def test_a_model_whose_client_has_gone_is_trained_when_its_job_has_succeeded(tmp_path: Path) -> None:
    jobs: dict[str, JobInfo] = {}
    models, database = models_of(tmp_path, jobs)
    model = models.add("m", {"rows": 9})
    with database.transaction() as writer:
        writer.create(["elasticdl_train_1"], {"a": "BIGINT"})
    model.found.update({"job": "sql-train-m-1", TABLES: ["elasticdl_train_1"]})
    models.update(model)
    jobs["sql-train-m-1"] = JobInfo("sql-train-m-1", Runtime.KUBERNETES, Phase.RUNNING, JobStatus("sql-train-m-1"))
    with pytest.raises(StatementError, match="is not trained"):
        models.find(NAME)
    status = JobStatus("sql-train-m-1", epoch=2, records={"committed": 18, "lost": 0}, metrics={"auc": 0.5})
    jobs["sql-train-m-1"] = JobInfo("sql-train-m-1", Runtime.KUBERNETES, Phase.SUCCEEDED, status)
    found = models.find(NAME)
    assert found.exported == "/models/m/1/export"
    assert found.found["ledger"] == {"epochs": 2, "committed": 18, "lost": 0}
    assert not database.has_table(["elasticdl_train_1"])
    assert models.next("m").version == 2


def test_a_model_of_pods_is_no_model_of_this_machine_and_the_other_way_round(tmp_path: Path) -> None:
    models, database = models_of(tmp_path, {})
    models.record(models.add("m", {"rows": 9}))
    here = ModelRegistry(tmp_path / "here", ModelsTable(lambda: database, "models"))
    with pytest.raises(StatementError, match="kubernetes:/models/m/1/export"):
        here.find(NAME)
    local = here.add("n", {"rows": 9})
    local.export.mkdir()
    here.record(local)
    with pytest.raises(StatementError, match="is on another machine"):
        models.find(ModelName("n", 0, NAME.place))


def test_dropping_a_model_removes_the_rows_of_its_training(tmp_path: Path) -> None:
    models, database = models_of(tmp_path, {})
    model = models.add("m", {})
    store = StagedRows(database)
    store.write("train", [[(1,)]], ["age"], [Field("age", "age", "number")])
    store.keep(model)
    models.update(model)
    store.close()
    (table,) = model.found[TABLES]
    assert database.has_table([table])
    assert [one.title for one in models.drop(NAME)] == ["m@1"]
    assert not database.has_table([table])


def test_jobs_load_a_model_from_the_storage_that_pods_have_written_it_to(server: str) -> None:
    with psycopg.connect(server) as connection:
        connection.execute("CREATE TABLE staff AS SELECT i AS age, 'a' || i % 2 AS pay FROM generate_series(1, 9) i")
    database = Database(server)
    models = ClusterModels("s3://bucket/models", ModelsTable(lambda: database, "models"), lambda: database)
    inputs = [{"name": "age", "column": "age", "form": "number"}]
    about = {"estimator": "DNNClassifier", "task": "binary", "label": "pay", "classes": ["a0", "a1"], "inputs": inputs}
    models.record(models.add("m", about))
    flags, said = JobFlags(("--image_name=i",), {}, Runtime.KUBERNETES), list[str]()
    runtime = KubernetesRuntime(lambda: database)
    session = Session(lambda: database, models, flags, True, False, said.append, runtime)
    statements = "SELECT * FROM staff TO EVALUATE auc USING m; SELECT * FROM staff TO PREDICT guess.pay_guessed USING m"
    command.execute(session, "postgres", statements)
    for line, job_type in zip(said, (JobType.EVALUATE, JobType.PREDICT), strict=True):
        _, name, *given = shlex.split(line)
        spec = JobSpec.from_flags(job_type, dict(flag[2:].split("=", 1) for flag in given))
        assert (name, spec.checkpoint_dir_for_init) == (job_type, "s3://bucket/models/m/1/export")


def test_dropping_a_model_of_a_volume_says_the_job_that_deletes_its_files(tmp_path: Path) -> None:
    models, database = models_of(tmp_path, {})
    models.record(models.add("m", {}))
    flags = JobFlags(("--image_name=i", "--volume=claim_name=c,mount_path=/models"), {}, Runtime.KUBERNETES)
    said: list[str] = []
    command.execute(Session(lambda: database, models, flags, False, False, said.append), "sqlite", "DROP MODEL m")
    assert said[:1] == ["Removed m: 1 version."]
    assert "/models/m/1" in said[1]
    program, job_type, *given = shlex.split(said[2])
    spec = JobSpec.from_flags(JobType(job_type), dict(flag[2:].split("=", 1) for flag in given))
    assert (program, spec.runtime, spec.job_command) == ("elasticdl", Runtime.KUBERNETES, "rm -rf /models/m/1")
    assert (spec.volume, spec.num_workers) == ("claim_name=c,mount_path=/models", 1)


def test_rows_are_copied_into_postgresql_as_they_are(server: str) -> None:
    database = Database(server)
    store = rows_of(database)
    with psycopg.connect(server) as connection:
        name = store.source("train").partition("table=")[2].partition("&")[0]
        selected = f"SELECT * FROM {name} ORDER BY {ROW}"
        found: list[tuple[Any, ...]] = connection.execute(selected).fetchall()  # type: ignore[call-overload]
    assert [row[1] for row in found] == [f'"it\'s", {i}' if i % 2 else "" for i in range(9)]
    assert [row[2] for row in found] == [1 if i % 5 else 0 for i in range(9)]
    assert [row[3] for row in found] == [*range(1, 10)]
    text = f"SELECT age FROM {name} WHERE age > 0 AND age < 9"
    with database.snapshot() as reader:
        assert len(reader.all(Query(text, Place(text, 0, len(text))))) == 6
    store.close()
