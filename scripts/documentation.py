"""Generate the pages of the documentation site that come from the code; also the hooks for MkDocs (mkdocs.yml).

    python -m scripts.documentation [--output=build/documentation]

writes the generated pages as Markdown, for review; `make docs` builds the site.  Flags come from the dataclasses of the
parser, errors from the calls that create them, keys of the status from its dataclasses.  The front page is README.md;
files outside of docs/ with links from pages become pages below `repository/`.  Only the hooks need MkDocs.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from elasticdl_client import job_status, run_script, simulate
from elasticdl_client.flags import Group, flag_of
from elasticdl_client.help import COMMANDS, JOBS
from elasticdl_client.job_spec import flag_fields
from elasticdl_client.jobs import options
from elasticdl_client.kubernetes import rbac
from elasticdl_client.sql import arguments as sql
from elasticdl_client.zoo import arguments as zoo

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|#)([^()\s#]+)(#[^()\s]*)?(?=\))")
_FENCE = re.compile(r"^```(\w+) [^\n]*$", re.MULTILINE)  # ```bash kubernetes: the second word is for our tests
_API = {
    "Jobs from Python": ("elasticdl_client.sdk.start", "elasticdl_client.sdk.job"),
    "PyTorch scripts": ("elasticdl.api.pytorch", "elasticdl.api.pytorch.controller"),
    "Data of your own script": ("elasticdl.api.data",),
    "TensorFlow scripts": ("elasticdl.api.tensorflow",),
    "Callbacks": ("elasticdl.api.callbacks",),
    "Records": ("elasticdl.api.examples",),
    "Layers": ("elasticdl.layers.embedding",),
    "Preprocessing layers": tuple(
        f"elasticdl_preprocessing.{name}" for name in ("categorical", "conversions", "numeric", "sparse_embedding")
    ),
    "Statistics for preprocessing": ("elasticdl_preprocessing.analyzer",),
}
ERRORS = {
    "FlagError": "Flags and the command line",
    "DataError": "Data",
    "ModelDefinitionError": "Model definitions and scripts",
    "JobError": "Jobs",
    "CheckpointError": "Checkpoints and trained models",
    "ClusterError": "Kubernetes",
    "ImageError": "Images",
    "StatementError": "Statements of `elasticdl sql`",
    "ElasticDLError": "Others",
}
_PACKAGES = ("elasticdl_client", "elasticdl", "elasticdl_preprocessing")
_STATUS = {
    "The job": job_status.JobStatus,
    "coverage": job_status.EpochCoverage,
    "pods": job_status.PodStatus,
    "ps": job_status.PsStatus,
}


def generated() -> dict[str, str]:
    """Return every generated page of the reference: its path in the site, and its Markdown."""
    return {
        "reference/flags.md": flags_page(),
        "reference/status.md": status_page(),
        "reference/errors.md": errors_page(),
        "reference/api.md": api_page(),
    }


# Flags


def flags_page() -> str:
    """Return a table for each group of flags, and one for each job command."""
    lines = [
        "# Flags",
        "",
        "Of `elasticdl train`, `run`, `evaluate`, `predict` and `analyze`; a flag with no commands is one of all five.",
    ]
    fields = {command: flag_fields(command) for command in JOBS}
    names = list(dict.fromkeys(name for found in fields.values() for name in found))
    for group in Group:
        rows = []
        for name in names:
            commands = [command for command in JOBS if name in fields[command]]
            field = fields[commands[0]][name]
            flag = flag_of(field)
            if flag is None or flag.group is not group:
                continue
            only = "" if len(commands) == len(JOBS) else ", ".join(commands)
            rows.append((f"`--{name}`", _default(field.default), flag.help, only))
        lines += ["", f"## {group}", "", *_table(("flag", "default", "", "commands"), rows)]
    lines += ["", "## elasticdl run", "", f"Usage: `{run_script.USAGE}`", ""]
    lines += _table(("option", ""), [(f"`--{name}`", text) for name, text in run_script.OPTIONS.items()])
    for command in options.FORMATS:
        rows = []
        for name, (option, default) in options.options_of(command).items():
            short = f"`-{option.short}`, " if option.short else ""
            rows.append((f"{short}`--{name}`", _default(default), option.help))
        lines += ["", f"## elasticdl {command}", "", _sentence(COMMANDS[command]), ""]
        lines += _table(("option", "default", ""), rows)
    for command, flags in {"simulate": simulate.FLAGS, "sql": sql.FLAGS, "rbac": rbac.FLAGS}.items():
        rows = [(f"`-{name}`" if len(name) == 1 else f"`--{name}`", text) for name, text in flags.items()]
        lines += ["", f"## elasticdl {command}", "", _sentence(COMMANDS[command]), "", *_table(("option", ""), rows)]
    for command, known in zoo.COMMANDS.items():
        lines += [
            "",
            f"## elasticdl zoo {command}",
            "",
            f"{_sentence(known.summary)} Usage: `{zoo.usage(command)}`",
            "",
        ]
        rows = [(f"`--{name}`", _default(one.default), one.help) for name, one in known.flags.items()]
        lines += _table(("option", "default", ""), rows) if rows else []
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _default(value: object) -> str:
    if value in ("", None):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.value if isinstance(value, StrEnum) else value}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(cell if cell.startswith('`') else escape(cell) for cell in row)} |" for row in rows]


def escape(text: str) -> str:
    """Return text as Markdown shows it word for word; text in backticks stays code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for k in range(0, len(parts), 2):
        parts[k] = re.sub(r"([\\*_<>\[\]#])", r"\\\1", parts[k])
    return "".join(parts).replace("|", "\\|")


