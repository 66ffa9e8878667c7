"""Messages of Kubernetes, as its schedulers, kubelets and API servers wrote them, become troubles with evidence."""

from __future__ import annotations

import pytest

from elasticdl_client.explain.diagnosis import Trouble
from elasticdl_client.explain.pending import why_refused, why_waiting

Case = tuple[str, Trouble, dict[str, object]]

QUOTA = (
    'pods "elasticdl-digits-worker-2" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=5, limited: '
    "pods=5"
)
SCHEDULED: list[Case] = [
    (
        (
            "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 Too "
            "many pods. preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 No "
            "preemption victims found for incoming pod."
        ),
        Trouble.NO_RESOURCE,
        {"resource": "pods", "nodes: Too many pods": 2},
    ),
    (
        "0/2 nodes are available: 1 Too many pods, 1 Insufficient cpu.",
        Trouble.NO_CPU,
        {"nodes: Too many pods": 1, "nodes: Insufficient cpu": 1},
    ),
    ("0/1 nodes are available: 1 Insufficient cpu.", Trouble.NO_CPU, {"nodes": 1, "resource": "cpu"}),
    (
        (
            "0/5 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 4 "
            "Insufficient cpu. preemption: 0/5 nodes are available: 1 Preemption is not helpful for scheduling, 4 No "
            "preemption victims found for incoming pod."
        ),
        Trouble.NO_CPU,
        {"nodes": 5, "nodes: Insufficient cpu": 4},
    ),
    ("0/2 nodes are available: 2 Insufficient memory.", Trouble.NO_MEMORY, {"resource": "memory"}),
    ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", Trouble.NO_GPU, {"resource": "nvidia.com/gpu"}),
    (
        (
            "0/4 nodes are available: 1 Insufficient cpu, 3 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are "
            "available: 4 No preemption victims found for incoming pod."
        ),
        Trouble.NO_GPU,
        {"nodes: Insufficient nvidia.com/gpu": 3, "nodes: Insufficient cpu": 1},
    ),
    (
        (
            "0/4 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 3 Insufficient "
            "nvidia.com/gpu."
        ),
        Trouble.TAINT_NOT_TOLERATED,
        {"taint": "nvidia.com/gpu"},
    ),
    (
        "0/1 nodes are available: 1 node(s) had taint {dedicated: others}, that the pod didn't tolerate.",
        Trouble.TAINT_NOT_TOLERATED,
        {"taint": "dedicated", "nodes": 1},
    ),
    (
        (
            "0/4 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 3 "
            "node(s) didn't match Pod's node affinity/selector."
        ),
        Trouble.NO_MATCHING_NODE,
        {"nodes": 4},
    ),
    (
        (
            "0/3 nodes are available: 1 node(s) had taint {node-role.kubernetes.io/master: }, that the pod didn't "
            "tolerate, 2 node(s) had taint {dedicated: others}, that the pod didn't tolerate."
        ),
        Trouble.TAINT_NOT_TOLERATED,
        {"taint": "dedicated"},
    ),
    (
        "0/1 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.",
        Trouble.TAINT_NOT_TOLERATED,
        {"taint": "node-role.kubernetes.io/control-plane"},
    ),
    (
        "0/1 nodes are available: 1 Insufficient example.com/room.",
        Trouble.NO_RESOURCE,
        {"resource": "example.com/room"},
    ),
    (
        (
            "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. preemption: 0/2 nodes are "
            "available: 2 Preemption is not helpful for scheduling."
        ),
        Trouble.NO_MATCHING_NODE,
        {"nodes: node(s) didn't match Pod's node affinity/selector": 2},
    ),
    (
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/1 nodes are "
            "available: 1 Preemption is not helpful for scheduling."
        ),
        Trouble.CLAIM_NOT_BOUND,
        {"nodes": 1},
    ),
    (
        '0/1 nodes are available: persistentvolumeclaim "data" not found.',
        Trouble.CLAIM_NOT_BOUND,
        {"nodes": 1, "claim": "data"},
    ),
    ("waiting in queue team-a", Trouble.SCHEDULING_GATED, {"queue": "team-a"}),
    (
        "waiting for its scheduling gates: example.com/approval",
        Trouble.SCHEDULING_GATED,
        {"gates": "example.com/approval"},
    ),
]
KUBELET: list[Case] = [
    (
        'ImagePullBackOff: Back-off pulling image "registry.invalid/a:1"',
        Trouble.IMAGE_NOT_FOUND,
        {"image": "registry.invalid/a:1"},
    ),
    (
        (
            'ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack image "docker.io/library/no:1": '
            'failed to resolve reference "docker.io/library/no:1": docker.io/library/no:1: not found'
        ),
        Trouble.IMAGE_NOT_FOUND,
        {"image": "docker.io/library/no:1"},
    ),
    (
        'ErrImageNeverPull: Container image "no-such-image:1" is not present with pull policy of Never',
        Trouble.IMAGE_NOT_FOUND,
        {"image": "no-such-image:1"},
    ),
    (
        (
            'InvalidImageName: Failed to apply default image tag "NO IMAGE": couldn\'t parse image name "NO IMAGE": '
            "invalid reference format: repository name must be lowercase"
        ),
        Trouble.IMAGE_NOT_FOUND,
        {},
    ),
    (
        (
            "ErrImagePull: Error response from daemon: pull access denied for team/private, repository does not exist "
            "or may require 'docker login': denied: requested access to the resource is denied"
        ),
        Trouble.PULL_NOT_ALLOWED,
        {},
    ),
    (
        (
            'ErrImagePull: failed to pull image "gcr.io/p/m:1": failed to authorize: failed to fetch anonymous token: '
            "unexpected status from GET request to https://gcr.io/v2/token: 401 Unauthorized"
        ),
        Trouble.PULL_NOT_ALLOWED,
        {"image": "gcr.io/p/m:1"},
    ),
    (
        (
            "FailedToRetrieveImagePullSecret: Unable to retrieve some image pull secrets (regcred); attempting to pull "
            "the image may not succeed."
        ),
        Trouble.PULL_NOT_ALLOWED,
        {},
    ),
    (
        (
            'RunContainerError: failed to create shim task: OCI runtime create failed: exec: "python": executable file '
            "not found in $PATH: unknown"
        ),
        Trouble.IMAGE_WITHOUT_RUNTIME,
        {},
    ),
    (
        'CreateContainerConfigError: secret "no-such-secret" not found',
        Trouble.CONTAINER_NOT_CREATED,
        {},
    ),
    (
        "CrashLoopBackOff: back-off 40s restarting failed container=m pod=m_team(u); before: Error, exit code 1",
        Trouble.PROGRAM_FAILED,
        {},
    ),
    (
        "CrashLoopBackOff: back-off 40s restarting failed container=m pod=m_team(u); before: OOMKilled, exit code 137",
        Trouble.OUT_OF_MEMORY,
        {},
    ),
    (
        "CrashLoopBackOff: back-off 40s restarting failed container=m pod=m_team(u); before: StartError, exit code 128",
        Trouble.CONTAINER_NOT_CREATED,
        {},
    ),
    (
        "CrashLoopBackOff: back-off 40s restarting failed container=m; before: ContainerCannotRun, exit code 128",
        Trouble.CONTAINER_NOT_CREATED,
        {},
    ),
    (
        'FailedMount: MountVolume.SetUp failed for volume "worker-volume-1" : secret "credentials" not found',
        Trouble.CONTAINER_NOT_CREATED,
        {},
    ),
    (
        'FailedMount: MountVolume.SetUp failed for volume "worker-volume-0" : configmap "settings" not found',
        Trouble.CONTAINER_NOT_CREATED,
        {},
    ),
    (
        'FailedMount: MountVolume.SetUp failed for volume "data" : references non-existent secret key: password',
        Trouble.CONTAINER_NOT_CREATED,
        {},
    ),
    (
        'FailedMount: MountVolume.SetUp failed for volume "data" : mount failed: exit status 32',
        Trouble.CLAIM_NOT_BOUND,
        {},
    ),
]
REFUSED: list[Case] = [
    (
        (
            'Internal error occurred: failed calling webhook "pods.example.com": failed to call webhook: Post '
            '"https://hook.team.svc:443/pods?timeout=10s": dial tcp 10.96.4.1:443: connect: connection refused'
        ),
        Trouble.POD_REFUSED,
        {},
    ),
    (QUOTA, Trouble.QUOTA_EXCEEDED, {"requested": "pods=1", "used": "pods=5", "limited": "pods=5"}),
    (
        "system:serviceaccount:team:default has no right to create pods in namespace team.",
        Trouble.RIGHT_MISSING,
        {},
    ),
    (
        (
            'pods is forbidden: User "system:serviceaccount:team:default" cannot create resource "pods" in API group '
            '"" in the namespace "team"'
        ),
        Trouble.RIGHT_MISSING,
        {},
    ),
    (
        'error looking up service account team/elasticdl-master: serviceaccount "elasticdl-master" not found',
        Trouble.RIGHT_MISSING,
        {},
    ),
    (
        "The API server of the cluster (https://10.0.0.1:6443) does not answer: Connection refused.",
        Trouble.API_SERVER_AWAY,
        {},
    ),
    (
        (
            'violates PodSecurity "restricted:latest": runAsNonRoot != true (pod or container must set '
            "securityContext.runAsNonRoot=true)"
        ),
        Trouble.POD_REFUSED,
        {},
    ),
]


