"""What the model of an AllReduce job holds: minibatches by name, and how many updates and records it has seen."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from elasticdl.ps.applied import AppliedSet
from elasticdl.rpc import elasticdl_pb2 as pb

_COUNTS = struct.Struct("<qq")  # steps, records


@dataclass(slots=True)
class Ledger:
    """What the model holds.

    Attributes:
        applied: names of minibatches.
        steps: updates of the model.
        num_records: seen by the model, over all steps.
    """

    applied: AppliedSet = field(default_factory=AppliedSet)
    steps: int = 0
    num_records: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """What a model goes on from where no living member holds it.

    Attributes:
        directory: of the checkpoint; empty: initial values.
    """

    ledger: Ledger
    directory: str = ""


def packed(ledger: Ledger) -> bytes:
    """A ledger as it travels from the source of a model to other members."""
    return _COUNTS.pack(ledger.steps, ledger.num_records) + ledger.applied.to_message().SerializeToString()


def unpacked(data: bytes) -> Ledger:
    """The inverse of `packed`."""
    steps, num_records = _COUNTS.unpack_from(data)
    message = pb.AppliedSet()
    message.ParseFromString(data[_COUNTS.size :])
    return Ledger(AppliedSet.from_message(message), steps, num_records)
