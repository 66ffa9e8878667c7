"""Shows what the engine says: as it says it, or, on a terminal, step by step with the last lines of the current one.

`read_messages`: messages of Docker Engine while it builds, pulls or pushes, as lines, transfers and failures.

The engine sends JSON objects: text in fragments, the state of layers again and again, and at most one error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

_TAIL = 6  # lines shown of the current step
_UNITS = ("B", "kB", "MB", "GB", "TB")


class BuildDisplay(Protocol):
    """Three verbs."""

    def show(self, message: Message) -> None:
        """Show a message of the engine; failures are left to the raised error."""
        ...

    def succeed(self) -> None:
        """Show the success of the build; this is the last call."""
        ...

    def fail(self) -> None:
        """Show that the current step failed; its output stays on the screen. This is the last call."""
        ...


@contextmanager
def shown(stream: TextIO) -> Iterator[BuildDisplay]:
    """Yield the display for a stream: steps on a terminal, else the engine's lines; an exception shows a failure."""
    display: BuildDisplay = StepDisplay(stream) if stream.isatty() else LineDisplay(stream)
    try:
        yield display
    except BaseException:
        display.fail()
        raise
    display.succeed()


def size_text(size_bytes: float) -> str:
    """In decimal units, as docker has them."""
    unit = 0
    while size_bytes >= 999.5 and unit < len(_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    return f"{size_bytes:.3g} {_UNITS[unit]}"


class Transfers:
    """The layers of a pull or push."""

    def __init__(self) -> None:
        self._layers: dict[str, Transfer] = {}

    def update(self, transfer: Transfer) -> bool:
        """Take a layer's newest state; return whether more than its size has changed."""
        before = self._layers.get(transfer.layer)
        if before is not None and not transfer.total_bytes:  # the engine leaves out the size once a layer is there
            done = before.total_bytes
            self._layers[transfer.layer] = Transfer(transfer.layer, transfer.state, done, done)
        else:
            self._layers[transfer.layer] = transfer
        return before is None or before.state != transfer.state

    def __len__(self) -> int:
        return len(self._layers)

    def __str__(self) -> str:
        layers = list(self._layers.values())
        done = sum(layer.done_bytes for layer in layers)
        total = sum(layer.total_bytes for layer in layers)
        sizes = f", {size_text(done)} of {size_text(total)}" if total else ""
        return f"{len(layers)} layers{sizes}"


class LineDisplay:
    """The engine's own lines; a transfer only when a layer comes to another state."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._transfers = Transfers()

    def show(self, message: Message) -> None:
        if isinstance(message, Line):
            print(message.text, file=self._stream, flush=True)
        elif isinstance(message, Transfer) and self._transfers.update(message):
            print(f"{message.layer}: {message.state}", file=self._stream, flush=True)

    def succeed(self) -> None:
        """Everything is on the screen already."""

    def fail(self) -> None:
        """Everything is on the screen already."""


class StepDisplay:
    """One line for each step that is done; below, the current one with its last lines, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = Console(file=stream, highlight=False, emoji=False)
        self._step: BuildStep | None = None
        self._is_cached = False
        self._began_at = time.monotonic()
        self._said: list[str] = []
        self._transfers = Transfers()
        self._spinner = Spinner("dots")
        self._live = Live(console=self._console, refresh_per_second=8, transient=True, get_renderable=self._current)
        self._live.start()

    def show(self, message: Message) -> None:
        if isinstance(message, Transfer):
            self._transfers.update(message)
        elif isinstance(message, Line):
            step = step_of(message.text)
            if step is not None:
                self._finish("✓", "green")
                self._step = step
            elif is_cache_note(message.text):
                self._is_cached = True
            elif not is_bookkeeping(message.text):
                self._said.append(message.text)

    def succeed(self) -> None:
        self._finish("✓", "green")
        self._live.stop()

    def fail(self) -> None:
        said = self._said if self._step else []
        self._finish("✗", "red")
        for line in said:
            self._console.print(line, markup=False)
        self._live.stop()

    def _finish(self, mark: str, colour: str) -> None:
        from rich.text import Text

        if self._step is None:
            for line in self._said:
                self._console.print(line, markup=False)
        else:
            seconds = time.monotonic() - self._began_at
            time_text = "cached" if self._is_cached else f"{seconds:.1f} s" if seconds >= 0.1 else ""
            step = Text(_text(self._step))
            step.truncate(max(20, self._console.width - len(time_text) - 5), overflow="ellipsis")
            self._console.print(Text.assemble((mark, colour), " ", step, "  ", (time_text, "dim")))
        self._step, self._is_cached, self._began_at = None, False, time.monotonic()
        self._said = []
        self._transfers = Transfers()

    def _current(self) -> Any:
        """Called by rich's thread, too: reads each field once, and changes none but the spinner."""
        from rich.console import Group
        from rich.text import Text

        head, transfers = _text(self._step) if self._step else "working", self._transfers
        if len(transfers):
            head += f"  ({transfers})"
        seconds = time.monotonic() - self._began_at
        self._spinner.text = Text(f"{head}  {seconds:.0f} s", no_wrap=True, overflow="ellipsis")
        tail = [Text(f"    {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in self._said[-_TAIL:]]
        return Group(self._spinner, *tail)


def _text(step: BuildStep) -> str:
    return f"{step.number:>2}/{step.total} {step.instruction}"


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


def read_messages(messages: Iterable[Mapping[str, Any]]) -> Iterator[Message]:
    """Group messages that belong together; ignore those that are no texts, transfers or errors."""
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
    """Return a line as a terminal finally shows it: a carriage return starts it again."""
    return Line(_CONTROL.sub("", text.rstrip("\r").rpartition("\r")[2]).rstrip())


@dataclass(frozen=True, slots=True)
class BuildStep:
    """A line of the Dockerfile, as the builder announces it."""

    number: int
    total: int
    instruction: str


_STEP = re.compile(r"Step (\d+)/(\d+) : (.*)")


def step_of(text: str) -> BuildStep | None:
    """Return the step that a line announces."""
    found = _STEP.fullmatch(text)
    return BuildStep(int(found[1]), int(found[2]), re.sub(r"\s+", " ", found[3])) if found else None


def is_cache_note(text: str) -> bool:
    """Return whether a line says that the result of the step was cached."""
    return text.strip() == "---> Using cache"


def is_bookkeeping(text: str) -> bool:
    """Return whether a line is about the builder's own containers and images alone."""
    return bool(re.match(r" ---> |Removing intermediate container |Successfully (?:built|tagged) |$", text))
