"""What every process that runs the user's module makes of a job's flags: readers of its data, and the framework."""

from __future__ import annotations

from elasticdl.data.custom import adapt_reader
from elasticdl.data.factory import create_reader
from elasticdl.data.reader import Reader
from elasticdl.frameworks.framework import Framework
from elasticdl.frameworks.keras import KerasFramework
from elasticdl.model_def import ModelDefinition
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_spec import JobSpec


class Readers:
    """The job's data sources, each opened when it is first asked for."""

    def __init__(self, spec: JobSpec, definition: ModelDefinition) -> None:
        self._spec = spec
        self._definition = definition
        self._readers: dict[int, Reader] = {}

    def of(self, task_type: pb.TaskType) -> Reader:
        """The reader of the data that tasks of a type are made of."""
        if task_type not in self._readers:
            origins = {pb.TRAINING: self._spec.training_data, pb.EVALUATION: self._spec.validation_data}
            self._readers[task_type] = self._open(origins[task_type])
        return self._readers[task_type]

    def _open(self, origin: str) -> Reader:
        params = self._spec.data_reader_params_dict()
        if self._definition.custom_data_reader is None:
            return create_reader(origin, params, self._spec.seed)
        records_per_task = self._spec.minibatch_size * self._spec.num_minibatches_per_task
        return adapt_reader(self._definition.custom_data_reader, origin, records_per_task, params, self._spec.seed)


def on_parameter_servers(spec: JobSpec) -> bool:
    """Whether the job has parameter servers."""
    return spec.distribution_strategy is DistributionStrategy.PARAMETER_SERVER


def load_framework(spec: JobSpec, definition: ModelDefinition, readers: Readers) -> Framework:
    """The framework over the user's module; the same model in every process of the job."""
    return KerasFramework(
        definition,
        minibatch_size=spec.minibatch_size,
        seed=spec.seed,
        metadata=readers.of(pb.TRAINING).metadata(),
        on_parameter_server=on_parameter_servers(spec),
        embedding_threshold=spec.embedding_threshold_bytes,
    )
