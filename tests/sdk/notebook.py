"""Runs the code cells of a notebook in IPython, as a kernel does, and prints what the cells display as JSON.

python -m tests.sdk.notebook FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import RichOutput, capture_output


def main(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    shell = InteractiveShell.instance()
    shell.kernel = True  # by which the widget knows that it is in a notebook
    found = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        with capture_output() as output:
            done = shell.run_cell("".join(cell["source"]))
            done.raise_error()
        shown: list[RichOutput] = output.outputs
        found.append({"printed": output.stdout, "shown": [one.data for one in shown], "value": repr(done.result)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
