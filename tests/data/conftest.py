"""Where the real data of these tests is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data: `$ELASTICDL_TEST_DATA`, else ../shared/data next to the repository."""
    given = os.environ.get("ELASTICDL_TEST_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set ELASTICDL_TEST_DATA")
    return folder
