"""The README of the zoo and the zoo itself have the same models."""

from __future__ import annotations

from elasticdl.data.datasets.catalogue import NAMES
from elasticdl_client.job_spec import flag_defaults
from tests.zoo.entries import DATA, ENTRIES, REPOSITORY
from tests.zoo.readme import readme

ZOO = REPOSITORY / "model_zoo"


def test_the_readme_is_made_of_the_table() -> None:
    assert (ZOO / "README.md").read_text() == readme(), "run: python -m tests.zoo.readme > model_zoo/README.md"


def test_every_model_is_in_the_table() -> None:
    models = {
        ".".join(file.relative_to(ZOO).with_suffix("").parts)
        for file in ZOO.glob("*/*.py")
        if "def custom_model(" in (text := file.read_text()) or "def main(" in text
    }
    assert models == {entry.module for entry in ENTRIES}


def test_every_data_set_of_the_generator_has_a_model_and_every_flag_exists() -> None:
    assert {data.name for data in DATA} == set(NAMES)
    for entry in ENTRIES:
        flags = {word.split("=")[0].removeprefix("--") for word in entry.command()[2:]}
        assert flags <= set(flag_defaults("train"))
