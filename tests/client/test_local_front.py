"""The front of the local runtime with a real agent, real pods and a scripted master."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lines import line_with
from tests.master.actors import wait_until
from tests.master.small_disk import small_disk

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "import sys; from elasticdl_client import local, main; from elasticdl_client.job_spec import JobSpec\n"
    "spec = JobSpec.from_json(sys.argv[1])\n"
    "master = (sys.executable, '-m', 'tests.client.status_writer', sys.argv[2])\n"
    "main.exit_with(lambda: sys.exit(local.run(spec, master)))"
)
FULL_AT_THE_END = (
    "import os; from elasticdl_client import report; print_end = report.print_end\n"
    "def print_to_a_full_disk(*args, **options):\n"
    "    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    "    print_end(*args, **options)\n"
    "report.print_end = print_to_a_full_disk\n"
)
ANSWERED_IN_A_DESTRUCTOR = (
    "import signal; from elasticdl_client.progress import PlainDisplay; say = PlainDisplay.say\n"
    "class Garbage:\n"
    "    def __del__(self): signal.raise_signal(signal.SIGINT)  # Python drops what is raised here\n"
    "def say_and_be_interrupted(display, line):\n"
    "    say(display, line)\n"
    "    if 'Ctrl-C again' in line: Garbage()\n"
    "PlainDisplay.say = say_and_be_interrupted\n"
)
MODEL = "def custom_model(): ...\ndef feed(d, m, md): ...\ndef loss(l, p): ...\ndef optimizer(): ...\n"


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, str]:
    zoo, data = tmp_path / "zoo", tmp_path / "data"
    zoo.mkdir()
    (zoo / "m.py").write_text(MODEL)
    data.mkdir()
    (data / "part-0").write_text("a record")
    return {
        "job_name": "job",
        "runtime": "local",
        "job_dir": str(tmp_path / "job"),
        "model_zoo": str(zoo),
        "model_def": "m.custom_model",
        "training_data": str(data),
    }


def start(flags: dict[str, str], scenario: str, before: str = "") -> subprocess.Popen[str]:
    from elasticdl_client.job_spec import JobSpec

    spec = JobSpec.from_flags("train", flags).to_json()
    return subprocess.Popen(
        [sys.executable, "-c", before + RUN, spec, scenario],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(flags: dict[str, str], scenario: str) -> tuple[int, str, str]:
    process = start(flags, scenario)
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return process.returncode, output, errors


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_and_interrupt(flags: dict[str, str], scenario: str) -> subprocess.Popen[str]:
    """A job that has begun and waits for a checkpoint after Ctrl-C."""
    process = start(flags, scenario)
    line_with(process, "records 50/100")
    process.send_signal(signal.SIGINT)
    line_with(process, "Ctrl-C again ends the job at once")
    return process


def test_a_job_that_succeeds_exits_0_and_says_what_became_of_each_record(flags: dict[str, str]) -> None:
    code, output, errors = finish(flags, "succeed")
    assert code == 0, errors
    assert "epoch 1: records 100, committed 100, repeated 0, lost 0" in output
    assert "accuracy 0.97" in output
    assert f"logs: {flags['job_dir']}/logs" in output


def test_a_job_whose_output_is_full_at_its_end_exits_0(flags: dict[str, str]) -> None:
    process = start(flags, "succeed", FULL_AT_THE_END)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def test_the_job_directory_holds_what_pods_need_and_the_token_is_private(flags: dict[str, str]) -> None:
    from elasticdl_client.job_spec import JobSpec

    assert finish(flags, "succeed")[0] == 0
    job_dir = Path(flags["job_dir"])
    assert stat.S_IMODE((job_dir / "token").stat().st_mode) == 0o600
    assert len((job_dir / "token").read_text()) == 64
    spec = JobSpec.from_json((job_dir / "spec.json").read_text())
    assert spec.job_name == "job"
    assert spec.checkpoint_dir == str(job_dir / "checkpoints")
    log = (job_dir / "logs" / "elasticdl-job-master.log").read_text()
    assert log == "port 0 pod elasticdl-job-master\n"  # one found here could be taken again before the master listens


def test_a_job_that_fails_exits_with_its_code_and_its_message(flags: dict[str, str]) -> None:
    code, output, errors = finish(flags, "fail")
    assert code == 1
    assert "feed raised: broken" in errors
    assert "elasticdl-job-master.log" in errors
    assert "succeeded" not in output


def test_a_master_that_dies_is_started_again_and_the_job_continues(flags: dict[str, str]) -> None:
    code, output, errors = finish(flags, "die_once")
    assert code == 0, errors
    assert "restart 1 follows" in output


def test_a_damaged_status_is_none_since_the_master_writes_the_next(tmp_path: Path) -> None:
    from elasticdl_client.job_dir import JobDir

    for damaged in (b"", b"garbage", b"{}", b"\xff", b'{"job_name": "job", "phase": "?"}'):
        (tmp_path / "status.json").write_bytes(damaged)
        assert JobDir(tmp_path, -1).status() is None
    (tmp_path / "status.json").write_text('{"job_name": "job", "coverage": [{}]}')  # fields are missing
    assert JobDir(tmp_path, -1).status() is None
    (tmp_path / "status.json").unlink()
    (tmp_path / "status.json").mkdir()  # it cannot be read
    assert JobDir(tmp_path, -1).status() is None


def test_a_restart_is_reported_where_the_job_has_ended_before_it_is_seen(tmp_path: Path) -> None:
    from elasticdl.cluster.cluster import EventType, Pod, PodEvent, PodPhase
    from elasticdl.protocol import Role
    from elasticdl_client.job_dir import JobDir
    from elasticdl_client.job_spec import JobSpec
    from elasticdl_client.job_status import JobPhase, JobStatus
    from elasticdl_client.local_job import LocalFollower
    from elasticdl_client.progress import PlainDisplay

    class Restarted:
        """A cluster whose master is in its second life."""

        def watch(self) -> Iterator[PodEvent]:
            yield PodEvent(EventType.ADDED, Pod("m", Role.MASTER, 0, "uid", PodPhase.RUNNING, {}, restarts=1))

        def close(self) -> None: ...

    (tmp_path / "status.json").write_text(JobStatus("job", JobPhase.SUCCEEDED, exit_code=0).to_json())
    said = io.StringIO()
    follower = LocalFollower(JobSpec(), JobDir(tmp_path, -1), Restarted(), PlainDisplay(said))  # type: ignore[arg-type]
    assert follower.follow().exit_code == 0
    assert "The master has ended; restart 1 follows." in said.getvalue()


def test_the_last_events_are_reported_where_file_and_time_of_the_journal_are_those_of_the_one_before(
    tmp_path: Path,
) -> None:
    from elasticdl.cluster.cluster import EventType, Pod, PodEvent, PodPhase
    from elasticdl.protocol import Role
    from elasticdl_client.job_dir import JobDir
    from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, to_journal
    from elasticdl_client.job_spec import JobSpec
    from elasticdl_client.job_status import JobPhase, JobStatus
    from elasticdl_client.local_job import LocalFollower
    from elasticdl_client.progress import PlainDisplay
    from tests.client.status_writer import write

    said, journal = io.StringIO(), tmp_path / "journal.json"
    lost = [JobEvent(n, 1.0, EventKind.POD_LOST, f"worker-{n}", "", 0, {"reason": "Killed"}) for n in (1, 2)]

    def put(num_events: int) -> None:
        history = to_journal(EventHistory(tuple(lost[:num_events])))
        journal.write_text(json.dumps({"snapshot": {"core": {"events": history}}}))
        os.utime(journal, ns=(1, 1))

    def master(phase: PodPhase) -> PodEvent:
        return PodEvent(EventType.MODIFIED, Pod("m", Role.MASTER, 0, "uid", phase, {}))

    class Ending:
        """A cluster whose master writes both so soon after each other that the clock shows the same."""

        def watch(self) -> Iterator[PodEvent]:
            write(tmp_path, JobStatus("job", JobPhase.RUNNING))
            put(1)
            yield master(PodPhase.RUNNING)
            wait_until(lambda: "worker-1 lost" in said.getvalue(), "the first event to be told")
            put(2)
            write(tmp_path, JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
            yield master(PodPhase.SUCCEEDED)

        def close(self) -> None: ...

    follower = LocalFollower(JobSpec(), JobDir(tmp_path, -1), Ending(), PlainDisplay(said))  # type: ignore[arg-type]
    assert follower.follow().exit_code == 0
    assert [said.getvalue().count(f"{event.subject} lost") for event in lost] == [1, 1]


def test_a_job_that_waits_for_space_on_its_disk_is_said_to(tmp_path: Path) -> None:
    from elasticdl.cluster.cluster import EventType, Pod, PodEvent, PodPhase
    from elasticdl.master.journal import encode
    from elasticdl.protocol import Role
    from elasticdl_client.job_dir import JobDir
    from elasticdl_client.job_spec import JobSpec
    from elasticdl_client.job_status import JobPhase, JobStatus
    from elasticdl_client.local_job import LocalFollower
    from elasticdl_client.progress import PlainDisplay
    from tests.client.status_writer import write

    said = io.StringIO()
    with small_disk(tmp_path / "disk", size_kib=256) as disk:
        (disk / "journal.json").write_bytes(encode({"core": {}, "more": "0" * (50 << 10)}))  # the next one beside it

        class Waiting:
            """A cluster whose master cannot write its status until a file is gone."""

            def watch(self) -> Iterator[PodEvent]:
                write(disk, JobStatus("job", JobPhase.RUNNING))
                (disk / "fills it").write_bytes(b"0" * (110 << 10))
                wait_until(lambda: "No space is left" in said.getvalue(), "the full disk to be told")
                (disk / "fills it").unlink()
                write(disk, JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
                yield PodEvent(EventType.MODIFIED, Pod("m", Role.MASTER, 0, "uid", PodPhase.SUCCEEDED, {}))

            def close(self) -> None: ...

        follower = LocalFollower(JobSpec(), JobDir(disk, -1), Waiting(), PlainDisplay(said))  # type: ignore[arg-type]
        assert follower.follow().exit_code == 0
    assert said.getvalue().count(f"No space is left on the disk of {disk}") == 1


def test_why_a_job_waits_for_its_storage_is_said_once_for_each_time(tmp_path: Path) -> None:
    from elasticdl.cluster.cluster import EventType, Pod, PodEvent, PodPhase
    from elasticdl.protocol import Role
    from elasticdl_client.job_dir import JobDir
    from elasticdl_client.job_spec import JobSpec
    from elasticdl_client.job_status import WAITS_FOR_STORAGE, JobPhase, JobStatus
    from elasticdl_client.local_job import LocalFollower
    from tests.client.status_writer import write

    shown: list[JobStatus] = []
    said: list[str] = []

    class Recorder:
        """A display."""

        def update(self, status: JobStatus, history: object = None) -> None:
            shown.append(status)

        def say(self, line: str) -> None:
            said.append(line)

        def close(self) -> None: ...

    class Waiting:
        """A cluster whose master waits for workers, then for its storage twice; the first time for two reasons."""

        def watch(self) -> Iterator[PodEvent]:
            waits = WAITS_FOR_STORAGE
            for why in ("waiting for workers", f"{waits}: 503", f"{waits}: no answer", "", f"{waits}: 500"):
                status = JobStatus("job", JobPhase.RUNNING, message=why)
                write(tmp_path, status)
                wait_until(lambda: shown[-1:] == [status], "the status to be shown")  # noqa: B023
            write(tmp_path, JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
            yield PodEvent(EventType.MODIFIED, Pod("m", Role.MASTER, 0, "uid", PodPhase.SUCCEEDED, {}))

        def close(self) -> None: ...

    follower = LocalFollower(JobSpec(), JobDir(tmp_path, -1), Waiting(), Recorder())  # type: ignore[arg-type]
    assert follower.follow().exit_code == 0
    assert said == ["The job waits for its storage: 503", "The job waits for its storage: 500"]


def test_a_master_that_never_works_fails_the_job_with_its_last_lines(flags: dict[str, str]) -> None:
    code, _, errors = finish(flags, "crash")
    assert code == 1
    assert "this master never works" in errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_and_all_its_processes(flags: dict[str, str], number: signal.Signals, code: int) -> None:
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == code, output + errors
    assert "Traceback" not in errors
    assert_master_is_gone(flags)


def test_a_job_under_nohup_outlives_its_terminal_and_stops_at_sigint(flags: dict[str, str]) -> None:
    process = start(flags, "wait", "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    line_with(process, "records 50/100")
    process.send_signal(signal.SIGHUP)
    assert not select.select([process.stdout], [], [], 1.0)[0], "the client ends the job"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, output + errors


def test_ctrl_c_waits_for_a_checkpoint_and_names_the_command_that_continues(flags: dict[str, str]) -> None:
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, output + errors
    lines = output.splitlines()
    saved = lines.index("A checkpoint of 50 minibatches is written.")
    assert lines[saved + 1 :] == [
        "SIGINT: ending the job and all its processes …",
        "`elasticdl resume job --runtime=local` continues it.",
    ]
    assert_master_is_gone(flags)


def test_ctrl_c_waits_for_a_checkpoint_though_the_reader_of_the_output_has_ended(flags: dict[str, str]) -> None:
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert (Path(flags["job_dir"]) / "journal.json").exists()
    assert_master_is_gone(flags)


def test_ctrl_c_asks_a_master_that_is_starting_once_it_can_take_the_request(flags: dict[str, str]) -> None:
    process = start_and_interrupt(flags, "late")
    job_dir = Path(flags["job_dir"])
    master = os.pidfd_open(int((job_dir / "pid").read_text()))
    assert not select.select([master], [], [], 1.0)[0], "the request has ended the master"
    os.close(master)
    (job_dir / "go").write_text("")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "A checkpoint of 50 minibatches is written." in output
    assert "The master has ended" not in output


def test_a_checkpoint_that_was_begun_before_ctrl_c_is_not_the_one_that_is_waited_for(flags: dict[str, str]) -> None:
    process = start_and_interrupt(flags, "behind")
    journal = Path(flags["job_dir"]) / "journal.json"
    wait_until(journal.exists, "the earlier checkpoint")
    assert not select.select([process.stdout], [], [], 1.0)[0], "the client has taken the earlier one"
    journal.with_name("go").write_text("")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "A checkpoint of 50 minibatches is written." in output


def test_ctrl_c_waits_for_no_checkpoint_where_the_newest_one_has_everything(flags: dict[str, str]) -> None:
    process = start_and_interrupt(flags, "saved")
    output, errors = process.communicate(timeout=30)  # less than a checkpoint is waited for
    assert process.returncode == 130, output + errors
    assert "A checkpoint of 50 minibatches is written." in output


def test_ctrl_c_asks_the_next_master_where_the_one_that_was_asked_is_killed(flags: dict[str, str]) -> None:
    process = start_and_interrupt(flags, "late")
    os.kill(int((Path(flags["job_dir"]) / "pid").read_text()), signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert "A checkpoint of 50 minibatches is written." in output


def test_a_second_ctrl_c_waits_for_nothing(flags: dict[str, str]) -> None:
    process = start_and_interrupt(flags, "deaf")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, output + errors
    assert "The checkpoint is not waited for." in output
    assert_master_is_gone(flags)


def test_a_second_ctrl_c_is_seen_while_the_first_is_answered(flags: dict[str, str]) -> None:
    process = start(flags, "deaf", ANSWERED_IN_A_DESTRUCTOR)
    line_with(process, "records 50/100")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, output + errors
    assert "The checkpoint is not waited for." in output
    assert "SIGINT: ending the job" in output
    assert_master_is_gone(flags)


def test_a_killed_client_leaves_no_process_behind(flags: dict[str, str]) -> None:
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    process.kill()
    process.communicate(timeout=30)  # the agent holds its standard output until it ends
    retry = finish(flags | {"job_name": "job"}, "succeed")
    assert retry[0] in (0, 2)
    assert_master_is_gone(flags)


def assert_master_is_gone(flags: dict[str, str]) -> None:
    job_dir = Path(flags["job_dir"])
    pid_file = next(p for p in (job_dir / "pid", job_dir / "previous" / "pid") if p.exists())
    pid = int(pid_file.read_text())
    if alive(pid):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 20)[0], f"process {pid} survived"
        finally:
            os.close(fd)


def test_a_second_job_of_the_same_name_is_refused_while_the_first_runs(flags: dict[str, str]) -> None:
    first = start(flags, "wait")
    line_with(first, "records 50/100")
    code, _, errors = finish(flags, "succeed")
    assert code == 2
    assert "still runs" in errors
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


def test_an_earlier_runs_files_are_set_aside_and_the_user_is_notified(flags: dict[str, str]) -> None:
    assert finish(flags, "fail")[0] == 1
    code, _, errors = finish(flags, "succeed")
    assert code == 0
    assert "previous" in errors
    assert (Path(flags["job_dir"]) / "previous" / "logs" / "elasticdl-job-master.log").exists()


def test_a_directory_that_is_no_jobs_is_left_alone(flags: dict[str, str], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    code, _, errors = finish(flags | {"job_dir": str(mine)}, "succeed")
    assert code == 2
    assert "not a job's directory" in errors
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_directory_that_cannot_be_locked_or_listed_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elasticdl_client.errors import JobError
    from elasticdl_client.job_dir import JobDir

    def refuse(number: int) -> Callable[..., None]:
        def raise_error(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return raise_error

    with monkeypatch.context() as no_locks:
        no_locks.setattr("fcntl.flock", refuse(errno.ENOLCK))
        with pytest.raises(JobError, match="has no locks: No locks available"):
            JobDir.take(tmp_path / "job")
    monkeypatch.setattr(Path, "iterdir", refuse(errno.EACCES))
    with pytest.raises(JobError, match="Permission denied"):
        JobDir.take(tmp_path / "job")


def test_the_death_of_the_agent_fails_the_job(flags: dict[str, str]) -> None:
    process = start(flags, "wait")
    line_with(process, "records 50/100")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "agent has ended" in errors
    assert_master_is_gone(flags)


def test_a_users_error_is_shown_without_the_frames_of_its_traceback() -> None:
    from elasticdl_client.report import without_frames

    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    raise E("x")\n    ^^^^\nE: x'
    assert without_frames("feed raised E: x\n" + frames) == "feed raised E: x"
    assert without_frames("worker 1 failed:\n" + frames + "\nmore") == "worker 1 failed:\nE: x\nmore"
    assert without_frames("a\n  b") == "a\n  b"
    link = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    ours = frames.replace("\nE: x", "\nelasticdl.frameworks.framework.FeedError: E: x")
    assert without_frames("feed raised E: x\n" + frames + link + ours) == "feed raised E: x"
    assert without_frames("feed raised E: x\n" + frames + link + ours + "\nmore") == "feed raised E: x\n\nmore"
    assert without_frames("worker 1:\n" + frames.replace("\nE: x", "\nelasticdl.M")) == "worker 1:\nelasticdl.M"
    theirs = frames.replace("\nE: x", "\nV: y")
    assert without_frames("V: y\n" + frames + link + theirs) == "V: y\nE: x"
    assert without_frames("raised:\n" + frames + link + theirs) == f"raised:\nE: x{link.rstrip()}\n\nV: y"
