"""How much of each package the tests run, lines and branches, subprocesses included.

    python -m tests.coverage REPORT.json

Reads what `coverage json` has written; `make coverage` does all of it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def by_package(report: dict[str, Any]) -> dict[str, Counter[str]]:
    """The counts of each package: the first two folders of a path; `total` comes last."""
    found: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for path, file in sorted(report["files"].items()):
        folders = Path(path).parent.parts
        counts = Counter({name: file["summary"][name] for name in _COUNTS})
        found.setdefault("/".join(folders[:2]), Counter()).update(counts)
        total.update(counts)
    return {**found, "total": total}


def table(report: dict[str, Any]) -> str:
    """One line for each package."""
    rows = by_package(report)
    width = max(map(len, rows))
    lines = [f"{'package':<{width}}  {'lines':>8}  {'covered':>8}  {'branches':>8}  {'covered':>8}"]
    for name, counts in rows.items():
        lines.append(
            f"{name:<{width}}  {counts['num_statements']:>8,}  {_share(counts, 'covered_lines', 'num_statements')}"
            f"  {counts['num_branches']:>8,}  {_share(counts, 'covered_branches', 'num_branches')}"
        )
    return "\n".join(lines)


def _share(counts: Counter[str], part: str, whole: str) -> str:
    return f"{counts[part] / counts[whole]:>8.1%}" if counts[whole] else f"{'–':>8}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
