"""A small module with one importer belongs into that importer."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("elasticai_api", "elasticdl", "elasticdl_client", "elasticdl_preprocessing")
SMALL = 80  # lines
MOST_FILES = 4.55  # for each 1,000 lines
MOST_ARROWS = 90  # imports between files of the worker: lower it with each that goes


def files_of(root: Path) -> dict[str, Path]:
    """Return the files of all modules below a folder, by the names of the modules."""
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for package in PACKAGES
        for file in (root / package).rglob("*.py")
        if "build" not in file.relative_to(root).parts
    }


def crumbs(root: Path) -> frozenset[str]:
    """Return the names of the small modules that exactly one other module imports."""
    files = files_of(root)
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, file in files.items():
        for imported in _imports(ast.parse(file.read_text()), files.keys() - {module}):
            importers[imported].add(module)
    return frozenset(
        module
        for module, file in files.items()
        if file.stem not in ("__init__", "__main__")
        and len(importers[module]) == 1
        and len(file.read_text().splitlines()) < SMALL
    )


def _imports(tree: ast.Module, modules: set[str]) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in modules else str(node.module))
    return names & modules


def test_no_small_module_has_a_single_importer() -> None:
    assert not crumbs(ROOT)


def test_modules_are_not_crumbs_on_average() -> None:
    sizes = [len(file.read_text().splitlines()) for file in files_of(ROOT).values()]
    assert 1000 * len(sizes) / sum(sizes) < MOST_FILES


def test_the_files_of_the_worker_know_few_others() -> None:
    files = {module: file for module, file in files_of(ROOT).items() if module.startswith("elasticdl.worker")}
    arrows = sum(len(_imports(ast.parse(file.read_text()), files.keys() - {one})) for one, file in files.items())
    assert arrows <= MOST_ARROWS


def test_a_small_module_is_found_by_its_one_importer(tmp_path: Path) -> None:
    package = tmp_path / "elasticdl"
    package.mkdir()
    large = "x = 1\n" * SMALL
    texts = {
        "__init__": "",
        "alone": "",
        "once": "",
        "late": "",
        "twice": "",
        "large": large,
        "a": "from elasticdl import once, twice\n",
        "b": "from elasticdl.twice import x\nimport elasticdl.large\n\ndef f() -> None:\n    import elasticdl.late\n",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    assert crumbs(tmp_path) == {"elasticdl.once", "elasticdl.late"}
