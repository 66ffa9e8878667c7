"""Record a job that loses a worker, in two terminals, and draw them as one animated SVG.

    python -m scripts.terminal_picture [--output=docs/kill_a_worker.svg]

Runs `elasticdl train` on this machine in a pseudo-terminal, kills a worker from a shell in another one, and writes
what both printed to build/kill_a_worker.cast (JSON lines of seconds, terminal, text).  With --recording=CAST it draws
that and runs nothing.  The wait before the first steps is cut, nothing else.  Needs pyte:
the extra `docs`.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import ioctl
from html import escape
from pathlib import Path
from typing import Any

COLUMNS = 110
ROWS = {"train": 13, "shell": 8}  # of each terminal
TITLES = {"train": "terminal 1: a job of three workers", "shell": "terminal 2"}
JOB = "digits"
FRAME_S = 0.2
HOLD_S = 5.0  # the last frame, before the picture starts again
CHARACTER, LINE, MARGIN, BAR = 8.4, 18, 14, 30  # pixels
COLORS = {
    "default": "#d6dde6", "black": "#4a5462", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341",
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#f0f6fc",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a terminal at a moment."""

    at_s: float
    terminal: str
    text: str


class Terminal:
    """A process in a pseudo-terminal; its output goes to a list with the time of each piece."""

    def __init__(self, name: str, argv: list[str], outputs: list[Output], environment: dict[str, str]) -> None:
        self._controller, terminal = pty.openpty()
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS[name], COLUMNS, 0, 0))
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS[name])}
        self.process = subprocess.Popen(
            argv, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**os.environ, **environment, **size, "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(terminal)
        self._name = name
        self._outputs = outputs
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._controller, 65536)
            except OSError:  # the process has closed its end
                return
            self._outputs.append(Output(time.monotonic(), self._name, data.decode(errors="replace")))

    def type(self, line: str) -> None:
        """Send a line key by key, at the speed of typing."""
        for key in line + "\r":
            os.write(self._controller, key.encode())
            time.sleep(0.03)

    def end(self) -> int:
        code = self.process.wait()
        self._reader.join(5)
        return code


def record(directory: Path) -> list[Output]:
    """Run the job, kill worker 1, and return the output of both terminals, from the first steps on."""
    from elasticdl.cluster.local.adapter import ProcessCluster
    from elasticdl_client.job_status import JobStatus

    home, data = directory / "home", directory / "data"
    home.mkdir()
    subprocess.run([sys.executable, "scripts/gen_dataset.py", "digits", "--output", str(data)], check=True)
    job_dir = home / ".elasticdl" / "jobs" / JOB
    environment = {
        "HOME": str(home), "TF_CPP_MIN_LOG_LEVEL": "3", "PS1": "$ ", "KUBECONFIG": os.devnull,
        "PATH": f"{_command(directory)}{os.pathsep}{os.environ['PATH']}", "BASH_SILENCE_DEPRECATION_WARNING": "1",
    }  # fmt: skip
    outputs: list[Output] = []
    job = Terminal("train", [
        "elasticdl", "train", "--runtime=local", f"--job_name={JOB}", "--distribution_strategy=AllReduceStrategy",
        "--model_zoo=model_zoo", "--model_def=digits.digits_functional.custom_model", f"--training_data={data}/train",
        "--num_workers=3", "--min_workers=2", "--minibatch_size=4", "--num_epochs=20", "--num_minibatches_per_task=8",
    ], outputs, environment)  # fmt: skip
    shell = Terminal("shell", ["bash", "--norc", "--noprofile", "-i"], outputs, environment)

    def status() -> JobStatus | None:
        try:
            return JobStatus.from_json((job_dir / "status.json").read_text())
        except (OSError, ValueError):
            return None

    def until(epoch: int, members: int) -> None:
        while job.process.poll() is None:
            now = status()
            if now is not None and now.epoch >= epoch and len(now.world) == members:
                return
            time.sleep(0.05)
        raise SystemExit("the job ended too early: " + "".join(out.text for out in outputs if out.terminal == "train"))

    until(1, 3)
    shell.type(f"elasticdl logs {JOB} -f | grep -o --line-buffered 'Group.*' &")
    until(2, 3)
    began = time.monotonic()
    time.sleep(2)
    agent = json.loads((job_dir / "agent.json").read_text())
    victim = next(pod.pid for pod in ProcessCluster(agent["socket"]).list() if pod.name.endswith("worker-1"))
    shell.type(f"kill -9 {victim}    # worker-1")
    code = job.end()
    time.sleep(0.5)
    shell.process.send_signal(signal.SIGHUP)
    if code != 0:
        raise SystemExit(f"the job ended with {code}")
    return list(_cut(outputs, began))


def _command(directory: Path) -> Path:
    """Make a directory with a command `elasticdl` for the current Python; return its path."""
    command = directory / "bin" / "elasticdl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{Path.cwd()}" exec {sys.executable} -m elasticdl_client.main "$@"\n')
    command.chmod(0o755)
    return command.parent.resolve()


def _cut(outputs: list[Output], began: float) -> Iterator[Output]:
    """Shift the times so that they start at `began`; earlier output gets the time 0."""
    for output in outputs:
        yield Output(round(max(0.0, output.at_s - began), 3), output.terminal, output.text)


