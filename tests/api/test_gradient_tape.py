"""A loop of one's own on the newest TensorFlow takes its data from the ledger."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.api.data import DataShardService
from elasticdl.api.tensorflow import dataset_of, steps


def test_a_line_is_fitted_and_every_minibatch_is_reported() -> None:
    points = np.linspace(-1, 1, 64, dtype=np.float32)
    data = DataShardService(batch_size=8, dataset_size=64, num_epochs=30, shuffle=True)
    slope = tf.Variable(0.0)
    seen: Counter[int] = Counter()
    for indices in steps(data):
        x = tf.gather(points, indices)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((slope * x - 3 * x) ** 2)
        slope.assign_sub(0.5 * tape.gradient(loss, slope))
        seen.update(indices.numpy().tolist())
    assert seen == Counter(dict.fromkeys(range(64), 30))
    assert slope.numpy() == pytest.approx(3, abs=1e-3)
    assert data.get_current_task() is None
    assert data.is_over


def test_records_are_parsed_in_the_graph_and_a_second_pipeline_begins_where_reports_ended(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x\n" + "".join(f"{n}\n" for n in range(12)))
    data = DataShardService(batch_size=3, training_data=str(tmp_path / "rows.csv"))

    def parse(rows: tf.Tensor) -> tf.Tensor:
        return tf.strings.to_number(rows)

    first = iter(dataset_of(data, parse))
    taken = [next(first).numpy().tolist() for _ in range(2)]
    data.report_batch_done()
    rest = [element.numpy().tolist() for element in dataset_of(data, parse)]
    assert rest[0] == taken[1]
    assert sorted([*taken[0], *(number for numbers in rest for number in numbers)]) == list(range(12))
