"""`elasticdl.fit`: `model.fit` by a local job of several worker processes.

Writes the model and its data to files for the workers, and reads the weights and the history back; the job is that of
`elasticdl.train`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional  # the base class of functional models has no public name

from elasticdl.api.callbacks import SavedModelExporter
from elasticdl.api.fit_arguments import as_fitted, read_callbacks, split, write_callbacks
from elasticdl.api.fit_results import BestWeights, WriteBack, take_back
from elasticdl.data.samples import SampleRows, TextRows
from elasticdl.frameworks.framework import Mode
from elasticdl.frameworks.keras.compiled import (
    check_compiled,
    check_complete,
    check_overrides,
    completed,
    may_do_without_loss,
)
from elasticdl.frameworks.keras.input.module_data import ModuleData
from elasticdl.frameworks.keras.model import check_trainable, has_own_code
from elasticdl.frameworks.keras.optimizer import make_optimizer
from elasticdl.model_def import ModelDefinition
from elasticdl_client.choices import JobType
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import FlagError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.sdk import FlagValue, JobHandle
from elasticdl_client.sdk import start as sdk

_BLOCK = 4096  # number of rows to copy at a time
_MODEL, _MODULE = "model.keras", "fitted"
_MODULE_DIRECTORY, _CALLBACKS, _JOB = "module", "callbacks.pickle", "job"  # below the directory of `fit`
_OWN_FLAGS = {  # flag → the argument of `fit` that sets it
    "model_zoo": "model",
    "model_def": "model",
    "training_data": "x and y",
    "validation_data": "validation_data",
    "minibatch_size": "batch_size",
    "fixed_global_batch": "batch_size",
    "num_epochs": "epochs",
    "distribution_strategy": "num_workers",
    "num_ps_pods": "num_workers",
    "runtime": "num_workers",
    "job_dir": "directory",
    "precision": "the dtype policy that the model was made under",
}
_OF_KERAS = {  # unsupported arguments of Keras's `fit` → what to do instead
    "initial_epoch": "A job counts its epochs from 0; the model's weights are those that it has now.",
    "steps_per_epoch": "An epoch is one pass over the data; max_step=N ends the job after N minibatches.",
    "validation_steps": "All of the validation data are evaluated: give fewer.",
    "validation_batch_size": "Validation takes the minibatches of the workers, of which a step of batch_size consists.",
    "validation_freq": "The validation data are evaluated after each epoch; evaluation_steps=N says otherwise.",
}
# Saved without a dtype policy, because they only pass tensors on.
_WITHOUT_POLICY = (keras.layers.InputLayer, keras.Sequential, Functional)
_KNOWN_PACKAGES = ("keras", "builtins", "elasticdl", "elasticdl_preprocessing")
_SOURCE = '''"""Written by elasticdl.fit."""

import sys

sys.path += [one for one in {paths!r} if one not in sys.path]

import keras
{imports}
from elasticdl.api.keras_fit import HandedOver

_OF_FIT = HandedOver({directory!r}, {policy!r})


def custom_model():
    return _OF_FIT.load_model()


def dataset(mode):
    return _OF_FIT.arrays(mode)


def callbacks():
    return _OF_FIT.callbacks()
'''


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    batch_size: int = 32,
    epochs: int = 1,
    validation_data: Any = None,
    validation_split: float = 0.0,
    callbacks: Sequence[Any] | Any = (),
    shuffle: bool = True,
    num_workers: int = 2,
    directory: str | os.PathLike[str] = "",
    progress: bool = True,
    verbose: int | str = "auto",
    **flags: FlagValue,
) -> Any:
    """Train a compiled model by a local job, and give it the trained weights.

    Args:
        model: A compiled `keras.Model`.  Your own classes and functions must be in a module and registered
            (`keras.saving.register_keras_serializable`), because workers load the model from a file.
        x: Arrays as for `model.fit`, or a `keras.utils.PyDataset` or `tf.data.Dataset` that also contains the labels;
            one pass over such a data set is written to the directory.
        y: Labels, if `x` is arrays.
        sample_weight: A weight for each sample, if `x` is arrays.
        class_weight: Instead, a weight for each class, if each sample has one class; missing classes have weight 1.
        batch_size: Samples per step, over all workers; the losses do not depend on the number of workers.
        epochs: Passes over the data.
        validation_data: (x, y), (x, y, sample_weight), a `PyDataset` or a `tf.data.Dataset`, for the metrics after each
            epoch.
        validation_split: Fraction of the arrays, taken from their end, to validate on instead of training.
        callbacks: Callbacks that work in a job, see docs/callbacks.md.  They run in workers, so the objects in this
            process do not change.  A relative path is relative to this process.
        shuffle: Permute the samples anew in each epoch.
        num_workers: Number of processes that train.
        directory: A new directory for the model, the data and the job, which is kept; empty: a temporary one.
        progress: Show the job's progress.
        verbose: As in Keras; 0 shows nothing of the job.
        **flags: Other flags of `elasticdl train`.

    Returns:
        A `keras.callbacks.History`: per epoch `loss` (of the newest minibatch) and, as `val_NAME`, the metrics of the
        validation data.

    Raises:
        ElasticDLError: The model, the data or a flag cannot be used, or the job has failed; its directory is then kept.
        KeyboardInterrupt: Ctrl-C; it ends the job, as does the end of this process.
    """
    _check_flags(flags)
    flags |= _flags_of_steps(batch_size, epochs, num_workers) | {"shuffle": shuffle}
    definition = _checked(model)
    given = as_fitted(x, y, sample_weight, class_weight)
    if validation_data is None and validation_split:
        given, held = split(given, validation_split)
        validation_data = held if class_weight is None else held[:2]  # class weights are for training only
    training = _opened(definition, given, Mode.TRAINING)
    _build(model, training)
    check_trainable(definition, model.trainable_variables)
    validation = None if validation_data is None else _opened(definition, validation_data, Mode.EVALUATION)
    with _new_directory(directory) as place:
        of_job = write_callbacks(callbacks, place / _CALLBACKS, place / _MODULE_DIRECTORY)
        of_fit = _flags_of(place, validation) | flags
        # Fail before the data are written.
        _check_restores(of_job, sdk.spec_of(JobType.TRAIN, of_fit, lambda note: None))
        _hand_over(model, training, validation, place / _MODULE_DIRECTORY)
        job = sdk.start(JobType.TRAIN, of_fit, progress=progress and verbose != 0, ends_with_caller=True)
    job.is_kept = bool(directory)
    return _result(job, model, place)


class HandedOver:
    """The workers' view of the directory that `fit` has written."""

    def __init__(self, directory: str, policy: str) -> None:
        """
        Args:
            policy: Name of the model's dtype policy.
        """
        self._directory = Path(directory)
        self._policy = policy

    def load_model(self) -> Any:
        """Load the model as it was passed to `fit`."""
        return _loaded_model(self._directory / _MODEL, self._policy)

    def arrays(self, mode: str) -> Any:
        """Return the data of a mode, as for a module's `dataset`; arrays stay on disk."""
        saved = json.loads((self._directory / f"{mode}.json").read_text())
        return _loaded(saved, self._directory, mode)

    def callbacks(self) -> list[Any]:
        """Return the user's callbacks, and the callback that writes the history and the weights."""
        return [*read_callbacks(self._directory.parent / _CALLBACKS), WriteBack(self._directory)]


