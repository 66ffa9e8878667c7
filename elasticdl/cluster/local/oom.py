"""Tells whether the kernel's OOM killer has struck in this process's control group since the last look.

A count of the whole group is all that the kernel shows, so a kill is ascribed to the pod that is seen to end next.
"""

from __future__ import annotations

import re
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """Watches one counter file; with None, or a file that cannot be read, nothing is ever new."""

    def __init__(self, counter: Path | None) -> None:
        self._counter = counter
        self._seen = self._read()

    @staticmethod
    def of_this_process() -> OomKills:
        """Finds the counter of this process's control group, version 2 or 1."""
        root = Path("/sys/fs/cgroup")
        try:
            lines = Path("/proc/self/cgroup").read_text().splitlines()
        except OSError:
            return OomKills(None)
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                return OomKills(root / "memory" / path.lstrip("/") / "memory.oom_control")
            if controllers == "" and (root / path.lstrip("/") / "memory.events").exists():
                return OomKills(root / path.lstrip("/") / "memory.events")
        return OomKills(None)

    def is_new(self) -> bool:
        """Whether the count has grown since it was last asked."""
        seen, self._seen = self._seen, self._read()
        return self._seen > seen

    def _read(self) -> int:
        if self._counter is None:
            return 0
        try:
            found = _COUNT.search(self._counter.read_text())
        except OSError:
            return 0
        return int(found.group(1)) if found else 0
