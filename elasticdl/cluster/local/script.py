"""A worker's command that is a user's Python script: whether a standby can import PyTorch for it.

It can if the script would import PyTorch before anything else: then nothing in it, such as an assignment to
    `os.environ`, could affect that import.  This module reads the script, and never runs it.
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
_ON_API = (_API, "elasticdl.api.accelerate", "elasticdl.api.lightning", "elasticdl.api.transformers")  # import it
_OURS = frozenset({"elasticdl", "elasticdl_client"})
_BEFORE_TORCH = sys.stdlib_module_names | _OURS | {"numpy", _TORCH}  # PyTorch does not depend on imports of these
_SUFFIXES = frozenset(all_suffixes())
_HARMLESS = frozenset(  # others with such names may change the output of an import, or the exit
    {
        *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONNOUSERSITE"),
        *("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONFAULTHANDLER", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH"),
        # Set by Docker's images of Python; the interpreter does not read these.
        *("PYTHON_VERSION", "PYTHON_SHA256", "PYTHON_PIP_VERSION", "PYTHON_SETUPTOOLS_VERSION"),
        *("PYTHON_GET_PIP_URL", "PYTHON_GET_PIP_SHA256"),
    }
)


@dataclass(frozen=True, slots=True)
class Script:
    """A script that imports PyTorch first.

    Attributes:
        directory: Working directory, absolute.
        interpreter: The command before the script: `python`, or `python -u`.
        words: The rest of the command: the script and its arguments.
        modules: The modules of its first imports, which a standby imports instead.
    """

    directory: str
    interpreter: tuple[str, ...]
    words: tuple[str, ...]
    modules: tuple[str, ...]

    @staticmethod
    def of(command: Sequence[str], env: Mapping[str, str]) -> Script | None:
        """Return the script of a pod; None if it must be started plainly.

        Args:
            command: The command of the pod.
            env: The complete environment of the pod.
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
    """Return whether a program is this interpreter, whose directory is the first on the command's PATH."""
    where = directory if "/" in program else os.path.dirname(sys.executable)
    path = os.path.join(where, program)
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    if os.path.basename(path) not in names or os.path.dirname(path) != os.path.dirname(sys.executable):
        return False  # another virtual environment may link to the same interpreter
    return os.path.exists(path) and os.path.samefile(path, sys.executable)


def _first_imports(path: str) -> tuple[str, ...]:
    """Return the modules of PyTorch that a script imports before anything else; empty if it is unreadable."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ()
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()  # Python will report it
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
    """Return whether imports would find the user's modules instead of the standard library's.

    Args:
        beside: Directory of the script.
        directory: Working directory.
    """
    on_path = [directory, os.path.dirname(directory)]  # the command adds these to PYTHONPATH
    on_path += [os.path.join(directory, path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return any(map(_holds_library_names, dict.fromkeys([beside, *on_path])))


def _holds_library_names(directory: str) -> bool:
    """Return whether a directory has modules or packages with names of the standard library."""
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
