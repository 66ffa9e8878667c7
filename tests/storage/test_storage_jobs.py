"""Predictions from storage into storage, which refuses every few requests; training is in test_remote_jobs.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from elasticdl.data.factory import create_reader
from elasticdl.storage.fsspec_storage import storage_of
from tests.chaos.job import LocalJob
from tests.e2e.test_data_sources import NUM_ROWS, TORCH, assert_exact_and_good, job, write_parquet
from tests.storage.faulty_proxy import Fault, FaultyProxy, Request


@pytest.mark.full  # two whole jobs more
@pytest.mark.timeout(400)
def test_a_model_predicts_from_storage_into_storage_and_says_last_that_all_is_there(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    data = write_parquet(tmp_path)
    url = f"s3://bucket/{tmp_path.name}"
    for path in tmp_path.glob("*.parquet"):
        storage_of(url).publish(f"{url}/data/{path.name}", path)
    training = job(tmp_path, TORCH, data, distribution_strategy="AllReduceStrategy", output=tmp_path / "model").start()
    assert_exact_and_good(training)
    faults = itertools.cycle([None, Fault.UNAVAILABLE, None, None])

    def fault_of(request: Request) -> Fault | None:
        return next(faults) if request.range or request.method == "PUT" else None

    proxy.fault_of = fault_of
    flags = {name: training.flags[name] for name in ("model_zoo", "model_def", "columns", "minibatch_size")}
    flags |= {
        "job_name": "predicting",
        "distribution_strategy": "AllReduceStrategy",
        "num_workers": 2,
        "checkpoint_dir_for_init": tmp_path / "model",
        "prediction_data": f"{url}/data",
        "prediction_outputs": f"{url}/predictions",
        "prediction_format": "csv",
    }
    predicting = LocalJob(tmp_path / "predicting", flags, command="predict").start()
    assert predicting.wait(240) == 0, predicting.story()
    published = [
        request.path for request in proxy.requests if request.method == "PUT" and "/predictions/" in request.path
    ]
    assert published[-1].endswith("/_SUCCESS")
    reader = create_reader(f"{url}/predictions")
    assert sum(shard.end for shard in reader.shards()) == NUM_ROWS
    again = LocalJob(tmp_path / "again", flags | {"job_name": "again"}, command="predict").start()
    assert again.wait(240) != 0
    assert "is not empty" in again.story()
