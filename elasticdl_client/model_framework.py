"""Which framework a model definition is written for, read off its imports; runs nothing.

The client, the master and every worker ask the same question of the same files, so they have the same answer before
anybody has imported a framework.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from elasticdl_client.choices import DistributionStrategy, Framework
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec

_TELLING = {
    "tensorflow": Framework.TENSORFLOW,
    "keras": Framework.TENSORFLOW,
    "tf_keras": Framework.TENSORFLOW,
    "elasticdl.layers": Framework.TENSORFLOW,
    "elasticdl.api.tensorflow": Framework.TENSORFLOW,
    "elasticdl_preprocessing": Framework.TENSORFLOW,
    "torch": Framework.TORCH,
    "torchvision": Framework.TORCH,
    "elasticdl.api.pytorch": Framework.TORCH,
}


def framework_of(spec: JobSpec) -> Framework:
    """The framework of a job: `--framework`, or what the model definition imports.

    The module that `--model_def` names counts first, then those of the zoo that it imports, nearest first.  The first
    one that imports a framework decides; one that imports both, or none at all, means TensorFlow.
    """
    if spec.framework is not Framework.AUTO:
        return spec.framework
    zoo = Path(spec.model_zoo or ".")
    module = spec.model_def.rpartition(".")[0]
    waiting, seen = [module], {module}
    while waiting:
        name = waiting.pop(0)
        file = _file(zoo, name) if name else None
        if file is None:
            continue
        imported = list(_imports(file, name))
        told = {_TELLING[root] for one in imported for root in _roots(one) if root in _TELLING}
        if told:
            return Framework.TORCH if told == {Framework.TORCH} else Framework.TENSORFLOW
        for one in imported:
            for candidate in _roots(one):
                if candidate not in seen:
                    seen.add(candidate)
                    waiting.append(candidate)
    return Framework.TENSORFLOW


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


def _file(zoo: Path, module: str) -> Path | None:
    stem = zoo.joinpath(*module.split("."))
    return next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()), None)


def _imports(file: Path, module: str) -> Iterator[str]:
    """Dotted names of all that a file imports anywhere in it; nothing of a file that is not valid Python."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, OSError):
        return
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" if origin else alias.name for alias in node.names)


def _roots(name: str) -> list[str]:
    """A dotted name and what it lies in, longest first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
