"""The messages of Docker Engine while it builds, pulls or pushes, as lines, transfers and failures.

The engine sends JSON objects: text in fragments, the state of layers again and again, and at most one error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, without its end."""

    text: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """How far a layer is; the sizes are 0 where the engine names none."""

    layer: str
    state: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The last thing that the engine says."""

    text: str


Message = Line | Transfer | Failure

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read(messages: Iterable[Mapping[str, Any]]) -> Iterator[Message]:
    """Puts together what belongs together; what is neither text, transfer nor error is left out."""
    rest = ""
    for message in messages:
        if "stream" in message:
            *lines, rest = (rest + message["stream"]).split("\n")
            yield from (_line(text) for text in lines)
            continue
        if "error" not in message and "status" not in message:
            continue
        if rest:
            yield _line(rest)
            rest = ""
        if "error" in message:
            yield Failure(str(message["error"]).strip())
        elif message.get("id") and ("progressDetail" in message or "progress" in message):
            sizes = message.get("progressDetail") or {}
            state = str(message["status"])
            yield Transfer(str(message["id"]), state, int(sizes.get("current") or 0), int(sizes.get("total") or 0))
        else:
            name = f"{message['id']}: " if message.get("id") else ""
            yield _line(f"{name}{message['status']}")
    if rest:
        yield _line(rest)


def _line(text: str) -> Line:
    """A line as a terminal would have it in the end: a carriage return starts it anew."""
    return Line(_CONTROL.sub("", text.rstrip("\r").rpartition("\r")[2]).rstrip())


@dataclass(frozen=True, slots=True)
class BuildStep:
    """A line of the Dockerfile, as the builder announces it."""

    number: int
    total: int
    instruction: str


_STEP = re.compile(r"Step (\d+)/(\d+) : (.*)")


def step_of(text: str) -> BuildStep | None:
    """The step that a line announces."""
    found = _STEP.fullmatch(text)
    return BuildStep(int(found[1]), int(found[2]), re.sub(r"\s+", " ", found[3])) if found else None


def is_cache_note(text: str) -> bool:
    """Whether a line says that the step's result was there already."""
    return text.strip() == "---> Using cache"


def is_bookkeeping(text: str) -> bool:
    """Whether a line is about the builder's own containers and images alone."""
    return bool(re.match(r" ---> |Removing intermediate container |Successfully (?:built|tagged) |$", text))
