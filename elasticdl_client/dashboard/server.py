"""The dashboard's server: addresses, and the responses.

    GET  /                        the page; its scripts, styles and pictures below /static/
    GET  /api/stream?job=ID       server-sent events: `jobs`, and of one job `job` and `events`, whenever they change
    GET  /api/jobs, /api/jobs/ID  the same once, as JSON
    GET  /api/jobs/ID/logs        server-sent events: `lines`, to the job's end
    POST /api/jobs/ID/ACTION      delete, resume, scale?num_workers=N

A job is named by its id among the jobs that were found, and a file by its name among those of the package: no text of
a request becomes a path.  Access is the affair of `access.AccessGate`.

`job_row`, `job_page`, `event_row` and `series`: the data of the page as values of JSON; they do no I/O.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import mimetypes
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from elasticdl_client import goodput, progress, worker_range
from elasticdl_client.dashboard import access
from elasticdl_client.dashboard.access import AccessGate, Action, Keys
from elasticdl_client.dashboard.lanes import Lane
from elasticdl_client.dashboard.observer import JobDetail, Observer
from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_events import JobEvent, describe, since
from elasticdl_client.job_series import SeriesPoint
from elasticdl_client.jobs import words
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.store import JobInfo, Phase

_KEEP_ALIVE_S = 15.0  # proxies close a silent connection after a minute or so
_MAX_LOGS = 16  # at once: each is a process
_TAIL = 1000  # lines of each pod that a page begins with
_BLOCK_BYTES = 1 << 16
_MAX_LINE = 10_000  # characters of a line that the page shows
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_POD = re.compile(r"master|(worker|ps)(-[0-9]+)?|")
_GONE = "There is no such job any more."
_NOT_SEEN = "The job is not seen now."
_ACCESS_HINT = "Make room on the disk, or run `elasticdl` as the owner of the job's directory."
_SSE = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


class Dashboard:
    """The handlers of requests.

    Args:
        observer: Observes the jobs.
        options: Options of the command line.
        keys: for the header of actions, which the page is given.
    """

    def __init__(self, observer: Observer, options: Options, keys: Keys) -> None:
        self._observer = observer
        self._options = options
        self._keys = keys
        self._files = _files()
        self._num_logs = 0
        self._log_processes: set[asyncio.subprocess.Process] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # once it serves

    def leave(self) -> None:
        """End all streams, which never end by themselves; also from a handler of signals."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end_streams(), self._loop)

    async def _end_streams(self) -> None:
        await self._observer.close()
        for process in self._log_processes:
            if process.returncode is None:
                process.kill()

    def application(self) -> Starlette:
        """Return the ASGI application, behind its gate."""
        routes = [
            Route("/", self._index),
            Route("/static/{name:path}", self._static),
            Route("/api/stream", self._stream),
            Route("/api/jobs", self._jobs),
            Route("/api/jobs/{id}", self._job),
            Route("/api/jobs/{id}/logs", self._logs),
            Route("/api/jobs/{id}/{action}", self._act, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan, middleware=[Middleware(AccessGate, keys=self._keys)])

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        looking = asyncio.create_task(self._observer.run())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    # Files ------------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return self._file(request, "index.html")

    async def _static(self, request: Request) -> Response:
        return self._file(request, request.path_params["name"])

    def _file(self, request: Request, name: str) -> Response:
        if name not in self._files:
            return PlainTextResponse("There is no such file.\n", 404)
        content = self._files[name]
        headers = {"etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"', "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=mimetypes.guess_type(name)[0] or "text/plain")

    # Jobs -------------------------------------------------------------------------------------------------------

    async def _jobs(self, _: Request) -> Response:
        with self._observer.page():
            await self._observer.look()
        return _json(self._list())

    async def _job(self, request: Request) -> Response:
        job_id = request.path_params["id"]
        with self._observer.page(job_id):
            view = await self._observer.look()
        if job_id not in view.details:
            return _unknown_job() if not view.problems else JSONResponse({"error": " ".join(view.problems)}, 503)
        detail = view.details[job_id]
        page = job_page(job_id, view.jobs[job_id], detail)
        events = [event_row(event) for event in detail.history.events]
        return _json({**page, "events": events})

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._changes(request.query_params.get("job", "")), headers=_SSE)

    async def _changes(self, job_id: str) -> AsyncIterator[bytes]:
        sent: dict[str, str] = {}
        newest_event, number, asked = 0, -1, self._observer.view.number
        yield _message("session", {"action": self._keys.action, "read_only": self._options.read_only})
        with self._observer.page(job_id):
            while True:
                try:
                    view = await asyncio.wait_for(self._observer.newer_than(max(number, 0)), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield b": here\n\n"
                    continue
                if self._observer.is_closed:
                    return
                number = view.number
                found = {"jobs": self._list()}
                if job_id and job_id not in view.jobs and number > asked:
                    found["gone"] = {"why": _NOT_SEEN if view.problems else _GONE}
                detail = view.details.get(job_id)
                if detail is None and job_id in view.jobs:  # that look had begun before this page was opened
                    self._observer.look_again()
                if detail is not None:
                    found["job"] = job_page(job_id, view.jobs[job_id], detail)
                for name, value in found.items():
                    text = _text(value)
                    if sent.get(name) != text:
                        sent[name] = text
                        yield f"event: {name}\ndata: {text}\n\n".encode()
                if detail is not None:
                    known = detail.history.events
                    if known and known[-1].number < newest_event:  # another job has this one's place now
                        newest_event = 0
                    events = since(known, newest_event)
                    if events:
                        newest_event = events[-1].number
                        yield _message("events", [event_row(event) for event in events])

    def _list(self) -> dict[str, Any]:
        view = self._observer.view
        rows = [job_row(job_id, job) for job_id, job in view.jobs.items()]
        return {"jobs": rows, "problems": view.problems}

    # Logs -------------------------------------------------------------------------------------------------------

    async def _logs(self, request: Request) -> Response:
        job = self._observer.view.jobs.get(request.path_params["id"])
        pod = request.query_params.get("pod", "")
        if job is None:
            return _unknown_job()
        if not _POD.fullmatch(pod):
            return JSONResponse({"error": "There is no such pod."}, 400)
        if self._num_logs >= _MAX_LOGS:
            return JSONResponse({"error": f"{_MAX_LOGS} logs are followed already: close one."}, 429)
        return StreamingResponse(self._lines(job, pod), headers=_SSE)

    async def _lines(self, job: JobInfo, pod: str) -> AsyncIterator[bytes]:
        """Yield the output of the command `logs`: a process can be ended while it waits for a line, a thread cannot."""
        whose = f"--role={pod}" if pod else "--all"
        follow = [] if job.has_ended else ["--follow"]
        arguments = access.command("logs", job, self._options, whose, f"--tail={_TAIL}", "--output=json", *follow)
        self._num_logs += 1
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            self._log_processes.add(process)
            async for lines in _blocks(process):
                prefix = f"elasticdl-{job.name}-"
                yield _message("lines", [[one["pod"].removeprefix(prefix), _shown(one["line"])] for one in lines])
            assert process.stderr is not None
            said = (await process.stderr.read()).decode(errors="replace").strip()
            yield _message("end", {"error": said if await process.wait() else ""})
        finally:
            self._num_logs -= 1
            self._log_processes.discard(process)
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    # Actions ----------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        if self._options.read_only:
            return JSONResponse({"error": "This dashboard shows, and does nothing (--read_only)."}, 403)
        job = self._observer.view.jobs.get(request.path_params["id"])
        if job is None:
            return _unknown_job()
        try:
            action = Action(request.path_params["action"])
        except ValueError:
            return JSONResponse({"error": "There is no such action."}, 404)
        try:
            store = self._observer.store(job)
            number = request.query_params.get("num_workers", "")
            done = await asyncio.to_thread(access.perform, action, job, store, self._options, number)
        except ElasticDLError as error:
            return JSONResponse({"error": error.what, "hint": error.hint}, 409)
        except OSError as error:  # a full disk, files of another user
            why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or error
            text = f"{action.value.capitalize()} of job {job.name} has failed: {why}."
            return JSONResponse({"error": text, "hint": _ACCESS_HINT}, 409)
        finally:
            self._observer.look_again()
        return JSONResponse({"done": done})


async def _blocks(process: asyncio.subprocess.Process) -> AsyncIterator[list[dict[str, str]]]:
    """Yield the objects that a process prints, one per line; each time all that have arrived."""
    assert process.stdout is not None
    rest: list[bytes] = []  # of a line whose end has not come
    while block := await process.stdout.read(_BLOCK_BYTES):
        first, *others = block.split(b"\n")
        rest.append(first)
        if others:
            whole = [b"".join(rest), *others[:-1]]
            rest = [others[-1]]
            yield [json.loads(line) for line in whole if line]


def _shown(line: str) -> str:
    """Return a line as a terminal leaves it: without escape sequences, a progress bar in its last state; cut off."""
    line = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} … ({len(line):,} characters)"


def _message(event: str, value: object) -> bytes:
    return f"event: {event}\ndata: {_text(value)}\n\n".encode()


def _text(value: object) -> str:
    return words.json_text(value, separators=(",", ":"))


def _json(value: object) -> Response:
    return Response(_text(value), headers={"cache-control": "no-store"}, media_type="application/json")


def _unknown_job() -> Response:
    return JSONResponse({"error": _GONE}, 404)


def _files() -> Mapping[str, bytes]:
    """All files of the page, by their path below it."""
    found: dict[str, bytes] = {}

    def add(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                add(entry, f"{prefix}{entry.name}/")
            else:
                found[f"{prefix}{entry.name}"] = entry.read_bytes()

    add(resources.files("elasticdl_client.dashboard") / "page", "")
    return found


Plain = dict[str, Any]


def job_row(job_id: str, job: JobInfo) -> Plain:
    """Return a job's row in the list of jobs."""
    status = job.status
    return {
        "id": job_id,
        **job.identity,
        "phase": job.phase.value,
        "message": " ".join(" ".join([*words.messages(job), words.waiting_for(job)]).split())[:300],
        "created_at": job.created_at,
        "elapsed": status.elapsed_seconds,
        "updated_at": status.updated_at,
        "epoch": status.epoch,
        "num_epochs": status.num_epochs,
        "records_done": status.records_done,
        "records_total": status.records_total,
        "rate": status.records_per_second if job.phase is Phase.RUNNING else 0.0,
        "eta": status.eta_seconds if job.phase is Phase.RUNNING else None,
        "step": status.model_version,
        "loss": status.loss,
        "metrics": status.metrics,
        "workers": [status.workers_alive, status.workers_wanted],
        "processes_per_worker": status.processes_per_worker,
        "ps": [status.ps_alive, status.ps_wanted],
        "goodput": goodput.goodput(status.worker_seconds) if status.worker_seconds else None,
    }


def job_page(job_id: str, job: JobInfo, detail: JobDetail) -> Plain:
    """Return a job's page without its events, which are sent once each."""
    status = job.status
    prefix = f"elasticdl-{job.name}-"
    scaled = worker_range.describe(status) if job.phase is Phase.RUNNING else ""
    notes = [words.waiting_for(job), words.what_to_do(job), f"Workers follow the gain: {scaled}." if scaled else ""]
    return {
        **job_row(job_id, job),
        "directory": job.directory,
        "notes": [*words.messages(job), *filter(None, notes)],
        "problem": detail.problem,
        "generation": status.generation,
        "exit_code": status.exit_code,
        "metrics_step": status.metrics_step,
        "coverage": [
            {**dataclasses.asdict(one), "title": one.title, "text": str(one)} for one in reversed(status.coverage)
        ],
        "pods": [{**dataclasses.asdict(pod), "name": pod.name.removeprefix(prefix)} for pod in status.pods],
        "servers": [dataclasses.asdict(server) for server in sorted(status.ps, key=lambda server: server.id)],
        "devices": [dataclasses.asdict(device) for device in status.devices],
        "staleness": list(status.staleness),
        "staleness_text": progress.staleness_text(status),
        "group": list(status.world),
        "num_groups": status.num_worlds,
        "engine": status.engine,
        "worker_seconds": [
            [state, goodput.label(state), share] for state, share in goodput.shares(status.worker_seconds)
        ],
        "ps_seconds": [[state, goodput.label(state), share] for state, share in goodput.shares(status.ps_seconds)],
        "goodput_text": goodput.summary(status.worker_seconds),
        "diagnoses": [diagnosis.to_plain() for diagnosis in detail.diagnoses],
        "lanes": [_lane(lane) for lane in detail.lanes],
        "pod_times": _pod_times(detail),
        "series": series(detail.points),
        "summed_up": dict(detail.history.summed_up),
        "actions": sorted(detail.actions),
    }


def event_row(event: JobEvent) -> list[Any]:
    """Return an event: number, time, kind, subject, text, cause, whether it is a warning."""
    return [
        event.number,
        round(event.at, 3),
        event.kind.value,
        event.subject,
        event.message if "\n" in event.message else describe(event) or event.message,
        event.cause,
        int(event.is_trouble),
    ]


def series(points: Iterable[SeriesPoint]) -> Plain:
    """Return points as columns, as the charts need them."""
    found = list(points)
    metrics = sorted({name for point in found for name in point.metrics})
    states = sorted({state for point in found for state in point.worker_seconds})
    return {
        "at": [round(point.at, 2) for point in found],
        "step": [point.step for point in found],
        "records": [point.records for point in found],
        "loss": [point.loss for point in found],
        "workers": [point.workers for point in found],
        "ps": [point.ps for point in found],
        "ps_busy": [round(point.ps_busy, 3) for point in found],
        "metrics_step": [point.metrics_step for point in found],
        "metrics": {name: [point.metrics.get(name) for point in found] for name in metrics},
        "seconds": {state: [round(point.worker_seconds.get(state, 0.0), 2) for point in found] for state in states},
        "labels": {state: goodput.label(state) for state in states},
    }


def _pod_times(detail: JobDetail) -> Plain:
    """Return how workers spent their time, in cells as the journal has them (see `PodTimes`)."""
    labels = {state.value: goodput.label(state) for state in goodput.SlotState}
    return {**detail.pod_times.to_journal(), "began_at": detail.began_at, "labels": labels}


def _lane(lane: Lane) -> Plain:
    return {
        "name": lane.name,
        "spans": [[span.state.value, round(span.begin, 2), round(span.end, 2)] for span in lane.spans],
        "endings": [[one.how.value, round(one.at, 2), one.why, one.event] for one in lane.endings],
    }
