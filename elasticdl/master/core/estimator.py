"""Session: a model on TensorFlow's own parameter servers, which cannot say what they hold.

Its chief says when a checkpoint is begun, when it is whole, and when the model is that of the newest whole one again
(after the loss of a server or of the chief).  Minibatches committed before a checkpoint was begun are surely in it;
later ones are handed out again after a restoration, and may be in the model twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.reconciliation import Reconciler
from elasticdl.master.core.state import JobState
from elasticdl.master.core.values import Level, SessionEvent
from elasticdl.master.core.work import Work


class EstimatorSession:
    """Until the chief's first word nothing is handed out."""

    def __init__(self, state: JobState, work: Work, reconciler: Reconciler) -> None:
        self._work = work
        self._reconciler = reconciler
        self._out = state.out
        self._marked: CommittedSet | None = None  # committed when the checkpoint being written was begun
        self._saved = CommittedSet()  # surely in the newest whole checkpoint

    def reported(self, what: SessionEvent) -> None:
        """The chief's word."""
        match what:
            case SessionEvent.SAVING:
                self._marked = self._work.tasks.ledger()
            case SessionEvent.SAVED if self._marked is not None:
                self._saved, self._marked = self._marked, None
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
        tasks = [[*name, one.watermark, sorted(one.extras)] for name, one in self._saved.tasks.items()]
        return {"saved": tasks, "in_doubt": self._reconciler.in_doubt}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """A checkpoint that was being written when the last life ended does not count."""
        self._saved = CommittedSet.of(((e, t, w, x) for e, t, w, x in saved["saved"]), 0)
        self._reconciler.in_doubt = saved["in_doubt"]