@pytest.mark.parametrize(("message", "trouble", "evidence"), SCHEDULED + KUBELET)
def test_why_a_pod_does_not_start_is_read_from_its_message(
    message: str, trouble: Trouble, evidence: dict[str, object]
) -> None:
    wait = why_waiting(message)
    assert wait is not None
    assert wait.trouble is trouble
    assert {name: wait.evidence.get(name) for name in evidence} == evidence
    assert wait.advice


@pytest.mark.parametrize(("message", "trouble", "evidence"), REFUSED)
def test_why_the_api_refused_a_pod_is_read_from_its_message(
    message: str, trouble: Trouble, evidence: dict[str, object]
) -> None:
    refusal = why_refused(message)
    assert refusal.trouble is trouble
    assert {name: refusal.evidence.get(name) for name in evidence} == evidence


@pytest.mark.parametrize("message", ["", "ContainerCreating", "it is being deleted", 'Pulling image "elasticdl:1"'])
def test_a_pod_that_is_on_its_way_has_no_trouble(message: str) -> None:
    assert why_waiting(message) is None


def test_the_advice_names_the_flags_of_the_pods_role() -> None:
    wait = why_waiting("0/1 nodes are available: 1 Insufficient cpu.", "ps")
    assert wait is not None
    assert "--ps_resource_request=cpu" in wait.advice


