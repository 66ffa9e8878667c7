"""A worker's pod of several processes: the arguments of each, and their common end.  Real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from elasticdl.cluster.cluster import explained
from elasticdl.worker.process import exit_code_of
from tests.lines import next_line

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a pod whose processes run a module with some code, in which `P` is the number of the process."""
    pods: list[subprocess.Popen[bytes]] = []

    def started(
        code: str, number: int = 2, num_gpus: int = 0, module: Sequence[str] = ("of_a_user", "word"), **environment: str
    ) -> subprocess.Popen[bytes]:
        head = 'import os, signal, sys\nP = int(os.environ["ELASTICDL_PROCESS"])\n'
        (tmp_path / "of_a_user.py").write_text(head + textwrap.dedent(code))
        inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        env = {**inherited, "WORKER_ID": "6", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **environment}
        command = [sys.executable, "-m", "elasticdl.worker.processes", str(number), str(num_gpus), *module]
        pods.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env))
        return pods[-1]

    yield started
    for pod in pods:
        pod.kill()
        pod.wait()
        assert pod.stdout is not None
        pod.stdout.close()


def lines_of(pod: subprocess.Popen[bytes]) -> list[str]:
    """All that the pod has printed, once it has ended."""
    return pod.communicate()[0].decode().splitlines()


def next_lines(pod: subprocess.Popen[bytes], number: int) -> list[str]:
    """Return this number of lines, in order of their text."""
    return sorted(next_line(pod).rstrip("\n") for _ in range(number))


def test_each_process_has_an_id_and_gpus_of_its_own(start: Start) -> None:
    code = 'print(os.environ["WORKER_ID"], os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:])'
    pod = start(code, CUDA_VISIBLE_DEVICES="4,GPU-5e1f,1,0")
    assert sorted(lines_of(pod)) == ["[process 0] 6 4,GPU-5e1f word", "[process 1] 7 1,0 word"]
    assert pod.returncode == 0


def test_each_process_becomes_a_command_of_the_users(start: Start, tmp_path: Path) -> None:
    command = ("elasticdl.worker.command", str(tmp_path), "python", "of_a_user.py", "word")
    pod = start('print(os.environ["WORKER_ID"], sys.argv[1])', module=command)
    assert sorted(lines_of(pod)) == ["[process 0] 6 word", "[process 1] 7 word"]


def test_a_command_whose_directory_is_not_there_says_so(start: Start, tmp_path: Path) -> None:
    """On Kubernetes it is /model_zoo by default, which an image of the user's own may lack."""
    pod = start("", module=("elasticdl.worker.command", str(tmp_path / "zoo"), "python", "of_a_user.py"))
    assert f"the directory {tmp_path / 'zoo'} cannot be entered: No such file or directory" in "".join(lines_of(pod))


def test_devices_of_another_vendor_are_those_that_the_pod_asks_for(start: Start) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has GPUs of NVIDIA")
    pod = start('print(os.environ["CUDA_VISIBLE_DEVICES"])', num_gpus=2)
    assert sorted(lines_of(pod)) == ["[process 0] 0", "[process 1] 1"]


def test_gpus_that_cannot_be_shared_out_end_the_pod_with_the_reason(start: Start) -> None:
    pod = start("print(P)", CUDA_VISIBLE_DEVICES="0,1,2")
    assert "3 GPUs" in "".join(lines_of(pod))
    assert pod.returncode == 1


def test_a_pod_that_sees_fewer_gpus_than_it_asks_for_ends_with_the_reason(start: Start) -> None:
    pod = start("print(P)", num_gpus=2, CUDA_VISIBLE_DEVICES="3")
    assert "asks for 2 GPUs and sees 1: 3" in "".join(lines_of(pod))
    assert pod.returncode == 1


def test_a_long_line_comes_in_pieces_that_begin_with_their_process(start: Start) -> None:
    lines = lines_of(start('print("ab" * 100_000 if P else "short")'))
    assert all(line.startswith("[process ") for line in lines)
    assert "".join(line.removeprefix("[process 1] ") for line in lines if "ab" in line) == "ab" * 100_000


def test_a_process_that_prints_without_end_does_not_hold_up_the_end_of_the_pod(start: Start) -> None:
    pod = start("""
        if P == 1:
            signal.pause()
        while True:
            os.write(1, b"x\\n" * 32768)
    """)
    assert pod.stdout is not None
    pod.stdout.read(1 << 16)  # it prints
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGUSR1)
    while os.read(pod.stdout.fileno(), 1 << 20):
        pass
    assert pod.wait() == 128 + signal.SIGUSR1


def test_a_process_that_fails_ends_the_pod_with_its_code_and_its_last_lines(start: Start) -> None:
    pod = start("""
        if P == 1:
            print("before")
            raise SystemExit("it went wrong")
        signal.pause()
    """)
    lines = lines_of(pod)
    assert pod.returncode == 1
    assert lines[:2] == ["[process 1] before", "[process 1] it went wrong"]
    assert lines[-2:] == ["before", "it went wrong"]  # where the reason of a pod's end is looked for


def test_the_error_of_a_process_is_why_the_pod_has_ended(start: Start) -> None:
    pod = start("""
        if P == 0:
            raise ValueError("no such column")
        signal.pause()
    """)
    text = explained("exit code 1", "\n".join(lines_of(pod)))
    assert text.startswith("exit code 1: ValueError: no such column\n")
    assert "of_a_user.py" in text


def test_a_process_that_is_killed_ends_the_pod(start: Start) -> None:
    pod = start("print(os.getpid()); signal.pause()")
    os.kill(int(next_lines(pod, 2)[0].split()[-1]), signal.SIGKILL)
    lines_of(pod)
    assert pod.returncode == 128 + signal.SIGKILL


def test_the_pod_ends_well_when_all_have(start: Start) -> None:
    pod = start("""
        if P == 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            print("ready")
            signal.sigwait([signal.SIGUSR1])
            print("last")
    """)
    assert next_lines(pod, 1) == ["[process 1] ready"]
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGUSR1)
    assert lines_of(pod) == ["[process 1] last"]
    assert pod.returncode == 0


def test_sigterm_lets_each_process_end_in_its_own_way(start: Start) -> None:
    pod = start("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("told") or 143))
        print("ready")
        signal.pause()
    """)
    next_lines(pod, 2)
    pod.send_signal(signal.SIGTERM)
    assert [line for line in sorted(lines_of(pod)) if "told" in line] == ["[process 0] told", "[process 1] told"]
    assert pod.returncode == 143


def test_no_process_outlives_the_main_one(start: Start) -> None:
    pod = start("print(os.getpid()); signal.pause()")
    processes = [os.pidfd_open(int(line.split()[-1])) for line in next_lines(pod, 2)]
    pod.kill()
    for process in processes:
        select.select([process], [], [])  # until it has ended
        os.close(process)


def test_entries_of_a_json_log_say_themselves_which_process_they_are_of(start: Start) -> None:
    code = 'from elasticdl.rpc.logs import log_to_stdout; log_to_stdout(); import logging; logging.warning("it")'
    lines = lines_of(start(code, ELASTICDL_LOG_FORMAT="json"))
    assert sorted(line.partition('"process": ')[2][:1] for line in lines) == ["0", "1"]
    assert all(line.startswith('{"time": ') for line in lines)


@pytest.mark.parametrize(("code", "found"), [(0, 1), (None, 1), ("why", 1), (3, 3), (-1, 255), (256, 1)])
def test_a_worker_that_its_users_code_ends_has_never_the_code_of_success(code: object, found: int) -> None:
    assert exit_code_of(SystemExit(code)) == found
