"""Scripts run alone here, unless a test starts a job."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes in one thread, in loaders, too."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