def _check_flags(flags: Mapping[str, FlagValue]) -> None:
    taken = sorted(set(flags) & set(_OWN_FLAGS))
    if of_keras := sorted(set(flags) & set(_OF_KERAS)):
        raise FlagError(f"fit takes no {of_keras[0]}.", _OF_KERAS[of_keras[0]])
    if taken:
        raise FlagError(f"fit takes no {taken[0]}.", f"It follows from {_OWN_FLAGS[taken[0]]}.")


def _check_restores(callbacks: Sequence[Any], spec: JobSpec) -> None:
    """Refuse flags, including defaults of the environment, that contradict EarlyStopping(restore_best_weights=True)."""
    if not any(isinstance(one, BestWeights) for one in callbacks):
        return
    with_it = "fit with EarlyStopping(restore_best_weights=True)"
    if spec.output or any(isinstance(one, SavedModelExporter) for one in callbacks):
        raise FlagError(
            f"{with_it} exports no model: a worker would write the newest weights, not the best.",
            "Leave output (ELASTICDL_OUTPUT) and SavedModelExporter out, and save the model that fit gives the best "
            "weights.",
        )
    within = [name for name in ("evaluation_steps", "evaluation_throttle_secs") if getattr(spec, name)]
    if within:
        raise FlagError(
            f"{with_it} takes no {within[0]}.",
            f"The weights of the best epoch are kept: leave it (ELASTICDL_{within[0].upper()}) out.",
        )


