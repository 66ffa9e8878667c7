"""``make zoo``: trains every model of the zoo on this machine and prints how good each has become.

python -m tests.zoo [MODULE …] [--directory=build/zoo] [--estimator_python=PYTHON]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from elasticdl_client.job_status import JobStatus
from tests.zoo.entries import ENTRIES, Entry
from tests.zoo.training import Outcome, make_data, train

_SAID_EVERY_S = 15.0


class Progress:
    """One line that changes on a terminal; elsewhere a line now and then."""

    def __init__(self, heading: str) -> None:
        self._heading = heading
        self._last = time.monotonic()

    def __call__(self, status: JobStatus) -> None:
        on_terminal = sys.stdout.isatty()
        if not on_terminal and time.monotonic() - self._last < _SAID_EVERY_S:
            return
        self._last = time.monotonic()
        share = status.records_done / status.records_total if status.records_total else 0.0
        loss = "" if status.loss is None else f", loss {status.loss:.3f}"
        line = f"{self._heading}: {share:4.0%}, {status.records_per_second:,.0f} records/s{loss}"
        print(f"\r\033[K{line}" if on_terminal else line, end="" if on_terminal else "\n", flush=True)

    def end(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)


def verdict(entry: Entry, outcome: Outcome) -> tuple[bool, str]:
    """Whether a model is as good as it should be, and its line in the table."""
    metric, least = entry.quality
    value = outcome.metrics.get(metric)
    good = outcome.exit_code == 0 and value is not None and value >= least
    shown = f"exit code {outcome.exit_code}" if value is None else f"{metric} {value:.4f}"
    return good, f"{'ok' if good else 'FAILED':<7} {entry.module:<32} {shown:<17} ≥ {least:<5} {outcome.seconds:6.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Trains the model zoo on this machine.")
    parser.add_argument("modules", nargs="*", choices=[[], *(entry.module for entry in ENTRIES)], metavar="MODULE")
    parser.add_argument("--directory", type=Path, default=Path("build/zoo"))
    parser.add_argument("--estimator_python", default="", help="a Python with TensorFlow 2.15; without: no Estimators")
    options = parser.parse_args()
    chosen = [entry for entry in ENTRIES if not options.modules or entry.module in options.modules]
    directory = options.directory.resolve()
    lines: list[str] = []
    all_good = True
    began = time.monotonic()
    for number, entry in enumerate(chosen, 1):
        heading = f"[{number}/{len(chosen)}] {entry.module}"
        if not entry.available() or (entry.estimator and not options.estimator_python):
            why = "its data is not here" if not entry.available() else "no --estimator_python"
            lines.append(f"skipped {entry.module:<32} {why}")
            continue
        print(heading, flush=True)
        (directory / "data").mkdir(parents=True, exist_ok=True)
        make_data(entry, directory / "data")
        job_dir = directory / "jobs" / entry.module
        shutil.rmtree(job_dir, ignore_errors=True)
        progress = Progress(heading)
        python = options.estimator_python if entry.estimator else sys.executable
        outcome = train(entry, directory / "data", job_dir, python, progress)
        progress.end()
        good, line = verdict(entry, outcome)
        if not good:
            print(outcome.log, file=sys.stderr)
        print(line, flush=True)
        all_good &= good
        lines.append(line)
    print(f"\nThe zoo in {(time.monotonic() - began) / 60:.0f} minutes; logs are in {directory}/jobs")
    print("\n".join(lines))
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
