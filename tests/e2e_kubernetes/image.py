"""The image that the jobs of these tests run in: the model zoo and `zoo/`, built by the product's own commands."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from elasticdl_client.zoo.dockerfile import FOLDER, RUNTIME_FILE
from tests.e2e_kubernetes.kubectl import REPOSITORY

BUILD = REPOSITORY / "build" / "e2e"
_INPUTS = (
    "elasticdl", "elasticdl_client", "elasticdl_preprocessing", "model_zoo", "docker", "pyproject.toml", "setup.py",
    "tests/e2e_kubernetes/zoo", "tests/e2e_kubernetes/image.py",
)  # fmt: skip
_IGNORED = {"__pycache__", "build"}
_OF_COMMANDS = (  # packages that `elasticdl tensorboard`, `analyze`, `dashboard`, `sql` and storage need
    "tensorboard", "datasketches", "starlette", "uvicorn", "sqlalchemy", "psycopg", "psycopg-binary", "pymysql", "s3fs",
)  # fmt: skip


def ready_image(framework: str = "tensorflow") -> str:
    """The image of the checkout as it is now; built if there is none of this content yet.

    Args:
        framework: as `elasticdl zoo init` has it.
    """
    name = "elasticdl-e2e" if framework == "tensorflow" else f"elasticdl-e2e-{framework}"
    image = f"{name}:{digest()}"
    if not _exists(image):
        _build(image, framework)
    return image


def _exists(image: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0


def _build(image: str, framework: str) -> None:
    zoo = _empty_folder("zoo")
    ignored = shutil.ignore_patterns(*_IGNORED)
    shutil.copytree(REPOSITORY / "model_zoo", zoo, dirs_exist_ok=True, ignore=ignored)
    shutil.copytree(REPOSITORY / "tests" / "e2e_kubernetes" / "zoo", zoo, dirs_exist_ok=True, ignore=ignored)
    wheels = _empty_folder("wheels")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(wheels),
    ]
    _run(*pip, "./elasticdl_client", ".")
    base: tuple[str, ...] = ()
    if framework == "tensorflow":
        base = (f"--base_image={_tensorflow_alone(wheels)}",)
        torch = f"torch=={version('torch').partition('+')[0]}"  # as pip here finds it: without CUDA, if it may choose
        _run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), torch)
        (zoo / "requirements.txt").write_text("".join(f"{name}=={version(name)}\n" for name in _OF_COMMANDS))
    options = (f"--framework={framework}", f"--local_pkg_dir={wheels}", *base)
    _elasticdl("zoo", "init", f"--model_zoo={zoo}", *options, "--force")
    _elasticdl("zoo", "build", str(zoo), f"--image={image}")


def _tensorflow_alone(wheels: Path) -> str:
    """An image without PyTorch, made as the tutorials make theirs: they share the layer of TensorFlow."""
    zoo = _empty_folder("tensorflow")
    (zoo / "model.py").touch()
    _elasticdl("zoo", "init", f"--model_zoo={zoo}", f"--local_pkg_dir={wheels}", "--without=allreduce", "--force")
    requirements = (zoo / FOLDER / RUNTIME_FILE).read_bytes()
    image = f"elasticdl-e2e-base:{hashlib.sha256(requirements).hexdigest()[:12]}"
    if not _exists(image):
        _elasticdl("zoo", "build", str(zoo), f"--image={image}")
    return image


def _empty_folder(name: str) -> Path:
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _elasticdl(*arguments: str) -> None:
    _run(sys.executable, "-m", "elasticdl_client.main", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def digest(*more: str) -> str:
    """Of all that the images of this checkout are made of, and of more files."""
    found = hashlib.sha256()
    for path in sorted(file for name in (*_INPUTS, *more) for file in _files(REPOSITORY / name)):
        found.update(str(path.relative_to(REPOSITORY)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for file in path.rglob("*") if file.is_file() and not _IGNORED & set(file.parts)]
    return [file for file in found if not any(part.endswith(".egg-info") for part in file.parts)]


if __name__ == "__main__":
    print(ready_image())
