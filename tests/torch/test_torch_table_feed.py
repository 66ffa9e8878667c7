"""The default feed of PyTorch: a module without a `feed` trains on tables and folders of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from elasticdl.data.factory import create_reader
from elasticdl.frameworks.framework import Batch, FeedError, Mode, TaskRecords
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(3, 1)

    def forward(self, features):
        return self.dense(torch.cat([features["n"][:, None].float(), features["f"]], dim=1))

def custom_model():
    return Model()

def loss(labels, predictions):
    return torch.mean((labels.float() - predictions[:, 0]) ** 2)

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.001)
"""


@pytest.fixture
def framework(tmp_path: Path) -> Callable[..., TorchFramework]:
    (tmp_path / "zoo").mkdir()

    def make(metadata: Any, more: str = "") -> TorchFramework:
        (tmp_path / "zoo" / "torch_tabular.py").write_text(MODULE + more)
        return TorchFramework(load(str(tmp_path / "zoo"), "torch_tabular.custom_model", required=()), 8, 3, metadata)

    return make


@pytest.fixture
def table(tmp_path: Path) -> str:
    rows = [{"n": i, "f": [i / 2, -1.0], "t": f"é {i}", "y": 3 * i} for i in range(20)]
    schema = pa.schema([("n", pa.int64()), ("f", pa.list_(pa.float32(), 2)), ("t", pa.string()), ("y", pa.int16())])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet", row_group_size=7)
    return str(tmp_path / "rows.parquet")


def batches(framework: TorchFramework, mode: Mode, records: list[bytes]) -> list[Batch]:
    return [batch for batch in framework.batches(mode, iter([TaskRecords(1, 0, records)])) if not batch.end]


def test_columns_become_tensors_texts_lists_and_the_label_goes_apart(
    table: str, framework: Callable[..., TorchFramework]
) -> None:
    reader = create_reader(table, label_column="y")
    records = list(reader.read(reader.shards()[0]))
    found = [batch.data for batch in batches(framework(reader.metadata()), Mode.TRAINING, records)]
    assert [len(one.labels) for one in found] == [8, 8, 4]
    assert torch.cat([one.labels for one in found]).tolist() == [3 * i for i in range(20)]
    assert found[1].features["t"][0] == "é 8"
    assert found[0].features["f"].dtype == torch.float32
    assert found[0].features["f"][3].tolist() == [1.5, -1.0]


@pytest.mark.parametrize("values", [[b"a", b"\xff"], [[b"a"], [b"b", b"\xff"]]], ids=["values", "lists"])
def test_bytes_that_are_no_text_are_refused(
    values: list[Any], tmp_path: Path, framework: Callable[..., TorchFramework]
) -> None:
    pq.write_table(pa.table({"n": [1, 2], "t": values}), tmp_path / "rows.parquet")
    reader = create_reader(str(tmp_path / "rows.parquet"))
    records = list(reader.read(reader.shards()[0]))
    with pytest.raises(FeedError, match=r"b'\\xff' in the column t, which is not UTF-8"):
        batches(framework(reader.metadata()), Mode.PREDICTION, records)
    assert batches(framework(reader.metadata()), Mode.PREDICTION, records[:1])


def test_a_model_trains_on_a_table_and_predicts_without_the_label(
    table: str, framework: Callable[..., TorchFramework]
) -> None:
    reader = create_reader(table, columns=["n", "f"], label_column="y")
    made = framework(reader.metadata())
    records = list(reader.read(reader.shards()[0]))
    first = batches(made, Mode.TRAINING, records)[0]
    losses = [made.train(first, seed) for seed in range(4)]
    assert losses[-1] < losses[0]
    predicted = batches(made, Mode.PREDICTION, records)[0].data
    assert sorted(predicted.features) == ["f", "n"]
    assert predicted.labels is None


def test_lists_of_any_length_are_filled_up_to_the_longest_of_the_task(
    tmp_path: Path, framework: Callable[..., TorchFramework]
) -> None:
    ids = [[], [1, -2, 3 << 40], *([i] for i in range(16)), [5, 6], [7] * 9]
    x = [[i / 2] * (i % 3) for i in range(20)]
    texts = [["é"] * (i % 3) for i in range(20)]
    pair = pa.array([["a", "b"]] * 20, pa.list_(pa.string(), 2))
    none = pa.array([[]] * 20, pa.list_(pa.float32()))
    columns = {"ids": ids, "x": x, "t": texts, "pair": pair, "none": none, "n": list(range(20)), "y": list(range(20))}
    pq.write_table(pa.table(columns), tmp_path / "lists.parquet")
    reader = create_reader(str(tmp_path / "lists.parquet"), label_column="y")
    records = list(reader.read(reader.shards()[0]))
    found = [batch.data for batch in batches(framework(reader.metadata()), Mode.TRAINING, records)]
    features = [one.features for one in found]
    assert torch.cat([one["ids"] for one in features]).tolist() == [row + [0] * (9 - len(row)) for row in ids]
    assert torch.cat([one["x"] for one in features]).tolist() == [row + [0.0] * (2 - len(row)) for row in x]
    assert [row for one in features for row in one["t"]] == texts
    assert features[0]["pair"] == [["a", "b"]] * 8
    assert features[2]["none"].shape == (4, 0)
    assert torch.cat([one["n"] for one in features]).tolist() == list(range(20))
    assert torch.cat([one.labels for one in found]).tolist() == list(range(20))