def _flags_of_steps(batch_size: int, epochs: int, num_workers: int) -> dict[str, FlagValue]:
    """Return the flags that give the job the same steps as Keras's `fit`.

    Raises:
        FlagError: There would be no step, or a step without a sample for some worker.
    """
    if epochs < 1:
        raise FlagError(
            f"fit was given epochs={epochs}, and trains one or more.",
            "Give 1 or more; max_step=N may end the job sooner.",
        )
    return {
        "num_workers": num_workers,
        "minibatch_size": _minibatch_size(batch_size, num_workers),
        "fixed_global_batch": batch_size,
        "num_epochs": epochs,
    }


def _minibatch_size(batch_size: int, num_workers: int) -> int:
    """Return the largest minibatch per worker that divides a step of the batch size."""
    if num_workers < 1 or batch_size < num_workers:
        raise FlagError(
            f"batch_size={batch_size} with num_workers={num_workers}: a worker would have no sample of a step.",
            "Give at least one worker, and a sample for each.",
        )
    return max(size for size in range(1, batch_size // num_workers + 1) if batch_size % size == 0)


def _checked(model: Any) -> ModelDefinition:
    if keras.backend.backend() != "tensorflow":
        raise ModelDefinitionError(
            f"Keras runs on {keras.backend.backend()} in this process, and elasticdl.fit trains on TensorFlow.",
            "Set KERAS_BACKEND=tensorflow before keras is imported.",
        )
    if not isinstance(model, keras.Model):
        raise ModelDefinitionError(f"fit was given a {type(model).__name__}.", "Give a compiled keras.Model.")
    bare = ModelDefinition("elasticdl.fit", "the model", lambda: model)
    check_overrides(bare.path, model, Mode.TRAINING)
    definition = completed(bare, model)
    # Whether the user's layers add the loss is known only once a worker traces them.
    may_add_loss = may_do_without_loss(definition, model) and has_own_code(model)
    check_complete(definition, ("optimizer",) if may_add_loss else ("loss", "optimizer"))
    check_compiled(bare, model, None, ())
    make_optimizer(definition, model, on_parameter_server=False)
    return definition


def _build(model: Any, data: ModuleData) -> None:
    """Build a model without keras.Input for the shapes of its data, as Keras does."""
    if model.built:
        return
    inputs = [
        keras.Input(spec.shape, dtype="string" if spec.is_text else keras.backend.standardize_dtype(spec.dtype))
        for spec in data.rows.specs
    ]
    try:
        model(tf.nest.pack_sequence_as(data.structure, inputs)[0])
    except Exception as error:
        raise ModelDefinitionError(
            f"The model of fit cannot be built for its data: {type(error).__name__}: {error}".partition("\n")[0],
            "Begin it with keras.Input, or call it once with some samples.",
        ) from error


def _opened(definition: ModelDefinition, given: Any, mode: Mode) -> ModuleData:
    return ModuleData(
        ModelDefinition(definition.path, definition.symbol, definition.model, dataset=lambda _: given), mode
    )


@contextmanager
def _new_directory(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a directory (a temporary one for an empty name); remove its contents if the block raises.

    A named directory is kept once a job has begun in it.
    """
    place = Path(directory).absolute() if directory else Path(tempfile.mkdtemp(prefix="elasticdl-fit-"))
    is_new = not directory or not place.exists()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FlagError(f"fit: directory={place} is not empty.", "Name a new one.")
    place.mkdir(parents=True, exist_ok=True)
    try:
        yield place
    except BaseException:
        if not directory or not (place / _JOB).exists():
            shutil.rmtree(place / _MODULE_DIRECTORY, ignore_errors=True)
            (place / _CALLBACKS).unlink(missing_ok=True)
            if is_new:
                shutil.rmtree(place, ignore_errors=True)
        raise


def _flags_of(place: Path, validation: ModuleData | None) -> dict[str, FlagValue]:
    """Return the flags of a local job that uses the model and data written by `_hand_over`."""
    flags: dict[str, FlagValue] = {
        "job_name": f"fit-{token_hex(3)}",
        "job_dir": place / _JOB,
        "model_zoo": place / _MODULE_DIRECTORY,
        "model_def": f"{_MODULE}.custom_model",
        "training_data": OF_MODULE,
        "distribution_strategy": "AllReduceStrategy",
        "runtime": "local",
        "precision": "fp32",  # overrides the environment: each layer has its own policy
    }
    return flags if validation is None else flags | {"validation_data": OF_MODULE}


def _hand_over(model: Any, training: ModuleData, validation: ModuleData | None, module: Path) -> None:
    """Write the model and its data for the workers, which read them by `HandedOver`."""
    module.mkdir()
    write_module(model, module)
    write_arrays(training, module, Mode.TRAINING)
    if validation is not None:
        write_arrays(validation, module, Mode.EVALUATION)


def write_module(model: Any, module: Path) -> None:
    """Write the model, and the module with which workers load it.

    Raises:
        ModelDefinitionError: Workers could not load the model, or would load a different one.
    """
    if type(model).__module__ == "__main__":
        raise _of_script(f"The model of fit is a {type(model).__name__}, a class")
    path, policy = module / _MODEL, model.dtype_policy.name
    try:
        model.save(path)
        loaded = _loaded_model(path, policy)
    except Exception as error:
        raise ModelDefinitionError(
            f"The model of fit cannot be saved and loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "Register classes and functions of your own: keras.saving.register_keras_serializable.",
        ) from error
    _check_same(model, loaded)
    imports = modules_of(path)
    if "__main__" in imports:
        raise _of_script("The model of fit has a class or function")
    paths = [os.path.abspath(one) for one in sys.path if os.path.isdir(one or ".")]
    lines = "\n".join(f"import {name}  # noqa: F401" for name in imports)
    (module / f"{_MODULE}.py").write_text(
        _SOURCE.format(paths=paths, imports=lines, directory=str(module), policy=policy)
    )


def _of_script(what: str) -> ModelDefinitionError:
    return ModelDefinitionError(
        f"{what} of this script or notebook, which no worker can import.",
        "Put it into a module of its own, decorate it with @keras.saving.register_keras_serializable(), and import it.",
    )


def _loaded_model(path: Path, policy: str) -> Any:
    """Load a model under its dtype policy, which most model files do not contain."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with warnings.catch_warnings():  # an untrained model's file has no optimizer state
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.saving.load_model(path)
    finally:
        keras.config.set_dtype_policy(before)


def _check_same(model: Any, loaded: Any) -> None:
    """Refuse a model with settings that its class does not restore on loading."""
    lost = [
        f"{name} {setting}, and {other} in the loaded model"
        for (name, setting), (_, other) in zip(_settings(model), _settings(loaded), strict=False)
        if setting != other
    ]
    if len(model.weights) != len(loaded.weights):
        lost = [f"it has {len(model.weights)} weights, and the loaded model {len(loaded.weights)}"]
    if lost:
        raise ModelDefinitionError(
            f"Workers load the model of fit from a file, which does not keep all of it: {lost[0]}.",
            "Set what is frozen, and the dtype of a layer, in __init__ of your own classes.",
        )


def _settings(model: Any) -> list[tuple[str, str]]:
    """Return, by name, which weights are trained and in which precision layers compute."""
    trained = {id(variable) for variable in model.trainable_variables}
    weights = [(one.path, "is trained" if id(one) in trained else "is frozen") for one in model.weights]
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, _WITHOUT_POLICY)]
    return weights + [(layer.path, f"computes in {layer.dtype_policy.name}") for layer in layers]


def modules_of(path: Path) -> list[str]:
    """Return the modules of the classes and functions of a saved model, except Keras's own."""
    with zipfile.ZipFile(path) as file:
        config = json.loads(file.read("config.json"))
    registered = {name.rpartition(">")[2]: one for name, one in keras.saving.get_custom_objects().items()}
    found = set()
    for node in _dictionaries(config):
        module, name = node.get("module"), node.get("registered_name")
        if isinstance(module, str) and module.partition(".")[0] not in _KNOWN_PACKAGES:
            found.add(module)
        own = registered.get(str(name).rpartition(">")[2]) if name else None
        if own is not None and own.__module__.partition(".")[0] not in _KNOWN_PACKAGES:
            found.add(own.__module__)
    return sorted(found)


def _dictionaries(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        yield config
    for part in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from _dictionaries(part)


def write_arrays(data: ModuleData, directory: Path, mode: Mode) -> None:
    num_rows = len(data.rows)
    if not num_rows:
        raise FlagError(f"fit was given no samples for {mode.value}.", "Give arrays with rows.")
    for place, spec in enumerate(data.rows.specs):
        path = directory / f"{mode.value}-{place}.npy"
        if spec.is_text:
            parts = (block[place] for _, block in _blocks(data.rows))
            TextRows.write(path.with_suffix(".texts"), parts, (num_rows, *spec.shape))
        else:
            np.lib.format.open_memmap(path, "w+", spec.dtype, (num_rows, *spec.shape))
    numbers = [place for place, spec in enumerate(data.rows.specs) if not spec.is_text]
    files = {place: np.load(directory / f"{mode.value}-{place}.npy", mmap_mode="r+") for place in numbers}
    for start, block in _blocks(data.rows):
        for place, file in files.items():
            file[start : start + len(block[place])] = block[place]
    for file in files.values():
        file.flush()
    places = tf.nest.pack_sequence_as(data.structure, list(range(len(data.rows.specs))))
    (directory / f"{mode.value}.json").write_text(json.dumps(places))


def _blocks(rows: SampleRows) -> Iterator[tuple[int, Any]]:
    for start in range(0, len(rows), _BLOCK):
        yield start, rows.read(start, min(start + _BLOCK, len(rows)))


def _loaded(saved: Any, directory: Path, mode: str) -> Any:
    if isinstance(saved, list):
        return tuple(_loaded(part, directory, mode) for part in saved)
    if isinstance(saved, dict):
        return {name: _loaded(part, directory, mode) for name, part in saved.items()}
    texts = directory / f"{mode}-{saved}.texts"
    return TextRows(texts) if texts.exists() else np.load(directory / f"{mode}-{saved}.npy", mmap_mode="r")


def _result(job: JobHandle, model: Any, place: Path) -> Any:
    """Wait for the job, set the model's weights, and return the history; remove the job unless it is to be kept."""
    try:
        job.wait()
    except KeyboardInterrupt:
        job.stop()
        if not job.is_kept:
            _remove(job, place)
        raise
    history = take_back(model, place / _MODULE_DIRECTORY)
    if not job.is_kept:
        _remove(job, place)
    return history


def _remove(job: JobHandle, place: Path) -> None:
    job.delete()
    shutil.rmtree(place, ignore_errors=True)
