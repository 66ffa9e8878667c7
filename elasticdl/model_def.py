"""Load a model definition: import the module named by the flags, and look up its callables.

Finds the user's module in the model zoo and its symbols in the module.  It runs the module but calls nothing in it,
imports no framework, and names every missing symbol in an error.  `ModelDefinition` holds the callables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.original_imports import check_source
from elasticdl_client.zoo_modules import ADAPTER, ALIAS, NUM_ARGUMENTS, can_be_called, framework_of

__all__ = ["ModelDefinition", "framework_of", "load", "load_model_definition"]


_FIRST_NOTICE_S = 5.0  # most modules are imported within this time, including their framework
_LAST_NOTICE_S = 60.0
_log = logging.getLogger("elasticdl.model_def")
_SIGNATURES = {
    "feed": "a function feed(dataset, mode, metadata)",
    "loss": "a function loss(labels, predictions)",
    "optimizer": "a function that returns an optimizer: optimizer() of Keras, optimizer(model) of PyTorch",
    "eval_metrics_fn": "a function without arguments that returns a dictionary of metrics",
    "callbacks": "a function without arguments that returns a list of callbacks",
    "custom_data_reader": "a function custom_data_reader(data_origin, records_per_task=None, **params)",
    "prediction_outputs_processor": "a class with a method process(predictions, worker_id)",
}
_OF_TORCH = {  # symbols without a flag
    "collate_fn": "a function collate_fn(samples) that makes a minibatch",
    "lr_scheduler": "a function lr_scheduler(optimizer) that returns a scheduler of torch.optim",
}
_ADAPTER = "a function framework(definition, …) that returns a Framework"
_DESCRIBED = ("loss", "optimizer")  # may also be the name or config of a Keras object
_OTHER_NAMES = {"feed": ("dataset_fn", "dataset")}  # the older name, and the name in a PyTorch module
_DEFAULTS = {symbol: symbol for symbol in _SIGNATURES} | {"prediction_outputs_processor": "PredictionOutputsProcessor"}
_OF_COMPILE = ("loss", "optimizer", "eval_metrics_fn")  # a compiled model may have its own: known once it is made
_REQUIRED = {
    "train": ("feed", "loss", "optimizer"),
    "evaluate": ("feed", "eval_metrics_fn"),
    "predict": ("feed",),
}


def load_model_definition(spec: JobSpec) -> ModelDefinition:
    """Return the model definition named by a job's flags.

    Raises:
        ModelDefinitionError: A file or symbol is missing or of the wrong kind, or the module cannot be imported.
    """
    definition = load(
        spec.model_zoo or ".",
        spec.model_def,
        spec.model_params_dict(),
        {name: getattr(spec, name) for name in _SIGNATURES},
        required=_required(spec),
    )
    if not spec.takes_dataset:
        return definition
    module = _import(_directory(spec.model_zoo or "."), spec.model_def.rpartition(".")[0])
    return replace(definition, feed=None, custom_data_reader=None, dataset=_dataset(module))


def _dataset(module: ModuleType) -> Callable[[str], Any]:
    """Return a function from a mode to the module's data set: `validation_dataset()`, `dataset(mode)` or `dataset()`.

    Raises:
        ModelDefinitionError: The module has no such function.
    """
    own, of_validation = getattr(module, "dataset", None), getattr(module, "validation_dataset", None)
    expected = "a function dataset() or dataset(mode) that returns arrays, a PyDataset or a tf.data.Dataset"
    if own is None:
        raise _missing(module, "dataset", expected)
    for name, value in (("dataset", own), ("validation_dataset", of_validation)):
        if value is not None and not callable(value):
            raise _wrong(module, name, expected, value)
    takes_mode = bool(inspect.signature(own).parameters)

    @functools.cache
    def dataset(mode: str) -> Any:
        if mode == "evaluation" and of_validation is not None:
            made = of_validation()
        elif takes_mode:
            made = own(mode)
        elif mode == "training":
            made = own()
        else:
            raise ModelDefinitionError(
                f"{_file(module)} has no data set for {mode}.",
                "Let dataset take an argument mode, or define validation_dataset() for evaluations.",
            )
        if made is None:
            raise ModelDefinitionError(
                f"{_file(module)}: the data set for {mode} is None.",
                "Return arrays, a PyDataset or a tf.data.Dataset; or give the data by their flag.",
            )
        return made

    return dataset


def _required(spec: JobSpec) -> list[str]:
    framework = framework_of(spec)
    if framework is FrameworkName.CUSTOM:
        return [ADAPTER]
    has_feed = spec.has_default_feed or spec.takes_dataset
    needed = [name for name in _REQUIRED[spec.job_type] if name != "feed" or not has_feed]
    return [name for name in needed if framework is FrameworkName.TORCH or name not in _OF_COMPILE]


def load(
    model_zoo: str,
    model_def: str,
    model_params: Mapping[str, object] | None = None,
    symbols: Mapping[str, str] | None = None,
    required: Collection[str] = _REQUIRED["train"],
) -> ModelDefinition:
    """Return the model definition ``pkg.module.symbol`` of a model zoo.

    Args:
        model_zoo: Directory of the model zoo.
        model_def: Dotted path of the model function or class, relative to the model zoo.
        model_params: Keyword arguments of the model function.
        symbols: Names of the other symbols: a name in the same module, or a dotted name in another module of the zoo.
            Omitted symbols have their default names.
        required: The symbols that must exist.  A symbol with another name than its default must exist, too.

    Raises:
        ModelDefinitionError: See `load_model_definition`.
    """
    zoo = _directory(model_zoo)
    module_name, _, symbol = model_def.rpartition(".")
    if not module_name:
        raise ModelDefinitionError(
            f"--model_def={model_def}: expected package.module.symbol, relative to the model zoo {zoo}."
        )
    check_source(zoo, module_name)
    module = _import(zoo, module_name)
    model = _model(module, symbol, dict(model_params or {}))
    found: dict[str, Callable[..., Any] | None] = {}
    for name, default in _DEFAULTS.items():
        wanted = (symbols or {}).get(name) or default
        found[name] = _symbol(zoo, module, name, wanted, name in required or wanted != default)
    for name in _OF_TORCH:
        wanted = (symbols or {}).get(name) or name
        found[name] = _symbol(zoo, module, name, wanted, required=wanted != name)
    if ADAPTER in required:  # else the module may use this name for something else
        found[ADAPTER] = _symbol(zoo, module, ADAPTER, ADAPTER, required=True)
    return ModelDefinition(path=_file(module), symbol=symbol, model=model, **found)


def _directory(model_zoo: str) -> Path:
    zoo = Path(model_zoo).resolve()
    if not zoo.is_dir():
        raise ModelDefinitionError(f"The model zoo {zoo} is not a directory.", "Set --model_zoo to an existing one.")
    return zoo


def _import(zoo: Path, name: str) -> ModuleType:
    stem = zoo.joinpath(*name.split("."))
    file = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    if file is None:
        raise ModelDefinitionError(
            f"{stem.with_suffix('.py')} does not exist.",
            f"--model_def is package.module.symbol relative to --model_zoo ({zoo}).",
        )
    if sys.path[0] != str(zoo):
        sys.path.insert(0, str(zoo))
    _add_working_directory()
    _alias(zoo)
    importlib.invalidate_caches()
    process = os.getpid()
    try:
        with _saying_where(file):
            return _import_file(name, file)
    except ModelDefinitionError:
        raise
    except (Exception, SystemExit) as error:
        if os.getpid() != process:  # a child forked by the module: let it exit
            raise
        raise ModelDefinitionError(
            f"{file} cannot be imported: {type(error).__name__}: {error}",
            _import_hint(error),
            details=traceback.format_exc(),
        ) from error


def _add_working_directory() -> None:
    """Add the working directory to `sys.path`, since `RUN_MODULE` leaves it out, so that models can import from it.

    It comes before installed packages, because one of them may be an older copy of the project in the directory, and
    after the standard library, because it must not hide standard modules.
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        here, standard = os.getcwd(), os.path.dirname(os.__file__)
        if not {"", here}.intersection(sys.path):
            places = (standard, os.path.join(standard, "lib-dynload"))
            behind = [position for position, place in enumerate(sys.path, 1) if place in places]
            sys.path.insert(max(behind, default=len(sys.path)), here)