# Status


def status_page() -> str:
    """Return the keys of the status with their types, as the dataclasses have them."""
    lines = [
        "# JSON of the status",
        "",
        "`elasticdl status JOB --output=json`; `elasticdl list --output=json` is a list of such objects. Beside these",
        "keys an object has `name`, `runtime`, `namespace`, `directory`, `phase`, `note`, `created_at` and `logs`:",
        "[all of them explained](../jobs.md#--outputjson). Keys may be added; none is renamed or removed.",
    ]
    for title, kind in _STATUS.items():
        heading = title if kind is job_status.JobStatus else f"Each of `{title}`"
        rows = [
            (f"`{field.name}`", f"`{field.type}`", comments(kind).get(field.name, ""))
            for field in dataclasses.fields(kind)
            if field.name not in ("job_name", "phase") or kind is not job_status.JobStatus
        ]
        lines += ["", f"## {heading}", "", " ".join(inspect.getdoc(kind).split()), ""]  # type: ignore[union-attr]
        lines += _table(("key", "type", ""), rows)
    return "\n".join(lines) + "\n"


def comments(kind: type[Any]) -> dict[str, str]:
    """Return the comment behind each field of a dataclass."""
    found = re.findall(r"^    (\w+): [^\n#]*#\s*(.+)$", inspect.getsource(kind), re.MULTILINE)
    return dict(found)


# Errors


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """An error as a user meets it; values known only at run time are written as `‹name›`."""

    kind: str
    what: str
    hint: str


def errors_page() -> str:
    """Return every error message with its hint, by subject."""
    lines = [
        "# Troubleshooting: every error and what to do",
        "",
        "Each error has two parts: the error and its cause, and after the arrow what to do. Search this page for a",
        "part of yours; `‹name›` stands for what only your job knows. An error with a traceback is a bug: report it.",
        "[This table](../kubernetes.md#faults) has the consequences of faults on Kubernetes.",
    ]
    messages = sorted(set(error_messages()))
    for kind, title in ERRORS.items():
        lines += ["", f"## {title}", ""]
        for message in messages:
            if message.kind == kind:
                lines += [f"- {escape(message.what)}" + (f"<br>→ {escape(message.hint)}" if message.hint else "")]
    return "\n".join(lines) + "\n"


def error_messages() -> Iterator[Message]:
    """Yield what the code's errors say, those whose text stands where they are made."""
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                    yield from _messages(node, node.func.id)


