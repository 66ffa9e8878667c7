"""The modules that a process of each role must not import before it knows its job: processor time of every start.

A worker of a tenth of a processor waits ten seconds for each second of imports.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_FRAMEWORKS = ("tensorflow", "keras", "torch")
_OF_FEW_JOBS = (
    *("kubernetes", "fsspec", "pyarrow", "pandas", "sqlalchemy", "tensorboard", "prometheus_client", "cryptography"),
    *("yaml", "rich", "fire", "http.client", "email", "importlib.metadata"),
)
_ROLES = {
    "elasticdl_client.main": ("numpy", "grpc", "google.protobuf", "asyncio", "elasticdl_client.chaos", "elasticdl"),
    "elasticdl_client.local": ("numpy", "grpc", "google.protobuf", "asyncio", "elasticdl_client.chaos", "elasticdl"),
    "elasticdl.cluster.local.agent": ("numpy", "grpc", "google.protobuf", "elasticdl.rpc"),
    "elasticdl.master.__main__": ("numpy", "elasticdl.data.factory", "elasticdl.frameworks", "elasticdl.ps"),
    "elasticdl.ps.__main__": ("elasticdl.data", "elasticdl.worker", "elasticdl.cluster.kubernetes"),
    "elasticdl.worker.process": ("elasticdl.worker.inference", "elasticdl.analysis", "elasticdl.ps.server"),
}


@pytest.mark.parametrize("module", _ROLES)
def test_a_role_imports_nothing_that_few_jobs_need(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert not imported & {*_FRAMEWORKS, *_OF_FEW_JOBS, *_ROLES[module]}
