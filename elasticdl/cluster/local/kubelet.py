"""The lifecycle of local pods: starting, ending, restarting, deleting, and the assignment of slots.

The kubelet decides about processes and acts on them; it knows no socket and no client.  Everything runs in the only
thread of the agent's event loop, which calls `reap` when a child has ended.

A `LocalPod` owns phases, reasons and messages.  It never starts or signals a process; the kubelet does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from elasticdl.cluster.cluster import (
    MAX_LOG_BYTES,
    EndReason,
    EventType,
    Pod,
    PodEvent,
    PodPhase,
    PodSpec,
    RestartPolicy,
    check_spec,
    explained,
)
from elasticdl.cluster.local.gpus import Gpus, seen_gpus
from elasticdl.cluster.local.process_group import Leash, ProcessGroup, guard, start
from elasticdl.cluster.local.standby_process import Fork, StandbyProcess
from elasticdl.protocol import Role
from elasticdl_client.errors import ElasticDLError

_LOG = logging.getLogger("elasticdl.agent")
_IMPORT_TIMEOUT_S = 60.0  # how long a pod waits for the imports of a standby, before it is started plainly
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_LONG_LIFE_S = 10.0  # after a run of this length, the pause before a restart is short again
_CRASHES = {128 + number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Kubelet:
    """All pods of one job on this machine.

    Args:
        loop: The agent's event loop.
        logs: An existing directory for the pods' logs.
        slots: How many PS and worker pods may run at once; None: unlimited.
        agent_log_fd: The log for the output of helper processes.
        on_event: Called after every change of a pod.
        standby_timeout_s: A forked pod without progress for this long is replaced.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        logs: Path,
        slots: int | None,
        agent_log_fd: int,
        on_event: Callable[[PodEvent], None],
        standby_timeout_s: float,
    ) -> None:
        self._loop = loop
        self._logs = logs
        self._slots = slots
        self._on_event = on_event
        self._standby_timeout_s = standby_timeout_s
        self._gpus = Gpus.of(os.environ)
        self._leash = Leash()
        self._oom = OomKills.of_this_process()
        self._standby = StandbyProcess(loop, self._leash, agent_log_fd, self._forked, self._standby_lost)
        self._pods: dict[str, LocalPod] = {}  # in order of creation

    # ---- verbs ----

    def create(self, spec: PodSpec) -> Pod:
        """Create a pod, and start it if there is a slot.

        Raises:
            ElasticDLError: its name is invalid, or a pod of that name has not ended.
        """
        check_spec(spec)
        earlier = self._pods.get(spec.name)
        if earlier is not None:
            if not earlier.ended:
                raise ElasticDLError(f"Pod {spec.name} exists already.", "Delete it first, or wait for its end.")
            self._vanish(earlier)
        pod = LocalPod(spec, uuid.uuid4().hex, PodLog(self._logs / f"{spec.name}.log"))
        self._pods[spec.name] = pod
        self._emit(EventType.ADDED, pod)
        self._standby.prepare(spec, self._environment(spec))
        self._schedule()
        return pod.snapshot()

    def delete(self, name: str, grace_s: float | None) -> None:
        """End a pod, and remove it."""
        pod = self._pods.get(name)
        if pod is None:
            return
        if pod.active:
            self._terminate(pod, EndReason.DELETED, pod.spec.grace_s if grace_s is None else grace_s)
            return
        if not pod.ended:
            pod.phase, pod.reason, pod.message = PodPhase.FAILED, EndReason.DELETED, "deleted before it started"
        self._vanish(pod)
        self._schedule()

    def list(self) -> list[Pod]:
        return [pod.snapshot() for pod in self._pods.values()]

    def log_path(self, name: str) -> Path:
        """Return the path of a pod's log.

        Raises:
            ElasticDLError: there is no such pod.
        """
        if name not in self._pods:
            raise ElasticDLError(f"There is no pod {name}.", "List the pods to see which there are.")
        return self._pods[name].log.path

    def set_slots(self, slots: int | None) -> None:
        """Set the number of slots; the youngest workers that no longer fit are preempted."""
        self._slots = slots
        self._schedule()

    async def standby_ready(self) -> None:
        """Wait until the standby can fork pods; forever, if none is started."""
        await self._standby.ready.wait()

    def end(self) -> None:
        """Kill all processes at once, and wait until they are gone."""
        self._standby.end()
        leaders = [self._standby.pid]
        for pod in self._pods.values():
            pod.cancel_timers()
            if pod.group is not None:
                pod.group.kill()
                leaders.append(pod.group.pid)
        for pid in leaders:
            if pid:
                os.waitpid(pid, 0)

    # ---- children ----

    def reap(self) -> None:
        """Handle every child that has ended or was stopped, including orphans of pods.

        A leader is reaped after the rest of its group was killed: until then its pid cannot be reused.
        """
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid = ended.si_pid
                pod = next((pod for pod in self._pods.values() if pod.group and pod.group.pid == pid), None)
                if pod is not None and pod.group is not None:
                    pod.group.kill()
                elif pid == self._standby.pid:
                    self._standby.process_ended()
                _, status = os.waitpid(pid, 0)
                if pod is not None:
                    self._leader_ended(pod, PodEnding.of(status))
                else:
                    self._replace_sentinel(pid)
        for pod in self._pods.values():
            self._report_if_stopped(pod)

    def _report_if_stopped(self, pod: LocalPod) -> None:
        """Report a pod whose process was stopped by a signal (SIGSTOP), which cannot report it itself."""
        if pod.group is None or pod.phase is not PodPhase.RUNNING:
            return
        changed = None
        with suppress(ChildProcessError):
            changed = os.waitid(os.P_PID, pod.group.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        if changed is not None:
            is_stopped = changed.si_code == os.CLD_STOPPED
            pod.message = f"stopped by {signal.Signals(changed.si_status).name}" if is_stopped else ""
            self._emit(EventType.MODIFIED, pod)

    def _replace_sentinel(self, pid: int) -> None:
        if pid == self._standby.sentinel:
            self._standby.respawn_sentinel()
        for pod in self._pods.values():
            if pod.group is not None and pod.group.sentinel == pid:
                pod.group.sentinel = self._leash.spawn_sentinel(pod.group.pid)

    def _leader_ended(self, pod: LocalPod, ending: PodEnding) -> None:
        pod.group = None
        pod.cancel_timers()
        unproven = pod.fork is not None and not pod.fork.has_progressed()
        self._drop_fork(pod)
        if unproven and ending.exit_code in _CRASHES and pod.why_ending is EndReason.NONE:
            self._start_instead(pod, f"{ending.text} in the child of the standby")
            return
        if ending.reason is EndReason.KILLED and ending.exit_code == 128 + signal.SIGKILL and self._oom.is_new():
            ending = PodEnding(ending.exit_code, EndReason.OOM_KILLED, "killed because memory ran out")
        may_restart = pod.why_ending is EndReason.NONE and pod.spec.restart_policy is RestartPolicy.ON_FAILURE
        if may_restart and ending.exit_code != 0:
            self._restart_later(pod, ending)
        else:
            self._ended(pod, ending)

    def _ended(self, pod: LocalPod, ending: PodEnding) -> None:
        """Set the end of a pod after its last run."""
        pod.cancel_timers()
        pod.active = False
        pod.phase = PodPhase.FAILED if ending.exit_code else PodPhase.SUCCEEDED
        pod.exit_code = ending.exit_code
        pod.reason = pod.why_ending or ending.reason
        pod.message = "its slot was taken away" if pod.reason is EndReason.PREEMPTED else _explain(pod, ending)
        if pod.why_ending is EndReason.DELETED:
            self._vanish(pod)
        else:
            self._emit(EventType.MODIFIED, pod)
        self._schedule()

    def _vanish(self, pod: LocalPod) -> None:
        del self._pods[pod.spec.name]
        self._emit(EventType.DELETED, pod)

    def _terminate(self, pod: LocalPod, why: EndReason, grace_s: float) -> None:
        if pod.why_ending is EndReason.NONE or why is EndReason.DELETED:
            pod.why_ending = why
        if pod.group is None:  # between two runs, or not forked yet
            self._drop_fork(pod)
            self._ended(pod, PodEnding(128 + signal.SIGTERM, why, ""))
            return
        if grace_s <= 0:
            pod.group.signal(signal.SIGKILL)
            return
        pod.group.signal(signal.SIGTERM)
        pod.timers.append(self._loop.call_later(grace_s, pod.group.signal, signal.SIGKILL))

    def _restart_later(self, pod: LocalPod, ending: PodEnding) -> None:
        lived_s = self._loop.time() - pod.started_at
        long = lived_s >= _LONG_LIFE_S or not pod.pause_s
        pod.pause_s = _FIRST_PAUSE_S if long else min(2 * pod.pause_s, _LONGEST_PAUSE_S)
        pod.message = f"starts again in {pod.pause_s:.1f} s: {_explain(pod, ending)}"
        self._emit(EventType.MODIFIED, pod)
        pod.timers.append(self._loop.call_later(pod.pause_s, self._restart, pod))

    def _restart(self, pod: LocalPod) -> None:
        pod.cancel_timers()
        pod.restarts += 1
        self._start(pod)

    # ---- starting ----

    def _schedule(self) -> None:
        """Start the pods that fit, servers first, else in order of creation; preempt workers that no longer fit."""
        for pod in sorted(self._pods.values(), key=lambda pod: pod.is_worker):
            if not pod.waits:
                continue
            free = self._free_slots()
            if not pod.needs_slot or free is None or free > 0:
                pod.active = True
                self._start(pod)
                continue
            message = f"{free} of {self._slots} slots free"
            if message != pod.message:
                pod.message = message
                self._emit(EventType.MODIFIED, pod)
        self._preempt()

    def _preempt(self) -> None:
        """End the youngest workers above the limit, and those whose slots servers need: without servers all wait."""
        if self._slots is None:
            return
        pods = [pod for pod in self._pods.values() if pod.needs_slot]
        staying = [pod for pod in pods if pod.active and pod.why_ending is EndReason.NONE]
        num_beyond = len(staying) + sum(pod.waits and not pod.is_worker for pod in pods) - self._slots
        workers = [pod for pod in reversed(staying) if pod.is_worker]
        for pod in workers[: max(0, num_beyond)]:
            self._terminate(pod, EndReason.PREEMPTED, pod.spec.grace_s)

    def _free_slots(self) -> int | None:
        if self._slots is None:
            return None
        return max(0, self._slots - sum(pod.active and pod.needs_slot for pod in self._pods.values()))

    def _environment(self, spec: PodSpec, gpus: Sequence[str] = ()) -> Mapping[str, str]:
        return {"PYTHONUNBUFFERED": "1", **os.environ, **seen_gpus(spec.env, gpus), **spec.env}

    def _take_gpus(self, pod: LocalPod) -> None:
        """Assign GPUs to a worker until its end; if there are more workers than GPUs, they share them."""
        if pod.spec.num_gpus and not pod.gpus:
            taken = (name for other in self._pods.values() if other.active for name in other.gpus)
            pod.gpus = self._gpus.least_used(taken, pod.spec.num_gpus)

    def _start(self, pod: LocalPod) -> None:
        """Begin a run of a pod, from the standby if possible."""
        self._take_gpus(pod)
        try:
            log_fd = pod.log.open_life()
        except OSError as error:
            self._not_started(pod, error)
            return
        try:
            pod.fork = self._standby.request(pod.spec, self._environment(pod.spec, pod.gpus), log_fd)
            if pod.fork is None:
                self._start_plainly(pod, log_fd)
                return
        finally:
            os.close(log_fd)
        patience = self._standby_timeout_s if self._standby.ready.is_set() else _IMPORT_TIMEOUT_S
        text = f"no child of the standby in {patience:g} s"
        pod.timers.append(self._loop.call_later(patience, self._fork_hangs, pod, text))

    def _start_instead(self, pod: LocalPod, because: str) -> None:
        """Start a process plainly that the standby has not started; it is the same run of the pod."""
        self._drop_fork(pod)
        pod.cancel_timers()
        _LOG.warning("%s: %s; started plainly", pod.spec.name, because)
        try:
            log_fd = pod.log.open(f"---- {because}; started plainly ----\n")
        except OSError as error:
            self._not_started(pod, error)
            return
        try:
            self._start_plainly(pod, log_fd)
        finally:
            os.close(log_fd)

    def _start_plainly(self, pod: LocalPod, log_fd: int) -> None:
        try:
            pod.group = start(pod.spec.command, self._environment(pod.spec, pod.gpus), log_fd, self._leash)
        except OSError as error:
            self._not_started(pod, error)
            return
        self._running(pod)

    def _not_started(self, pod: LocalPod, error: OSError) -> None:
        self._ended(pod, PodEnding(126, EndReason.ERROR, f"cannot be started: {error.strerror}"))

    def _running(self, pod: LocalPod) -> None:
        pod.phase, pod.message = PodPhase.RUNNING, ""
        pod.started_at = self._loop.time()
        self._emit(EventType.MODIFIED, pod)

    # ---- the standby ----

    def _forked(self, number: int, pid: int) -> None:
        pod = next((pod for pod in self._pods.values() if pod.fork and pod.fork.number == number), None)
        if pod is None or pod.fork is None:  # the pod was deleted meanwhile, and its child has ended at the gate
            return
        try:
            pod.group = guard(pid, self._leash)
        except OSError as error:
            self._start_instead(pod, f"the child of the standby is gone ({error.strerror})")
            return
        pod.fork.open_gate(self._loop, lambda: self._progressed(pod))
        if pod.why_ending is EndReason.NONE:
            pod.cancel_timers()
            text = f"no progress in {self._standby_timeout_s:g} s in the child of the standby"
            pod.timers.append(self._loop.call_later(self._standby_timeout_s, self._fork_hangs, pod, text))
        self._running(pod)

    def _progressed(self, pod: LocalPod) -> None:
        """Handle the report of a forked child, or the end of its pipe; if the child has ended, `reap` handles it."""
        assert pod.fork is not None
        pod.fork.stop_watching()
        if pod.why_ending is EndReason.NONE:
            pod.cancel_timers()
        if pod.fork.has_progressed():
            self._standby.trust()
            self._drop_fork(pod)

    def _drop_fork(self, pod: LocalPod) -> None:
        if pod.fork is not None:
            pod.fork.close()
            pod.fork = None

    def _fork_hangs(self, pod: LocalPod, text: str) -> None:
        if pod.why_ending is not EndReason.NONE:
            return
        if pod.group is not None:
            pod.group.kill()  # `reap` treats it as an orphan from now on
            pod.group = None
        self._start_instead(pod, text)
        self._standby.end()

    def _standby_lost(self) -> None:
        for pod in list(self._pods.values()):
            if pod.fork is not None and pod.group is None:
                self._start_instead(pod, "the standby has ended")

    def _emit(self, kind: EventType, pod: LocalPod) -> None:
        self._on_event(PodEvent(kind, pod.snapshot()))


def _explain(pod: LocalPod, ending: PodEnding) -> str:
    return explained(ending.text, pod.log.tail()) if ending.reason is EndReason.ERROR else ending.text


class OomKills:
    """Detects whether the kernel's OOM killer has killed in this process's control group since the last call.

    The kernel shows only a count for the whole group, so a kill is attributed to the pod that is seen to end next.
    Without a readable counter file, no kill is ever reported.
    """

    def __init__(self, counter: Path | None) -> None:
        self._counter = counter
        self._seen = self._read()

    @staticmethod
    def of_this_process() -> OomKills:
        """Return the counter of this process's control group, version 2 or 1."""
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
        """Return whether the count has grown since the last call."""
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


_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_ENDED_ON_REQUEST = {128 + signal.SIGKILL, 128 + signal.SIGTERM}  # exit codes after SIGTERM, or of a killed child


@dataclass(frozen=True, slots=True)
class PodEnding:
    """How a leader ended: its code (128 + signal number after a signal), and the reason."""

    exit_code: int
    reason: EndReason
    text: str

    @staticmethod
    def of(wait_status: int) -> PodEnding:
        """Return the end for a status of waitpid."""
        code = os.waitstatus_to_exitcode(wait_status)
        if code == 0:
            return PodEnding(0, EndReason.COMPLETED, "")
        if code > 0:
            reason = EndReason.KILLED if code in _ENDED_ON_REQUEST else EndReason.ERROR
            return PodEnding(code, reason, f"exit code {code}")
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {-code}"
        reason = EndReason.KILLED if -code in _FROM_OUTSIDE else EndReason.ERROR
        return PodEnding(128 - code, reason, f"killed by {name}")


@dataclass(slots=True)
class LocalPod:
    """The agent's record of a pod."""

    spec: PodSpec
    uid: str
    log: PodLog
    phase: PodPhase = PodPhase.PENDING
    reason: EndReason = EndReason.NONE
    exit_code: int | None = None
    message: str = ""
    restarts: int = 0
    active: bool = False  # from its first start to its end, with pauses before restarts
    group: ProcessGroup | None = None
    fork: Fork | None = None  # while it is started by the standby, until it reports progress
    started_at: float = 0.0
    pause_s: float = 0.0  # before its last restart
    gpus: tuple[str, ...] = ()  # for `CUDA_VISIBLE_DEVICES`; empty: none are assigned
    why_ending: EndReason = EndReason.NONE  # DELETED or PREEMPTED once it is terminating
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def needs_slot(self) -> bool:
        return self.spec.role is not Role.MASTER

    @property
    def is_worker(self) -> bool:
        return self.spec.role is Role.WORKER

    @property
    def waits(self) -> bool:
        """Whether it waits for a slot, or for its first start."""
        return self.phase is PodPhase.PENDING and not self.active

    @property
    def ended(self) -> bool:
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    def snapshot(self) -> Pod:
        """Return the state of the pod for the port."""
        return Pod(
            name=self.spec.name,
            role=self.spec.role,
            index=self.spec.index,
            uid=self.uid,
            phase=self.phase,
            labels=self.spec.labels,
            reason=self.reason,
            exit_code=self.exit_code,
            message=self.message,
            restarts=self.restarts,
            pid=self.group.pid if self.group else 0,
            has_slot=self.active or (self.phase is PodPhase.PENDING and not self.message),
        )


class PodLog:
    """The file with all output of a pod, over restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._life_begins = 0

    def open(self, line: str) -> int:
        """Open the file for appending, and write a line first; the caller must close it.

        Raises:
            OSError: it cannot be opened.  A full disk only loses the line.
        """
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with suppress(OSError):  # the pod can run without room for its log
            os.write(fd, line.encode())
        return fd

    def open_life(self) -> int:
        """Open it for a new run, separated by a line from the run before; the caller must close it.

        Raises:
            OSError: see `open`.
        """
        is_first = not self.path.exists() or not self.path.stat().st_size
        moment = datetime.now().isoformat(" ", "seconds")
        fd = self.open("" if is_first else f"---- started again {moment} ----\n")
        self._life_begins = os.fstat(fd).st_size
        return fd

    def tail(self) -> str:
        """Return the end of the current run's output."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._life_begins, size - MAX_LOG_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""
