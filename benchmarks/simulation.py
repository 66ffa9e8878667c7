"""The master's core in virtual time: processor time of an event with 100, 1,000 and 10,000 workers.

``python -m benchmarks.simulation [--quick] [--json]``: a job with two parameter servers on nodes of eight places, of
which a worker is killed every second.  The core is the real one; its surroundings are simulated and not counted.
Processes send a heartbeat every 10 s, a tenth of the real rate, so that a virtual hour with 10,000 workers takes
minutes: the cost of an event does not depend on that.  Ticks, which go over all workers, are given apart.  At the end
the ledger is compared with what the simulated model holds.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Role, Shard
from elasticdl.simulation.cluster import HOUR, SimulatedCluster, Timeline
from elasticdl.simulation.job import EventTimes, SimulatedJob, Workload
from elasticdl.simulation.scenario import NodePool, Scenario

MINIBATCH, PER_TASK, STEP_S, HEARTBEAT_S = 64, 8, 2.0, 10.0
CPU = {"cpu": 1.0}
MOST_NODES = 2000


def measure(num_workers: int, virtual_s: float) -> dict[str, Any]:
    """Run a job of about this length; the processor time of its events."""
    num_tasks = max(1, int(num_workers * virtual_s / STEP_S / PER_TASK))
    nodes = min(MOST_NODES, num_workers // 4 + 1)
    scenario = Scenario(nodes=(NodePool("node", {"cpu": 8.0}, nodes),), worker_failures=HOUR)
    settings = JobSettings(
        "benchmark",
        num_workers=num_workers,
        num_ps=2,
        minibatch_size=MINIBATCH,
        num_minibatches_per_task=PER_TASK,
        checkpoint_dir="checkpoints",
        lease_timeout=4 * HEARTBEAT_S,
    )
    shards = (Shard("records", 0, num_tasks * PER_TASK * MINIBATCH),)
    requests = {Role.PS: CPU, Role.WORKER: CPU}
    workload = Workload(settings, shards, STEP_S, requests, heartbeat_s=HEARTBEAT_S)
    timeline, times = Timeline(), EventTimes()
    cluster = SimulatedCluster(scenario, timeline, 0)
    job = SimulatedJob(workload, scenario, cluster, timeline, times)
    job.begin()
    timeline.run_until(lambda: job.end is not None, 100 * virtual_s + HOUR)
    if job.end is None or job.end.exit_code or job.model != {(0, task): PER_TASK for task in range(num_tasks)}:
        raise SystemExit(f"the ledger of {num_workers} workers is not exact: {job.end} {job.log[-3:]}")
    cluster.check()
    return {
        "workers": num_workers,
        "tasks": num_tasks,
        "virtual_s": timeline.now,
        "lost": job.num_lost,
        **_costs(times),
    }


def _costs(times: EventTimes) -> dict[str, Any]:
    """Microseconds of an event, by its kind, and of all but ticks."""
    calls = {kind: count for kind, count in times.counts.items() if kind != "Tick"}
    seconds = sum(times.seconds[kind] for kind in calls)
    common = ("HeartbeatReceived", "ProgressReported", "LeaseRequested", "TaskFinished", "PodChanged", "Tick")
    by_kind = {kind: 1e6 * times.seconds[kind] / times.counts[kind] for kind in common}
    return {"events": sum(calls.values()), "us_per_event": 1e6 * seconds / sum(calls.values()), "us": by_kind}


def main() -> None:
    """Print a line for each size, and all of it as JSON if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 1,000 workers, for two virtual minutes")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--minutes", type=float, default=120.0, help="virtual length of the job without failures")
    options = parser.parse_args()
    sizes = (100, 1000) if options.quick else (100, 1000, 10_000)
    found = []
    for num_workers in sizes:
        one = measure(num_workers, 120.0 if options.quick else 60 * options.minutes)
        kinds = ", ".join(f"{kind} {us:.0f}" for kind, us in one["us"].items())
        print(
            f"{num_workers:,} workers, {one['tasks']:,} tasks, {one['lost']:,} lost, "
            f"{one['virtual_s']:,.0f} virtual s, {one['events']:,} events: "
            f"{one['us_per_event']:.0f} µs an event ({kinds})",
            flush=True,
        )
        found.append(one)
    ratio = found[-1]["us_per_event"] / found[0]["us_per_event"]
    print(f"{sizes[-1]:,} workers against {sizes[0]:,}: {ratio:.2f} times as much for an event")
    if options.json:
        print(json.dumps({"sizes": found, "ratio": ratio}))


if __name__ == "__main__":
    main()
