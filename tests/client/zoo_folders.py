"""Model zoos and wheels for the tests of `elasticdl zoo`."""

from __future__ import annotations

import zipfile
from pathlib import Path

from elasticdl_client.version import VERSION

RUNTIME_METADATA = f"""\
Metadata-Version: 2.4
Name: elasticdl2
Requires-Dist: numpy<3,>=1.26
Requires-Dist: elasticdl2-client=={VERSION}
Provides-Extra: tensorflow
Requires-Dist: tensorflow-cpu<3,>=2.17; (platform_system == "Linux" and platform_machine == "x86_64") and \
extra == "tensorflow"
Provides-Extra: torch
Requires-Dist: torch<3,>=2.6; extra == "torch"
Provides-Extra: allreduce
Requires-Dist: torch<3,>=2.6; extra == "allreduce"

# A description; Requires-Dist: none-of-it
"""
CLIENT_METADATA = """\
Metadata-Version: 2.4
Name: elasticdl2-client
Requires-Dist: kubernetes>=29
Requires-Dist: PyYAML>=6; python_version >= "3.11"
"""


def model_zoo(folder: Path) -> Path:
    """A folder with one module."""
    (folder / "mnist").mkdir(parents=True)
    (folder / "mnist" / "model.py").write_text("def custom_model(): ...\n")
    return folder


def wheel(folder: Path, name: str, metadata: str, of_version: str = VERSION, tags: str = "py3-none-any") -> Path:
    """A wheel with nothing in it but its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{of_version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{of_version}.dist-info/METADATA", metadata)
    return path


def wheels(folder: Path) -> Path:
    """A folder as `make wheels` leaves it."""
    wheel(folder, "elasticdl2", RUNTIME_METADATA)
    wheel(folder, "elasticdl2_client", CLIENT_METADATA)
    return folder
