"""list, status, logs, delete, clean and resume on the objects of real jobs, whose pods only print and wait."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from submission_scene import KINDS, NO_ROOM, ROOT, Scene

from elasticdl_client.chaos.faults import Fault, FaultKind
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_status import JobPhase, JobStatus
from elasticdl_client.jobs import cluster_objects, commands
from elasticdl_client.jobs.kubernetes_jobs import KubernetesJobs
from elasticdl_client.kubernetes import names, objects, submit
from elasticdl_client.kubernetes.api import ClusterError
from elasticdl_client.kubernetes.pods import Manifest, pod_manifest
from tests.lines import next_line

pytestmark = pytest.mark.cluster
Run = Callable[..., str]
SMALL = "cpu=10m,memory=32Mi"
PLAYER = """
import contextlib, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with contextlib.suppress(FileExistsError):  # a test may have written already
    os.mkfifo("/tmp/end")
print("begins", flush=True)
code = int(open("/tmp/end").read())
print("ends with", code, flush=True)
sys.exit(code)
"""
STATUS = JobStatus(
    "job", JobPhase.RUNNING, generation=1, epoch=1, num_epochs=2, records_done=50, records_total=200, updated_at=1.0
)


class Jobs:
    """Jobs in a scene's namespace, and what happens to them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.core = scene.core
        self.uids: dict[str, str] = {}

    def make(self, name: str = "job", *, room: str = SMALL, owned: bool = True) -> None:
        """The objects of a submission, the master's pod printing and waiting."""
        spec = self.scene.spec(job_name=name, service_account="default", master_resource_request=room, num_workers="2")
        owner, *others = objects.job_manifests(spec, "secret")
        play(others[-1])
        owner["data"][names.MASTER_POD_KEY] = json.dumps(others[-1])
        if owned:
            self.uids[name] = submit.create(self.scene.connection, spec, [owner, *others])
        else:
            self.scene.apply(owner, *others)

    def add_worker(self, index: int, room: str = SMALL) -> None:
        spec = self.scene.spec(worker_resource_request=room)
        pod = dataclasses.replace(
            objects.role_pod(spec, "worker"), name=names.pod_name("job", "worker", index), index=index
        )
        manifest = pod_manifest(spec, pod, self.uids["job"])
        play(manifest)
        self.core.create_namespaced_pod(self.scene.namespace, manifest)

    def wait_ready(self, role: str = "master") -> None:
        self.scene.kubectl("wait", "--for=condition=Ready", f"pod/elasticdl-job-{role}", "--timeout=100s")

    def end_container(self, role: str, code: int) -> None:
        """Lets the process of a pod end."""
        self.scene.kubectl("exec", f"elasticdl-job-{role}", "--", "sh", "-c", f"echo {code} > /tmp/end")

    def write(self, status: JobStatus, job: str = "job") -> None:
        """The status that a master would write."""
        body = {"data": {names.STATUS_KEY: status.to_json()}}
        self.core.patch_namespaced_config_map(names.state_object(job), self.scene.namespace, body)

    def label(self, status: str) -> None:
        body = {"metadata": {"labels": {names.STATUS_LABEL: status}}}
        self.core.patch_namespaced_pod("elasticdl-job-master", self.scene.namespace, body)

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """`elasticdl COMMAND job …`."""
        words = [sys.executable, "-m", "elasticdl_client.main", command, "job", "-n", self.scene.namespace, *arguments]
        return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def follow(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("logs", "-f", *arguments)


def play(manifest: Manifest) -> None:
    manifest["spec"]["containers"][0]["command"] = ["python", "-c", PLAYER]


@pytest.fixture
def jobs(empty: Scene) -> Jobs:
    """A namespace whose default service account is there."""
    core = empty.core
    accounts = core.list_namespaced_service_account
    assert cluster_objects.wait_until(lambda: bool(accounts(empty.namespace).items), 30)
    return Jobs(empty)


@pytest.fixture
def run(empty: Scene, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert commands.run(command, [*arguments, "-n", empty.namespace]) == code
        return capsys.readouterr().out

    return run


def shown(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("status", "job", "-o", "json"))
    return found


def test_a_namespace_without_jobs_says_so_as_kubectl_does(
    empty: Scene, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run("list", ["-n", empty.namespace]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"No jobs found in {empty.namespace} namespace.\n")
    assert run("list", "-o", "json") == "[]\n"
    with pytest.raises(JobError, match=f'job "job" not found in {empty.namespace} namespace'):
        run("status", "job")


def test_a_job_is_shown_by_its_status_and_by_its_pods(jobs: Jobs, run: Run) -> None:
    jobs.make()
    assert shown(run)["phase"] == "Pending"
    jobs.wait_ready()
    jobs.write(STATUS)
    jobs.add_worker(0)
    jobs.add_worker(7, room=NO_ROOM)
    jobs.wait_ready("worker-0")
    heads, row = run("list").splitlines()
    assert heads.split() == ["NAME", "RUNTIME", "PHASE", "WORKERS", "PS", "RECORDS", "AGE"]
    assert row.split()[:6] == ["job", "kubernetes", "Running", "1/2", "0/1", "25%"]
    assert cluster_objects.wait_until(lambda: "Insufficient cpu" in shown(run)["pods"][2]["message"], 30)
    found = shown(run)
    assert [pod["name"].rpartition("job-")[2] for pod in found["pods"]] == ["master", "worker-0", "worker-7"]
    assert found["pods"][2]["phase"] == "Pending"
    page = run("status", "job")
    assert "No worker runs" not in page
    assert "Records:      50/200 (25%)" in page
    assert commands.run("list", ["-A", "--runtime=kubernetes", "-o", "json"]) == 0
    jobs.end_container("worker-0", 3)
    assert cluster_objects.wait_until(lambda: shown(run)["pods"][1]["message"] == "Error, exit code 3", 30)
    page = run("status", "job")
    assert "No worker runs yet; pending worker: Unschedulable: 0/" in page
    assert run("list", "-o", "name") == "job/job\n"
    with pytest.raises(JobError, match="it has a master already"):
        run("resume", "job")


def test_a_job_whose_master_has_no_room_says_why(jobs: Jobs, run: Run) -> None:
    jobs.make(room=NO_ROOM)
    assert cluster_objects.wait_until(lambda: "Insufficient cpu" in run("status", "job"), 30)
    assert "No worker runs yet; pending master: Unschedulable" in run("status", "job")
    with pytest.raises(JobError, match="has printed nothing yet: Unschedulable"):
        run("logs", "job")
    assert run("logs", "job", "--all") == ""
    with pytest.raises(JobError, match='worker-0" of job job not found'):
        run("logs", "job", "--role=worker-0")


def test_a_job_without_its_master_says_so_and_resume_brings_it_back(jobs: Jobs, run: Run) -> None:
    jobs.make()
    jobs.wait_ready()
    jobs.write(STATUS)
    before = jobs.core.read_namespaced_pod("elasticdl-job-master", jobs.scene.namespace)
    jobs.scene.take_away("elasticdl-job-master")
    page = run("status", "job")
    assert "Phase:        Stopped" in page
    assert "Its master's pod is gone, and the job has not ended." in page
    assert f"elasticdl resume job --namespace={jobs.scene.namespace}" in page
    assert 'job "job" resumed' in run("resume", "job")
    after = jobs.core.read_namespaced_pod("elasticdl-job-master", jobs.scene.namespace)
    assert after.metadata.owner_references == before.metadata.owner_references
    assert after.spec.containers[0].command == before.spec.containers[0].command
    assert shown(run)["phase"] == "Running"
    jobs.wait_ready()
    jobs.write(dataclasses.replace(STATUS, phase=JobPhase.FAILED, exit_code=1, message="feed raised: broken"))
    assert "Message:      feed raised: broken" in run("status", "job")
    jobs.scene.take_away("elasticdl-job-master")
    assert shown(run)["phase"] == "Failed"
    with pytest.raises(JobError, match="has ended"):
        run("resume", "job")


def test_a_master_that_was_ended_for_good_is_replaced(jobs: Jobs, run: Run) -> None:
    jobs.make()
    jobs.wait_ready()
    jobs.write(STATUS)
    body = {"spec": {"activeDeadlineSeconds": 1}}
    jobs.core.patch_namespaced_pod("elasticdl-job-master", jobs.scene.namespace, body)
    assert cluster_objects.wait_until(lambda: shown(run)["phase"] == "Stopped", 60)
    assert "DeadlineExceeded" in run("status", "job")
    assert json.loads(run("resume", "job", "-o", "json"))["resumed"] is True
    jobs.wait_ready()


def test_logs_follow_the_master_through_restart_deletion_and_resume(jobs: Jobs, run: Run) -> None:
    jobs.make()
    jobs.wait_ready()
    jobs.write(STATUS)
    reader = jobs.follow()
    assert next_line(reader) == "begins\n"
    jobs.end_container("master", 5)
    assert [next_line(reader) for _ in range(2)] == ["ends with 5\n", "begins\n"]
    jobs.scene.take_away("elasticdl-job-master")
    run("resume", "job")
    assert next_line(reader) == "begins\n"
    assert run("logs", "job") == "begins\n"
    assert run("logs", "job", "--tail=0") == ""
    jobs.wait_ready()
    jobs.write(dataclasses.replace(STATUS, phase=JobPhase.SUCCEEDED, exit_code=0))
    jobs.label("Finished")
    jobs.end_container("master", 0)
    rest, _ = reader.communicate(timeout=60)
    assert rest == "ends with 0\n"
    assert reader.returncode == 0
    assert run("logs", "job") == "begins\nends with 0\n"


def test_logs_of_all_pods_are_followed_successors_included(jobs: Jobs, run: Run) -> None:
    jobs.make()
    jobs.add_worker(0)
    jobs.wait_ready()
    jobs.wait_ready("worker-0")
    reader, one = jobs.follow("--all", "-o", "json"), jobs.follow("--role=worker-0")
    seen = {json.loads(next_line(reader))["pod"] for _ in range(2)}
    assert seen == {"elasticdl-job-master", "elasticdl-job-worker-0"}
    jobs.end_container("worker-0", 1)
    assert json.loads(next_line(reader)) == {"pod": "elasticdl-job-worker-0", "line": "ends with 1"}
    assert one.communicate(timeout=60)[0] == "begins\nends with 1\n"
    jobs.add_worker(2)
    assert json.loads(next_line(reader)) == {"pod": "elasticdl-job-worker-2", "line": "begins"}
    assert "[elasticdl-job-worker-2] begins" in run("logs", "job", "--all").splitlines()
    assert '"deleted": true' in run("delete", "job", "-o", "json")
    reader.communicate(timeout=60)
    assert reader.returncode == 0


def test_scale_annotates_the_jobs_config_map_and_a_user_may_do_so(jobs: Jobs, run: Run) -> None:
    jobs.make(room=NO_ROOM)
    assert run("scale", "job", "--num_workers=5") == 'job "job" scaled: workers 2 → 5\n'
    annotation = f"{names.NUM_WORKERS_ANNOTATION}=3"
    jobs.scene.kubectl("annotate", "configmap", names.job_object("job"), annotation, "--overwrite")
    assert run("scale", "job", "--num_workers=4", "--current_num_workers=3", "-o", "name") == "job/job\n"
    found = jobs.core.read_namespaced_config_map(names.job_object("job"), jobs.scene.namespace)
    assert found.metadata.annotations[names.NUM_WORKERS_ANNOTATION] == "4"
    with pytest.raises(JobError, match="has 4 workers, not 2"):
        run("scale", "job", "--num_workers=1", "--current_num_workers=2")
    jobs.write(dataclasses.replace(STATUS, phase=JobPhase.SUCCEEDED, exit_code=0))
    with pytest.raises(JobError, match="has ended"):
        run("scale", "job", "--num_workers=1")


def test_chaos_deletes_pods_without_grace_and_makes_a_masters_pod_again(jobs: Jobs) -> None:
    jobs.make()
    jobs.add_worker(0)
    for role in ("master", "worker-0"):
        jobs.wait_ready(role)
    store = KubernetesJobs(jobs.scene.connection, jobs.scene.namespace)
    job = store.find("job")
    assert job is not None
    injector, of_worker, of_master = store.faults(job), *(Fault(FaultKind.KILL, role) for role in ("worker", "master"))
    injector.check([of_worker, of_master])
    [worker], [master] = injector.running("worker"), injector.running("master")
    assert (worker.subject, master.subject) == ("worker-0", "master")
    injector.inject(of_worker, worker)
    injector.inject(of_worker, worker)  # it is gone, which is no error
    assert injector.running("worker") == []
    injector.inject(of_master, master)
    jobs.wait_ready()
    [successor] = injector.running("master")
    assert successor.uid != master.uid
    injector.inject(of_master, master)  # of the name there is another pod, which is not meant
    assert injector.running("master") == [successor]
    jobs.core.delete_namespaced_pod(successor.name, jobs.scene.namespace, grace_period_seconds=0)
    injector.undo(of_master, successor)
    jobs.wait_ready()
    assert len(injector.running("master")) == 1


def test_delete_leaves_nothing_and_takes_many(jobs: Jobs, run: Run) -> None:
    jobs.make()
    jobs.make("other", owned=False)
    jobs.add_worker(0)
    # A kubelet of 1.20 may look at a pod that goes before it has noted that the container runs only a minute later.
    jobs.scene.kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=100s")
    printed = run("delete", "job", "nonsense", "other", code=1)
    assert printed.splitlines() == [
        f'job "{name}" deleted from {jobs.scene.namespace} namespace' for name in ("job", "other")
    ]
    jobs.scene.kubectl("get", "secrets,services,networkpolicies,configmaps,pods", "-l", "elasticdl-job-name")
    assert jobs.scene.left() == []


def test_delete_without_waiting_comes_back_at_once_and_time_outs_name_what_is_left(
    jobs: Jobs, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.make(room=NO_ROOM)
    body: dict[str, Any] = {"metadata": {"finalizers": ["example.com/hold"]}}
    jobs.core.patch_namespaced_config_map("elasticdl-job-state", jobs.scene.namespace, body)
    run("delete", "job", "--no_wait")
    there = ["get", KINDS, "-l", "elasticdl-job-name", "-o", "name"]
    held = ["configmap/elasticdl-job-state"]
    assert cluster_objects.wait_until(lambda: jobs.scene.kubectl(*there).split() == held, 60)
    assert commands.run("delete", ["job", "--timeout=2", "-n", jobs.scene.namespace]) == 1
    assert "still something of job job: configmap/elasticdl-job-state." in capsys.readouterr().err
    assert "It is being deleted" in run("status", "job")
    with pytest.raises(JobError, match="no ConfigMap elasticdl-job"):
        run("resume", "job")
    body["metadata"]["finalizers"] = None
    jobs.core.patch_namespaced_config_map("elasticdl-job-state", jobs.scene.namespace, body)
    jobs.scene.wait_until_gone()


def test_clean_deletes_ended_jobs_alone(jobs: Jobs, run: Run) -> None:
    for name in ("job", "done", "broken"):
        jobs.make(name, room=NO_ROOM)
    jobs.write(dataclasses.replace(STATUS, phase=JobPhase.SUCCEEDED, exit_code=0), "done")
    jobs.write(dataclasses.replace(STATUS, phase=JobPhase.FAILED, exit_code=1), "broken")
    assert "(dry run)" in run("clean", "--dry_run")
    printed = run("clean")
    assert sorted(line.split()[1] for line in printed.splitlines()) == ['"broken"', '"done"']
    assert run("list", "-o", "name") == "job/job\n"


def test_a_user_without_rights_and_a_cluster_out_of_reach_are_said(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(jobs.scene.user([])))
    with pytest.raises(ClusterError, match="forbidden"):
        commands.run("list", ["-n", jobs.scene.namespace])
    monkeypatch.setenv("KUBECONFIG", str(jobs.scene.kubeconfig("away", server="https://127.0.0.1:1")))
    with pytest.raises(ClusterError, match="context away"):
        commands.run("list", ["--runtime=kubernetes"])
    assert commands.run("list", []) == 0
    assert "note: only jobs of this machine: The cluster of context away" in capsys.readouterr().err


def test_a_name_that_two_runtimes_have_must_be_distinguished(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    jobs.make(room=NO_ROOM)
    directory = tmp_path / ".elasticdl" / "jobs" / "job"
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    (directory / "spec.json").write_text(json.dumps({"job_name": "job"}))
    config = jobs.scene.kubeconfig("here")
    config.write_text(
        config.read_text().replace("cluster: c\n", f"cluster: c\n    namespace: {jobs.scene.namespace}\n")
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(config))
    with pytest.raises(FlagError, match="two jobs") as caught:
        commands.run("delete", ["job"])
    assert "--runtime" in caught.value.hint
    assert commands.run("delete", ["job", "--runtime=local"]) == 0
    assert not directory.exists()
    assert commands.run("delete", ["job"]) == 0


def test_logs_have_kubectls_options_and_status_watches_to_the_end(jobs: Jobs, run: Run) -> None:
    jobs.make()
    jobs.add_worker(0)
    jobs.wait_ready()
    jobs.wait_ready("worker-0")
    jobs.write(STATUS)
    watching = jobs.start("status", "--watch")
    assert next_line(watching) == "job: Running\n"
    assert run("logs", "job", "--role=worker") == "[elasticdl-job-worker-0] begins\n"
    assert run("logs", "job", "--pod=elasticdl-job-worker-0", "--since=1h") == "begins\n"
    with pytest.raises(JobError, match="no earlier log"):
        run("logs", "job", "--previous")
    jobs.end_container("master", 5)
    assert cluster_objects.wait_until(lambda: shown(run)["pods"][0]["restarts"] == 1, 60)
    jobs.wait_ready()
    assert run("logs", "job", "--previous") == "begins\nends with 5\n"
    jobs.write(dataclasses.replace(STATUS, phase=JobPhase.FAILED, exit_code=7, message="feed raised: broken"))
    rest, _ = watching.communicate(timeout=60)
    assert "feed raised: broken" in rest
    assert watching.returncode == 7
