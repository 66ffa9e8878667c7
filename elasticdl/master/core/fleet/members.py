"""Members: reports of the workers of an AllReduce job about their worlds, and the consequences for work and ledger.

Which world there is next is decided in group/groups.py.  A world whose members have the model of the last one holds at
least what was reported under every lease in force; one that begins with another model does not, so then every lease
ends.
"""

from __future__ import annotations

from elasticdl.master.core.commands import Accepted, JobOver, NoLeaseNow, Refused, SampleGiven, UnknownWorker
from elasticdl.master.core.events import ReadyForWorld, SampleRequested, WorldFormed, WorldWatched
from elasticdl.master.core.group.groups import WorkerGroups
from elasticdl.master.core.ledger.reconciliation import Reconciler
from elasticdl.master.core.ledger.work import Work
from elasticdl.master.core.state import JobState

MemberEvent = SampleRequested | ReadyForWorld | WorldWatched | WorldFormed


class Members:
    """Without effect for jobs that have no worlds."""

    def __init__(self, state: JobState, worlds: WorkerGroups, work: Work, reconciler: Reconciler) -> None:
        self._settings, self._workers = state.settings, state.workers
        self._ending, self._out = state.ending, state.out
        self._worlds = worlds
        self._work = work
        self._reconciler = reconciler
        self._samples: dict[int, float] = {}  # calls that wait, since when

    def handle(self, event: MemberEvent, clock: float) -> None:
        worker = self._workers.known(event.worker_id, event.incarnation, clock)
        if self._ending.is_decided and isinstance(event, SampleRequested | WorldWatched):
            self._out.reply(event.call, JobOver())
        elif worker is None or not worker.has_joined:
            self._out.reply(event.call, UnknownWorker("register first"))
        elif isinstance(event, SampleRequested):
            self._samples[event.call] = clock
        elif isinstance(event, WorldWatched):
            self._worlds.watched(event, clock)
        elif isinstance(event, ReadyForWorld):
            self._worlds.ready(event, clock)
            self._out.reply(event.call, Accepted(self._work.tasks.model_version))
        else:
            self._formed(event, clock)

    def _formed(self, event: WorldFormed, clock: float) -> None:
        is_new_model = self._worlds.has_formed(event, clock)
        if is_new_model is not None:
            # A member of the last world may be left that had not taken its model over.
            if is_new_model or (not event.steps and self._work.tasks.model_version):
                self._work.model_was_lost()
            version = self._work.tasks.model_version
            self._reconciler.told(event.applied)
            members = self._worlds.formed_members
            # With a fixed global batch the others train what rank 0 holds: a lease of theirs would be held for ever.
            holders = members[:1] if self._settings.fixed_global_batch else members
            self._work.keep_workers(member.worker_id for member in holders)
            self._judge_last_steps(self._work.tasks.model_version > version)
        elif not self._worlds.is_formed(event.version):
            self._out.reply(event.call, Refused(f"world {event.version} is not the newest"))
            return
        self._out.reply(event.call, Accepted(self._work.tasks.model_version))

    def _judge_last_steps(self, are_held: bool) -> None:
        """Count the steps since the last report as lost, unless the model holds more than that."""
        for member in self._worlds.formed_members:
            if are_held:
                self._workers.times.committed(member.worker_id)
            else:
                self._workers.times.lost(member.worker_id)

    def abandoned(self, call: int) -> None:
        """The caller of a long poll has gone."""
        self._samples.pop(call, None)
        self._worlds.abandoned(call)

    def time_out(self, clock: float) -> None:
        """Looks for members that are not there any more."""
        self._worlds.time_out(clock)

    def advance(self, clock: float, is_trained: bool, num_wanted: int) -> None:
        """Plan the next world if it is due, and answer the workers that wait for it.

        Args:
            is_trained: there is nothing left to form a world for.
            num_wanted: workers.
        """
        sample = self._work.tasks.sample()
        for call, since in list(self._samples.items()):
            if sample is not None:
                self._out.reply(call, SampleGiven(sample, self._work.tasks.num_covered))
            elif clock - since >= self._settings.long_poll:
                self._out.reply(call, NoLeaseNow())
            else:
                continue
            del self._samples[call]
        if is_trained:
            self._worlds.end()
        else:
            self._worlds.advance(clock, num_wanted)

    def end(self) -> None:
        """The job is decided."""
        for call in self._samples:
            self._out.reply(call, JobOver())
        self._samples.clear()
        self._worlds.end()
