"""Every model of the zoo, trained by the command that its README names, becomes as good as the README says.

Those with Estimators are trained by tests/estimator.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.entries import ENTRIES, Entry
from tests.zoo.training import make_data, train


def marked(entry: Entry) -> object:
    marks = [] if entry.every_change else [pytest.mark.full]
    return pytest.param(entry, id=entry.module, marks=[pytest.mark.timeout(1500), *marks])


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("entry", [marked(entry) for entry in ENTRIES if not entry.estimator])
def test_a_model_of_the_zoo_is_trained_to_its_quality(entry: Entry, data: Path, tmp_path: Path) -> None:
    if not entry.available():
        pytest.skip(f"the data of {entry.data.name} is not here")
    make_data(entry, data)
    outcome = train(entry, data, tmp_path / "job")
    assert outcome.exit_code == 0, outcome.log
    assert outcome.status is not None
    for epoch in outcome.status.coverage:
        assert epoch.committed == epoch.records
        assert epoch.lost == 0
    metric, least = entry.quality
    assert outcome.metrics[metric] >= least, outcome.log
