"""The allowed imports (docs/architecture.md): every import of ours is compared with the table below."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("elasticai_api", "elasticdl", "elasticdl_client", "elasticdl_preprocessing", "model_zoo")

SHARED = (  # `choices` are the types of JobSpec's fields
    "elasticdl.activities",
    "elasticdl.protocol",
    "elasticdl.task_numbers",
    "elasticdl_client.storage_kinds",
    "elasticdl_client.checkpoint_manifest",
    "elasticdl_client.choices",
    "elasticdl_client.errors",
    "elasticdl_client.goodput",
    "elasticdl_client.job_events",
    "elasticdl_client.job_spec",
    "elasticdl_client.job_status",
    "elasticdl_client.secret_values",
)
BELOW = (  # the packages below worker, master and ps; the framework's port, not its adapters
    "elasticdl.rpc",
    "elasticdl.cluster",
    "elasticdl.data",
    "elasticdl.storage",
    "elasticdl.model_def",
    "elasticdl.frameworks.framework",
    "elasticdl.collective",
)

# Room → the modules of ours that it may import besides its own; the longest room that holds a module counts.
ROOMS: dict[str, tuple[str, ...]] = {
    "elasticdl_client": (
        "elasticdl_client.local_job",
        "elasticdl_client.last_checkpoint",
        "elasticdl_client.kubernetes.code",
        "elasticdl_client.stored_job",
        "elasticdl_client.chaos.local_faults",
        "elasticdl_client.simulate",
        "elasticdl_client.sql.statistics",
        "elasticdl_client.sql.command",
    ),
    "elasticdl_client.local_job": (  # starts the agent, with --runtime=local
        "elasticdl_client",
        "elasticdl.cluster",
        "elasticdl.protocol",
    ),
    "elasticdl_client.kubernetes.code": ("elasticdl_client", "elasticdl.storage"),  # to publish it
    "elasticdl_client.last_checkpoint": ("elasticdl_client", "elasticdl.storage"),  # of a local job
    "elasticdl_client.stored_job": ("elasticdl_client", "elasticdl.storage"),  # of a job in storage
    "elasticdl_client.chaos.local_faults": (  # asks the agent for processes, and looks at the job's checkpoints
        "elasticdl_client",
        "elasticdl.cluster",
        "elasticdl.storage",
    ),
    "elasticdl_client.simulate": ("elasticdl_client", "elasticdl.simulation"),
    "elasticdl_client.sql.command": ("elasticdl_client", "elasticdl.storage"),  # to delete models there
    "elasticdl_client.sql.statistics": ("elasticdl_client", "elasticdl.analysis"),
    "elasticdl.simulation": (  # the master's core, and what a job's flags say
        *SHARED,
        "elasticdl.master.core",
        "elasticdl.master.settings",
        "elasticdl_client.kubernetes",
    ),
    "elasticdl": ("elasticdl_client.version", "elasticdl_client.sdk", "elasticdl.api.keras_fit"),  # on demand
    "elasticdl.activities": (),
    "elasticdl.protocol": (),
    "elasticdl.task_numbers": (),
    "elasticdl.kernels": (),
    "elasticdl.rpc": (*SHARED, "elasticdl.kernels", "elasticdl_client.kubernetes.names"),  # keys of the job's Secret
    "elasticdl.rpc.unpack_code": (  # from storage, too
        *SHARED,
        "elasticdl.rpc.logs",
        "elasticdl.storage",
        "elasticdl_client.requirements_file",
    ),
    "elasticdl.cluster": (*SHARED, "elasticdl_client.kubernetes"),
    "elasticdl.storage": (
        "elasticdl_client.storage_kinds",
        "elasticdl_client.checkpoint_manifest",
        "elasticdl_client.errors",
        "elasticdl_client.secret_values",
    ),
    "elasticdl.data": (  # checksums; kinds of sources
        *SHARED,
        "elasticdl.kernels",
        "elasticdl.storage",
        "elasticdl_client.data_sources",
        "elasticdl_client.params",
        "elasticdl_client.partitions",
    ),
    "elasticdl.analysis": (*SHARED, "elasticdl.data"),
    "elasticdl.model_def": (
        *SHARED,
        "elasticdl.data",
        "elasticdl_client.original_imports",
        "elasticdl_client.zoo_modules",
    ),
    "elasticdl.frameworks": (
        *SHARED,
        "elasticdl.kernels",
        "elasticdl.data",
        "elasticdl.model_def",
        "elasticdl.layers",
        "elasticdl.api.callbacks",
    ),
    "elasticdl.frameworks.keras": (  # knows the user's own callback when it sees it
        *SHARED,
        "elasticdl.data",
        "elasticdl.model_def",
        "elasticdl.layers",
        "elasticdl.frameworks",
        "elasticdl.api.tensorflow",
        "elasticdl.api.callbacks",
    ),
    "elasticdl.frameworks.torch": (
        *SHARED,
        "elasticdl.data",
        "elasticdl.model_def",
        "elasticdl.frameworks",
        "elasticdl.api.callbacks",
    ),
    "elasticdl.collective": (
        "elasticdl_client.errors",
        "elasticdl.kernels",
        "elasticdl.rpc.addresses",
        "elasticdl.rpc.handshake",
    ),
    "elasticdl.layers": SHARED,
    "elasticdl.tabular": ("elasticdl.layers", "elasticdl_preprocessing"),  # a model definition as those of the zoo
    "elasticdl.tabular.importance": (  # a program of its own
        "elasticdl.data",
        "elasticdl.storage",
        "elasticdl_client.data_sources",
    ),
    "elasticdl.api": (  # a worker inside of a user's script
        *SHARED,
        *BELOW,
        "elasticdl.layers",
        "elasticdl.worker",
        "elasticdl.ps.applied",
    ),
    "elasticdl.api.fit_arguments": (*SHARED, "elasticdl.api", "elasticdl.frameworks"),
    "elasticdl.api.fit_results": SHARED,
    "elasticdl.api.keras_fit": (  # a job of its own, from Python
        *SHARED,
        "elasticdl.api",
        "elasticdl.data",
        "elasticdl.model_def",
        "elasticdl.frameworks",
        "elasticdl_client.data_sources",
        "elasticdl_client.sdk",
    ),
    "elasticdl.api.pytorch": (  # gradients in flat buffers, as every PyTorch model's
        *SHARED,
        *BELOW,
        "elasticdl.api",
        "elasticdl.cluster.local.framework_import",
        "elasticdl.worker",
        "elasticdl.ps.applied",
        "elasticdl.frameworks.torch",
    ),
    "elasticdl.api.transformers": (*SHARED, "elasticdl.api"),
    "elasticdl.api.accelerate": (*SHARED, "elasticdl.api"),
    "elasticdl.api.lightning": (*SHARED, "elasticdl.api"),
    "elasticdl.master": (
        *SHARED,
        *BELOW,
        "elasticdl_client.contradictions",  # those that only a model's framework shows
        "elasticdl_client.data_sources",  # outputs in a table
        "elasticdl_client.end_hook",
        "elasticdl_client.job_series",
        "elasticdl_client.last_checkpoint",
        "elasticdl_client.model_source",
        "elasticdl_client.zoo_modules",
        "elasticdl_client.worker_range",
        "elasticdl_client.trained_model",
        "elasticdl_client.kubernetes.pods",
        "elasticdl_client.kubernetes.names",
        "elasticdl_client.version",
    ),
    "elasticdl.master.__main__": (  # chooses the runtime
        *SHARED,
        "elasticdl.rpc.logs",
        "elasticdl.rpc.signals",
        "elasticdl.cluster.local.framework_import",
        "elasticdl.cluster.local.process_title",
        "elasticdl.master",
        "elasticdl.master.kubernetes",
    ),
    "elasticdl.master.kubernetes": (*SHARED, *BELOW, "elasticdl.master", "elasticdl_client.kubernetes"),
    "elasticdl.master.core": (  # values only
        "elasticdl.activities",
        "elasticdl.protocol",
        "elasticdl.task_numbers",
        "elasticdl_client.choices",
        "elasticdl_client.job_events",
        "elasticdl_client.job_series",
        "elasticdl_client.job_status",
        "elasticdl_client.goodput",
        "elasticdl_client.worker_range",
    ),
    "elasticdl.ps": (*SHARED, *BELOW, "elasticdl.kernels"),
    "elasticdl.worker": (  # a worker's own model has an applied set, too
        *SHARED,
        *BELOW,
        "elasticdl.analysis",
        "elasticdl.kernels",
        "elasticdl.frameworks",
        "elasticdl.ps.client",
        "elasticdl.ps.applied",
        "elasticdl_client.data_sources",
        "elasticdl_client.trained_model",
    ),
    "elasticdl.worker.allreduce.schedule": ("elasticdl.ps.applied",),  # alone: no framework, no message, no call
    "elasticdl.original": (
        *SHARED,
        "elasticdl.api",
        "elasticdl.data",
        "elasticdl.rpc.elasticdl_pb2",
        "elasticdl_client.original_imports",
    ),
    "elasticdl.python": ("elasticdl.original",),  # import paths of the original, as the next two
    "elasticdl.callbacks": ("elasticdl.original",),
    "elasticai_api": ("elasticdl.original",),
    "elasticdl_preprocessing": ("elasticdl.storage.paths",),  # statistics in storage
    "model_zoo": ("elasticdl.layers", "elasticdl.api", "elasticdl_preprocessing"),
}

# Rooms that are part of another room's folder but may not import it.
SEALED = ("elasticdl.master.core", "elasticdl.worker.allreduce.schedule")

# Package of others → the only rooms that may import it.
CONFINED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("tensorflow", "keras", "tf_keras"),
        (
            "elasticdl.frameworks.keras",
            "elasticdl.layers",
            "elasticdl.tabular",
            "elasticdl.api.fit_arguments",
            "elasticdl.api.fit_results",
            "elasticdl.api.keras_fit",
            "elasticdl.api.tensorflow",
            "elasticdl_preprocessing",
            "model_zoo",
        ),
    ),
    "torch": (
        "elasticdl.frameworks.torch",
        "elasticdl.collective",
        "elasticdl.api.pytorch",
        "elasticdl.api.transformers",
        "elasticdl.api.accelerate",
        "elasticdl.api.lightning",
        "model_zoo",
    ),
}

# Room → the only packages of others that it may import.
FRUGAL: dict[str, tuple[str, ...]] = {
    # pyarrow: the schema of local files, where it is installed
    "elasticdl_client": (
        "cryptography",
        "fire",
        "kubernetes",
        "packaging",  # requirements.txt
        "urllib3",
        "docker",
        "yaml",
        "rich",
        "pyarrow",
        "IPython",  # in a notebook, whose kernel has it
        "starlette",  # the dashboard, with the next
        "uvicorn",
        "prompt_toolkit",  # the shell of `elasticdl sql`
    ),
    "elasticdl.master.core": (),
}


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, lazily and for type checking, too."""
    package = module_name(file, root).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node.lineno, argument.value


