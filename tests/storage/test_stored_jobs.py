"""Local jobs whose directory is in storage: lost with all that was on their machine, and resumed on another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest
import yaml

from elasticdl.protocol import Role
from elasticdl.storage import versions
from elasticdl.storage.paths import RemotePath
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import EXIT_SUPERSEDED, JobPhase, JobStatus
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.chaos.scenarios import coverage_of
from tests.command import elasticdl
from tests.e2e.test_data_sources import TORCH, assert_exact_and_good, write_parquet
from tests.e2e.test_data_sources import job as table_job
from tests.storage.conftest import SECRET
from tests.storage.faulty_proxy import FaultyProxy
from tests.storage.machines import lose, machine

NAME, EPOCHS = "numpy", 4
PASSWORD = "only-the-user-knows-this"


def url_of(tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}/job"


def training(tmp_path: Path, **flags: object) -> LocalJob:
    """A job of the first machine, not started yet; it waits for `hurry` in its first epochs."""
    data, directory = NUMPY_DIGITS.make_data(tmp_path), machine(tmp_path, "one", NAME)
    job = NUMPY_DIGITS.local_job(directory, data, job_name=NAME, checkpoint_steps=10, num_epochs=EPOCHS, **flags)
    job.flags |= {"job_dir": url_of(tmp_path), "validation_data": ""}
    job.environment = {"HOME": str(tmp_path / "one")}
    job.pace_s = 0.02
    return job


def resumed(tmp_path: Path, name: str = "two", **environment: str) -> LocalJob:
    """The same job, continued on another machine."""
    job = LocalJob(machine(tmp_path, name, NAME), {"job_dir": url_of(tmp_path)}, "resume")
    job.environment = {"HOME": str(tmp_path / name), **environment}
    return job.start()


def client(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of a command that starts no job, and what it has printed."""
    done = elasticdl(*arguments, directory=REPOSITORY, HOME=str(tmp_path), **environment)
    return done.returncode, done.stdout + done.stderr


def refused(job: LocalJob, tmp_path: Path, job_dir: str) -> str:
    """The reason why another job, with the flags of this one, gets no directory."""
    flags = {**job.flags, "runtime": "local", "job_name": "other", "job_dir": job_dir}
    code, said = client(tmp_path, "train", *(f"--{name}={value}" for name, value in flags.items()))
    assert code == 2, said
    return said


def wait_for_checkpoint(job: LocalJob, tmp_path: Path) -> None:
    """Until the next master would restore one."""
    job.wait_for_version(10)
    job.wait_until("a checkpoint", lambda: has_checkpoint(tmp_path), look_s=0.5)


def has_checkpoint(tmp_path: Path) -> bool:
    """Whether the newest snapshot of the journal there names one."""
    directory = RemotePath(f"{url_of(tmp_path)}/journal")
    snapshots = sorted(name for name in directory.files() if "." in name)
    if not snapshots:
        return False
    newest = zlib.decompress(RemotePath(f"{directory}/{snapshots[-1]}").read_bytes())
    return f"{url_of(tmp_path)}/checkpoints/version-".encode() in newest


def assert_exact(job: LocalJob) -> None:
    assert [(one.records, one.committed, one.repeated, one.lost) for one in coverage_of(job)] == [
        (NUMPY_DIGITS.num_train, NUMPY_DIGITS.num_train, 0, 0)
    ] * EPOCHS, job.story()


