"""The registry of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticdl_client.errors import FlagError
from elasticdl_client.sql.models import ModelRegistry, StoredModel
from elasticdl_client.sql.statement import ModelName, Place, StatementError

PLACE = Place("DESCRIBE m", 9, 10)


def named(name: str, version: int = 0) -> ModelName:
    return ModelName(name, version, PLACE)


def trained(model: StoredModel) -> StoredModel:
    model.export.mkdir()
    (model.export / "saved_model.pb").write_bytes(b"")
    return model


def test_the_newest_version_that_is_trained_is_the_model(tmp_path: Path) -> None:
    models = ModelRegistry(tmp_path / "models")
    first, second = (trained(models.add("m", {"label": str(number)})) for number in (1, 2))
    third = models.add("m", {})
    assert [one.version for one in (first, second, third)] == [1, 2, 3]
    assert models.find(named("m")).found["label"] == "2"
    assert models.find(named("m", 1)).found["label"] == "1"
    assert models.look_up(named("m")).version == 3
    assert [(one.name, one.version, one.is_trained) for one in models.all()] == [
        ("m", 1, True),
        ("m", 2, True),
        ("m", 3, False),
    ]


def test_a_version_is_given_once(tmp_path: Path) -> None:
    models = ModelRegistry(tmp_path)
    models.add("m", {})
    models.add("m", {})
    models.drop(named("m", 1))
    assert models.next("m").version == 3
    assert [model.version for model in models.drop(named("m"))] == [2]
    assert not (tmp_path / "m").exists()


def test_what_there_is_not_is_named(tmp_path: Path) -> None:
    models = ModelRegistry(tmp_path)
    with pytest.raises(StatementError, match="no model 'm'"):
        models.find(named("m"))
    models.add("income", {})
    with pytest.raises(StatementError, match="no model 'incme'") as caught:
        models.find(named("incme"))
    assert "'income'" in caught.value.hint
    with pytest.raises(StatementError, match="no version 9") as caught:
        models.drop(named("income", 9))
    assert "income@1" in caught.value.hint
    with pytest.raises(StatementError, match="income@1 is not trained"):
        models.find(named("income"))


def test_a_path_that_no_flag_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="semicolon"):
        ModelRegistry(tmp_path / "a;b")
