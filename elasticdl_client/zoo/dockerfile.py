"""The text of what `elasticdl zoo init` writes: Dockerfile and .dockerignore.  Reads and writes no file.

Layers stand in the order in which they change: base, packages of others, your requirements, the runtime, the models.
A step that can fail is a plain command, so the builder sees its exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticdl_client.kubernetes.names import CLUSTER_SPEC_DIRECTORY, USER_ID, ZOO_DIRECTORY
from elasticdl_client.version import CLIENT, RUNTIME

FOLDER = ".elasticdl"  # in the model zoo: packages that the image needs and the zoo lacks
RUNTIME_FILE = "runtime.txt"  # in FOLDER: requirements in pip's format
WHEELS = "wheels"  # in FOLDER
PACKAGES = "packages"  # in FOLDER: wheels of others
CLUSTER_SPEC = "cluster_spec"  # in FOLDER
FOLDERS = (WHEELS, PACKAGES, CLUSTER_SPEC)
_SHARE = "/usr/local/share/elasticdl"  # in the image


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parts of an image.

    Attributes:
        version: Version of the client; the runtime has the same.
        runtime: requirements of the first layer: the runtime itself, or with `wheels` what the wheels need.
        has_wheels: whether the runtime and the client are in FOLDER/WHEELS, to be installed last.
        has_packages: whether there are wheels of others in FOLDER/PACKAGES, which pip takes in the first layer.
        extra_index: URL of one more package index; may be empty.
        has_cluster_spec: whether there is a file in FOLDER/CLUSTER_SPEC.
    """

    version: str
    base_image: str
    runtime: Sequence[str]
    has_wheels: bool = False
    has_packages: bool = False
    extra_index: str = ""
    has_cluster_spec: bool = False


def dockerfile(recipe: Recipe) -> str:
    """Return the Dockerfile, for any builder; the model zoo is the build context."""
    parts = [_base(recipe), _packages(recipe.has_packages), _requirements()]
    if recipe.has_wheels:
        parts.append(_wheels(recipe.version))
    if recipe.has_cluster_spec:
        owner = f"--chown={USER_ID}:{USER_ID}"
        parts.append(f"COPY {owner} {FOLDER}/{CLUSTER_SPEC}/ {CLUSTER_SPEC_DIRECTORY}/\n")
    return "\n".join([*parts, _zoo()])


def runtime_file(recipe: Recipe) -> str:
    """Return the requirements of the first layer."""
    return "\n".join(["# What `elasticdl zoo init` found the runtime to need.", *recipe.runtime, ""])


def _base(recipe: Recipe) -> str:
    index = f"ARG PIP_EXTRA_INDEX_URL={recipe.extra_index}\n" if recipe.extra_index else ""
    return f"""\
# Written by `elasticdl zoo init` {recipe.version}; yours to edit.
FROM {recipe.base_image}

USER root
RUN getent passwd {USER_ID} || useradd --uid {USER_ID} --create-home --shell /bin/bash elasticdl
ARG PIP_NO_CACHE_DIR=1
ARG PIP_PROGRESS_BAR=off
ARG PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_ROOT_USER_ACTION=ignore
# Images named python come without the bytecode of Python's library: each process would compile what it imports.  One
# that this step cannot write works as well.  pip compiles packages below, even if the base image has PIP_COMPILE=0.
RUN python -m compileall -q -x '/(site-packages|dist-packages|tests?)/' \\
        "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" || true
{index}"""


def _packages(has_packages: bool) -> str:
    copied = f"COPY {FOLDER}/{PACKAGES}/ {_SHARE}/{PACKAGES}/\n" if has_packages else ""
    found = f"ARG PIP_FIND_LINKS={_SHARE}/{PACKAGES}\n" if has_packages else ""
    return f"""\
# The framework and everything else the runtime needs: large, and changes least.
{copied}{found}COPY {FOLDER}/{RUNTIME_FILE} {_SHARE}/
RUN python -m pip install --compile --requirement {_SHARE}/{RUNTIME_FILE}
"""


def _requirements() -> str:
    # The class in brackets is a pattern that may match nothing; the other file keeps COPY from failing then.
    return f"""\
# What your models need besides, if there is a requirements.txt; a package that contradicts the runtime fails here.
COPY {FOLDER}/{RUNTIME_FILE} requirements.tx[t] {_SHARE}/
RUN if [ -e {_SHARE}/requirements.txt ]; then \\
        python -m pip install --compile --requirement {_SHARE}/{RUNTIME_FILE} \\
            --requirement {_SHARE}/requirements.txt; \\
    fi
"""


def _wheels(version: str) -> str:
    return f"""\
# The runtime itself: of its wheels pip takes the one for this Python and processor.
COPY {FOLDER}/{WHEELS}/ {_SHARE}/{WHEELS}/
RUN python -m pip install --compile --no-index --no-deps --force-reinstall \\
        --find-links={_SHARE}/{WHEELS} {RUNTIME}=={version} {CLIENT}=={version}
"""


def _zoo() -> str:
    return f"""\
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER {USER_ID}:{USER_ID}
WORKDIR {ZOO_DIRECTORY}

# Your models, last: a change in them rebuilds nothing else.
COPY --chown={USER_ID}:{USER_ID} . {ZOO_DIRECTORY}/
"""


_NEEDED = "\n".join(f"!{FOLDER}/{name}" for name in (RUNTIME_FILE, *FOLDERS))
# The head of earlier versions: it let local jobs into the image.
OLD_HEAD = f"# What does not go into the image, one pattern a line.  ({FOLDER} must.)\n"
HEAD = f"""\
# What does not go into the image, one pattern a line.  The build needs a part of {FOLDER}; its rest is of local jobs.
{FOLDER}/*
{_NEEDED}
"""
DOCKERIGNORE = f"""\
{HEAD}Dockerfile
.dockerignore
.git
.gitignore
.env
**/__pycache__
**/*.py[cod]
**/.ipynb_checkpoints
**/.pytest_cache
**/.mypy_cache
**/.ruff_cache
**/.venv
**/venv
**/node_modules
**/.DS_Store

# Data belongs on a volume (--volume), not into the image.  If there is some in here, name it:
# data
# **/*.recordio
# **/*.csv
# checkpoints
"""
