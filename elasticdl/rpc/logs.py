"""How every process of a job logs: to its standard output, and without passwords, also in errors of other packages."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType

from elasticdl_client.secret_values import hide


class _HidingFormatter(logging.Formatter):
    """Hides what is secret in a whole entry, its traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def log_to_stdout() -> None:
    """Makes the root logger of this process, and what prints an exception that ends it; call once at start."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_HidingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    sys.excepthook = _print_hidden


def _print_hidden(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(hide("".join(traceback.format_exception(kind, error, trace))))
    sys.stderr.flush()
