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
class MetricsTable:
    """The metrics of a cell's statements, shown as a table.

    Attributes:
        rows: model, metric and value of each.
    """

    rows: tuple[tuple[str, str, float], ...]

    def __repr__(self) -> str:
        return "\n".join(f"{model:<20} {metric:<12} {value:.6g}" for model, metric, value in self.rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{html.escape(model)}</td><td>{html.escape(metric)}</td><td>{value:.6g}</td></tr>"
            for model, metric, value in self.rows
        )
        return f"<table><tr><th>model</th><th>metric</th><th>value</th></tr>{cells}</table>"


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic in IPython."""
    environment = dict(os.environ)  # with the database's URL, which statements take out of that of their jobs

    def elasticdl(line: str, cell: str) -> MetricsTable | None:
        """Run statements; their metrics, None if there are none."""
        try:
            given, session, dialect = command.prepare([*shlex.split(line), cell], environment)
            results = command.execute(session, dialect, given.source or "")
        except ElasticDLError as error:
            print(f"error: {error}", file=sys.stderr)
            return None
        rows = [
            (f"{one.model.name}@{one.model.version}", name, value)
            for one in results
            for name, value in one.metrics.items()
        ]
        return MetricsTable(tuple(rows)) if rows else None

    ipython.register_magic_function(elasticdl, magic_kind="cell", magic_name="elasticdl")