@pytest.mark.timeout(300)
def test_a_job_whose_machine_is_lost_in_training_or_at_its_end_continues_elsewhere_and_counts_each_record_once(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    """All the time, its directory is its own."""
    first = training(tmp_path, envs=f"PASSWORD={PASSWORD},OTHER=other").start()
    wait_for_checkpoint(first, tmp_path)
    stored = RemotePath(f"{url_of(tmp_path)}/status.json")
    older = stored.read_bytes()
    assert JobStatus.from_json(older.decode()).exit_code is None
    said = refused(first, tmp_path, f"{url_of(tmp_path)}/")
    assert f"holds the job {NAME}, which has not ended" in said
    assert f"`elasticdl resume --job_dir={url_of(tmp_path)}` continues it" in said
    first.wait_for_version(25)
    lose(first)
    public = RemotePath(f"{url_of(tmp_path)}/spec.json").read_bytes().decode()
    assert JobSpec.from_json(public).job_name == NAME
    everything = [RemotePath(f"{url_of(tmp_path)}/{name}") for name in RemotePath(url_of(tmp_path)).files()]
    assert {path.name for path in everything} >= {"spec.json", "status.json", "MANIFEST.json"}
    assert not [path for path in everything if PASSWORD.encode() in path.read_bytes()]

    code, said = client(tmp_path, "resume", f"--job_dir={url_of(tmp_path)}")
    assert code == 2, said
    assert "PASSWORD of --envs, OTHER of --envs" in said
    secrets = {"PASSWORD": PASSWORD, "ELASTICDL_ENVS": "OTHER=other"}
    second = resumed(tmp_path, **secrets)
    second.hurry()
    assert second.wait() == 0, second.story()
    assert "note: PASSWORD of --envs has its value from the environment of this command." in second.output
    assert_exact(second)
    assert any(f"epoch {EPOCHS}: records 1437, committed 1437, repeated 0, lost 0" in one for one in second.output)
    assert f"restored from {url_of(tmp_path)}/checkpoints/version-" in "\n".join(second.output)
    assert SECRET not in "".join(path.read_text(errors="replace") for path in second.job_dir.rglob("*.log"))
    code, said = client(tmp_path, "resume", f"--job_dir={url_of(tmp_path)}")
    assert (code, "has ended (Succeeded)" in said) == (1, True), said
    assert f"holds the job {NAME}, which has ended" in refused(first, tmp_path, url_of(tmp_path))

    # The machine is lost between the end and its status: the journal is written first, and has the end.
    stored.storage.publish(stored.url, older)
    third = resumed(tmp_path, "three", **secrets)
    assert third.wait() == 0, third.story()
    assert_exact(third)
    status = third.status()
    assert status is not None
    assert (status.phase, status.exit_code) == (JobPhase.SUCCEEDED, 0)


@pytest.mark.timeout(300)
def test_a_master_that_was_stopped_while_its_job_was_resumed_elsewhere_ends_and_counts_nothing(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    first = training(tmp_path).start()
    wait_for_checkpoint(first, tmp_path)
    (master,) = first.victims(Role.MASTER)
    first.stop(master)
    second = resumed(tmp_path)
    second.wait_until("a status", lambda: second.status() is not None)
    first.resume(master)
    assert first.wait() == EXIT_SUPERSEDED, first.story()
    status = first.status()
    assert status is not None
    assert (status.phase, status.exit_code) == (JobPhase.FAILED, EXIT_SUPERSEDED)
    assert "the job was resumed elsewhere" in status.message
    assert any("the job was resumed elsewhere" in line for line in first.output), first.story()
    second.hurry()
    assert second.wait() == 0, second.story()
    assert_exact(second)
    stored = json.loads(RemotePath(f"{url_of(tmp_path)}/status.json").read_bytes())
    assert (stored["phase"], stored["exit_code"]) == ("Succeeded", 0)


@pytest.mark.full  # a second whole job, of another strategy
@pytest.mark.timeout(400)
def test_a_group_that_is_lost_with_its_machine_continues_on_another_one(proxy: FaultyProxy, tmp_path: Path) -> None:
    data, paced = write_parquet(tmp_path), "import os, time\ntime.sleep(float(os.environ.get('PACE_S', 0)))"
    code = TORCH.replace("        return self.dense", f"{textwrap.indent(paced, ' ' * 8)}\n        return self.dense")
    flags = {"distribution_strategy": "AllReduceStrategy", "num_workers": 2, "checkpoint_steps": 10}
    first = table_job(tmp_path, code, data, job_name=NAME, **flags)
    first.job_dir = machine(tmp_path, "one", NAME)
    first.environment = {"HOME": str(tmp_path / "one"), "PACE_S": "0.2"}
    first.flags["job_dir"] = url_of(tmp_path)
    first.start()
    checkpoints = RemotePath(f"{url_of(tmp_path)}/checkpoints")
    first.wait_until("a checkpoint", lambda: bool(versions.complete(checkpoints)), look_s=0.5)
    lose(first)
    second = resumed(tmp_path)
    assert_exact_and_good(second)
    assert f"from {url_of(tmp_path)}/checkpoints/version-" in "".join(
        path.read_text(errors="replace") for path in second.job_dir.rglob("*worker*.log")
    )


@pytest.mark.full  # a second whole job; the first test resumes on another machine
@pytest.mark.timeout(300)
def test_a_job_that_was_cut_off_continues_on_its_own_machine_by_its_name(proxy: FaultyProxy, tmp_path: Path) -> None:
    first = training(tmp_path).start()
    wait_for_checkpoint(first, tmp_path)
    first.wait_for_version(25)
    lose(first)
    first.hurry()
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "resume", NAME, "--runtime=local"],
        cwd=REPOSITORY,
        env={**os.environ, "HOME": str(tmp_path / "one")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_exact(first)
    assert (first.job_dir / "journal.json").stat().st_size > 0


def test_the_objects_of_a_job_of_a_cluster_name_its_places_in_storage(proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "code" / "digits").mkdir(parents=True)
    (tmp_path / "code" / "digits" / "model.py").write_text("def custom_model(): ...\n")
    url, manifests = url_of(tmp_path), tmp_path / "job.yaml"
    command = ["train", "--runtime=kubernetes", "--job_name=digits", "--image_name=image:1", f"--code={tmp_path}/code"]
    command += ["--job_command=python digits/model.py", "--training_data=/data", f"--job_dir={url}/"]
    command += [f"--envs=PASSWORD={PASSWORD}"]
    code, said = client(tmp_path, *command, f"--yaml={tmp_path}/no/job.yaml", KUBECONFIG=str(tmp_path / "none"))
    assert (code, "job.yaml" in said) == (2, True), said  # and the directory is still free
    code, said = client(tmp_path, *command, f"--yaml={manifests}", KUBECONFIG=str(tmp_path / "none"))
    assert code == 0, said
    first = next(iter(yaml.safe_load_all(manifests.read_text())))
    of_pods = JobSpec.from_json(first["data"]["spec.json"])
    stored = JobSpec.from_json(RemotePath(f"{url}/spec.json").read_bytes().decode())
    assert (of_pods.job_dir, of_pods.checkpoint_dir) == (url, f"{url}/checkpoints")
    assert of_pods.code == stored.code
    (archive,) = RemotePath(f"{url}/code").files()
    assert stored.code.endswith(f"@{url}/code/{archive}")
    assert stored.envs == "PASSWORD=***"
    code, said = client(tmp_path, *command, f"--yaml={manifests}", KUBECONFIG=str(tmp_path / "none"))
    assert (code, "`elasticdl resume" in said) == (2, False), said  # it was only written
    assert "no master has begun" in said
    command.remove(f"--job_dir={url}/")
    code, said = client(tmp_path, *command, "--job_dir=job", KUBECONFIG=str(tmp_path / "none"))
    assert (code, "--job_dir=job is a directory of this machine" in said) == (2, True), said


def test_files_of_one_machine_go_with_the_job_or_are_asked_for_on_another(proxy: FaultyProxy, tmp_path: Path) -> None:
    """A template goes along; a --cluster_spec is code, which is not taken from storage."""
    plugin, template = tmp_path / "cluster.py", tmp_path / "pod.yaml"
    plugin.write_text(
        "class C:\n    def with_pod(self, pod):\n        return pod\n"
        "    def with_service(self, service):\n        return service\ncluster = C()\n"
    )
    template.write_text("metadata: {labels: {team: a}}\n")
    command = ["train", "--runtime=kubernetes", "--job_name=digits", "--image_name=image:1"]
    command += ["--job_command=python model.py", "--training_data=/data", f"--job_dir={url_of(tmp_path)}"]
    command += [f"--cluster_spec={plugin}", f"--worker_pod_template={template}", f"--yaml={tmp_path}/job.yaml"]
    nowhere = {"KUBECONFIG": str(tmp_path / "none")}
    code, said = client(tmp_path, *command, **nowhere)
    assert code == 0, said
    stored = JobSpec.from_json(RemotePath(f"{url_of(tmp_path)}/spec.json").read_bytes().decode())
    assert json.loads(stored.worker_pod_template) == {"metadata": {"labels": {"team": "a"}}}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    template.unlink()
    plugin.rename(elsewhere / "cluster.py")
    resume = ["resume", f"--job_dir={url_of(tmp_path)}"]
    code, said = client(tmp_path, *resume, **nowhere)
    assert (code, f"--cluster_spec={plugin}" in said, "--cluster_spec=FILE" in said) == (2, True, True), said
    (elsewhere / "other.py").write_text("")
    code, said = client(tmp_path, *resume, f"--cluster_spec={elsewhere}/other.py", **nowhere)
    assert (code, "cluster.py" in said) == (2, True), said  # the name that it has in the job's image
    code, said = client(tmp_path, *resume, f"--cluster_spec={elsewhere}/cluster.py", **nowhere)
    assert (code, "cluster_spec" in said) == (1, False), said  # there is no cluster


def test_a_directory_that_is_no_jobs_is_refused_with_the_reason(proxy: FaultyProxy, tmp_path: Path) -> None:
    job = training(tmp_path)
    RemotePath(url_of(tmp_path)).storage.publish(f"{url_of(tmp_path)}/thesis.txt", b"years of work")
    for url, why in (
        (f"s3://bucket/{tmp_path.name}", "is not empty and not a job's directory"),
        (url_of(tmp_path), "is not empty and not a job's directory"),
        ("gs://bucket/job", "gcsfs"),
        ("s3://a:b@bucket/job", "credential"),
        ("https://host/job", "written"),
    ):
        assert why in refused(job, tmp_path, url)
    code, said = client(tmp_path, "resume", "--job_dir=s3://bucket/nothing")
    assert (code, "is not a job's directory: it has no spec.json" in said) == (1, True), said
