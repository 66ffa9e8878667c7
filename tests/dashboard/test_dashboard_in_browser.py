"""The page in a real Chromium: a job with a killed worker live, and written jobs of any size and malice."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the extra dev is not installed")

from playwright.sync_api import Browser, Page, Route, expect

from elasticdl.protocol import Role
from elasticdl_client.job_events import EventKind
from elasticdl_client.job_status import JobPhase, JobStatus, LostPod, PodStatus
from tests.chaos.jobs import NUMPY_DIGITS
from tests.dashboard.browsers import browser, chromium
from tests.dashboard.dashboards import RunningDashboard
from tests.dashboard.written_jobs import BEGAN, Story, a_life, large_job, shown_job, write_job

WAIT_MS = 60_000  # a busy machine
PACED = replace(NUMPY_DIGITS, num_epochs=12, pace_s=0.02)  # three minutes: a browser may take long
EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    if not chromium():
        pytest.skip("Chromium is not installed")
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDashboard]:
    home = tmp_path_factory.mktemp("home")
    jobs = home / ".elasticdl" / "jobs"
    large_job(jobs / "large")
    shown_job(jobs / "shown")
    evil_job(jobs / "evil")
    long_job(jobs / "long")
    running = RunningDashboard(home)
    yield running
    running.stop()


def evil_job(directory: Path) -> None:
    story = Story()
    story.add(0, EventKind.JOB_STARTED, "job")
    story.pod("worker-0", 1, 2, 3)
    story.add(5, EventKind.POD_LOST, "worker-0", f"it said {EVIL}", reason=EVIL)
    story.add(6, EventKind.TASK_FAILED, f"task-{EVIL}", EVIL)
    story.add(7, EventKind.JOB_FAILED, "job", f"feed raised: {EVIL}\n  on two lines")
    status = JobStatus(
        "evil",
        JobPhase.FAILED,
        message=f"feed raised: {EVIL}",
        metrics={EVIL: 0.5},
        metrics_step=3,
        pods=(PodStatus(f"elasticdl-evil-{EVIL}", "worker", "Failed", EVIL),),
        lost_pods=(LostPod(f"elasticdl-evil-{EVIL}", "worker", BEGAN + 5, EVIL),),
        exit_code=1,
        started_at=BEGAN,
        updated_at=BEGAN + 7,
    )
    write_job(directory, status, story.events, logs={"master": f"ERROR {EVIL}\n"})


def long_job(directory: Path) -> None:
    story = Story()
    for day in range(10):
        story.add(day * 86_400, EventKind.EPOCH_STARTED, f"epoch-{day + 1}", records=1)
    status = JobStatus(
        "long", JobPhase.SUCCEEDED, exit_code=0, loss=2.527e-5, started_at=BEGAN, updated_at=BEGAN + 10 * 86_400
    )
    write_job(directory, status, story.events)


@pytest.fixture
def page(chrome: Browser, dashboard: RunningDashboard) -> Iterator[Page]:
    with opened(chrome, dashboard) as page:
        yield page


class opened:  # noqa: N801  a context manager
    """A fresh profile on the dashboard; any error in the page fails the test."""

    def __init__(self, chrome: Browser, dashboard: RunningDashboard, width: int = 1200, scheme: str = "light") -> None:
        self._context = chrome.new_context(viewport={"width": width, "height": 860}, color_scheme=scheme)  # type: ignore[arg-type]
        self._address = dashboard.address
        self.errors: list[str] = []

    def __enter__(self) -> Page:
        page = self._context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.goto(self._address)
        return page

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            shown = [page.url + "\n" + page.locator("body").inner_text() for page in self._context.pages]
            print("errors of the page:", self.errors, "\nwhat it shows:", *shown)
        self._context.close()
        if kind is None:
            assert self.errors == []


def open_job(page: Page, name: str, tab: str = "Overview") -> None:
    page.get_by_role("link", name=name).first.click()
    page.get_by_role("navigation", name="Parts").get_by_role("link", name=tab).click()


def test_a_job_with_a_killed_worker_is_followed_live_scaled_and_resumed_until_it_ends(
    chrome: Browser, tmp_path: Path
) -> None:
    job_dir = tmp_path / "home" / ".elasticdl" / "jobs" / "digits"
    job_dir.parent.mkdir(parents=True)
    job = PACED.local_job(job_dir, PACED.make_data(tmp_path), checkpoint_steps=5).start()
    dashboard = RunningDashboard(tmp_path / "home", PACE_FILE=str(job_dir.with_name("digits.pace")))
    try:
        with opened(chrome, dashboard) as page:
            open_job(page, "digits")
            expect(page.locator(".lane[data-pod=worker-1] .span-working")).to_have_count(1)
            expect(page.locator(".lane[data-pod=worker-1] .time-input")).to_have_count(1)  # most of its time: the pace
            killed = page.locator(".diagnosis", has_text="Killed")  # its paced input may be a trouble, too
            assert not killed.count()
            victim = job.pods(Role.WORKER)[0]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            expect(killed).to_contain_text(f"worker-{victim.index}")
            expect(killed).to_contain_text("SIGKILL")
            expect(page.locator(f".lane[data-pod=worker-{victim.index}] .cross")).to_have_count(1)
            successor = page.locator(".lane[data-pod=worker-2]")
            expect(successor.locator(".span-working")).to_have_count(1)
            successor.focus()
            page.keyboard.press("ArrowRight")
            expect(page.locator("#tip")).to_contain_text(f"because: PodLost worker-{victim.index}")

            job.wait_for_version(10)
            expect(page.locator(".head .badge")).to_have_text("Running")
            assert page.get_by_role("button", name="Resume").count() == 0
            page.get_by_role("button", name="Scale").click()
            scale = page.get_by_role("dialog", name="Scale digits?")
            scale.get_by_label("Workers").fill("3:4")
            scale.get_by_role("button", name="Scale").click()
            expect(page.get_by_role("dialog")).to_be_hidden()
            expect(page.locator(".lane[data-pod=worker-3]")).to_be_visible()
            expect(page.locator(".note", has_text="Workers follow the gain: 3:4, ")).to_be_visible()

            job.end()
            job.hurry()  # once it is resumed
            page.get_by_role("button", name="Resume").click()
            page.get_by_role("dialog").get_by_role("button", name="Resume").click()
            expect(page.get_by_role("dialog")).to_be_hidden()
            page.get_by_role("navigation", name="Parts").get_by_role("link", name="Logs").click()
            expect(page.locator(".log")).to_contain_text("Starting epoch")
            expect(page.locator(".head .badge")).to_have_text("Succeeded")
            expect(page.locator(".log")).to_contain_text("Epoch 12: records 1437, committed 1437, repeated 0, lost 0")
            page.get_by_role("link", name="Overview").click()
            page.locator(".u-wrap").nth(2).wait_for()  # the charts
            expect(page.locator(".lane[data-pod=master]")).to_be_visible()
    finally:
        dashboard.stop()
        job.end()


def test_a_job_of_10000_events_and_200_pods_is_all_there(page: Page, dashboard: RunningDashboard) -> None:
    (job,) = [one["id"] for one in dashboard.get("/api/jobs")["jobs"] if one["name"] == "large"]
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.goto(f"{dashboard.base}#/job/{job}")
    page.reload()
    page.locator(".lane[data-pod=worker-219]").wait_for(state="attached")
    page.locator(".u-wrap").nth(2).wait_for()
    took = page.evaluate("performance.now()") / 1000
    spent = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    print(f"opened in {took:.2f} s; the page's own work until then: {spent['TaskDuration']:.2f} s")
    assert page.locator(".lane").count() == 222  # with the job's own and the master's
    assert page.locator("*").count() < 4000
    page.get_by_role("link", name="Events", exact=True).click()
    expect(page.locator(".card header")).to_contain_text("10000 of 10000")
    page.get_by_role("searchbox", name="Filter events").fill("NodeLost")
    expect(page.locator(".event")).to_have_count(20)


def test_an_ended_job_shows_its_whole_life(page: Page) -> None:
    open_job(page, "frappe-deepfm")
    titles = page.locator(".card:not([hidden]) h2")
    expect(titles.filter(has_text="Loss")).to_be_visible()
    for title in ("Metrics of evaluations", "Records per second", "Where the workers' time goes", "Coverage"):
        expect(titles.filter(has_text=title)).to_be_visible()
    expect(page.locator(".keys", has_text="useful 8")).to_be_visible()
    page.get_by_role("button", name="steps").click()
    expect(page.get_by_role("button", name="steps")).to_have_attribute("aria-pressed", "true")
    lane = page.locator(".lane[data-pod=worker-10]")
    expect(lane).to_have_attribute(
        "aria-label", re.compile(r"worker-10: done; 8\d % useful, [\d.]+ % waiting for PS, [\d.]+ % input")
    )
    expect(lane.locator("rect")).to_have_count(3)
    expect(lane.locator(".time-useful")).to_have_count(1)
    expect(lane.locator(".time-repeated")).to_have_count(0)
    expect(page.locator(".lane[data-pod=worker-6] .time-repeated")).to_have_count(1)
    box = lane.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 276.6 / 570, box["y"] + 10)
    tip = page.locator("#tip")
    expect(tip).to_contain_text("Insufficient cpu")
    expect(tip).to_contain_text("because: PodLost worker-6 Preempted")
    expect(tip).to_contain_text("because: PodDraining worker-6")
    page.mouse.move(box["x"] + box["width"] * 475 / 570, box["y"] + 10)  # ps-1 is missing
    expect(tip).to_contain_text("90 % waiting for PS, 10 % useful")
    page.get_by_role("link", name="Pods and servers").click()
    expect(page.get_by_role("heading", name="Staleness")).to_be_visible()
    page.get_by_role("link", name="Explain").click()
    expect(page.locator(".diagnosis", has_text="ps-1")).to_contain_text("To do")


def test_what_a_job_says_is_text_and_never_markup(page: Page) -> None:
    for tab in ("Overview", "Explain", "Pods and servers", "Events", "Logs"):
        page.get_by_role("link", name="ElasticDL").click()
        open_job(page, "evil", tab)
        expect(page.locator("main")).to_contain_text("<script>window.hacked=1</script>")
        if tab == "Logs":
            expect(page.locator(".log .bad")).to_contain_text("onerror")
    page.get_by_role("link", name="Overview").click()
    lane = page.locator(".lane[data-pod=worker-0]")
    lane.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("<script>")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0


def test_times_of_several_days_have_their_dates(page: Page) -> None:
    open_job(page, "long")
    expect(page.locator(".axis span").first).to_be_visible()
    ticks = page.locator(".axis span").all_inner_texts()
    assert len(set(ticks)) == len(ticks)
    assert all(re.match(r"\d+ (Sept?|Oct)", tick) for tick in ticks), ticks
    page.get_by_role("link", name="Events", exact=True).click()
    expect(page.locator(".event time").first).to_have_text(re.compile(r"\d+ (Sept?|Oct)"))


def test_a_link_on_a_page_of_another_site_opens_it(chrome: Browser, dashboard: RunningDashboard) -> None:
    context = chrome.new_context()
    page = context.new_page()
    page.goto(f"data:text/html,<a href='{dashboard.address}'>as a terminal in a browser shows it</a>")
    page.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible(timeout=15_000)
    context.close()


def test_a_small_loss_is_there_whole_on_a_phone(chrome: Browser, dashboard: RunningDashboard) -> None:
    with opened(chrome, dashboard, 360) as page:
        open_job(page, "long")
        loss = page.locator(".figures > div", has_text="Loss").locator("dd")
        expect(loss).to_contain_text("2.53e-5")
        assert loss.evaluate("it => it.scrollWidth <= it.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen_and_text_is_readable(
    chrome: Browser, dashboard: RunningDashboard, scheme: str
) -> None:
    with opened(chrome, dashboard, 360, scheme) as page:
        page.evaluate(_WATCH_WIDTH)
        open_job(page, "frappe-deepfm")
        expect(page.locator(".u-wrap").first).to_be_visible()
        for tab in ("Overview", "Explain", "Pods and servers", "Events", "Logs"):
            page.get_by_role("navigation", name="Parts").get_by_role("link", name=tab).click()
            expect(page.locator(".tabs a[aria-current]")).to_have_text(tab)
            assert page.evaluate("window.widest") <= 360, tab
        for name in ("text", "soft", "red", "blue", "green", "amber"):
            for behind in ("card", "bg"):
                assert page.evaluate(_CONTRAST, [name, behind]) >= 4.5, (name, behind)
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("button", name="Change between").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        page.reload()
        page.locator(".head").wait_for()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


# After every change of the page, before it is painted, how wide it is; the widest of all.
_WATCH_WIDTH = """() => {
  window.widest = 0;
  const measure = () => { window.widest = Math.max(window.widest, document.scrollingElement.scrollWidth); };
  new MutationObserver(measure).observe(document.body, { childList: true, subtree: true });
  measure();
}"""

_CONTRAST = """([name, behind]) => {
  const paint = (colour) => {
    const context = new OffscreenCanvas(1, 1).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const value = (name) => paint(getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  const [low, high] = [value(name), value(behind)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


def test_the_keyboard_alone_reaches_everything(page: Page) -> None:
    page.locator(".jobs a").first.wait_for()
    reach(
        page, "document.activeElement.closest('.jobs') && document.activeElement.textContent.includes('frappe-deepfm')"
    )
    page.keyboard.press("Enter")
    page.locator(".lane").first.wait_for()
    reach(page, "document.activeElement.textContent === 'Delete'")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.evaluate("document.activeElement.textContent") == "Cancel"
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    reach(page, "document.activeElement.dataset.pod === 'job'")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.pod") == "worker-10"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("worker-9")
    assert page.locator(".lane[tabindex='0']").count() == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.lanes')") is None
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.dataset.pod") == "worker-9"
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def reach(page: Page, what: str) -> None:
    """Presses Tab until an expression holds."""
    for _ in range(40):
        if page.evaluate(f"Boolean({what})"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {what}")


def test_a_job_that_takes_the_place_of_another_has_its_own_life_alone(chrome: Browser, tmp_path: Path) -> None:
    jobs = tmp_path / ".elasticdl" / "jobs"
    for place, began in ((jobs / "job", BEGAN), (tmp_path / "later", BEGAN + 1000)):
        status = JobStatus("job", JobPhase.SUCCEEDED, exit_code=0, started_at=began, updated_at=began + 60)
        write_job(place, status, series=a_life(60, 2, 600, 60, began))
        os.utime(place / "spec.json", (began, began))
    dashboard = RunningDashboard(tmp_path)
    try:
        with opened(chrome, dashboard) as page:
            open_job(page, "job")
            job_id = page.url.partition("#/job/")[2].partition("/")[0]
            assert dashboard.get(f"/api/jobs/{job_id}")["series"]["at"][0] == BEGAN
            (jobs / "job").rename(tmp_path / "before")
            (tmp_path / "later").rename(jobs / "job")
            assert dashboard.get(f"/api/jobs/{job_id}")["series"]["at"][0] == BEGAN + 1000
    finally:
        dashboard.stop()


def test_a_job_is_deleted_only_after_a_confirmation(chrome: Browser, tmp_path: Path) -> None:
    job_dir = tmp_path / ".elasticdl" / "jobs" / "job"
    write_job(job_dir, JobStatus("job", JobPhase.SUCCEEDED, exit_code=0))
    dashboard = RunningDashboard(tmp_path)
    try:
        with opened(chrome, dashboard) as page:
            open_job(page, "job")
            page.get_by_role("button", name="Delete").click()
            page.get_by_role("button", name="Cancel").click()
            assert job_dir.is_dir()
            page.get_by_role("button", name="Delete").click()
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text(str(job_dir))
            for kind, body in (("text/html", "<h1>Log in</h1>"), ("application/json", '{"done": "Job')):
                answer = partial(Route.fulfill, content_type=kind, body=body)  # of a proxy: not the dashboard's
                page.route("**/delete", answer)
                dialog.get_by_role("button", name="Delete").click()
                expect(dialog.get_by_role("alert")).to_have_text("The dashboard does not answer.")
                page.unroute("**/delete", answer)
            dialog.get_by_role("button", name="Delete").click()
            expect(page.locator("main")).to_contain_text("No jobs yet")
            assert not job_dir.exists()
    finally:
        dashboard.stop()
