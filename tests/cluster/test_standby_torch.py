"""Pods of PyTorch jobs are forked from a standby that has imported PyTorch, and compute in the fork."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from local_agent import LocalAgent, Observer

from elasticdl.cluster.cluster import PodSpec
from elasticdl.protocol import Role
from elasticdl_client.choices import RUN_MODULE

pytest.importorskip("torch")

READY_S = 200.0  # importing PyTorch on a busy machine
STEP = """
import sys
from elasticdl.cluster.local.standby import report_ready
of_interest = {"torch", "torch._dynamo", "tensorflow", "keras", "elasticdl.frameworks.torch.framework"}
preloaded = sorted(of_interest & set(sys.modules))
from elasticdl.frameworks.torch import first_op
first_op()
report_ready()
import torch
model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.ReLU(), torch.nn.Linear(400, 1))
loss = model(torch.ones(256, 400)).sum()
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("threads", torch.get_num_threads() > 0, "gradient", model[0].weight.grad.isfinite().all().item())
print("preloaded", *preloaded)
"""


def test_a_pod_of_pytorch_is_forked_and_computes(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP)
    agent = LocalAgent(tmp_path / "agent", standby_timeout_s=60)
    observer = Observer(agent.cluster)
    try:
        for number in range(2):
            env = {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "ELASTICDL_POD_NAME": f"w-{number}"}
            command = (sys.executable, *RUN_MODULE, "step")
            agent.cluster.create(PodSpec(f"w-{number}", Role.WORKER, number, command, env=env, framework="torch"))
            assert observer.ended_pod(f"w-{number}").exit_code == 0, agent.cluster.logs(f"w-{number}")
            agent.cluster.wait_for_standby(READY_S)
        printed = agent.cluster.logs("w-1")
        assert "gradient True" in printed
        assert "preloaded elasticdl.frameworks.torch.framework torch torch._dynamo" in printed
    finally:
        agent.stop()
