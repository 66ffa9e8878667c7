"""`elasticdl zoo init`: the files that turn a folder of models into an image.

Owns what is written there: Dockerfile, .dockerignore if the user has none, and of the folder .elasticdl the entries
that it makes, rewritten as a whole.  That of a home directory holds jobs and models, too, and they are left alone.
Everything is checked and read before anything is written.

`find_wheels`: those of `make wheels`, of both packages in the client's own version, and their dependencies.

Wheels of others may lie beside them: pip prefers them to those of an index, such as a build of PyTorch without CUDA.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from elasticdl_client.errors import FlagError, ImageError
from elasticdl_client.version import CLIENT, RUNTIME
from elasticdl_client.zoo import dockerfile
from elasticdl_client.zoo.arguments import ALLREDUCE, ImageFramework
from elasticdl_client.zoo.dockerfile import FOLDER, Recipe

Ask = Callable[[str], bool]
"""Puts a question to the user; whether the answer is yes."""

_GITIGNORE = f"# Made by `elasticdl zoo init --local_pkg_dir`.\n{dockerfile.WHEELS}/\n{dockerfile.PACKAGES}/\n"


@dataclass(frozen=True, slots=True)
class Wishes:
    """The flags of `elasticdl zoo init`; paths are empty if not given.

    Attributes:
        without: the extra that is left out; may be empty.
    """

    folder: Path
    framework: ImageFramework
    without: str
    base_image: str
    local_pkg_dir: str
    extra_pypi_index: str
    cluster_spec: str
    force: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to write into a folder, paths relative to it."""

    recipe: Recipe
    files: dict[str, bytes]


def plan(wishes: Wishes, version: str) -> Plan:
    """Check everything and read what is to be copied.

    Args:
        wishes: Options of the user.
        version: Version of the client and of the runtime.

    Raises:
        FlagError: the folder holds no models, or a flag's value is of no use.
    """
    _check_folder(wishes.folder)
    _check_base_image(wishes)
    _check_index(wishes.extra_pypi_index)
    files: dict[str, bytes] = {}
    extras = _extras(wishes)
    requirements: tuple[str, ...] = (f"{RUNTIME}[{','.join(extras)}]=={version}",)
    packages: tuple[Path, ...] = ()
    if wishes.local_pkg_dir:
        python_minor = _python_minor(wishes.base_image)
        found = find_wheels(Path(wishes.local_pkg_dir), version, extras, python_minor)
        requirements = found.requirements
        packages = found.packages
        files |= {f"{FOLDER}/{dockerfile.WHEELS}/{file.name}": file.read_bytes() for file in found.files}
        files |= {f"{FOLDER}/{dockerfile.PACKAGES}/{file.name}": file.read_bytes() for file in packages}
    if wishes.cluster_spec:
        spec = _cluster_spec(Path(wishes.cluster_spec))
        files[f"{FOLDER}/{dockerfile.CLUSTER_SPEC}/{spec.name}"] = spec.read_bytes()
    recipe = Recipe(
        version=version,
        base_image=wishes.base_image,
        runtime=requirements,
        has_wheels=bool(wishes.local_pkg_dir),
        has_packages=bool(packages),
        extra_index=wishes.extra_pypi_index,
        has_cluster_spec=bool(wishes.cluster_spec),
    )
    files[f"{FOLDER}/{dockerfile.RUNTIME_FILE}"] = dockerfile.runtime_file(recipe).encode()
    files[f"{FOLDER}/.gitignore"] = _GITIGNORE.encode()
    files["Dockerfile"] = dockerfile.dockerfile(recipe).encode()
    return Plan(recipe, files)


def write(wishes: Wishes, files: dict[str, bytes], ask: Ask | None) -> None:
    """Write the files of a plan.

    Args:
        wishes: say where, and whether what is there may be overwritten.
        files: by path relative to the folder.
        ask: asks the user; None if there is no terminal.

    Raises:
        FlagError: there is a Dockerfile that differs, and the user did not allow to overwrite it.
        ImageError: the disk refuses.
    """
    _get_consent(wishes.folder / "Dockerfile", files["Dockerfile"], wishes.force, ask)
    try:
        for name in dockerfile.FOLDERS:
            if (wishes.folder / FOLDER / name).exists():
                shutil.rmtree(wishes.folder / FOLDER / name)
        for name, content in files.items():
            path = wishes.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        _write_dockerignore(wishes.folder / ".dockerignore")
    except OSError as error:
        raise ImageError(
            f"Cannot write {error.filename}: {error.strerror}.", "Is the folder yours to write?"
        ) from error


