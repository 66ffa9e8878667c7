"""Models of `elasticdl sql` whose files are in storage: explained there, and deleted with `DROP MODEL`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticdl.storage.paths import RemotePath
from elasticdl.tabular import importance
from elasticdl_client.sql import command
from elasticdl_client.sql.cluster import ClusterModels
from elasticdl_client.sql.database import Database
from elasticdl_client.sql.jobs import JobFlags
from elasticdl_client.sql.models_table import ModelsTable
from elasticdl_client.sql.runtime import Session
from tests.storage.faulty_proxy import FaultyProxy


def test_a_model_is_explained_where_storage_has_it(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    class Model(tf.Module):
        @tf.function(
            input_signature=[{name: tf.TensorSpec([None, 1], tf.float32, name=name) for name in ("age", "noise")}]
        )
        def serve(self, features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return {"prediction": features["age"]}

    model, url = Model(), f"s3://bucket/{tmp_path.name}/m/1/export"
    tf.saved_model.save(model, str(tmp_path / "export"), {"serving_default": model.serve})
    for path in (tmp_path / "export").rglob("*"):
        if path.is_file():
            RemotePath(url).storage.publish(f"{url}/{path.relative_to(tmp_path / 'export')}", path)
    ages = np.arange(100) % 7 * 1.0
    columns = {"age": ages, "noise": np.arange(100.0), "elasticdl_label": ages}
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "rows" / "part-00000.parquet")
    inputs = [{"name": name, "column": name} for name in ("age", "noise")]
    about = {"inputs": inputs, "task": "regression", "deviation": 2.0, "estimator": "DNNRegressor", "num_classes": 0}
    (tmp_path / "model.json").write_text(json.dumps(about))
    flags = {
        "export": url, "description": tmp_path / "model.json", "rows": tmp_path / "rows",
        "label_column": "elasticdl_label", "repeats": 2, "seed": 0, "output": tmp_path / "result.json",
    }  # fmt: skip
    monkeypatch.setattr("sys.argv", ["importance", *(f"--{name}={value}" for name, value in flags.items())])
    importance.main()
    loss, age, noise = json.loads((tmp_path / "result.json").read_text())
    assert (loss["importance"], noise["importance"]) == (0, 0)
    assert age["importance"] > 0.5


def test_dropping_a_version_deletes_its_files_and_no_others(proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "d.db").touch()
    database = Database(f"sqlite:///{tmp_path}/d.db")
    table, place = ModelsTable(lambda: database, "models"), f"s3://bucket/{tmp_path.name}"
    models = ClusterModels(place, table, lambda: database, lambda found: None)
    said: list[str] = []
    session = Session(lambda: database, models, JobFlags((), {}), False, False, said.append)
    for _ in range(3):
        models.record(models.add("m", {}))
    for version in (1, 2):  # the third is not trained
        for name in ("saved_model.pb", "variables/variables.index"):
            RemotePath(place).storage.publish(f"{place}/m/{version}/export/{name}", b"x")
    command.execute(session, "sqlite", "DROP MODEL m@1; DROP MODEL m@3")
    assert RemotePath(f"{place}/m/1").files() == []
    assert len(RemotePath(f"{place}/m/2").files()) == 2
    assert said == ["Removed m@1.", "Removed m@3."]
    assert [one.title for one in models.all()] == ["m@2"]


def test_files_of_storage_that_this_machine_cannot_delete_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.db").touch()
    database = Database(f"sqlite:///{tmp_path}/d.db")
    models = ClusterModels("gs://bucket/models", ModelsTable(lambda: database, "models"), lambda: database)
    said: list[str] = []
    session = Session(lambda: database, models, JobFlags((), {}), False, False, said.append)
    models.record(models.add("m", {}))
    command.execute(session, "sqlite", "DROP MODEL m")
    assert said[0] == "Removed m: 1 version."
    assert said[1].startswith("The files of m@1 stay in gs://bucket/models/m/1: gs:// needs the package gcsfs")
    assert not list(models.all())