def wrong_with(module: str, imported: str) -> str:
    """Why `module` may not import `imported`; empty if it may."""
    room = max((r for r in ROOMS if within(module, r)), key=len)
    package = imported.split(".")[0]
    if package in OURS:
        own = within(imported, room) and not any(
            within(imported, r) and r != room and r not in SEALED for r in ROOMS if within(r, room)
        )
        allowed = own or any(within(imported, a) for a in ROOMS[room]) or _core_of_own_room(room, imported)
        return "" if allowed else f"{room} must not know {imported}"
    if package in CONFINED and not any(within(module, r) for r in CONFINED[package]):
        return f"{package} is not for {room}"
    for frugal, packages in FRUGAL.items():
        if within(module, frugal) and package not in (*packages, *sys.stdlib_module_names):
            return f"{frugal} must not import {package}"
    return ""


def _core_of_own_room(room: str, imported: str) -> bool:
    return any(within(imported, sealed) and within(sealed, room) for sealed in SEALED)


def broken_arrows(root: Path) -> list[str]:
    broken = []
    for package in OURS:
        for file in sorted((root / package).rglob("*.py")):
            if "build" in file.relative_to(root).parts or file.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            module = module_name(file, root)
            for line, imported in imports(file, root):
                if reason := wrong_with(module, imported):
                    broken.append(f"{file.relative_to(root)}:{line}: {reason}")
    return broken


