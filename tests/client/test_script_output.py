"""The output of rank 0 of a local job is shown, and nothing of its logs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from elasticdl_client.job_status import JobStatus, PodStatus
from elasticdl_client.jobs.log_files import GrowingFile
from elasticdl_client.script_output import MAX_LINES, LogFiles, ScriptOutput, Shown

PREFIX = "elasticdl-job-"


def status(*running: int, ended: tuple[int, ...] = (), world: tuple[int, ...] = (), **fields: Any) -> JobStatus:
    phases = {**dict.fromkeys(ended, "Succeeded"), **dict.fromkeys(running, "Running")}
    pods = tuple(PodStatus(f"{PREFIX}worker-{k}", "worker", phase) for k, phase in phases.items())
    return JobStatus("job", pods=(PodStatus(f"{PREFIX}ps-0", "ps", "Running"), *pods), world=world, **fields)


def show(shown: ScriptOutput, now: JobStatus) -> list[str]:
    """The lines up to now, after the time for which they are kept back."""
    lines = shown.lines(now)
    return lines + shown.lines(dataclasses.replace(now, updated_at=now.updated_at + 2.0))


def append(logs: Path, worker: int, text: str) -> None:
    with (logs / f"{PREFIX}worker-{worker}.log").open("a") as file:
        file.write(text)


def test_lines_of_the_first_worker_come_as_they_are_printed(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    assert show(shown, status(0)) == []
    append(tmp_path, 0, "2026-11-24 15:52:15,958 INFO Starting worker 0\nhello\nhalf a ")
    assert show(shown, status(0)) == ["hello"]
    append(tmp_path, 0, "line\n  0%|  |\r 50%|# |\r100%|##|\n\n")
    assert show(shown, status(0)) == ["half a line", "100%|##|"]
    append(tmp_path, 0, "last words")
    assert shown.lines(status(), last=True) == ["last words"]


def test_of_several_workers_rank_0_is_shown_and_named_and_its_successor_after_it(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 3)
    for worker in (1, 2):
        append(tmp_path, worker, f"I am {worker}\n")
    assert show(shown, status(1, 2)) == ["[worker-1] I am 1"]
    append(tmp_path, 1, "bye\n")
    assert show(shown, status(2)) == ["[worker-1] bye"]
    append(tmp_path, 2, "my turn\n")
    assert show(shown, status(2)) == ["[worker-2] my turn"]
    append(tmp_path, 3, "rank 0 of the group\n")
    assert show(shown, status(2, 3, world=(3, 2))) == []  # only what it prints from now on
    append(tmp_path, 3, "a step\n")
    assert show(shown, status(2, 3, world=(3, 2))) == ["[worker-3] a step"]


def test_a_worker_that_has_ended_before_it_was_seen_is_shown_at_the_end(tmp_path: Path) -> None:
    append(tmp_path, 0, "")
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, "that was quick\n")
    assert shown.lines(status(ended=(0,)), last=True) == ["that was quick"]


def test_what_was_printed_before_a_job_is_resumed_is_not_shown_again(tmp_path: Path) -> None:
    append(tmp_path, 0, "old\n")
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, "---- started again 2026-11-24 15:00:00 ----\nnew\n")
    assert show(shown, status(0)) == ["new"]


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-24 15:28:43.123456: I tensorflow/core/util/port.cc:113] oneDNN custom operations are on.",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1732462123.123456   12345 service.cc:148] XLA service initialized",
        "[W1124 15:28:43.123456789 socket.cpp:755] [c10d] The client socket has failed to connect",
        "/x/site-packages/keras/src/saving.py:395: UserWarning: You are saving\n  warnings.warn(",
        "2026-11-24 15:00:00,000 ERROR it failed\nTraceback (most recent call last):\n  File a.py\n\nValueError: x",
        "Traceback (most recent call last):\n  File a.py\nelasticdl_client.errors.JobError: x\n  → do y",
        "2026-11-24 15:00:00,000 ERROR DataError: x\n  → do y",
        (
            "2026-11-24 15:00:00,000 ERROR Traceback (most recent call last):\n  File a.py\n    f()\n    ^^^\n"
            "UnimplementedError: Graph execution error:\n\nDetected at node a defined at (most recent call last):\n"
            "  File b.py\nno cast\n\t [[{{node a}}]]\n\nThe above exception was the direct cause of the following "
            "exception:\n\nTraceback (most recent call last):\n  File a.py\nLabelError: x\n  → do y"
        ),
    ],
)
def test_logs_warnings_and_tracebacks_stay_in_the_log(tmp_path: Path, text: str) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, f"before\n{text}\nafter\n")
    assert show(shown, status(0)) == ["before", "after"]


def test_a_graph_error_without_its_last_line_hides_no_more_than_the_next_log_entry(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    error = (
        "Traceback (most recent call last):\n  File a.py\nInternalError: Graph execution error:\n\nDetected at node a"
    )
    append(tmp_path, 0, f"before\n{error}\n2026-11-24 15:00:00,000 INFO next\nafter\n")
    assert show(shown, status(0)) == ["before", "after"]


def test_a_flood_of_lines_is_cut_and_says_where_the_rest_is(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, "".join(f"step {step}\n" for step in range(1000)))
    lines = show(shown, status(0))
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == f"… {1000 - MAX_LINES} lines more: `elasticdl logs` with --pod=worker-0"


def test_the_whole_of_rank_0_has_its_log_entries_and_each_line_but_no_traceback(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1, Shown.RANK_0)
    lines = ["2026-11-24 15:00:00,000 ERROR of the script", "", *(f"step {step}" for step in range(3 * MAX_LINES))]
    append(tmp_path, 0, "\n".join([*lines, "Traceback (most recent call last):", "  File a.py", "ValueError: x", ""]))
    assert show(shown, status(0)) == lines


def test_of_all_workers_each_line_is_shown_from_the_first_one_on(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 2, Shown.ALL_WORKERS)
    append(tmp_path, 0, "zero\n")
    append(tmp_path, 1, "one\n")
    assert show(shown, status(0, 1)) == ["[worker-0] zero", "[worker-1] one"]
    append(tmp_path, 0, "bye\n")
    append(tmp_path, 2, "two\n")
    assert sorted(show(shown, status(1, 2))) == ["[worker-0] bye", "[worker-2] two"]


def test_of_a_worker_of_several_processes_rank_0_is_shown_or_each_line_after_its_process(tmp_path: Path) -> None:
    rank_0 = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    everything = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 2, Shown.ALL_WORKERS)
    text = "[process 1] one\n[process 0] 2026-11-24 15:52:15,958 INFO of ours\n[process 0] 9%\r[process 0] 10%\n"
    append(tmp_path, 0, f"{text}[process 0] zero\n2026-11-24 15:52:15,959 ERROR Process 1 has ended\none\n")
    now = status(0, world=(1, 0), processes_per_worker=2)
    assert show(rank_0, now) == ["one"]
    lines = ["[process 1] one", "[process 0] 2026-11-24 15:52:15,958 INFO of ours", "[process 0] 10%"]
    assert show(everything, now) == [f"[worker-0] {line}" for line in [*lines, "[process 0] zero"]]


def test_of_the_json_entries_of_several_processes_those_of_rank_0_are_shown(tmp_path: Path) -> None:
    rank_0 = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1, Shown.RANK_0)
    everything = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1, Shown.ALL_WORKERS)
    fields = {"time": "2026-11-24T15:52:15.958+00:00", "logger": 'a "process": 0, b', "pod": "worker-0"}
    entries = [json.dumps({**fields, "process": process, "message": "m"}) for process in (0, 1)]
    entries.append(json.dumps({**fields, "message": "of the main process"}))
    append(tmp_path, 0, "\n".join([*entries, ""]))
    now = status(0, world=(1, 0), processes_per_worker=2)
    assert show(rank_0, now) == entries[1:]
    assert show(everything, now) == entries


def test_an_error_that_the_job_tells_is_not_shown_a_second_time(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, "epoch 1\nthe rate is wrong\n")
    assert shown.lines(status(0, updated_at=1.0)) == []
    failed = PodStatus(f"{PREFIX}worker-0", "worker", "Failed", "exit code 1: the rate is wrong")
    assert shown.lines(JobStatus("job", pods=(failed,), updated_at=3.0)) == ["epoch 1"]


def test_a_progress_bar_that_is_written_over_for_hours_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.touch()
    file = GrowingFile(path, keeps_overwritten=False)
    with path.open("ab", buffering=0) as log:
        for percent in range(100):
            log.write(f"\r{percent}%|{'#' * 2000}".encode())
            assert file.lines(last=False) == []
            assert len(file._rest) <= 1 << 16
        log.write("\rdone é\nnext\n".encode())
    assert [line.rpartition("\r")[2] for line in file.lines(last=True)] == ["done é", "next"]


def test_a_long_line_without_any_end_comes_in_parts_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_bytes(b"x" * 200_000)
    file = GrowingFile(path)
    found = file.lines(last=False)
    assert "".join(found + file.lines(last=True)) == "x" * 200_000
    assert found


def test_lines_come_though_the_clock_of_the_machine_is_set_back(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, "hello\n")
    assert shown.lines(status(0, updated_at=5000.0)) == []
    assert shown.lines(status(0, updated_at=1400.0)) == ["hello"]


def test_a_line_is_left_out_only_if_a_message_has_it_as_a_line_or_as_its_error(tmp_path: Path) -> None:
    shown = ScriptOutput(LogFiles(tmp_path, PREFIX), PREFIX, 1)
    append(tmp_path, 0, "1\nworkers\ncode\nthe rate is wrong\nValueError: broken\n")
    lost = PodStatus(f"{PREFIX}worker-1", "worker", "Failed", "Error, exit code 1; its last lines:\nthe rate is wrong)")
    now = status(0, message="waiting for workers; exit code 1: ValueError: broken")
    assert show(shown, dataclasses.replace(now, pods=(*now.pods, lost))) == ["1", "workers", "code"]
