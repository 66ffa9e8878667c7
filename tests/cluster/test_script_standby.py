"""A script that imports PyTorch first is forked from a standby, and cannot tell."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_agent import LocalAgent, Observer, Wire

import elasticdl
from elasticdl.cluster.cluster import PodPhase, PodSpec
from elasticdl.cluster.local.script import COMMAND_MODULE, Script
from elasticdl.protocol import Role
from elasticdl_client.choices import RUN_MODULE

REPOSITORY = Path(elasticdl.__file__).resolve().parents[1]
FACTS = '''"""What a script can see of itself."""
from __future__ import annotations

import atexit, gc, json, locale, multiprocessing, os, signal, sys, threading
import numpy as np
import torch

NAMES = {name: repr(value).partition(" at 0x")[0] for name, value in globals().items()}


def in_child(queue):
    queue.put((__name__, NAMES["__name__"], sys.argv, os.getcwd()))


def facts():
    found = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=in_child, args=(queue,))
        child.start()
        found[method] = queue.get()
        child.join()
    found["fds"] = sorted(os.listdir("/proc/self/fd"))
    found["names"] = NAMES
    found["argv"], found["orig_argv"], found["path"] = sys.argv, sys.orig_argv, sys.path
    found["flags"] = repr(sys.flags)
    found["xoptions"], found["warnings"], found["executable"] = sys._xoptions, sys.warnoptions, sys.executable
    found["env"] = {name: value for name, value in os.environ.items() if name != "PLAIN"}
    handlers = [str(signal.getsignal(number)) for number in range(1, signal.NSIG)]
    found["signals"] = [handler.partition(" at 0x")[0] for handler in handlers]
    found["mask"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    found["cwd"], found["umask"], found["nice"] = os.getcwd(), os.umask(0o22), os.nice(0)
    found["group"], found["session"] = os.getpgid(0) == os.getpid(), os.getsid(0)
    found["threads"] = [thread.name for thread in threading.enumerate()]
    found["is_main"] = threading.current_thread() is threading.main_thread()
    found["native"] = threading.get_native_id() == threading.main_thread().native_id == os.getpid()
    found["stdin"], found["stdout"] = sys.stdin.read(), repr(sys.stdout)
    found["modes"] = [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.errors, sys.stdout.encoding]
    found["gc"], found["locale"] = gc.isenabled(), locale.getlocale()
    found["command"] = open("/proc/self/cmdline").read().replace("\\0", " ").split()
    found["comm"] = open("/proc/self/comm").read()
    return found


if __name__ == "__main__":
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
    is_forked = sys._getframe().f_back is not None
    print(json.dumps([is_forked, facts(), float(np.random.rand()), torch.IMPORTS]))
    sys.exit(int(sys.argv[1]))
'''
SCRIPTS = {
    "facts": FACTS,
    "torch": """
import multiprocessing, os, random
from elasticdl.cluster.local.framework_import import finalize_at_exit
finalize_at_exit()  # as `elasticdl.api.pytorch` does
IMPORTS = len(os.environ)
default_generator = random.Random()
""",
    "end": "import torch\nimport atexit, gc\natexit._run_exitfuncs()\nprint(gc.get_freeze_count() > 1000)\n",
    "key": "import multiprocessing\nimport torch\nprint(multiprocessing.current_process().authkey.hex())\n",
    "draw": "import torch\nprint(torch.default_generator.random())\n",
    "raise": """
import torch
def fail():
    raise RuntimeError('the very reason')
try:
    1 / 0
except ZeroDivisionError:
    fail()
""",
    "text": "import sys\nimport torch\nsys.exit('a text')\n",
    "hook": """
import sys
import torch
sys.excepthook = lambda kind, error, frames: print(kind, error, frames.tb_lineno)
1 / 0
""",
    "interrupt": "import os, signal\nimport torch\nos.kill(os.getpid(), signal.SIGINT)\n",
    "abort": "import os\nimport torch\nos.abort()\n",
    "stay": """
import signal, sys
import torch
with open(sys.argv[1], 'w') as wire:
    wire.write('staying')