def test_the_modules_own_collate_fn_gets_samples(table: str, framework: Callable[..., TorchFramework]) -> None:
    more = """
def collate_fn(samples):
    return {"n": torch.stack([one["n"] for one, _ in samples])}, torch.stack([label for _, label in samples]) + 1
"""
    reader = create_reader(table, label_column="y")
    records = list(reader.read(reader.shards()[0]))
    first = batches(framework(reader.metadata(), more), Mode.TRAINING, records)[0].data
    assert first.features["n"].tolist() == list(range(8))
    assert first.labels.tolist() == [3 * i + 1 for i in range(8)]


def test_images_are_as_torchvision_gives_them(tmp_path: Path, framework: Callable[..., TorchFramework]) -> None:
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (9 + i, 7), (51 * number, 0, 255)).save(tmp_path / "images" / name / f"{i}.png")
    reader = create_reader(str(tmp_path / "images"), {"image_size": [4, 6]})
    records = list(reader.read(reader.shards()[0]))
    made = framework(reader.metadata())
    for batch in batches(made, Mode.TRAINING, records):
        images, labels = batch.data.features, batch.data.labels
        assert images.shape[1:] == (3, 4, 6)
        expected = [[np.float32(51 * label / 255), 0.0, 1.0] for label in labels.tolist()]
        assert np.allclose(images[:, :, 0, 0], expected)
    (tmp_path / "images" / "cat" / "0.png").write_bytes(b"no image")
    broken = list(create_reader(str(tmp_path / "images")).read(reader.shards()[0]))
    with pytest.raises(FeedError, match="holds no image"):
        batches(made, Mode.TRAINING, broken)


def test_images_of_every_mode_are_decoded(tmp_path: Path, framework: Callable[..., TorchFramework]) -> None:
    folder = tmp_path / "images" / "all"
    folder.mkdir(parents=True)
    gray = Image.new("L", (6, 4), 200)
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        gray.convert(mode).save(folder / f"{mode}.png")
    gray.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.full((4, 6), 200 * 257, np.uint16)).save(folder / "16.png")
    reader = create_reader(str(tmp_path / "images"), {"image_size": [4, 6]})
    (batch,) = batches(framework(reader.metadata()), Mode.TRAINING, list(reader.read(reader.shards()[0])))[:1]
    brightest = sorted((batch.data.features.amax((1, 2, 3)) * 255).round().tolist())
    assert brightest == [200.0] * 7 + [255.0]  # one bit a pixel is black or white


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_16_bits_keep_them(tmp_path: Path, framework: Callable[..., TorchFramework], channels: int) -> None:
    folder = tmp_path / "images" / "all"
    folder.mkdir(parents=True)
    numbers = np.array([[0, 1, 300], [51400, 65534, 65535]], np.uint16)
    Image.fromarray(numbers).save(folder / "16.png")
    Image.fromarray(numbers).save(folder / "17.tif")
    reader = create_reader(str(tmp_path / "images"), {"image_size": [2, 3, channels]})
    (batch,) = batches(framework(reader.metadata()), Mode.TRAINING, list(reader.read(reader.shards()[0])))[:1]
    expected = np.broadcast_to(numbers / 65535, (2, channels, 2, 3))
    np.testing.assert_allclose(batch.data.features, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_whose_pixels_have_no_range_are_refused(
    tmp_path: Path, framework: Callable[..., TorchFramework], dtype: type
) -> None:
    folder = tmp_path / "images" / "all"
    folder.mkdir(parents=True)
    Image.fromarray(np.full((2, 3), 70000, dtype)).save(folder / "0.tif")
    reader = create_reader(str(tmp_path / "images"), {"image_size": [2, 3]})
    with pytest.raises(FeedError, match=r"an image of TIFF in mode [IF], whose pixels have no range"):
        batches(framework(reader.metadata()), Mode.TRAINING, list(reader.read(reader.shards()[0])))


def test_a_module_without_a_feed_is_refused_where_no_label_is_named(
    table: str, framework: Callable[..., TorchFramework]
) -> None:
    with pytest.raises(ModelDefinitionError, match="label_column names no column"):
        framework(create_reader(table).metadata()).batches(Mode.EVALUATION, iter([]))
