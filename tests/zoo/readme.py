"""model_zoo/README.md, made of the table of entries and the first lines of the modules.

python -m tests.zoo.readme > model_zoo/README.md
"""

from __future__ import annotations

import ast
import shlex
import textwrap
from collections.abc import Iterator

from tests.zoo.entries import DATA, ENTRIES, README_DATA, REPOSITORY, Data, Entry

HEAD = """\
# The model zoo

Models that learn what they are for, each with a command that trains it on one machine and what it comes to. They import
nothing of ElasticDL but `elasticdl.layers`, `elasticdl.api` and `elasticdl_preprocessing`, which is what your own may
import, too. The folder of a data set has what its models share, features first; the models are beside it.

`make zoo` trains all of them, in about a quarter of an hour on two cores, and prints a table at the end;
`make zoo ZOO="census.census_dnn criteo.dcn"` trains some. Data and logs are then in `build/zoo`.

All commands are for the root of a checkout. `SOURCES` is a directory with the original files; a data set that names
none is generated. On Kubernetes leave `--runtime=local` out and name an image:
[the tutorial](../docs/tutorials/kubernetes.md). `--distribution_strategy` can be any that the
[framework](../docs/features.md#strategies) has; where a command names none, it is `ParameterServerStrategy`.
"""
WIDTH = 116


def readme() -> str:
    return "\n".join([HEAD, *(part for data in DATA for part in _section(data))])


def _section(data: Data) -> Iterator[str]:
    entries = [entry for entry in ENTRIES if entry.data.name == data.name]
    yield f"## {data.name}\n"
    about = f"{data.about[0].upper()}{data.about[1:]} records."
    yield "\n".join(textwrap.wrap(about, WIDTH)) + "\n"
    yield _indented(["python", *data.generator(f"{README_DATA}/{data.name}")])
    for entry in entries:
        metric, least = entry.quality
        expected = f"{entry.expected}, " if entry.expected else ""
        about = f"**{entry.module}**: {_first_line(entry)} Expected: {metric} {expected}at least {least}."
        yield "\n".join(textwrap.wrap(about, WIDTH, break_on_hyphens=False)) + "\n"
        yield _indented(entry.command())


def _first_line(entry: Entry) -> str:
    source = (REPOSITORY / "model_zoo" / f"{entry.module.replace('.', '/')}.py").read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring, entry.module
    line = docstring.split("\n\n")[0].replace("\n", " ").rstrip(".:")
    return f"{line}."


def _indented(words: list[str]) -> str:
    """A command as bash has it, broken between its words only."""
    lines = [""]
    for word in words:
        flag, is_flag, value = word.partition("=")
        shown = f"{flag}={value}" if shlex.quote(value) == value else f'{flag}="{value}"'
        shown = shown if is_flag else word
        if lines[-1] and len(lines[-1]) + len(shown) > WIDTH - 12:
            lines.append("")
        lines[-1] += f" {shown}" if lines[-1] else shown
    return "    " + " \\\n        ".join(lines) + "\n"


if __name__ == "__main__":
    print(readme(), end="")
