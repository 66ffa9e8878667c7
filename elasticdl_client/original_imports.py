"""Import paths of the original ElasticDL: today's name of each, and those without a successor.

Owns the table, and the look at a module's source before anything is started.  The runtime serves the paths from the
same table (`elasticdl.original`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.zoo_modules import sources

# Packages of the original, of which there is what the table says.
ROOTS = ("elasticdl.python", "elasticdl.callbacks", "elasticai_api")

_OBJECTS = "elasticdl.original.objects"
_SERVICES = "elasticdl.original.controller"
_CONTROLLER = "elasticdl.original.controller"
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
    "DataShardService": f"{_SERVICES}:OriginalDataShardService",
    "RecordIndexService": f"{_SERVICES}:OriginalRecordIndexService",
    "build_data_shard_service": f"{_SERVICES}:OriginalDataShardService",
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
    "elasticai_api.proto.elasticai_api_pb2": {
        "TRAINING": "elasticdl.rpc.elasticdl_pb2:TRAINING",
        "EVALUATION": "elasticdl.rpc.elasticdl_pb2:EVALUATION",
        "PREDICTION": "elasticdl.rpc.elasticdl_pb2:PREDICTION",
    },
    "elasticai_api.io.recordio_reader": {"RecordIOReader": f"{_OBJECTS}:OriginalRecordIOReader"},
    "elasticai_api.pytorch.controller": {
        "create_elastic_controller": f"{_CONTROLLER}:elastic_controller",
        "PyTorchAllReduceController": f"{_CONTROLLER}:all_reduce_controller",
    },
    "elasticai_api.pytorch.optimizer": {"DistributedOptimizer": f"{_CONTROLLER}:distributed_optimizer"},
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


@dataclass(frozen=True, slots=True)
class _Finding:
    """A place in a module that this version has no use for."""

    file: Path
    line: int
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.what}"


def check_source(zoo: Path, module: str) -> None:
    """Look through a module of the zoo, and those that it imports from there, without running any.

    Raises:
        ModelDefinitionError: some use what this version does not have, naming files, lines and what to use instead.
    """
    found: list[_Finding] = []
    for number, source in enumerate(sources(zoo, module)):
        is_torch = any(name.partition(".")[0] == "torch" for name in source.imported)
        places = _findings(source.file, source.tree, ("loss",) if number else tuple(_SYMBOLS), is_torch)
        # A file that is imported in two ways is one, and so is a line with several names.
        unique = {(one.line, one.hint): one for one in reversed(places) if one not in found}
        found += sorted(unique.values(), key=lambda one: one.line)
    if not found:
        return
    first, *others = found
    more = "".join(f"\n{one}\n  → {one.hint}" for one in others)
    raise ModelDefinitionError(str(first), f"{first.hint}{more}")


def _findings(file: Path, tree: ast.Module, symbols: Sequence[str], is_torch: bool) -> list[_Finding]:
    """
    Args:
        symbols: functions to look at; those of the model's own module are symbols of the definition.
    """
    found: list[_Finding] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [_of_import(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [_of_import(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "DenseFeatures":
            named = [("DenseFeatures is not part of Keras 3.", _COLUMNS)]
        elif isinstance(node, ast.Call) and _makes_optimizer(node) and any(one.arg == "lr" for one in node.keywords):
            named = [("an optimizer of Keras 3 has no argument lr.", "Write learning_rate=… in the place of lr=….")]
        else:
            continue
        found += [_Finding(file, node.lineno, *one) for one in named if one]
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    for name in symbols:
        # A loss of PyTorch may have PyTorch's order: its arguments are given by name.
        if name in functions and not (is_torch and name == "loss") and (one := _SYMBOLS[name](functions[name], tree)):
            found.append(_Finding(file, functions[name].lineno, *one))
    return found


def _makes_optimizer(call: ast.Call) -> bool:
    """Return whether it is `tf.keras.optimizers.SGD(…)` or the like."""
    if not isinstance(call.func, ast.Attribute):
        return False
    origin = call.func.value
    name = origin.attr if isinstance(origin, ast.Attribute) else getattr(origin, "id", "")
    return name == "optimizers"


def _of_import(module: str, name: str) -> tuple[str, str] | None:
    for package, (what, hint) in _REFUSED.items():
        if _lies_in(f"{module}.{name}", package):
            return f"{package} {what}.", hint
    if not name or name == "*" or not any(_lies_in(module, root) for root in ROOTS):
        return None
    if successor(module, name) or any(_lies_in(known, f"{module}.{name}") for known in TABLE):
        return None
    return f"{module}.{name} does not exist in this version.", hint_for(module, name)


def _of_loss(loss: ast.FunctionDef, tree: ast.Module) -> tuple[str, str] | None:
    names = [argument.arg for argument in loss.args.args]
    if len(names) < 2 or names[1] not in _LABELS or names[0] in _LABELS:
        return None
    return (
        f"loss({', '.join(names)}) takes the labels second, as in 2019.",
        f"It is called as loss(labels, predictions): write loss({names[1]}, {names[0]}).",
    )


def _of_metrics(metrics: ast.FunctionDef, tree: ast.Module) -> tuple[str, str] | None:
    names = [argument.arg for argument in metrics.args.args]
    if len(names) <= len(metrics.args.defaults):
        return None
    what = f"eval_metrics_fn({', '.join(names)}) computes the metrics, as in 2019."
    hint = (
        'It is called without arguments and returns functions: return {"accuracy": lambda labels, predictions: …}, '
        "one value for each sample, or a keras.metrics.Metric."
    )
    return what, hint


def _of_callbacks(callbacks: ast.FunctionDef, tree: ast.Module) -> tuple[str, str] | None:
    waiting: list[ast.AST] = list(callbacks.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            return None
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):  # these have return values of their own
            waiting += ast.iter_child_nodes(node)
    return (
        "callbacks() returns nothing, so no callback would be called.",
        "Return them: return [LearningRateScheduler(…)].",
    )


def _of_scheduler(scheduler: ast.FunctionDef, tree: ast.Module) -> tuple[str, str] | None:
    is_used = any(isinstance(node, ast.Name) and node.id == scheduler.name for node in ast.walk(tree))
    if is_used:
        return None
    hint = (
        "Make a callback of it: from elasticdl.api.tensorflow import LearningRateScheduler; "
        f"def callbacks(): return [LearningRateScheduler({scheduler.name})]"
    )
    return f"{scheduler.name} is a symbol of 2020, which nothing calls.", hint


# Function of a module → what is wrong with it and what to write.
_SYMBOLS: Mapping[str, Callable[[ast.FunctionDef, ast.Module], tuple[str, str] | None]] = {
    "loss": _of_loss,
    "eval_metrics_fn": _of_metrics,
    "callbacks": _of_callbacks,
    "learning_rate_scheduler": _of_scheduler,
}


def _lies_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
