"""`elasticdl zoo build` and `push`, as far as they go without an engine, and what they make of its words."""

from __future__ import annotations

import errno
import io
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from zoo_folders import model_zoo

from elasticdl_client import zoo
from elasticdl_client.errors import FlagError
from elasticdl_client.zoo.arguments import registry_of, split_image_name
from elasticdl_client.zoo.build import build, context_sizes, failure, prepared_folder
from elasticdl_client.zoo.display import (
    BuildStep,
    Failure,
    Line,
    LineDisplay,
    StepDisplay,
    Transfer,
    read_messages,
    size_text,
)

# As Docker Engine 20.10 says it.
CACHED_STEP: list[dict[str, Any]] = [
    {"stream": "Step 1/3 : FROM python:3.11-slim"},
    {"stream": "\n"},
    {"stream": " ---\u003e d953153c7f9e\n"},
    {"stream": "Step 2/3 : RUN getent passwd 1000 ||    useradd"},
    {"stream": "\n"},
    {"stream": " ---\u003e Using cache\n"},
    {"stream": " ---\u003e c70959c7a03c\n"},
]
FAILING_STEP: list[dict[str, Any]] = [
    {"stream": "Step 3/3 : RUN python -m pip install nothing"},
    {"stream": "\n"},
    {"stream": " ---\u003e Running in 9c22b8a9c0de\n"},
    {"stream": "Collecting nothing\n  Downloading"},
    {"stream": " nothing.whl\n"},
    {"stream": "\u001b[91mERROR: No matching distribution found for nothing\n\u001b[0m"},
    {"stream": "Removing intermediate container 9c22b8a9c0de\n"},
    {
        "errorDetail": {"code": 1, "message": "The command '/bin/sh -c …' returned a non-zero code: 1"},
        "error": "The command '/bin/sh -c …' returned a non-zero code: 1",
    },
]
PULL: list[dict[str, Any]] = [
    {"status": "Pulling from library/python", "id": "3.11-slim"},
    {"status": "Pulling fs layer", "progressDetail": {}, "id": "a"},
    {
        "status": "Downloading",
        "progressDetail": {"current": 500_000, "total": 2_000_000},
        "id": "a",
        "progress": "[=>]",
    },
    {
        "status": "Downloading",
        "progressDetail": {"current": 900_000, "total": 2_000_000},
        "id": "a",
        "progress": "[=>]",
    },
    {"status": "Pull complete", "progressDetail": {}, "id": "a"},
    {"status": "Digest: sha256:0123"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = model_zoo(tmp_path / "models")
    (found / "Dockerfile").write_text("FROM scratch\n")
    return found


@pytest.mark.parametrize(
    ("name", "repository", "tag"),
    [
        ("zoo", "zoo", "latest"),
        ("team/zoo:1.2_a", "team/zoo", "1.2_a"),
        ("localhost:5000/zoo", "localhost:5000/zoo", "latest"),
        ("Registry.example.com:443/a/b__c:V1", "Registry.example.com:443/a/b__c", "V1"),
        ("[::1]:5000/zoo:x", "[::1]:5000/zoo", "x"),
    ],
)
def test_the_name_of_an_image_is_split(name: str, repository: str, tag: str) -> None:
    assert split_image_name(name) == (repository, tag)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Zoo", "Capitals"),
        ("zoo@sha256:0123", "digest"),
        ("zoo:a:b", "Write"),
        ("", "Write"),
        ("a b", "Write"),
        ("https://registry.example.com/zoo", "Write"),
        ("zoo:" + "x" * 129, "Write"),
        ("-zoo", "Write"),
    ],
)
def test_what_is_no_name_of_an_image_is_refused(name: str, hint: str) -> None:
    with pytest.raises(FlagError) as caught:
        split_image_name(name)
    assert hint in caught.value.hint


