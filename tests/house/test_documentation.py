"""The documentation site: every page has its place in it, every link and anchor resolves, and it builds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticdl_client.flags import flag_of
from elasticdl_client.help import JOBS
from elasticdl_client.job_spec import flag_fields
from elasticdl_client.zoo import arguments as zoo
from scripts import documentation, performance_graphs
from scripts.documentation import DOCS, LINK, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT).glob("*/README.md")), *sorted(DOCS.rglob("*.md"))]


@cache
def generated() -> dict[str, str]:
    """Pages of the site that are made, by place; not at the import, which every process of a run does."""
    return documentation.generated()


@cache
def site() -> dict[str, str]:
    """All pages of the site, by place."""
    pages = {"index.md": documentation.front_page(), **generated(), **documentation.repository_pages()}
    for path in DOCS.rglob("*.md"):
        place = path.relative_to(DOCS).as_posix()
        pages[place] = documentation.relink(path.read_text(), path, place)
    return pages


def anchors(markdown: str) -> set[str]:
    """Return the anchors that GitHub, and the site, make of the headings."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def navigated(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from navigated(value)
        else:
            yield value


def test_the_navigation_names_each_page_once_and_no_other() -> None:
    named = list(navigated(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(named) == len(set(named))
    assert set(named) <= set(site())
    assert {page for page in site() if not page.startswith("repository/")} <= set(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_of_a_page_resolve(page: Path) -> None:
    text = documentation.without_code(page.read_text())
    for target, anchor in LINK.findall(text):
        file = (page.parent / target).resolve()
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor[1:] in anchors(file.read_text()), f"{page}: {target}{anchor}"
    for anchor in re.findall(r"\]\(#([^)\s]+)\)", text):
        assert anchor in anchors(page.read_text()), f"{page}: #{anchor}"


def test_links_of_the_site_lead_to_pages_of_the_site() -> None:
    for place, markdown in site().items():
        for target, anchor in LINK.findall(documentation.without_code(markdown)):
            found = Path(place).parent.joinpath(target)
            parts: list[str] = []
            for part in found.parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            name = "/".join(parts)
            assert name in site() or (DOCS / name).is_file(), f"{place}: {target}"
            if anchor:
                assert anchor[1:] in anchors(site()[name]), f"{place}: {target}{anchor}"


def test_the_reference_has_every_flag_of_every_command() -> None:
    page = generated()["reference/flags.md"]
    for command in JOBS:
        for name, field in flag_fields(command).items():
            assert flag_of(field) is None or f"| `--{name}` |" in page, name
    for zoo_command, known in zoo.COMMANDS.items():
        section = page.partition(f"\n## elasticdl zoo {zoo_command}\n")[2].partition("\n## ")[0]
        assert all(f"| `--{name}` |" in section for name in known.flags), section
    assert "as they are now, until Ctrl-C." in page


def test_the_reference_explains_every_key_of_the_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `[^`]+` \| (.*) \|$", generated()["reference/status.md"], re.MULTILINE)
    assert {"coverage", "pods", "staleness", "quarantined", "restarts", "busy"} <= {key for key, _ in rows}
    assert not [key for key, meaning in rows if not meaning]


def test_the_reference_has_errors_with_their_hints() -> None:
    page = generated()["reference/errors.md"]
    assert "- --‹name› takes true or false, not '‹text›'.<br>→ Write --‹name› or --‹name›=false." in page
    for title in documentation.ERRORS.values():
        assert f"\n## {title}\n\n- " in page
    assert page.count("\n- ") > 400
    assert page.count("<br>→ ") > 250


def test_the_graphs_show_the_figures_of_the_benchmarks() -> None:
    drawn = {path.name: path.read_text() for path in DOCS.glob("performance_*.svg")}
    assert drawn == performance_graphs.pictures(), "run: python -m scripts.performance_graphs"
    assert "0.21 s" in drawn["performance_recovery.svg"]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "create_elastic_controller" in (tmp_path / "site" / "reference" / "api.html").read_text()


def test_the_architecture_page_names_paths_that_exist() -> None:
    page = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", page))
    tree = page.partition("```\n")[2].partition("\n```")[0]
    folders: list[tuple[int, str]] = []  # of the lines above: indentation, path
    for line in tree.splitlines():
        names = re.findall(r"[\w/]+(?=/ )|\w+\.py(?= )", line + " ")
        indent = len(line) - len(line.lstrip())
        folders = [folder for folder in folders if folder[0] < indent]
        parent = folders[-1][1] if folders else ""
        named |= {f"{parent}{name}" for name in names}
        folders.append((indent, f"{parent}{names[0]}/"))
    assert len(named) > 80
    assert [
        name for name in sorted(named) if not any((base / name).exists() for base in (ROOT, ROOT / "elasticdl"))
    ] == []
