"""Builds the readers and the framework from a job's flags, in every process that runs the user's module."""

from __future__ import annotations

import logging
from functools import partial
from typing import cast

from elasticdl.data.custom import adapt_reader
from elasticdl.data.factory import SlicedReader, open_source
from elasticdl.data.reader import Metadata, Reader
from elasticdl.data.table_encoder import Selection
from elasticdl.frameworks.framework import Framework, Mode
from elasticdl.frameworks.internals import check_internals
from elasticdl.frameworks.user_code import user_call
from elasticdl.model_def import ModelDefinition, framework_of, load_model_definition
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.logs import log_to_stdout
from elasticdl_client.choices import DistributionStrategy, FrameworkName, JobType
from elasticdl_client.data_sources import split_columns
from elasticdl_client.errors import OtherColumnsError
from elasticdl_client.job_spec import JobSpec

TASK_TYPES = {JobType.TRAIN: pb.TRAINING, JobType.EVALUATE: pb.EVALUATION, JobType.PREDICT: pb.PREDICTION}
MODES = {JobType.TRAIN: Mode.TRAINING, JobType.EVALUATE: Mode.EVALUATION, JobType.PREDICT: Mode.PREDICTION}
_MODES_OF_TASKS = {TASK_TYPES[job_type]: mode for job_type, mode in MODES.items()}
_NEEDED = {JobType.TRAIN: ("loss", "optimizer"), JobType.EVALUATE: ("eval_metrics_fn",)}  # by a Keras module


class Readers:
    """The job's data sources; each is opened at its first use."""

    def __init__(self, spec: JobSpec, definition: ModelDefinition | None) -> None:
        """
        Args:
            definition: The model's module, which may define a reader; None: the job has no model.
        """
        self._spec = spec
        self._definition = definition
        self._readers: dict[int, Reader] = {}

    def of(self, task_type: pb.TaskType) -> Reader:
        """Return the reader of the data for tasks of a type."""
        if task_type not in self._readers:
            spec = self._spec
            origins = {
                pb.TRAINING: spec.training_data,
                pb.EVALUATION: spec.validation_data,
                pb.PREDICTION: spec.prediction_data,
            }
            if self._definition is not None and self._definition.dataset is not None:
                self._readers[task_type] = self._of_module(self._definition, _MODES_OF_TASKS[task_type])
            else:
                reader = self._open(origins[task_type])
                if task_type == pb.EVALUATION and spec.job_type is JobType.TRAIN:
                    self._check_validation(reader)
                self._readers[task_type] = reader
        return self._readers[task_type]

    def _check_validation(self, reader: Reader) -> None:
        """Check that the default feed of the training data reads the validation data.

        Raises:
            OtherColumnsError: only one of them is CSV, or their columns differ: the default feed cannot match them.
        """
        definition = self._definition
        if definition is None:
            return
        if definition.feed or definition.custom_data_reader or definition.framework:  # these parse records themselves
            return
        found, known = reader.metadata(), self.of(pb.TRAINING).metadata()
        if found.delimiter != known.delimiter:
            raise OtherColumnsError(
                f"--training_data {_kind_of(known)}, and --validation_data {_kind_of(found)}.",
                "Write both as files of one kind.",
            )
        if known.delimiter and found.column_names != known.column_names:
            raise OtherColumnsError(
                f"The columns of --validation_data are {', '.join(found.column_names)}; those of --training_data are "
                f"{', '.join(known.column_names)}.",
                "Rows of CSV files are read by the order of their columns: write both with the same ones.",
            )

    def _of_module(self, definition: ModelDefinition, mode: Mode) -> Reader:
        from elasticdl.frameworks.keras.input.module_data import dataset_reader

        reader = dataset_reader(definition, mode, self._spec.seed)
        return SlicedReader(reader, self._spec.records_per_shard) if self._spec.records_per_shard else reader

    def _open(self, origin: str) -> Reader:
        if self._definition is None or self._definition.custom_data_reader is None:
            own = self._definition is not None and (self._definition.feed or self._definition.framework)
            return open_source(self._spec, origin, is_raw=bool(own))
        spec = self._spec
        return adapt_reader(
            self._definition.custom_data_reader,
            origin,
            spec.minibatch_size * spec.num_minibatches_per_task,
            spec.data_reader_params_dict(),
            spec.seed,
            Selection(split_columns(spec.columns), spec.label_column),
        )


