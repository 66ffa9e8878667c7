"""The requirements.txt of a user's code, in pip's format: its requirements, and those missing here.

Installs nothing.  Pods install the file of --code before they start; a local job runs with what this Python has.
Each job looks for the file, few have one: what reads a requirement is imported where there is one to read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticdl_client.errors import FlagError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FILE = "requirements.txt"
_INCLUDED = re.compile(r"(-[rc]\s*|--(?:requirement|constraint)(?:=|\s+))(\S+)")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTIONS = re.compile(r"\s--?[a-z].*$")  # of one requirement, such as its hashes
_PATH = re.compile(r"\.{0,2}/|[^@\s]+(/|\.whl|\.zip|\.tar\.gz)|[a-z+]+:")


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a file, continued lines joined, without comments.

    Attributes:
        is_option: it is one of pip's options.
        is_constraint: it, or the file that it is in, says how packages are installed, not which.
    """

    path: Path
    number: int
    text: str
    is_option: bool
    is_constraint: bool

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.number}"

    @property
    def has_name(self) -> bool:
        """Whether it names a package, and not a path or URL alone."""
        return not (self.text.startswith("-") or _PATH.match(self.text))


def check_installable(directory: Path) -> None:
    """Check the file of a directory, if there is one, before pods install it.

    Raises:
        FlagError: a line that no pod could install, or a file that is not there.
    """
    for line in _requirements(directory):
        if not line.has_name:
            raise FlagError(
                f"{line.place}: {line.text} is a path, or a URL alone, and pods install packages by name.",
                "Write NAME or NAME @ URL. The code itself needs no installation: Python finds it.",
            )
        _parsed(line)


def check_installed(directory: Path) -> None:
    """Check that this Python has what the file of a directory, if there is one, asks for.

    Lines without the name of a package, such as paths, are not compared.

    Raises:
        FlagError: packages that are missing or of another version, by name.
    """
    named = [_parsed(line) for line in _requirements(directory) if line.has_name]
    lacking = [text for requirement in named for text in _lacking(requirement)]
    if lacking:
        path = directory / FILE
        raise FlagError(
            f"{path} asks for what {sys.executable} does not have: {', '.join(lacking)}.",
            f"{sys.executable} -m pip install -r {path}",
        )


def contents(path: Path) -> bytes:
    """Return a file and all that it includes: the installed packages are a function of them."""
    files = {line.path for line in _lines(path, path.parent)} | {path}
    return b"\0".join(one.read_bytes() for one in sorted(files))


def _requirements(directory: Path) -> list[_Line]:
    path = directory / FILE
    lines = list(_lines(path, directory)) if path.is_file() else []
    return [line for line in lines if not line.is_option and not line.is_constraint]


def _lines(
    path: Path, root: Path, is_constraint: bool = False, above: frozenset[Path] = frozenset()
) -> Iterator[_Line]:
    """Yield the lines of a file and of those that it includes.

    Args:
        root: the directory that holds all of them.
        is_constraint: it was included as a file of constraints.
        above: files that have led to this one.
    """
    for number, text in _split(path):
        is_editable = text.startswith(("-e", "--editable"))
        line = _Line(path, number, text, text.startswith("-") and not is_editable, is_constraint)
        yield line
        if found := _INCLUDED.fullmatch(text):
            included = Path(path.parent, found[2]).resolve()
            if not included.is_relative_to(root.resolve()) or not included.is_file():
                raise FlagError(
                    f"{line.place}: there is no file {found[2]} in {root}.", "Put it there, or take the line out."
                )
            if included not in above:
                is_other = is_constraint or found[1].startswith(("-c", "--c"))
                yield from _lines(included, root, is_other, above | {path, included})


def _split(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{path} cannot be read: {error}.", "It is a text file in UTF-8, as pip takes it.") from error
    joined, first = "", 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        first = first if joined else number
        joined += line
        if joined.endswith("\\"):
            joined = joined.removesuffix("\\")
            continue
        if stripped := _COMMENT.sub("", joined).strip():
            yield first, stripped
        joined = ""


def _parsed(line: _Line) -> Requirement:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(_OPTIONS.sub("", line.text))
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise FlagError(
            f"{line.place}: {line.text} is not a requirement: {reason}.", "Write it as pip takes it."
        ) from error


def _lacking(requirement: Requirement) -> list[str]:
    """Return what is missing of a requirement, with what its extras ask for."""
    from importlib import metadata

    from packaging.requirements import Requirement

    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return []
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return [f"{requirement.name}{requirement.specifier}"]
    if not requirement.specifier.contains(found, prereleases=True):
        return [f"{requirement.name}{requirement.specifier} (it has {found})"]
    lacking: list[str] = []
    for text in metadata.requires(requirement.name) or []:
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            continue  # pip has seen to it when it installed the package
        if any(needed.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            needed.marker = None
            lacking += _lacking(needed)
    return lacking
