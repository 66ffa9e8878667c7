"""The end of a script, as the master hears of it.  Real processes and sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.job_spec import JobSpec
from tests.worker.scripted_master import TOKEN, ScriptedMaster

CAUGHT = """
import sys
try:
    sys.exit(3)
except SystemExit:
    pass
"""
OF_A_THREAD = """
import sys, threading
threading.Thread(target=sys.exit, args=(3,)).start()
"""


class MasterOfTwo(ScriptedMaster):
    """Of a job with two processes in each worker."""

    def RegisterWorker(self, request: Any, context: Any) -> pb.RegisterWorkerReply:  # noqa: N802
        reply = super().RegisterWorker(request, context)
        reply.job_spec = replace(JobSpec(), processes_per_worker=2).to_json()
        return reply


@pytest.mark.parametrize(
    ("end", "code", "is_told"),
    [
        ("pass", 0, True),
        ("raise ValueError(3)", 1, False),
        ("import sys; sys.exit()", 0, True),
        ("import sys; sys.exit(3)", 3, False),
        ("import sys; sys.exit('no data')", 1, False),
        ("exit(3)", 3, False),
        (CAUGHT, 0, True),
        (OF_A_THREAD, 0, True),
    ],
)
def test_the_master_hears_of_the_end_of_a_script_unless_it_has_failed(
    end: str, code: int, is_told: bool, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "script.py").write_text(
        f"from elasticdl.api.session import ScriptSession\nScriptSession.join()\n{end}\n"
    )
    master = MasterOfTwo()
    environment = {
        "MASTER_ADDR": master.address,
        "WORKER_ID": "1",
        "ELASTICDL_TOKEN_FILE": str(tmp_path / "token"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, str(tmp_path / "script.py")]
    try:
        assert subprocess.run(command, env=os.environ | environment, timeout=60, check=False).returncode == code
    finally:
        master.stop()
    heartbeats = [request for method, request in master.told if method == "Heartbeat"]
    assert any(request.ended for request in heartbeats) == is_told
