"""Writes a trained model: its values, and where PyTorch can, a program that runs without the user's code.

`model.pt` is the module's state_dict, for `torch.load(…, weights_only=True)`; `model.pt2` a program of `torch.export`
for any batch size; where a model cannot be exported so, `model.torchscript.pt` is what `torch.jit.load` reads.
"""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from elasticdl.frameworks.torch.arguments import ForwardArguments
from elasticdl.frameworks.torch.model import BuiltModule
from elasticdl.frameworks.torch.samples import mapped

_log = logging.getLogger("elasticdl.torch")
STATE_FILE, PROGRAM_FILE, SCRIPT_FILE = "model.pt", "model.pt2", "model.torchscript.pt"
_MOST_SAMPLES = 2**31 - 1  # PyTorch 2.6 refuses an open end where a model stacks: the size might be the largest int64
_NUM_SAMPLES = 2  # a program made with one sample would be for one alone


def export_model(path: str, built: BuiltModule, features: Any) -> None:
    """Writes to a directory, which is made.

    Args:
        features: an example of a minibatch's, on any device; None: there is none.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    module = copy.deepcopy(built.plain).cpu().eval()
    torch.save(module.state_dict(), directory / STATE_FILE)
    reason = "no minibatch has been seen here" if features is None else _write_program(directory, module, features)
    if not reason:
        return
    _log.info("torch.export cannot export the model: %s", reason)
    reason = _write_script(directory, module)
    if reason:
        _log.warning("Only the model's values are exported: torch.jit.script cannot compile it either: %s", reason)


def _write_program(directory: Path, module: Any, features: Any) -> str:
    """Why it cannot be written; empty if it is."""
    batch = torch.export.Dim("batch", min=1, max=_MOST_SAMPLES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = mapped(lambda part: _two_of(part.detach().cpu()), ForwardArguments(module).of(features))
            dynamic: Any = mapped(lambda part: {0: batch}, kwargs or args)
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
            torch.export.save(program, directory / PROGRAM_FILE)
    except Exception as error:  # noqa: BLE001  whatever it says of the user's model
        (directory / PROGRAM_FILE).unlink(missing_ok=True)
        return _first_line(error)
    return ""


def _write_script(directory: Path, module: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(module).save(str(directory / SCRIPT_FILE))
    except Exception as error:  # noqa: BLE001  whatever it says of the user's model
        return _first_line(error)
    return ""


def _two_of(part: Any) -> Any:
    few = part[:_NUM_SAMPLES]  # they are written, too
    return few if len(few) == _NUM_SAMPLES else few.repeat(_NUM_SAMPLES, *[1] * (few.dim() - 1))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
