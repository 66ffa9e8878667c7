"""C++ kernels.  Every function releases the GIL while it works, if nothing else is said; arrays are C-contiguous.

Wrong shapes and types raise ValueError before anything has changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]

class Initializer:
    """Values of new rows: a function of (key, id, column) alone, the same bits on every machine.

    kind: "constant" (a), "uniform" (in [a, b)), "normal" and "truncated_normal" (mean a, standard deviation b).
    key: 64 bits, of the job's seed and the table's name.
    """

    def __init__(self, kind: str, key: int, a: float, b: float = 0.0) -> None: ...
    def rows(self, ids: Ids, dim: int) -> Floats:
        """[len(ids), dim]."""

class RecordError(ConnectionError):
    """What has come is not the next record of the other end: the connection must be closed."""

class CipherError(RuntimeError):
    """There is no libcrypto, or it does not encrypt."""

class RecordLayer:
    """The records of one end of an encrypted connection: AES-256-GCM of the libcrypto that Python itself uses.

    A record is u32 size, as many encrypted bytes, and a tag of 16; at most 128 KiB.  Each direction counts its records,
    which is the nonce, and takes the next key, derived from the last, after `records_per_key`.  One thread at a time.

    out_key, in_key: 32 bytes each, for this connection alone; the other end has them the other way round.

    Raises:
        CipherError: nothing can be encrypted here.
    """

    def __init__(self, out_key: bytes, in_key: bytes, records_per_key: int = 1 << 20) -> None: ...
    def seal(self, data: bytes) -> bytes:
        """The records of some bytes, the next to be sent."""
    def open(self, data: bytes) -> bytes:
        """The bytes of the records that are whole with these, the next that have come.

        Raises:
            RecordError: they are not the next records of the other end.
        """
    @property
    def is_amid_record(self) -> bool:
        """Whether a part of a record has come."""

class MeshFailure(RuntimeError):
    """A collective has failed, and with it the mesh."""

class MeshWork:
    """A collective of a mesh on its way."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended; may return early for a signal, so that Python runs its handler.

        Raises:
            MeshFailure: it failed, and nothing writes to its memory any more.
        """

class Mesh:
    """Collectives among processes of which each pair has a connected stream socket.

    All members make the same calls in the same order.  One thread makes them; `interrupt` is for any.

    sockets: descriptors by rank, -1 for its own; they belong to the mesh.
    records: of those that are encrypted, by rank; empty: none is.
    memory: what must live until the work has ended; addresses are of its contiguous memory.
    """

    def __init__(self, rank: int, sockets: Sequence[int], records: Sequence[RecordLayer | None] = ()) -> None: ...
    def all_reduce(self, address: int, count: int, type: str, memory: object) -> MeshWork:
        """Begin to sum `count` elements in place; the same bits at all members.

        type: float32, float64, float16, bfloat16, int8, uint8, int32 or int64.
        """
    def all_gather(self, address: int, size: int, into: Sequence[int], memory: object) -> MeshWork:
        """Begin to collect `size` bytes of each member."""
    def broadcast(self, address: int, size: int, source: int, memory: object) -> MeshWork:
        """Begin to copy the source's bytes into everybody's."""
    def gone(self) -> int:
        """The rank of a peer whose connection has ended without a farewell; -1: there is none."""
    def interrupt(self) -> None:
        """Make what is under way fail at once, here and at the peers."""
    def close(self) -> None:
        """Say farewell if nothing has failed, and free everything."""

class MessageRules:
    """Rules of protobuf messages, held against their bytes.

    messages: of each type whether these are all of its rules, and of each field (number, kind, is_repeated, is_needed,
        least, most, max_items, message).  kind: bool; int32, int64 (least … most); enum (most: the bits of its known
        values); finite, double; text (most: bytes); message (its type's place in the list).
    """

    def __init__(
        self,
        messages: Sequence[tuple[bool, Sequence[tuple[int, str, bool, bool, int, int, int, int]]]],
    ) -> None: ...
    def surely_keeps(self, message: int, data: bytes) -> bool:
        """Whether what protobuf can read as this type keeps all rules; False: it may, or may not.

        It does not release the GIL.
        """

class Optimizer:
    """An update rule: element-wise, without state of its own.

    kind: Keras's class name, such as "Adam".
    options: its hyperparameters by Keras's names, without the learning rate; booleans are 0 and 1.
    """

    def __init__(self, kind: str, options: Mapping[str, float]) -> None: ...
    num_slots: int
    def apply(
        self, weights: Floats, slots: Sequence[Floats], gradient: Floats, scalars: Sequence[float], clip: float = 0.0
    ) -> None:
        """One update in place.

        weights, slots, gradient: one shape, any; gradient is not changed.
        scalars: of this step, as `OptimizerConfig.scalars` says (learning rate, bias corrections, weight decay).
        clip: gradients are clipped to [-clip, clip]; 0: not.
        """

class Constraint:
    """What a touched row must be after an update; along the row (Keras: axis 1).

    kind: "none", "non_neg", "max_norm" (a), "unit_norm", "min_max_norm" (a, b, rate).
    """

    def __init__(self, kind: str = "none", a: float = 0.0, b: float = 0.0, rate: float = 1.0) -> None: ...

class Table:
    """An embedding table: int64 ids to rows of float32 with the optimizer's slots beside them.

    Open addressing in 64 stripes, each with a lock of its own; any method may be called from any thread at any time.
    A row is read and changed whole.  Rows are created when first needed and never removed.
    """

    def __init__(
        self,
        dim: int,
        initializer: Initializer,
        optimizer: Optimizer,
        slot_initial: Sequence[float],
        constraint: Constraint,
        expected_rows: int = 0,
    ) -> None: ...
    dim: int
    def __len__(self) -> int:
        """Rows."""
    def memory_bytes(self) -> int:
        """All that the table has allocated."""
    def pull(self, ids: Ids, create: bool) -> Floats:
        """Rows [len(ids), dim]; a missing one is created, or only computed if `create` is false.  Ids may repeat."""
    def pull_into(self, ids: Ids, create: bool, out: Floats) -> None:
        """The same into [len(ids), dim]."""
    def apply(self, ids: Ids, gradients: Floats, scalars: Sequence[float], clip: float = 0.0) -> None:
        """One update of each row [dim] by its gradient of [len(ids), dim]; gradients of repeated ids are summed first,
        in their order, then clipped.  Missing rows are created."""
    def load(self, ids: Ids, rows: Floats, slots: Sequence[Floats | None]) -> None:
        """Inserts rows [n, dim] that are not there yet, ids unique; a slot that is None starts fresh."""
    def ids(self) -> Ids:
        """All ids that have rows, in no particular order."""
    def freeze(self) -> Frozen:
        """The table as it is now, at the cost of a walk over its slabs; a row that changes later is copied first.

        The caller sees to it that no `apply` is under way.  One frozen view at a time: the earlier one must be closed.
        """

class Frozen:
    """A table at one moment."""

    def __len__(self) -> int: ...
    def chunks(self, max_rows: int) -> Iterator[tuple[Ids, Floats, list[Floats]]]:
        """Ids [n], rows [n, dim] and each slot [n, dim] of all rows, n ≤ max_rows; each row once."""
    def close(self) -> None:
        """Writers need not copy any more."""

def unique(ids: Ids) -> tuple[Ids, Positions]:
    """Unique ids [U] in order of first appearance, and for each id [n] its position among them."""

def gather(rows: Floats, positions: Positions, out: Floats | None = None) -> Floats:
    """rows[positions]: [U, dim], [n] → [n, dim]; into the first n rows of `out` if given."""

def sum_rows(gradients: Floats, positions: Positions, num_unique: int) -> Floats:
    """The inverse for gradients: [n, dim] summed by position, in order, → [num_unique, dim]."""

def split(ids: Ids, owners: npt.NDArray[np.uint16], num_ps: int) -> list[Positions]:
    """For each PS the positions in `ids` of those that it owns, in order; owners [1024] by bucket (mix64(id) >> 54)."""

def buckets(ids: Ids) -> npt.NDArray[np.uint16]:
    """The bucket of each id."""

def has_crc32() -> bool:
    """Return whether this processor has the instructions of `crc32`."""

def crc32(data: Any, checksum: int = 0) -> int:
    """Return what `zlib.crc32` does, in a third of the time; only where `has_crc32`."""

def crc32c(data: Any, checksum: int = 0) -> int:
    """Castagnoli's checksum of bytes-like data, going on from an earlier one."""

def record_ends(body: bytes | memoryview, num_records: int) -> npt.NDArray[np.int64]:
    """Where the records of a RecordIO chunk end, up to the first whose length lies beyond the body."""

def cut_records(records: list[bytes], head: bytes, begin: int, end: int) -> list[bytes] | None:
    """The bytes [begin, end) of each record; None if a record has other bytes than `head` before them."""

def split_records(piece: bytes | memoryview, ends: npt.NDArray[np.int64], begin: int) -> list[bytes]:
    """The records that end there without their lengths; the piece begins at `begin`, with the first one."""

def read_records(descriptor: int, offset: int, ends: npt.NDArray[np.int64], begin: int) -> list[bytes] | None:
    """`split_records` of what a file has at an offset, copied once; None if it has other lengths there, or none.

    Raises:
        OSError: it cannot be read.
    """

def receive_head(socket: int, records: RecordLayer | None, size: int, within_s: float) -> bytes:
    """So many bytes from a stream socket; the first of them may take as long as it likes.

    Args:
        socket: its descriptor.
        records: None: it is not encrypted.
        within_s: for each piece of 512 KiB; the socket's own time-outs must be of this length.  0: no limit but those.

    Raises:
        EOFError: the other end has closed.
        RecordError: a record does not open.
        OSError: of the socket; `BlockingIOError` at a time-out.
        MemoryError: of more than can be had.  All functions here that take a socket raise these four.
    """

def receive_frame(
    socket: int, records: RecordLayer | None, size: int, within_s: float
) -> tuple[npt.NDArray[np.uint8], int]:
    """A frame whose prefix comes last, and the checksum of its other bytes; see `elasticdl.rpc.frames`."""

def discard(socket: int, records: RecordLayer | None, size: int, within_s: float) -> None:
    """Reads so many bytes and keeps none."""

def send_frame(
    socket: int, records: RecordLayer | None, number: int, parts: Sequence[Any], magic: int, within_s: float
) -> None:
    """Sends a head (u32 number, u32 0, u64 size of the frame), the parts of a frame, then its prefix."""

def call(
    socket: int, records: RecordLayer | None, number: int, parts: Sequence[Any], magic: int
) -> tuple[int, npt.NDArray[np.uint8], int]:
    """`send_frame`, then the reply: the number of its head, what follows, and if that number is 0, so that a frame
    follows, its checksum."""

def to_half(values: Floats) -> Halves:
    """float32 to the bits of float16, to nearest even, in the same shape."""

def from_half(values: Halves) -> Floats: ...
def to_bfloat16(values: Floats) -> Halves: ...
def from_bfloat16(values: Halves) -> Floats: ...
def all_within(ids: Ids, bound: int) -> bool:
    """Whether all ids are in [0, bound)."""

def all_finite(values: Floats) -> bool: ...
