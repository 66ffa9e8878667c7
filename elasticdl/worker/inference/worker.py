"""A worker of an evaluate or predict job: its trained model, and the work on the tasks.

The trained model comes from its own files, or from parameter servers that have restored a checkpoint of parameter
servers; the worker only reads from them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import numpy as np

from elasticdl.frameworks.framework import Framework, Inference, ModelReport, Parameters, TrainsWithServers
from elasticdl.model_def import ModelDefinition
from elasticdl.storage.paths import on_this_machine, path_of
from elasticdl.worker.evaluation import EvaluationWork, as_json
from elasticdl.worker.factories import MODES, TASK_TYPES, Readers, load_framework
from elasticdl.worker.inference.output_parts import confirmed_file
from elasticdl.worker.inference.prediction import PredictionWork
from elasticdl.worker.ps.session import PsSession
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.tasks import HeldLease, OwnValues, Values, ValueSource
from elasticdl_client.checkpoint_manifest import MANIFEST, read_manifest
from elasticdl_client.choices import JobType
from elasticdl_client.errors import CheckpointError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.trained_model import ModelKind, TrainedModel, look_at, state_file

_log = logging.getLogger("elasticdl.worker")
_HINT = "Use the module that the model was trained with, and its --model_params and --embedding_threshold."


def load_trained(spec: JobSpec, definition: ModelDefinition, readers: Readers) -> Inference:
    """Return the job's trained model; a model on parameter servers has no values yet.

    Raises:
        CheckpointError: it cannot be loaded, or does not fit the module's model.
        ModelDefinitionError: the module cannot be used.
    """
    if spec.num_ps_pods:
        return load_framework(spec, definition, readers)
    with on_this_machine(path_of(spec.checkpoint_dir_for_init)) as path:
        found = look_at(path)
        if found.kind in (ModelKind.SAVED_MODEL, ModelKind.KERAS_FILE):
            from elasticdl.frameworks.keras.saving.loaded_model import LoadedKeras

            metadata = readers.of(TASK_TYPES[spec.job_type]).metadata()
            model: Inference = LoadedKeras(
                definition, Path(str(found.path)), spec.minibatch_size, metadata, MODES[spec.job_type]
            )
        else:
            framework = load_framework(spec, definition, readers)
            _load_values(framework, found)
            model = framework
    _log.info("Loaded the model from %s", spec.checkpoint_dir_for_init)
    return model


def _load_values(framework: Framework, found: TrainedModel) -> None:
    if found.kind is ModelKind.TORCH_STATE:
        from elasticdl.frameworks.torch import TorchFramework

        assert isinstance(framework, TorchFramework)  # the master has checked
        framework.load_file(str(found.path))
        return
    with state_file(found.path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        framework.load_weights(dict(arrays))


def make_work(
    failures: TaskFailures,
    model: Inference,
    report: ModelReport,
    spec: JobSpec,
    definition: ModelDefinition,
    token: str,
) -> EvaluationWork | PredictionWork:
    """Return the work of a worker whose model is loaded.

    Raises:
        JobError, ModelDefinitionError: there is no place for predictions.
    """
    source: ValueSource = OwnValues()
    if spec.num_ps_pods:
        source = ServedValues(PsSession(failures.link, cast(TrainsWithServers, model), report, token, spec))
    if spec.job_type is JobType.PREDICT:
        return PredictionWork(failures, model, source, spec, definition)

    def write(held: HeldLease, results: dict[str, float]) -> None:
        if spec.metrics_output:
            with confirmed_file(held, path_of(spec.metrics_output), failures.link.confirm) as path:
                path.write_text(as_json(held.lease.model_version, results))

    return EvaluationWork(failures, model, source, write)


class ServedValues:
    """The `ValueSource` of parameter servers without training.  Reads dense parameters once, rows when needed."""

    def __init__(self, session: PsSession) -> None:
        self._session = session
        self._parameters: Parameters | None = None

    def values(self, held: HeldLease) -> Values:
        """See `ValueSource`."""
        values = self._session.values(held, self._parameters)
        self._parameters = values.parameters
        return values

    def close(self) -> None:
        self._session.close()


def check_layout(checkpoint: str, report: ModelReport) -> None:
    """Raise unless the module's model fits a checkpoint of parameter servers; skip it if that cannot be read here.

    Raises:
        CheckpointError: names the difference.
    """
    try:
        manifest = read_manifest(path_of(checkpoint) / MANIFEST)
    except OSError:
        _log.info("%s is not mounted here, so it is not checked against the module", checkpoint)
        return
    try:
        theirs = {v["name"]: list(v["shape"]) for v in manifest["variables"]}
        theirs |= {t["name"]: [t["input_dim"], t["dim"]] for t in manifest["tables"]}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint}/{MANIFEST} is damaged: {error!r}", _HINT) from error
    ours = {v.name: list(v.shape) for v in report.variables}
    ours |= {t.name: [t.input_dim, t.dim] for t in report.tables}
    wrong = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    if wrong:
        raise CheckpointError(f"The checkpoint in {checkpoint} is of another model: {', '.join(wrong)}.", _HINT)
