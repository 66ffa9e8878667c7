"""`elasticdl chaos`: injects the faults of a plan into a running job, prints each and the recovery, and a table.

It only injects and looks: the job does not need it.  Every fault that lasts is undone at the end, also after Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn, TextIO

from elasticdl_client.chaos.faults import Fault, FaultInjector, FaultKind, FaultPlan, Victim, choose
from elasticdl_client.chaos.recovery import ChaosResult, Injection, Moment
from elasticdl_client.errors import ElasticDLError, FlagError, JobError
from elasticdl_client.explain.diagnosis import Facts, listed
from elasticdl_client.jobs import words
from elasticdl_client.jobs.options import Options
from elasticdl_client.jobs.store import JobInfo, JobStore, Phase
from elasticdl_client.jobs.stores import JobStores
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.zoo.command import ask

_LOOK_S = 0.5
_RECOVERY_S = 300.0  # a job that has not recovered from the last fault by then is not waited for
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def run(options: Options, places: JobStores) -> int:
    """Inject faults until the plan is over, the job has ended, or Ctrl-C; return the exit code.

    Raises:
        FlagError: a fault is impossible in this job, or the user has not confirmed.
        JobError: the job does not run.
    """
    plan = FaultPlan.of(options)
    job = places.find(options.jobs[0])
    if job.has_ended or job.phase is Phase.STOPPED:
        raise JobError(f'job "{job.name}" {job.where} is {job.phase.lower()}: faults need a job that runs.')
    for fault in plan.faults:
        if fault.role == "ps" and not job.status.ps_wanted and not (job.spec is not None and job.spec.num_ps_pods):
            raise FlagError(f'Job "{job.name}" has no parameter servers.', "Leave out the role ps.")
    store = places.store(job)
    injector = store.faults(job)
    injector.check(plan.faults)
    if not options.yes and not _confirm(job, plan):
        print("Nothing was done.", file=sys.stderr)
        return 1
    with _signals_interrupt():
        result = Chaos(job, store, injector, plan, sys.stderr if options.output else sys.stdout).run()
    print(words.structured(result.to_plain(), options.output) if options.output else "\n" + result.text())
    if result.complaints:
        return 1
    return 128 + signal.SIGINT if result.is_interrupted else 0


class Chaos:
    """One run of the command.

    Args:
        job: The job and its state.
        store: The job's store.
        injector: Injects faults into the job.
        plan: The faults to inject.
        stream: for a line each of faults and recoveries.
    """

    def __init__(self, job: JobInfo, store: JobStore, injector: FaultInjector, plan: FaultPlan, stream: TextIO) -> None:
        self._store = store
        self._injector = injector
        self._plan = plan
        self._stream = stream
        self._facts = Facts(job, store.journal(job).history, time.time())
        self._begin: Moment | None = None
        self._injections: list[Injection] = []
        self._outage = ""

    def run(self) -> ChaosResult:
        """Inject faults until the plan is over and the job has recovered or ended, or until an interrupt.

        Raises:
            JobError: the job was deleted.
            ClusterError: the cluster refuses.
        """
        is_interrupted = False
        try:
            self._run()
        except KeyboardInterrupt:
            is_interrupted = True
            self._say("interrupted: the chaos ends, the job keeps running")
        finally:
            self._end([one for one in self._injections if one.ended is None])
        self._look()
        return ChaosResult(self._facts, tuple(self._injections), self._begin, is_interrupted)

    def _run(self) -> None:
        if not self._trains():
            self._say("waiting for the first minibatch of the job")
        self._follow(self._trains)
        self._begin = Moment.of(self._facts)
        began_at = time.monotonic()
        for number, (fault, share) in enumerate(self._plan.draw()):
            self._follow(partial(_is_past, began_at + number * self._plan.every_s))
            if self._is_over:
                return
            self._inject(fault, share)
        self._follow(partial(_is_past, began_at + self._plan.for_s))
        deadline = time.monotonic() + self._plan.stop_for_s + _RECOVERY_S
        self._follow(lambda: _is_past(deadline) or all(one.seconds is not None for one in self._injections))

    @property
    def _is_over(self) -> bool:
        return self._facts.is_over

    def _trains(self) -> bool:
        return self._facts.job.phase is Phase.RUNNING and self._facts.job.status.records_done > 0

    def _follow(self, until: Callable[[], bool]) -> None:
        """Observe the job, and end faults whose time is over, until a condition holds or the job has ended."""
        pause = threading.Event()
        while not until() and not self._is_over:
            pause.wait(_LOOK_S)
            self._look()
            lasting = [one for one in self._injections if one.ended is None]
            self._end([one for one in lasting if time.time() >= one.began.at + self._plan.stop_for_s])

    def _look(self) -> None:
        """Read the job's state and events; ask a cluster that does not answer again later."""
        try:
            found = self._store.find(self._facts.job.name)
            if found is None:
                raise JobError(f'job "{self._facts.job.name}" was deleted.')
            self._facts = Facts(found, self._store.journal(found).history, time.time())
        except ClusterError as error:
            if not error.unreachable:
                raise
            if error.what != self._outage:
                self._say(f"{error.what} Retrying.")
            self._outage = error.what
            return
        self._outage = ""
        checkpoint = self._newest_checkpoint()
        for injection in self._injections:
            if injection.seconds is None and injection.look(self._facts, checkpoint):
                self._say(f"{injection.subject}: recovered after {injection.seconds:.1f} s: {injection.how}")

    def _inject(self, fault: Fault, share: float) -> None:
        try:
            victims = self._injector.running(fault.role) if fault.role else []
            stopped = {one.victim for one in self._injections if one.ended is None}
            free = [one for one in victims if one not in stopped]
            if fault.role and not free:
                self._say(f"{fault}: {_why_none(victims)}, skipped")
                return
            victim = choose(free, share) if free else None
            self._look()  # so that earlier events of the victim are not taken for its recovery
        except ElasticDLError as error:
            self._say(f"{fault}: not injected: {error.what}")
            return
        injection = Injection(fault, victim, Moment.of(self._facts))
        self._injections.append(injection)  # before it happens: an interrupt in between undoes it
        try:
            self._injector.inject(fault, victim)
        except ElasticDLError as error:
            self._say(f"{fault}: failed: {error.what}")
            self._injections.remove(injection)
            self._injector.undo(fault, victim)
            return
        if not fault.is_undone:
            injection.ended = injection.began
        how_long = f", for {self._plan.stop_for_s:g} s" if fault.is_undone else ""
        self._say(f"{fault}: {injection.subject}{how_long}")

    def _end(self, injections: Sequence[Injection]) -> None:
        """End faults that last, of which the recovery counts from here on: all of them before a line is printed, as
        the reader of the output may be gone."""
        with ExitStack() as undone:
            for injection in injections:
                undone.callback(self._injector.undo, injection.fault, injection.victim)
        checkpoint = self._newest_checkpoint()
        for injection in injections:
            injection.ended = Moment.of(self._facts, checkpoint)
        for injection in injections:
            self._say(f"{injection.subject}: {injection.fault.kind} has ended")

    def _newest_checkpoint(self) -> int:
        """Return the newest checkpoint if the plan fills a disk, else 0; 0 also if it cannot be read now."""
        if all(fault.kind is not FaultKind.FILL_DISK for fault in self._plan.faults):
            return 0
        try:
            return self._injector.newest_checkpoint()
        except ElasticDLError:
            return 0

    def _say(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}   {line}", file=self._stream, flush=True)


def _why_none(running: Sequence[Victim]) -> str:
    """Return why no running pod of a role can get a fault: a suspended pod runs, but has a fault already."""
    if not running:
        return "no pod of this role runs now"
    return f"each running pod of this role ({listed(one.subject for one in running)}) is stopped by an earlier fault"


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment


def _confirm(job: JobInfo, plan: FaultPlan) -> bool:
    faults = ", ".join(map(str, plan.faults))
    what = f'{plan.num_faults} faults in job "{job.name}" {job.where} ({faults}), one every {plan.every_s:g} s'
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise FlagError(f"{what}: there is no terminal to ask for confirmation.", "Give --yes.")
    return ask(f"{what}. Continue?")


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Inside, signals that would end this process are like Ctrl-C, so that no pod stays stopped."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    taken = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
