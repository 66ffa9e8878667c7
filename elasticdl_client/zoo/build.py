"""`elasticdl zoo build` and `push`: a folder with a Dockerfile to an image, and an image to its registry.

Both are done by Docker Engine; errors of the connection to it say what to do.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from elasticdl_client.errors import FlagError, ImageError
from elasticdl_client.version import RUNTIME
from elasticdl_client.zoo.arguments import registry_of
from elasticdl_client.zoo.display import BuildStep, Failure, Line, read_messages, shown, size_text, step_of
from elasticdl_client.zoo.dockerfile import FOLDER

_LARGE_CONTEXT_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Image:
    """An image that the engine has.

    Attributes:
        identity: sha256:…
    """

    name: str
    identity: str
    size_bytes: int


def build(folder: Path, repository: str, tag: str, out: TextIO) -> Image:
    """Build an image and show the output of the builder.

    Args:
        folder: the build context, with a Dockerfile.
        repository: Repository in the image's name.
        tag: Tag in the image's name.
        out: where the progress goes.

    Raises:
        FlagError: there is nothing to build.
        ImageError: no engine, or the build failed.
    """
    folder = prepared_folder(folder)
    name = f"{repository}:{tag}"
    with connected() as engine:
        with _packing(folder):
            sizes = _context_text(context_sizes(folder))
        print(f"building {name} from {folder}: {sizes}", file=out, flush=True)
        with _packing(folder):
            context = _packed(folder)
        with context:
            _run(engine, context, name, out)
        built = engine.images.get(name)
        return Image(name, built.id, int(built.attrs["Size"]))


def _run(engine: Any, context: IO[bytes], name: str, out: TextIO) -> None:
    step: BuildStep | None = None
    said: list[str] = []
    options = {"fileobj": context, "custom_context": True, "tag": name, "rm": True, "forcerm": True}
    with shown(out) as display:
        for message in read_messages(engine.api.build(**options, decode=True)):
            if isinstance(message, Failure):
                raise failure(step, message.text, said)
            if isinstance(message, Line):
                step = step_of(message.text) or step
                said.append(message.text)
            display.show(message)


def prepared_folder(folder: Path) -> Path:
    """Return the folder to build: the given one, or the one below it that `elasticdl zoo init` has prepared.

    Raises:
        FlagError: there is none, or more than one below it.
    """
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise FlagError(f"{folder} {state}.", "Name the folder of your models, after `elasticdl zoo init PATH`.")
    if (folder / "Dockerfile").is_file():
        return folder
    below = sorted(own.parent for own in folder.glob(f"*/{FOLDER}") if (own.parent / "Dockerfile").is_file())
    if len(below) > 1:
        raise FlagError(
            f"{folder} has no Dockerfile, and several folders in it have: {', '.join(map(str, below))}.",
            f"Name one: `elasticdl zoo build {below[0]} --image=…`.",
        )
    if not below:
        raise FlagError(f"{folder} has no Dockerfile.", f"`elasticdl zoo init {folder}` writes one.")
    return below[0]


def failure(step: BuildStep | None, text: str, said: list[str]) -> ImageError:
    """Return the error of a failed build.

    Args:
        step: the last one that began; None if none did.
        text: the builder's words.
        said: all lines of the build.
    """
    where = f"Step {step.number} of {step.total} failed: {step.instruction}" if step else "The build failed"
    return ImageError(f"{where}\n  {text}", _hint(text, "\n".join(said)))


def _hint(text: str, said: str) -> str:
    both = f"{said}\n{text}"
    of_builder = "" if "returned a non-zero code" in text else text  # the other quotes a command of the Dockerfile
    if f"{FOLDER}/" in text:
        return f"`elasticdl zoo init` makes the folder {FOLDER}; .dockerignore must not name it."
    if f"No matching distribution found for {RUNTIME}" in both:  # of the client, too
        return (
            "pip in the image finds no ElasticDL of this version for the image's Python and processor. Put its wheels "
            "into the image: `make wheels`, then `elasticdl zoo init --local_pkg_dir=dist`; or name your index with "
            "--extra_pypi_index."
        )
    if re.search(r"No matching distribution found|ResolutionImpossible", both):
        return "pip's own words are above; your packages are those in requirements.txt."
    if "no space left on device" in both.lower():
        return "The engine's disk is full; `docker system df` shows by what, `docker system prune` makes room."
    if re.search(r"pull access denied|manifest (?:for .* )?(?:unknown|not found)|not found: manifest", of_builder):
        return "Is the name after FROM in the Dockerfile right, and does the registry want `docker login`?"
    if re.search(r"registry|dial tcp|Client\.Timeout|no such host", of_builder):
        return "The engine cannot reach the registry of the base image."
    return "The builder's own words are above."


def context_sizes(folder: Path) -> Mapping[str, int]:
    """Bytes of what goes to the builder, by the names right below the folder."""
    from docker.utils import exclude_paths

    sizes: dict[str, int] = {}
    for path in exclude_paths(str(folder), _ignored(folder)):
        try:
            status = os.lstat(folder / path)
        except OSError:  # gone since; if it matters, the builder will say so
            continue
        if stat.S_ISREG(status.st_mode):
            top = Path(path).parts[0]
            sizes[top] = sizes.get(top, 0) + status.st_size
    return sizes


def _packed(folder: Path) -> IO[bytes]:
    """Return what goes to the builder as an archive, in a temporary file."""
    from docker.utils import tar

    archive: IO[bytes] = tar(str(folder), exclude=_ignored(folder))
    return archive


@contextmanager
def _packing(folder: Path) -> Iterator[None]:
    """Around reads of a folder.

    Raises:
        ImageError: a file cannot be read, or there is no room for the archive.
    """
    try:
        yield
    except OSError as error:
        why = str(error) if error.strerror else f"{error}: {_reason(error)}"
        raise ImageError(
            f"The files of {folder} cannot be packed for the engine: {why}.",
            f"They need room in {tempfile.gettempdir()}; TMPDIR names another directory. What the image does not need "
            "can be named in .dockerignore.",
        ) from error


def _ignored(folder: Path) -> list[str]:
    path = folder / ".dockerignore"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def _context_text(sizes: Mapping[str, int]) -> str:
    total = sum(sizes.values())
    text = f"{size_text(total)} of files"
    if total > _LARGE_CONTEXT_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listed = ", ".join(f"{name} ({size_text(sizes[name])})" for name in largest)
        text += f"\n  That is much: {listed}. Data belongs on a volume; name it in .dockerignore."
    return text


_CONNECT_TIMEOUT_S = 10
_SILENCE_TIMEOUT_S = 900  # the builder says nothing while pip unpacks a large wheel, a registry while it stores a layer


@contextmanager
def connected() -> Iterator[Any]:
    """Yield a `DockerClient` from DOCKER_HOST and related variables; its errors become `ImageError`.

    Raises:
        ImageError: the package docker is missing, there is no engine, or it went away.
    """
    try:
        from docker.client import DockerClient
        from docker.credentials.errors import StoreError
        from docker.errors import APIError, DockerException
    except ImportError as error:  # `import docker` alone finds any folder of this name
        raise ImageError(
            f"Images are built and pushed through the package docker, which is not installed in this Python: {error}.",
            "Install it: pip install 'docker>=7'.",
        ) from error
    from urllib3.exceptions import HTTPError

    try:
        client = DockerClient.from_env(timeout=_CONNECT_TIMEOUT_S, use_ssh_client=True)
    except (DockerException, OSError, HTTPError, ValueError) as error:
        raise _unreachable(error) from error
    try:
        client.api.timeout = _SILENCE_TIMEOUT_S
        yield client
    except APIError as error:
        said = error.explanation or str(error)
        raise ImageError(f"Docker Engine at {_address()} refuses: {said}") from error
    except BrokenPipeError:  # the reader of the output has left
        raise
    except (DockerException, StoreError, OSError, HTTPError) as error:
        if store_error := next((one for one in (error, error.__cause__) if isinstance(one, StoreError)), None):
            raise _without_credentials(store_error) from error
        raise ImageError(
            f"Docker Engine at {_address()} does not continue: {_reason(error)}.",
            "Does `docker info` work? Then again.",
        ) from error
    finally:
        client.close()


def _without_credentials(error: Exception) -> ImageError:
    directory = os.environ.get("DOCKER_CONFIG") or "~/.docker"
    return ImageError(
        f"Docker's credentials cannot be read: {str(error).rstrip('.')}.",
        f"{directory}/config.json names it under credsStore or credHelpers: install it, or take the line out.",
    )


def _address() -> str:
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _reason(error: BaseException) -> str:
    """Return the operating system's message, if there is one; packages wrap it in each other's words."""
    reason = str(error).rstrip(".")
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            reason = inner.strerror
        inner = inner.__cause__ or inner.__context__
    return reason


def _unreachable(error: Exception) -> ImageError:
    reason = _reason(error)
    if "ermission denied" in reason:
        hint = "This user may not use it: join the group docker (sudo usermod -aG docker $USER) and log in again."
    else:
        hint = (
            "Start Docker, or let DOCKER_HOST name an engine that runs (minikube: eval $(minikube docker-env)); "
            "`docker info` must work. Where it does, `docker context inspect` shows the Host for DOCKER_HOST."
        )
    return ImageError(f"There is no Docker Engine at {_address()}: {reason}.", hint)


def push(repository: str, tag: str, out: TextIO) -> None:
    """Push an image and show the output of the registry; credentials are those of `docker login`.

    Args:
        repository: Repository in the image's name; begins with the registry.
        tag: Tag in the image's name.
        out: where the progress goes.

    Raises:
        ImageError: no engine, no such image, or the registry refuses.
    """
    name = f"{repository}:{tag}"
    with connected() as engine:
        from docker.errors import ImageNotFound

        try:
            engine.images.get(name)
        except ImageNotFound as error:
            raise ImageError(
                f"The engine has no image {name}.", f"`elasticdl zoo build PATH --image={name}` makes it."
            ) from error
        with shown(out) as display:
            for message in read_messages(engine.api.push(repository, tag=tag, stream=True, decode=True)):
                if isinstance(message, Failure):
                    raise ImageError(f"{name} was not pushed: {message.text}", _push_hint(repository, message.text))
                display.show(message)


def _push_hint(repository: str, text: str) -> str:
    registry = registry_of(repository)
    if re.search(r"denied|unauthorized|authentication|no basic auth", text, re.IGNORECASE):
        if not registry:
            return "That name has no registry in front, so it went to Docker Hub: build and push REGISTRY/NAME:TAG."
        return f"`docker login {registry}`; may you write there?"
    if "HTTP response to HTTPS" in text:
        return f"{registry} speaks plain HTTP: let the engine's daemon.json name it under insecure-registries."
    if re.search(r"connection refused|no such host|timeout|deadline|dial tcp", text, re.IGNORECASE):
        return f"The engine cannot reach {registry or 'Docker Hub'}: is that the registry's address?"
    return "These are the registry's own words."
