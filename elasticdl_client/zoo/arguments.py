"""The arguments of `elasticdl zoo`: the flags of each command, its one place, its help."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest, split_arguments
from elasticdl_client.kubernetes import names


class ImageFramework(StrEnum):
    """The framework in an image, besides the runtime: an extra of the distribution `elasticdl`."""

    TENSORFLOW = "tensorflow"
    TORCH = "torch"
    ESTIMATOR = "estimator"


ALLREDUCE = "allreduce"
"""The extra with what AllReduceStrategy reduces with; TensorFlow images have it, too."""


@dataclass(frozen=True, slots=True)
class ZooFlag:
    """A flag of a zoo command."""

    default: str | bool
    help: str


@dataclass(frozen=True, slots=True)
class ZooCommand:
    """A zoo command as its user sees it.

    Attributes:
        place: the positional argument.
        place_is_required: whether it must.
    """

    summary: str
    place: str
    place_is_required: bool
    flags: Mapping[str, ZooFlag]
    example: str


COMMANDS: dict[str, ZooCommand] = {
    "init": ZooCommand(
        "write a Dockerfile into the folder of your models",
        "PATH",
        False,
        {
            "model_zoo": ZooFlag(".", "The folder of your models, if it is not given as PATH."),
            "framework": ZooFlag(
                ImageFramework.TENSORFLOW.value,
                "tensorflow, torch, or estimator: TensorFlow 2.15, the last one with Estimator.",
            ),
            "without": ZooFlag(
                "",
                "allreduce: a TensorFlow image without PyTorch's collectives (750 MB for CPUs, 5 GB with CUDA); no "
                "AllReduceStrategy.",
            ),
            "base_image": ZooFlag("python:3.11-slim", "The image to build on; it has Python 3.11 or later and pip."),
            "local_pkg_dir": ZooFlag(
                "",
                "A folder with the wheels of this version (`make wheels`), instead of a package index. Wheels of "
                "others in it are preferred to those of the index.",
            ),
            "extra_pypi_index": ZooFlag(
                "", "One more package index for pip inside the build; without it, pip's own configuration counts."
            ),
            "cluster_spec": ZooFlag(
                "", f"A Python file for --cluster_spec of jobs; goes to {names.CLUSTER_SPEC_DIRECTORY} in the image."
            ),
            "force": ZooFlag(False, "Overwrite a Dockerfile that differs, without asking."),
        },
        "elasticdl zoo init model_zoo --local_pkg_dir=dist",
    ),
    "build": ZooCommand(
        "build the image of a folder that has a Dockerfile",
        "PATH",
        True,
        {"image": ZooFlag("", "The name of the image: [REGISTRY/]NAME[:TAG].")},
        "elasticdl zoo build model_zoo --image=registry.example.com/team/zoo:1",
    ),
    "push": ZooCommand(
        "push an image to its registry", "IMAGE", True, {}, "elasticdl zoo push registry.example.com/team/zoo:1"
    ),
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line, split; `flags` are those given, as text.  `place` is empty if it was not given."""

    place: str
    flags: Mapping[str, str]

    def text(self, command: str, name: str) -> str:
        """Return the value of a flag, or its default."""
        return self.flags.get(name, str(COMMANDS[command].flags[name].default))


def split(command: str, arguments: Sequence[str]) -> Arguments:
    """Separate the positional argument from the flags, which may stand before and after it.

    Raises:
        FlagError: an unknown flag, one without its value or given twice, too many places, or none.
    """
    known = COMMANDS[command]
    places: list[str] = []
    flags: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-") or argument == "-":
            places.append(argument)
            continue
        flags.append(argument)
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if argument.startswith("--") and name not in known.flags:
            raise _unknown(command, name)
        takes_next = name in known.flags and not isinstance(known.flags[name].default, bool) and "=" not in argument
        if takes_next and rest and not rest[0].startswith("--"):
            flags.append(rest.pop(0))
    defaults = {name: flag.default for name, flag in known.flags.items()}
    found = split_arguments(flags, defaults)
    if len(places) > 1:
        raise FlagError(
            f"`elasticdl zoo {command}` takes one {known.place}, not {' and '.join(places)}.",
            f"Usage: {usage(command)}",
        )
    if known.place_is_required and not places:
        raise FlagError(f"`elasticdl zoo {command}` needs {known.place}.", f"For example: {known.example}")
    return Arguments(places[0] if places else "", found)


def _unknown(command: str, name: str) -> FlagError:
    flags = list(COMMANDS[command].flags)
    near = nearest(name, flags)
    if near:
        return FlagError(f"Unknown flag --{name}.", f"Did you mean --{near}?")
    listed = ", ".join(f"--{flag}" for flag in flags) or "none"
    return FlagError(f"Unknown flag --{name}.", f"The flags of `elasticdl zoo {command}` are: {listed}.")


_NAME = re.compile(
    r"(?:(?P<registry>[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?)/)?"
    r"(?P<path>[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
)


def split_image_name(name: str) -> tuple[str, str]:
    """Repository, with its registry, and tag, `latest` if none is written.

    Raises:
        FlagError: that is not the name of an image.
    """
    found = _NAME.fullmatch(name)
    if found:
        return name.removesuffix(f":{found['tag']}") if found["tag"] else name, found["tag"] or "latest"
    if "@" in name:
        hint = "An image that is built or pushed has a tag, not a digest: NAME:TAG."
    elif name != name.lower() and _NAME.fullmatch(name.lower()):
        hint = f"Capitals may stand in the tag alone: {name.lower()}"
    else:
        hint = (
            "Write [REGISTRY/]NAME[:TAG] in lower-case letters, digits and . _ - like registry.example.com/team/zoo:1."
        )
    raise FlagError(f"'{name}' is not the name of an image.", hint)


def registry_of(name: str) -> str:
    """Return the host that an image is pushed to; empty for Docker Hub."""
    first, slash, _ = name.partition("/")
    return first if slash and (first == "localhost" or re.search(r"[.:]", first)) else ""


def usage(command: str) -> str:
    """Return one line."""
    known = COMMANDS[command]
    place = known.place if known.place_is_required else f"[{known.place}]"
    flags = " --image=NAME" if command == "build" else " [--flag=value …]" if known.flags else ""
    return f"elasticdl zoo {command} {place}{flags}"


def overview() -> str:
    """Return the help of `elasticdl zoo`."""
    lines = ["elasticdl zoo: from a folder of models to an image that jobs on Kubernetes run in.", ""]
    lines += [f"  {usage(name):<46} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`elasticdl zoo COMMAND --help` lists a command's flags."])


def help_of(command: str, width: int) -> str:
    """Return the help of a zoo command, lines at most `width` wide."""
    known = COMMANDS[command]
    lines = [f"elasticdl zoo {command}: {known.summary}.", "", f"Usage: {usage(command)}"]
    indent = " " * 22
    if known.flags:
        lines.append("")
    for name, flag in known.flags.items():
        default = "" if flag.default == "" else f" [{str(flag.default).lower()}]"
        text = textwrap.wrap(
            flag.help + default, max(width, 60), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        lines += [f"  --{name}".ljust(len(indent)) + text[0].lstrip(), *text[1:]]
    return "\n".join([*lines, "", f"For example: {known.example}"])
