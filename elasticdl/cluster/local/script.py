"""A user's Python script that is a worker's command: whether a standby can import PyTorch in its place.

It can where the script would import PyTorch before it has done anything else: only then could nothing of it, such as an
assignment to `os.environ`, have had an effect on that import.  This module reads the script and never runs it.
"""

from __future__ import annotations

import ast
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import all_suffixes

from elasticdl_client.choices import RUN_MODULE

COMMAND_MODULE = "elasticdl.worker.command"
_PREFIX = (*RUN_MODULE, COMMAND_MODULE)
_TORCH = "torch"
_API = "elasticdl.api.pytorch"
_ON_API = (_API, "elasticdl.api.accelerate", "elasticdl.api.lightning", "elasticdl.api.transformers")  # they import it
_OURS = frozenset({"elasticdl", "elasticdl_client"})
_BEFORE_TORCH = sys.stdlib_module_names | _OURS | {"numpy", _TORCH}  # it does not depend on their imports
_SUFFIXES = frozenset(all_suffixes())
_HARMLESS = frozenset(  # others that begin so may change what an import prints, or the exit
    {
        *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONNOUSERSITE"),
        *("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONFAULTHANDLER", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH"),
        # The interpreter does not read these: Docker's images of Python set them.
        *("PYTHON_VERSION", "PYTHON_SHA256", "PYTHON_PIP_VERSION", "PYTHON_SETUPTOOLS_VERSION"),
        *("PYTHON_GET_PIP_URL", "PYTHON_GET_PIP_SHA256"),
    }
)


@dataclass(frozen=True, slots=True)
class Script:
    """A script that imports PyTorch first.

    Attributes:
        directory: in which it runs, absolute.
        interpreter: the command's words before the script: `python`, or `python -u`.
        words: the rest of the command: the script and its arguments.
        modules: of its first imports, which a standby makes instead.
    """

    directory: str
    interpreter: tuple[str, ...]
    words: tuple[str, ...]
    modules: tuple[str, ...]

    @staticmethod
    def of(command: Sequence[str], env: Mapping[str, str]) -> Script | None:
        """Return the script of a pod, or None if it has to be started plainly.

        Args:
            command: of the pod.
            env: the pod's whole environment.
        """
        start = 1 + len(_PREFIX)
        if tuple(command[1:start]) != _PREFIX or len(command) < start + 3 or not _is_usual(env):
            return None
        directory = os.path.abspath(command[start])
        program, *words = command[start + 1 :]
        options = words[:1] if words[0] == "-u" else []
        if not _is_this_python(program, directory) or len(words) == len(options):
            return None
        words = words[len(options) :]
        if words[0].startswith("-"):
            return None
        path = os.path.join(directory, words[0])
        modules = _first_imports(path)
        if not modules or _hides_modules(os.path.dirname(os.path.realpath(path)), directory, env):
            return None
        return Script(directory, (program, *options), tuple(words), modules)


def _is_usual(env: Mapping[str, str]) -> bool:
    return all(not value or name in _HARMLESS for name, value in env.items() if name.startswith("PYTHON"))


def _is_this_python(program: str, directory: str) -> bool:
    """Whether it is this interpreter, whose directory is the first on the command's PATH."""
    where = directory if "/" in program else os.path.dirname(sys.executable)
    path = os.path.join(where, program)
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    if os.path.basename(path) not in names or os.path.dirname(path) != os.path.dirname(sys.executable):
        return False  # another virtual environment, whose interpreter may be the same file
    return os.path.exists(path) and os.path.samefile(path, sys.executable)


def _first_imports(path: str) -> tuple[str, ...]:
    """Return what of PyTorch a script imports before it does anything else; nothing if it cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ()
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()  # Python says it
    found: list[str] = []
    for name in _imports_at_the_top(tree):
        if any(name == api or name.startswith(f"{api}.") for api in _ON_API):
            return (_TORCH, _API)
        root = name.partition(".")[0]
        if root == _TORCH:
            found = [_TORCH]
        elif not found and root not in _BEFORE_TORCH:
            break
    return tuple(found)


def _hides_modules(beside: str, directory: str, env: Mapping[str, str]) -> bool:
    """Whether imports would find modules of the user's in the place of those of the standard library.

    Args:
        beside: the script's directory.
        directory: in which it runs.
    """
    on_path = [directory, os.path.dirname(directory)]  # which the command puts on PYTHONPATH
    on_path += [os.path.join(directory, path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return any(map(_holds_library_names, dict.fromkeys([beside, *on_path])))


def _holds_library_names(directory: str) -> bool:
    """Whether a directory has modules or packages with names of the standard library's."""
    try:
        entries = os.listdir(directory)
    except OSError:
        return False
    found = (entry.partition(".") for entry in entries)
    return any(
        name in sys.stdlib_module_names
        and (dot + suffix in _SUFFIXES or os.path.isfile(os.path.join(directory, name, "__init__.py")))
        for name, dot, suffix in found
    )


def _imports_at_the_top(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            return
