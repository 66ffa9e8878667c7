"""Values between a worker and its PS client: pushes, pulls, and the exceptions of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elasticdl.frameworks.framework import Floats, Ids, Parameters


class PsUninitialized(Exception):
    """A PS holds no parameters: call `PsClient.initialize`, then repeat the call."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} holds no parameters yet")
        self.ps_id = ps_id


class LeaseRefused(Exception):
    """A PS knows a newer lease of the task: another worker has it now."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease} has a successor")
        self.lease = lease


class TooStale(Exception):
    """A PS has gone on too far since the values were pulled: pull again, compute again, push under the same name."""

    def __init__(self, ps_id: int) -> None:
        super().__init__(f"PS {ps_id} has gone on too far since the pull")
        self.ps_id = ps_id


@dataclass(frozen=True, slots=True)
class Push:
    """The update of a minibatch.

    Attributes:
        gradient: [T], flat; None: the minibatch changes nothing, only its name is left.
        change: of the non-trainable values, [N], flat; None together with `gradient`.
        row_gradients: table to ids [n] and gradients [n, dim]; those of the same id are summed before they are sent.
            The arrays of ids must not change after a call has seen them.
        pulled_versions: of the `Pulled` that the gradients were computed on.
        learning_rate: instead of the optimizer's own; None: that.
        num_records: its weight in a round of synchronous mode.
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


@dataclass(frozen=True, slots=True)
class Pull:
    """A request for values.

    Attributes:
        dense: all dense values.
        ids: table to ids [n], which may repeat and must not change after a call has seen them.
        read_only: rows that do not exist are not created; their initial values are returned.
    """

    dense: bool
    ids: Mapping[str, Ids] = field(default_factory=dict)
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pulled:
    """The values of a `Pull`.

    Attributes:
        parameters: None if not asked for.
        rows: table to rows [n, dim] in the order of the ids.
        versions: pushes applied, by PS.
        repeated_push: by PS, whether the push's name was there before, so that it was ignored.
    """

    parameters: Parameters | None
    rows: Mapping[str, Floats]
    versions: tuple[int, ...]
    repeated_push: tuple[bool, ...] = ()
