"""The modules of a model zoo as source: the imports of a module, and their files; runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_RUNTIME = frozenset({"elasticdl", "elasticdl_client", "elasticdl_preprocessing", "elasticai_api"})
ALIAS = "model_zoo"  # `import model_zoo.x` is the zoo's x, also where its directory has another name


@dataclass(frozen=True, slots=True)
class Source:
    """A module of the zoo.

    Attributes:
        imported: dotted names of all that it imports, anywhere in it.
    """

    file: Path
    tree: ast.Module
    imported: tuple[str, ...]


def sources(zoo: Path, module: str, script: Path | None = None) -> Iterator[Source]:
    """Yield a module of the zoo and those that it imports from there, nearest first; not what is not valid Python.

    ElasticDL's own modules, which lie there where a checkout is the zoo, are not the user's program.

    Args:
        zoo: where modules are looked for.
        module: dotted name of the first one.
        script: its file, whose directory is searched before the zoo; None: the file that the name says.
    """
    directories = (zoo,) if script is None else (script.parent, zoo)
    waiting, seen = [module], {module}
    while waiting:
        name = waiting.pop(0)
        is_script = script is not None and name == module
        file = script if is_script else next((file for one in directories if (file := _file(one, name))), None)
        tree = None if file is None else _parsed(file)
        if file is None or tree is None:
            continue
        imported = tuple(_imports(tree, file, name))
        yield Source(file, tree, imported)
        for one in imported:
            for candidate in within(one):
                if candidate not in seen and candidate.partition(".")[0] not in _RUNTIME:
                    seen.add(candidate)
                    waiting.append(candidate)


def within(name: str) -> list[str]:
    """A dotted name and what it lies in, longest first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _file(zoo: Path, module: str) -> Path | None:
    for name in dict.fromkeys((module, module.removeprefix(f"{ALIAS}."))):
        stem = zoo.joinpath(*name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if name and file.is_file():
                return file
    return None


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, OSError):
        return None


def _imports(tree: ast.Module, file: Path, module: str) -> Iterator[str]:
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" if origin else alias.name for alias in node.names)
