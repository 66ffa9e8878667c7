"""Half-width floats on the wire cost no quality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.jobs import FRAPPE
from tests.chaos.scenarios import assert_exact


@pytest.mark.full
@pytest.mark.timeout(600)
def test_float16_and_bfloat16_on_the_wire_reach_the_auc_of_float32(tmp_path: Path) -> None:
    """One worker, so that the runs differ in their floats alone."""
    if not FRAPPE.available():
        pytest.skip(f"the data of {FRAPPE.dataset} is not here")
    job = replace(FRAPPE, num_workers=1)
    data = job.make_data(tmp_path)
    aucs = {}
    for dtype in ("float32", "float16", "bfloat16"):
        running = job.local_job(tmp_path / dtype, data, wire_dtype=dtype, seed=3).start()
        assert running.wait() == 0, running.story()
        assert_exact(running, job)
        aucs[dtype] = running.metrics()["auc"]
    print(aucs)
    assert aucs["float16"] == pytest.approx(aucs["float32"], abs=0.003)
    assert aucs["bfloat16"] == pytest.approx(aucs["float32"], abs=0.003)
