"""Checkpoints of the parameter servers: manifests, the choice of the one to restore, and the calls that write them.

A version has one part per PS.  This module owns the manifest; the content of a part belongs to the PS that wrote it,
and the names, beginnings and ends of versions to `elasticdl.storage.versions`.

`PsCalls` calls all servers in parallel, also to read applied sets.  It decides nothing; if a PS is silent, or has
another incarnation than expected, the error says so.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import grpc

from elasticdl.master import messages
from elasticdl.master.core.applied import CommittedSet
from elasticdl.master.core.values import PsAddress
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from elasticdl.storage import versions
from elasticdl.storage.paths import path_of
from elasticdl.storage.versions import PREFIX, complete, is_complete
from elasticdl_client.checkpoint_manifest import MANIFEST, SERVERS_FORMAT, NewerFormat, read_manifest
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.errors import CheckpointError, ElasticDLError, FlagError, StorageError
from elasticdl_client.storage_kinds import AnyPath
from elasticdl_client.trained_model import check_beginning

_TAIL = struct.Struct("<QII8s")  # end of a part: size and checksum of the index before it, format, magic
_MAGIC = b"ELDLPS02"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PsPart:
    """The part of a checkpoint that a PS wrote.

    Attributes:
        file: Name within the directory.
        index_crc32: Checksum of the index at the part's end, which has the checksums of everything else in the part.
        buckets: Ranges [start, end) of the 1,024 buckets that are in the part.
    """

    ps_id: int
    file: str
    size_bytes: int
    index_crc32: int
    incarnation: int
    buckets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        data_fingerprint: Fingerprint of the job's data; a job takes the ledger over only if it equals its own.
        variables: Dense variables in the order of the flat vectors: name, shape, trainable.
        tables: Embedding tables: name, dim, initializer, input_dim.
    """

    job_name: str
    data_fingerprint: str
    model_version: int
    seed: int
    num_ps: int
    parts: tuple[PsPart, ...]
    variables: tuple[dict[str, Any], ...] = ()
    tables: tuple[dict[str, Any], ...] = ()
    optimizer: str = ""
    format: int = SERVERS_FORMAT


def commit(directory: AnyPath, manifest: Manifest) -> None:
    """Make a directory whose parts are all written a checkpoint.

    Raises:
        CheckpointError: The checkpoint could not be completed.
    """
    versions.commit(directory, asdict(manifest))


