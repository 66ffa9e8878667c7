"""How long training stands still when the network of a worker is cut: an AllReduce job on Kubernetes.

``python -m benchmarks.recovery_cut [--quick] [--json]``: four pods train the network of model_zoo/mnist with PyTorch
(minibatch 64 each); in the network namespace of one of them every packet is dropped, its connections stay open and
are silent.  Measured from before the first rule is in place until all others have surely done a step without it; then
the network is mended, and the next cut comes when the four train together again.  Times are those of the workers' own
log.  Needs root on the node of KUBECONFIG's cluster, as the tests of tests/e2e_kubernetes do; builds their image.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from datetime import UTC, datetime

from benchmarks.images import write_images
from benchmarks.zoo.torch_mnist import SHAPE
from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.image import BUILD, ready_image
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.space import Space

NUM_WORKERS = 4
BATCH = 64
RECORDS = 16_384
COLLECTIVE_TIMEOUT_S = 5.0
QUIET_STEPS = 20  # by all four, before the next cut
LONGEST_S = 180.0
_STEP = re.compile(r"^(\S+ \S+) DEBUG Step (\d+): ", re.MULTILINE)

Steps = dict[int, float]
"""When a worker had done each of its steps, in seconds since 1970."""


def steps_of(job: KubernetesJob, worker: str) -> Steps:
    """By number; pods log in UTC."""
    found: Steps = {}
    for stamp, number in _STEP.findall(job.log(worker)):
        at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp()
        found.setdefault(int(number), at)
    return found


def newest(job: KubernetesJob, worker: str) -> int:
    return max(steps_of(job, worker), default=0)


def await_quiet(job: KubernetesJob) -> list[str]:
    """Until four workers have done some steps together from now on; returns them, by rank or nearly so."""

    def groups() -> list[str]:
        return re.findall(r"Group \d+ of (\d+)", job.log(job.master))[-1:]

    job.wait_until("a group of four", lambda: groups() == [str(NUM_WORKERS)], LONGEST_S)
    workers = job.running("worker")
    goal = max(newest(job, worker) for worker in workers) + QUIET_STEPS
    job.wait_until("steps of all", lambda: all(newest(job, worker) >= goal for worker in workers), LONGEST_S)
    return workers


def cut(job: KubernetesJob, place: int) -> float:
    """Cuts the network of the worker at a place; seconds until all others had done a step without it."""
    workers = await_quiet(job)
    victim = job.the_pod(workers[place])
    others = [worker for worker in workers if worker != victim.name]
    began = time.time()
    with host.cut_off(victim.uid):
        # The victim's last step, and the one after it, may have had its part.
        job.wait_until(
            "a step of the others",
            lambda: all(newest(job, worker) >= newest(job, victim.name) + 2 for worker in others),
            LONGEST_S,
        )
        after = newest(job, victim.name) + 2
    return max(min(at for number, at in steps_of(job, one).items() if number >= after) for one in others) - began


def measure(count: int) -> list[float]:
    """Return the seconds of each of a number of cuts in one job."""
    images = BUILD / "images"
    if not images.exists():
        write_images(images, RECORDS, SHAPE)
    space = Space.open("recovery", ready_image(), images)
    try:
        job = space.job(
            "recovery",
            model_def="mnist.mnist_pytorch.custom_model",
            distribution_strategy="AllReduceStrategy",
            training_data="/data",
            num_workers=NUM_WORKERS,
            num_epochs=0,
            minibatch_size=BATCH,
            collective_timeout=COLLECTIVE_TIMEOUT_S,
            log_level="DEBUG",
            envs="OMP_NUM_THREADS=1",
        )
        for flag in ("validation_data", "num_ps_pods", "ps_resource_request", "ps_resource_limit"):
            del job.flags[flag]
        job.submit()
        found = []
        for number in range(count):
            found.append(cut(job, 1 + number % (NUM_WORKERS - 1)))
            print(f"cut {number + 1}: {found[-1]:.2f} s", file=sys.stderr, flush=True)
        return found
    finally:
        space.close(ended_well=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three repeats instead of ten")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    arguments = parser.parse_args()
    found = measure(3 if arguments.quick else 10)
    figures = {
        "cut_next_step_median_s": statistics.median(found),
        "cut_next_step_max_s": max(found),
        "aim_s": COLLECTIVE_TIMEOUT_S + 1,
    }
    if arguments.json:
        print(json.dumps({"benchmark": "recovery_cut", "quick": arguments.quick, **figures}))
        return
    for name, value in figures.items():
        print(f"{name:44} {value:10.3f}")


if __name__ == "__main__":
    main()
