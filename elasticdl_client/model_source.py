"""Looks at a model-definition module without running it: do the file and its symbols exist?

Checks that need the module to run are left to the worker.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticdl_client.choices import FrameworkName, JobType
from elasticdl_client.data_sources import OF_MODULE
from elasticdl_client.errors import FlagError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.original_imports import check_source
from elasticdl_client.secret_values import hide
from elasticdl_client.zoo_modules import (
    ADAPTER,
    ALIAS,
    NUM_ARGUMENTS,
    can_be_called,
    check_framework,
    framework_of,
    sources,
)

_EXPECTED = {
    "dataset": "a function dataset() or dataset(mode) that returns arrays, a PyDataset or a tf.data.Dataset",
    "feed": "a function feed(dataset, mode, metadata), or give --label_column for a table (CSV, Parquet, SQL, …)",
    "loss": "a function loss(labels, predictions)",
    "eval_metrics_fn": "a function eval_metrics_fn() that returns a dictionary of metrics",
    "prediction_outputs_processor": "a class with a method process(predictions, worker_id); or --prediction_outputs",
    "optimizer": "a function that returns an optimizer: optimizer() of Keras, optimizer(model) of PyTorch",
}
_OF_COMPILE = {"loss": "loss", "optimizer": "optimizer", "eval_metrics_fn": "metrics"}
_COMPILING = frozenset({"compile", "load_model", "from_preset", "compile_from_config"})
_COMPILE_NOTHING = frozenset(
    {"keras", "tensorflow", "numpy", "pandas", "pyarrow", "scipy", "sklearn", "PIL", "cv2", "h5py", "elasticdl"}
    | {"elasticdl_client", "elasticdl_preprocessing", "elasticai_api", ALIAS}
    | sys.stdlib_module_names
)
_OF_COMPILED_MODELS = "elasticdl.tabular.estimators"  # those of `elasticdl sql`
ADAPTER_HINT = (
    "Define framework(definition, minibatch_size, seed, metadata, on_parameter_server, mode), which returns an "
    "elasticdl.frameworks.framework.Framework."
)
_DATA_FLAGS = {
    JobType.TRAIN: ("training_data", "validation_data"),
    JobType.EVALUATE: ("validation_data",),
    JobType.PREDICT: ("prediction_data",),
}
_REQUIRED = {
    JobType.TRAIN: ("feed", "loss", "optimizer"),
    JobType.EVALUATE: ("feed", "eval_metrics_fn"),
    JobType.PREDICT: ("feed",),
}


def check_model_source(spec: JobSpec, zoo: Path) -> None:
    """Check the module that `--model_def` names, and the symbols that the job needs.

    Raises:
        ModelDefinitionError: naming file, symbol and what was expected.
    """
    if not zoo.is_dir():
        what = "is not a directory" if zoo.exists() else "does not exist"
        raise ModelDefinitionError(f"The model zoo {zoo} {what}.", "Set --model_zoo to the directory of your models.")
    module, _, symbol = spec.model_def.rpartition(".")
    file = _module_file(zoo, module, f"--model_def={spec.model_def}")
    if not _defines(file, symbol):
        raise ModelDefinitionError(
            f"{file} has no {symbol}, which --model_def={spec.model_def} names.",
            f"Define {symbol}: a function that returns a model, or a model class.",
        )
    check_source(zoo, module)
    spec = dataclasses.replace(spec, model_zoo=str(zoo))
    check_framework(spec)
    backend = spec.envs_dict().get("KERAS_BACKEND", "tensorflow")
    if framework_of(spec) is FrameworkName.TENSORFLOW and backend != "tensorflow":
        raise FlagError(f"--envs: KERAS_BACKEND={backend}: workers run Keras on TensorFlow.", "Leave it out.")
    if framework_of(spec) is FrameworkName.CUSTOM:
        if not _defines(file, ADAPTER):
            raise ModelDefinitionError(f"{file} has no {ADAPTER}, and --framework is custom.", ADAPTER_HINT)
        return
    if spec.takes_dataset:
        _check_dataset(spec, file)
    has_feed = spec.has_default_feed or spec.takes_dataset
    needed = [name for name in _REQUIRED[spec.job_type] if name != "feed" or not has_feed]
    if spec.job_type is JobType.PREDICT and not spec.prediction_outputs:
        needed.append("prediction_outputs_processor")
    if framework_of(spec) is FrameworkName.TENSORFLOW and _may_compile(zoo, module):
        needed = [name for name in needed if name not in _OF_COMPILE or getattr(spec, name) != name]
    for name in needed:
        _check_symbol(zoo, file, name, getattr(spec, name))


def dataset_flags(job_type: str, zoo: Path, model_def: str) -> list[str]:
    """Return the data flags of a job that a module has data for, in functions `dataset` and `validation_dataset`.

    `dataset()` is for training, `dataset(mode)` for each mode.  A `dataset` with other arguments is a `feed`.
    """
    found: list[str] = []
    source = next(iter(sources(zoo, model_def.rpartition(".")[0])), None)
    body = source.tree.body if source is not None else []
    arguments = {
        statement.name: [one.arg for one in (*statement.args.posonlyargs, *statement.args.args)]
        for statement in body
        if isinstance(statement, ast.FunctionDef)
    }
    of_dataset = arguments.get("dataset")
    if of_dataset in ([], ["mode"]):
        found.append("training_data")
        found += ["prediction_data"] if of_dataset else []
        found += ["validation_data"] if of_dataset or "validation_dataset" in arguments else []
    return [name for name in found if name in _DATA_FLAGS[JobType(job_type)]]


def _check_dataset(spec: JobSpec, file: Path) -> None:
    if framework_of(spec) is not FrameworkName.TENSORFLOW:
        raise ModelDefinitionError(
            f"{file}: dataset() as a data source is for Keras models.", "Define feed, and name the data by their flags."
        )
    if not _defines(file, "dataset"):
        raise ModelDefinitionError(f"{file} has no dataset.", f"Define dataset: {_EXPECTED['dataset']}.")
    for name in _DATA_FLAGS[spec.job_type]:
        value = getattr(spec, name)
        if value and value != OF_MODULE:
            raise FlagError(
                f"--{name}={hide(value)}, and the other data are those of {file}: dataset().",
                "Name all data by their flags, or let the module have all: dataset(mode), validation_dataset().",
            )


def reads_data_itself(spec: JobSpec, zoo: Path) -> bool:
    """Return whether the module has its own data reader, so that data need not be files."""
    if not spec.model_def:
        return False
    if spec.takes_dataset:
        return True
    module, _, symbol = spec.custom_data_reader.rpartition(".")
    file = _module_file(zoo, module or spec.model_def.rpartition(".")[0], "--custom_data_reader")
    return _defines(file, symbol)


def _may_compile(zoo: Path, module: str) -> bool:
    """Return whether a module, or one of the zoo that it imports, may return a compiled model.

    It names a function that returns or makes one, or imports from a package that is not looked into.
    """
    read = list(sources(zoo, module))
    roots = {name.partition(".")[0] for source in read for name in source.imported}
    of_zoo = {path.stem for path in zoo.iterdir()}
    if roots - _COMPILE_NOTHING - of_zoo:
        return True
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _COMPILING)
        or (isinstance(node, ast.Name) and node.id in _COMPILING)
        or (isinstance(node, ast.ImportFrom) and node.module == _OF_COMPILED_MODELS)
        for source in read
        for node in ast.walk(source.tree)
    )


def _check_symbol(zoo: Path, model_file: Path, name: str, wanted: str) -> None:
    module, _, symbol = wanted.rpartition(".")
    file = _module_file(zoo, module, f"--{name}={wanted}") if module else model_file
    names = (symbol, "dataset_fn", "dataset") if wanted == "feed" else (symbol,)
    if not any(_defines(file, candidate) for candidate in names):
        compiled = f"; or, with Keras, return a model compiled with {_OF_COMPILE[name]}" if name in _OF_COMPILE else ""
        raise ModelDefinitionError(
            f"{file} has no {symbol}.",
            f"Define {symbol}: {_EXPECTED[name]}{compiled}; or name another symbol with --{name}.",
        )
    function = _function(file, names)
    if name in NUM_ARGUMENTS and function is not None and not can_be_called(name, _signature(function.args)):
        raise ModelDefinitionError(
            f"{file}:{function.lineno}: {function.name}({ast.unparse(function.args)}) cannot be called with "
            f"{NUM_ARGUMENTS[name][0]} arguments by position.",
            f"Define {function.name}: {_EXPECTED[name]}.",
        )


def _function(file: Path, names: Sequence[str]) -> ast.FunctionDef | None:
    """Return the function of the first of the names that a module defines.

    None where its source does not tell: it is decorated, no function of this module, or defined more than once.
    """
    body = ast.parse(file.read_bytes()).body
    defined = list(_top_level_names(body))
    first = next((name for name in names if name in defined), "")
    found = [one for one in body if isinstance(one, ast.FunctionDef) and one.name == first and not one.decorator_list]
    return found[0] if found and defined.count(first) == 1 and "*" not in defined else None


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return that of a function by its source."""
    made = inspect.Parameter
    positional = [
        *((one.arg, made.POSITIONAL_ONLY) for one in arguments.posonlyargs),
        *((one.arg, made.POSITIONAL_OR_KEYWORD) for one in arguments.args),
    ]
    num_needed = len(positional) - len(arguments.defaults)
    parameters = [
        made(name, kind, default=made.empty if n < num_needed else None) for n, (name, kind) in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(made(arguments.vararg.arg, made.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(made(one.arg, made.KEYWORD_ONLY, default=made.empty if default is None else None))
    if arguments.kwarg is not None:
        parameters.append(made(arguments.kwarg.arg, made.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _module_file(zoo: Path, module: str, flag: str) -> Path:
    stem = zoo.joinpath(*module.split("."))
    for file in (stem.with_suffix(".py"), stem / "__init__.py"):
        if file.is_file():
            return file
    raise ModelDefinitionError(
        f"{stem.with_suffix('.py')} does not exist, which {flag} names.",
        f"Modules are named relative to the model zoo {zoo}; set --model_zoo if that is another directory.",
    )


def _defines(file: Path, symbol: str) -> bool:
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise ModelDefinitionError(f"{file} is not valid Python: {error}.", "Mend the module.") from error
    names = set(_top_level_names(tree.body))
    return symbol in names or "*" in names or "__getattr__" in names


def _top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0]
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.stmt) and node is not statement:
                yield from _top_level_names([node])