def _import_hint(error: BaseException) -> str:
    top = _top(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if not top or top in sys.modules or importlib.util.find_spec(top) is not None:
        return "Mend the module; its traceback is in the worker's log."
    return (
        f"Install the package that holds {top} where the job runs: in an image by the zoo's requirements.txt, on this "
        "machine by pip."
    )


@contextlib.contextmanager
def _saying_where(file: Path) -> Iterator[None]:
    """Return a context that logs, at growing intervals, that a module is still being imported, and at which line."""
    importing, done = threading.get_ident(), threading.Event()
    started = time.monotonic()

    def watch() -> None:
        pause_s = _FIRST_NOTICE_S
        while not done.wait(pause_s):
            frame = sys._current_frames().get(importing)
            while frame is not None and frame.f_code.co_filename != str(file):
                frame = frame.f_back
            where = f", now at line {frame.f_lineno}" if frame is not None else ""
            _log.warning("Importing %s for %.0f s%s", file, time.monotonic() - started, where)
            pause_s = min(2 * pause_s, _LAST_NOTICE_S)

    watcher = threading.Thread(target=watch, name="import", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _alias(zoo: Path) -> None:
    """Make `import model_zoo.x` find the zoo's x, even if the zoo's directory has another name."""
    package = sys.modules.setdefault(ALIAS, ModuleType(ALIAS))
    # No other directories: a package there would take precedence over a zoo directory without __init__.py.
    package.__path__ = [str(place) for place in (zoo, zoo / ALIAS) if place.is_dir()]


def _import_file(name: str, file: Path) -> ModuleType:
    """Import a file by name, so that imports relative to the zoo work, or by path if another package has the name."""
    known = sys.modules.get(name)
    if known is not None and _file(known) == str(file):
        return known
    if name not in sys.modules and _leads_to(_top(name), file):
        module = importlib.import_module(name)
        if _file(module) == str(file):
            return module
    unique = f"elasticdl_model_zoo_{zlib.crc32(str(file).encode()):08x}_{file.stem}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _leads_to(top: str, file: Path) -> bool:
    """Return whether `import top` finds the file or its package, not a package with the same name elsewhere."""
    taken = sys.modules.get(top)
    found = None if taken is not None else importlib.util.find_spec(top)
    if found is None:
        places = list(getattr(taken, "__path__", ()))
    else:
        places = list(found.submodule_search_locations or [found.origin or ""])
    return any(file.is_relative_to(Path(place).resolve()) for place in places if place)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _file(module: ModuleType) -> str:
    return str(Path(module.__file__).resolve()) if module.__file__ else ""


def _model(module: ModuleType, symbol: str, params: dict[str, object]) -> Callable[[], Any]:
    model = getattr(module, symbol, None)
    expected = "a function that returns a model, or a model class"
    if model is None:
        raise _missing(module, symbol, expected)
    if not callable(model):
        raise _wrong(module, symbol, expected, model)
    try:
        inspect.signature(model).bind(**params)
    except TypeError as error:
        raise ModelDefinitionError(
            f"{_file(module)}: {symbol} cannot be called with {_listed(params)}: {error}.",
            "Set --model_params to the arguments of the model function.",
        ) from error
    except ValueError:  # no signature available: the call itself reports wrong arguments
        pass
    return functools.partial(model, **params)


def _symbol(zoo: Path, module: ModuleType, name: str, wanted: str, required: bool) -> Callable[..., Any] | None:
    other, _, attribute = wanted.rpartition(".")
    if other:
        module = _import(zoo, other)
    value = getattr(module, attribute, None)
    for other in _OTHER_NAMES.get(wanted, ()):
        value = getattr(module, other, None) if value is None else value
    expected = {**_SIGNATURES, **_OF_TORCH, ADAPTER: _ADAPTER}[name]
    if value is None:
        if required:
            raise _missing(module, attribute, expected)
        return None
    if not callable(value) and not (name in _DESCRIBED and isinstance(value, str | Mapping | list | tuple)):
        raise _wrong(module, attribute, expected, value)
    if required and name in NUM_ARGUMENTS and callable(value) and not inspect.isclass(value):
        signature = signature_of(value)
        if signature is not None and not can_be_called(name, signature):
            number = NUM_ARGUMENTS[name][0]
            raise ModelDefinitionError(
                f"{_file(module)}: {attribute}{signature} cannot be called with {number} arguments by position.",
                f"Make {attribute} {expected}.",
            )
    return value  # type: ignore[no-any-return]


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature for calls, including arguments that decorators add; None: it is not available.

    For a wrapper written in C, such as that of `functools.cache`, return the signature of the wrapped function.
    """
    for follows in (False, True):
        with contextlib.suppress(TypeError, ValueError):
            return inspect.signature(function, follow_wrapped=follows)
    return None


def _missing(module: ModuleType, symbol: str, expected: str) -> ModelDefinitionError:
    return ModelDefinitionError(
        f"{_file(module)} has no {symbol}.", f"Define {symbol}: {expected}; or name another symbol by its flag."
    )


def _wrong(module: ModuleType, symbol: str, expected: str, value: object) -> ModelDefinitionError:
    return ModelDefinitionError(
        f"{_file(module)}: {symbol} is a {type(value).__name__}, not {expected}.", f"Make {symbol} {expected}."
    )


def _listed(params: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in params.items()) or "no arguments"


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """The symbols of a model-definition module.

    Attributes:
        path: The module's file, for messages.
        symbol: The model's name in the module.
        model: Makes the model; `--model_params` are already bound.
        feed: ``feed(dataset, mode, metadata)``; PyTorch: ``feed(records, mode, metadata)``, or ``dataset``.
        dataset: Only Keras, if the module itself has the job's data: maps a mode to arrays, a `keras.utils.PyDataset`
            or a `tf.data.Dataset`; the same object for the same mode.
        loss: ``loss(labels, predictions)``; Keras: also the forms of `compile`: a name, a config, one per output.
        loss_weights: Only Keras: the `loss_weights` of `compile`.
        optimizer: ``optimizer()``; PyTorch: ``optimizer(model)`` or ``optimizer(params)``; Keras: also a name or a
            config.
        eval_metrics_fn: ``eval_metrics_fn()``.
        callbacks: ``callbacks()``.
        custom_data_reader: ``custom_data_reader(data_origin, records_per_task=None, **params)``.
        prediction_outputs_processor: Class with a method ``process(predictions, worker_id)``.
        collate_fn: Only PyTorch: ``collate_fn(samples)`` makes a minibatch.
        lr_scheduler: Only PyTorch: ``lr_scheduler(optimizer)``.
        framework: The module's own adapter for another framework: ``framework(definition, minibatch_size, seed,
            metadata, on_parameter_server, mode)`` makes an `elasticdl.frameworks.framework.Framework`.
    """

    path: str
    symbol: str
    model: Callable[[], Any]
    feed: Callable[..., Any] | None = None
    dataset: Callable[[str], Any] | None = None
    loss: Any = None
    loss_weights: Any = None
    optimizer: Any = None
    eval_metrics_fn: Callable[[], Any] | None = None
    callbacks: Callable[[], Any] | None = None
    custom_data_reader: Callable[..., Any] | None = None
    prediction_outputs_processor: Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    lr_scheduler: Callable[..., Any] | None = None
    framework: Callable[..., Any] | None = None

    @property
    def has_data(self) -> bool:
        """Whether the module reads the data itself; then a worker must list the shards."""
        return self.custom_data_reader is not None or self.dataset is not None
