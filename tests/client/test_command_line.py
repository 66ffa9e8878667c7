"""The command `elasticdl` as a process: help, errors, exit codes, and what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl_client import help as help_text
from elasticdl_client.job_spec import flag_fields

ROOT = Path(__file__).resolve().parents[2]


def elasticdl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_arguments_it_prints_help_and_exits_1() -> None:
    done = elasticdl()
    assert done.returncode == 1
    assert "train" in done.stderr
    assert not done.stdout


def test_ctrl_c_before_a_job_has_started_leaves_no_traceback(tmp_path: Path) -> None:
    flags = tmp_path / "job.yaml"
    os.mkfifo(flags)
    command = [sys.executable, "-m", "elasticdl_client.main", "train", "-f", str(flags)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        with flags.open("w"):  # once the client reads
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGINT, "")


def test_ctrl_c_while_the_client_is_imported_leaves_no_traceback() -> None:
    code = (
        "import signal, sys; from elasticdl_client.__main__ import main\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'elasticdl_client.job_spec': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts()); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    code = (
        f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['elasticdl', '--help']\n{code}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")  # ignored, as in the background of a shell script


def test_help_of_a_command_exits_0() -> None:
    done = elasticdl("train", "--job_name=x", "--help")
    assert done.returncode == 0
    assert "--minibatch_size" in done.stdout


def test_a_reader_of_the_help_that_leaves_gets_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "train", "--help"],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_our_characters_shows_others_for_them(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "logs", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"worker-0, ps-1, ?" in done.stdout


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "analyze"])
def test_help_lists_every_flag_with_its_default_in_readable_lines(command: str) -> None:
    lines = help_text.of_command(command, 100).splitlines()
    assert max(map(len, lines)) <= 100
    heads = {line.split()[0] for line in lines if line.startswith("  --")}
    assert heads == {f"--{name}" for name in flag_fields(command)}
    text = "\n".join(lines)
    assert ("Records per minibatch of a worker. [64]" in text) == (command != "analyze")
    assert ("[ParameterServerStrategy]" in text) == (command != "analyze")


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["trian"], "There is no command 'trian'", "elasticdl train"),
        (["forget", "--num_workers=3"], "There is no command 'forget'", "The commands are train"),
        (["train", "--num_worker=3"], "Unknown flag --num_worker", "Did you mean --num_workers?"),
        (["train", "--num_workers=two"], "--num_workers takes a whole number, not 'two'", "--num_workers=2"),
        (["train", "data"], "'data' is not a flag", "--name=value"),
        (["train"], "needs --job_name", "--job_name=my-job"),
    ],
)
def test_a_mistake_is_said_in_two_lines_without_traceback(arguments: list[str], what: str, hint: str) -> None:
    done = elasticdl(*arguments)
    assert done.returncode == 2
    first, second = done.stderr.strip().splitlines()
    assert first.startswith("error: ")
    assert what in first
    assert second.startswith("  → ")
    assert hint in second


def test_values_reach_the_checks_as_they_were_typed(tmp_path: Path) -> None:
    zoo = str(tmp_path / "1e-3,(None)")
    done = elasticdl(
        "train", "--runtime=local", "--job_name=001", "--model_def=m.f", "--training_data=/d", "--model_zoo", zoo
    )
    assert f"The model zoo {zoo} does not exist." in done.stderr


def test_flags_without_effect_are_named() -> None:
    done = elasticdl(
        *("train", "--runtime=local", "--job_name=j", "--model_def=m.f", "--training_data=/d", "--model_zoo=/nowhere"),
        *("--volume=claim_name=c,mount_path=/d", "--need_task_manager=true"),
    )
    assert "note: --volume: for Kubernetes, without effect with --runtime=local." in done.stderr
    assert "note: --need_task_manager is not needed any more" in done.stderr


def test_the_client_imports_no_framework_no_numpy_and_no_grpc() -> None:
    code = (
        "import sys, elasticdl_client.main, elasticdl_client.local, elasticdl_client.progress\n"
        "print(sorted({'numpy', 'grpc', 'tensorflow', 'keras', 'torch', 'yaml', 'rich', 'kubernetes', 'elasticdl'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
