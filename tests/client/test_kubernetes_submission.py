"""A submission without a cluster: the objects of a job, as YAML too, and what is said where no cluster answers."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.jobs import commands
from elasticdl_client.kubernetes import names, objects, rbac, submit
from elasticdl_client.kubernetes import rbac as rbac_command
from elasticdl_client.kubernetes.api import ClusterError, connect, is_configured
from elasticdl_client.kubernetes.api_client import object_path
from elasticdl_client.kubernetes.objects import job_manifests, master_pod
from elasticdl_client.kubernetes.pods import owned
from elasticdl_client.kubernetes.submit import mount_notes
from tests.command import elasticdl

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "job_name": "job",
    "namespace": "here",
    "image_name": "image:1",
    "model_def": "m.model",
    "training_data": "/data",
}
TRAIN = ["train", *(f"--{name}={FLAGS[name]}" for name in FLAGS)]
COMMAND = [sys.executable, "-m", "elasticdl_client.main", *TRAIN]
LABELS = {"app": "elasticdl", "elasticdl-job-name": "job"}


def job(**flags: object) -> JobSpec:
    return JobSpec.from_flags("train", FLAGS | flags)


def kubeconfig(path: Path, server: str, context: str = "far-away", chosen: str = "") -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": chosen or context,
                "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    return path


@pytest.fixture
def closed_server() -> Iterator[str]:
    """The URL of a port without a listener, kept for this test."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield f"https://127.0.0.1:{found.getsockname()[1]}"


