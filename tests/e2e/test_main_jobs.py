"""The main job as a user runs it, on real data, undisturbed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import frappe_fit
from elasticdl.data.factory import create_reader
from tests.chaos.jobs import DIGITS, FRAPPE, MNIST, zoo_with
from tests.e2e.whole_jobs import train
from tests.lean_import import LEAN_IMPORT

PLAIN_TENSORFLOW = """
import sys
import numpy as np, tensorflow as tf
saved = np.load(sys.argv[2])
ends = saved["lengths"].cumsum()
records = [saved["payload"][end - size : end].tobytes() for end, size in zip(ends, saved["lengths"])]
records = tf.io.parse_example(records, {
    "image": tf.io.FixedLenFeature([64], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)})
model = tf.saved_model.load(sys.argv[1])
(logits,) = model.signatures["serving_default"](records["image"]).values()
print((logits.numpy().argmax(1) == records["label"].numpy()).mean())
assert not [name for name in sys.modules if name.startswith("elasticdl")]
"""


@pytest.mark.timeout(300)
def test_digits_train_evaluate_and_export_to_plain_tensorflow_and_callbacks_end_once(tmp_path: Path) -> None:
    zoo = zoo_with(
        tmp_path,
        f"""
        class Note(keras.callbacks.Callback):
            def on_train_end(self, logs=None):
                with open({str(tmp_path / "note")!r}, "a") as note:
                    note.write(f"{{len(self.model.trainable_variables)}} variables\\n")

        def callbacks():
            return [Note()]
        """,
    )
    output = tmp_path / "model"
    flags = {"model_zoo": zoo, "model_def": "model.custom_model", "output": output, "evaluation_steps": 100}
    metrics = train(DIGITS, tmp_path, **flags)
    assert metrics["accuracy"] >= 0.95
    assert (tmp_path / "note").read_text() == "6 variables\n"
    for log in (tmp_path / "job").rglob("*-worker-*.log"):
        assert len(re.findall(r"The model is on (the CPU \(\d+ threads?\)|GPU:0 \()", log.read_text())) == 1
    reader = create_reader(str(tmp_path / "digits" / "validation"))
    records = [record for shard in reader.shards() for record in reader.read(shard)]
    lengths = np.array([len(record) for record in records])
    np.savez(tmp_path / "records.npz", lengths=lengths, payload=np.frombuffer(b"".join(records), np.uint8))
    argv = [sys.executable, "-c", LEAN_IMPORT + PLAIN_TENSORFLOW, str(output), str(tmp_path / "records.npz")]
    printed = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert printed.returncode == 0, printed.stderr[-2000:]
    assert float(printed.stdout.split()[-1]) == pytest.approx(metrics["accuracy"], abs=1e-6)


@pytest.mark.timeout(400)
def test_mnist_reaches_its_accuracy_on_two_ps_and_two_workers(tmp_path: Path) -> None:
    assert train(MNIST, tmp_path)["accuracy"] >= 0.96


@pytest.mark.timeout(400)
def test_frappe_deepfm_on_ps_is_as_good_as_plain_keras_in_one_process(tmp_path: Path) -> None:
    auc = train(FRAPPE, tmp_path)["auc"]
    assert auc >= 0.93
    data = tmp_path / "frappe"
    plain = frappe_fit.auc(data / "train", data / "validation", FRAPPE.num_epochs, FRAPPE.minibatch_size)
    assert auc == pytest.approx(plain, abs=0.01)


@pytest.mark.timeout(300)
def test_local_strategy_trains_with_one_worker_and_no_ps(tmp_path: Path) -> None:
    metrics = train(DIGITS, tmp_path, distribution_strategy="Local", num_workers=1, num_ps_pods=0)
    assert metrics["accuracy"] >= 0.95