def _write_dockerignore(path: Path) -> None:
    """Write one if there is none; that of an earlier version gets the new head and keeps its other lines."""
    if not path.exists():
        path.write_text(dockerfile.DOCKERIGNORE)
        return
    found, old = path.read_bytes(), dockerfile.OLD_HEAD.encode()
    if found.startswith(old):
        path.write_bytes(dockerfile.HEAD.encode() + found.removeprefix(old))


def _get_consent(path: Path, content: bytes, force: bool, ask: Ask | None) -> None:
    if force or not path.exists() or path.read_bytes() == content:
        return
    if ask is None:
        raise FlagError(f"{path} exists and differs from what would be written.", "--force overwrites it.")
    if not ask(f"{path} exists and differs from what would be written. Overwrite it?"):
        raise FlagError(f"{path} stays as it is; nothing was written.")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise FlagError(f"The model zoo {folder} {state}.", "Name the folder that holds the modules of your models.")
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("venv", "__pycache__")]
        if any(name.endswith(".py") for name in files):
            return
        if Path(root, "pyvenv.cfg").exists():
            folders.clear()
    raise FlagError(
        f"The model zoo {folder.resolve()} holds no Python file.",
        "Name the folder that holds the modules of your models: elasticdl zoo init PATH.",
    )


def _extras(wishes: Wishes) -> tuple[str, ...]:
    """Return the extras of the runtime for the image.  PyTorch has its own collectives."""
    if wishes.without not in ("", ALLREDUCE):
        raise FlagError(f"--without={wishes.without}: nothing of that name can be left out.", f"--without={ALLREDUCE}")
    if wishes.framework is not ImageFramework.TENSORFLOW:
        if wishes.without:
            raise FlagError(
                f"--without={ALLREDUCE} is for TensorFlow images, and --framework={wishes.framework}.",
                "Leave --without out.",
            )
        return (wishes.framework.value,)
    return (wishes.framework.value,) if wishes.without else (wishes.framework.value, ALLREDUCE)


def _check_base_image(wishes: Wishes) -> None:
    name = wishes.base_image
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", name):
        raise FlagError(f"--base_image={name}: that is not the name of an image.", "For example python:3.11-slim.")
    minor = _python_minor(name) or 11
    if minor < 11:
        raise FlagError(f"--base_image={name}: ElasticDL needs Python 3.11 or later.", "For example python:3.11-slim.")
    if wishes.framework is ImageFramework.ESTIMATOR and minor > 11:
        raise FlagError(
            f"--base_image={name}: TensorFlow 2.15, the last one with Estimator, does not support Python after 3.11.",
            "Take python:3.11-slim.",
        )


def _python_minor(base_image: str) -> int | None:
    """Return the version of Python 3 in an official image, from its name; None for any other image."""
    found = re.match(r"(?:.*/)?python:3\.(\d+)", base_image)
    return int(found[1]) if found else None


def _check_index(url: str) -> None:
    if url and not re.fullmatch(r"(?:https?|file)://[^\s\"'$\\]+", url):
        raise FlagError(f"--extra_pypi_index={url}: that is not the address of a package index.", "Write https://…")


def _cluster_spec(path: Path) -> Path:
    if not path.is_file():
        raise FlagError(f"--cluster_spec={path}: there is no such file.", "Name a Python file on this machine.")
    if not re.fullmatch(r"\w[\w.-]*", path.name, re.ASCII):
        raise FlagError(f"--cluster_spec={path}: its name must be of letters, digits and . _ - alone.", "Rename it.")
    return path


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


def find_wheels(folder: Path, version: str, extras: Sequence[str], python_minor: int | None = None) -> Wheels:
    """Find the wheels of a version.

    Args:
        folder: Directory of --local_pkg_dir.
        version: the only one accepted.
        extras: Extras of the runtime whose requirements are included.
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
