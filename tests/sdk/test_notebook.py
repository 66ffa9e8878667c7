"""The notebook of the tutorials runs as it is, with the widget of a notebook."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.documents import REPOSITORY, clone


@pytest.mark.timeout(300)
def test_the_notebook_trains_and_shows_a_widget(tmp_path: Path) -> None:
    root = clone(tmp_path / "elasticdl")
    notebook = REPOSITORY / "docs" / "tutorials" / "python_api.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "tests.sdk.notebook", str(notebook)],
        cwd=root,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "HOME": str(tmp_path),
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "KUBECONFIG": str(tmp_path / "no-cluster"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    data, started, waited, coverage, logs, mistake, _ = json.loads(done.stdout.splitlines()[-1])
    assert "digits is in build/notebook/digits" in data["printed"]
    assert started["value"] == "<Job notebook on this machine: Pending>"
    widget = [one["text/html"] for one in waited["shown"]]
    assert widget[0] == "starting"
    assert '<progress style="width: 24em" value="5748" max="5748"></progress>' in widget[-1]
    # An epoch that ends with the job is in the report alone.
    assert "epoch 4: records 1437, committed 1437, repeated 0, lost 0" in widget[-1] + waited["printed"]
    assert 0.5 < ast.literal_eval(waited["value"])["accuracy"] <= 1
    assert coverage["value"].count("records 1437, committed 1437, repeated 0, lost 0") == 4
    assert len(logs["printed"].splitlines()) == 3
    assert "Did you mean --num_workers?" in mistake["printed"]
    assert not (tmp_path / ".elasticdl" / "jobs" / "notebook").exists()
