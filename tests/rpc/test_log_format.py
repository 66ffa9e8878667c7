"""--log_format=json: an entry is an object in one line, the error that ends a process, too; no secret is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

PROGRAM = """
import logging
from elasticdl.rpc.logs import log_to_stdout
log_to_stdout()
log = logging.getLogger("elasticdl.worker")
log.warning("%d lines\\nof pgsql://me:hunter2@db/x", 2)
try:
    raise KeyError("a column")
except KeyError:
    log.exception("cannot read pgsql://me:hunter2@db/x")
raise ValueError("the end")
"""


def logged(**environment: str) -> tuple[list[str], str]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stdout.splitlines(), done.stderr


def test_each_entry_is_an_object_and_so_is_the_error_that_ends_the_process() -> None:
    lines, errors = logged(ELASTICDL_LOG_FORMAT="json", ELASTICDL_POD_NAME="elasticdl-job-worker-3")
    entries = [json.loads(line) for line in lines]
    assert [entry["level"] for entry in entries] == ["WARNING", "ERROR", "CRITICAL"]
    assert [entry["logger"] for entry in entries] == ["elasticdl.worker", "elasticdl.worker", "root"]
    assert {entry["pod"] for entry in entries} == {"elasticdl-job-worker-3"}
    assert entries[0]["message"].startswith("2 lines\nof ")
    assert "KeyError: 'a column'" in entries[1]["traceback"]
    assert entries[2]["message"] == "ValueError: the end"
    assert all(datetime.fromisoformat(entry["time"]).tzinfo is not None for entry in entries)
    assert "hunter2" not in "".join(lines)
    assert errors == ""


def test_without_it_entries_are_text() -> None:
    lines, errors = logged(ELASTICDL_LOG_FORMAT="")
    assert " WARNING 2 lines" in lines[0]
    assert "ValueError: the end" in errors


@pytest.mark.parametrize("streams", ["sys.stdout", "sys.stderr, sys.stdout"])
def test_user_code_that_closes_the_output_costs_no_entry(streams: str) -> None:
    program = f"""if True:
        import logging, sys
        from elasticdl.rpc.logs import log_to_stdout
        log_to_stdout()
        print("before")
        for stream in ({streams},):
            stream.close()
        logging.info("after")
        logging.info("the end")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rpartition("INFO ")[2] for line in done.stdout.splitlines()] == ["before", "after", "the end"]


def test_user_code_that_closes_the_descriptor_too_does_not_fail_by_an_entry() -> None:
    program = """if True:
        import logging, os, sys
        from elasticdl.rpc.logs import log_to_stdout
        log_to_stdout()
        sys.stdout.close()
        os.close(1)
        logging.info("after")
        sys.stderr.write("alive")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "alive")


def test_letters_that_the_locale_lacks_cost_no_entry() -> None:
    program = 'from elasticdl.rpc.logs import *; log_to_stdout(); logging.error("there is no file\\n  → name it")'
    for log_format in ("", "json"):
        environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "ELASTICDL_LOG_FORMAT": log_format}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
        assert rb"\u2192 name it" in done.stdout
        assert done.stderr == b""


def test_a_process_whose_log_has_become_a_pipe_writes_its_entries(tmp_path: Path) -> None:
    """As in each process of a worker with several: it begins with the log of the pod."""
    program = (
        "import os, sys; reader, writer = os.pipe(); kept = os.dup(2); os.dup2(writer, 1); os.dup2(writer, 2)\n"
        "from elasticdl.rpc.logs import *; log_to_stdout(); logging.error('file → name it')\n"
        "os.write(kept, os.read(reader, 1000))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    with open(tmp_path / "log", "w") as log:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, stdout=log, stderr=log, timeout=60, check=False
        )
    assert done.returncode == 0
    assert r"ERROR file \u2192 name it" in (tmp_path / "log").read_text()


def test_of_a_very_long_entry_both_ends_are_logged() -> None:
    program = (
        "from elasticdl.rpc.logs import *; log_to_stdout()\n"
        "logging.error('begin %s the end', 'x=1;' * (5 << 20)); raise ValueError('begin ' + 'x=1;' * (5 << 20))"
    )
    for log_format in ("", "json"):
        environment = {**os.environ, "ELASTICDL_LOG_FORMAT": log_format}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
        entry, rest = done.stdout.split(b"\n", 1)
        assert b"begin x=1;" in entry
        assert b" the end" in entry
        assert len(entry) < 1 << 19
        assert len(rest) + len(done.stderr) < 1 << 20
