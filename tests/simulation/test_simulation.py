"""The simulator: exact, the same for the same seed, no node holds more than fits, and two cases computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Role, Shard
from elasticdl.simulation.cluster import SimulatedCluster, Timeline
from elasticdl.simulation.comparison import Estimate, elastic, gang
from elasticdl.simulation.job import SimulatedJob, Workload
from elasticdl.simulation.scenario import ApiOutage, NodePool, OtherPods, Scenario

CPU = {"cpu": 1.0}
SETTINGS = JobSettings(
    "j", num_workers=4, num_ps=1, minibatch_size=10, num_minibatches_per_task=4, checkpoint_dir="checkpoints"
)
WORKLOAD = Workload(SETTINGS, (Shard("records", 0, 24_000),), 1.0, {Role.PS: CPU, Role.WORKER: CPU})
ROUGH = Scenario(
    nodes=(
        NodePool("regular", CPU, 1, price=2.0),
        NodePool("spot", {"cpu": 2.0}, 2, price=1.0, interruptions=12.0, away=120.0),
        NodePool("warned", CPU, 1, price=1.0, speed=0.5, interruptions=6.0, notice=30.0, away=60.0),
    ),
    pods=(OtherPods(200.0, 100.0, {"cpu": 2.0}, 1, priority=10),),
    api_outages=(ApiOutage(300.0, 30.0),),
    worker_failures=60.0,
)
CALM = Scenario(nodes=(NodePool("n", {"cpu": 5.0}, 1, price=5.0),), image_pull=30.0, start=10.0, api_latency=0.0)


class WatchedJob(SimulatedJob):
    """Checks every invariant after every event of the core, and that no node holds more than fits."""

    num_checks = 0

    def tell(self, event: object) -> None:  # type: ignore[override]
        super().tell(event)  # type: ignore[arg-type]
        self.num_checks += 1
        if self.num_checks % 20 == 0:
            self.core.validate_state()
        self.cluster.check()


def run(workload: Workload, scenario: Scenario, seed: int) -> WatchedJob:
    timeline = Timeline()
    job = WatchedJob(workload, scenario, SimulatedCluster(scenario, timeline, seed), timeline)
    job.begin()
    timeline.run_until(lambda: job.end is not None, 36_000.0)
    return job


@pytest.mark.parametrize("seed", range(4))
def test_in_a_rough_cluster_every_record_is_committed_once_and_no_node_is_overfull(seed: int) -> None:
    job = run(WORKLOAD, ROUGH, seed)
    assert job.end is not None
    assert job.end.exit_code == 0, job.end
    assert job.num_lost > 0
    assert "Epoch 1: records 24000, committed 24000, repeated 0, lost 0" in job.log
    assert job.model == {(0, task): 4 for task in range(600)}


def test_the_same_seed_gives_the_same_estimate_and_another_one_another() -> None:
    first, again, other = (elastic(WORKLOAD, ROUGH, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert gang(WORKLOAD, ROUGH, 1) == gang(WORKLOAD, ROUGH, 1)


def test_in_a_calm_cluster_a_gang_takes_what_can_be_computed_by_hand() -> None:
    found = gang(WORKLOAD, CALM, 0)
    # 30 s for the image, 10 s to start, 2,400 minibatches of a second on four workers; five pods at 1 an hour each.
    assert found.seconds == pytest.approx(30 + 10 + 600)
    assert found.cost == pytest.approx(5.0 * 640 / 3600)
    assert (found.workers_lost, found.records_again, found.starts) == (0, 0, 1)


def test_in_a_calm_cluster_elastic_and_gang_are_alike() -> None:
    found = elastic(WORKLOAD, CALM, 0)
    assert found.seconds == pytest.approx(640, abs=10)
    assert found.cost == pytest.approx(5.0 * 640 / 3600, rel=0.02)
    assert (found.workers_lost, found.records_again) == (0, 0)


def test_a_pod_of_higher_priority_takes_a_place_from_the_elastic_job_and_stops_the_gang() -> None:
    scenario = replace(CALM, pods=(OtherPods(150.0, 200.0, CPU, 1, priority=10),))
    slower, stopped = elastic(WORKLOAD, scenario, 0), gang(WORKLOAD, scenario, 0)
    assert slower.seconds is not None
    assert stopped.seconds is not None
    # Elastic: 200 s of one worker of four are missing.  Gang: it trains from 40 s on, is stopped at 152 s, keeps the
    # 60 s of its checkpoint, and begins again when the other pod has ended at 352 s: 10 s to start, 540 s are left.
    assert slower.seconds == pytest.approx(640 + 200 / 4, abs=20)
    assert stopped.seconds == pytest.approx(352 + 10 + 540, abs=1)
    assert stopped.records_again == pytest.approx(52 * 4 * 10, abs=10)
    assert stopped.starts == 2


def test_a_job_of_higher_priority_takes_places_from_others() -> None:
    taken = replace(CALM, pods=(OtherPods(0.0, 100_000.0, CPU, 5),))
    low = elastic(WORKLOAD, taken, 0, limit_s=3000.0)
    high = elastic(replace(WORKLOAD, priorities=lambda role, slot: 7), taken, 0, limit_s=3000.0)
    assert low.seconds is None
    assert high.seconds == pytest.approx(645, abs=15)


def test_a_gang_that_does_not_fit_never_starts_and_the_elastic_job_does() -> None:
    small = replace(CALM, nodes=(NodePool("n", {"cpu": 3.0}, 1),))
    never = gang(WORKLOAD, small, 0)
    assert never == Estimate(None, 0.0, 0.0, 0, 0, 0)
    assert elastic(WORKLOAD, small, 0).seconds == pytest.approx(40 + 1200, abs=15)


def test_workers_on_slow_nodes_take_longer() -> None:
    slow = replace(CALM, nodes=(NodePool("n", {"cpu": 5.0}, 1, speed=0.5),))
    assert gang(WORKLOAD, slow, 0).seconds == pytest.approx(40 + 1200)
    assert elastic(WORKLOAD, slow, 0).seconds == pytest.approx(40 + 1200, abs=15)
