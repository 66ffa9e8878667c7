"""Scripts of a user's own on a cluster: PyTorch, and an Estimator under TensorFlow's own parameter servers."""

from __future__ import annotations

import json
import re
import shutil
import signal

import pytest

from elasticdl_client.job_status import JobPhase
from elasticdl_client.kubernetes.names import SLOT_LABEL
from tests.e2e_kubernetes import host
from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.image import ready_image
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.kubectl import REPOSITORY, list_pods
from tests.e2e_kubernetes.pods import PodView
from tests.e2e_kubernetes.space import Space

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

IRIS = REPOSITORY.parent / "shared" / "data" / "iris" / "iris.csv"
NUM_IRIS = 150
ZOO = REPOSITORY / "tests" / "e2e_kubernetes" / "zoo"


def script_job(space: Space, name: str, command: str, **flags: object) -> KubernetesJob:
    """A job without the flags that are a model's, or for our own parameter servers."""
    job = space.job(name, job_command=command, **flags)
    for flag in ("model_def", "checkpoint_dir", "checkpoint_steps"):
        del job.flags[flag]
    return job


def kill(job: KubernetesJob, pod_name: str) -> None:
    host.kill(job.the_pod(pod_name).uid, signal.SIGKILL)


def logs_of_workers(job: KubernetesJob) -> str:
    return job.log(job.worker(0).removesuffix("0") + "*")


def chief(job: KubernetesJob) -> str:
    """The pod that is TensorFlow's chief now; waits for it, if it is being replaced."""

    def running() -> list[str]:
        return [pod.name for pod in map(PodView.of, list_pods(job.namespace, f"{SLOT_LABEL}=0")) if pod.running]

    job.wait_until("a chief", lambda: len(running()) == 1)
    return running()[0]


def tf_config(job: KubernetesJob, pod_name: str) -> dict[str, object]:
    """Return a pod's view of TensorFlow's cluster and of its own place in it."""
    variables = job.manifest(pod_name)["spec"]["containers"][0]["env"]
    return dict(json.loads(next(one["value"] for one in variables if one["name"] == "TF_CONFIG")))


def accuracy(job: KubernetesJob) -> float:
    """Of the last evaluation that a worker has logged."""
    found = re.findall(r"Evaluation metrics\[step=(\d+)\]: (\{.*\})", logs_of_workers(job))
    assert found, job.story()
    _, metrics = max(found, key=lambda one: int(one[0]))
    return float(json.loads(metrics.replace("'", '"'))["accuracy"])


def test_a_pytorch_script_loses_nothing_with_a_worker(open_space: OpenSpace) -> None:
    command = "python -m paced.pytorch_script /data/digits/validation"
    strategy = {"distribution_strategy": "AllReduceStrategy", "num_ps_pods": 0}
    space = open_space("script")
    directory = space.directory / "code"  # another program than that of the image
    shutil.copytree(ZOO, directory)
    script = directory / "paced" / "pytorch_script.py"
    printing = "def main() -> None:\n    print('this is the code of', __import__('os').environ['SITE'])\n"
    script.write_text(script.read_text().replace("def main() -> None:\n", printing))
    template = {"spec": {"containers": [{"name": "elasticdl", "env": [{"name": "SITE", "value": "here"}]}]}}
    own = {"code": directory, "worker_pod_template": json.dumps(template)}
    job = script_job(space, "script", command, num_workers=3, num_epochs=12, **own, **strategy)
    for flag in ("validation_data", "ps_resource_request", "ps_resource_limit"):  # the script evaluates; there is no PS
        del job.flags[flag]
    job.submit()
    job.wait_until("a group of 3", lambda: "of 3 workers has formed" in job.log(job.master), 120)
    job.wait_for_progress(4)
    kill(job, job.worker(0))
    job.wait_for_progress(4)
    job.wait_for_pod(job.worker(3))
    job.wait_until("the successor in the group", lambda: "worker 3 joined" in job.log(job.master), 120)
    job.assert_ends_exactly()
    assert accuracy(job) >= 0.9
    assert len(re.findall("this is the code of here", logs_of_workers(job))) == 4  # the successor's, too


@pytest.mark.full  # it builds an image of TensorFlow 2.15
def test_an_estimator_continues_without_a_worker_a_server_and_its_chief(open_space: OpenSpace) -> None:
    space = open_space("estimator")
    space.image = ready_image("estimator")
    command = "python -m paced.iris_estimator --model_dir=/job/model --num_epochs=60 --save_steps=10"
    own = {"training_data": "/job/iris.csv", "validation_data": "/job/iris.csv", "num_minibatches_per_task": 2}
    servers = {"need_tf_config": True, "num_ps_pods": 1, "ps_resource_limit": "memory=2Gi"}
    job = script_job(space, "iris", command, minibatch_size=16, num_epochs=60, **own, **servers)
    shutil.copy(IRIS, job.directory)
    job.submit()
    job.wait_for_running("worker", 3)  # the chief, a worker, the evaluator
    job.wait_for_progress(10, 180)
    kill(job, job.worker(1))
    job.wait_for_progress(20)
    job.wait_until("a checkpoint", lambda: (job.directory / "model" / "checkpoint").exists())
    addresses = tf_config(job, chief(job))
    kill(job, job.server(0))
    job.wait_for_progress(20, 180)
    killed = chief(job)  # it may have ended with the server, and have a successor
    kill(job, killed)
    job.wait_for_progress(20, 180)
    assert chief(job) != killed
    assert tf_config(job, chief(job)) == addresses
    job.hurry()
    status = job.wait_for_end(240)

    assert (status.phase, status.exit_code) == (JobPhase.SUCCEEDED, 0), job.story()
    assert [(c.records, c.committed, c.lost) for c in status.coverage] == [(NUM_IRIS, NUM_IRIS, 0)] * 60
    log = job.log(job.master)
    assert len(re.findall(r"committed 150, repeated at most \d+, lost 0", log)) >= 60
    again = [int(records) for records in re.findall(r"TensorFlow's last checkpoint: (\d+) records", log)]
    assert len(again) >= 2, job.story()  # for the server and for the chief; a worker costs nothing
    assert sum(again) <= sum(c.repeated for c in status.coverage) < NUM_IRIS * 10
    assert len(re.findall(r"Restoring parameters from /job/model/model.ckpt-[1-9]", logs_of_workers(job))) >= 2
    assert accuracy(job) >= 0.9