def test_a_name_without_a_host_in_front_goes_to_docker_hub() -> None:
    assert registry_of("localhost/zoo") == "localhost"
    assert registry_of("registry.example.com/team/zoo") == "registry.example.com"
    assert registry_of("team/zoo") == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["build"], "needs PATH"),
        (["build", "."], "The image needs a name"),
        (["build", ".", "--image="], "The image needs a name"),
        (["build", "missing", "--image=a"], "elasticdl zoo init PATH"),
        (["build", "mnist", "--image=a"], "`elasticdl zoo init mnist` writes one"),
        (["build", "Dockerfile", "--image=a"], "is not a folder"),
        (["build", ".", "--image=A"], "Capitals"),
        (["build", ".", "--image_name=a"], "Did you mean --image?"),
        (["build", ".", "--tag=a"], "The flags of `elasticdl zoo build` are: --image."),
        (["push"], "needs IMAGE"),
        (["push", "a", "b"], "takes one IMAGE"),
        (["push", "a", "--force"], "Unknown flag --force"),
        (["biuld", "."], "Did you mean `elasticdl zoo build`?"),
        (["deploy"], "There are init, build, push."),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(FlagError) as caught:
        zoo.run(arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("command", ["init", "build", "push"])
def test_each_command_has_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: elasticdl zoo {command} " in text
    assert max(map(len, text.splitlines())) <= 120


def test_without_a_command_it_prints_help_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.run([]) == 1
    assert "elasticdl zoo init" in capsys.readouterr().err
    assert zoo.run(["--help"]) == 0


@pytest.mark.parametrize("arguments", [["build", "{folder}", "--image=a"], ["push", "a"]])
def test_without_an_engine_it_says_so_and_what_to_do(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    address = f"unix://{tmp_path}/none.sock"
    monkeypatch.setenv("DOCKER_HOST", address)
    assert zoo.run([argument.format(folder=folder) for argument in arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: There is no Docker Engine at {address}: No such file or directory.\n  → Start Docker"
    )


@pytest.mark.parametrize("arguments", [["build", "{folder}", "--image=a"], ["push", "a"]])
def test_without_the_package_docker_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "docker.client", None)  # as where it is not installed: ImportError
    assert zoo.run([argument.format(folder=folder) for argument in arguments]) == 1
    said = capsys.readouterr().err
    assert "the package docker, which is not installed" in said
    assert "pip install 'docker>=7'" in said


def test_a_closed_port_is_named_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("DOCKER_HOST", address)
        assert zoo.run(["build", str(folder), "--image=a"]) == 1
    assert f"no Docker Engine at {address}: Connection refused." in capsys.readouterr().err


@pytest.mark.parametrize("address", ["bogus://x", "tcp://127.0.0.1:0x", "ssh://"])
def test_an_address_that_makes_no_sense_costs_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    assert zoo.run(["push", "a"]) == 1
    assert "error: There is no Docker Engine at " in capsys.readouterr().err


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An engine that builds everything at once; the paths of the requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self._send({"ApiVersion": "1.41", "Id": "sha256:0123456789ab", "Size": 5})

        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._send({"stream": "Step 1/1 : FROM scratch\n"})

        def _send(self, answer: object) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Tests look at what is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_address[1]}")
    yield asked
    server.shutdown()
    server.server_close()


def test_a_folder_is_built_where_its_path_reads_like_an_address(
    engine: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_zoo(tmp_path / "github.com" / "me") / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.chdir(tmp_path)
    assert zoo.run(["build", "github.com/me", "--image=a:1"]) == 0, capsys.readouterr().err
    assert "built a:1: 0123456789ab, 5 B" in capsys.readouterr().out
    assert [path for path in engine if "/build" in path and "remote" not in path]


def test_files_that_cannot_be_packed_are_no_fault_of_the_engine(
    engine: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert zoo.run(["build", str(folder), "--image=a:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: The files of {folder} cannot be packed")
    assert "No such file or directory" in said
    assert str(tmp_path / "gone") in said
    assert "Docker Engine" not in said


def test_a_reader_who_leaves_is_no_fault_of_the_engine(engine: list[str], folder: Path) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        build(folder, "a", "1", Left())


@pytest.mark.filterwarnings("ignore:docker-credential-none not installed")
@pytest.mark.parametrize("arguments", [["build", "{folder}", "--image=a:1"], ["push", "a:1"]])
def test_credentials_that_cannot_be_read_are_named_with_the_cause(
    engine: list[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    (tmp_path / "config.json").write_text('{"credsStore": "none"}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert zoo.run([argument.format(folder=folder) for argument in arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Docker's credentials cannot be read")
    assert "docker-credential-none" in said
    assert "config.json" in said


def test_fragments_become_lines() -> None:
    assert list(read_messages(CACHED_STEP))[:2] == [
        Line("Step 1/3 : FROM python:3.11-slim"),
        Line(" ---> d953153c7f9e"),
    ]
    said = list(read_messages(FAILING_STEP))
    assert Line("  Downloading nothing.whl") in said
    assert Line("ERROR: No matching distribution found for nothing") in said
    assert said[-1] == Failure("The command '/bin/sh -c …' returned a non-zero code: 1")
    assert list(read_messages([{"stream": "half"}, {"error": "gone"}])) == [Line("half"), Failure("gone")]
    assert list(read_messages([{"stream": "10%\r20%\r\nend"}])) == [Line("20%"), Line("end")]


def test_transfers_are_distinguished_from_messages() -> None:
    said = list(read_messages(PULL))
    assert said[0] == Line("3.11-slim: Pulling from library/python")
    assert said[3] == Transfer("a", "Downloading", 900_000, 2_000_000)
    assert said[-1] == Line("Digest: sha256:0123")


def test_elsewhere_than_on_a_terminal_the_engines_own_lines_are_shown() -> None:
    out = io.StringIO()
    display = LineDisplay(out)
    for message in read_messages([*PULL, *CACHED_STEP]):
        display.show(message)
    display.succeed()
    assert out.getvalue().splitlines() == [
        "3.11-slim: Pulling from library/python",
        "a: Pulling fs layer",
        "a: Downloading",
        "a: Pull complete",
        "Digest: sha256:0123",
        "Step 1/3 : FROM python:3.11-slim",
        " ---> d953153c7f9e",
        "Step 2/3 : RUN getent passwd 1000 ||    useradd",
        " ---> Using cache",
        " ---> c70959c7a03c",
    ]


def test_on_a_terminal_a_step_is_a_line_and_a_failed_one_shows_all_it_said() -> None:
    out = io.StringIO()
    display = StepDisplay(out)
    for message in read_messages([*PULL, *CACHED_STEP, *FAILING_STEP]):
        if isinstance(message, Failure):
            display.fail()
        else:
            display.show(message)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert "✓  2/3 RUN getent passwd 1000 || useradd  cached" in lines
    failed = lines.index("✗  3/3 RUN python -m pip install nothing")
    assert lines[failed + 1 : failed + 4] == [
        "Collecting nothing",
        "  Downloading nothing.whl",
        "ERROR: No matching distribution found for nothing",
    ]


def test_on_a_terminal_what_a_step_says_stays_as_it_is() -> None:
    out = io.StringIO()
    display = StepDisplay(out)
    display.show(Line("COPY 1:100:1 std::x::y"))
    display.fail()
    assert "COPY 1:100:1 std::x::y" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("non-zero code: 1", ["No matching distribution found for elasticdl2[tensorflow]==1"], "--local_pkg_dir=dist"),
        ("non-zero code: 1", ["No matching distribution found for nothing"], "requirements.txt"),
        ("COPY failed: stat .elasticdl/runtime.txt: file does not exist", [], "`elasticdl zoo init` makes the folder"),
        ("pull access denied for a, repository does not exist", [], "FROM"),
        ("manifest for python:9 not found: manifest unknown: manifest unknown", [], "FROM"),
        ('Get "https://registry-1.docker.io/v2/": dial tcp: no such host', [], "cannot reach the registry"),
        ("The command '/bin/sh -c python -m model_registry' returned a non-zero code: 1", [], "own words"),
        ("write /x: no space left on device", [], "docker system prune"),
        ("non-zero code: 3", ["something of yours"], "own words"),
    ],
)  # fmt: skip
def test_a_failed_build_names_its_step_and_what_to_do(text: str, said: list[str], hint: str) -> None:
    error = failure(BuildStep(4, 17, "RUN python"), text, said)
    assert error.what.startswith("Step 4 of 17 failed: RUN python")
    assert text in error.what
    assert hint in error.hint


def test_only_what_dockerignore_lets_through_counts_as_context(folder: Path) -> None:
    (folder / ".dockerignore").write_text("# data\ndata\n**/*.csv\n")
    (folder / "data").mkdir()
    (folder / "data" / "huge").write_bytes(b"x" * 5000)
    (folder / "mnist" / "rows.csv").write_bytes(b"x" * 5000)
    sizes = context_sizes(folder)
    assert sizes["mnist"] == (folder / "mnist" / "model.py").stat().st_size
    assert "data" not in sizes


def test_sizes_read_as_dockers() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 310_144, 1_889_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "310 kB",
        "1.89 GB",
    ]


def test_the_folder_above_a_prepared_one_is_built_as_that_one(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="has no Dockerfile"):
        prepared_folder(tmp_path)
    for name in ("first", "second"):
        folder = model_zoo(tmp_path / name)
        (folder / ".elasticdl").mkdir()
        (folder / "Dockerfile").write_text("FROM python:3.11-slim\n")
        assert prepared_folder(folder) == folder
        if name == "first":
            assert prepared_folder(tmp_path) == folder
    with pytest.raises(FlagError, match=r"first.*second"):
        prepared_folder(tmp_path)
