"""1,000 command lines of any words: each ends with an exit code, and a message for a person, never a traceback."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from elasticdl_client.choices import JobType
from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import flag_defaults
from elasticdl_client.jobs.options import parse
from elasticdl_client.main import USAGE_ERROR, exit_with, run
from tests.fuzz.mutations import damage
from tests.fuzz.scale import rounds

JOBS = tuple(JobType)
COMMANDS = ("help", "trian", "", "--", "é", "-h", "--yes", "x" * 3000)
VALUES = (
    *(
        "",
        "0",
        "1",
        "-1",
        "3.5",
        "1e400",
        "nan",
        "true",
        "maybe",
        "None",
        "[]",
        "{}",
        '{"a": 1}',
        "{'a': (1, 2)}",
        "a=b;c",
    ),
    *("cpu=1,memory=4096Mi", "cpu=", "memory=-1Gi", "claim_name=c,mount_path=/p", "=,=", "high=0.5", "a,b,,c", "local"),
    *(
        "kubernetes",
        "Local",
        "AllreduceStrategy",
        "mnist.model.custom_model",
        "..",
        "/",
        "/nowhere",
        "x" * 3000,
        "é",
        "\n",
    ),
    *("-", "--", "$(HOME)", "sqlite:////nowhere?table=t", "99999999999999999999", "0x10", "1_000", " 7 ", "[" * 500),
)
ACTIONS = ("list", "status", "logs", "scale", "delete", "clean", "stop", "resume", "tensorboard")
OPTIONS = (
    "namespace",
    "job_dir",
    "output",
    "all",
    "f",
    "tail",
    "force",
    "n",
    "yes",
    "runtime",
    "port",
    "num_workers",
    "current_num_workers",
    "role",
    "watch",
)


WHOLE = ("--image_name=i", "--model_zoo=/z", "--model_def=a.b", "--training_data=/d", "--job_name=j", "--num_ps_pods=1")


def any_words(names: Sequence[str], random: Random) -> list[str]:
    """Possible arguments of a command."""
    words: list[str] = []
    for _ in range(random.choice((0, 1, 1, 1, 2, 2, 4, 16))):
        name, value = random.choice(names), random.choice(VALUES)
        if random.random() < 0.1:
            name = damage(name.encode(), random).decode(errors="replace")
        forms = ([f"--{name}={value}"], [f"--{name}", value], [f"--{name}"], [value], [f"-{name}={value}"])
        words += random.choice(forms)
    return words


def any_line(random: Random) -> list[str]:
    """A command line that submits nothing, whatever it says."""
    command = random.choice((*JOBS, *JOBS, *COMMANDS))
    names = [*flag_defaults(command)] if isinstance(command, JobType) else OPTIONS
    words = any_words(names, random)
    if isinstance(command, JobType):
        words += WHOLE if random.random() < 0.7 else []
        words += ["--runtime=kubernetes", "--dry_run=true"]
    return [str(command), *words]


def test_any_command_line_ends_with_an_exit_code_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    codes = set()
    for seed in range(rounds(1000)):
        line = any_line(Random(seed))
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            exit_with(lambda: run(line))  # noqa: B023
        said = errors.getvalue()
        codes.add(ended.value.code)
        assert ended.value.code in (0, 1, USAGE_ERROR), (seed, line)
        assert "Traceback" not in said, (seed, line)
        if ended.value.code == USAGE_ERROR:
            assert "error: " in said, (seed, line, said)
    assert codes >= {0, USAGE_ERROR}


@pytest.mark.parametrize("command", ACTIONS)
def test_any_options_of_a_command_for_jobs_are_understood_or_refused(command: str) -> None:
    refused = 0
    for seed in range(rounds(500)):
        try:
            parse(command, any_words(OPTIONS, Random(seed)))
        except FlagError as error:
            assert error.what, seed  # noqa: PT017
            refused += 1
    assert refused
