"""requirements.txt beside the code: errors of the client, and pip's installation in a pod, once for each cache."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticdl.cluster.cluster import explained
from elasticdl.rpc.unpack_code import installed
from elasticdl_client.choices import CODE_ERROR_VARIABLE
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.requirements_file import check_installable, check_installed

FILE = "requirements.txt"


def write_wheel(directory: Path, name: str, version: str, needs: str = "") -> None:
    """Write a wheel with one module that holds its version."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        required = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    directory = tmp_path / "wheels"
    write_wheel(directory, "alphapack", "1.0", needs="betapack>=2")
    write_wheel(directory, "betapack", "2.5")
    write_wheel(directory, "packaging", "999.0")  # of which this Python has another version
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def write_code(tmp_path: Path, requirements: str) -> Path:
    directory = tmp_path / "zoo"
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(requirements)
    return directory


def printed(variables: dict[str, str], program: str) -> list[str]:
    """Return the output of a process that a pod starts."""
    found = subprocess.run(
        ["python", "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return found.stdout.split()


def test_two_pods_of_a_node_install_once_what_their_image_lacks(wheels: Path, tmp_path: Path) -> None:
    zoo, cache = write_code(tmp_path, "alphapack  # mine\nnumpy\n-r more.txt\n"), tmp_path / "cache"
    (zoo / "more.txt").write_text("packaging==999.0\n")
    program = (
        "import sys; from pathlib import Path; from elasticdl.rpc.logs import log_to_stdout; log_to_stdout();"
        "from elasticdl.rpc.unpack_code import installed; installed(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(zoo), str(cache)]
    pods = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(pod.communicate()[0] for pod in pods)
    assert [pod.returncode for pod in pods] == [0, 0]
    assert said.count("packages installed") == said.count("3 packages installed") == 1
    [environment] = [path for path in cache.glob("python*") if path.is_dir()]
    (environment / ".complete").unlink()  # as if the pod had been killed while it installed
    next(environment.glob("lib/*/site-packages/betapack.py")).unlink()
    variables = installed(zoo, cache)
    shutil.rmtree(wheels)
    assert installed(zoo, cache) == variables
    versions = "alphapack.VERSION, betapack.VERSION, version('packaging'), numpy.__file__"
    show = f"import alphapack, betapack, numpy; from importlib.metadata import version; print({versions})"
    *own, numpy = printed(variables, show)
    assert own == ["1.0", "2.5", "999.0"]
    assert not Path(numpy).is_relative_to(tmp_path)
    assert printed({}, "from importlib.metadata import version; print(version('packaging'))") != ["999.0"]


def test_installed_modules_are_compiled_where_pip_is_configured_not_to(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_COMPILE", "0")
    zoo, cache = write_code(tmp_path, "betapack\n"), tmp_path / "cache"
    variables = installed(zoo, cache) | {"PYTHONDONTWRITEBYTECODE": "1"}  # which the image sets
    [bytecode] = printed(variables, "import betapack; print(betapack.__cached__)")
    assert Path(bytecode).exists()


def test_pips_last_lines_are_the_reason_of_a_failure_which_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    zoo, cache = write_code(tmp_path, "betapack>=99\n"), tmp_path / "cache"
    with pytest.raises(JobError, match="pip has ended with 1") as caught:
        installed(zoo, cache)
    assert "No matching distribution found for betapack>=99" in caught.value.what
    told = explained("exit code 1", f"pip: Collecting betapack\n--code: {caught.value}\n")  # of a worker, by its master
    assert "pip has ended with 1" in told
    assert "No matching distribution found for betapack>=99" in told
    assert [path for path in cache.glob("python*") if path.is_dir()] == []


def test_a_failure_of_pip_does_not_end_a_job_that_has_begun(tmp_path: Path) -> None:
    zoo = write_code(tmp_path, "no-such-package\n")
    (zoo / ".elasticdl-code").write_text("digest")  # unpacked by an earlier life of the container
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "cache"), "ELASTICDL_JOB_NAME": "job"}
    places = ["digest", str(tmp_path), str(zoo), str(tmp_path / "cache")]
    master = [sys.executable, "-m", "elasticdl.rpc.unpack_code", *places, "printenv", CODE_ERROR_VARIABLE]
    output = subprocess.run(
        master, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    what, _, may_pass = json.loads(output.splitlines()[-1])
    assert "pip has ended with 1" in what
    assert may_pass


def test_a_pod_that_is_deleted_ends_while_pip_waits_for_an_index(tmp_path: Path) -> None:
    zoo = write_code(tmp_path, "no-such-package\n")
    (zoo / ".elasticdl-code").write_text("digest")  # unpacked by an earlier life of the container
    with socket.create_server(("127.0.0.1", 0)) as index:  # which takes the connection and never answers
        address = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        settings = {
            "PIP_INDEX_URL": address,
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }
        places = ["digest", str(tmp_path), str(zoo), str(tmp_path / "cache")]
        pod = subprocess.Popen(
            [sys.executable, "-m", "elasticdl.rpc.unpack_code", *places, "echo", "started"],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
        )
        connection, _ = index.accept()  # pip asks
        pod.send_signal(signal.SIGTERM)
        output, _ = pod.communicate()
        assert pod.returncode == 128 + signal.SIGTERM
        assert b"started" not in output
        while connection.recv(4096):  # until pip is gone, too
            pass
        connection.close()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=f"installed in {tmp_path}/file/cache: .*Not a directory"):
        installed(write_code(tmp_path, "numpy\n"), tmp_path / "file" / "cache")


def test_code_without_requirements_needs_no_cache(tmp_path: Path) -> None:
    assert installed(tmp_path, tmp_path / "cache") == {}
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("numpy\n\n-e .\n", r"line 3: -e \. is a path"),
        ("./wheels/a.whl", r"line 1: \./wheels/a\.whl is a path"),
        ("git+https://host/a.git", "is a path, or a URL alone"),
        ("numpy \\\n  ==\n", "line 1: .* is not a requirement"),
        ("-r none.txt", "there is no file none.txt"),
        ("-r../outside.txt", "there is no file ../outside.txt"),
        ("--requirement=none.txt", "there is no file none.txt"),
        ("-r=none.txt", "there is no file =none.txt"),  # as pip reads it
    ],
)
def test_what_pods_could_not_install_is_refused_by_file_and_line(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "outside.txt").write_text("numpy\n")
    zoo = write_code(tmp_path, text)
    with pytest.raises(FlagError, match=what):
        check_installable(zoo)


INSTALLABLE = """
--prefer-binary
-c constraints.txt
numpy>=1 --hash=sha256:00
alpha @ https://host/alpha.whl#sha256=00  # a comment
alpha[extra]; python_version < "3"
"""


@pytest.mark.parametrize("option", ["-c ", "-c", "--constraint=", "--constraint "])
@pytest.mark.parametrize("check", [check_installable, check_installed])
def test_a_constraint_asks_for_nothing_and_a_marker_may_exclude_a_requirement(
    check: Callable[[Path], None], option: str, tmp_path: Path
) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "constraints.txt").write_text("no-such-package==1\n-c constraints.txt\n")
    requirements = INSTALLABLE.replace("alpha @ https://host/alpha.whl#sha256=00", "").replace("-c ", option)
    check(write_code(tmp_path, requirements))


def test_a_local_job_names_what_this_python_lacks(tmp_path: Path) -> None:
    zoo = write_code(tmp_path, "numpy<0.1\n-e .\npytest\nno-such-package>=2\npyyaml\n")
    with pytest.raises(FlagError, match=r"numpy<0\.1 \(it has .*\), no-such-package>=2\.") as caught:
        check_installed(zoo)
    assert f"pip install -r {zoo / FILE}" in caught.value.hint
