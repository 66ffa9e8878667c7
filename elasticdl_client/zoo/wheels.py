"""The wheels of `make wheels`: those of both packages in the client's own version, and what they need of others.

Wheels of others may lie beside them: pip prefers them to those of an index, such as a build of PyTorch without CUDA.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from elasticdl_client.errors import FlagError
from elasticdl_client.version import CLIENT, RUNTIME

DISTRIBUTIONS = (RUNTIME, CLIENT)


@dataclass(frozen=True, slots=True)
class Wheels:
    """The files of both packages, and the requirements of both that are not on each other.

    Attributes:
        files: those that fit the image's Python; of the runtime one for each Python and processor.
        packages: wheels of others.
    """

    files: tuple[Path, ...]
    requirements: tuple[str, ...]
    packages: tuple[Path, ...] = ()


def find(folder: Path, version: str, extras: Sequence[str], python_minor: int | None = None) -> Wheels:
    """Finds the wheels of a version.

    Args:
        folder: of --local_pkg_dir.
        version: the only one accepted.
        extras: of the runtime, whose requirements count.
        python_minor: the image has Python 3.this; None: it is unknown.

    Raises:
        FlagError: the folder lacks one, or holds another version, or has none for the Python and the system of the
            image; or a wheel of others is for another one.
    """
    if not folder.is_dir():
        raise FlagError(f"--local_pkg_dir={folder}: there is no such folder.", _HINT)
    found = {path: _name_and_version(path) for path in sorted(folder.glob("*.whl"))}
    for path, (name, wheel_version) in found.items():
        if name not in DISTRIBUTIONS:
            if misfit := _misfit(folder, path, python_minor):
                raise misfit
        elif wheel_version != version:
            raise FlagError(
                f"--local_pkg_dir={folder}: {path.name} is of version {wheel_version}, this client of {version}.",
                "Client and image must be of one version: run `make wheels` again, or install that version's client.",
            )
    files: list[Path] = []
    for distribution in DISTRIBUTIONS:
        of_it = [path for path, (name, _) in found.items() if name == distribution]
        if not of_it:
            raise FlagError(f"--local_pkg_dir={folder}: holds no wheel of {distribution} {version}.", _HINT)
        misfits = {path: _misfit(folder, path, python_minor) for path in of_it}
        fitting = [path for path, misfit in misfits.items() if misfit is None]
        if not fitting:
            raise next(misfit for misfit in misfits.values() if misfit)
        files += fitting
    packages = {path: described for path, described in found.items() if described[0] not in DISTRIBUTIONS}
    requirements = _pinned(_requirements(files, extras), dict(packages.values()))
    return Wheels(tuple(files), requirements, tuple(packages))


_HINT = "`make wheels` in a checkout of this version makes both into dist/: --local_pkg_dir=dist."


def _name_and_version(path: Path) -> tuple[str, str]:
    """By PEP 427: NAME-VERSION-…-TAGS.whl, dashes inside a part written as underscores."""
    name, _, rest = path.name.partition("-")
    return re.sub(r"[-_.]+", "-", name).lower(), rest.partition("-")[0]


def _misfit(folder: Path, path: Path, python_minor: int | None) -> FlagError | None:
    """By PEP 425: the name ends in PYTHON-ABI-PLATFORM, each one tag or several with dots between."""
    python, abi, platform = path.stem.split("-")[-3:]
    if "any" not in platform.split(".") and "linux" not in platform:
        return FlagError(
            f"--local_pkg_dir={folder}: {path.name} was built for {platform}, and images are Linux.",
            "`make wheels` on Linux.",
        )
    minors = [int(tag[3:]) for tag in python.split(".") if re.fullmatch(r"cp3\d+", tag)]
    if not minors or python_minor is None or python_minor in minors or (abi == "abi3" and python_minor > min(minors)):
        return None
    return FlagError(
        f"--local_pkg_dir={folder}: {path.name} was built for Python 3.{minors[0]}, the image has 3.{python_minor}.",
        f"--base_image=python:3.{minors[0]}-slim, or wheels for the image's.",
    )


def _requirements(files: list[Path], extras: Sequence[str]) -> tuple[str, ...]:
    found: set[str] = set()
    for file in files:
        for line in _required(file):
            requirement = for_extra(line, extras)
            if requirement and re.split(r"[^\w.-]", requirement)[0].lower() not in DISTRIBUTIONS:
                found.add(requirement)
    return tuple(sorted(found, key=str.lower))


def _pinned(requirements: tuple[str, ...], versions: dict[str, str]) -> tuple[str, ...]:
    """With a wheel of a package in the folder the image gets that version, not the index's newest of the range."""
    pinned = []
    for requirement in requirements:
        name, (_, marked, marker) = re.split(r"[^\w.-]", requirement)[0], requirement.partition(";")
        version = versions.get(re.sub(r"[-_.]+", "-", name).lower())
        pinned.append(f"{name}=={version}{marked}{marker}" if version else requirement)
    return tuple(pinned)


def _required(file: Path) -> list[str]:
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    except (OSError, zipfile.BadZipFile, StopIteration, UnicodeDecodeError) as error:
        raise FlagError(f"{file} is damaged: {error or 'it has no METADATA'}.", _HINT) from error


def for_extra(line: str, extras: Sequence[str]) -> str:
    """Return a `Requires-Dist` as it reads in a requirements file, with the extras chosen.

    The condition on the extra, which setuptools writes last, is dropped; other conditions stay.

    Returns:
        Empty if the requirement belongs to another extra.
    """
    requirement, _, marker = (part.strip() for part in line.partition(";"))
    found = re.search(r"(?:^|\s+and\s+)extra\s*==\s*(?P<quote>[\"'])(?P<extra>[\w.-]+)(?P=quote)$", marker)
    if not found:
        return f"{requirement}; {marker}" if marker else requirement
    if found["extra"] not in extras:
        return ""
    condition = marker[: found.start()].strip()
    return f"{requirement}; {condition}" if condition else requirement
