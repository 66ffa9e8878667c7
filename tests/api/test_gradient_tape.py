"""Loops of one's own on the newest TensorFlow take their data from the ledger."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from elasticdl.api.data import DataShardService
from elasticdl.api.tensorflow import ElasticDataShardReportHook, dataset_of, steps
from elasticdl_client.errors import CheckpointError


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


def test_a_chief_whose_state_file_is_damaged_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master would count the data of the newest checkpoint as trained."""
    cluster = {kind: ["127.0.0.1:1"] for kind in ("chief", "ps")}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    v1 = tf.compat.v1.train

    def begin() -> int:
        """The step with which a session begins, and ends, writing a checkpoint."""
        data = DataShardService(batch_size=8, dataset_size=64)
        with tf.Graph().as_default():
            step = v1.get_or_create_global_step()
            advance = tf.compat.v1.assign_add(step, 1)
            hook = ElasticDataShardReportHook(data, str(tmp_path))
            saver = v1.CheckpointSaverHook(str(tmp_path), save_steps=5, listeners=[hook.listener])  # as Estimators do
            with v1.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path),
                hooks=[hook],
                chief_only_hooks=[saver],
                save_checkpoint_secs=None,
                save_checkpoint_steps=None,
            ) as session:
                return int(session.run(advance)) - 1

    assert [begin(), begin()] == [0, 1]
    state = tmp_path / "checkpoint"
    whole = state.read_bytes()
    state.write_bytes(whole[:-10] + b"{")
    with pytest.raises(CheckpointError, match="checkpoint, which names the newest"):
        begin()
    state.write_bytes(whole)
    assert begin() == 2
