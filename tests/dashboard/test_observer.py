"""The observer of the dashboard with real job directories, and the end of its streams."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from elasticdl_client.choices import Runtime
from elasticdl_client.dashboard.access import Keys
from elasticdl_client.dashboard.observer import Observer, View
from elasticdl_client.dashboard.server import Dashboard
from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.jobs.local_jobs import LocalJobs
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.store import JobInfo
from elasticdl_client.jobs.stores import JobStores
from tests.dashboard.written_jobs import write_job

WAIT_S = 60


class HeldJobs(LocalJobs):
    """The jobs of a directory, whose first list is ready and not returned until it is released."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.is_read, self.release = threading.Event(), threading.Event()

    def list(self) -> list[JobInfo]:
        jobs = super().list()
        self.is_read.set()
        assert self.release.wait(WAIT_S)
        return jobs


def test_diagnoses_follow_the_numbers_of_the_status(tmp_path: Path) -> None:
    before = JobStatus("job", JobPhase.RUNNING, updated_at=1000.0, worker_seconds={"useful": 90.0})
    directory = write_job(tmp_path / "job", before)
    observer = Observer(JobStores({Runtime.LOCAL: LocalJobs(directory)}, {Runtime.LOCAL: "here"}, needs_cluster=False))

    async def troubles() -> list[list[Trouble]]:
        looking, found = asyncio.create_task(observer.run()), []
        job_id = next(iter((await shown("")).jobs))
        for status in (before, replace(before, updated_at=1100.0, worker_seconds={"useful": 90.0, "input": 90.0})):
            (directory / "status.json").write_text(status.to_json())
            found.append([one.trouble for one in (await shown(job_id)).details[job_id].diagnoses])
        looking.cancel()
        return found

    async def shown(job_id: str) -> View:
        pages.enter_context(observer.page(job_id))
        return await asyncio.wait_for(observer.look(), WAIT_S)

    with ExitStack() as pages:
        assert asyncio.run(troubles()) == [[Trouble.STOPPED], [Trouble.STOPPED, Trouble.INPUT_SLOW]]


def test_a_log_that_has_ended_keeps_no_other_one_alive(tmp_path: Path) -> None:
    stores = JobStores({Runtime.LOCAL: LocalJobs(tmp_path)}, {Runtime.LOCAL: "here"}, needs_cluster=False)

    async def leave() -> int:
        ended = await asyncio.create_subprocess_exec("true")
        follows = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        await asyncio.wait_for(ended.wait(), WAIT_S)
        dashboard = Dashboard(Observer(stores), Options(), Keys("t" * 32))
        dashboard._log_processes.update((ended, follows))
        await dashboard._end_streams()
        return await asyncio.wait_for(follows.wait(), WAIT_S)

    assert asyncio.run(leave()) == -signal.SIGKILL


def test_a_page_is_not_answered_by_a_look_that_had_begun_before_it(tmp_path: Path) -> None:
    store = HeldJobs(tmp_path / "job")
    observer = Observer(JobStores({Runtime.LOCAL: store}, {Runtime.LOCAL: "here"}, needs_cluster=False))

    async def names() -> list[str]:
        looking = asyncio.create_task(observer.run())
        with observer.page():
            assert await asyncio.to_thread(store.is_read.wait, WAIT_S)
            write_job(tmp_path / "job", JobStatus("late", JobPhase.SUCCEEDED, exit_code=0))
            asked = asyncio.create_task(observer.look())
            await asyncio.sleep(0)  # it is asked before the first look ends
            store.release.set()
            view = await asyncio.wait_for(asked, WAIT_S)
        looking.cancel()
        return [job.name for job in view.jobs.values()]

    assert asyncio.run(names()) == ["late"]
