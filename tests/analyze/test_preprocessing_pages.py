"""docs/preprocessing.md and its tutorial work word for word, and print what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from elasticdl_client.job_spec import flag_defaults
from tests.chaos.jobs import TEST_DATA
from tests.house.documents import REPOSITORY, clone, run_page
from tests.house.test_tutorials import commands

PAGE = REPOSITORY / "docs" / "preprocessing.md"
TUTORIAL = REPOSITORY / "docs" / "tutorials" / "preprocessing.md"


def printed(page: Path, tmp_path: Path, **environment: str) -> str:
    (tmp_path / "home").mkdir()
    return run_page(
        page,
        clone(tmp_path / "elasticdl"),
        Path(sys.executable).parent,
        1000,
        HOME=str(tmp_path / "home"),
        TF_CPP_MIN_LOG_LEVEL="3",
        **environment,
    )


@pytest.mark.parametrize("page", [PAGE, TUTORIAL], ids=["page", "tutorial"])
def test_the_flags_of_analyze_and_predict_exist(page: Path) -> None:
    for command in ("analyze", "predict"):
        known = {f"--{name}" for name in flag_defaults(command)}
        for line in commands(page.read_text(), f"elasticdl {command}"):
            assert set(re.findall(r"(?<![\w-])--[a-z_]+", line)) <= known, line
    table = set(re.findall(r"^\| `--([a-z_]+)`", page.read_text(), re.MULTILINE))
    assert table <= set(flag_defaults("analyze"))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_page_works_word_for_word(tmp_path: Path) -> None:
    said = printed(PAGE, tmp_path)
    for wanted in (
        "analysis: records 3, analyzed 3, repeated 0, lost 0",
        "age: 31.0 to 45.0 mean 38.0",
        "words: ['red', 'green']",
        "[[0.0, 1.0]]",
    ):
        assert wanted in said, said


@pytest.mark.full
@pytest.mark.timeout(1100)
def test_the_tutorial_works_word_for_word(tmp_path: Path) -> None:
    if not (TEST_DATA / "census").is_dir():
        pytest.skip("the data of census is not here")
    said = printed(TUTORIAL, tmp_path, CENSUS=str(TEST_DATA / "census"))
    assert "analysis: records 32561, analyzed 32561, repeated 0, lost 0" in said, said
    assert "sex: {'Male': 21790, 'Female': 10771}" in said, said
    assert re.search(r"age: 17(\.0)? to 90(\.0)? boundaries \[\d", said), said
    (auc,) = re.findall(r"final evaluation at step \d+: .*auc (0\.\d+)", said)
    assert float(auc) > 0.9, said
    (probability,) = re.findall(r"probability of more than 50K: (0\.\d+)", said)
    assert float(probability) > 0.9, said
    assert "prediction: records 16281, predicted 16281, repeated 0, lost 0" in said, said
    assert not list((tmp_path / "home").glob(".elasticdl/jobs/*")), "the page cleans up"
