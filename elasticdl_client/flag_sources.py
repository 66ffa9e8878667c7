"""Where the flags of a job come from: the command line, a file, the environment; the first that has one holds.

`-f job.yaml` is a mapping of flags to values.  `ELASTICDL_NAMESPACE=team-a` is the default of --namespace, and so on
for every flag but those that name one job.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client import retired
from elasticdl_client.errors import FlagError
from elasticdl_client.flags import split_arguments
from elasticdl_client.job_spec import flag_defaults
from elasticdl_client.secret_values import hide_in_flag

PREFIX = "ELASTICDL_"
FILE = ("-f", "--filename")
SHORT = {"-n": "--namespace"}
_OF_ONE_JOB = ("job_name", "job_dir")
_HINT = "It holds one flag a line: `num_workers: 4`."


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """The flags of a job.

    Attributes:
        values: by name; texts, or plain values of a file.
        origins: the file or variable that a value comes from, if that is not the command line.
        notes: messages for the user.
    """

    values: dict[str, object]
    origins: dict[str, str]
    notes: tuple[str, ...]

    def is_from_environment(self, name: str) -> bool:
        """Return whether a flag has its value from the environment, as a default of all jobs."""
        return self.origins.get(name) == f"{PREFIX}{name.upper()}"

    def located(self, error: FlagError) -> FlagError:
        """The same error, with the file or variable that its flag comes from."""
        flag = re.search(r"--(\w+)", error.what)
        origin = self.origins.get(flag[1]) if flag else None
        return FlagError(f"{origin}: {error.what}", error.hint) if origin else error


def gather(job_type: str, arguments: Sequence[str], environment: Mapping[str, str]) -> GivenFlags:
    """The flags of a job from all sources.

    Args:
        arguments: of the command line, after the command.

    Raises:
        FlagError: an argument that is no flag; a file that cannot be read, or is of another command.
    """
    defaults = flag_defaults(job_type)
    path, rest = _split_file(arguments)
    filed = _read(path, job_type) if path else {}
    given = split_arguments(rest, defaults)
    variables = {name: f"{PREFIX}{name.upper()}" for name in defaults if name not in _OF_ONE_JOB}
    set_outside = {name: environment[variable] for name, variable in variables.items() if variable in environment}
    values, origins = retired.resolve(set_outside), {name: variables[name] for name in set_outside}
    for source, flags in ((path, retired.resolve(filed)), ("", retired.resolve(given))):
        values |= flags
        origins |= dict.fromkeys(flags, source)
    notes = retired.notes({**filed, **given})
    notes += [
        f"--{name}={hide_in_flag(name, value)} comes from {origins[name]}."
        for name, value in set_outside.items()
        if origins[name] == variables[name]
    ]
    return GivenFlags(values, origins, tuple(notes))


def _split_file(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The file of -f, empty if there is none, and the other arguments."""
    path, rest, remaining = "", [], iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name not in FILE:
            rest.append(f"{SHORT.get(name, name)}{equals}{value}")
            continue
        if path:
            raise FlagError("-f is given twice.", "Give it once.")
        path = value if equals else next(remaining, "")
        if not path:
            raise FlagError("-f needs a file.", "Write -f job.yaml, or -f - for standard input.")
    return path, rest


def _read(path: str, job_type: str) -> dict[str, object]:
    import yaml  # here: most commands need none

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{path} cannot be read: {error}.", "Give the path of a YAML file to -f.") from error
    except yaml.YAMLError as error:
        raise FlagError(f"{path} is not YAML: {error}.", _HINT) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise FlagError(f"{path} is not a mapping of flags to values.", _HINT)
    described = found.pop("job_type", job_type)
    if described != job_type:
        raise FlagError(
            f"{path} describes a job of `elasticdl {described}`.", f"Run `elasticdl {described} -f {path}`."
        )
    for name, value in found.items():
        if isinstance(value, dict) and name.replace("-", "_").endswith("pod_template"):
            found[name] = json.dumps(value)
        elif not isinstance(value, str | int | float):
            raise FlagError(f"{path}: {name} is {_kind(value)}, not one value.", 'Write lists as texts: "a.csv,b.csv".')
    return {name.replace("-", "_"): value for name, value in found.items()}


def _kind(value: object) -> str:
    return {"NoneType": "empty", "list": "a list", "dict": "a mapping"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
