"""The code of --code: which files are packed, how pods get them, and what is not run."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from elasticdl.rpc.unpack_code import unpack
from elasticdl_client.choices import CODE_ERROR_VARIABLE
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import code, submit
from elasticdl_client.kubernetes.objects import job_manifests, role_pod, spec_for_pods
from elasticdl_client.kubernetes.pods import pod_manifest

BASE = {"job_name": "job", "image_name": "i", "model_def": "m.model", "training_data": "/d"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in {
        "train.py": "print(1)\n",
        "lib/é model.py": "x = 1\n",
        "data/big.bin": "0" * 1000,
        "notes.log": "no",
        ".gitignore": "data/\n*.log\n",
        "lib/__pycache__/model.pyc": "no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "train.py").chmod(0o700)
    return root


def packed(directory: Path, **flags: str) -> code.Archive:
    return code.pack(JobSpec.from_flags("train", {**BASE, "code": str(directory), **flags}))


def files_of(archive: code.Archive) -> dict[str, int]:
    with tarfile.open(fileobj=io.BytesIO(archive.data)) as packed:
        return {member.name: member.mode for member in packed.getmembers()}


PACKED = {".gitignore": 0o644, "lib/é model.py": 0o644, "train.py": 0o755}


def test_what_git_does_not_ignore_is_packed_in_a_repository_and_in_none(project: Path) -> None:
    plain = packed(project)
    assert files_of(plain) == PACKED
    assert not (project / ".git").exists()
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    subprocess.run(["git", "add", "--force", "train.py", "notes.log"], cwd=project, check=True)
    (project / "notes.log").unlink()  # git knows a file that is gone
    assert files_of(packed(project)) == PACKED


@pytest.mark.parametrize("is_submodule", [False, True])
def test_repositories_in_the_directory_are_packed_with_it(project: Path, is_submodule: bool) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
        subprocess.run(["git", *author, *arguments], check=True, capture_output=True)

    inner = project / "lib" / "inner"
    git("init", str(inner))
    (inner / "model.py").write_text("x = 1")
    (inner / ".gitignore").write_text("*.tmp")
    (inner / "left.tmp").write_text("no")
    git("-C", str(inner), "add", "model.py")
    git("-C", str(inner), "commit", "-m", "one")
    if is_submodule:
        git("init", str(project))
        git("-C", str(project), "submodule", "add", "./lib/inner", "lib/inner")
    names = {*PACKED, "lib/inner/model.py", "lib/inner/.gitignore", *([".gitmodules"] if is_submodule else [])}
    assert set(files_of(packed(project))) == names


def test_a_repository_in_a_repository_whose_own_is_damaged_is_packed(project: Path) -> None:
    inner = project / "lib" / "inner"
    for directory in (project, inner):
        subprocess.run(["git", "init", str(directory)], check=True, capture_output=True)
    (inner / "model.py").write_text("x = 1")
    shutil.rmtree(inner / ".git")
    (inner / ".git").mkdir()
    assert "lib/inner/model.py" in files_of(packed(project))


@pytest.mark.parametrize("has_git", [False, True])
def test_a_link_to_a_directory_is_refused(project: Path, has_git: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "shared").symlink_to(project / "lib")
    if not has_git:
        (project / ".gitignore").unlink()
        monkeypatch.setenv("PATH", "")
    with pytest.raises(FlagError, match="shared is a link to a directory"):
        packed(project)


def test_a_script_that_git_ignores_is_refused(project: Path) -> None:
    (project / ".gitignore").write_text("scratch/\n")
    (project / "scratch").mkdir()
    (project / "scratch" / "train.py").write_text("")
    with pytest.raises(FlagError, match=r"scratch/train.py is not among the files .* git ignores it"):
        packed(project, job_command="python ./scratch/train.py --lr=1", model_def="")


def test_without_git_a_gitignore_is_an_error_and_else_caches_are_left_out(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FlagError, match="no git to read it"):
        packed(project)
    (project / ".gitignore").unlink()
    assert set(files_of(packed(project))) == {"data/big.bin", "lib/é model.py", "notes.log", "train.py"}


def test_the_same_files_have_the_same_digest_whenever_they_are_packed(project: Path) -> None:
    first = packed(project)
    os.utime(project / "train.py", (1, 1))
    assert packed(project).reference == first.reference
    (project / "train.py").write_text("print(2)\n")
    assert packed(project).reference != first.reference


def test_all_pods_unpack_what_the_job_holds_before_they_start(project: Path, tmp_path: Path) -> None:
    (project / "noise.bin").write_bytes(os.urandom(400_000))  # more than two parts
    archive = packed(project)
    spec = dataclasses.replace(JobSpec.from_flags("train", BASE), code=str(archive.reference))
    manifests = job_manifests(spec, "token", archive=archive)
    parts = [one for one in manifests if one["metadata"]["name"].startswith("elasticdl-job-code-")]
    assert len(parts) == 3
    for number, part in enumerate(parts):
        (tmp_path / f"{number:04}").write_bytes(base64.b64decode(part["binaryData"]["part"]))
    digest = archive.reference.digest
    unpack(tmp_path, tmp_path / "zoo", digest)
    assert (tmp_path / "zoo" / "lib" / "é model.py").read_text() == "x = 1\n"
    assert os.access(tmp_path / "zoo" / "train.py", os.X_OK)
    for role in ("master", "ps", "worker"):
        pod = pod_manifest(spec_for_pods(spec), role_pod(spec, role))
        [own] = pod["spec"]["containers"]
        places = ["/var/run/elasticdl/code", "/model_zoo", "/var/lib/elasticdl/requirements"]
        assert own["command"][:8] == ["python", "-P", "-m", "elasticdl.rpc.unpack_code", digest, *places]
        assert own["command"][8:] == ["python", "-P", "-m", f"elasticdl.{role}"]
        assert {"name": "elasticdl-zoo", "mountPath": "/model_zoo"} in own["volumeMounts"]
        [code_volume] = [one for one in pod["spec"]["volumes"] if one["name"] == "elasticdl-code"]
        named = [source["configMap"]["name"] for source in code_volume["projected"]["sources"]]
        assert named == [part["metadata"]["name"] for part in parts]


def test_unpacked_code_is_read_only_and_survives_a_container_that_is_killed_meanwhile(
    project: Path, tmp_path: Path
) -> None:
    archive = packed(project)
    (tmp_path / "0000").write_bytes(archive.data)
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    (zoo / "train.py").write_text("half of a fi")  # of the first life
    (zoo / "train.py").chmod(0o444)
    unpack(tmp_path, zoo, archive.reference.digest)
    modes = {name: (zoo / name).stat().st_mode & 0o777 for name in ("train.py", "lib/é model.py", "lib")}
    assert modes == {"train.py": 0o555, "lib/é model.py": 0o444, "lib": 0o555}
    assert (zoo / "train.py").read_text() == "print(1)\n"
    (tmp_path / "0000").unlink()
    unpack(tmp_path, zoo, archive.reference.digest)  # the third life needs nothing


def test_code_that_was_changed_or_is_gone_is_not_unpacked(project: Path, tmp_path: Path) -> None:
    archive = packed(project)
    with pytest.raises(JobError, match="are gone"):
        unpack(tmp_path, tmp_path / "zoo", "0" * 64)
    (tmp_path / "0000").write_bytes(archive.data[:-1] + b"x")
    with pytest.raises(JobError, match="not the code that was submitted"):
        unpack(tmp_path, tmp_path / "zoo", archive.reference.digest)
    assert not (tmp_path / "zoo").exists()


def test_an_archive_cannot_write_outside_of_its_directory(tmp_path: Path) -> None:
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    (tmp_path / "0000").write_bytes(evil.getvalue())
    with pytest.raises(JobError, match=r"\.\./outside is not a file below the directory"):
        unpack(tmp_path, tmp_path / "zoo", hashlib.sha256(evil.getvalue()).hexdigest())
    assert not (tmp_path / "outside").exists()


def prepared(source: object, digest: str, target: Path, *command: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of a pod's process that unpacks code."""
    places = [digest, str(source), str(target), str(target.parent / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl.rpc.unpack_code", *places, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_process_says_why_it_does_not_become_the_pods_command(tmp_path: Path) -> None:
    ended, said = prepared(tmp_path, "0" * 64, tmp_path / "zoo", "echo", "started")
    assert ended == 1
    assert said == "--code: The ConfigMaps with the code of the job are gone.\n  → Submit the job again.\n"


def test_a_master_without_its_code_starts_to_end_the_job(tmp_path: Path) -> None:
    command = ("printenv", CODE_ERROR_VARIABLE)
    ended, said = prepared(tmp_path, "0" * 64, tmp_path / "zoo", *command, ELASTICDL_JOB_NAME="job")
    assert ended == 0
    gone = "--code: The ConfigMaps with the code of the job are gone."
    assert json.loads(said) == [gone, "Submit the job again.", False]


def test_code_that_cannot_be_written_is_an_error_in_words(project: Path, tmp_path: Path) -> None:
    archive = packed(project)
    (tmp_path / "0000").write_bytes(archive.data)
    (tmp_path / "file").write_text("")
    zoo, digest = tmp_path / "file" / "zoo", archive.reference.digest
    ended, said = prepared(tmp_path, digest, zoo, "echo", "started")
    assert (ended, said.count("\n")) == (1, 2), said
    assert said.startswith(f"--code: The code cannot be unpacked in {zoo}: [Errno 20] Not a directory")
    ended, said = prepared(tmp_path, digest, zoo, "printenv", CODE_ERROR_VARIABLE, ELASTICDL_JOB_NAME="job")
    assert ended == 0
    what, _, may_pass = json.loads(said)
    assert "Not a directory" in what
    assert may_pass


def test_too_much_code_is_refused_with_the_largest_files_and_the_way_to_storage(project: Path) -> None:
    (project / "weights.pt").write_bytes(os.urandom(code.MAX_BYTES + 1))
    with pytest.raises(FlagError, match=r"too large, 4\.0 MiB, compressed: .* weights\.pt \(4\.0 MiB\)") as caught:
        packed(project, checkpoint_dir="s3://bucket/checkpoints")
    assert "--code_storage=s3://bucket/checkpoints/code" in caught.value.hint


def test_larger_code_lies_in_storage_and_smaller_code_in_config_maps(project: Path) -> None:
    assert packed(project, code_storage="s3://bucket/code/").reference.num_parts == 1
    (project / "weights.pt").write_bytes(os.urandom(code.MAX_BYTES + 1))
    archive = packed(project, code_storage="s3://bucket/code/")
    found = archive.reference
    assert (found.num_parts, found.url) == (0, f"s3://bucket/code/{found.digest}.tar.gz")
    assert code.parse(str(found)) == found
    spec = dataclasses.replace(JobSpec.from_flags("train", BASE), code=str(found))
    assert not [one for one in job_manifests(spec, "token", archive=archive) if "code" in one["metadata"]["name"]]
    pod = pod_manifest(spec_for_pods(spec), role_pod(spec, "worker"))
    assert pod["spec"]["containers"][0]["command"][4:7] == [found.digest, found.url, "/model_zoo"]
    assert "elasticdl-code" not in [one["name"] for one in pod["spec"]["volumes"]]


def test_requirements_that_pods_could_not_install_are_refused_before_anything_is_packed(project: Path) -> None:
    (project / "requirements.txt").write_text("numpy\n-e .\n")
    flags = {**BASE, "code": str(project), "model_def": "", "job_command": "python train.py"}
    with pytest.raises(FlagError, match=r"requirements\.txt, line 2: -e \. is a path"):
        submit.run(JobSpec.from_flags("train", flags))


def test_a_cache_of_requirements_lies_on_a_mount_that_can_be_written(project: Path) -> None:
    flags = {**BASE, "code": str(project), "requirements_cache": "/cache"}
    with pytest.raises(FlagError, match="--requirements_cache=/cache is on no mount of --volume"):
        submit.mount_notes(JobSpec.from_flags("train", flags))
    volume = "host_path=/var/cache,mount_path=/cache"
    spec = dataclasses.replace(JobSpec.from_flags("train", {**flags, "volume": volume}), code=f"sha256:{'0' * 64}/1")
    assert not [note for note in submit.mount_notes(spec) if "requirements_cache" in note]
    pod = pod_manifest(spec_for_pods(spec), role_pod(spec, "worker"))
    assert pod["spec"]["containers"][0]["command"][6:8] == ["/model_zoo", "/cache"]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"code_storage": "s3://b/c"}, "--code_storage is for the code of --code, and there is none"),
        ({"code": "{project}", "code_storage": "/code"}, "is not a URL of storage"),
        ({"code": "{project}", "code_storage": "https://host/code"}, "cannot be written"),
        ({"code": "no/such"}, "no/such.* does not exist"),
        ({"code": "{project}", "model_zoo": "/zoo"}, "--model_zoo=/zoo names another one"),
        ({"code": "{project}", "volume": "claim_name=c,mount_path=/model_zoo"}, "--volume mounts something else"),
        ({"code": "{project}"}, r"m\.py does not exist"),
        ({"code": "{project}/data", "job_command": "python a.py", "model_def": ""}, "holds no file"),
    ],
)
def test_wrong_code_is_refused_before_a_cluster_is_asked(project: Path, flags: dict[str, str], what: str) -> None:
    given = {name: value.format(project=project) for name, value in flags.items()}
    if given.get("job_command"):
        (project / ".gitignore").rename(project / "data" / ".gitignore")
        (project / "data" / ".gitignore").write_text("*\n")
    with pytest.raises(ElasticDLError, match=what):
        submit.run(JobSpec.from_flags("train", {**BASE, **given}))
