"""The values that a worker exchanges with its PS client: lookups of ids, pushes, pulls, and a local copy between pulls.

A `Lookup` contains the unique ids of an array, grouped by PS.  It is made once for each array: the pull and the push of
a minibatch share it, and so do tables that are looked up by the same ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elasticdl.frameworks.framework import Floats, Ids, Parameters, Ranges, Table
from elasticdl.kernels import _native
from elasticdl.ps.optim.optimizers import OptimizerConfig
from elasticdl.ps.partition import Partition, slices_outside


class PsUninitialized(Exception):
    """A PS has no parameters: call `PsClient.initialize`, then repeat the call."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} holds no parameters yet")
        self.ps_id = ps_id


class LeaseRefused(Exception):
    """A PS knows a newer lease of the task: another worker has it now."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} has a successor")
        self.lease = lease


class TooStale(Exception):
    """Too many updates were applied since the values were pulled: pull and compute again, push under the same name."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} has applied too many updates since the pull")
        self.ps_id = ps_id


@dataclass(frozen=True, slots=True)
class Push:
    """The update by a minibatch.

    Attributes:
        gradient: [T], flat; None: the minibatch changes nothing, and only its name is pushed.
        change: Change of the non-trainable values, [N], flat; None if `gradient` is None.
        row_gradients: Ids [n] and gradients [n, dim] by table; gradients of the same id are summed before they are
            sent.  The arrays of ids must not change after a call has used them.
        pulled_versions: `Pulled.versions` of the values that the gradients were computed on.
        learning_rate: Replaces the optimizer's own; None: that.
        num_records: The weight in a round of synchronous mode.
        unreached: See `Step`.
    """

    lease: int
    epoch: int
    task: int
    minibatch: int
    gradient: Floats | None
    change: Floats | None
    row_gradients: Mapping[str, tuple[Ids, Floats]] = field(default_factory=dict)
    pulled_versions: Sequence[int] = ()
    learning_rate: float | None = None
    num_records: int = 0
    unreached: Ranges = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for values.

    Attributes:
        dense: Whether to return all dense values.
        ids: Ids [n] by table; they may repeat, and must not change after a call has used them.
        read_only: Do not create missing rows, but return their initial values.
    """

    dense: bool
    ids: Mapping[str, Ids] = field(default_factory=dict)
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """The values of a `Pull`.

    Attributes:
        parameters: The dense values; None if not requested.
        rows: Rows [n, dim] by table, in the order of the ids.
        versions: Updates applied, by PS.
        repeated_push: By PS, whether it had applied the push's name before, and has ignored it now.
    """

    parameters: Parameters | None
    rows: Mapping[str, Floats]
    versions: tuple[int, ...]
    repeated_push: tuple[bool, ...] = ()


class LocalDenseValues:
    """The dense values of a worker that does not pull them for every minibatch (--get_model_steps).

    Between two pulls it applies its own gradients to its copy, with the same rules as the parameter servers; the next
    pull replaces the values.  The optimizer's slots are the worker's own and are kept; Ftrl's `linear` is computed from
    the pulled values, because the next update would replace them otherwise.  For use by one thread.
    """

    def __init__(self, optimizer: str, period: int) -> None:
        """
        Args:
            optimizer: Keras config as JSON.
            period: Minibatches from one pull of dense values to the next.
        """
        self._config = OptimizerConfig.parse(optimizer)
        self._optimizer = _native.Optimizer(self._config.kind, self._config.options)
        self._period = period
        self._until_pull = 0
        self._parameters: Parameters | None = None
        self._slots: list[Floats] = []
        self._num_updates = 0
        self.versions: tuple[int, ...] = ()

    @property
    def parameters(self) -> Parameters:
        """The values to compute with."""
        assert self._parameters is not None
        return self._parameters

    def begin_minibatch(self) -> bool:
        """Begin a minibatch; return whether its pull must include the dense values."""
        is_due = self._until_pull == 0
        self._until_pull = (self._period if is_due else self._until_pull) - 1
        return is_due

    def forget(self) -> None:
        """Make the next pull include the dense values."""
        self._until_pull = 0

    def replace(self, parameters: Parameters, versions: tuple[int, ...]) -> None:
        """Set the values from the parameter servers, and their versions."""
        self.versions = versions
        self._num_updates = 0
        if self._period == 1:
            self._parameters = parameters
        else:
            self._parameters = Parameters(np.array(parameters.trainable), np.array(parameters.non_trainable))

    def apply(self, push: Push) -> None:
        """Apply an update of this worker, which is pushed to the parameter servers as well."""
        if self._period == 1 or push.gradient is None or push.change is None:
            return
        weights = self.parameters.trainable
        if not self._slots:
            self._slots = [np.full_like(weights, slot.initial) for slot in self._config.slots]
        self._num_updates += 1
        pulled = max(self.versions, default=0)
        scalars = self._config.scalars(pulled + self._num_updates, push.learning_rate)
        if self._config.kind == "Ftrl" and self._num_updates == 1 and pulled:  # initial slots there
            accumulator, linear = self._slots
            linear[:] = self._config.ftrl_linear(weights, accumulator, scalars)
        for part in slices_outside([slice(0, len(weights))], push.unreached):
            slots = [slot[part] for slot in self._slots]
            self._optimizer.apply(weights[part], slots, push.gradient[part], scalars, self._config.clip_value)
        np.add(self.parameters.non_trainable, push.change, out=self.parameters.non_trainable)


Positions = npt.NDArray[np.int32]

_REMEMBERED = 64  # arrays of ids
_ENDS = 8  # ids at both ends of an array, to find candidates for equal arrays


class IdsOutOfRange(ValueError):
    """Ids that a table does not have; the message names the table's layer."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The unique ids of an array of n ids.

    Attributes:
        unique: [U], those of PS 0 first.
        positions: Position in `unique` of each of the n ids; None: they are the unique ids, in order.
        bounds: PS k owns ``unique[bounds[k]:bounds[k + 1]]``.
    """

    unique: Ids
    positions: Positions | None
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, ids: Ids, partition: Partition) -> Lookup:
        unique, positions = _native.unique(np.ascontiguousarray(ids))
        if partition.num_ps == 1:
            return cls(unique, None if len(unique) == len(ids) else positions, (0, len(unique)))
        parts = partition.split(unique)
        order = np.concatenate(parts)
        places = np.empty(len(unique), np.int32)
        places[order] = np.arange(len(unique), dtype=np.int32)
        bounds = np.cumsum([0, *(len(part) for part in parts)])
        return cls(unique[order], places[positions], tuple(bounds.tolist()))

    def part(self, ps_id: int) -> slice:
        """Return the slice of `unique` that a PS owns."""
        return slice(self.bounds[ps_id], self.bounds[ps_id + 1])

    def expand(self, rows: Floats) -> Floats:
        """Return the rows of all n ids: [U, dim] → [n, dim]."""
        return rows if self.positions is None else _native.gather(rows, self.positions)

    def sum(self, gradients: Floats) -> Floats:
        """Sum the gradients of equal ids, in their order: [n, dim] → [U, dim]."""
        if self.positions is None:
            return gradients
        return _native.sum_rows(np.ascontiguousarray(gradients), self.positions, len(self.unique))

    def check_range(self, table: str, input_dim: int) -> None:
        """Raise if ids are outside of a table.

        Raises:
            IdsOutOfRange: an id is not in [0, input_dim).
        """
        if _native.all_within(self.unique, input_dim):
            return
        wrong = self.unique[(self.unique < 0) | (self.unique >= input_dim)]
        shown = ", ".join(str(one) for one in np.sort(wrong)[:5].tolist())
        raise IdsOutOfRange(
            f"embedding layer {table!r} was given ids that are not in [0, {input_dim}), its input_dim: {shown}"
            f"{' …' if len(wrong) > 5 else ''}"
        )


class RowLookups:
    """Makes lookups for one partition, and caches the newest.  Thread-safe."""

    def __init__(self, partition: Partition, tables: tuple[Table, ...]) -> None:
        self._partition = partition
        self._input_dims = {table.name: table.input_dim for table in tables if table.input_dim}
        self._lock = threading.Lock()
        self._known: OrderedDict[int, tuple[Ids, Lookup]] = OrderedDict()  # by id() of the array, kept alive here

    def of(self, ids: Mapping[str, Ids], remember: bool = True) -> dict[str, Lookup]:
        """Return the lookups of arrays of ids, by table.

        Args:
            remember: Cache the lookups: the same arrays will come again.

        Raises:
            IdsOutOfRange: a table does not have some of the ids.
        """
        found: dict[str, Lookup] = {}
        alike: dict[bytes, list[tuple[Ids, Lookup]]] = {}
        for name, of_table in ids.items():
            found[name] = self._remembered(of_table) or self._made(of_table, alike)
            if remember:
                with self._lock:
                    self._known[id(of_table)] = of_table, found[name]
                    if len(self._known) > _REMEMBERED:
                        self._known.popitem(last=False)
            if name in self._input_dims:
                found[name].check_range(name, self._input_dims[name])
        return found

    def _remembered(self, ids: Ids) -> Lookup | None:
        with self._lock:
            known = self._known.get(id(ids))
        return None if known is None else known[1]

    def _made(self, ids: Ids, alike: dict[bytes, list[tuple[Ids, Lookup]]]) -> Lookup:
        key = len(ids).to_bytes(8, "little") + ids[:_ENDS].tobytes() + ids[-_ENDS:].tobytes()
        others = alike.setdefault(key, [])
        lookup = next((lookup for other, lookup in others if np.array_equal(other, ids)), None)
        if lookup is None:
            lookup = Lookup.of(ids, self._partition)
        others.append((ids, lookup))
        return lookup
