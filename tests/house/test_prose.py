"""The language of docstrings, comments, messages, help and pages: the thing is named, in the field's terms."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.3  # offenders per 1,000 words, of each part

# "Who waits for a lease …", "nobody answers", and sentences and clauses like "What the master knows." and "status: what
# the master wrote last"; not "What to do: …".
_PRONOUN = re.compile(r"\b(?:who|whom|whoever|nobody|somebody|anybody|everybody)\b", re.IGNORECASE)
_FUSED = re.compile(
    r"(?:^|(?<=[.!?:;]\s)\s*)(?:(?:and|but|so|of) )?what(?:ever)? (?!to\b)[^?]*?(?:[.;:](?=\s|$)|\Z)", re.IGNORECASE
)
_PHRASE = re.compile(
    r"\b(?:for ever|goes on|at hand|in vain|so many|of no matter|(?:told|heard|said) of|(?:is|are|was|were|be) told)\b",
    re.IGNORECASE,
)
_HEADING_OR_CODE = re.compile(r"^(?:```.*?^```|#+ .*?$)", re.MULTILINE | re.DOTALL)
_COMMENT_OF = {
    ".cpp": r"//.*$",
    ".hpp": r"//.*$",
    ".proto": r"//.*$",
    ".js": r"(?<!:)//.*$",
    ".yaml": r"#.*$|description:.*$",
}


class Text(NamedTuple):
    file: str
    line: int
    text: str


def texts_of(file: str, content: str) -> Iterator[Text]:
    """The texts for people in a file: docstrings, comments, messages and names of tests; all of a page but its code."""
    suffix = Path(file).suffix
    if suffix == ".py":
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield Text(file, node.lineno, node.value)
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Text(file, node.lineno, node.name.replace("_", " "))
        for token in tokenize.generate_tokens(io.StringIO(content).readline):
            if token.type == tokenize.COMMENT:
                yield Text(file, token.start[0], token.string.lstrip("# "))
    elif suffix == ".md":
        yield Text(file, 1, _HEADING_OR_CODE.sub(lambda match: re.sub(r"[^\n]", "", match[0]), content))
    elif suffix in _COMMENT_OF:
        for match in re.finditer(_COMMENT_OF[suffix], content, re.MULTILINE):
            yield Text(file, 1 + content.count("\n", 0, match.start()), match[0].lstrip("/# "))


def offenders(texts: Iterable[Text]) -> list[str]:
    return [
        f"{file}:{line + text.count(chr(10), 0, match.start())}: {match[0].strip().splitlines()[0][:90]}"
        for file, line, text in texts
        for pattern in (_PRONOUN, _PHRASE, _FUSED)
        for match in pattern.finditer(text)
    ]


def tracked(*patterns: str) -> list[Text]:
    listing = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    return [
        text
        for file in files
        if "_pb2" not in file and Path(file).suffix in {".py", ".md", *_COMMENT_OF}
        for text in texts_of(file, (ROOT / file).read_text())
    ]


@pytest.mark.parametrize(
    "part",
    [
        ("*.md", ":!tests"),
        ("elasticdl", ":!*.md"),
        ("*", ":!elasticdl", ":!tests", ":!*.md"),
        ("tests", f":!{Path(__file__).relative_to(ROOT)}"),
    ],
    ids=["pages", "runtime", "client", "tests"],
)
def test_texts_name_the_thing_in_the_fields_terms(part: tuple[str, ...]) -> None:
    texts = tracked(*part)
    found = offenders(texts)
    num_words = sum(len(re.findall(r"[A-Za-z']+", text.text)) for text in texts)
    assert num_words > 40_000
    assert 1000 * len(found) / num_words <= LIMIT, "\n".join(found)


def test_offenders_are_found_in_every_kind_of_text() -> None:
    code = '"""What it knows."""\nx = 1  # nobody reads it\nlog("Line\\n", "the pod whoever made it")\n'
    assert offenders(texts_of("a.py", code)) == ["a.py:1: What it knows.", "a.py:3: whoever", "a.py:2: nobody"]
    code = '"""Status: what it wrote.  Of what is there.\n\n  Returns:\n    What is left; what is lost is lost.\n"""\n'
    assert [line.split(": ", 1)[1] for line in offenders(texts_of("a.py", code))] == [
        "what it wrote.",
        "Of what is there.",
        "What is left;",
        "what is lost is lost.",
    ]
    assert offenders(texts_of("a.py", "def test_who_waits() -> None: ...\n")) == ["a.py:1: who"]
    page = "# Who\n\nAll is well. What is lost\nreturns. What is it? What to do: nothing.\n\n```\nwho\n```\nanybody\n"
    assert offenders(texts_of("a.md", page)) == ["a.md:9: anybody", "a.md:3: What is lost"]
    assert offenders(texts_of("a.py", "x = 1  # it goes on for ever\n")) == ["a.py:1: goes on", "a.py:1: for ever"]
    assert offenders(texts_of("a.cpp", "f(who);  // who waits\n")) == ["a.cpp:1: who"]
    assert offenders(texts_of("a.yaml", "who: x  # for whom\n")) == ["a.yaml:1: whom"]
