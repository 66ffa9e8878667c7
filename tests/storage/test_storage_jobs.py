"""A whole job on data of storage that refuses and cuts off every few requests."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from elasticdl.storage.fsspec_storage import storage_of
from tests.e2e.test_data_sources import TORCH, assert_exact_and_good, job, write_parquet
from tests.storage.conftest import SECRET
from tests.storage.faulty_proxy import Fault, FaultyProxy, Request


@pytest.mark.timeout(300)
def test_a_job_trains_each_record_once_from_storage_that_fails_now_and_then(proxy: FaultyProxy, tmp_path: Path) -> None:
    write_parquet(tmp_path)
    url = f"s3://bucket/{tmp_path.name}"
    for path in tmp_path.glob("*.parquet"):
        storage_of(url).publish(f"{url}/{path.name}", path)
    faults = itertools.cycle([None, None, Fault.UNAVAILABLE, None, Fault.CUT_OFF, None, Fault.TOO_SHORT])

    def fault_of(request: Request) -> Fault | None:
        return next(faults) if request.range else None

    proxy.fault_of = fault_of
    running = job(
        tmp_path, TORCH, f"{url}/part-*.parquet", distribution_strategy="AllReduceStrategy", num_workers=2
    ).start()
    assert_exact_and_good(running)
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "job").rglob("*") if path.is_file())
    assert "asking again" in logs
    assert f"{url}/part-0.parquet" in logs
    assert SECRET not in logs
