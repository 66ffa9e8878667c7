"""The cluster's own daemons stop for a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e_kubernetes.conftest import OpenSpace
from tests.e2e_kubernetes.host import stopped
from tests.e2e_kubernetes.job import KubernetesJob
from tests.e2e_kubernetes.waiting import stay_so_for, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,  # all jobs would be without an API server
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("owned_cluster", "forgotten_outages"),
]

CHECKPOINTS = {"checkpoint_steps": 10, "keep_checkpoint_max": 0}


@pytest.fixture
def forgotten_outages(owned_cluster: None) -> Iterator[None]:
    """A controller manager of 1.20 for which all nodes were lost at once evicts no pod of a lost node afterwards."""
    yield
    with stopped("kube-controller-manager"):
        pass


def trains_on_for(job: KubernetesJob, seconds: float) -> None:
    """Lets the outage last, in which more checkpoints must come onto the disk: no API server is asked for that."""
    newest = job.checkpoints()[-1]
    stay_so_for(seconds)
    wait_until("newer checkpoints", lambda: len([v for v in job.checkpoints() if v > newest]) >= 2, 30, job.story)


def test_training_continues_while_the_api_server_is_away_for_20_seconds_and_the_kubelet_for_60(
    open_space: OpenSpace,
) -> None:
    job = open_space("outages").job("digits", num_epochs=16, **CHECKPOINTS)
    job.set_pace(0.04)  # for some checkpoints in each outage
    job.submit().wait_for_checkpoint()
    with stopped("kube-apiserver"):
        trains_on_for(job, 20)
    job.wait_until("word of the master", lambda: job.version() >= job.checkpoints()[-1])
    job.wait_for_progress()

    with stopped("kubelet"):
        trains_on_for(job, 60)
    job.wait_for_running("worker", 2, 120)
    job.wait_for_progress()
    job.assert_ends_exactly(240)