def read(directory: AnyPath) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        NewerFormat: A later version wrote it.
        CheckpointError: There is none, it is damaged, or a part is missing, of another size or without its index.
    """
    path = directory / MANIFEST
    try:
        values = read_manifest(path)
        if values.get("format") != SERVERS_FORMAT:
            raise CheckpointError(
                f"{path} has format {values.get('format')!r}; this version reads {SERVERS_FORMAT}",
                "read it with the version that wrote it, or begin without it",
            )
        values["parts"] = tuple(_part(part) for part in values["parts"])
        values["variables"] = tuple(values["variables"])
        values["tables"] = tuple(values["tables"])
        manifest = Manifest(**values)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no {MANIFEST}",
            f"name a directory such as {PREFIX}1000 that a job has written in its --checkpoint_dir",
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for part in manifest.parts:
        _check_part(directory / part.file, part)
    return manifest


def initial(path: AnyPath) -> AnyPath:
    """Return the checkpoint of --checkpoint_dir_for_init: the path itself, or the newest complete one in it.

    Raises:
        CheckpointError: The path is neither, or the checkpoint is damaged.
    """
    if is_complete(path) or not complete(path):
        read(path)
        return path
    found = newest(path)
    if found is None:
        raise CheckpointError(f"no checkpoint in {path} is whole", "name a complete one with --checkpoint_dir_for_init")
    logger.info("The newest whole checkpoint in %s is %s", path, found.name)
    return found


def newest(checkpoint_dir: AnyPath) -> AnyPath | None:
    """Return the newest checkpoint with a complete manifest and parts; skip and log damaged ones.

    Raises:
        NewerFormat: A later version wrote it.
    """
    for path in reversed(complete(checkpoint_dir)):
        try:
            read(path)
        except NewerFormat:
            raise
        except CheckpointError as error:
            logger.warning("The checkpoint %s is skipped: %s", path, error.what)
            continue
        return path
    return None


def check_unused(checkpoint_dir: AnyPath, strategy: DistributionStrategy, job_name: str) -> None:
    """Check that a new job has the directory to itself, since versions of two jobs in one place would be mixed up.

    A job of the Local strategy may continue from checkpoints of its own name.

    Raises:
        CheckpointError: The directory has checkpoints of an earlier job.
    """
    found = complete(checkpoint_dir)
    if not found:
        return
    is_local = strategy is DistributionStrategy.LOCAL
    if is_local and all(_may_be_of(one, job_name) for one in found):
        logger.info(
            "The job continues from the checkpoints of the job %s in %s, %s the newest; to begin anew, move them away",
            *(job_name, checkpoint_dir, found[-1].name),
        )
        return
    hint = "name another --checkpoint_dir, or remove that one"
    if is_local:
        hint += "; a job of Local continues from checkpoints of Local with its own --job_name alone"
    elif _may_begin_with(found[-1], strategy):
        hint += f"; with --checkpoint_dir_for_init={found[-1]} the new job begins with that model"
    raise CheckpointError(
        f"--checkpoint_dir={checkpoint_dir} holds the checkpoints of an earlier job, {found[-1].name} the newest", hint
    )


def _may_be_of(directory: AnyPath, local_job: str) -> bool:
    """Return whether a checkpoint is of this job of the Local strategy; the worker skips damaged ones and logs them."""
    try:
        manifest = read_manifest(directory / MANIFEST)
    except NewerFormat:
        raise
    except CheckpointError:
        return True
    return (manifest.get("job_name"), manifest.get("strategy")) == (local_job, DistributionStrategy.LOCAL.value)


def _may_begin_with(directory: AnyPath, strategy: DistributionStrategy) -> bool:
    try:
        check_beginning(directory, strategy)
    except FlagError:
        return False
    return True


def still_there(directory: str) -> str:
    """Return the checkpoint that a journal names, or its replacement: newer ones may have been written since.

    Returns:
        The directory, also if it cannot be read; if it is gone, the newest complete one beside it, or empty if there
        is none.
    """
    try:
        if not directory or is_complete(path_of(directory)):
            return directory
        found = newest(path_of(directory).parent)
    except NewerFormat as error:  # a restoring server rejects it, too, and its error ends the job
        logger.warning("%s", error.what)
        return directory
    except (StorageError, OSError) as error:  # it may be readable again before a server needs it
        logger.warning(
            "The checkpoint %s cannot be looked at, and stays the one to restore: %s", directory, versions.reason(error)
        )
        return directory
    logger.info("The checkpoint %s is gone; the newest one is %s", directory, found or "none")
    return str(found or "")


def _check_part(file: AnyPath, part: PsPart) -> None:
    """Check that a part exists, has the right size, and ends in the manifest's index; the rest is not read.

    Raises:
        CheckpointError: One of these does not hold.
    """
    try:
        with file.open("rb") as opened:
            size_bytes = opened.seek(0, os.SEEK_END)
            if size_bytes != part.size_bytes:
                raise CheckpointError(f"{file} is {size_bytes} bytes, its manifest says {part.size_bytes} bytes")
            opened.seek(max(0, size_bytes - _TAIL.size))
            index_size, _, _, magic = _TAIL.unpack(opened.read())
            if magic != _MAGIC:
                raise CheckpointError(f"{file} is damaged: it does not end like a part")
            opened.seek(max(0, size_bytes - _TAIL.size - index_size))
            index = opened.read(min(index_size, size_bytes))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing, its manifest says {part.size_bytes} bytes") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except struct.error as error:
        raise CheckpointError(f"{file} is damaged: it is too short") from error
    if zlib.crc32(index) != part.index_crc32:
        raise CheckpointError(f"{file} is damaged: the checksum of its index is not the one in the manifest")


def _part(values: dict[str, Any]) -> PsPart:
    buckets = tuple((int(start), int(end)) for start, end in values["buckets"])
    return PsPart(**(values | {"buckets": buckets}))


_QUESTION_TIMEOUT_S = 300.0  # 3 million tasks with different watermarks take 9 s; a silent PS ends the call sooner
_SAVE_TIMEOUT_S = 1800.0  # some 200 GB on a slow disk; a PS that dies ends its call at once
_MAX_AT_ONCE = 32

Answer = TypeVar("Answer")


class PsUnreachable(ElasticDLError):
    """A PS did not answer, or has another incarnation than expected; a repeated call may succeed."""


class PsCalls:
    """Calls to all PS, each on its own connection: a channel to a lost PS retries its address forever.

    Safe to use from any thread.
    """

    def __init__(self, token: str, generation: int) -> None:
        self._token = token
        self._generation = generation

    def read_applied_sets(self, ps: Sequence[PsAddress]) -> dict[int, CommittedSet]:
        """Return the applied sets by PS id.

        Raises:
            PsUnreachable: A PS cannot be reached.
        """

        def read(address: PsAddress) -> CommittedSet:
            question = pb.PsQuestion(generation=self._generation, incarnation=address.incarnation)
            reply = self._call(address, "ReadAppliedSet", question, _QUESTION_TIMEOUT_S)
            return messages.applied_set(reply.applied)

        return dict(zip((address.ps_id for address in ps), self._all(read, ps), strict=True))

    def save_parts(self, ps: Sequence[PsAddress], directory: AnyPath) -> tuple[PsPart, ...]:
        """Have every PS write its part of a checkpoint into an existing directory.

        Raises:
            CheckpointError: A PS could not write.
            PsUnreachable: A PS cannot be reached.
        """

        def save(address: PsAddress) -> PsPart:
            request = pb.SaveCheckpointRequest(
                generation=self._generation,
                incarnation=address.incarnation,
                directory=str(directory),
                num_ps=len(ps),
            )
            reply = self._call(address, "SaveCheckpoint", request, _SAVE_TIMEOUT_S)
            if reply.error:
                raise CheckpointError(f"PS {address.ps_id} could not write its part: {reply.error}")
            buckets = tuple((owned.start, owned.end) for owned in address.buckets)
            return PsPart(address.ps_id, reply.file, reply.size_bytes, reply.crc32, address.incarnation, buckets)

        return tuple(self._all(save, ps))

    def _call(self, address: PsAddress, method: str, request: Any, timeout_s: float) -> Any:
        try:
            with connect(address.address, self._token) as channel:
                reply = getattr(pb_grpc.ParameterServerStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise PsUnreachable(
                f"PS {address.ps_id} at {address.address} does not answer: {error.code().name}"
            ) from error
        if reply.status != pb.OK:
            raise PsUnreachable(f"PS {address.ps_id} refuses: {pb.PsStatus.Name(reply.status)}")
        return reply

    @staticmethod
    def _all(call: Callable[[PsAddress], Answer], ps: Sequence[PsAddress]) -> list[Answer]:
        with ThreadPoolExecutor(max(1, min(_MAX_AT_ONCE, len(ps))), thread_name_prefix="ps-call") as threads:
            return list(threads.map(call, ps))
