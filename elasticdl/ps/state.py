"""The state of one PS: its part of the model and the names that are in it, changed by one call at a time.

A name and its change enter together or not at all; whoever reads sees the state between two pushes.  This module
knows nothing of incarnations, generations or gRPC.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elasticdl.frameworks.framework import Floats, Ids
from elasticdl.ps.applied import AppliedSet, Fences, MinibatchName
from elasticdl.ps.checkpoint import Part
from elasticdl.ps.model import ModelPart, ModelSnapshot, adopt, initial_snapshot
from elasticdl.ps.partition import ALL_BUCKETS
from elasticdl.ps.settings import Updates
from elasticdl.ps.snapshot import Buckets
from elasticdl.ps.wire import ExchangeCall, InitializeCall, PushCall
from elasticdl.rpc import elasticdl_pb2 as pb


class StateDamagedError(RuntimeError):
    """An update failed in its middle: the state is worth nothing any more, and the process must end."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The outcome of a push and pull; `arrays` answer the pull."""

    status: pb.PsStatus
    version: int = 0
    repeated_push: bool = False
    arrays: tuple[Floats, ...] = ()


class PsState:
    """Thread-safe."""

    def __init__(self, updates: Updates | None = None, buckets: Buckets = ALL_BUCKETS) -> None:
        """
        Args:
            updates: how they are taken.
            buckets: what this PS owns.
        """
        self._updates = updates or Updates()
        self._buckets = buckets
        self._lock = threading.Lock()
        self._applied = AppliedSet()
        self._fences = Fences()
        self._model: ModelPart | None = None
        self._inherited: ModelSnapshot | None = None
        self._damaged = False

    @property
    def is_damaged(self) -> bool:
        """Whether an update failed in its middle."""
        with self._lock:
            return self._damaged

    def restore(self, part: Part, parameters_only: bool) -> None:
        """Begins from a checkpoint.

        Args:
            part: this PS's.
            parameters_only: it is another job's: its applied set is dropped, and the worker that initialises this PS
                says with which optimizer its values are trained on.
        """
        with self._lock:
            if parameters_only:
                self._inherited = part.model
            else:
                self._model = ModelPart(part.model)
                self._applied = AppliedSet.from_message(part.applied)

    def initialize(self, call: InitializeCall) -> None:
        """Begins a model; if one is there already it stays as it is, because every worker begins it alike.

        Raises:
            RequestError: the model here is another one.
            ModelDefinitionError: the optimizer or an initializer is not supported.
        """
        wanted = initial_snapshot(call)
        with self._lock:
            if self._model is not None:
                self._model.check_same_model(wanted)
            elif self._inherited is not None:
                self._model = ModelPart(adopt(self._inherited, wanted))
                self._inherited = None
            else:
                self._model = ModelPart(wanted)

    def exchange(self, call: ExchangeCall) -> Exchanged:
        """Applies the push, unless its name is here already, then answers the pull.

        Raises:
            RequestError: the call does not fit the model; nothing has changed.
        """
        with self._lock:
            model = self._checked_model()
            if model is None:
                return Exchanged(pb.UNINITIALIZED)
            if call.pull is not None:
                model.check_pull(call.pull)
            repeated = False
            if call.push is not None:
                header = call.push.header
                if self._fences.refuses(header.lease, header.epoch, header.task):
                    return Exchanged(pb.LEASE_REFUSED, model.version)
                repeated = not self._apply(model, call.push)
            arrays = tuple(model.pull(call.pull)) if call.pull is not None else ()
            return Exchanged(pb.OK, model.version, repeated, arrays)

    def standing(self, lease: int, epoch: int, task: int) -> pb.AppliedTask | None:
        """What is here of a task, for a lease that is the newest from now on; None: a newer one is known."""
        with self._lock:
            return None if self._fences.refuses(lease, epoch, task) else self._applied.of_task(epoch, task)

    def known_ids(self, table: str) -> Ids | None:
        """Ids of a table that have rows here; None: uninitialised.

        Raises:
            RequestError: there is no such table.
        """
        with self._lock:
            model = self._checked_model()
            return None if model is None else model.known_ids(table)

    def applied(self) -> tuple[pb.AppliedSet, bool, int]:
        """The applied set, whether there are values, and the number of pushes in them."""
        with self._lock:
            has_values = self._model is not None or self._inherited is not None
            return self._applied.to_message(), has_values, self._model.version if self._model is not None else 0

    def snapshot(self) -> tuple[ModelSnapshot, pb.AppliedSet] | None:
        """A copy of values and names that belong together; None: uninitialised."""
        with self._lock:
            model = self._checked_model()
            return None if model is None else (model.snapshot(), self._applied.to_message())

    def _apply(self, model: ModelPart, push: PushCall) -> bool:
        """False: the name is here already."""
        name = MinibatchName(push.header.epoch, push.header.task, push.header.minibatch)
        if name in self._applied:
            return False
        row_numbers = model.prepare(push)
        self._damaged = True  # until it is whole again
        model.apply(push, row_numbers)
        self._applied.num_applies += 1
        self._applied.add(name)
        self._damaged = False
        return True

    def _checked_model(self) -> ModelPart | None:
        if self._damaged:
            raise StateDamagedError("an earlier update failed in its middle")
        return self._model
