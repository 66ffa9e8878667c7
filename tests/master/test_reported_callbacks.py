"""A worker's report of the user's callbacks is an error of its message where the master could not keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from elasticdl.master.core.plan.callbacks import Callbacks
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import connect
from tests.master.actors import MasterJob, running
from tests.master.life import TOKEN

STOPPING = {"metric": "auc", "maximize": True, "min_delta": 0.0, "patience": 2, "baseline": None, "start_from": 0}
SAVING = {"path": "m-{epoch:02d}-{val_auc:.4f}", "metric": "", "maximize": False, "threshold": None, "every_steps": 0}


@pytest.mark.parametrize(
    "rules",
    [
        {"stopping": 3},
        {"stopping": [3]},
        {"stopping": [{}]},
        {"stopping": [STOPPING | {"patience": -1}]},
        {"stopping": [STOPPING | {"patience": "2"}]},
        {"stopping": [STOPPING | {"metric": ["auc"]}]},
        {"stopping": [STOPPING | {"min_delta": float("nan")}]},
        {"saving": [SAVING | {"path": 7}]},
        {"saving": [SAVING | {"path": "{epoch"}]},
        {"saving": [SAVING | {"path": "{epoch:1000000000}"}]},
        {"saving": [SAVING | {"path": "{epoch:{step}}"}]},
        {"saving": [SAVING | {"path": "{epoch.__class__}"}]},
        {"saving": [SAVING | {"every_steps": -5}]},
        {"saving": [SAVING | {"threshold": "x"}]},
        {"saving": [SAVING | {"threshold": 10**400}]},
        {"max_steps": "many"},
        {"max_steps": [1]},
    ],
)
def test_rules_that_cannot_be_kept_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Callbacks(rules)


def test_rules_that_can_are_taken() -> None:
    Callbacks({"stopping": [STOPPING], "saving": [SAVING, SAVING | {"path": "best", "metric": "auc"}], "max_steps": 9})
    for width in ("", "02d", ">8.3f", "+.3e", ",", "08.4f"):
        Callbacks({"saving": [SAVING | {"path": f"m-{{step:{width}}}"}]})


def test_a_master_answers_them_with_the_field_and_continues(tmp_path: Path) -> None:
    with running(MasterJob(tmp_path, num_ps_pods=0, num_workers=1, distribution_strategy="Local")) as job:
        worker = job.worker()
        assert worker.register().accepted
        with connect(f"127.0.0.1:{job.port}", TOKEN) as channel:
            call = channel.unary_unary("/elasticdl.Master/ReportModel", pb.ModelReport.SerializeToString)
            report = pb.ModelReport(worker_id=0, incarnation=worker.incarnation, callbacks='{"saving": [{}]}')
            with pytest.raises(grpc.RpcError) as refused:
                call(report, timeout=20)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ModelReport.callbacks: path is None" in refused.value.details()
        assert worker.report_model(optimizer="{}").accepted
        assert "Traceback" not in job.log()
