"""`elasticdl zoo init`: the files it writes into a folder of models, and its errors."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from zoo_folders import CLIENT_METADATA, RUNTIME_METADATA, VERSION, model_zoo, wheel, wheels

from elasticdl_client import zoo
from elasticdl_client.errors import FlagError
from elasticdl_client.zoo.dockerfile import Recipe, dockerfile
from elasticdl_client.zoo.folder import for_extra

ROOT = Path(__file__).resolve().parents[2]


def instructions(folder: Path) -> list[str]:
    """The Dockerfile without comments, each instruction in one line."""
    text = (folder / "Dockerfile").read_text().replace("\\\n", "")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def refusal(*arguments: str) -> str:
    with pytest.raises(FlagError) as caught:
        zoo.run(["init", *arguments])
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_zoo(tmp_path / "models")


def test_the_image_holds_the_runtime_of_the_clients_own_version(folder: Path) -> None:
    assert zoo.run(["init", str(folder)]) == 0
    assert instructions(folder)[0] == "FROM python:3.11-slim"
    assert f"elasticdl2[tensorflow,allreduce]=={VERSION}" in (folder / ".elasticdl" / "runtime.txt").read_text()


def test_the_models_come_last_and_belong_to_a_user_without_root(folder: Path) -> None:
    zoo.run(["init", str(folder)])
    *earlier, last = instructions(folder)
    assert last == "COPY --chown=1000:1000 . /model_zoo/"
    assert [line for line in earlier if line.startswith("USER")][-1] == "USER 1000:1000"
    assert earlier[-1] == "WORKDIR /model_zoo"
    assert not any(line.startswith(("COPY . ", "ADD")) for line in earlier)


def test_no_index_is_written_unless_the_flag_gives_one(folder: Path) -> None:
    zoo.run(["init", str(folder)])
    assert "://" not in (folder / "Dockerfile").read_text()
    zoo.run(["init", str(folder), "--extra_pypi_index=https://pypi.example.com/simple", "--force"])
    lines = instructions(folder)
    given = lines.index("ARG PIP_EXTRA_INDEX_URL=https://pypi.example.com/simple")
    assert given < min(number for number, line in enumerate(lines) if " pip install " in line)


def test_packages_are_compiled_whatever_the_base_image_has_set_for_pip(folder: Path) -> None:
    (folder / "requirements.txt").write_text("numpy\n")
    assert zoo.run(["init", str(folder), f"--local_pkg_dir={wheels(folder.parent / 'dist')}"]) == 0
    installations = [line for line in instructions(folder) if " pip install " in line]
    assert len(installations) == 3
    assert all(" pip install --compile " in line for line in installations)


def test_credentials_in_the_address_of_an_index_are_warned_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.run(["init", str(folder), "--extra_pypi_index=https://me:secret@pypi.example.com/simple"])
    assert "credentials" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        (["--framework", "torch"], "torch"),
        (["--framework", "estimator"], "estimator"),
        (["--framework", "Tensorflow"], "tensorflow,allreduce"),
        (["--framework=tensorflow", "--without=allreduce"], "tensorflow"),
    ],
)
def test_the_framework_is_an_extra_of_the_runtime(folder: Path, arguments: list[str], extras: str) -> None:
    zoo.run(["init", str(folder), *arguments])
    assert f"elasticdl2[{extras}]==" in (folder / ".elasticdl" / "runtime.txt").read_text()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["--framework=torch"], ["torch"]),
        (["--framework=tensorflow"], ["tensorflow-cpu", "torch"]),
        (["--without=allreduce"], ["tensorflow-cpu"]),
    ],
)
def test_an_image_from_wheels_has_its_frameworks_and_no_other(
    folder: Path, tmp_path: Path, arguments: list[str], packages: list[str]
) -> None:
    zoo.run(["init", str(folder), f"--local_pkg_dir={wheels(tmp_path / 'dist')}", *arguments])
    lines = (folder / ".elasticdl" / "runtime.txt").read_text().splitlines()
    found = [line.partition("<")[0] for line in lines if line.startswith(("tensorflow", "torch"))]
    assert found == packages
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["torch"] == extras["allreduce"] == ["torch>=2.6,<3"]
    assert any("pip install --compile --requirement" in line and "runtime.txt" in line for line in instructions(folder))


def test_the_folder_may_be_given_as_a_flag_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert zoo.run(["init", f"--model_zoo={folder}"]) == 0
    (folder / "Dockerfile").unlink()
    monkeypatch.chdir(folder)
    assert zoo.run(["init"]) == 0
    assert (folder / "Dockerfile").exists()


def test_wheels_come_along_and_their_requirements_have_a_layer_of_their_own(folder: Path, tmp_path: Path) -> None:
    zoo.run(["init", str(folder), f"--local_pkg_dir={wheels(tmp_path / 'dist')}"])
    names = [f"elasticdl2-{VERSION}-py3-none-any.whl", f"elasticdl2_client-{VERSION}-py3-none-any.whl"]
    assert sorted(path.name for path in (folder / ".elasticdl" / "wheels").iterdir()) == names
    requirements = (folder / ".elasticdl" / "runtime.txt").read_text().splitlines()[1:]
    assert requirements == [
        "kubernetes>=29",
        "numpy<3,>=1.26",
        'PyYAML>=6; python_version >= "3.11"',
        'tensorflow-cpu<3,>=2.17; (platform_system == "Linux" and platform_machine == "x86_64")',
        "torch<3,>=2.6",
    ]
    lines = instructions(folder)
    [copied] = [number for number, line in enumerate(lines) if line.startswith("COPY .elasticdl/wheels/")]
    [installed] = [number for number, line in enumerate(lines) if "--no-index" in line]
    assert copied > max(number for number, line in enumerate(lines) if "runtime.txt" in line)
    assert installed == copied + 1
    assert f"elasticdl2=={VERSION} elasticdl2-client=={VERSION}" in lines[installed]


def test_newer_wheels_of_the_same_version_need_no_force(folder: Path, tmp_path: Path) -> None:
    dist = wheels(tmp_path / "dist")
    zoo.run(["init", str(folder), f"--local_pkg_dir={dist}"])
    wheel(dist, "elasticdl2", RUNTIME_METADATA + "Anew.\n")
    assert zoo.run(["init", str(folder), f"--local_pkg_dir={dist}"]) == 0
    copied = folder / ".elasticdl" / "wheels" / f"elasticdl2-{VERSION}-py3-none-any.whl"
    assert copied.read_bytes() == (dist / copied.name).read_bytes()


def test_the_wheels_that_are_in_the_folder_already_can_be_named_again(folder: Path, tmp_path: Path) -> None:
    zoo.run(["init", str(folder), f"--local_pkg_dir={wheels(tmp_path / 'dist')}"])
    own = folder / ".elasticdl" / "wheels"
    assert zoo.run(["init", str(folder), f"--local_pkg_dir={own}"]) == 0
    assert len(list(own.iterdir())) == 2


@pytest.mark.parametrize(
    ("tags", "base_image", "complaint"),
    [
        ("cp311-cp311-linux_x86_64", "python:3.11-slim", ""),
        ("cp311-cp311-manylinux_2_28_x86_64.manylinux2014_x86_64", "registry.example.com/python:3.11", ""),
        ("cp311-cp311-linux_x86_64", "gpu-base:1", ""),
        ("py3-none-any", "python:3.12-slim", ""),
        ("cp311-cp311-linux_x86_64", "python:3.12-slim", "was built for Python 3.11, the image has 3.12"),
        ("cp313-cp313-linux_x86_64", "python:3.12", "was built for Python 3.13, the image has 3.12"),
        ("cp311-cp311-macosx_14_0_arm64", "python:3.11-slim", "was built for macosx_14_0_arm64"),
    ],
)
def test_wheels_are_for_the_python_and_the_system_of_the_image(
    folder: Path, tmp_path: Path, tags: str, base_image: str, complaint: str
) -> None:
    wheel(tmp_path / "dist", "elasticdl2", RUNTIME_METADATA, tags=tags)
    wheel(tmp_path / "dist", "elasticdl2_client", CLIENT_METADATA)
    arguments = [str(folder), f"--local_pkg_dir={tmp_path / 'dist'}", f"--base_image={base_image}"]
    if complaint:
        assert complaint in refusal(*arguments)
        assert not (folder / "Dockerfile").exists()
    else:
        assert zoo.run(["init", *arguments]) == 0
        assert (folder / ".elasticdl" / "wheels" / f"elasticdl2-{VERSION}-{tags}.whl").exists()


def test_of_the_wheels_for_several_pythons_those_go_along_that_fit_the_image(folder: Path, tmp_path: Path) -> None:
    dist = wheels(tmp_path / "dist")
    (dist / f"elasticdl2-{VERSION}-py3-none-any.whl").unlink()
    platforms = ("manylinux2014_x86_64", "manylinux2014_aarch64")
    for tags in ("cp311-cp311", "cp312-abi3"):
        for platform in platforms:
            wheel(dist, "elasticdl2", RUNTIME_METADATA, tags=f"{tags}-{platform}")
    for image, tags in (("python:3.11", "cp311-cp311"), ("python:3.12", "cp312-abi3"), ("python:3.14", "cp312-abi3")):
        assert zoo.run(["init", str(folder), f"--local_pkg_dir={dist}", f"--base_image={image}", "--force"]) == 0
        copied = {path.name for path in (folder / ".elasticdl" / "wheels").glob("elasticdl2-*")}
        assert copied == {f"elasticdl2-{VERSION}-{tags}-{platform}.whl" for platform in platforms}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda dist: (dist / f"elasticdl2-{VERSION}-py3-none-any.whl").unlink(), "no wheel of elasticdl2 "),
        (lambda dist: (dist / f"elasticdl2_client-{VERSION}-py3-none-any.whl").unlink(), "no wheel of elasticdl2-c"),
        (lambda dist: wheel(dist, "elasticdl2", RUNTIME_METADATA, "0.9.0"), "is of version 0.9.0, this client of"),
        (lambda dist: wheel(dist, "numpy", "Name: numpy\n", "2.0", "cp310-cp310-any"), "was built for Python 3.10"),
        (lambda dist: (dist / f"elasticdl2-{VERSION}-py3-none-any.whl").write_bytes(b"PK"), "is damaged"),
        (lambda dist: wheel(dist, "elasticdl2_client", CLIENT_METADATA, f"{VERSION}.dev1"), "is of version"),
    ],
)  # fmt: skip
def test_wheels_of_no_use_are_refused_and_nothing_is_written(
    folder: Path, tmp_path: Path, change, complaint: str
) -> None:
    dist = wheels(tmp_path / "dist")
    change(dist)
    assert complaint in refusal(str(folder), f"--local_pkg_dir={dist}")
    assert not (folder / "Dockerfile").exists()
    assert not (folder / ".elasticdl").exists()


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("numpy<3,>=1.26", "numpy<3,>=1.26"),
        ('a>=1; python_version < "3.12"', 'a>=1; python_version < "3.12"'),
        ('a==1; extra == "torch"', "a==1"),
        ("a==1; extra == 'torch'", "a==1"),
        ('a==1; extra == "tensorflow"', ""),
        ('a; (x == "1" or y == "2") and extra == "torch"', 'a; (x == "1" or y == "2")'),
        ('a; x == "1" and extra == "dev"', ""),
    ],
)
def test_a_requirement_counts_for_its_own_extra_alone(line: str, kept: str) -> None:
    assert for_extra(line, ("torch",)) == kept


def test_a_cluster_spec_goes_into_the_image_until_it_is_left_out(folder: Path, tmp_path: Path) -> None:
    spec = tmp_path / "on_prem.py"
    spec.write_text("class Cluster: ...\n")
    zoo.run(["init", str(folder), f"--cluster_spec={spec}"])
    copied = folder / ".elasticdl" / "cluster_spec" / "on_prem.py"
    assert copied.read_text() == spec.read_text()
    assert "COPY --chown=1000:1000 .elasticdl/cluster_spec/ /cluster_spec/" in instructions(folder)
    zoo.run(["init", str(folder), "--force"])
    assert not copied.exists()
    assert "cluster_spec" not in (folder / "Dockerfile").read_text()


def test_jobs_and_models_of_a_home_directory_survive_and_stay_out_of_the_image(folder: Path) -> None:
    kept = [folder / ".elasticdl" / name for name in ("jobs/job/checkpoints/version-1", "models/m/1", "sql_history")]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of a month")
    for _ in range(2):
        assert zoo.run(["init", str(folder), "--force"]) == 0
    assert [path.read_text() for path in kept] == ["of a month"] * 3
    assert not any("of a month" in (folder / name).read_text() for name in packed(folder))


def packed(folder: Path) -> list[str]:
    """The files that go to the builder."""
    from docker.utils import exclude_paths

    patterns = [line for line in (folder / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    return [name for name in exclude_paths(str(folder), patterns) if (folder / name).is_file()]


def test_an_edited_dockerfile_is_kept_unless_forced(folder: Path) -> None:
    zoo.run(["init", str(folder)])
    path = folder / "Dockerfile"
    written = path.read_text()
    assert zoo.run(["init", str(folder)]) == 0  # it is the same: no question
    path.write_text(written + "RUN echo mine\n")
    assert "--force overwrites it" in refusal(str(folder))
    assert "mine" in path.read_text()
    assert zoo.run(["init", str(folder), "--force"]) == 0
    assert path.read_text() == written


@pytest.mark.parametrize(("answer", "exit_code", "kept"), [("y", 0, False), ("n", 2, True), ("", 2, True)])
def test_on_a_terminal_it_asks(folder: Path, answer: str, exit_code: int, kept: bool) -> None:
    (folder / "Dockerfile").write_text("FROM mine\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "elasticdl_client.main", "zoo", "init", str(folder)],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"[y/N]" not in said:
        said += os.read(ours, 1024)
    os.write(ours, answer.encode() + b"\n")
    assert process.wait(30) == exit_code
    os.close(ours)
    assert ((folder / "Dockerfile").read_text() == "FROM mine\n") == kept
    assert (folder / ".elasticdl").exists() != kept


def test_a_dockerignore_of_the_user_is_left_alone(folder: Path) -> None:
    (folder / ".dockerignore").write_text("mine\n")
    zoo.run(["init", str(folder), "--force"])
    assert (folder / ".dockerignore").read_text() == "mine\n"


def test_a_dockerignore_of_an_earlier_version_lets_local_jobs_in_no_more(folder: Path) -> None:
    spec = folder / ".elasticdl" / "jobs" / "job" / "spec.json"
    spec.parent.mkdir(parents=True)
    spec.write_text("a token")
    old = "# What does not go into the image, one pattern a line.  (.elasticdl must.)\nDockerfile\nmine\n"
    (folder / ".dockerignore").write_text(old)
    (folder / "mine").touch()
    zoo.run(["init", str(folder)])
    sent = packed(folder)
    assert ".elasticdl/runtime.txt" in sent
    assert {".elasticdl/jobs/job/spec.json", "mine"}.isdisjoint(sent)


def test_the_dockerignore_that_it_writes_spares_what_the_build_needs(folder: Path, tmp_path: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"")
    (folder / "mnist" / ".venv").mkdir()
    (folder / "requirements.txt").write_text("six\n")
    spec = tmp_path / "on_prem.py"
    spec.write_text("class Cluster: ...\n")
    other = wheel(wheels(tmp_path / "dist"), "six", "Metadata-Version: 2.4\nName: six\n", "1")
    zoo.run(["init", str(folder), f"--local_pkg_dir={other.parent}", f"--cluster_spec={spec}"])
    sent = packed(folder)
    copied = {f".elasticdl/{name}" for name in ("runtime.txt", "cluster_spec/on_prem.py", f"packages/{other.name}")}
    assert {*copied, "requirements.txt", "mnist/model.py"} <= set(sent)
    assert any(path.startswith(".elasticdl/wheels/elasticdl2-") for path in sent)
    assert not any("__pycache__" in path or ".venv" in path for path in sent)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing"], "does not exist"),
        (["--cluster_spec=missing.py"], "--cluster_spec=missing.py: there is no such file"),
        (["--local_pkg_dir=missing"], "there is no such folder"),
        (["--base_image=python:3.9"], "needs Python 3.11 or later"),
        (["--base_image=registry.example.com/python:3.10-slim"], "needs Python 3.11 or later"),
        (["--base_image=a b"], "not the name of an image"),
        (["--base_image=python:3.12", "--framework=estimator"], "does not support Python after 3.11"),
        (["--framework=jax"], "is one of tensorflow, torch, estimator"),
        (["--without=torch"], "nothing of that name can be left out"),
        (["--framework=torch", "--without=allreduce"], "is for TensorFlow images"),
        (["--extra_pypi_index=pypi.example.com"], "not the address of a package index"),
        (["--extra_pypi_index=https://x/ RUN"], "not the address of a package index"),
        (["--base-imag=x"], "Did you mean --base_image?"),
        (["--zzz"], "--framework, --without, --base_image"),
        (["--framework=torch", "--framework=torch"], "given twice"),
        (["--framework"], "needs a value"),
        (["-f"], "'-f' is not a flag"),
        ([".", "mnist"], "takes one PATH"),
        (["mnist", "--model_zoo=."], "Two folders"),
        (["--force=maybe"], "takes true or false"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(folder)
    assert complaint in refusal(*arguments)
    assert not (folder / "Dockerfile").exists()


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    (environment / "lib").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text("")
    (environment / "lib" / "site.py").write_text("")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "module.py").write_text("")
    assert "holds no Python file" in refusal(str(tmp_path))


def test_a_folder_that_cannot_be_written_is_said_without_a_traceback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".elasticdl").write_text("in the way\n")
    assert zoo.run(["init", str(folder)]) == 1
    assert "Cannot write" in capsys.readouterr().err


def test_the_dockerfile_of_this_repository_is_what_init_writes() -> None:
    expected = dockerfile(Recipe(VERSION, "python:3.11-slim", (), has_wheels=True))
    wrong = (
        "write it anew: make wheels; elasticdl zoo init model_zoo --local_pkg_dir=dist; cp model_zoo/Dockerfile docker"
    )
    assert (ROOT / "docker" / "Dockerfile").read_text() == expected, wrong


def test_the_readme_of_the_images_names_commands_and_flags_that_exist() -> None:
    from elasticdl_client.zoo.arguments import COMMANDS

    text = (ROOT / "docker" / "README.md").read_text()
    known = {name for command in COMMANDS.values() for name in command.flags}
    [block] = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    used = {flag for line in block.splitlines() if "elasticdl zoo" in line for flag in re.findall(r"--(\w+)", line)}
    assert used
    assert used <= known


def test_wheels_of_others_are_preferred_to_those_of_the_index(folder: Path, tmp_path: Path) -> None:
    dist = wheels(tmp_path / "dist")
    torch = wheel(dist, "torch", "Name: torch\n", "2.13.0+cpu", "cp311-cp311-linux_x86_64")
    assert zoo.run(["init", str(folder), f"--local_pkg_dir={dist}"]) == 0
    assert (folder / ".elasticdl" / "packages" / torch.name).read_bytes() == torch.read_bytes()
    text = (folder / "Dockerfile").read_text()
    assert text.index("COPY .elasticdl/packages/") < text.index("ARG PIP_FIND_LINKS=") < text.index("pip install")
    assert torch.name not in text.partition("The runtime itself")[2]
    runtime = (folder / ".elasticdl" / "runtime.txt").read_text().splitlines()
    assert "torch==2.13.0+cpu" in runtime  # not the newest of its range
    assert not [line for line in runtime if line.startswith("torch<")]
