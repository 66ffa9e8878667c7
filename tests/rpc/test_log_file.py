"""--log_file_path: a pod's output is in its log and in a file, and the file never costs the pod anything."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.master.small_disk import small_disk

WRAPPED = [sys.executable, "-m", "elasticdl.rpc.log_file"]


def start(file: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*WRAPPED, str(file), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_output_and_errors_are_in_the_log_and_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "train.log"
    pod = start(file, "sh", "-c", "echo out; echo err >&2; printf last; exit 3")
    output, _ = pod.communicate(timeout=30)
    assert (pod.returncode, output) == (3, b"out\nerr\nlast")
    assert file.read_bytes() == output


def test_the_next_life_continues_in_the_same_file(tmp_path: Path) -> None:
    for word in ("first", "second"):
        start(tmp_path / "log", "echo", word).communicate(timeout=30)
    first, between, second = (tmp_path / "log").read_text().splitlines()
    assert (first, second) == ("first", "second")
    assert between.startswith("---- started again")


def test_signals_reach_the_command_and_its_end_by_one_is_reported(tmp_path: Path) -> None:
    code = "trap 'echo asked; exit 9' TERM; echo ready; while :; do read -t 0.1 _ < /dev/zero; done"
    pod = start(tmp_path / "log", "bash", "-c", code)
    assert pod.stdout is not None
    assert pod.stdout.readline() == b"ready\n"
    pod.send_signal(signal.SIGTERM)
    assert pod.communicate(timeout=30)[0] == b"asked\n"
    assert pod.returncode == 9
    pod = start(tmp_path / "log", "sh", "-c", "kill -KILL $$")
    pod.communicate(timeout=30)
    assert pod.returncode == 137


def test_a_child_that_outlives_the_command_does_not_keep_the_pod(tmp_path: Path) -> None:
    pod = start(tmp_path / "log", "sh", "-c", "sleep 300 & echo $!")
    assert pod.stdout is not None
    left = int(pod.stdout.readline())
    assert pod.wait(30) == 0
    subprocess.run(["kill", str(left)], check=True)
    pod.communicate()


def test_a_full_disk_costs_one_line_and_not_the_job(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=64) as disk:
        pod = start(disk / "log", "sh", "-c", "seq 1 40000; exit 5")
        output, _ = pod.communicate(timeout=60)
    assert pod.returncode == 5
    lines = output.decode().splitlines()
    assert len(lines) == 40001
    (said,) = (line for line in lines if not line.isdecimal())
    assert "No space left on device" in said
    assert said.startswith("--log_file_path")


def test_a_place_that_cannot_be_written_costs_one_line_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    pod = start(tmp_path / "taken" / "log", "echo", "works")
    output, _ = pod.communicate(timeout=30)
    assert pod.returncode == 0
    assert b"works\n" in output
    assert output.count(b"--log_file_path") == 1


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    pod = start(tmp_path / "log", "no-such-command")
    output, _ = pod.communicate(timeout=30)
    assert pod.returncode == 127
    assert b"no-such-command" in output
