"""Scripts that `elasticdl run` starts, on the local runtime: exact, with their output, arguments and errors."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from script_waits import kept_from_beginning

from elasticdl.protocol import Role
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.scenarios import coverage_of

HERE = Path(__file__).parent
TORCH, NUMPY = HERE / "pytorch_script_of_a_user.py", HERE / "script_of_a_user.py"


def job_of(
    tmp_path: Path, script: Path | str, *arguments: str, switches: tuple[str, ...] = (), **flags: object
) -> LocalJob:
    return LocalJob(tmp_path / "job", flags, "run", arguments=(*switches, str(script), *arguments))


def kill_worker(job: LocalJob, number: int) -> None:
    victim = next(pod for pod in job.pods(Role.WORKER) if pod.index == number)
    os.kill(victim.pid, signal.SIGKILL)


def test_a_pytorch_script_is_exact_though_a_worker_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    flags = {"num_workers": 2, "min_workers": 2, "num_minibatches_per_task": 4}
    job = job_of(tmp_path, TORCH, str(notes), "--hold-worker=1", "--hold-at=9", **flags).start()
    job.wait_until("worker 1 to hold", (notes / "held").exists, 90)
    kill_worker(job, 1)
    assert job.wait(150) == 0, job.story()
    assert [(c.records, c.committed, c.repeated, c.lost) for c in coverage_of(job)] == [(400, 400, 0, 0)] * 2
    digests: dict[int, set[str]] = {}
    for path in notes.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, digest, *_ = line.split(" ")
            digests.setdefault(int(step), set()).add(digest)
    assert {len(found) for found in digests.values()} == {1}, "all workers have the same model after each step"
    spec = json.loads((tmp_path / "job" / "spec.json").read_text())
    assert (spec["job_name"], spec["distribution_strategy"]) == ("pytorch-script-of-a-user", "AllReduceStrategy")


def test_a_numpy_script_shares_its_records_though_a_worker_is_killed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    job = job_of(tmp_path, NUMPY, str(notes), "--size", "100", "--hold-at", "3", switches=("--all",), num_workers=2)
    with kept_from_beginning(notes, "1"):
        job.start()
        job.wait_until("worker 0 to hold a minibatch", (notes / "held").exists, 60)
    kill_worker(job, 0)
    assert job.wait(120) == 0, job.story()
    names: Counter[tuple[int, int, int]] = Counter()
    for path in notes.glob("worker-*"):
        names.update(tuple(json.loads(line)[:3]) for line in path.read_text().splitlines())
    assert set(names.values()) == {1}
    assert len(names) == 2 * 13
    assert [(c.committed, c.lost) for c in coverage_of(job)] == [(100, 0)] * 2
    shown = {line.partition(" ")[0] for line in job.output if line.endswith("of 2: 13 minibatches")}
    assert shown >= {"[worker-0]", "[worker-1]"}, job.story()


def test_arguments_and_the_working_directory_are_the_users_and_the_output_is_whole(tmp_path: Path) -> None:
    directory = tmp_path / "a project"
    (directory / "scripts").mkdir(parents=True)
    (directory / "scripts" / "beside.py").write_text("WORD = 'beside'\n")
    (directory / "scripts" / "Étude 2.py").write_text(
        "import logging, os, sys, beside\n"
        "logging.basicConfig(format='%(asctime)s %(levelname)s %(message)s', stream=sys.stdout)\n"
        "print([beside.WORD, os.getcwd(), *sys.argv[1:]])\n"
        "logging.error('a log entry')\n"
        "for step in range(50):\n"
        "    print('step', step)\n"
    )
    given = ("--num_workers=7", "--", "a b", "q'\"", "ü$HOME", "", "--help", "-m", "--lr", "3e-4")
    job = job_of(tmp_path, "scripts/Étude 2.py", *given, num_workers=1)
    job.launcher = ("env", f"--chdir={directory}", f"PYTHONPATH={REPOSITORY}")
    assert job.start().wait(60) == 0, job.story()
    assert repr(["beside", str(directory), *given]) in job.output, job.story()
    assert [line for line in job.output if line.startswith("step ")] == [f"step {step}" for step in range(50)]
    assert any(line.endswith(" ERROR a log entry") for line in job.output)
    assert json.loads((tmp_path / "job" / "spec.json").read_text())["job_name"] == "etude-2"


def test_a_module_is_run_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "recipes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("WORD = 'of a package'\n")
    (package / "train.py").write_text("import sys\nfrom .words import WORD\nprint(__name__, WORD, *sys.argv[1:])\n")
    job = job_of(tmp_path, "recipes.train", "-m", switches=("-m",), num_workers=1, model_zoo=tmp_path)
    assert job.start().wait(60) == 0, job.story()
    assert "__main__ of a package -m" in job.output


def test_an_error_of_the_script_is_reported_once_with_its_line_and_its_exit_code_is_the_jobs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\n\n\ndef read() -> object:\n    return json.loads(1)\n\n\nread()\n")
    job = job_of(tmp_path, script, num_workers=1).start()
    assert job.wait(60) == 1, job.story()
    output = "\n".join(job.output)
    assert output.count("TypeError: the JSON object must be") == 1, output
    assert f'File "{script}", line 5, in read\n    return json.loads(1)\n' in output
    assert "json/__init__.py" not in output


def test_ctrl_c_ends_the_job_and_all_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import os, threading\nprint('pid', os.getpid(), flush=True)\nthreading.Event().wait()\n")
    job = job_of(tmp_path, script, num_workers=1).start()
    log = tmp_path / "job" / "logs" / "elasticdl-wait-worker-0.log"
    job.wait_until("the script to begin", lambda: log.exists() and "pid " in log.read_text(), 60)
    pid = int(log.read_text().split()[-1])
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(60) == 128 + signal.SIGINT, job.story()
    assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"
