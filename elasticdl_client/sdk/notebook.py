"""The display of a job in a notebook: a bar and lines in the output of the cell, redrawn in place."""

from __future__ import annotations

import html
import sys
from typing import Any, TextIO

from elasticdl_client import progress
from elasticdl_client.job_events import EventHistory
from elasticdl_client.job_status import JobStatus
from elasticdl_client.news import News

_MAX_NEWS = 12  # lines that stay below the bar


def open_display(stream: TextIO, news: News) -> progress.Display:
    """Return the display of a job: a widget in a notebook, else what the stream can show."""
    return NotebookDisplay(news) if in_notebook() else progress.open_display(stream, news)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; a terminal's IPython is none."""
    module = sys.modules.get("IPython")
    shell: Any = module.get_ipython() if module is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """Shows a job in one output of a cell (see `Display`)."""

    def __init__(self, news: News) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._news = news
        self._lines: list[str] = []
        self._status: JobStatus | None = None
        self._handle = display(HTML("starting"), display_id=True)

    def update(self, status: JobStatus, history: EventHistory | None = None) -> None:
        """See `Display`."""
        self._status = status
        self._lines += [headline.text for headline in self._news.lines(status, history)]
        self._draw()

    def say(self, line: str) -> None:
        """See `Display`."""
        self._lines.append(line)
        self._draw()

    def close(self) -> None:
        """What was drawn last stays."""

    def _draw(self) -> None:
        del self._lines[:-_MAX_NEWS]
        parts = []
        if self._status is not None:
            done, total = self._status.records_done, self._status.records_total
            value = f' value="{done}" max="{total}"' if total else ""
            parts = [f'<progress style="width: 24em"{value}></progress>', html.escape(progress.summary(self._status))]
        self._handle.update(self._html("<br>".join([*parts, *map(html.escape, self._lines)])))
