"""The tutorials for Keras, PyTorch, Estimators and models of one's own work word for word, and print what they say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.house.documents import REPOSITORY, clone, run_page

PAGES = {  # page: lines that it must have printed
    "keras": [
        "epoch 8: records 1437, committed 1437, repeated 0, lost 0",
        r"final evaluation at step 360: accuracy 0\.9",
        "Job keras-tutorial succeeded.",
        "Loss = ",
        "Total params",
        r"final evaluation at step 360: accuracy 0\.9",
        "Job keras-allreduce succeeded.",
    ],
    "pytorch": [
        "epoch 8: records 1437, committed 1437, repeated 0, lost 0",
        r"final evaluation at step 360: accuracy 0\.9",
        "Job torch-tutorial succeeded.",
        "Loss = ",
        r"logits: \(3, 10\)",
    ],
    "bring_your_own_model": [
        "epoch 8: records 455, committed 455, repeated 0, lost 0",
        r"final evaluation at step 23\d: auc 0\.9",
        r"1[01]\d of 114 tumours are recognised",
        "has no custom_modl, which --model_def=tumour.custom_modl names",
        "exit code 2",
        "Expect 32 fields but have 31 in record 0",
        "exit code 1",
    ],
    "estimator": [
        "epoch 40: records 150, committed 150, repeated at most 0, lost 0",
        "Job iris-tutorial succeeded.",
        r"Evaluation metrics\[step=\d+\]: \{.*'accuracy': (0\.9[5-9]|1\.0)",
    ],
}


def programs(directory: Path) -> Path:
    """`python` and `elasticdl` of this interpreter, which may have no ElasticDL installed beside TensorFlow 2.15."""
    directory.mkdir()
    for name, words in (("python", ""), ("elasticdl", "-m elasticdl_client.main")):
        program = directory / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{REPOSITORY}" exec "{sys.executable}" {words} "$@"\n')
        program.chmod(0o755)
    return directory


def run(name: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    page = REPOSITORY / "docs" / "tutorials" / f"{name}.md"
    said = run_page(
        page, clone(tmp_path / "elasticdl"), programs(tmp_path / "bin"), 800, HOME=str(home), TF_CPP_MIN_LOG_LEVEL="3"
    )
    position = 0
    for wanted in PAGES[name]:
        found = re.compile(wanted).search(said, position)
        assert found, f"{wanted!r} is not printed, or too early:\n{said}"
        position = found.end()
    assert not list(home.glob(".elasticdl/jobs/*")), "the page cleans up"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["keras", "pytorch", "bring_your_own_model"])
def test_a_tutorial_works_word_for_word(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.estimator
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_estimator") is None, reason="needs TensorFlow 2.15: make test-estimator"
)
def test_the_tutorial_for_estimators_works_word_for_word(tmp_path: Path) -> None:
    run("estimator", tmp_path)
