"""The arguments of `elasticdl sql`: statements, the flags of this command, and those of jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import is_bool_word

VARIABLE = "ELASTICDL_DATASOURCE"
MODELS_TABLE = "elasticdl_models"
USAGE = 'elasticdl sql "STATEMENT" --datasource=URL [JOBFLAGS…] | elasticdl sql -f FILE … | elasticdl sql …'
FLAGS = {
    "datasource": "The database: sqlite:///PATH, postgresql://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE. A URL "
    f"with a password belongs into the variable {VARIABLE}, which is the default.",
    "f": "File of statements, with semicolons between; - is standard input. Written -f FILE.",
    "dry_run": "Print the commands that the statements stand for, and write nothing. [false]",
    "overwrite": "Replace the table of TO PREDICT or INTO if it exists. [false]",
    "models_dir": "Directory of the models. [~/.elasticdl/models]",
    "models_table": "Table of the database that mirrors the models, for clients on several machines: a name, "
    f"schema.name, or nothing: {MODELS_TABLE}. []",
}
BOOLEAN = ("dry_run", "overwrite")


@dataclass(frozen=True, slots=True)
class SqlArguments:
    """The command line.

    Attributes:
        source: the text of the statements; None: none is given.
        own: the flags of this command.
        of_jobs: all other arguments.
    """

    source: str | None
    own: Mapping[str, str]
    of_jobs: tuple[str, ...]


def split(arguments: Sequence[str]) -> SqlArguments:
    """Return the parts of a command line.

    Raises:
        FlagError: one is missing, or given twice.
    """
    texts: list[str] = []
    own: dict[str, str] = {}
    of_jobs: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        key = "f" if name in ("-f", "--filename") else name[2:].replace("-", "_") if name.startswith("--") else ""
        if key in FLAGS:
            if key in own:
                raise FlagError(f"{name} is given twice.", "Give it once.")
            if key in BOOLEAN:
                word = value if equals else rest.pop(0) if rest and is_bool_word(rest[0]) else "true"
                if not is_bool_word(word):
                    raise FlagError(f"--{key} takes true or false, not '{word}'.", f"Write --{key} alone.")
                if word.strip().lower() in ("true", "yes", "t", "y", "1"):
                    own[key] = "true"
                continue
            if key == "models_table" and not equals:
                own[key] = MODELS_TABLE
                continue
            own[key] = value if equals else rest.pop(0) if rest else ""
            if not own[key]:
                raise FlagError(f"{name} needs a value.", f"Usage: {USAGE}")
        elif argument.startswith("-"):
            of_jobs.append(argument)
            if not equals and rest and not rest[0].startswith("-") and len(rest[0].split()) < 2:  # else a statement
                of_jobs.append(rest.pop(0))
        else:
            texts.append(argument)
    if "f" in own:
        texts.append(_read(own["f"]))
    if len(texts) > 1:
        raise FlagError("Statements are given more than once.", f"Usage: {USAGE}")
    return SqlArguments(texts[0] if texts else None, own, tuple(of_jobs))


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{path} cannot be read: {error}.", "Give the path of a file of statements to -f.") from error
