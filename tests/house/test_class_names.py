"""A class name has one meaning in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("elasticdl", "elasticdl_client", "elasticdl_preprocessing")

# Import paths of the original give classes under its own names.
OF_THE_ORIGINAL = "elasticdl/original/"


def defined_twice(root: Path) -> dict[str, list[str]]:
    """Return the class names that more than one file defines, each with these files."""
    files: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if name.startswith(OF_THE_ORIGINAL) or file.stem.endswith(("_pb2", "_pb2_grpc")) or "/build/" in name:
                continue
            for node in ast.parse(file.read_text(), name).body:
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(name)
    return {name: places for name, places in sorted(files.items()) if len(places) > 1}


def test_no_class_name_is_defined_twice() -> None:
    assert defined_twice(ROOT) == {}


def test_a_class_name_in_two_files_is_found(tmp_path: Path) -> None:
    for package in PACKAGES[:2]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("class Part: ...\nclass _Part: ...\n")
    places = ["elasticdl/a.py", "elasticdl_client/a.py"]
    assert defined_twice(tmp_path) == {"Part": places, "_Part": places}
