"""The garbage collector at the import of `elasticdl.api.pytorch` and at the exit of a script."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import gc, sys
import torch
collections = []
count = lambda phase, info: collections.append(phase)
gc.callbacks.append(count)
import elasticdl.api.pytorch
gc.callbacks.remove(count)
imported = set(sys.modules)
model = torch.nn.Linear(1, 1)
torch.optim.SGD(model.parameters(), lr=0.1)
new = {name for name in set(sys.modules) - imported if name.startswith("torch._dynamo")}
print(len(collections), gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()), new)

class Log:
    def __init__(self):
        self.write_line = self.write  # a cycle
        self.file = open(1, "w", closefd=False)
    def write(self, line):
        self.file.write(line)

log = Log()
log.write_line("written at the exit")
"""


def test_collections_pass_over_imports_and_still_find_what_the_script_makes() -> None:
    run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines() == ["0 True True set()", "written at the exit"], run.stderr
