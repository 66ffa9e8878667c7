"""A master's place on a scripted API server whose clock is another one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elasticdl.master.kubernetes.environment import KubernetesEnvironment
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import connect
from elasticdl_client.kubernetes.objects import job_manifests
from elasticdl_client.kubernetes.pods import owned
from tests.master.object_server import ObjectServer

TOKEN = "0" * 64
JOB = names.job_object("j")
FLAGS = {"job_name": "j", "model_def": "m.m", "training_data": "/d", "image_name": "i", "tls": "false"}


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_submission_and_resume_are_by_this_machines_clock_and_never_in_the_future(
    ahead_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = JobSpec.from_flags("train", {**FLAGS, "namespace": "team", "model_zoo": str(tmp_path)})
    before = time.time()
    first, *others = job_manifests(spec, TOKEN)
    server = ObjectServer([first, *(owned(one, "j", f"uid-{JOB}") for one in others)], ahead_s)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("ELASTICDL_TOKEN_FILE", str(tmp_path / "token"))
    try:
        place = KubernetesEnvironment(connect(), "team", "j", 0)
        now = time.time()
        for moment in (place.submitted_at, place.resumed_at):
            assert before - 2 <= moment <= now  # the server tells whole seconds
        place.close()
    finally:
        server.close()
