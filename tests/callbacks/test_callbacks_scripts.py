"""Evaluations by a user's own script are in the status of its job."""

from __future__ import annotations

import sys
from pathlib import Path

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl_client.choices import DistributionStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "master_core"))
from core_script import Script


def test_the_metrics_of_a_script_are_logged_and_shown() -> None:
    script = Script(strategy=DistributionStrategy.ALL_REDUCE, num_ps=0, runs_command=True)
    script.worker_starts(0)
    assert isinstance(script.ask(e.MetricsReported, 0, 7, 40, {"accuracy": 0.5}), c.Accepted)
    assert "Evaluation metrics[step=40]: {'accuracy': 0.5}" in script.log()
    assert script.told(c.Measured) == [c.Measured(40, {"accuracy": 0.5})]
    status = script.job.status()
    assert (status.metrics, status.metrics_step) == ({"accuracy": 0.5}, 40)
    assert isinstance(script.ask(e.MetricsReported, 3, 7, 41, {"accuracy": 0.0}), c.UnknownWorker)
