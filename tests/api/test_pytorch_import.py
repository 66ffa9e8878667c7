"""The garbage collector at the import of `elasticdl.api.pytorch` and at the exit of a script."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOG = """
class Log:
    def __init__(self):
        self.write_line = self.write  # a cycle
        self.file = open(1, "w", closefd=False)
    def write(self, line):
        self.file.write(line)

"""
_SCRIPT = """
import gc, io, sys
import torch
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")  # the first one is left without a file
early_log = Log()
early_log.write_line("of before the import\\n")
collections = []
count = lambda phase, info: collections.append(phase)
gc.callbacks.append(count)
import elasticdl.api.pytorch
gc.callbacks.remove(count)
imported = set(sys.modules)
model = torch.nn.Linear(1, 1)
torch.optim.SGD(model.parameters(), lr=0.1)
new = {name for name in set(sys.modules) - imported if name.startswith("torch._dynamo")}
print(len(collections) < 10, gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()), new)

log = Log()
log.write_line("written at the exit\\n")
"""


def test_collections_pass_over_imports_and_still_find_what_the_script_makes() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _LOG + _SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    first, *lines = run.stdout.splitlines()
    assert first == "True True True set()", run.stdout  # some before the import turns them off, else hundreds
    assert sorted(lines) == ["of before the import", "written at the exit"]
    assert run.stderr == ""


_FINALIZED = """
import io, os, sys
import torch

class Ended:
    __slots__ = ("itself",)
    def __del__(self, write=os.write):
        write(1, b"ended")

class Cycle:
    def __init__(self, held):
        self.itself, self.held = self, held

def steps(write=os.write):
    try:
        yield
    finally:
        write(1, b"ended")

kind = sys.argv[1]
if kind == "object":
    early = Ended()
    early.itself = early
elif kind == "generator":
    early = Cycle(steps())
    next(early.held)
elif kind == "buffer":
    early = Cycle(io.BytesIO())
import elasticdl.api.pytorch
if kind in ("nothing", "buffer"):
    import atexit, gc
    atexit._run_exitfuncs()
    if gc.get_freeze_count() > 100_000:
        os.write(1, b"still frozen")
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("object", "ended"), ("generator", "ended"), ("nothing", "still frozen"), ("buffer", "still frozen")],
)
def test_what_a_script_makes_before_the_import_is_finalized_as_without_it(kind: str, expected: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FINALIZED, kind], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout == expected, run.stderr
