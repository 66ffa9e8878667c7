"""The model of --checkpoint_dir_for_init: its kind by content, and the jobs it fits.

Client and master both look; the loaders read its content.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from elasticdl_client.checkpoint_manifest import MANIFEST, NewerFormat, read_manifest
from elasticdl_client.choices import DistributionStrategy, FrameworkName
from elasticdl_client.errors import CheckpointError, FlagError
from elasticdl_client.storage_kinds import AnyPath

_FLAG = "--checkpoint_dir_for_init"
_PREFIX = "version-"
_CHUNK_BYTES = 1 << 20
_HINT = (
    "Name a checkpoint (a directory version-N, or one that holds such versions), a directory that --output has "
    "written, a .keras file, or a .pt file with a state_dict."
)


class ModelKind(StrEnum):
    """The form of a trained model; the value is its name for people."""

    SERVERS = "a checkpoint of parameter servers"
    STATE = "a checkpoint of a job without parameter servers"
    SAVED_MODEL = "a SavedModel"
    KERAS_FILE = "a .keras file"
    TORCH_STATE = "a state_dict of PyTorch"


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model.

    Attributes:
        path: a version's directory, the directory of a SavedModel, or a file.
        version: of the model when it was written; 0: not known.
    """

    kind: ModelKind
    path: AnyPath
    version: int = 0

    def check_strategy(self, strategy: DistributionStrategy) -> None:
        """Refuse a job that has parameter servers and no use for them, or needs them and has none.

        Raises:
            FlagError: naming what works.
        """
        on_servers = strategy is DistributionStrategy.PARAMETER_SERVER
        if self.kind is ModelKind.SERVERS and not on_servers:
            raise FlagError(
                f"{_FLAG}={self.path} is {self.kind}, and --distribution_strategy={strategy} has none.",
                "Give --distribution_strategy=ParameterServerStrategy; any --num_ps_pods will do.",
            )
        if self.kind is not ModelKind.SERVERS and on_servers:
            raise FlagError(
                f"{_FLAG}={self.path} is {self.kind}: workers load it themselves, without parameter servers.",
                "Give --distribution_strategy=AllReduceStrategy; to evaluate or predict with one worker Local will do.",
            )

    def check_framework(self, framework: FrameworkName) -> None:
        """Refuse a model of another framework than the job's.

        Raises:
            FlagError: naming both.
        """
        takes = {
            ModelKind.SERVERS: (FrameworkName.TENSORFLOW, FrameworkName.CUSTOM),
            ModelKind.SAVED_MODEL: (FrameworkName.TENSORFLOW,),
            ModelKind.KERAS_FILE: (FrameworkName.TENSORFLOW,),
            ModelKind.TORCH_STATE: (FrameworkName.TORCH,),
        }.get(self.kind, (framework,))
        if framework not in takes:
            raise FlagError(
                f"{_FLAG}={self.path} is {self.kind}, and the --model_def is written for {framework}.",
                "Name the module that the model was trained with, or another model.",
            )


def look_at(path: AnyPath) -> TrainedModel:
    """Return the trained model at a path; for a directory of versions, the newest complete one.

    Raises:
        CheckpointError: there is none.
    """
    if path.is_file():
        return TrainedModel(_kind_of_file(path), path)
    if not path.is_dir():
        raise CheckpointError(f"{_FLAG}={path} does not exist.", _HINT)
    if (path / "saved_model.pb").is_file():
        return TrainedModel(ModelKind.SAVED_MODEL, path)
    for name, kind in (("model.pt", ModelKind.TORCH_STATE), ("model.keras", ModelKind.KERAS_FILE)):
        if (path / name).is_file():
            return TrainedModel(kind, path / name)
    if (path / MANIFEST).is_file():
        return _version(path)
    errors = []
    versions = list(_versions(path))
    for version in versions:
        try:
            return _version(version)
        except NewerFormat:
            raise
        except CheckpointError as error:
            errors.append(error.what)
    if errors:
        raise CheckpointError(f"{_FLAG}={path} holds no whole checkpoint: {errors[0]}", _HINT)
    incomplete = sum(entry.name.startswith(_PREFIX) for entry in path.iterdir())
    found = f"its {incomplete} versions were never completed" if incomplete else "it holds no version"
    raise CheckpointError(f"{_FLAG}={path} is not a trained model: {found}.", _HINT)


