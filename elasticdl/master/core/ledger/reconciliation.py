"""Reconciliation: queries the content of the model, and prints the coverage of epochs that it contains completely.

In doubt (after a restart of a PS or the master) no task is handed out until the model has answered.  It is also queried
when an epoch seems to be complete.  In a job without PS, or without training, the master's ledger is the answer.  The
members of an AllReduce group report their content without a query.  The load of the parameter servers is logged
together with the coverage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl.master.core.applied import CommittedSet, intersection
from elasticdl.master.core.commands import ReadAppliedSets
from elasticdl.master.core.events import AppliedSetsRead, AppliedSetsUnreadable
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.plan.epoch import coverage_line, coverage_of
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level, PsPartition, SessionEvent
from elasticdl.protocol import Role
from elasticdl.task_numbers import TaskNumbers
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_events import EventKind

ReconcilerEvent = AppliedSetsRead | AppliedSetsUnreadable

RETRY = 1.0


class Reconciler:
    """Queries the model; at most one query at a time."""

    def __init__(self, state: JobState, work: Work) -> None:
        self._settings = settings = state.settings
        self._loads, self._out = state.ps_metrics, state.out
        self._work = work
        has_servers = settings.strategy is DistributionStrategy.PARAMETER_SERVER and not settings.runs_command
        self.is_asked = has_servers and settings.trains
        self._may_doubt = self.is_asked or settings.has_tensorflow_servers
        self.in_doubt = self._may_doubt
        self.num_repeated = 0  # pushes applied twice, as far as printed
        self._num_reported_repeated = 0  # AllReduce: by the last formed group
        self._num_questions = 0
        self._open: int | None = None
        self._retry_at = 0.0

    def doubt(self) -> None:
        """Note that the model may have lost something; answers to earlier queries do not count."""
        self.in_doubt = self._may_doubt
        self._open = None

    def doubt_session(self, role: Role, slot: int) -> None:
        """Handle the end of a pod: if it was a TensorFlow server or the chief, the model returns to a checkpoint."""
        if self._settings.has_tensorflow_servers and (role is Role.PS or slot == 0):
            self.doubt()

    def ask_if_needed(self, partition: PsPartition | None, clock: float) -> None:
        """Query the model, unless a query is open or has just failed, or no process could answer."""
        uncovered = any(epoch.complete and not epoch.covered for epoch in self._work.tasks.unsettled())
        if not (self.in_doubt or uncovered):
            return
        if not self.is_asked:
            if not self.in_doubt or not self._may_doubt:
                self._cover(self._num_reported_repeated)
        elif partition is not None and self._open is None and clock >= self._retry_at:
            self._num_questions += 1
            self._open = self._num_questions
            self._work.tasks.begin_reading()
            self._out.add(ReadAppliedSets(self._open, partition.ps))

    def handle(self, event: ReconcilerEvent, clock: float) -> None:
        if isinstance(event, AppliedSetsRead):
            self._answered(event)
        else:
            self._failed(event, clock)

    def _answered(self, event: AppliedSetsRead) -> None:
        """Take over the answer to the open query; ignore others."""
        if event.question != self._open or set(event.sets) != set(range(self._settings.num_ps)):
            return
        self._open, self.in_doubt = None, False
        self._work.reconcile(intersection(list(event.sets.values())))
        self._cover(max(one.num_repeated for one in event.sets.values()))

    def on_group_content(self, applied: CommittedSet) -> None:
        """AllReduce: take over what the members of a group report about their model."""
        self._num_reported_repeated = max(self._num_reported_repeated, applied.num_repeated)
        self._work.reconcile(applied)

    def _failed(self, event: AppliedSetsUnreadable, clock: float) -> None:
        """Repeat a failed query a little later."""
        if event.question == self._open:
            self._open, self._retry_at = None, clock + RETRY
            self._out.log(f"The applied sets cannot be read: {event.reason}", Level.WARNING)

    def _cover(self, num_repeated: int) -> None:
        """Print the coverage of complete epochs; new repeats are attributed to the first of them."""
        complete = [epoch for epoch in self._work.tasks.unsettled() if epoch.complete and not epoch.covered]
        for epoch in complete:
            epoch.num_repeated += max(0, num_repeated - self.num_repeated) * self._settings.minibatch_size
            self.num_repeated = max(num_repeated, self.num_repeated)
            epoch.cover()
            coverage = coverage_of(epoch, is_bound=self._settings.has_tensorflow_servers)
            line = coverage_line(coverage)
            self._out.events.add(EventKind.EPOCH_COVERED, f"epoch-{coverage.epoch}", line, **coverage.counts())
            self._out.log(line)
        for line in self._loads.lines() if complete else []:
            self._out.log(line)


class EstimatorSession:
    """A model on TensorFlow's own parameter servers, which cannot report their content.

    The chief reports when a checkpoint is begun, when it is complete, and when the model was restored from the newest
    complete one (after the loss of a server or of the chief).  Minibatches committed before a checkpoint was begun are
    certainly in it; later ones are handed out again after a restoration, and may be in the model twice.  No task is
    handed out before the chief's first report.
    """

    def __init__(self, state: JobState, work: Work, reconciler: Reconciler) -> None:
        self._work = work
        self._reconciler = reconciler
        self._out = state.out
        self._marked: CommittedSet | None = None  # commits at the beginning of the checkpoint that is being written
        self._saved = CommittedSet()  # certainly in the newest complete checkpoint
        self._written = _plain(self._saved)  # the same for the journal, which is written each second

    def reported(self, what: SessionEvent) -> None:
        """Handle a report of the chief."""
        match what:
            case SessionEvent.SAVING:
                self._marked = self._work.tasks.ledger()
            case SessionEvent.SAVED if self._marked is not None:
                self._saved, self._marked = self._marked, None
                self._written = _plain(self._saved)
            case SessionEvent.RESTORED:
                self._restored()
            case _:
                return
        self._out.persist()

    def _restored(self) -> None:
        self._marked = None
        before = [epoch.committed_records for epoch in self._work.tasks.epochs]
        self._work.model_was_lost()
        self._work.reconcile(self._saved)
        lost = 0
        for epoch, records in zip(self._work.tasks.epochs, before, strict=False):
            again = max(0, records - epoch.committed_records)
            epoch.num_repeated += again
            lost += again
        self._reconciler.in_doubt = False
        if lost:
            text = f"The model is that of TensorFlow's last checkpoint: {lost} records are handed out again"
            self._out.log(text, Level.WARNING)

    def snapshot(self) -> dict[str, Any]:
        return {**self._written, "in_doubt": self._reconciler.in_doubt}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state; a checkpoint that was being written when the last generation ended does not count."""
        runs = ((e, first, number, w) for e, first, number, w in saved.get("runs", ()))
        self._saved = CommittedSet.of(((e, t, w, x) for e, t, w, x in saved["saved"]), 0, None, runs)
        self._written = _plain(self._saved)
        self._reconciler.in_doubt = saved["in_doubt"]


def _plain(held: CommittedSet) -> dict[str, Any]:
    """Return a set in JSON types: consecutive tasks that are alike as a run, those with extras one by one."""
    tasks = [[*name, held.watermarks[name], sorted(extras)] for name, extras in held.extras.items()]
    return {"saved": tasks, "runs": [list(run) for run in TaskNumbers.runs(held.watermarks)]}