def _messages(call: ast.Call, kind: str) -> Iterator[Message]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    what = call.args[0] if call.args else given.get("what")
    hint = call.args[1] if len(call.args) > 1 else given.get("hint")
    for text in _texts(what):
        if len(re.sub(r"‹[^›]*›|\W", "", text)) >= 12:
            for advice in _texts(hint):
                yield Message(kind, text, advice if re.sub(r"‹[^›]*›|\W", "", advice) else "")


def _texts(node: ast.expr | None) -> list[str]:
    """Return the texts that an expression can produce, as far as the code contains them."""
    if node is None:
        return [""]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in _texts(node.left) for right in _texts(node.right)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else _place(part) for part in node.values)]
    return [_place(node)]


def _place(node: ast.expr) -> str:
    """Return a name for a value: the last name in the expression that computes it."""
    if isinstance(node, ast.FormattedValue):
        node = node.value
    while isinstance(node, ast.Call | ast.Subscript):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif node.args and isinstance(node.args[-1], ast.Name | ast.Attribute):
            node = node.args[-1]
        else:  # of `path.strip()` the path
            node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "…"
    return f"‹{name.strip('_').lower().replace('_', ' ')}›"


# API


def api_page() -> str:
    """Return a directive of mkdocstrings for each module that users import."""
    lines = [
        "# Python API",
        "",
        "The API of jobs, model definitions and training scripts. Paths of the original: [this page](../original.md).",
    ]
    for title, modules in _API.items():
        lines += ["", f"## {title}"]
        for module in modules:
            lines += ["", f"::: {module}"]
    return "\n".join(lines) + "\n"


# The site


def front_page() -> str:
    """Return README.md as the site's index."""
    return relink((ROOT / "README.md").read_text(), ROOT / "README.md", "index.md")


def repository_pages() -> dict[str, str]:
    """Return files outside of docs/ that pages link to, and those linked by these: path in the site, and Markdown."""
    found: dict[str, str] = {}
    waiting = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    while waiting:
        source = waiting.pop()
        for target in targets(source):
            place = place_of(target)
            if place.startswith("repository/") and place not in found:
                found[place] = ""
                if target.suffix == ".md":
                    found[place] = relink(target.read_text(), target, place)
                    waiting.append(target)
                elif target.is_file():
                    found[place] = f"# {target.name}\n\n```{target.suffix[1:]}\n{target.read_text().rstrip()}\n```\n"
    return found


def targets(source: Path) -> Iterator[Path]:
    """Yield the files that a page links to."""
    for match in LINK.finditer(without_code(source.read_text())):
        target = (source.parent / match[1]).resolve()
        yield target / "README.md" if target.is_dir() else target


def without_code(markdown: str) -> str:
    """Return Markdown without what is not read as such."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", markdown, flags=re.MULTILINE | re.DOTALL)


def place_of(target: Path) -> str:
    """Return where a file of the repository is in the site."""
    if target == ROOT / "README.md":
        return "index.md"
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return f"repository/{name}" if target.suffix == ".md" else f"repository/{name}.md"


def relink(markdown: str, source: Path, place: str) -> str:
    """Return a page with the links that it needs at its place in the site."""

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if target.is_dir():
            target /= "README.md"
        return os.path.relpath(place_of(target), os.path.dirname(place) or ".") + (match[2] or "")

    return _FENCE.sub(r"```\1", LINK.sub(link, markdown))


def on_config(config: Any) -> Any:
    """Give headings the same anchors as in the repository's view of the files; a hook of MkDocs."""
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages; a hook of MkDocs."""
    from mkdocs.structure.files import File

    pages: Mapping[str, str] = {"index.md": front_page(), **generated(), **repository_pages()}
    for place, content in pages.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt links that lead out of docs/ in the hand-written pages; a hook of MkDocs."""
    source = page.file.abs_src_path
    if source is None or not Path(source).is_relative_to(DOCS):
        return markdown
    return relink(markdown, Path(source), page.file.src_uri)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("build/documentation"))
    given = parser.parse_args()
    for place, content in {"index.md": front_page(), **generated(), **repository_pages()}.items():
        path = given.output / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