def _kind_of(metadata: Metadata) -> str:
    return f"has rows of CSV with {metadata.delimiter!r} between fields" if metadata.delimiter else "has no rows of CSV"


def on_parameter_servers(spec: JobSpec) -> bool:
    """Return whether the job has parameter servers."""
    return spec.distribution_strategy is DistributionStrategy.PARAMETER_SERVER


def first_op(framework: str) -> None:
    """Execute an op of a pod's framework, if the framework is known yet, so that it is initialised in this process.

    Raises:
        ElasticDLError: the installed version of the framework cannot be used.
    """
    if framework:
        check_internals(FrameworkName(framework))
    if framework == FrameworkName.TORCH:
        from elasticdl.frameworks.torch import first_op as first_torch_op

        first_torch_op()
    elif framework == FrameworkName.TENSORFLOW:
        from elasticdl.frameworks.keras import first_op as first_keras_op

        first_keras_op()


def begin_input(spec: JobSpec) -> ModelDefinition:
    """Set an input process up: log as the worker does, and load the user's module.

    Raises:
        ModelDefinitionError: see `load_model_definition`.
    """
    log_to_stdout()
    logging.getLogger().setLevel(spec.log_level)
    return load_model_definition(spec)


def load_framework(spec: JobSpec, definition: ModelDefinition, readers: Readers) -> Framework:
    """Return the framework over the user's module; it builds the same model in every process of the job.

    No process imports two frameworks.
    """
    metadata = readers.of(TASK_TYPES[spec.job_type]).metadata()
    if framework_of(spec) is FrameworkName.TORCH:
        return _torch_framework(spec, definition, metadata)
    if definition.framework is not None:
        adapter = partial(
            definition.framework,
            definition=definition,
            minibatch_size=spec.minibatch_size,
            seed=spec.seed,
            metadata=metadata,
            on_parameter_server=on_parameter_servers(spec),
            mode=MODES[spec.job_type],
        )
        return cast(Framework, user_call(adapter, f"{definition.path}: framework()"))
    return _keras_framework(spec, definition, metadata)


def _torch_framework(spec: JobSpec, definition: ModelDefinition, metadata: Metadata) -> Framework:
    from elasticdl.frameworks.torch import TorchFramework
    from elasticdl.frameworks.torch.computation import Computation
    from elasticdl.frameworks.torch.input_processes import InputProcesses

    made = TorchFramework(
        definition,
        minibatch_size=spec.minibatch_size,
        seed=spec.seed,
        metadata=metadata,
        on_parameter_server=on_parameter_servers(spec),
        overlaps=not spec.skips_not_finite,
        computation=Computation.of(spec),
    )
    if spec.input_workers:
        begin = partial(begin_input, spec)
        processes = InputProcesses(begin, spec.input_workers, spec.minibatch_size, metadata)
        processes.start()
        made.feed_in(processes)
    return made


def _keras_framework(spec: JobSpec, definition: ModelDefinition, metadata: Metadata) -> Framework:
    from elasticdl.frameworks.keras import KerasFramework, KerasSettings

    return KerasFramework(
        definition,
        minibatch_size=spec.minibatch_size,
        seed=spec.seed,
        metadata=metadata,
        on_parameter_server=on_parameter_servers(spec),
        mode=MODES[spec.job_type],
        settings=KerasSettings(
            embedding_threshold=spec.embedding_threshold_bytes,
            needed=_NEEDED.get(spec.job_type, ()),
            precision=spec.precision,
            evaluates=bool(spec.validation_data),
            fixed_global_batch=bool(spec.fixed_global_batch),
            in_groups=spec.distribution_strategy is DistributionStrategy.ALL_REDUCE,
        ),
    )
