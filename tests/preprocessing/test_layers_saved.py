"""Models with all layers, saved and loaded in a new process: as a SavedModel by TensorFlow alone, and as `.keras`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.frameworks.keras.input.declared_inputs import ModelInputs
from elasticdl.frameworks.keras.saving.export import export_model
from tests.lean_import import LEAN_IMPORT
from tests.preprocessing.models import examples, model_of
from tests.preprocessing.oracle import KINDS

_LOAD = """
import sys
from pathlib import Path
sys.modules["elasticdl"] = None
import numpy as np
import tensorflow as tf
root = Path(sys.argv[1])

def given(kind):
    dense = {name: np.load(root / f"{kind}.npz")[name] for name in ("numbers", "words")}
    features = {name: tf.constant(value) for name, value in dense.items()}
    if kind == "dense":
        return features
    lengths = {name: np.load(root / f"{kind}.npz")[f"{name}_lengths"] for name in dense}
    ragged = {name: tf.RaggedTensor.from_row_lengths(features[name], lengths[name]) for name in dense}
    if kind == "ragged":
        return ragged
    return {name: tf.SparseTensor(np.load(root / f"{kind}.npz")[f"{name}_indices"], features[name],
                                  np.load(root / f"{kind}.npz")[f"{name}_shape"]) for name in dense}

kind = sys.argv[2]
loaded = tf.saved_model.load(str(root / kind))
np.savez(root / "served.npz", loaded(given(kind)).numpy())
assert "elasticdl_preprocessing" not in sys.modules
import keras
import elasticdl_preprocessing
np.savez(root / "keras.npz", keras.saving.load_model(root / f"{kind}.keras")(given(kind)).numpy())
"""


def _write_inputs(path: Path, features: dict[str, Any]) -> None:
    arrays = {}
    for name, tensor in features.items():
        values = tensor
        if isinstance(tensor, tf.RaggedTensor):
            values = tensor.flat_values
            arrays[f"{name}_lengths"] = tensor.row_lengths().numpy()
        elif isinstance(tensor, tf.SparseTensor):
            values = tensor.values
            arrays[f"{name}_indices"], arrays[f"{name}_shape"] = tensor.indices.numpy(), tensor.dense_shape.numpy()
            ragged = tf.RaggedTensor.from_value_rowids(tensor.values, tensor.indices[:, 0], tensor.dense_shape[0])
            arrays[f"{name}_lengths"] = ragged.row_lengths().numpy()
        array = values.numpy()
        arrays[name] = array.astype("S") if array.dtype == object else array
    np.savez(path, **arrays)


def _spec(tensor: Any) -> Any:
    if isinstance(tensor, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], tensor.dtype)
    if isinstance(tensor, tf.SparseTensor):
        return tf.SparseTensorSpec([None, tensor.shape[1]], tensor.dtype)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "sparse" else pytest.mark.full) for kind in KINDS]
)
def test_a_saved_model_gives_the_same_in_a_new_process(kind: str, tmp_path: Path) -> None:
    model, features = model_of(kind), examples(kind)
    expected = model(features).numpy()
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 6
    export_model(
        str(tmp_path / kind), model, ModelInputs.of("", model), None, [], tf.nest.map_structure(_spec, features), False
    )
    model.save(tmp_path / f"{kind}.keras")
    _write_inputs(tmp_path / f"{kind}.npz", features)
    script = tmp_path / "load.py"
    script.write_text(LEAN_IMPORT + _LOAD)
    subprocess.run([sys.executable, str(script), str(tmp_path), kind], check=True, timeout=250)
    for way in ("served", "keras"):
        with np.load(tmp_path / f"{way}.npz") as found:
            np.testing.assert_allclose(found["arr_0"], expected, rtol=1e-6, err_msg=way)