signal.pause()
""",
}


class Scripts:
    """An agent whose standby is for one of `SCRIPTS`."""

    def __init__(self, directory: Path, words: tuple[str, ...]) -> None:
        self.zoo = directory / "zoo"
        self.zoo.mkdir(parents=True)
        for name, text in SCRIPTS.items():
            (self.zoo / f"{name}.py").write_text(text)
        self._words = words
        self.agent = LocalAgent(directory)
        self.cluster = self.agent.cluster
        self.observer = Observer(self.cluster)
        self._created = 0

    def create(self, **env: str) -> str:
        name = f"w-{self._created}"
        self._created += 1
        env = {"PYTHONPATH": str(REPOSITORY), "WORKER_ID": str(self._created), **env}
        command = (sys.executable, *RUN_MODULE, COMMAND_MODULE, str(self.zoo), *self._words)
        self.cluster.create(PodSpec(name, Role.WORKER, 0, command, env=env))
        return name

    def run(self, **env: str) -> tuple[int | None, str]:
        """Runs a pod to its end; its exit code and what it has printed."""
        name = self.create(**env)
        return self.observer.ended_pod(name).exit_code, self.cluster.logs(name)

    def stop(self) -> None:
        self.agent.stop()


@pytest.fixture
def scripts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scripts]:
    found = Scripts(tmp_path / "agent", request.param)
    yield found
    found.stop()


@pytest.mark.parametrize("scripts", [("python", "-u", "./facts.py", "3", "an argument")], indirect=True)
def test_a_forked_script_finds_itself_as_a_plain_one_would(scripts: Scripts) -> None:
    code, printed = scripts.run(WORKER_ID="7")
    plain_code, plainly_printed = scripts.run(WORKER_ID="7", PLAIN="1")
    assert code == plain_code
    first, *lines = printed.splitlines()
    plain_first, *plain_lines = plainly_printed.splitlines()
    is_forked, facts, drawn, _ = json.loads(first)
    is_plain_forked, plain_facts, plainly_drawn, _ = json.loads(plain_first)
    assert (is_forked, is_plain_forked) == (True, False)
    assert lines == plain_lines == ["thread", "at exit"]
    for name, value in plain_facts.items():
        assert facts[name] == value, name
    assert drawn != plainly_drawn


@pytest.mark.parametrize("scripts", [("python", "draw.py")], indirect=True)
def test_each_forked_script_draws_its_own_numbers_of_pytorch(scripts: Scripts) -> None:
    """As PyTorch seeds its generator at random when it is imported."""
    (code, drawn), (other_code, drawn_by_other) = scripts.run(), scripts.run()
    assert code == other_code == 0
    assert drawn != drawn_by_other


@pytest.mark.parametrize("scripts", [("python", "key.py")], indirect=True)
def test_each_forked_script_has_its_own_key_of_multiprocessing(scripts: Scripts) -> None:
    """It opens the managers and listeners of a process to others of its user."""
    (code, key), (other_code, other_key) = scripts.run(), scripts.run()
    assert code == other_code == 0
    assert len(key) == len(other_key) > 2 * 16
    assert key != other_key


@pytest.mark.parametrize("scripts", [("python", "end.py")], indirect=True)
def test_collections_at_the_end_of_a_forked_script_skip_what_its_standby_has_imported(scripts: Scripts) -> None:
    """Passing over all of PyTorch, whose memory it shares with the standby, would take it a second."""
    assert scripts.run() == (0, "True\n")


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        (("python", "raise.py"), 1),
        (("python", "text.py"), 1),
        (("python", "hook.py"), 1),
        (("python", "interrupt.py"), 128 + signal.SIGINT),
        (("python", "abort.py"), 128 + signal.SIGABRT),
    ],
    indirect=["scripts"],
)
def test_a_forked_script_ends_as_a_plain_one(scripts: Scripts, expected: int) -> None:
    code, printed = scripts.run()
    assert "started plainly" not in scripts.agent.log()
    assert (code, printed) == scripts.run(PLAIN="1")
    assert code == expected


@pytest.mark.parametrize("scripts", [("python", "stay.py", "wire")], indirect=True)
def test_a_script_that_was_changed_is_started_plainly(scripts: Scripts) -> None:
    wire = Wire(scripts.zoo / "wire")
    name = scripts.create()
    assert wire.read() == ["staying"]
    pid = scripts.observer.phase(name, PodPhase.RUNNING).pid
    os.kill(pid, signal.SIGTERM)
    assert scripts.observer.ended_pod(name).exit_code == 128 + signal.SIGTERM
    (scripts.zoo / "stay.py").write_text("import torch import\n")
    code, printed = scripts.run()
    assert code == 1
    assert "SyntaxError" in printed
    assert "standby" not in printed


def modules_of(directory: Path, text: str, *command: str, **env: str) -> tuple[str, ...]:
    (directory / "train.py").write_text(text)
    words = command or ("python", "train.py", "--lr=0.1")
    script = Script.of((sys.executable, *RUN_MODULE, COMMAND_MODULE, str(directory), *words), env)
    return script.modules if script else ()


ELASTIC = """'A script.'
import argparse
import os, numpy as np
from torch import nn
import model
from elasticdl.api.pytorch import create_elastic_controller
"""
TORCH, BOTH = ("torch",), ("torch", "elasticdl.api.pytorch")


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        (ELASTIC, BOTH),
        ("from elasticdl.api.transformers import ElasticTrainer\n", BOTH),
        (
            "from __future__ import annotations\nimport torch.nn as nn, sys\nprint()\nimport elasticdl.api.pytorch\n",
            TORCH,
        ),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", ()),
        ("import settings\nimport torch\n", ()),
        ("import tensorflow, torch\n", ()),
        ("from . import torch\n", ()),
        ("if True:\n    import torch\n", ()),
        ("import torch import\n", ()),
        ("import sys\n", ()),
        ("", ()),
    ],
)
def test_a_standby_imports_what_a_script_imports_before_it_does_anything_else(
    text: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    assert modules_of(tmp_path, text) == modules


@pytest.mark.parametrize(
    ("own", "directory"),
    [("statistics.py", ""), ("queue/__init__.py", "beside"), ("code.py", "on_path")],
)
def test_modules_of_ones_own_with_names_of_others_leave_no_standby(own: str, directory: str, tmp_path: Path) -> None:
    """Imports of PyTorch's would run them there."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "on_path").mkdir()
    where = {"": tmp_path / "zoo", "beside": tmp_path, "on_path": tmp_path / "on_path"}[directory]
    env = {"PYTHONPATH": str(tmp_path / "on_path")}
    assert modules_of(tmp_path / "zoo", ELASTIC, **env) == BOTH
    (where / own).parent.mkdir(exist_ok=True)
    (where / own).touch()
    assert modules_of(tmp_path / "zoo", ELASTIC, **env) == ()


