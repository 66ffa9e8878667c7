"""Small languages inside flag values: ``k=v;k2=v2``, ``KEY=value,KEY2=value`` and sizes such as ``2MB``.

Nothing in here evaluates code: a value is a Python literal, or it is a string.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import get_close_matches

from elasticdl_client.choices import TrackerName
from elasticdl_client.errors import FlagError

_ENV_SEPARATOR = re.compile(r",(?=\s*[A-Za-z_][A-Za-z0-9_.-]*=)")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])i?)?B?", re.IGNORECASE)
_OPENING = ("'", '"', "[", "(", "{")  # of a Python literal that may hold a semicolon
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_params(flag_name: str, text: str) -> dict[str, object]:
    """``"units=10;name=wide;sizes=[1,2]"`` to ``{"units": 10, "name": "wide", "sizes": [1, 2]}``.

    A semicolon in a quoted value, ``delimiter=";"``, separates nothing.

    Raises:
        FlagError: a part without ``=``, a name that is not a Python identifier, or a name given twice.
    """
    params: dict[str, object] = {}
    for part in split_params(text):
        if not part.strip():
            continue
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise FlagError(
                f"--{flag_name}: '{part.strip()}' is not of the form name=value.",
                f'Write --{flag_name}="name=value;name2=value2"; values are Python literals, or else strings.',
            )
        if key in params:
            raise FlagError(f"--{flag_name}: '{key}' is given twice.", "Give it once.")
        params[key] = parse_literal(value.strip())
    return params


def split_params(text: str) -> Iterator[str]:
    """Yield the parts between semicolons; a semicolon inside a Python literal separates nothing."""
    pieces = text.split(";")
    while pieces:
        part, count = pieces[0], 1
        if part.partition("=")[2].lstrip().startswith(_OPENING):
            joined = (";".join(pieces[:end]) for end in range(1, len(pieces) + 1))
            whole = (end for end, one in enumerate(joined, 1) if _is_literal(one.partition("=")[2].strip()))
            count = next(whole, 1)
        yield ";".join(pieces[:count])
        del pieces[:count]


def _is_literal(text: str) -> bool:
    return parse_literal(text) is not text


def parse_literal(text: str) -> object:
    """Return the value of a Python literal, or the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def parse_envs(text: str) -> dict[str, str]:
    """``"a=1,2,b=3"`` to ``{"a": "1,2", "b": "3"}``: a comma separates only where ``NAME=`` follows.

    Raises:
        FlagError: no name before the first ``=``, or a name given twice.
    """
    envs: dict[str, str] = {}
    for number, part in enumerate(_ENV_SEPARATOR.split(text) if text.strip() else [], 1):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not _ENV_NAME.fullmatch(name):
            what = f"--envs: part {number} is not of the form NAME=value."  # never its text, which may be a password
            raise FlagError(what, "Write --envs=NAME=value,NAME2=value2.")
        if name in envs:
            raise FlagError(f"--envs: '{name}' is given twice.", "Give it once.")
        envs[name] = value
    return envs


def parse_trackers(text: str) -> tuple[TrackerName, ...]:
    """``"mlflow,wandb"`` to the names of trackers.

    Raises:
        FlagError: there is no such tracker, or one is named twice.
    """
    names = [name.strip() for name in text.split(",")] if text else []
    known = [name.value for name in TrackerName]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise FlagError(
                f"--track: '{name}' is none of {', '.join(known)}.",
                f"Did you mean {near[0]}?" if near else "Name one or several of them, with commas between.",
            )
        if names.count(name) > 1:
            raise FlagError(f"--track: {name} is named twice.", "Name it once.")
    return tuple(TrackerName(name) for name in names)


def parse_size(flag_name: str, text: str) -> int:
    """``"2MB"`` to 2097152: bytes, or with a unit, each 1,024 of the one before: B, KB, MB, GB, TB.

    Raises:
        FlagError: not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise FlagError(
            f"--{flag_name}: '{text}' is not a size.",
            f"Write a number of bytes, or one with a unit: --{flag_name}=2MB, 512KB, 1GB or 0.",
        )
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])
