"""list, status, logs, delete, clean and resume on real local jobs."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_dir import holders, register, registered, wait_for_end
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import MASTER_RESTARTED, JobPhase, JobStatus, PodStatus
from elasticdl_client.jobs import commands, local_jobs, log_files
from elasticdl_client.jobs.local_jobs import LocalJobs
from elasticdl_client.jobs.store import JobInfo, LogRequest, Phase
from elasticdl_client.kubernetes.api import ClusterError
from tests.client.test_local_front import MODEL, ROOT, alive, assert_master_is_gone, finish, start
from tests.dashboard.written_jobs import write_job
from tests.lines import line_with, next_line
from tests.master.actors import wait_until

Run = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-cluster"))
    return tmp_path


@pytest.fixture
def flags(home: Path) -> dict[str, str]:
    (home / "m.py").write_text(MODEL)
    (home / "part-0").write_text("a record")
    return flags_of(home, "job")


def flags_of(home: Path, name: str) -> dict[str, str]:
    return {
        "job_name": name,
        "runtime": "local",
        "job_dir": str(home / ".elasticdl" / "jobs" / name),
        "model_zoo": str(home),
        "model_def": "m.custom_model",
        "training_data": str(home / "part-0"),
    }


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *arguments: str, code: int = 0) -> str:
        assert commands.run(command, arguments) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def running(flags: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_without_jobs_and_cluster_list_says_so_as_kubectl_does(
    home: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run("list", []) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "No jobs found on this machine." in captured.err
    assert "note:" not in captured.err
    with pytest.raises(ClusterError, match="There is no usable cluster configuration"):
        commands.run("list", ["--runtime=kubernetes"])
    assert json.loads(run("list", "-o", "json")) == []
    assert run("list", "--output=name") == ""


def test_a_running_job_is_listed_shown_and_read(
    running: subprocess.Popen[str], flags: dict[str, str], run: Run
) -> None:
    heads, row = run("list").splitlines()
    assert heads.split() == ["NAME", "RUNTIME", "PHASE", "WORKERS", "PS", "RECORDS", "AGE"]
    assert row.split()[:6] == ["job", "local", "Running", "2/2", "0/0", "50%"]
    (found,) = json.loads(run("list", "-o", "json"))
    assert found == json.loads(run("status", "job", "-o", "json"))
    assert (found["phase"], found["records_done"], found["runtime"]) == ("Running", 50, "local")
    page = run("status", "job")
    assert "Phase:        Running" in page
    assert f"Logs:         {flags['job_dir']}/logs" in page
    assert run("logs", "job").endswith("pod elasticdl-job-master\n")
    assert run("logs", "job", "--all").startswith("[elasticdl-job-master] port ")
    assert run("logs", "job", "--tail=0") == ""
    (line,) = run("logs", "job", "-o", "json").splitlines()
    assert json.loads(line)["pod"] == "elasticdl-job-master"
    with pytest.raises(JobError, match="has printed nothing, or there is none") as caught:
        run("logs", "job", "--role=worker-7")
    assert "There are logs of master." in caught.value.hint
    with pytest.raises(JobError, match="it has a master already"):
        run("resume", "job")
    run("clean")
    assert Path(flags["job_dir"]).is_dir()


def test_delete_ends_a_running_job_with_all_its_processes(
    running: subprocess.Popen[str], flags: dict[str, str], run: Run
) -> None:
    master = int((Path(flags["job_dir"]) / "pid").read_text())
    assert run("delete", "job") == f'job "job" deleted with its directory {flags["job_dir"]}\n'
    output, errors = running.communicate(timeout=30)
    assert running.returncode == 143, errors
    assert output.splitlines()[-1] == "`elasticdl delete`: ending the job and all its processes …"
    assert not alive(master)
    assert not Path(flags["job_dir"]).exists()
    with pytest.raises(JobError, match='job "job" not found on this machine'):
        run("status", "job")
    assert commands.run("delete", ["job"]) == 1


def test_a_client_that_was_stopped_is_woken_to_end_its_job(
    running: subprocess.Popen[str], flags: dict[str, str], run: Run
) -> None:
    running.send_signal(signal.SIGSTOP)
    run("delete", "job", "-o", "name")
    running.communicate(timeout=30)
    assert not Path(flags["job_dir"]).exists()


def test_the_end_of_a_process_is_waited_for_in_a_python_without_pidfd_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.pidfd_open", raising=False)
    process = subprocess.Popen(["sleep", "60"])
    assert not wait_for_end([process.pid], 0.1)
    process.kill()
    assert wait_for_end([process.pid], 30)  # a zombie
    process.wait()
    assert wait_for_end([process.pid], 0.0)


def test_threads_that_outlive_the_first_one_of_a_process_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.pidfd_open", raising=False)
    code = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    state = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", "the first thread to end")
    assert not wait_for_end([process.pid], 0.1)
    process.kill()
    assert wait_for_end([process.pid], 30)
    process.wait()


def test_follow_prints_to_the_end_of_the_job(running: subprocess.Popen[str], flags: dict[str, str], run: Run) -> None:
    log = Path(flags["job_dir"]) / "logs" / "elasticdl-job-worker-0.log"
    code = "import sys; from elasticdl_client.main import run; run(sys.argv[1:])"
    reader = subprocess.Popen(
        [sys.executable, "-c", code, "logs", "job", "-f", "--all"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert next_line(reader).startswith("[elasticdl-job-master] port")
    log.write_text("first\nsecond without an end")
    assert next_line(reader) == "[elasticdl-job-worker-0] first\n"
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=30)
    rest, _ = reader.communicate(timeout=30)
    assert rest == "[elasticdl-job-worker-0] second without an end\n"
    assert reader.returncode == 0


def test_follow_prints_the_last_words_of_a_job_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "elasticdl-job-master.log").write_text("first\n")
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open() as lock:
        holder = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),))
    job = JobInfo("job", Runtime.LOCAL, Phase.RUNNING, JobStatus("job"), directory=str(tmp_path))
    lines = log_files.lines(job, LogRequest("", follow=True, tail=-1))
    assert next(lines).text == "first"
    with (logs / "elasticdl-job-master.log").open("a") as log:
        log.write("last words\n")
    (logs / "elasticdl-job-master.log").unlink()
    (logs / "elasticdl-job-ps-0.log").symlink_to("nowhere")  # listed, and gone when it is looked at
    holder.communicate()
    assert [line.text for line in lines] == ["last words"]


def test_the_tail_of_a_log_larger_than_memory_is_read_alone(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    with (logs / "elasticdl-job-worker-0.log").open("wb") as log:
        log.seek(1 << 38)  # a hole
        log.write(b"\none\ntwo\nthree")
    (logs / "elasticdl-job-worker-1.log").write_text("four\nfive\n")
    job = JobInfo("job", Runtime.LOCAL, Phase.RUNNING, JobStatus("job"), directory=str(tmp_path))
    lines = log_files.lines(job, LogRequest("", follow=False, tail=2))
    assert [line.text for line in lines] == ["two", "three", "four", "five"]


def test_pods_that_have_not_registered_with_a_restarted_master_yet_run_nevertheless(
    running: subprocess.Popen[str], flags: dict[str, str], run: Run
) -> None:
    path = Path(flags["job_dir"]) / "status.json"
    before = JobStatus.from_json(path.read_text())
    pods = [PodStatus(f"elasticdl-job-ps-{k}", "ps", "Running") for k in range(2)]
    pods += [
        PodStatus("elasticdl-job-worker-0", "worker", "Running"),
        PodStatus("elasticdl-job-worker-1", "worker", "Failed"),
    ]
    message = f"{MASTER_RESTARTED}: waiting for parameter servers to register again: 0 of 2 have"
    status = dataclasses.replace(
        before,
        generation=2,
        message=message,
        pods=tuple(pods),
        workers_alive=0,
        workers_wanted=2,
        ps_alive=0,
        ps_wanted=2,
    )
    path.write_text(status.to_json())
    page = run("status", "job")
    assert f"Message:      {message}" in page
    assert "PS:           2/2 running" in page
    assert "Workers:      1/2 running, 1 failed" in page
    path.write_text(dataclasses.replace(status, message="waiting for parameter servers: 0 of 2 are ready").to_json())
    assert "PS:           0/2 running" in run("status", "job")


def test_a_job_that_ends_while_it_is_looked_at_is_not_taken_for_one_that_was_cut_off(
    flags: dict[str, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(flags, "succeed")
    status = Path(flags["job_dir"]) / "status.json"
    end = status.read_text()
    status.write_text(JobStatus("job", JobPhase.RUNNING).to_json())

    def holders_after_the_end(job_dir: Path) -> list[int]:
        status.write_text(end)
        return []

    monkeypatch.setattr(local_jobs, "holders", holders_after_the_end)
    assert "Succeeded" in run("list")


def test_a_reader_that_leaves_early_gets_no_traceback(running: subprocess.Popen[str], flags: dict[str, str]) -> None:
    log = Path(flags["job_dir"]) / "logs" / "elasticdl-job-worker-0.log"
    log.write_text("a line of some length\n" * 20_000)
    command = f"{sys.executable} -m elasticdl_client.main logs job --role=worker-0 | head -n 1"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "a line of some length\n"
    assert done.stderr == ""


def test_clean_deletes_what_has_ended_and_nothing_else(
    home: Path, flags: dict[str, str], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, scenario in (("good", "succeed"), ("bad", "fail")):
        finish(flags_of(home, name), scenario)
    cut_off = start(flags, "wait")
    line_with(cut_off, "records 50/100")
    cut_off.send_signal(signal.SIGTERM)
    cut_off.communicate(timeout=30)
    listed = {job["name"]: job["phase"] for job in json.loads(run("list", "-o", "json"))}
    assert listed == {"good": "Succeeded", "bad": "Failed", "job": "Stopped"}
    page = run("status", "job")
    assert f"cut off before it had begun: {flags['job_dir']}/logs may say why" in page
    assert "elasticdl resume" not in page
    explanation = run("explain", "job")
    assert "cut off before it had begun" in explanation
    assert "elasticdl resume" not in explanation
    assert "feed raised: broken" in run("status", "bad")
    assert '"good" deleted' in run("clean", "--dry_run")
    assert len(json.loads(run("list", "-o", "json"))) == 3
    assert commands.run("clean", ["-o", "json"]) == 0
    captured = capsys.readouterr()
    assert [(one["name"], one["deleted"]) for one in json.loads(captured.out)] == [("good", True), ("bad", True)]
    assert 'job "job" on this machine has stopped, not ended: kept' in captured.err
    assert run("list", "-o", "name") == "job/job\n"
    with pytest.raises(JobError, match="cut off before it had begun"):
        run("resume", "job")
    (Path(flags["job_dir"]) / "journal.json").write_text(json.dumps({"snapshot": {"core": {}}}))
    page = run("status", "job")
    assert "was cut off before its end" in page
    assert "elasticdl resume job --runtime=local" in page


def test_clean_leaves_a_job_that_was_started_again_meanwhile(
    home: Path, flags: dict[str, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(flags, "succeed")
    finish(flags_of(home, "other"), "succeed")
    delete = LocalJobs.delete

    def delete_slowly(store: LocalJobs, job: JobInfo, wait_s: float | None) -> None:
        delete(store, job, wait_s)
        again = JobStatus("other", JobPhase.RUNNING).to_json()
        (home / ".elasticdl" / "jobs" / "other" / "status.json").write_text(again)

    monkeypatch.setattr(LocalJobs, "delete", delete_slowly)
    assert run("clean", "-o", "name") == "job/job\n"
    assert run("list", "-o", "name") == "job/other\n"


def test_a_job_elsewhere_is_found_like_any_other(
    home: Path, flags: dict[str, str], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = home / "elsewhere"
    for _ in range(2):
        finish(flags | {"job_dir": str(elsewhere)}, "succeed")
    assert run("list", "-o", "name") == "job/job\n"
    assert json.loads(run("status", "job", "-o", "json"))["directory"] == str(elsewhere)
    assert commands.run("clean", []) == 0
    assert f"{elsewhere}: kept; `elasticdl delete job` removes it" in capsys.readouterr().err
    run("delete", "job")
    assert not elsewhere.exists()
    assert run("list", "-o", "name") == ""


def test_a_directory_that_cannot_be_looked_at_hides_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = home / "far", home / "near"
    for directory in (far, near):
        directory.mkdir()
        (directory / "spec.json").write_text("{")
    register(far)
    stat = Path.stat

    def refuse(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if follow_symlinks and os.path.realpath(path).startswith(str(far)):
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refuse)
    register(near)
    assert registered() == [far, near]
    assert [job.name for job in LocalJobs().list()] == ["near"]
    with pytest.raises(JobError, match=f"{far} cannot be read: Transport endpoint is not connected"):
        LocalJobs(far).list()


def test_of_two_jobs_with_one_name_the_directory_says_which(home: Path, flags: dict[str, str], run: Run) -> None:
    elsewhere = home / "elsewhere"
    finish(flags, "succeed")
    finish(flags | {"job_dir": str(elsewhere)}, "fail")
    with pytest.raises(FlagError, match='There are 2 jobs "job"') as caught:
        run("status", "job")
    assert "--job_dir" in caught.value.hint
    assert run("clean", "-o", "name") == "job/job\n"
    assert "Failed" in run("status", "job")


def test_a_home_that_cannot_be_written_does_not_keep_a_job_from_starting(home: Path, flags: dict[str, str]) -> None:
    (home / ".elasticdl").write_text("a file, where a directory is wanted")
    code, _, errors = finish(flags | {"job_dir": str(home / "elsewhere")}, "succeed")
    assert code == 0
    assert "`elasticdl list` does not show this job" in errors


def test_a_job_elsewhere_is_found_by_its_directory(home: Path, flags: dict[str, str], run: Run) -> None:
    elsewhere = home / "elsewhere"
    finish(flags | {"job_dir": str(elsewhere)}, "succeed")
    assert "Succeeded" in run("status", "job", f"--job_dir={elsewhere}")
    with pytest.raises(JobError, match='"other" not found'):
        run("status", "other", f"--job_dir={elsewhere}")
    with pytest.raises(JobError, match="has ended"):
        run("resume", "job", f"--job_dir={elsewhere}")
    run("delete", "job", f"--job_dir={elsewhere}")
    assert not elsewhere.exists()


def test_an_exported_model_in_the_directory_is_kept(flags: dict[str, str], run: Run) -> None:
    job_dir = Path(flags["job_dir"])
    finish(flags | {"output": str(job_dir / "model")}, "succeed")
    (job_dir / "model").mkdir()
    run("delete", "job")
    assert sorted(entry.name for entry in job_dir.iterdir()) == ["lock", "model"]
    assert run("list", "-o", "name") == ""


def test_predictions_and_metrics_in_the_directory_are_kept(tmp_path: Path) -> None:
    job_dir = write_job(tmp_path / "run", JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
    outputs = {"prediction_outputs": f"{job_dir}/out/predictions", "metrics_output": f"{job_dir}/metrics.json"}
    (job_dir / "spec.json").write_text(JobSpec(job_name="job", **outputs).to_json())
    (job_dir / "out" / "predictions").mkdir(parents=True)
    (job_dir / "metrics.json").write_text("{}")
    store = LocalJobs(job_dir)
    store.delete(store.list()[0], None)
    assert sorted(entry.name for entry in job_dir.iterdir()) == ["lock", "metrics.json", "out"]


def test_the_parts_of_an_analysis_go_with_it(tmp_path: Path) -> None:
    job_dir = write_job(tmp_path / "run", JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
    flags = {"job_name": "job", "runtime": "local", "data": "rows.csv", "output": f"{job_dir}/table"}
    spec = JobSpec.from_flags(JobType.ANALYZE, flags)
    (job_dir / "spec.json").write_text(spec.to_json())
    (job_dir / "table").touch()
    Path(spec.prediction_outputs).mkdir()
    store = LocalJobs(job_dir)
    store.delete(store.list()[0], None)
    assert sorted(entry.name for entry in job_dir.iterdir()) == ["lock", "table"]


def test_a_directory_that_another_machine_holds_is_not_removed(flags: dict[str, str], run: Run) -> None:
    """A lock whose holder is in no /proc that we see: here, this very process."""
    import fcntl

    job_dir = Path(flags["job_dir"])
    finish(flags, "succeed")
    with (job_dir / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert commands.run("delete", ["job"]) == 1
    assert (job_dir / "spec.json").exists()


def test_damaged_files_do_not_hide_a_job(flags: dict[str, str], run: Run) -> None:
    finish(flags, "succeed")
    job_dir = Path(flags["job_dir"])
    (job_dir / "status.json").write_text("{")
    (job_dir / "spec.json").write_text("")
    assert "cannot be read" in run("status", "job")
    run("delete", "job")
    assert not job_dir.exists()


def test_a_killed_client_s_job_continues_from_its_journal(flags: dict[str, str], run: Run) -> None:
    """The scripted master writes no journal, so one is put there: the started processes and their arguments count."""
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    job_dir = Path(flags["job_dir"])
    process.kill()
    process.communicate(timeout=30)
    assert_master_is_gone(flags)
    assert wait_for_end(holders(job_dir), 30)
    (job_dir / "journal.json").write_text("{}")
    token, spec = (job_dir / "token").read_text(), (job_dir / "spec.json").read_text()
    code = (
        "import sys; from elasticdl_client import local; from elasticdl_client.jobs import commands\n"
        "local.go_on.__defaults__ = ((sys.executable, '-m', 'tests.client.status_writer', 'succeed'),)\n"
        "sys.exit(commands.run('resume', ['job']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Job job continues on this machine" in done.stdout
    assert "epoch 1: records 100, committed 100" in done.stdout
    assert ((job_dir / "token").read_text(), (job_dir / "spec.json").read_text()) == (token, spec)
    assert not (job_dir / "previous").exists()
    assert "Succeeded" in run("status", "job")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status", "nonsense"], 1, 'error: job "nonsense" not found on this machine.'),
        (["status"], 2, "`elasticdl status` needs the name of a job."),
        (["statu", "job"], 2, "Did you mean `elasticdl status`?"),
        (["list"], 0, "No jobs found on this machine."),
        (["list", "--runtime=kubernetes"], 1, "There is no usable cluster configuration"),
        (["rbac", "--prnt"], 2, "Did you mean --print?"),
    ],
)
def test_the_command_exits_with_0_1_or_2(home: Path, arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_rbac_prints_what_can_be_applied() -> None:
    command = [sys.executable, "-m", "elasticdl_client.main", "rbac", "--print", "-n", "team"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(done.stdout))
    assert [one["kind"] for one in found] == ["ServiceAccount", "Role", "RoleBinding"]
    assert {one["metadata"]["namespace"] for one in found} == {"team"}
