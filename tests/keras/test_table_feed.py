"""The default feed of Keras: a module without a `feed` trains on tables and folders of images."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elasticdl.data.factory import create_reader
from elasticdl.data.table_encoder import Numbers, TableColumn, Texts, encode_table
from elasticdl.frameworks.framework import Batch, FeedError, Mode, TaskRecords
from elasticdl.frameworks.keras import KerasFramework, KerasSettings
from elasticdl.model_def import load
from elasticdl.protocol import Shard
from elasticdl_client.errors import ModelDefinitionError

MODULE = """
import keras

def custom_model():
    n, f = keras.Input((1,), name="n", dtype="int64"), keras.Input((2,), name="f")
    sum = keras.layers.Concatenate()([keras.ops.cast(n, "float32"), f])
    return keras.Model({"n": n, "f": f}, keras.layers.Dense(1)(sum))

def list_model():
    ids = keras.Input((None,), name="ids", dtype="int64")
    vectors = keras.layers.Embedding(20, 4)(ids)
    return keras.Model({"ids": ids}, keras.layers.Dense(1)(keras.ops.sum(vectors, axis=1)))

def image_model():
    return keras.Sequential([keras.Input((4, 6, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])

class Anything(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, features):
        return self.dense(keras.ops.zeros((8, 1)))

def loss(labels, predictions):
    return keras.ops.mean(keras.ops.square(keras.ops.cast(labels, "float32") - predictions[:, 0]))

def optimizer():
    return keras.optimizers.SGD(0.01)
"""


@pytest.fixture
def framework(tmp_path: Path) -> Callable[..., KerasFramework]:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "tabular.py").write_text(MODULE)

    def make(metadata: Any, symbol: str = "custom_model") -> KerasFramework:
        definition = load(str(tmp_path / "zoo"), f"tabular.{symbol}", required=())
        return KerasFramework(
            definition, 8, 3, metadata, on_parameter_server=False, settings=KerasSettings(jit_compile=False)
        )

    return make


def batches(framework: KerasFramework, mode: Mode, records: list[bytes]) -> list[Batch]:
    return [batch for batch in framework.batches(mode, iter([TaskRecords(1, 0, records)])) if not batch.end]


def elements(found: list[Batch]) -> list[Any]:
    return [batch.data.element for batch in found]


def parquet(directory: Path, count: int = 20) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"n": i, "f": [i / 2, -1.0], "t": f"text {i}", "y": float(3 * i)} for i in range(count)]
    fixed = pa.list_(pa.float32(), 2)
    schema = pa.schema([("n", pa.int32()), ("f", fixed), ("t", pa.string()), ("y", pa.float64())])
    pq.write_table(pa.Table.from_pylist(rows, schema), directory / "rows.parquet", row_group_size=7)
    return str(directory / "rows.parquet")


def test_columns_of_parquet_become_features_by_name_and_the_label(
    tmp_path: Path, framework: Callable[..., KerasFramework]
) -> None:
    reader = create_reader(parquet(tmp_path), columns=["n", "f"], label_column="y")
    made = framework(reader.metadata())
    records = list(reader.read(reader.shards()[0]))
    found = elements(batches(made, Mode.TRAINING, records))
    assert sorted(found[0][0]) == ["f", "n"]
    assert np.concatenate([features["n"] for features, _ in found]).tolist() == list(range(20))
    assert np.concatenate([features["f"] for features, _ in found])[3].tolist() == [1.5, -1.0]
    assert np.concatenate([labels for _, labels in found]).tolist() == [3.0 * i for i in range(20)]


def test_a_model_trains_on_a_table_and_predicts_without_the_label(
    tmp_path: Path, framework: Callable[..., KerasFramework]
) -> None:
    reader = create_reader(parquet(tmp_path), columns=["n", "f"], label_column="y")
    made = framework(reader.metadata())
    records = list(reader.read(reader.shards()[0]))
    first, second, _ = batches(made, Mode.TRAINING, records)
    losses = [made.train(first, seed) for seed in range(4)]
    assert losses[-1] < losses[0]
    assert made.train(second, 9) > 0
    (features, *_) = elements(batches(made, Mode.PREDICTION, records))
    assert sorted(features) == ["f", "n"]


def test_lists_of_any_length_are_filled_up_to_the_longest_of_the_task(
    tmp_path: Path, framework: Callable[..., KerasFramework]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = [[], [1, 2, 3], [4], *([i % 19 + 1] for i in range(15)), [5, 6], [7] * 9]
    columns = {"ids": ids, "x": [[i / 2] * (i % 3) for i in range(20)], "t": [["a"] * (i % 2) for i in range(20)]}
    pq.write_table(pa.table(columns | {"y": list(range(20))}), tmp_path / "lists.parquet")
    reader = create_reader(str(tmp_path / "lists.parquet"), label_column="y")
    records = list(reader.read(reader.shards()[0]))
    found = elements(batches(framework(reader.metadata(), "Anything"), Mode.TRAINING, records))
    assert [features["ids"].shape.as_list() for features, _ in found] == [[8, 9], [8, 9], [4, 9]]
    assert [features["x"].shape.as_list() for features, _ in found] == [[8, 2], [8, 2], [4, 2]]
    joined = {name: np.concatenate([features[name] for features, _ in found]).tolist() for name in columns}
    assert joined["ids"] == [row + [0] * (9 - len(row)) for row in ids]
    assert joined["x"] == [row + [0.0] * (2 - len(row)) for row in columns["x"]]
    assert joined["t"] == [[b"a"] if i % 2 else [b""] for i in range(20)]
    assert np.concatenate([labels for _, labels in found]).tolist() == list(range(20))

    reader = create_reader(str(tmp_path / "lists.parquet"), columns=["ids"], label_column="y")
    made = framework(reader.metadata(), "list_model")
    first, *_ = batches(made, Mode.TRAINING, list(reader.read(reader.shards()[0])))
    losses = [made.train(first, seed) for seed in range(4)]
    assert losses[-1] < losses[0]


def test_rows_of_csv_are_typed_and_quotes_respected(tmp_path: Path, framework: Callable[..., KerasFramework]) -> None:
    lines = ["n,t,f,y", *(f'{i},"a, ""{i}""",{i / 2 if i % 3 else ""},{i % 2}' for i in range(12))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    reader = create_reader(str(tmp_path / "rows.csv"), label_column="y")
    assert dict(reader.metadata().column_dtypes) == {"n": "int64", "t": "string", "f": "float64", "y": "int64"}
    records = list(reader.read(reader.shards()[0]))
    features, labels = elements(batches(framework(reader.metadata(), "Anything"), Mode.EVALUATION, records))[0]
    assert features["t"].numpy().tolist()[1] == b'a, "1"'
    assert np.isnan(features["f"].numpy()).tolist() == [i % 3 == 0 for i in range(8)]
    assert labels.numpy().tolist() == [i % 2 for i in range(8)]


def test_a_missing_whole_number_is_a_bad_record(framework: Callable[..., KerasFramework]) -> None:
    from elasticdl.data.reader import Metadata

    columns: dict[str, TableColumn] = {
        "n": Numbers(np.arange(4), np.array([False, False, True, False])),
        "t": Texts([b"x"] * 4),
        "y": Numbers(np.arange(4)),
    }
    metadata = Metadata(("n", "t", "y"), (("n", "int64"), ("t", "string"), ("y", "int64")), label_column="y")
    made = framework(metadata, "Anything")
    records = encode_table(columns, 4)
    assert len(batches(made, Mode.TRAINING, records[:2])) == 1
    with pytest.raises(FeedError, match="n"):
        batches(made, Mode.TRAINING, records)


def test_images_are_resized_and_labelled_by_their_directory(
    tmp_path: Path, framework: Callable[..., KerasFramework]
) -> None:
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (9 + i, 7), (100 * number, 10, 20)).save(tmp_path / "images" / name / f"{i}.png")
    reader = create_reader(str(tmp_path / "images"), {"image_size": [4, 6]})
    records = list(reader.read(reader.shards()[0]))
    found = elements(batches(framework(reader.metadata(), "image_model"), Mode.TRAINING, records))
    assert [image.shape.as_list()[1:] for image, _ in found] == [[4, 6, 3]] * 2
    for images, labels in found:
        assert images.numpy()[:, 0, 0].tolist() == [[100.0 * label, 10.0, 20.0] for label in labels.numpy()]


def test_what_is_no_image_is_a_bad_record(tmp_path: Path, framework: Callable[..., KerasFramework]) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    data = io.BytesIO()
    Image.new("RGB", (4, 6)).save(data, "PNG")
    (tmp_path / "images" / "cat" / "good.png").write_bytes(data.getvalue())
    (tmp_path / "images" / "cat" / "bad.png").write_bytes(b"no image at all")
    reader = create_reader(str(tmp_path / "images"), {"image_size": [4, 6]})
    records = list(reader.read(Shard(str(tmp_path / "images"), 0, 2)))
    with pytest.raises(FeedError, match="mage"):
        batches(framework(reader.metadata(), "image_model"), Mode.TRAINING, records)


def test_a_module_without_a_feed_is_refused_where_no_label_is_named(
    tmp_path: Path, framework: Callable[..., KerasFramework]
) -> None:
    made = framework(create_reader(parquet(tmp_path)).metadata())
    with pytest.raises(ModelDefinitionError, match="label_column names no column"):
        made.batches(Mode.TRAINING, iter([]))