def test_directories_with_names_of_modules_and_no_code_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "rows.csv").touch()
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "__init__.py").touch()
    assert modules_of(tmp_path, ELASTIC) == BOTH


@pytest.mark.parametrize(
    "command",
    [
        ("python", "-u", "train.py"),
        (sys.executable, "train.py"),
        (f"python3.{sys.version_info.minor}", "./train.py", "-m"),
    ],
)
def test_commands_of_this_interpreter_have_a_standby(command: tuple[str, ...], tmp_path: Path) -> None:
    assert modules_of(tmp_path, ELASTIC, *command) == BOTH


@pytest.mark.parametrize(
    "command",
    [
        ("python",),
        ("python", "-u"),
        ("python", "-X", "dev", "train.py"),
        ("python", "-uB", "train.py"),
        ("python", "-u", "-u", "train.py"),
        ("python", "-m", "train"),
        ("python", "-c", "import torch"),
        ("python", "-"),
        ("python", "."),
        ("python", "missing.py"),
        ("torchrun", "train.py"),
        ("nice", "python", "train.py"),
        ("./python", "train.py"),
        ("./train.py",),
    ],
)
def test_other_commands_have_none(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)  # of another virtual environment
    assert modules_of(tmp_path, ELASTIC, *command) == ()


@pytest.mark.parametrize(
    ("name", "modules"),
    [("PYTHONWARNINGS", ()), ("PYTHONINSPECT", ()), ("PYTHONHASHSEED", BOTH), ("PYTHON_VERSION", BOTH)],
)
def test_variables_that_change_imports_or_the_exit_leave_no_standby(
    name: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    assert modules_of(tmp_path, ELASTIC, **{name: "1"}) == modules
