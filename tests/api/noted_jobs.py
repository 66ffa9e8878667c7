"""Jobs of a script that notes its models after each step: `notes/steps-WORKER`, a line `STEP REST` for each."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.job import LocalJob


def noted_job(script: Path, directory: Path, arguments: str, **flags: object) -> LocalJob:
    """A job by AllReduce of a script with its directory of notes as the first argument."""
    (directory / "notes").mkdir(parents=True)
    all_flags: dict[str, object] = {
        "job_name": "script",
        "job_command": f"python {script} {directory / 'notes'} {arguments}",
        "distribution_strategy": "AllReduceStrategy",
        "num_minibatches_per_task": 4,
    }
    return LocalJob(directory / "job", all_flags | flags)


def steps_of(directory: Path) -> dict[str, dict[int, str]]:
    """What each worker has noted after each step."""
    found = {}
    for path in (directory / "notes").glob("steps-*"):
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
        found[path.name.removeprefix("steps-")] = {int(step): rest for step, rest in lines}
    return found


def agreed_steps(directory: Path) -> list[list[str]]:
    """The words that were noted after each step, in the order of the steps; all workers have noted the same."""
    found: dict[int, set[str]] = {}
    for steps in steps_of(directory).values():
        for step, rest in steps.items():
            found.setdefault(step, set()).add(rest)
    assert not [step for step, rests in found.items() if len(rests) > 1]
    return [rests.pop().split() for _, rests in sorted(found.items())]