def test_every_import_goes_down() -> None:
    assert broken_arrows(ROOT) == []


def sub_rooms_in_circles(root: Path, package: str) -> list[str]:
    """The sub-packages and modules of a package that import each other, directly or by way of others."""
    folder = root / package.replace(".", "/")
    arrows: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        origin = module_name(file, root)[len(package) + 1 :].split(".")[0]
        targets = {name[len(package) + 1 :].split(".")[0] for _, name in imports(file, root) if within(name, package)}
        arrows.setdefault(origin, set()).update(targets - {origin, ""})

    def reached(room: str) -> set[str]:
        found: set[str] = set()
        ahead = [room]
        while ahead:
            new = arrows.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    return sorted(room for room in arrows if room and room in reached(room))


@pytest.mark.parametrize(
    "package",
    [
        "elasticdl.cluster",
        "elasticdl.frameworks.keras",
        "elasticdl.master.core",
        "elasticdl.ps",
        "elasticdl.worker",
    ],
)
def test_no_sub_rooms_form_a_circle(package: str) -> None:
    assert sub_rooms_in_circles(ROOT, package) == []


def test_a_circle_by_way_of_a_third_sub_room_is_found(tmp_path: Path) -> None:
    for name, line in (("a", "from p.b import x"), ("b", "from p.c import y"), ("c", "from p.a import z"), ("d", "")):
        folder = tmp_path / "p" / name
        folder.mkdir(parents=True)
        (folder / "m.py").write_text(line + "\n")
    assert sub_rooms_in_circles(tmp_path, "p") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("elasticdl/worker/loop.py", "from elasticdl.master.core import job"),
        ("elasticdl/worker/loop.py", "import elasticdl.ps.server.service"),
        ("elasticdl/worker/loop.py", "import tensorflow as tf"),
        ("elasticdl/master/core/job.py", "import numpy"),
        ("elasticdl/master/core/job.py", "from elasticdl.master import journal"),
        ("elasticdl/master/core/job.py", "from ..shell import Shell"),
        ("elasticdl/master/core/job.py", "from elasticdl_client.errors import JobError"),
        ("elasticdl/master/shell.py", "from elasticdl.frameworks.keras import model"),
        ("elasticdl/master/shell.py", "from elasticdl.ps import client"),
        ("elasticdl/ps/server/service.py", "def f():\n    import torch"),
        ("elasticdl/kernels/rows.py", "from elasticdl.rpc import channels"),
        ("elasticdl/master/shell.py", "from elasticdl.kernels import _native"),
        ("elasticdl/data/csv.py", "import importlib\nimportlib.import_module('elasticdl.rpc')"),
        ("elasticdl_client/main.py", "import grpc"),
        ("elasticdl_client/main.py", "import numpy as np"),
        ("elasticdl_client/main.py", "from elasticdl.rpc import channels"),
        ("elasticdl_client/progress.py", "from elasticdl.cluster.cluster import Pod"),
        ("elasticdl_preprocessing/layers.py", "from elasticdl.layers import Embedding"),
        ("model_zoo/mnist/m.py", "from elasticdl.worker import loop"),
        ("elasticdl/frameworks/keras/model.py", "import torch"),
    ],
)
def test_an_arrow_that_goes_up_is_found(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert len(broken_arrows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("elasticdl/master/shell.py", "from elasticdl.master.core import job"),
        ("elasticdl/master/shell.py", "from .core.job import Job"),
        ("elasticdl/master/core/job.py", "from . import events\nimport heapq"),
        ("elasticdl/master/core/job.py", "from elasticdl.protocol import Shard"),
        ("elasticdl/worker/loop.py", "from elasticdl.ps.client import Client\nimport numpy"),
        ("elasticdl/ps/wire.py", "from elasticdl.kernels import _native"),
        ("elasticdl/worker/__main__.py", "from elasticdl.frameworks.keras.adapter import KerasFramework"),
        ("elasticdl/frameworks/keras/model.py", "import keras\nfrom elasticdl.layers import Embedding"),
        ("elasticdl_client/main.py", "import yaml\nfrom elasticdl_client.kubernetes import pods"),
        ("elasticdl/cluster/kubernetes/adapter.py", "from elasticdl_client.kubernetes import pods\nimport kubernetes"),
        ("model_zoo/mnist/m.py", "import keras\nfrom elasticdl.layers import Embedding"),
    ],
)
def test_an_arrow_that_goes_down_is_let_through(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert broken_arrows(tmp_path) == []
