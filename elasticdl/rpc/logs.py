"""How every process of a job logs: to its standard output, and without passwords, even in errors of other packages.

An entry is a line of text, followed by its traceback, or with --log_format=json an object on one line.  A very long
entry is logged without its middle.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TextIO

from elasticdl_client.choices import LOG_FORMAT_VARIABLE, PROCESS_VARIABLE, LogFormat
from elasticdl_client.secret_values import hide_in_ends

_MOST = 1 << 18  # characters of an entry: an error may quote a large record


class _HidingFormatter(logging.Formatter):
    """Hides secrets in a whole entry, with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_in_ends(super().format(record), _MOST)


class _JsonFormatter(logging.Formatter):
    """Formats an entry as one JSON object; docs/jobs.md lists its keys."""

    def __init__(self, pod: str, process: str) -> None:
        super().__init__()
        self._origin: dict[str, str | int] = {"pod": pod} | ({"process": int(process)} if process else {})

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **self._origin,
            "message": hide_in_ends(record.getMessage(), _MOST),
        }
        if record.exc_info:
            entry["traceback"] = hide_in_ends(self.formatException(record.exc_info), _MOST)
        return json.dumps(entry, ensure_ascii=False)


class _StdoutHandler(logging.StreamHandler[TextIO]):
    """Continues when user code has closed `sys.stdout`, which leaves the descriptor open."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.closed:
            try:
                self.stream = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115  to the process's end
            except OSError:  # user code has closed the descriptor as well
                return
        super().emit(record)


def log_to_stdout() -> None:
    """Configure the root logger, and the hook that logs an exception that ends the process; call it once at start."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the locale may lack a character of an entry
            with suppress(OSError):  # a file that has become a pipe (dup2) has no position; the setting is done by then
                stream.reconfigure(errors="backslashreplace")
    handler = _StdoutHandler(sys.stdout)
    is_json = os.environ.get(LOG_FORMAT_VARIABLE) == LogFormat.JSON
    text = _HidingFormatter("%(asctime)s %(levelname)s %(message)s")
    origin = (os.environ.get("ELASTICDL_POD_NAME", ""), os.environ.get(PROCESS_VARIABLE, ""))
    handler.setFormatter(_JsonFormatter(*origin) if is_json else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    sys.excepthook = _log_exception if is_json else _print_hidden


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger().critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _print_hidden(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(hide_in_ends("".join(traceback.format_exception(kind, error, trace)), _MOST))
    sys.stderr.flush()
