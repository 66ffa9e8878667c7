"""Import paths of the original ElasticDL: what each name is today, and what has no successor.

Owns the table, and the look at a module's source before anything is started.  The runtime serves the paths from the
same table (`elasticdl.original`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.zoo_modules import sources

# Packages of the original, of which there is what the table says.
ROOTS = ("elasticdl.python", "elasticdl.callbacks", "elasticai_api")

_OBJECTS = "elasticdl.original.objects"
_COLUMNS = (
    "Keras 3 has no feature columns. Use the layers of elasticdl_preprocessing, such as Hashing, Discretization and "
    "IndexLookup, and elasticdl.layers.Embedding: docs/preprocessing.md."
)
_ODPS = "MaxCompute is not supported. Export the table as Parquet or CSV, or write a custom_data_reader: docs/data.md."
_OPTIMIZER = (
    "It is not needed: elasticdl.api.tensorflow hands out the data of loops in TensorFlow, and the strategies "
    "train Keras models: docs/estimator.md."
)
_CALLBACKS = {
    "LearningRateScheduler": "elasticdl.api.tensorflow:LearningRateScheduler",
    "MaxStepsStopping": "elasticdl.api.callbacks:MaxStepsStopping",
    "SavedModelExporter": "elasticdl.api.callbacks:SavedModelExporter",
}
_EMBEDDING = {"Embedding": "elasticdl.layers:Embedding"}
_DATA_SERVICE = {
    "DataShardService": "elasticdl.api.data:DataShardService",
    "RecordIndexService": "elasticdl.api.data:RecordIndexService",
    "build_data_shard_service": "elasticdl.api.data:DataShardService",
}

# Module of the original → its names, each `module:attribute` of today, or a sentence that says what to use instead.
TABLE: Mapping[str, Mapping[str, str]] = {
    "elasticdl.callbacks": _CALLBACKS,
    "elasticdl.python.elasticdl.callbacks": _CALLBACKS,
    "elasticdl.python.common.constants": {
        "Mode": "elasticdl.frameworks.framework:Mode",
        "MaxComputeConfig": f"{_OBJECTS}:MaxComputeConfig",
    },
    "elasticdl.python.common.log_utils": {
        "default_logger": f"{_OBJECTS}:default_logger",
        "get_logger": f"{_OBJECTS}:get_logger",
    },
    "elasticdl.python.elasticdl.layers": _EMBEDDING,
    "elasticdl.python.elasticdl.layers.embedding": _EMBEDDING,
    "elasticdl.python.elasticdl.feature_column.feature_column": {"embedding_column": _COLUMNS},
    "elasticdl.python.worker.prediction_outputs_processor": {
        "BasePredictionOutputsProcessor": f"{_OBJECTS}:BasePredictionOutputsProcessor",
    },
    "elasticdl.python.data.reader.data_reader": {
        "AbstractDataReader": f"{_OBJECTS}:AbstractDataReader",
        "Metadata": f"{_OBJECTS}:OriginalMetadata",
    },
    "elasticdl.python.data.reader.data_reader_factory": {
        "create_data_reader": "Name the kind with --data_reader_params=\"reader_type='CSV'\": docs/data.md."
    },
    "elasticdl.python.data.reader.odps_reader": {"ODPSDataReader": _ODPS, "ParallelODPSDataReader": _ODPS},
    "elasticdl.python.data.odps_io": {
        "is_odps_configured": f"{_OBJECTS}:is_odps_configured",
        "ODPSWriter": f"{_OBJECTS}:ODPSWriter",
        "ODPSReader": _ODPS,
    },
    "elasticai_api.common.data_shard_service": _DATA_SERVICE,
    "elasticai_api.common.master_client": {
        "build_master_client": "It is not needed: elasticdl.api.data.DataShardService finds the master itself.",
        "MasterClient": "It is not needed: elasticdl.api.data.DataShardService finds the master itself.",
    },
    "elasticai_api.io.recordio_reader": {"RecordIOReader": f"{_OBJECTS}:RecordIOReader"},
    "elasticai_api.pytorch.controller": {
        "create_elastic_controller": "elasticdl.api.pytorch:create_elastic_controller",
        "PyTorchAllReduceController": "elasticdl.api.pytorch:ElasticController",
    },
    "elasticai_api.pytorch.optimizer": {"DistributedOptimizer": f"{_OBJECTS}:distributed_optimizer"},
    "elasticai_api.pytorch.dataset": {
        "ElasticImageFolder": "controller.loader(ImageFolder(…)) makes any map-style data set elastic: "
        "docs/pytorch_script.md."
    },
    "elasticai_api.tensorflow.hooks": {
        "ElasticDataShardReportHook": "elasticdl.api.tensorflow:ElasticDataShardReportHook"
    },
    "elasticai_api.tensorflow.controller": {"create_elastic_controller": _OPTIMIZER},
    "elasticai_api.tensorflow.optimizer": {
        "DistributedOptimizer": _OPTIMIZER,
        "AdjustBackwardPassesPerStepHook": _OPTIMIZER,
    },
}
_REFUSED = {  # package → what it is, and what to use instead
    "tensorflow.python.keras": (
        "is a private copy of Keras 2, whose layers no Keras 3 model can hold",
        "Import the same names from tensorflow.keras.",
    ),
    "elasticdl_preprocessing.feature_column": ("does not exist in this version", _COLUMNS),
}
_LABELS = ("label", "labels", "target", "targets", "y_true")


def successor(module: str, name: str) -> tuple[str, str] | None:
    """Return module and attribute of today; None: there is no successor."""
    value = TABLE.get(module, {}).get(name, " ")
    if " " in value:
        return None
    target, _, attribute = value.partition(":")
    return target, attribute


def hint_for(module: str, name: str) -> str:
    """Return what to use instead of a name without a successor."""
    known = TABLE.get(module, {})
    if name in known:
        return known[name]
    if known:
        return f"Of {module} these names are known: {', '.join(sorted(known))}."
    return "docs/original.md lists the import paths of the original ElasticDL and what they are today."


def check_source(zoo: Path, module: str) -> None:
    """Looks through a module of the zoo, and those that it imports from there, without running any.

    Raises:
        ModelDefinitionError: one uses what this version does not have, naming file, line and what to use instead.
    """
    for source in sources(zoo, module):
        is_torch = any(name.partition(".")[0] == "torch" for name in source.imported)
        _check_tree(source.file, source.tree, is_torch)


def _check_tree(file: Path, tree: ast.Module, is_torch: bool) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                _check_import(file, node.lineno, node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                _check_import(file, node.lineno, alias.name, "")
        elif isinstance(node, ast.Attribute) and node.attr == "DenseFeatures":
            raise ModelDefinitionError(f"{file}, line {node.lineno}: DenseFeatures is not part of Keras 3.", _COLUMNS)
    for statement in tree.body:
        # A loss of PyTorch may have PyTorch's order: its arguments are given by name.
        if isinstance(statement, ast.FunctionDef) and statement.name == "loss" and not is_torch:
            _check_loss(file, statement)


def _check_import(file: Path, line: int, module: str, name: str) -> None:
    where = f"{file}, line {line}"
    for package, (what, hint) in _REFUSED.items():
        if _lies_in(f"{module}.{name}", package):
            raise ModelDefinitionError(f"{where}: {package} {what}.", hint)
    if not name or name == "*" or not any(_lies_in(module, root) for root in ROOTS):
        return
    if successor(module, name) or any(_lies_in(known, f"{module}.{name}") for known in TABLE):
        return
    raise ModelDefinitionError(f"{where}: {module}.{name} does not exist in this version.", hint_for(module, name))


def _check_loss(file: Path, loss: ast.FunctionDef) -> None:
    names = [argument.arg for argument in loss.args.args]
    if len(names) > 1 and names[1] in _LABELS and names[0] not in _LABELS:
        raise ModelDefinitionError(
            f"{file}, line {loss.lineno}: loss({', '.join(names)}) takes the labels second, as in 2019.",
            f"It is called as loss(labels, predictions): write loss({names[1]}, {names[0]}).",
        )


def _lies_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
