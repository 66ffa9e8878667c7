"""The error of a process that failed: its own error with the user's lines, read from real tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import elasticdl
from elasticdl.cluster.cluster import explained, frames_of_user

_HANDLED = """
import sys, traceback
try:
    int("x")
except ValueError:
    traceback.print_exc()
for n in range(20):
    print(n, file=sys.stderr)
sys.exit("the rate is wrong")
"""


def end_of(tmp_path: Path, code: str) -> str:
    """How a script's end is told."""
    script = tmp_path / "script.py"
    script.write_text(code)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    return explained(f"exit code {ended.returncode}", ended.stdout + ended.stderr).replace(str(tmp_path), "")


def test_an_error_is_reported_with_the_lines_of_the_user_and_without_those_of_libraries(tmp_path: Path) -> None:
    error = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    code = "import json\n\ndef read(text):\n    return json.loads(text)\n\nprint('begin')\nread('{')\n"
    assert end_of(tmp_path, code).splitlines() == [
        f"exit code 1: json.decoder.JSONDecodeError: {error}",
        '  File "/script.py", line 7, in <module>',
        "    read('{')",
        '  File "/script.py", line 4, in read',
        "    return json.loads(text)",
    ]


def test_frames_of_ours_are_left_out_and_our_errors_have_no_name(tmp_path: Path) -> None:
    code = "from elasticdl.rpc.job_secret import whole_spec\nwhole_spec('{')\n"
    assert end_of(tmp_path, code).splitlines()[1:] == [
        '  File "/script.py", line 2, in <module>',
        "    whole_spec('{')",
    ]
    code = "from elasticdl_client.errors import JobError\nraise JobError('what', 'do')\n"
    told = end_of(tmp_path, code)
    assert told.startswith("exit code 1: what\n  → do\n")
    assert told.count("what") == 2  # the second in the line of code


def test_of_a_chain_the_last_error_is_reported_and_its_text_of_many_lines_whole(tmp_path: Path) -> None:
    code = "try:\n    int('x')\nexcept ValueError as error:\n    raise TypeError('first\\nsecond') from error\n"
    assert end_of(tmp_path, code).splitlines() == [
        "exit code 1: TypeError: first",
        "second",
        '  File "/script.py", line 4, in <module>',
        "    raise TypeError('first\\nsecond') from error",
    ]


def test_a_syntax_error_is_reported_with_its_line(tmp_path: Path) -> None:
    told = end_of(tmp_path, "x = 1\ndef (\n").splitlines()
    assert told[0] == "exit code 1: SyntaxError: invalid syntax"
    assert told[1:] == ['  File "/script.py", line 2', "    def ("]


def test_what_is_said_while_the_process_ends_is_not_why_it_ended(tmp_path: Path) -> None:
    code = "import atexit\n\ndef end():\n    raise KeyError('late')\n\natexit.register(end)\nint('x')\n"
    told = end_of(tmp_path, code)
    assert told.startswith("exit code 1: ValueError: invalid literal for int() with base 10: 'x'\n")
    assert "late" not in told


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit('the rate is wrong')",
        _HANDLED,
    ],
)
def test_without_an_error_the_last_lines_are_reported(code: str, tmp_path: Path) -> None:
    told = end_of(tmp_path, code)
    assert told.startswith("exit code 1; its last lines:\n")
    assert told.endswith("\nthe rate is wrong")
    assert len(told.splitlines()) <= 11


def test_of_an_error_in_a_process_of_a_loader_the_users_frame_is_kept() -> None:
    path = f"{elasticdl.__path__[0]}/api/pytorch/pipeline.py"
    outer = f'Traceback (most recent call last):\n  File "{path}", line 1, in get\n    next(self._batches)\n'
    inner = f'  File "{path}", line 2, in _sample\n    return source[index]\n'
    inner += (
        '  File "/srv/me/train.py", line 7, in __getitem__\n    raise ValueError("no")\n    ^^^^^\nValueError: no\n'
    )
    text = f"{outer}ValueError: Caught ValueError in process 0.\nOriginal Traceback (most recent call last):\n{inner}"
    frame = '  File "/srv/me/train.py", line 7, in __getitem__\n    raise ValueError("no")'
    assert frames_of_user(text) == frame
    assert explained("exit code 1", text) == f"exit code 1: ValueError: no\n{frame}"


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    path = f"{elasticdl.__path__[0]}/cluster/agent.py"
    log = f'Traceback (most recent call last):\n  File "{path}", line 1, in main\n    main()\nKeyError: 1\n'
    assert explained("exit code 1", log) == f"exit code 1; its last lines:\n{log.rstrip()}"
    assert frames_of_user(log) == log
    assert explained("exit code 1", "") == "exit code 1"