def write(outputs: list[Output], path: Path) -> None:
    lines = (json.dumps([output.at_s, output.terminal, output.text], ensure_ascii=False) for output in outputs)
    path.write_text("\n".join(lines) + "\n")


def read(path: Path) -> list[Output]:
    """Read a file of `write`."""
    return [Output(*json.loads(line)) for line in path.read_text().splitlines()]


Run = tuple[str, str, bool]  # text, color, bold
Row = tuple[Run, ...]


def frames(outputs: list[Output], terminal: str, num_frames: int) -> list[list[Row]]:
    """Return the rows of a terminal at each multiple of FRAME_S."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS[terminal])
    stream = pyte.Stream(screen)
    waiting = [output for output in outputs if output.terminal == terminal]
    found = []
    for frame in range(num_frames):
        while waiting and waiting[0].at_s <= frame * FRAME_S:
            stream.feed(waiting.pop(0).text)
        found.append([_row(screen.buffer[y]) for y in range(ROWS[terminal])])
    return found


def _row(cells: Any) -> Row:
    runs: list[Run] = []
    for x in range(COLUMNS):
        cell = cells[x]
        color = cell.fg if cell.fg in COLORS else f"#{cell.fg}"
        looks = (COLORS.get(color, color), cell.bold)
        if runs and runs[-1][1:] == looks:
            runs[-1] = (runs[-1][0] + cell.data, *looks)
        else:
            runs.append((cell.data, *looks))
    while runs and not runs[-1][0].strip():
        runs.pop()
    if runs:
        runs[-1] = (runs[-1][0].rstrip(), *runs[-1][1:])
    return tuple(runs)


def draw(outputs: list[Output], path: Path) -> None:
    """Draw the windows one below the other; an animation per text shows it for its frames."""
    end_s = outputs[-1].at_s
    num_frames = int(end_s / FRAME_S) + 2
    total_s = num_frames * FRAME_S + HOLD_S
    width = round(COLUMNS * CHARACTER + 2 * MARGIN)
    body: list[str] = []
    rules: list[str] = []
    top = 0
    for terminal, title in TITLES.items():
        height = BAR + ROWS[terminal] * LINE + MARGIN
        body.append(f'<rect y="{top}" width="{width}" height="{height}" rx="8" fill="#161b22"/>')
        dots = zip((18, 36, 54), ("#ff5f57", "#febc2e", "#28c840"), strict=True)
        body += [f'<circle cx="{x}" cy="{top + 15}" r="5" fill="{color}"/>' for x, color in dots]
        body.append(f'<text x="{width / 2:.0f}" y="{top + 20}" fill="#8b949e" text-anchor="middle">{title}</text>')
        shown = frames(outputs, terminal, num_frames)
        for y in range(ROWS[terminal]):
            for row, first, last in _spans([frame[y] for frame in shown]):
                if not row:
                    continue
                style = ""
                if first or last < num_frames:
                    name = f"a{len(rules)}"
                    stays = last == num_frames
                    rules.append(_rule(name, first * FRAME_S / total_s, last * FRAME_S / total_s, stays, total_s))
                    style = f' class="{name} {"e" if stays else "s"}"'
                texts = "".join(_tspan(*run) for run in row)
                body.append(f'<text x="{MARGIN}" y="{top + BAR + (y + 1) * LINE - 4}"{style}>{texts}</text>')
        top += height + 8
    still = "@media(prefers-reduced-motion:reduce){.s,.e{animation:none!important}}"
    height = top - 8
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        "<title>A job of three workers: one is killed, the others train on within a fraction of a second</title>\n"
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}"
        f".s{{visibility:hidden}}{still}\n" + "\n".join(rules) + "</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _tspan(text: str, color: str, bold: bool) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<tspan fill="{color}"{weight}>{escape(text)}</tspan>'


def _spans(rows: list[Row]) -> Iterator[tuple[Row, int, int]]:
    """Yield each row with the first frame that shows it, and the first frame after it."""
    first = 0
    for k in range(1, len(rows) + 1):
        if k == len(rows) or rows[k] != rows[first]:
            yield rows[first], first, k
            first = k


def _rule(name: str, first: float, last: float, stays: bool, total_s: float) -> str:
    """Return the CSS animation that shows a text from one fraction of the time to another."""
    hidden, shown = "{visibility:hidden}", "{visibility:visible}"
    steps = [f"0%{hidden if first else shown}"]
    steps += [f"{first:.3%}{shown}"] if first else []
    steps += [] if stays else [f"{last:.3%}{hidden}"]
    steps.append(f"to{shown if stays else hidden}")
    return f"@keyframes {name}{{{''.join(steps)}}}.{name}{{animation:{name} {total_s:.1f}s step-end infinite}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/kill_a_worker.svg"))
    parser.add_argument("--recording", type=Path, help="of an earlier run, to be drawn again")
    given = parser.parse_args()
    if given.recording:
        outputs = read(given.recording)
    else:
        with tempfile.TemporaryDirectory(prefix="demo") as directory:
            outputs = record(Path(directory))
        write(outputs, Path("build", given.output.with_suffix(".cast").name))
    draw(outputs, given.output)


if __name__ == "__main__":
    main()