def submitted(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of `elasticdl train` as a process of its own."""
    environment = {**os.environ, "KUBECONFIG": str(config)}
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def train(config: Path, *arguments: str, stdout: IO[bytes] | socket.socket) -> subprocess.Popen[bytes]:
    """Start `elasticdl train` with this as its stdout."""
    environment = {**os.environ, "KUBECONFIG": str(config)}
    return subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.DEVNULL)


def named(manifests: list[dict[str, Any]]) -> list[str]:
    return [f"{manifest['kind']} {manifest['metadata']['name']}" for manifest in manifests]


def test_the_objects_of_a_job_in_their_order() -> None:
    manifests = job_manifests(job(), "secret-word")
    assert named(manifests) == [
        "ConfigMap elasticdl-job",
        "ConfigMap elasticdl-job-state",
        "Secret elasticdl-job-token",
        "Service elasticdl-job-master",
        "NetworkPolicy elasticdl-job",
        "Pod elasticdl-job-master",
    ]
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == "here"
        assert manifest["metadata"]["labels"].items() >= LABELS.items()
    assert manifests[1]["data"] == {}
    assert manifests[2]["stringData"] == {"token": "secret-word", "secret_flags.json": "{}"}
    assert manifests[5]["metadata"]["labels"]["status"] == "Pending"
    assert "secret-word" not in json.dumps(manifests[:2] + manifests[3:])


@pytest.mark.parametrize("flags", [{}, {"dry_run": True}, {"yaml": "/dev/stdout"}])
@pytest.mark.parametrize("name", ["a-state", "a-code-0", "a-state-code-12"])
def test_a_job_whose_config_map_would_be_one_of_another_job_is_refused(name: str, flags: dict[str, Any]) -> None:
    owner = name.removesuffix("-state").removesuffix("-code-0").removesuffix("-code-12")
    assert names.job_object(name) in (names.state_object(owner), *(names.code_object(owner, n) for n in (0, 12)))
    with pytest.raises(FlagError, match=f"--job_name={name}: the ConfigMap elasticdl-{name} .* of a job {owner}"):
        submit.run(JobSpec(job_name=name, **flags))


@pytest.mark.parametrize("name", ["state", "a-states", "a-code", "a-code-x", "code-0", "a-worker-0", "a-token"])
def test_a_job_whose_config_map_is_its_own_is_not_refused_for_its_name(name: str) -> None:
    names.check_own_names(name)


def test_services_lead_to_a_role_and_workers_are_found_by_their_slot() -> None:
    manifests = job_manifests(job(need_tf_config=True, num_workers=2, num_ps_pods=1), "t")
    services = {found["metadata"]["name"]: found["spec"] for found in manifests if found["kind"] == "Service"}
    assert list(services) == [f"elasticdl-job-{end}" for end in ("master", "ps-0", "worker-0", "worker-1")]
    role, index, slot = "elasticdl-replica-type", "elasticdl-replica-index", "elasticdl-worker-slot"
    assert services["elasticdl-job-master"] == {
        "selector": {**LABELS, role: "master", index: "0"},
        "ports": [{"name": "grpc", "port": 50001, "targetPort": 50001}],
    }
    assert services["elasticdl-job-ps-0"]["selector"] == {**LABELS, role: "ps", index: "0"}
    assert services["elasticdl-job-ps-0"]["ports"][0]["port"] == 2222
    assert services["elasticdl-job-worker-1"]["selector"] == {**LABELS, role: "worker", slot: "1"}
    assert services["elasticdl-job-worker-1"]["ports"][0]["port"] == 3333


def test_only_pods_of_the_job_reach_its_pods() -> None:
    [policy] = [found for found in job_manifests(job(), "t") if found["kind"] == "NetworkPolicy"]
    assert policy["apiVersion"] == "networking.k8s.io/v1"
    assert policy["spec"] == {
        "podSelector": {"matchLabels": LABELS},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": LABELS}}]}],
    }


def test_the_jobs_specification_is_as_its_pods_see_it() -> None:
    data = job_manifests(job(wait=True, force_use_kube_config_file=True, envs="A=1"), "t")[0]["data"]
    spec = JobSpec.from_json(data["spec.json"])
    assert (spec.model_zoo, spec.envs, spec.wait, spec.force_use_kube_config_file) == (
        "/model_zoo",
        "A=***",
        False,
        False,
    )
    other = job_manifests(job(model_zoo="/zoo", yaml="x.yaml", dry_run=True), "t")[0]["data"]
    spec = JobSpec.from_json(other["spec.json"])
    assert (spec.model_zoo, spec.yaml, spec.dry_run) == ("/zoo", "", False)


def test_the_master_can_be_made_again_from_the_jobs_config_map() -> None:
    manifests = job_manifests(job(), "t")
    assert master_pod(manifests[0]["data"], "job", "u-1") == owned(manifests[-1], "job", "u-1")


def test_yaml_holds_the_objects_and_abbreviates_nothing() -> None:
    manifests = job_manifests(job(need_tf_config=True, envs="A=ä: b\n"), "t")
    text = objects.to_yaml(manifests)
    assert list(yaml.safe_load_all(text)) == manifests
    assert "&id" not in text
    assert "*id" not in text


def test_a_dry_run_prints_yaml_and_nothing_else_and_needs_no_cluster(tmp_path: Path, closed_server: str) -> None:
    done = elasticdl(*TRAIN, "--dry_run", KUBECONFIG=str(kubeconfig(tmp_path / "config", closed_server)))
    assert done.returncode == 0, done.stderr
    assert named(list(yaml.safe_load_all(done.stdout)))[0] == "ConfigMap elasticdl-job"
    assert "nothing is checked against a cluster" in done.stderr
    assert "far-away" in done.stderr
    assert "token" in done.stderr


def test_yaml_goes_to_a_stream_and_nothing_else_with_it_and_no_file_takes_its_place(tmp_path: Path) -> None:
    done = submitted(tmp_path / "none", "--yaml=/proc/self/fd/1")  # to which /dev/stdout leads
    assert done.returncode == 0, done.stderr
    assert len(list(yaml.safe_load_all(done.stdout))) == 6
    assert "has been dumped" in done.stderr
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDWR), "rb"):  # so that the other end opens
        assert elasticdl(*TRAIN, f"--yaml={pipe}", KUBECONFIG=str(tmp_path / "none")).returncode == 0
    assert pipe.is_fifo()


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_yaml_goes_to_what_stdout_is_and_later_output_goes_behind_it(tmp_path: Path, path: str) -> None:
    file = tmp_path / "all.yaml"
    with file.open("wb") as stdout:
        assert train(tmp_path / "none", f"--yaml={path}", stdout=stdout).wait(120) == 0
        stdout.write(b"---\nmore: 1\n")
    assert len(found := list(yaml.safe_load_all(file.read_text()))) == 7
    assert found[-1] == {"more": 1}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = train(tmp_path / "none", f"--yaml={path}", stdout=theirs)
        theirs.close()
        assert len(list(yaml.safe_load_all(ours.makefile().read()))) == 6
        assert process.wait(120) == 0


def test_yaml_is_written_to_a_file_for_the_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    done = elasticdl(*TRAIN, f"--yaml={file}", KUBECONFIG=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"ElasticDL job job YAML has been dumped into file {file}.\n"
    assert len(list(yaml.safe_load_all(file.read_text()))) == 6
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]
    refused = elasticdl(*TRAIN, f"--yaml={tmp_path}/no/job.yaml", KUBECONFIG=str(tmp_path / "none"))
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr


def test_a_cluster_that_does_not_answer_is_named_with_its_context(tmp_path: Path, closed_server: str) -> None:
    done = submitted(kubeconfig(tmp_path / "config", closed_server))
    assert done.returncode == 2
    assert f"The cluster of context far-away ({closed_server}) cannot be reached: Connection refused." in done.stderr
    assert "kubectl config" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Retrying" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("context", ["", "far-away"])
@pytest.mark.parametrize(
    "files",
    [
        "",
        ":~/.kube/config",
        "~/.kube/config:~/empty",
        "~/comment:~/.kube/config:~/separator",
        "~/current:~/none:~/.kube/config",
        "~/.kube/config:~/other",
        "~/.kube/config:~/cleared",
        "~/cleared:~/.kube/config:~/namesake",
    ],
)
def test_the_files_of_kubeconfig_are_merged_as_kubectl_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, context: str
) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", "https://127.0.0.1:1")
    (tmp_path / "empty").touch()
    (tmp_path / "comment").write_text("# nothing\n")
    (tmp_path / "separator").write_text("---\n")
    (tmp_path / "current").write_text("current-context: far-away\n")
    (tmp_path / "cleared").write_text("current-context: ''\n")
    kubeconfig(tmp_path / "other", "https://127.0.0.1:2", context="near-by")
    kubeconfig(tmp_path / "namesake", "https://127.0.0.1:2")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", files)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert is_configured()
    found = connect(context=context)
    assert (found.context, found.server) == ("far-away", "https://127.0.0.1:1")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no usable cluster configuration in"),
        ("", "no usable cluster configuration in"),
        ("{", "no usable cluster configuration in"),
        ("[]", "no usable cluster configuration in"),
        ("a text", "no usable cluster configuration in"),
        ("unknown context", "nonesuch"),
    ],
)
def test_an_unusable_kubeconfig_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, said: str
) -> None:
    config = tmp_path / "config"
    if content == "unknown context":
        kubeconfig(config, "https://127.0.0.1:1", chosen="nonesuch")
    elif content is not None:
        config.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(config))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError) as caught:
        connect()
    assert said in caught.value.what
    assert str(config) in caught.value.what
    assert "KUBECONFIG" in caught.value.hint


def test_inside_a_pod_the_pods_cluster_counts_unless_the_file_is_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", "https://127.0.0.1:1")))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ClusterError, match="service account") as caught:
        connect()
    assert "--force_use_kube_config_file" in caught.value.hint
    for forced in (connect(force_kube_config=True), connect(context="far-away")):
        assert (forced.context, forced.server) == ("far-away", "https://127.0.0.1:1")


def test_another_context_than_the_current_one_may_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    kubeconfig(config, "https://127.0.0.1:1", chosen="nonesuch")
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert connect(context="far-away").server == "https://127.0.0.1:1"
    with pytest.raises(ClusterError, match=r"no context near-by in .*config") as caught:
        connect(context="near-by")
    assert "far-away" in caught.value.hint


def test_a_server_without_tls_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            caller, _ = plain.accept()
            with caller:
                caller.recv(1)
                caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = submitted(kubeconfig(tmp_path / "config", f"https://127.0.0.1:{plain.getsockname()[1]}"))
        thread.join()
    *_, error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert "cannot be reached: [SSL: " in error
    assert hint.startswith("  → ")


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("KUBECONFIG", str(config))
        connection = connect(force_kube_config=True)
        with pytest.raises(ClusterError, match="cannot be reached") as caught, connection.doing("look"):
            connection.get(object_path("namespaces"))
    assert caught.value.unreachable


def test_what_would_be_lost_with_a_pod_is_said() -> None:
    volume = "claim_name=c,mount_path=/data"
    assert mount_notes(job(volume=volume, checkpoint_dir="/data/checkpoints", output="/data/model")) == []
    with pytest.raises(FlagError, match="--output=/database/model is on no mount"):
        mount_notes(job(volume=volume, checkpoint_dir="/data/checkpoints", output="/database/model"))
    with pytest.raises(FlagError, match="--bad_records_dir=/bad is on no mount"):
        mount_notes(job(volume=volume, checkpoint_dir="/data/checkpoints", bad_records_dir="/bad"))
    with pytest.raises(FlagError, match=r"--log_file_path=/var/log/job\.log is on no mount"):
        mount_notes(job(volume=volume, checkpoint_dir="/data/checkpoints", log_file_path="/var/log/job.log"))
    [note] = mount_notes(job(volume=volume, checkpoint_dir="/tmp/c"))
    assert "lost with the pod" in note
    own = "claim_name=c,mount_path=/data;empty_dir=1Gi,mount_path=/data/here;secret_name=s,mount_path=/secret"
    [note] = mount_notes(job(volume=own, checkpoint_dir="/data/here/c"))
    assert "is on an empty_dir of --volume: files written there are lost with the pod" in note
    with pytest.raises(FlagError, match="on /secret, which cannot be written to"):
        mount_notes(job(volume=own, checkpoint_dir="/secret/c"))
    [note] = mount_notes(job())
    assert "without --checkpoint_dir" in note
    assert "parameter server" in note
    assert mount_notes(dataclasses.replace(job(), job_command="python tell.py", num_ps_pods=0)) == []
    [note] = mount_notes(job(distribution_strategy="AllReduceStrategy"))
    assert "all workers" in note
    assert "parameter server" not in note
    [note] = mount_notes(job(distribution_strategy="Local", num_workers=1))
    assert "worker" in note


def test_the_manifest_of_rights_is_what_the_command_prints() -> None:
    done = elasticdl("rbac", "--print")
    assert done.stdout == (ROOT / "manifests" / "rbac.yaml").read_text()
    assert list(yaml.safe_load_all(done.stdout)) == rbac.manifests("default", "elasticdl")


def test_a_master_has_these_rights_and_no_others() -> None:
    _, role, binding = rbac.manifests("here", "me")
    rules = {(rule["apiGroups"][0], rule["resources"][0]): set(rule["verbs"]) for rule in role["rules"]}
    assert rules == {
        ("", "pods"): {"create", "delete", "get", "list", "watch", "patch"},
        ("", "pods/log"): {"get"},
        ("", "configmaps"): {"get", "watch", "update", "patch", "delete"},
        ("", "secrets"): {"patch"},
        ("", "services"): {"patch"},
        ("networking.k8s.io", "networkpolicies"): {"patch"},
        ("", "events"): {"list", "create"},
        ("", "limitranges"): {"list"},
        ("", "pods/resize"): {"patch"},
    }
    assert role["kind"] == "Role"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "me", "namespace": "here"}]
    assert binding["roleRef"]["kind"] == "Role"


def test_the_rights_of_a_user_are_printed_for_the_named_one() -> None:
    done = elasticdl("rbac", "--for=user", "--group=team", "-n", "here")
    role, binding = yaml.safe_load_all(done.stdout)
    rules = {(rule["apiGroups"][0], rule["resources"][0]): set(rule["verbs"]) for rule in role["rules"]}
    for right in rbac.USER_RIGHTS:
        assert rules[right.group, right.resource] >= set(right.verbs)
    assert "get" in rules["", "pods/log"]
    assert "get" not in rules["", "secrets"]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "here"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "Group", "name": "team", "apiGroup": rbac.RBAC_GROUP}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--for=user"], "needs the name of one user or group"),
        (["--for=user", "--user=me", "--group=us"], "needs the name of one user or group"),
        (["--user=me"], "Give --for=user"),
        (["--for=guest"], "--for is master or user"),
    ],
)
def test_rights_without_a_user_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(FlagError) as caught:
        rbac_command.run(["--print", *arguments])
    assert said in str(caught.value)


def test_the_manifests_are_yaml_and_name_the_priorities_that_jobs_use() -> None:
    found = {file.name: list(yaml.safe_load_all(file.read_text())) for file in (ROOT / "manifests").glob("*.yaml")}
    values = {manifest["metadata"]["name"]: manifest["value"] for manifest in found["priority_classes.yaml"]}
    assert values == {"high": 1_000_000, "low": 1000}
    readme = (ROOT / "manifests" / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in found)


class Silent(BaseHTTPRequestHandler):
    """Answers for a namespace that is called a number after that number of seconds, for another one never."""

    def do_GET(self) -> None:
        namespace = self.path.split("/")[4]
        self.server.given_up.wait(int(namespace) if namespace.isdigit() else None)  # type: ignore[attr-defined]
        with suppress(OSError):  # the client does not wait
            self.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Length: 13\r\n\r\n{"items": []}')

    def log_message(self, *_: object) -> None:
        """Tests look at what the client makes of it."""


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The URL of a server that accepts connections and requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.given_up = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.given_up.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


@pytest.mark.timeout(25)
def test_a_cluster_that_was_not_asked_for_and_does_not_answer_is_given_up(
    tmp_path: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one is behind a proxy that waits for a machine that is off."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", silent_server)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert commands.run("list", []) == 0
    assert f"only jobs of this machine: The cluster of context far-away ({silent_server})" in capsys.readouterr().err


def test_a_cluster_that_has_answered_has_more_time(
    tmp_path: Path, silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", silent_server)))
    connection = connect(force_kube_config=True, first_answer_s=0.5)

    def look(namespace: str) -> None:
        with connection.doing("look"):
            connection.get(object_path("configmaps", namespace=namespace))

    with pytest.raises(ClusterError, match="cannot be reached"):
        look("1")
    look("0")
    look("1")
