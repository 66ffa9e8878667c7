"""The export process: its files load in plain Keras and TensorFlow; the memory it takes; how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticdl.frameworks.framework import Floats, Ids, Parameters, TableRows
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.export.exporter import export_elsewhere, needed_bytes
from elasticdl.worker.tasks import HeldLease, LeaseLost
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from tests.lean_import import LEAN_IMPORT

ZOO = str(Path(__file__).parent / "zoo")
FEATURES = np.array([[0, 1, 2, 3, 4, 5], [7, 7, 7, 99, 0, 98]])
_LOAD = """
import json, sys
sys.modules["elasticdl"] = None
import numpy as np
import tensorflow as tf
import keras
features = np.array(json.loads(sys.argv[1]))
for path in sys.argv[2:]:
    served = tf.saved_model.load(path)(tf.constant(features)).numpy()
    found = {"served": served.tolist()}
    try:
        found["keras"] = keras.saving.load_model(path + "/model.keras")(features).numpy().tolist()
    except ValueError as error:
        found["keras"] = str(error)
    print("found", json.dumps(found))
"""


def order(directory: Path, symbol: str, num_ids: int, dim: int, model_file: bool = True) -> dict[str, object]:
    data = directory / "data.txt"
    data.write_text("0 1 2 3 4 5\n")
    spec = JobSpec(
        job_name="exported",
        model_zoo=ZOO,
        model_def=f"exported.{symbol}",
        model_params=f"num_ids={num_ids};dim={dim}",
        training_data=str(data),
        embedding_threshold="0",
    )
    return {"job_spec": spec.to_json(), "path": str(directory / "model"), "model_file": model_file}


def parameters(dim: int) -> Parameters:
    kernel = np.random.default_rng(1).standard_normal(6 * dim + 1).astype(np.float32)
    return Parameters(kernel, np.zeros(0, np.float32))


def row_values(ids: Ids, dim: int) -> Floats:
    """Made chunk by chunk, as rows come from parameter servers."""
    values = np.outer(ids % 1009 + 1, np.arange(1, dim + 1)).astype(np.float32)
    return values / np.float32(1009 * dim)


def table(num_ids: int, dim: int, chunk: int) -> TableRows:
    def chunks() -> Iterator[tuple[Ids, Floats]]:
        for start in range(0, num_ids, chunk):
            ids = np.arange(start, min(num_ids, start + chunk))
            yield ids, row_values(ids, dim)

    return TableRows("table", dim, num_ids, chunks())


def expected(dim: int) -> Any:
    rows = row_values(FEATURES.ravel(), dim).reshape(len(FEATURES), -1)
    weights = parameters(dim).trainable
    return rows @ weights[:-1] + weights[-1]


def load_plainly(*paths: Path) -> list[dict[str, Any]]:
    """Return the content of each model as one process of TensorFlow alone, an import of seconds, reads it."""
    command = [sys.executable, "-c", LEAN_IMPORT + _LOAD, json.dumps(FEATURES.tolist()), *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200, cwd=paths[0].parent)
    return [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found ")]


def held() -> HeldLease:
    return HeldLease(pb.Lease(id=1, type=pb.TRAIN_END))


def test_models_are_sent_chunk_by_chunk_and_load_without_elasticdl(tmp_path: Path) -> None:
    for symbol in ("keras_own", "ours"):
        (tmp_path / symbol).mkdir()
        export_elsewhere(order(tmp_path / symbol, symbol, 100, 5), parameters(5), [table(100, 5, 7)], held())
    own, ours = load_plainly(tmp_path / "keras_own" / "model", tmp_path / "ours" / "model")
    for found in (own, ours):
        np.testing.assert_allclose(found["served"], expected(5), rtol=1e-5)
    np.testing.assert_allclose(own["keras"], expected(5), rtol=1e-5)
    assert not (tmp_path / "ours" / "model" / "model.keras").exists()


def test_the_users_error_comes_back_with_its_traceback_from_a_process_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ModelDefinitionError, match="the model cannot be made again on the GPU -1") as caught:
        export_elsewhere(order(tmp_path, "broken", 100, 5), parameters(5), [table(100, 5, 7)], held())
    assert "ZeroDivisionError" in str(caught.value) + caught.value.details


def test_a_lost_lease_ends_the_process(tmp_path: Path) -> None:
    def lost() -> Iterator[tuple[Ids, Floats]]:
        raise LeaseLost
        yield

    with pytest.raises(LeaseLost):
        export_elsewhere(order(tmp_path, "ours", 100, 5), parameters(5), [TableRows("table", 5, 100, lost())], held())
    assert not (tmp_path / "model").exists()


@pytest.mark.full
@pytest.mark.parametrize(("symbol", "model_file"), [("ours", False), ("keras_own", True)])
def test_a_large_export_takes_no_more_memory_than_was_reckoned_with(
    tmp_path: Path, symbol: str, model_file: bool
) -> None:
    num_ids, dim = 4_000_000, 16
    size = 4 * num_ids * dim
    memory = export_elsewhere(
        order(tmp_path, symbol, num_ids, dim, model_file), parameters(dim), [table(num_ids, dim, 262_144)], held()
    )
    assert memory["peak_bytes"] <= needed_bytes(size)[int(model_file)]
    assert memory["peak_bytes"] - memory["started_bytes"] <= (4.5 if model_file else 2.5) * size
    (found,) = load_plainly(tmp_path / "model")
    np.testing.assert_allclose(found["served"], expected(dim), rtol=1e-5)
    if model_file:
        np.testing.assert_allclose(found["keras"], expected(dim), rtol=1e-5)
