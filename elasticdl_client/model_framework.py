"""Which framework a model definition is written for, read off its imports; runs nothing.

The client, the master and every worker ask the same question of the same files, so they have the same answer before
any framework is imported.
"""

from __future__ import annotations

from pathlib import Path

from elasticdl_client.choices import DistributionStrategy, Framework
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.zoo_modules import sources, within

PORT = "elasticdl.frameworks.framework"
ADAPTER = "framework"  # the symbol of a module that brings an adapter of its own
_TELLING = {
    "tensorflow": Framework.TENSORFLOW,
    "keras": Framework.TENSORFLOW,
    "tf_keras": Framework.TENSORFLOW,
    "elasticdl.layers": Framework.TENSORFLOW,
    "elasticdl.api.tensorflow": Framework.TENSORFLOW,
    "elasticdl_preprocessing": Framework.TENSORFLOW,
    "elasticai_api.tensorflow": Framework.TENSORFLOW,
    "elasticai_api.pytorch": Framework.TORCH,
    "torch": Framework.TORCH,
    "torchvision": Framework.TORCH,
    "elasticdl.api.pytorch": Framework.TORCH,
}


def framework_of(spec: JobSpec) -> Framework:
    """The framework of a job: `--framework`, or what the model definition imports.

    The module that `--model_def` names counts first, then those of the zoo that it imports, nearest first.  The first
    one that imports a framework decides; one that imports both means TensorFlow.  Where none does, the port for an
    adapter of its own (`PORT`) means that; else it is TensorFlow.
    """
    if spec.framework is not Framework.AUTO:
        return spec.framework
    otherwise = Framework.TENSORFLOW
    for source in sources(Path(spec.model_zoo or "."), spec.model_def.rpartition(".")[0]):
        imported = {root for one in source.imported for root in within(one)}
        told = {_TELLING[root] for root in imported if root in _TELLING}
        if told:
            return Framework.TORCH if told == {Framework.TORCH} else Framework.TENSORFLOW
        if PORT in imported:
            otherwise = Framework.CUSTOM
    return otherwise


def check_framework(spec: JobSpec) -> None:
    """Checks that the job's strategy can train models of its framework.

    Raises:
        ModelDefinitionError: it cannot.
    """
    if spec.distribution_strategy is not DistributionStrategy.PARAMETER_SERVER:
        return
    if framework_of(spec) is Framework.TORCH:
        raise ModelDefinitionError(
            f"--model_def={spec.model_def} is written for PyTorch, and parameter servers train Keras models alone.",
            "Give --distribution_strategy=AllReduceStrategy, or Local for one worker.",
        )
