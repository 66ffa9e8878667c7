"""Whole jobs that have their data, checkpoints and model in storage, which fails; killed in the middle of an upload."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl.storage import versions
from elasticdl.storage.fsspec_storage import storage_of
from elasticdl.storage.paths import RemotePath, path_of
from elasticdl_client.trained_model import ModelKind, look_at
from tests.chaos.job import LocalJob
from tests.chaos.kills import running
from tests.e2e.test_data_sources import KERAS, TORCH, assert_exact_and_good, job, write_parquet
from tests.storage.conftest import SECRET
from tests.storage.faulty_proxy import Fault, FaultyProxy, Request

ALL_REDUCE = {"distribution_strategy": "AllReduceStrategy", "num_workers": 1}
SERVERS = {"distribution_strategy": "ParameterServerStrategy", "num_workers": 1, "num_ps_pods": 2}


class HeldUpload:
    """Block the n-th upload of a file name without end."""

    def __init__(self, name: str, n: int) -> None:
        self._name = name
        self._n = n
        self._num_seen = 0

    def fault_of(self, request: Request) -> Fault | None:
        if request.method != "PUT" or not request.path.endswith(self._name):
            return None
        self._num_seen += 1
        return Fault.HELD if self._num_seen == self._n else None


def train(proxy: FaultyProxy, tmp_path: Path, code: str, flags: dict[str, object], victim: Role, name: str) -> LocalJob:
    """A job whose victim is killed while it uploads its second file of that name; three of seven of its reads fail."""
    write_parquet(tmp_path)
    url = f"s3://bucket/{tmp_path.name}"
    data = f"{url}/part-*.parquet"
    for path in tmp_path.glob("*.parquet"):
        storage_of(url).publish(f"{url}/{path.name}", path)
    held = HeldUpload(name, 2)
    faults = itertools.cycle([None, None, Fault.UNAVAILABLE, None, Fault.CUT_OFF, None, Fault.TOO_SHORT])

    def fault_of(request: Request) -> Fault | None:
        return next(faults) if request.range else held.fault_of(request)

    proxy.fault_of = fault_of
    places = {"checkpoint_dir": f"{url}/checkpoints", "checkpoint_steps": 10, "output": f"{url}/model"}
    places["tensorboard_log_dir"] = f"{url}/events"
    training = job(tmp_path, code, data, **places, **flags).start()
    training.wait_until("an upload that is held", proxy.held.is_set, timeout_s=200)
    training.kill(running(training, victim, 0)[0])
    training.hurry()
    assert_exact_and_good(training)
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "job").rglob("*") if path.is_file())
    assert f"{url}/checkpoints/version-" in logs
    assert "asking again" in logs
    assert f"{url}/part-0.parquet" in logs
    assert SECRET not in logs
    assert not (tmp_path / "job" / "checkpoints").exists()
    assert RemotePath(f"{url}/model/_SUCCESS").exists()
    assert [name for name in RemotePath(f"{url}/events").files() if "tfevents" in name]
    puts = [one.path for one in proxy.requests if one.method == "PUT" and "/model/" in one.path]
    assert puts[-1].endswith("/_SUCCESS")
    return training


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_in_an_upload_continues_and_storage_that_fails_now_and_then_costs_no_record(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    """From the checkpoint before the one of the upload."""
    training = train(proxy, tmp_path, TORCH, ALL_REDUCE, Role.WORKER, "MANIFEST.json")
    url = f"s3://bucket/{tmp_path.name}"
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "job").rglob("*worker*.log"))
    assert f"from {url}/checkpoints/version-10" in logs, training.story()
    assert look_at(path_of(f"{url}/model")).kind is ModelKind.TORCH_STATE
    assert [path.name for path in versions.complete(path_of(f"{url}/checkpoints"))][-1] == "version-120"


@pytest.mark.full  # a second whole job, with two parameter servers
@pytest.mark.timeout(400)
def test_a_parameter_server_that_is_killed_in_an_upload_continues_from_the_checkpoint_before_it(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    training = train(proxy, tmp_path, KERAS, SERVERS, Role.PS, "variables-0-of-2.ckpt")
    url = f"s3://bucket/{tmp_path.name}"
    assert f"from {url}/checkpoints/version-" in training.master_log(), training.story()
    assert look_at(path_of(f"{url}/model")).kind is ModelKind.SAVED_MODEL
    assert look_at(path_of(f"{url}/checkpoints")).kind is ModelKind.SERVERS


@pytest.mark.full  # four whole jobs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", ["model", "checkpoints"])
@pytest.mark.parametrize("code", [TORCH, KERAS], ids=["torch", "keras"])
def test_a_model_in_storage_is_evaluated_and_trained_on(
    proxy: FaultyProxy, tmp_path: Path, code: str, source: str
) -> None:
    data, url = write_parquet(tmp_path), f"s3://bucket/{tmp_path.name}"
    strategy = SERVERS if code == KERAS else ALL_REDUCE
    places = {"checkpoint_dir": f"{url}/checkpoints", "checkpoint_steps": 50, "output": f"{url}/model"}
    training = job(tmp_path, code, data, **places, **strategy).start()
    assert_exact_and_good(training)
    names = ("model_zoo", "model_def", "columns", "label_column", "minibatch_size", "validation_data")
    flags = {name: training.flags[name] for name in names} | {"checkpoint_dir_for_init": f"{url}/{source}"}
    flags |= strategy if source == "checkpoints" else ALL_REDUCE
    own = {"job_name": "evaluating", "metrics_output": f"{url}/metrics.json"}
    evaluating = LocalJob(tmp_path / "evaluating", flags | own, command="evaluate").start()
    assert evaluating.wait(240) == 0, evaluating.story()
    written = json.loads(RemotePath(f"{url}/metrics.json").read_bytes())
    assert written["metrics"] == pytest.approx(evaluating.metrics())
    assert evaluating.metrics()["accuracy"] == pytest.approx(training.metrics()["accuracy"])
    if source == "checkpoints":
        flags |= {"training_data": data, "max_step": 10, "job_name": "further"}
        further = LocalJob(tmp_path / "further", flags).start()
        assert further.wait(240) == 0, further.story()
        assert further.metrics()["accuracy"] > 0.9
