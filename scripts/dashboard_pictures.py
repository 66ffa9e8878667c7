"""Take the screenshots of the dashboard in docs/, with recorded data of a job, in Chromium.

    python -m scripts.dashboard_pictures

Needs the extra `dev` and Chromium (Debian, Ubuntu: apt-get install chromium).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from tests.dashboard.browsers import browser
from tests.dashboard.dashboards import ROOT, RunningDashboard
from tests.dashboard.written_jobs import shown_job

DOCS = ROOT / "docs"
_SIZE = {"width": 1180, "height": 1010}
_COLOURS = 128  # size of the palette: a third of the bytes, without a visible difference


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        shown_job(Path(home) / ".elasticdl" / "jobs" / "frappe-deepfm")
        dashboard = RunningDashboard(Path(home))
        try:
            with browser() as chrome:
                for name, scheme in (("dashboard", "light"), ("dashboard_dark", "dark")):
                    page = chrome.new_page(viewport=_SIZE, color_scheme=scheme, timezone_id="UTC")  # type: ignore[arg-type]
                    page.goto(dashboard.address)
                    page.locator(".jobs a").click()
                    page.locator(".u-wrap").nth(4).wait_for()
                    lane = page.locator(".lane[data-pod=worker-10] svg").bounding_box()
                    assert lane is not None
                    page.mouse.move(lane["x"] + lane["width"] * 276.6 / 570, lane["y"] + 10)
                    page.locator("#tip").wait_for()
                    page.screenshot(path=DOCS / f"{name}.png")
                    page.close()
                    with Image.open(DOCS / f"{name}.png") as image:
                        image.convert("RGB").quantize(_COLOURS).save(DOCS / f"{name}.png", optimize=True)
        finally:
            dashboard.stop()


if __name__ == "__main__":
    main()
