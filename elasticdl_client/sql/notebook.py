"""The magic `%%elasticdl` of notebooks: `%load_ext elasticdl_client.sql.notebook`.

The line has the flags of `elasticdl sql`, the cell its statements.  A mistake is printed without a traceback.
"""

from __future__ import annotations

import html
import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from elasticdl_client.errors import ElasticDLError
from elasticdl_client.sql import command


@dataclass(frozen=True, slots=True)
class ResultTable:
    """The metrics or the importances that a cell's statements have found, shown as a table.

    Attributes:
        head: names of its columns.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def __repr__(self) -> str:
        texts = [[_text(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in texts)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in self.head)
        rows = ("".join(f"<td>{html.escape(_text(cell))}</td>" for cell in row) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _text(cell: str | float) -> str:
    return cell if isinstance(cell, str) else f"{cell:.6g}"


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic in IPython."""
    environment = dict(os.environ)  # with the database's URL, which statements take out of that of their jobs

    def elasticdl(line: str, cell: str) -> ResultTable | None:
        """Run statements; their metrics, or importances if the last one explains; None if there are none."""
        try:
            given, session, dialect = command.prepare([*shlex.split(line), cell], environment)
            results = command.execute(session, dialect, given.source or "")
        except ElasticDLError as error:
            print(f"error: {error}", file=sys.stderr)
            return None
        rows = [row for one in results if type(one) is type(results[-1]) for row in one.rows]
        return ResultTable(results[-1].head, tuple(rows)) if rows else None

    ipython.register_magic_function(elasticdl, magic_kind="cell", magic_name="elasticdl")
