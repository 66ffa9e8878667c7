"""The job's events on a real cluster, as kubectl shows them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elasticdl.master.kubernetes.event_publisher import EventPublisher, Owner
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api import Connection
from elasticdl_client.kubernetes.api_client import ApiClient, of_configuration
from elasticdl_client.kubernetes.events import newest
from tests.cluster.real_cluster import Namespace

pytestmark = pytest.mark.cluster

JOB = "digits"
POD = names.pod_name(JOB, "worker", 1)
POD_UID = "11111111-2222-3333-4444-555555555555"


class Scene:
    """A job's ConfigMap in a namespace of its own, and the lives of its master."""

    def __init__(self) -> None:
        self.namespace = Namespace()
        owner = self.namespace.core.create_namespaced_config_map(
            self.namespace.name, {"metadata": {"name": names.job_object(JOB)}}
        )
        self.owner_uid: str = owner.metadata.uid
        self.events: tuple[JobEvent, ...] = ()

    def happens(self, number: int, kind: EventKind, subject: str, message: str = "", **details: Any) -> None:
        at = time.time() // 60 * 60 + number / 10  # in one window, whatever the time is
        self.events += (JobEvent(number, at, kind, subject, message, 0, details),)

    def publish(self, connection: Connection | None = None) -> None:
        """A life of the master, from its start to its end."""
        publisher = EventPublisher(
            connection or self.namespace.connection,
            Owner(self.namespace.name, JOB, self.owner_uid),
            lambda: EventHistory(self.events),
            lambda name: POD_UID if name == POD else "",
        )
        publisher.close(30)

    def shown(self) -> list[tuple[str, str, str, str, int]]:
        """Of each Event: kind of object, its name, reason, type, count."""
        found = self.namespace.core.list_namespaced_event(self.namespace.name).items
        ours = [one for one in found if one.source.component == "elasticdl"]
        rows = [(o.involved_object.kind, o.involved_object.name, o.reason, o.type, o.count) for o in ours]
        return sorted(rows)


@pytest.fixture
def scene() -> Iterator[Scene]:
    found = Scene()
    try:
        yield found
    finally:
        found.namespace.delete()


def test_what_happens_to_a_pod_is_shown_with_it_and_the_rest_with_the_job(scene: Scene) -> None:
    scene.happens(1, EventKind.JOB_STARTED, "job")
    scene.happens(2, EventKind.EPOCH_STARTED, "epoch-1", records=10)  # routine: not shown
    scene.happens(3, EventKind.POD_LOST, "worker-1", "killed by SIGKILL", reason="Killed", exit_code=137)
    scene.publish()
    assert scene.shown() == [
        ("ConfigMap", names.job_object(JOB), "JobStarted", "Normal", 1),
        ("Pod", POD, "PodLost", "Warning", 1),
    ]
    # Our own warning does not explain to `elasticdl status` why a pod is pending.
    assert newest(scene.namespace.connection, scene.namespace.name, [POD_UID]) == {}


def test_the_next_life_of_the_master_creates_no_event_twice_and_many_of_a_kind_are_one(scene: Scene) -> None:
    scene.happens(1, EventKind.JOB_STARTED, "job")
    scene.publish()
    for number in range(2, 7):
        scene.happens(number, EventKind.LEASE_LOST, "worker-1", f"lease {number} was not renewed in time")
    scene.publish()
    assert scene.shown() == [
        ("ConfigMap", names.job_object(JOB), "JobStarted", "Normal", 1),
        ("Pod", POD, "LeaseLost", "Warning", 5),
    ]


def test_a_master_without_the_right_says_so_once_and_the_job_continues(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    token = scene.namespace.core.create_namespaced_service_account_token("default", scene.namespace.name, {"spec": {}})
    configuration = scene.namespace.connection.client.access.configuration()
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"BearerToken": f"Bearer {token.status.token}"}
    bare = dataclasses.replace(scene.namespace.connection, client=ApiClient(of_configuration(configuration)))
    scene.happens(1, EventKind.JOB_STARTED, "job")
    scene.happens(2, EventKind.POD_LOST, "worker-1", reason="Killed")
    with caplog.at_level(logging.WARNING):
        scene.publish(bare)
    [line] = [one.message for one in caplog.records if "are not shown by kubectl" in one.message]
    assert 'cannot create resource "events"' in line
    assert scene.shown() == []
