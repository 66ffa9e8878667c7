"""Permutation importance: the growth of a loss when a column carries no information."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from elasticdl.tabular.importance import Array, importances_of, loss_of

NUM_ROWS = 10_000  # more than two batches


def table() -> dict[str, Array]:
    generator = np.random.default_rng(1)
    strong, weak, noise = (generator.normal(size=NUM_ROWS) for _ in range(3))
    return {"strong": strong, "weak": weak, "noise": noise, "strong_text": np.sign(strong).astype(str).astype(object)}


def model(rows: Mapping[str, Array]) -> Array:
    """A logistic model that has overfitted a little: it looks at the noise, too."""
    sign = rows["strong_text"].astype(float)
    found: Array = 1 / (1 + np.exp(-(3 * np.abs(rows["strong"]) * sign + rows["weak"] + 0.1 * rows["noise"])))
    return found


def labels_of(rows: Mapping[str, Array]) -> Array:
    chances = 1 / (1 + np.exp(-(3 * rows["strong"] + rows["weak"])))
    found: Array = (np.random.default_rng(2).random(NUM_ROWS) < chances).astype(np.int64)
    return found


COLUMNS = {"noise": ["noise"], "strong": ["strong", "strong_text"], "weak": ["weak"]}


def test_strong_columns_lead_and_noise_is_nothing_within_its_deviation() -> None:
    rows = table()
    _, loss = loss_of(labels_of(rows), "binary", 1.0, has_own_outputs=False)
    base, found = importances_of(model, rows, loss, COLUMNS, 10, seed=0)
    by_name = {one.column: one for one in found}
    assert base == pytest.approx(0.32, abs=0.03)
    assert by_name["strong"].importance > 5 * by_name["weak"].importance > 0.1
    assert abs(by_name["noise"].importance) < 3 * by_name["noise"].deviation
    assert all(0 < one.deviation < 0.05 for one in found)


def test_the_seed_decides_all_numbers_and_another_column_none() -> None:
    rows = table()
    _, loss = loss_of(labels_of(rows), "binary", 1.0, has_own_outputs=False)
    first, again, other = (importances_of(model, rows, loss, COLUMNS, 2, seed) for seed in (7, 7, 8))
    assert first == again
    assert first[1] != other[1]
    fewer = importances_of(model, rows, loss, {"noise": ["noise"], "strong": ["strong", "strong_text"]}, 2, 7)
    assert fewer[1] == first[1][:2]


def test_the_inputs_of_a_column_are_permuted_together() -> None:
    rows = {"number": np.arange(50.0), "text": np.arange(50).astype(str).astype(object)}

    def differences(batch: Mapping[str, Array]) -> Array:
        found: Array = batch["number"] - batch["text"].astype(float)
        return found

    _, loss = loss_of(np.zeros(50), "regression", 1.0, has_own_outputs=False)
    _, together = importances_of(differences, rows, loss, {"c": ["number", "text"]}, 3, 0)
    _, alone = importances_of(differences, rows, loss, {"c": ["number"]}, 3, 0)
    assert (together[0].importance, together[0].deviation) == (0, 0)
    assert alone[0].importance > 100


def test_losses_are_those_that_the_estimators_train() -> None:
    places = np.array([0, 1, 1])
    assert loss_of(places, "binary", 1.0, False)[1](np.array([0.5, 0.5, 0.5])) == pytest.approx(np.log(2))
    classes = np.array([[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.4, 0.5, 0.1]])
    expected = -np.log([0.8, 0.5, 0.5]).mean()
    assert loss_of(places, "classes", 1.0, False)[1](classes) == pytest.approx(expected)
    assert loss_of(places, "classes", 1.0, True)[1](classes * 7 - 9) == pytest.approx(0)
    assert loss_of(np.array([1.0, 5.0]), "regression", 2.0, False)[1](np.array([3.0, 5.0])) == pytest.approx(0.5)
    with pytest.raises(SystemExit, match="not finite"):
        loss_of(places, "regression", 1.0, False)[1](np.array([np.nan, 0, 0]))
