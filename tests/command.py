"""`elasticdl` in this process, which has made the imports that cost a process of its own most of its time.

For commands that end soon.  Those with streams, signals or an environment of their own, as jobs, are for processes.
"""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from elasticdl_client.main import exit_with, run


def elasticdl(*arguments: str, directory: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as its console script does, with variables beside those of this process."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        for name, value in environment.items():
            patch.setenv(name, value)
        if directory is not None:
            patch.chdir(directory)
        with pytest.raises(SystemExit) as ended:
            exit_with(lambda: run(arguments))
    code = ended.value.code or 0
    assert isinstance(code, int), code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
