"""Chromium, as Debian has it, for tests and pictures of the dashboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_QUIET = (  # it calls no server, and needs neither a display nor the rights of a sandbox
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def chromium() -> str:
    """Its path; empty where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or ""


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, without a window."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), headless=True, args=_QUIET)
        try:
            yield running
        finally:
            running.close()
