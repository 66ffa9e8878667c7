"""From a changed line of a script to the cluster running it, on the cluster of `$KUBECONFIG`.

``python -m benchmarks.code_change [--quick] [--json]``: a line of a PyTorch script is changed, `elasticdl run --code=.`
is called, and the script itself says when its first line and the end of its first step run, in seconds after the call.
The nodes have the image.  Between lie the client, the master's pod and the worker's.  By turns with it, `kubectl run`
of the same image: the seconds until a bare pod runs Python's first line, of which a job needs two, one after the
other.  The figures are medians.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path

from tests.e2e_kubernetes.image import ready_image
from tests.e2e_kubernetes.job import elasticdl
from tests.e2e_kubernetes.kubectl import kubectl
from tests.e2e_kubernetes.space import Space

SCRIPT = """
import time
print("line CHANGED", time.time(), flush=True)
import torch
from elasticdl.api.pytorch import create_elastic_controller

features = torch.randn(4096, 16)
data = torch.utils.data.TensorDataset(features, features.sum(1, keepdim=True))
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
controller = create_elastic_controller(batch_size=64, num_epochs=1, state=[model, optimizer])
loader = controller.loader(data)
num_steps = 0
for epoch in controller.epochs():
    for rows, labels in loader:
        with controller.step():
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(rows), labels).backward()
            optimizer.step()
        num_steps += 1
        if num_steps == 1:
            print("step CHANGED", time.time(), flush=True)
"""
RUNNING_S = 60.0


def of_a_job(space: Space, number: int) -> dict[str, float]:
    """Return the seconds from the call to the script's first line and to its first step."""
    directory = space.directory / "code"
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(SCRIPT.replace("CHANGED", str(number)))
    name = f"changed-{number}"
    began = time.time()
    ended = elasticdl(
        "run", f"--code={directory}", f"--image_name={space.image}", "--image_pull_policy=Never",
        f"--namespace={space.namespace}", f"--job_name={name}", "--num_workers=1", f"{directory}/train.py",
    )  # fmt: skip
    if ended.returncode != 0:
        raise SystemExit(ended.stdout + ended.stderr)
    log = kubectl("-n", space.namespace, "logs", f"elasticdl-{name}-worker-0")
    moments = {what: float(at) for what, at in re.findall(rf"^(line|step) {number} (\S+)", log, re.MULTILINE)}
    elasticdl("delete", name, f"--namespace={space.namespace}")
    return {what: at - began for what, at in moments.items()}


def of_a_bare_pod(space: Space, number: int) -> float:
    """Return the seconds from `kubectl run` to the first line of Python in the pod."""
    name, in_namespace = f"bare-{number}", ("-n", space.namespace)
    began = time.time()
    kubectl(
        *in_namespace, "run", name, f"--image={space.image}", "--image-pull-policy=Never", "--restart=Never",
        "--command", "--", "python", "-c", "import time; print(time.time())",
    )  # fmt: skip
    while time.time() < began + RUNNING_S:
        if kubectl(*in_namespace, "get", "pod", name, "-o", "jsonpath={.status.phase}") == "Succeeded":
            return float(kubectl(*in_namespace, "logs", name)) - began
        time.sleep(0.2)
    raise SystemExit(f"the pod {name} did not run within {RUNNING_S:.0f} s")


def measure(rounds: int, data: Path) -> dict[str, float]:
    space = Space.open("code-change", ready_image(), data)
    ended_well = False
    try:
        of_a_job(space, 0)  # the first reads the image from the disk
        pairs = [(of_a_job(space, number), of_a_bare_pod(space, number)) for number in range(1, rounds + 1)]
        ended_well = True
    finally:
        space.close(ended_well)
    line_s = statistics.median(job["line"] for job, _ in pairs)
    bare_s = statistics.median(bare for _, bare in pairs)
    return {
        "running_s": line_s,
        "slowest_running_s": max(job["line"] for job, _ in pairs),
        "first_step_s": statistics.median(job["step"] for job, _ in pairs),
        "bare_pod_s": bare_s,
        "running_ratio": line_s / (2 * bare_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three changes instead of ten")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    figures = measure(3 if arguments.quick else 10, Path.cwd())
    if arguments.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
        return
    for name, value in figures.items():
        print(f"{name:20} {value:8.2f}")


if __name__ == "__main__":
    main()
