"""Resource, volume and priority strings, with the original's words for what is wrong."""

from __future__ import annotations

import pytest

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes.flags import worker_priorities
from elasticdl_client.kubernetes.resources import Mount, parse_resources, parse_volumes


def test_resources_get_their_kubernetes_names() -> None:
    assert parse_resources("cpu=250m, memory=32Mi,disk=64Gi,gpu=1") == {
        "cpu": "250m",
        "memory": "32Mi",
        "ephemeral-storage": "64Gi",
        "nvidia.com/gpu": "1",
    }
    assert parse_resources("ephemeral-storage=1Gi,memory=64K") == {"ephemeral-storage": "1Gi", "memory": "64k"}
    assert parse_resources("amd.com/gpu=2") == {"amd.com/gpu": "2"}
    vendors = "google.com/tpu=4,habana.ai/gaudi=8,aws.amazon.com/neuron=1,rdma/hca=1,hugepages-2Mi=512Mi"
    assert parse_resources(vendors) == {
        "google.com/tpu": "4",
        "habana.ai/gaudi": "8",
        "aws.amazon.com/neuron": "1",
        "rdma/hca": "1",
        "hugepages-2Mi": "512Mi",
    }
    assert parse_resources("nvidia.com/P100-PCIE-16GB-P=1") == {"nvidia.com/P100-PCIE-16GB-P": "1"}
    assert parse_resources("cpu=0.1") == {"cpu": "0.1"}
    assert parse_resources("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu=1.5m", "invalid cpu request spec: 1.5m"),
        ("cpu=nan", "invalid cpu request spec: nan"),
        ("memory=64", "invalid memory request spec: 64"),
        ("memory=0Mi", "invalid memory request spec: 0Mi"),
        ("gpu=half", "invalid gpu request spec: half"),
        ("_bad/gpu=1", "gpu resource name does not have a valid vendor name: _bad/gpu"),
        ("google.com/tpu=1Gi", "invalid google.com/tpu request spec: 1Gi"),
        ("google.com/=1", "google.com/ is not in the allowed list of resource types"),
        ("hugepages-2Mi=4", "invalid hugepages-2Mi request spec: 4"),
        ("hugepages-2=4Mi", "hugepages-2 is not in the allowed list of resource types"),
        ("tpu=1", "tpu is not in the allowed list of resource types"),
        ("cpu=1,cpu=2", "The resource string contains duplicate resource names: cpu"),
        ("gpu=1,nvidia.com/gpu=2", "duplicate resource names"),
        ("disk=1Gi,ephemeral-storage=2Gi", "duplicate resource names"),
        ("disk=1", "invalid disk request spec: 1"),
        ("cpu", "not of the form"),
    ],
)
def test_wrong_resources_are_refused(text: str, said: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_resources(text)
    assert said in caught.value.what


def test_volumes_are_claims_and_host_paths() -> None:
    assert parse_volumes("claim_name=c,mount_path=/a,sub_path=s; host_path=/h,type=Directory,mount_path=/b;") == [
        Mount("/a", claim_name="c", sub_path="s"),
        Mount("/b", host_path="/h", type="Directory"),
    ]
    assert parse_volumes("") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("claim=c,mount_path=/a", "claim is not in the allowed list of volume keys"),
        ("claim_name=c,claim_name=d,mount_path=/a", "The volume string contains duplicate volume key: claim_name"),
        ("mount_path=/a", "either claim_name or host_path"),
        ("claim_name=c,host_path=/h,mount_path=/a", "either claim_name or host_path"),
        ("claim_name=c", "no mount_path"),
        ("nfs=/export,mount_path=/a", "not of the form nfs=HOST:/PATH"),
        ("empty_dir=lots,mount_path=/a", "has no size"),
        ("empty_dir=1Gi,type=Directory,mount_path=/a", "has a type, which belongs to host_path"),
        ("secret_name=s,config_map_name=c,mount_path=/a", "or another source"),
        ("claim_name=c,mount_path=a", "not an absolute path"),
        ("claim_name=c,mount_path=/a;host_path=/h,mount_path=/a/", "given twice"),
        ("claim_name=c,mount_path=/var/run/elasticdl/token", "where the job's token is"),
        ("claim_name=,mount_path=/a", "has no value"),
    ],
)
def test_wrong_volumes_are_refused(text: str, said: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_volumes(text)
    assert said in caught.value.what


def test_a_fraction_of_workers_is_high_from_both_ends() -> None:
    priorities = worker_priorities("0.5", 10)
    assert [index for index, priority in enumerate(priorities) if priority == "high"] == [0, 1, 2, 8, 9]
    assert worker_priorities("0.1", 3) == ["high", "low", "low"]
    assert worker_priorities("1", 2) == ["high", "high"]
    assert worker_priorities("0", 2) == ["low", "low"]
    assert worker_priorities("low", 2) == ["low", "low"]
    assert worker_priorities("None", 2) == ["", ""]


@pytest.mark.parametrize("priority", ["medium", "1.5", "-0.1", "nan"])
def test_another_priority_is_refused(priority: str) -> None:
    with pytest.raises(FlagError, match="Not support priority"):
        worker_priorities(priority, 2)