def test_the_advice_for_a_server_says_how_workers_give_its_place_back() -> None:
    message = "0/1 nodes are available: 1 Insufficient cpu."
    server, worker = why_waiting(message, "ps"), why_waiting(message)
    assert server is not None
    assert worker is not None
    assert "`elasticdl scale` with a lower --num_workers" in server.advice
    assert "--ps_pod_priority" in server.advice
    assert "priority" not in worker.advice


@pytest.mark.parametrize(
    "message",
    [
        'pods "elasticdl-a-ps-0" is forbidden: minimum memory usage per Container is 1Gi, but request is 32Mi',
        'Pod "elasticdl-a-ps-0" is invalid: spec.containers[0]: must be less than or equal to cpu limit',
    ],
)
def test_a_refusal_by_a_limit_range_names_it_and_the_flags_of_the_role(message: str) -> None:
    refusal = why_refused(message, "ps")
    assert refusal.trouble is Trouble.POD_REFUSED
    assert "LimitRange" in refusal.seen
    assert "--ps_resource_request" in refusal.advice
    assert "kubectl describe limitrange" in refusal.advice


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("0/2 nodes are available: 2 Too many pods.", "--num_workers"),
        (
            ("0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 "
            "node(s) were unschedulable."),
            "kubectl uncordon",
        ),
        ("0/2 nodes are available: 1 node(s) were unschedulable, 1 node(s) didn't match Pod's node affinity/selector.",
         "--node_selector"),
        (
            ('ErrImagePull: failed to pull and unpack image "docker.io/team/zoo:1": failed to copy: httpReadSeeker: '
            "unexpected status code https://registry-1.docker.io/v2/team/zoo/manifests/sha256:1: 429 Too Many Requests "
            "- Server message: toomanyrequests: You have reached your unauthenticated pull rate limit."),
            "limits how much is pulled",
        ),
        (
            ('Failed to pull image "registry.team/zoo:1": failed to do request: Head "https://registry.team/v2/zoo/'
            'manifests/1": dial tcp: lookup registry.team on 10.96.0.10:53: no such host'),
            "does not reach the registry",
        ),
        (
            ('Failed to pull image "registry.team/zoo:1": failed to do request: Head "https://registry.team/v2/zoo/'
            'manifests/1": tls: failed to verify certificate: x509: certificate signed by unknown authority'),
            "does not reach the registry",
        ),
        ('Failed to pull image "zoo:9": docker.io/library/zoo:9: not found', "Correct --image_name"),
    ],
)  # fmt: skip
def test_the_advice_is_of_what_the_message_says(message: str, cure: str) -> None:
    wait = why_waiting(message)
    assert wait is not None
    assert cure in wait.advice
