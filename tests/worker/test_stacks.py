"""A worker's report of its threads: the user's line first, bounded, native frames where py-spy is installed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl.activities import Activity
from elasticdl.worker import stacks
from elasticdl.worker.stacks import MAX_TEXT, StackFrame, ThreadStack, describe, take

THREADING = StackFrame(threading.__file__, 327, "Condition.wait")
OURS = StackFrame(stacks.__file__, 1, "take")
LOSS, FEED = StackFrame("/zoo/net.py", 31, "loss"), StackFrame("/zoo/net.py", 60, "feed")


@pytest.fixture
def stuck_thread() -> Iterator[threading.Thread]:
    release = threading.Event()
    thread = threading.Thread(target=lambda: wait_in_user_code(release), name="pipeline", daemon=True)
    thread.start()
    assert thread.ident is not None
    deadline = time.monotonic() + 30
    while (code := sys._current_frames()[thread.ident].f_code) is not threading.Condition.wait.__code__:
        assert time.monotonic() < deadline, code  # it is on its way there
    yield thread
    release.set()
    thread.join()


def wait_in_user_code(release: threading.Event) -> None:
    release.wait()


def test_the_line_of_user_code_is_found_under_frames_of_libraries(stuck_thread: threading.Thread) -> None:
    taken = take(Activity.INPUT)
    assert taken.where.startswith(f"{__file__}:")
    assert taken.where.endswith("in wait_in_user_code")
    assert "thread pipeline:" in taken.text
    assert taken.text.index("wait_in_user_code") > taken.text.index("Event.wait")


def test_the_calling_thread_is_left_out() -> None:
    assert "in take" not in take(Activity.COMPUTE).text


def test_of_two_threads_in_user_code_the_activity_says_which_one_hangs() -> None:
    main = ThreadStack("MainThread", True, (THREADING, LOSS, OURS))
    other = ThreadStack("pipeline", False, (FEED, OURS))
    assert describe([other, main], Activity.COMPUTE).where == "/zoo/net.py:31 in loss"
    assert describe([main, other], Activity.INPUT).where == "/zoo/net.py:60 in feed"


def test_a_loop_that_waits_for_us_is_not_what_hangs() -> None:
    """The main thread of a script is always in user code: here it waits for our input, which waits for its feed."""
    main = ThreadStack("MainThread", True, (THREADING, OURS, LOSS))
    other = ThreadStack("pipeline", False, (FEED, OURS))
    assert describe([main, other], Activity.COMPUTE).where == "/zoo/net.py:60 in feed"


def test_without_user_code_there_is_no_line() -> None:
    taken = describe([ThreadStack("MainThread", True, (THREADING, OURS))], Activity.COMPUTE)
    assert taken.where == ""
    assert taken.text.startswith("thread MainThread:\n")
    assert describe([], Activity.COMPUTE).text == ""


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/usr/src/app/train.py", True),
        ("/model_zoo/net.py", True),
        (threading.__file__, False),
        ("<frozen runpy>", False),
        ("/usr/venv/lib/python3.12/site-packages/keras/src/trainer.py", False),
        (stacks.__file__, False),
    ],
)
def test_whose_code_a_file_is(file: str, is_users: bool) -> None:
    assert (StackFrame(file, 1, "f").origin is stacks.Origin.USER) is is_users


def test_many_deep_stacks_are_bounded_and_user_code_comes_first() -> None:
    deep = [StackFrame(f"/usr/lib/python3/site-packages/{'x' * 80}.py", n, "f") for n in range(500)]
    others = [ThreadStack(f"pool-{n}", False, deep) for n in range(50)]
    taken = describe([*others, ThreadStack("MainThread", True, (LOSS, *deep))], Activity.COMPUTE)
    assert len(taken.text) <= MAX_TEXT
    assert taken.text.startswith("thread MainThread:\n  /zoo/net.py:31 in loss\n")
    assert taken.text.endswith("\n…")


def test_native_stacks_follow_where_py_spy_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text('#!/bin/sh\necho "native of $*"\n')
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    text = take(Activity.COMPUTE).text
    assert "native stacks (py-spy):\nnative of dump --native --pid " in text
    py_spy.write_text("#!/bin/sh\necho Permission denied >&2; exit 1\n")
    assert take(Activity.COMPUTE).text.endswith("py-spy has failed: Permission denied")