def check_beginning(path: AnyPath, strategy: DistributionStrategy) -> None:
    """Refuse checkpoints of jobs with another strategy to begin training with; their manifests alone are read.

    Raises:
        FlagError: naming what works.
    """
    for version in [path] if (path / MANIFEST).is_file() else _versions(path):
        with suppress(CheckpointError):  # damaged: it is said where the content is read
            manifest = _manifest(version)
            written_by = manifest.get("strategy")
            if "parts" not in manifest and written_by not in (None, DistributionStrategy.ALL_REDUCE):
                raise FlagError(
                    f"{_FLAG}={version} is a checkpoint of {written_by}, with which no training begins.",
                    f"Name a checkpoint of a job with {strategy}; evaluate and predict take this one.",
                )
            kind = ModelKind.SERVERS if "parts" in manifest else ModelKind.STATE
            TrainedModel(kind, version).check_strategy(strategy)
            return


def check_unused(prediction_outputs: Path) -> None:
    """That a job which begins to predict has the directory to itself.

    Raises:
        FlagError: there is something in it.
    """
    if prediction_outputs.is_dir() and any(prediction_outputs.iterdir()):
        raise FlagError(
            f"--prediction_outputs={prediction_outputs} is not empty: the files of two jobs would be mixed up.",
            "Name a directory that is empty or not there yet.",
        )


def state_file(directory: AnyPath) -> AnyPath:
    """Return the file of a checkpoint without parameter servers that holds the model.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    manifest = _manifest(directory)
    files = [path for path in directory.iterdir() if path.suffix == ".npz"]
    if len(files) != 1:
        raise CheckpointError(f"the checkpoint in {directory} is not whole: it holds {len(files)} files of a state")
    crc, size = 0, 0
    with files[0].open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    if (size, crc) != (manifest.get("size_bytes"), manifest.get("crc32")):
        raise CheckpointError(f"{files[0]} is damaged: size or checksum differs from its manifest")
    return files[0]


def _kind_of_file(path: AnyPath) -> ModelKind:
    kinds = {".keras": ModelKind.KERAS_FILE, ".pt": ModelKind.TORCH_STATE, ".pth": ModelKind.TORCH_STATE}
    if path.suffix not in kinds:
        raise CheckpointError(f"{_FLAG}={path} is a file of no known kind.", _HINT)
    return kinds[path.suffix]


def _version(directory: AnyPath) -> TrainedModel:
    """Return the checkpoint in a version's directory.

    Raises:
        CheckpointError: it is not whole.
    """
    manifest = _manifest(directory)
    try:
        if "parts" not in manifest:
            state_file(directory)
            return TrainedModel(ModelKind.STATE, directory, int(manifest.get("steps", 0)))
        sizes = {str(part["file"]): part["size_bytes"] for part in manifest["parts"]}
        version = int(manifest.get("model_version", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is damaged: {error!r}", _HINT) from error
    for name, size_bytes in sizes.items():
        if _size_of(directory / name) != size_bytes:
            raise CheckpointError(f"the checkpoint in {directory} is not whole: {name} is missing or cut short")
    return TrainedModel(ModelKind.SERVERS, directory, version)


def _manifest(directory: AnyPath) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = read_manifest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not ("parts" in manifest or "strategy" in manifest):
        raise CheckpointError(f"{path} is not the manifest of a checkpoint.", _HINT)
    return manifest


def _size_of(file: AnyPath) -> int | None:
    """Return the bytes of a file; None if it does not exist."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return opened.seek(0, os.SEEK_END)


def _versions(directory: AnyPath) -> Iterator[AnyPath]:
    """Newest first."""
    found = {entry.name.removeprefix(_PREFIX): entry for entry in directory.iterdir() if entry.name.startswith(_PREFIX)}
    for number in sorted((int(number) for number in found if number.isdecimal()), reverse=True):
        path = directory / f"{_PREFIX}{number}"
        if (path / MANIFEST).is_file():
            yield path
