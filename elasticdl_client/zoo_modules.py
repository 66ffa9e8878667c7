"""The modules of a model zoo as source: their imports, their files, and the framework that they are written for; runs
nothing.

The client, the master and every worker ask the same question of the same files, so they have the same answer before any
framework is imported.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticdl_client.choices import DistributionStrategy, FrameworkName
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.flag_groups import COMPUTATION
from elasticdl_client.flags import given_of

if TYPE_CHECKING:
    from elasticdl_client.job_spec import JobSpec  # takes a while, and old import paths need none of it

_RUNTIME = frozenset({"elasticdl", "elasticdl_client", "elasticdl_preprocessing", "elasticai_api"})
ALIAS = "model_zoo"  # `import model_zoo.x` is the zoo's x, also where its directory has another name


@dataclass(frozen=True, slots=True)
class Source:
    """A module of the zoo.

    Attributes:
        imported: dotted names of all that it imports, anywhere in it.
    """

    file: Path
    tree: ast.Module
    imported: tuple[str, ...]


def sources(zoo: Path, module: str, script: Path | None = None) -> Iterator[Source]:
    """Yield a module of the zoo and those that it imports from there, nearest first; not what is not valid Python.

    ElasticDL's own modules, which lie there where a checkout is the zoo, are not the user's program.

    Args:
        zoo: where modules are looked for.
        module: dotted name of the first one.
        script: its file, whose directory is searched before the zoo; None: the file that the name says.
    """
    directories = (zoo,) if script is None else (script.parent, zoo)
    waiting, seen = [module], {module}
    while waiting:
        name = waiting.pop(0)
        is_script = script is not None and name == module
        file = script if is_script else next((file for one in directories if (file := _file(one, name))), None)
        tree = None if file is None else _parsed(file)
        if file is None or tree is None:
            continue
        imported = tuple(_imports(tree, file, name))
        yield Source(file, tree, imported)
        for one in imported:
            for candidate in within(one):
                if candidate not in seen and candidate.partition(".")[0] not in _RUNTIME:
                    seen.add(candidate)
                    waiting.append(candidate)


def within(name: str) -> list[str]:
    """Return a dotted name and the packages that contain it, longest first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _file(zoo: Path, module: str) -> Path | None:
    for name in dict.fromkeys((module, module.removeprefix(f"{ALIAS}."))):
        parts = name.split(".")
        if not all(parts):  # of --model_def=model, whose form is checked later
            continue
        stem = zoo.joinpath(*parts)
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file
    return None


def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, OSError):
        return None


def _imports(tree: ast.Module, file: Path, module: str) -> Iterator[str]:
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" if origin else alias.name for alias in node.names)


PORT = "elasticdl.frameworks.framework"
NUM_ARGUMENTS = {"feed": (3, 2, 1), "loss": (2,), "eval_metrics_fn": (0,)}  # by position; `feed` gets what it takes
ADAPTER = "framework"  # the symbol of a module that brings an adapter of its own
_TELLING = {
    "tensorflow": FrameworkName.TENSORFLOW,
    "keras": FrameworkName.TENSORFLOW,
    "tf_keras": FrameworkName.TENSORFLOW,
    "elasticdl.layers": FrameworkName.TENSORFLOW,
    "elasticdl.api.tensorflow": FrameworkName.TENSORFLOW,
    "elasticdl_preprocessing": FrameworkName.TENSORFLOW,
    "elasticai_api.tensorflow": FrameworkName.TENSORFLOW,
    "elasticai_api.pytorch": FrameworkName.TORCH,
    "torch": FrameworkName.TORCH,
    "torchvision": FrameworkName.TORCH,
    "elasticdl.api.pytorch": FrameworkName.TORCH,
}

_INSTEAD = {  # a Keras model's replacement of a flag
    "precision": "Leave it out.",
    "compile": "Leave it out; steps of Keras models are compiled, by XLA where it can, in any case.",
    "channels_last": "Leave it out; TensorFlow chooses the layout itself.",
    "clip_gradient_norm": "Leave it out, and give the Keras optimizer global_clipnorm.",
    "accumulate_steps": "Leave it out, and give a smaller --minibatch_size.",
    "shard_optimizer": "Leave it out; each worker holds the whole state of the optimizer.",
    "input_workers": "Leave it out; tf.data runs feed in threads, as many as there are processors.",
}


def can_be_called(name: str, signature: inspect.Signature) -> bool:
    """Return whether a function of this signature can be a `feed`, `loss` or `eval_metrics_fn`."""
    takes_weights = name == "loss" and "sample_weight" in signature.parameters  # they come where `feed` gives them
    return any(_fits(signature, number) for number in NUM_ARGUMENTS[name] + (3,) * takes_weights)


def _fits(signature: inspect.Signature, number: int) -> bool:
    try:
        signature.bind(*range(number))
    except TypeError:
        return False
    return True


def framework_of(spec: JobSpec) -> FrameworkName:
    """Return the framework of a job: `--framework`, or what the model definition imports.

    The module that `--model_def` names counts first, then those of the zoo that it imports, nearest first.  The first
    one that imports a framework decides; one that imports both means TensorFlow.  Where none does, the port for an
    adapter of its own (`PORT`) means that; else it is TensorFlow.
    """
    if spec.framework is not FrameworkName.AUTO:
        return spec.framework
    otherwise = FrameworkName.TENSORFLOW
    for source in sources(Path(spec.model_zoo or "."), spec.model_def.rpartition(".")[0]):
        imported = {root for one in source.imported for root in within(one)}
        told = {_TELLING[root] for root in imported if root in _TELLING}
        if told:
            return FrameworkName.TORCH if told == {FrameworkName.TORCH} else FrameworkName.TENSORFLOW
        if PORT in imported:
            otherwise = FrameworkName.CUSTOM
    return otherwise


def check_framework(spec: JobSpec) -> None:
    """Check that the job's strategy and flags work with models of its framework.

    Raises:
        ModelDefinitionError: they cannot.
    """
    _check_computation(spec)
    if spec.distribution_strategy is not DistributionStrategy.PARAMETER_SERVER:
        return
    if framework_of(spec) is FrameworkName.TORCH:
        raise ModelDefinitionError(
            f"--model_def={spec.model_def} is written for PyTorch, and parameter servers train Keras models alone.",
            "Give --distribution_strategy=AllReduceStrategy, or Local for one worker.",
        )


def _check_computation(spec: JobSpec) -> None:
    given = given_of(spec, COMPUTATION)
    framework = framework_of(spec) if given else None
    if framework is FrameworkName.TENSORFLOW and "precision" in given:
        _check_precision_of_keras(spec)
        given.remove("precision")
    if not given or framework is FrameworkName.TORCH:
        return
    raise ModelDefinitionError(
        f"--{given[0]} is for PyTorch models, and --model_def={spec.model_def} is none.", _INSTEAD[given[0]]
    )


def _check_precision_of_keras(spec: JobSpec) -> None:
    if spec.distribution_strategy is DistributionStrategy.PARAMETER_SERVER:
        raise ModelDefinitionError(
            f"--precision={spec.precision} with ParameterServerStrategy: parameter servers do not scale losses, and "
            "Keras models on them compute as the module says.",
            "Give --distribution_strategy=AllReduceStrategy or Local; or let the module call "
            'keras.config.set_dtype_policy("mixed_bfloat16").',
        )
