"""`elasticdl simulate`: estimates duration and cost of a job on a cluster, elastic and as a gang, without running it.

The job is given as to `elasticdl train`.  The runtime package, which has the master's core, is imported when a job is
simulated, never before.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elasticdl_client.choices import DistributionStrategy, JobType
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.flag_sources import gather
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.progress import age
from elasticdl_client.worker_range import MAX_WORKERS, WorkerRange

if TYPE_CHECKING:
    from elasticdl.simulation.comparison import Estimate

USAGE = "elasticdl simulate --cluster=FILE --step_seconds=S --records=N JOBFLAGS… | -f job.yaml"
FLAGS = {
    "cluster": "YAML file of the cluster: nodes, prices, interruptions, other pods; docs/simulate.md has its keys.",
    "step_seconds": "Seconds that a worker takes for one minibatch on a node of speed 1, as measured.",
    "records": "Records of the training data.",
    "o": "json: print that instead of a table. Written -o json.",
}
_ASSUMED = (
    "a step takes as long with any number of workers, up to steps_per_server",
    "evaluation and export take no time",
    "a pod pays its share of the price of its node",
    "the master is not lost",
)


def run(arguments: Sequence[str]) -> int:
    """Simulate a job; return the exit code.

    Raises:
        FlagError: the command line or the cluster's file is wrong.
    """
    own, rest = _split(arguments)
    missing = [name for name in ("cluster", "step_seconds", "records") if not own.get(name)]
    if missing:
        raise FlagError(f"--{missing[0]} is missing.", f"Usage: {USAGE}")
    step_s, records = _positive("step_seconds", own), _positive("records", own)
    if records != int(records):
        raise FlagError(f"--records={own['records']} is no whole number.", "Give the number of training records.")
    if own.get("o", "json") != "json":
        raise FlagError(f"-o {own['o']} is not a format.", "The only one is json.")
    given = gather(JobType.TRAIN, rest, os.environ)
    try:
        spec = JobSpec.from_flags(JobType.TRAIN, given.values)
    except FlagError as error:
        raise given.located(error) from None
    if spec.distribution_strategy is not DistributionStrategy.PARAMETER_SERVER or spec.job_command:
        raise FlagError(
            f"--distribution_strategy={spec.distribution_strategy} cannot be simulated, nor can a --job_command.",
            "Only jobs with parameter servers can: --distribution_strategy=ParameterServerStrategy.",
        )
    if spec.num_processes_per_worker > 1:
        raise FlagError(
            f"Workers of {spec.num_processes_per_worker} processes cannot be simulated.",
            f"Give {spec.num_processes_per_worker} times as many workers with one GPU each.",
        )
    if spec.num_epochs <= 0 and spec.max_step <= 0:
        raise FlagError("The job never ends: --num_epochs=0 without --max_step.", "Give one of them.")
    if spec.max_workers == MAX_WORKERS:
        raise FlagError("--num_workers=auto has no limit, and a gang needs one.", "Give a range, such as 1:16.")
    if importlib.util.find_spec("elasticdl") is None:
        raise JobError(
            "`elasticdl simulate` needs the runtime package, which is not installed in this Python.",
            "Install it from the repository: pip install ./elasticdl_client -e .",
        )
    from elasticdl.simulation.comparison import estimates_of

    found = estimates_of(spec, own["cluster"], step_s, int(records))
    head = _head(spec, own["cluster"], step_s, int(records))
    print(_as_json(head, found) if own.get("o") else _as_table(spec, head, found))
    return 0


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the flags of this command, and those of the job."""
    own: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        key = "o" if name == "-o" else name[2:].replace("-", "_") if name.startswith("--") else ""
        if key not in FLAGS or name == "--o":
            rest.append(argument)
            continue
        if key in own:
            raise FlagError(f"{name} is given twice.", "Give it once.")
        own[key] = value if equals else next(remaining, "")
    return own, rest


def _positive(name: str, own: Mapping[str, str]) -> float:
    try:
        value = float(own[name])
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise FlagError(f"--{name}={own[name]} is not a number above 0.", f"{FLAGS[name]}")
    return value


def _head(spec: JobSpec, cluster: str, step_s: float, records: int) -> dict[str, object]:
    return {
        "cluster": cluster,
        "seed": spec.seed,
        "workers": max(spec.num_workers, spec.max_workers),
        "least_workers": spec.num_workers,
        "records": records,
        "epochs": spec.num_epochs,
        "minibatch_size": spec.minibatch_size,
        "step_seconds": step_s,
        "checkpoints": bool(spec.checkpoint_dir),
        "assumptions": list(_ASSUMED),
    }


def _as_json(head: Mapping[str, object], found: Mapping[str, Estimate]) -> str:
    return json.dumps({**head, **{name: dataclasses.asdict(one) for name, one in found.items()}}, indent=2)


def _as_table(spec: JobSpec, head: Mapping[str, object], found: Mapping[str, Estimate]) -> str:
    most = max(spec.num_workers, spec.max_workers)
    workers = WorkerRange(spec.num_workers, most)
    epochs = "1 epoch" if spec.num_epochs == 1 else f"{spec.num_epochs} epochs"
    lines = [
        f"{head['cluster']}, seed {spec.seed}: {workers} workers, {head['records']:,} records, {epochs}",
        f"Given: minibatches of {spec.minibatch_size} in {head['step_seconds']:g} s on a node of speed 1.",
        f"Assumed: {'; '.join(_ASSUMED)}.",
    ]
    if not spec.checkpoint_dir:
        lines.append("Without --checkpoint_dir a gang begins anew at each loss.")
    lines.append("")
    columns = [_column(one, most) for one in found.values()]
    rows = [("", *found), *zip(columns[0], *(column.values() for column in columns), strict=True)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for first, *others in rows:
        cells = [text.rjust(width + 2) for text, width in zip(others, widths[1:], strict=True)]
        lines.append(first.ljust(widths[0]) + "".join(cells))
    return "\n".join(lines)


def _column(one: Estimate, num_workers: int) -> dict[str, str]:
    return {
        "duration": "does not end" if one.seconds is None else age(one.seconds),
        "cost": f"{one.cost:,.2f}",
        "slots used": f"{100 * one.mean_workers / num_workers:.0f} %",
        "workers, on average": f"{one.mean_workers:.1f}",
        "workers lost": f"{one.workers_lost:,}",
        "records computed again": f"{one.records_again:,}",
        "starts of the whole job": f"{one.starts:,}",
    }
