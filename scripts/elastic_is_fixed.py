"""Draw the losses of 204 steps of jobs with --fixed_global_batch: one worker, four, and four that become 2, 3 and 1.

    python -m scripts.elastic_is_fixed [--output=docs/elastic_is_fixed.svg] [--directory=build/elastic_is_fixed]

Runs the six jobs, Keras and PyTorch, on this machine and prints the differences of their losses; the losses are written
next to the figure, as CSV.  With --losses=CSV it only draws these.  Needs matplotlib: the extra `dev`.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

from tests.chaos.loss_traces import BOUND, FRAMEWORKS, JOB, UP_AND_DOWN, Trace, trace

ALONE, FOUR, ELASTIC = "1 worker", "4 workers", "4 → 2 → 3 → 1 workers"
Traces = dict[str, dict[str, Trace]]  # by framework and job
_LOOKS = {ALONE: ("#1b6ca8", "-", 3.5), FOUR: ("#f2a33c", "-", 1.8), ELASTIC: ("#111111", "--", 0.9)}


def run(directory: Path) -> Traces:
    """Run all jobs, one after another."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    data = JOB.make_data(directory)
    traces: Traces = {}
    for framework in FRAMEWORKS:
        lives = {ELASTIC: (4, UP_AND_DOWN), ALONE: (1, ()), FOUR: (4, ())}
        traces[framework] = {}
        for number, (name, (num_workers, life)) in enumerate(lives.items()):
            place = directory / f"{framework}-{number}"
            traces[framework][name] = trace(framework, place, data, num_workers, life)
            print(f"{framework}, {name}: done", flush=True)
    return traces


def write(traces: Traces, path: Path) -> None:
    """Write a row for each step of each job: framework, job, members of the group, step, loss."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["framework", "job", "members", "step", "loss"])
        for framework, jobs in traces.items():
            for name, one in jobs.items():
                members = dict(one.groups)
                size = 0
                for step, loss in enumerate(one.losses, start=1):
                    size = members.get(step, size)
                    rows.writerow([framework, name, size, step, f"{loss:.9g}"])


def read(path: Path) -> Traces:
    """Read a file of `write`."""
    losses: dict[str, dict[str, list[float]]] = {}
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            framework, name, size = row["framework"], row["job"], int(row["members"])
            losses.setdefault(framework, {}).setdefault(name, []).append(float(row["loss"]))
            seen = groups.setdefault((framework, name), [])
            if not seen or seen[-1][1] != size:
                seen.append((int(row["step"]), size))
    return {
        framework: {name: Trace(tuple(found), tuple(groups[framework, name])) for name, found in jobs.items()}
        for framework, jobs in losses.items()
    }


def draw(traces: Traces, path: Path) -> None:
    """Draw the losses, and below them the differences from the job of one worker; a column for each framework."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "elastic"  # the same ids in each run
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(traces), figsize=(11, 6), sharex=True, sharey="row", squeeze=False)
    for column, (framework, jobs) in enumerate(traces.items()):
        above, below = axes[0][column], axes[1][column]
        above.set_title(f"{'PyTorch' if framework == 'torch' else 'Keras'}: BatchNorm, dropout, Adam")
        for name, (color, line, width) in _LOOKS.items():
            steps = range(1, len(jobs[name].losses) + 1)
            above.plot(steps, jobs[name].losses, line, color=color, linewidth=width, label=name)
            if name != ALONE:
                differences = [max(one, 1e-9) for one in jobs[name].differences(jobs[ALONE])]
                below.plot(steps, differences, line, color=color, linewidth=max(width, 1.0), label=name)
        below.axhline(BOUND, color="#b02a2a", linewidth=1)
        for panel in (above, below):
            panel.set_yscale("log")
            panel.grid(alpha=0.25)
        for first, size in jobs[ELASTIC].groups:
            for panel in (above, below):
                panel.axvline(first, color="#888888", linewidth=0.7, linestyle=":")
            above.text(first + 1, 0.97, f"{size}", transform=above.get_xaxis_transform(), va="top", fontsize=9)
        below.set_xlabel("step")
    axes[0][0].set_ylabel("loss of the step")
    axes[1][0].set_ylabel("relative difference from 1 worker")
    axes[0][0].legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def tell(traces: Traces) -> None:
    """Print the largest differences."""
    for framework, jobs in traces.items():
        for name in (FOUR, ELASTIC):
            differences = jobs[name].differences(jobs[ALONE])
            parts = ", ".join(
                f"{max(differences[:steps]):.1e} in {steps} steps" for steps in (20, 100, len(differences))
            )
            print(f"{framework}, {name} against {ALONE}: at most {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/elastic_is_fixed.svg"))
    parser.add_argument("--directory", type=Path, default=Path("build/elastic_is_fixed"), help="of the jobs")
    parser.add_argument("--losses", type=Path, help="CSV of an earlier run, to be drawn again")
    given = parser.parse_args()
    traces = read(given.losses) if given.losses else run(given.directory)
    if not given.losses:
        write(traces, given.output.with_suffix(".csv"))
    draw(traces, given.output)
    tell(traces)


if __name__ == "__main__":
    main()
