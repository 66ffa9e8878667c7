"""A job on Kubernetes, submitted as a user would, and watched from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.client.exceptions import ApiException
from prometheus_client.parser import text_string_to_metric_families
from urllib3.exceptions import HTTPError

from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus
from elasticdl_client.kubernetes import names
from tests import ready_client
from tests.e2e_kubernetes.kubectl import REPOSITORY, kubectl, list_pods, read_config_map, read_pod
from tests.e2e_kubernetes.pods import PodView
from tests.e2e_kubernetes.recorder import Recorder, describe_events
from tests.e2e_kubernetes.waiting import wait_until

ENDED = (JobPhase.SUCCEEDED, JobPhase.FAILED)
_BRISK_S = 0.02  # for a record
_LOOK_S = 0.2  # at the least between two looks at what has changed

_CLIENT = (sys.executable, "-m", "elasticdl_client.main")


def elasticdl(*arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """A command of the client, run to its end."""
    return ready_client.elasticdl(*arguments, timeout_s=timeout_s, environment={**os.environ, "COLUMNS": "160"})


@dataclass(slots=True)
class KubernetesJob:
    """``elasticdl train …`` in a namespace, or another command.

    Attributes:
        directory: on this machine; the pods have it as /job.
        num_records: in an epoch.
    """

    namespace: str
    name: str
    flags: dict[str, object]
    directory: Path
    recorder: Recorder
    num_records: int
    command: str = "train"
    output: list[str] = field(default_factory=list)
    _in_mirror: bool = False

    def client(self, command: str, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """``elasticdl COMMAND JOB --namespace=… ARGUMENTS``."""
        done = elasticdl(command, self.name, f"--namespace={self.namespace}", *arguments, timeout_s=timeout_s)
        self.output += [f"$ elasticdl {command} {self.name}", *(done.stdout + done.stderr).splitlines()]
        return done

    def try_to_submit(self) -> subprocess.CompletedProcess[str]:
        done = elasticdl(*self._submission())
        self.output += [f"$ elasticdl {self.command}", *(done.stdout + done.stderr).splitlines()]
        return done

    def submit_and_follow(self) -> subprocess.Popen[bytes]:
        """Return the client of a submission with --wait, which prints until the job has ended."""
        command = [*_CLIENT, *self._submission(), "--wait=true"]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def _submission(self) -> list[str]:
        flags = {"job_name": self.name, "namespace": self.namespace, **self.flags}
        return [self.command, *(f"--{name}={value}" for name, value in flags.items())]

    def submit(self) -> KubernetesJob:
        done = self.try_to_submit()
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return self

    # --- What a test does to it -------------------------------------------------------------------------------------

    def set_pace(self, seconds_per_record: float) -> None:
        """How slow the paced models read from now on; 0: as fast as they can."""
        new = self.directory / "pace.new"
        new.write_text(str(seconds_per_record))
        new.replace(self.directory / "pace")

    @contextmanager
    def brisk(self) -> Iterator[None]:
        """While the test waits for training itself; while it waits for pods, a short job must not come to its end."""
        pace = float((self.directory / "pace").read_text())
        self.set_pace(min(pace, _BRISK_S))
        try:
            yield
        finally:
            self.set_pace(pace)

    def hurry(self) -> None:
        """The test has seen what it came for: the rest of the job at full speed."""
        self.set_pace(0)

    def delete_pod(self, *pod_names: str) -> None:
        kubectl("-n", self.namespace, "delete", "pod", *pod_names, "--wait=false")

    # --- What it sees -----------------------------------------------------------------------------------------------

    def status(self) -> JobStatus | None:
        """From the ConfigMap with the job's state; nothing before the master's first word or without an API server."""
        name = names.state_object(self.name)
        try:
            found = self.recorder.mirror.config_map(name) if self._in_mirror else read_config_map(self.namespace, name)
        except (ApiException, HTTPError, OSError):
            return None
        text = found.get(names.STATUS_KEY)
        return JobStatus.from_json(text) if text else None

    def version(self) -> int:
        status = self.status()
        return status.model_version if status else 0

    def pods(self, role: str = "") -> list[PodView]:
        """Of a role, or all of them, by index."""
        wanted = {names.JOB_LABEL: self.name} | ({names.ROLE_LABEL: role} if role else {})
        if self._in_mirror:
            all_pods = self.recorder.mirror.pods()
            found = [pod for pod in all_pods if wanted.items() <= pod["metadata"].get("labels", {}).items()]
        else:
            found = list_pods(self.namespace, ",".join(f"{label}={value}" for label, value in wanted.items()))
        return sorted(map(PodView.of, found), key=lambda pod: (pod.role, pod.index))

    def pod(self, name: str) -> PodView | None:
        return next((pod for pod in self.pods() if pod.name == name), None)

    def the_pod(self, name: str) -> PodView:
        found = self.pod(name)
        assert found is not None, f"there is no pod {name}\n{self.story()}"
        return found

    def running(self, role: str) -> list[str]:
        return [pod.name for pod in self.pods(role) if pod.running]

    def manifest(self, pod_name: str) -> dict[str, Any]:
        return read_pod(self.namespace, pod_name)

    def worker(self, index: int) -> str:
        return names.pod_name(self.name, "worker", index)

    def server(self, index: int) -> str:
        return names.pod_name(self.name, "ps", index)

    @property
    def master(self) -> str:
        return names.pod_name(self.name, "master", 0)

    def log(self, pod_name: str) -> str:
        return self.recorder.log(pod_name)

    def scrape(self) -> dict[str, float]:
        """The master's metrics by name, those with labels summed; through the API server, as --metrics_port says."""
        place = f"/api/v1/namespaces/{self.namespace}/pods/{self.master}:{self.flags['metrics_port']}/proxy/metrics"
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(kubectl("get", "--raw", place)):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def checkpoints(self) -> list[int]:
        """Versions of which there is a whole checkpoint, read from the disk: needs no API server."""
        found = (self.directory / "checkpoints").glob("version-*/MANIFEST.json")
        return sorted(int(path.parent.name.removeprefix("version-")) for path in found)

    def has_open_checkpoint(self) -> bool:
        """Whether the newest checkpoint has been begun and has no manifest yet."""
        versions = (self.directory / "checkpoints").glob("version-*")
        newest = max(versions, key=lambda path: int(path.name.removeprefix("version-")), default=None)
        return newest is not None and not (newest / "MANIFEST.json").exists()

    # --- What it waits for ------------------------------------------------------------------------------------------

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_s: float = 240.0) -> float:
        """Seconds until the condition held; a failed job ends the wait, too."""

        has_held = False

        def is_over() -> bool:
            nonlocal has_held
            has_held = self._holds(condition)  # once is enough: it may not hold any more a moment later
            return has_held or self._has_failed()

        took = self._wait(what, is_over, timeout_s)
        assert has_held, f"the job failed while the test waited for: {what}\n{self.story()}"
        return took

    def _wait(self, what: str, is_over: Callable[[], bool], timeout_s: float) -> float:
        """Look again after each change of pods, status and logs, and for what is on the disk from time to time."""
        known = 0

        def pause(look_s: float) -> None:
            nonlocal known
            threading.Event().wait(_LOOK_S)  # changes come in swarms
            known = self.recorder.mirror.wait_for_change(known, look_s)

        return wait_until(what, is_over, timeout_s, self.story, pause=pause)

    def _holds(self, condition: Callable[[], bool]) -> bool:
        """Whether it holds in the mirror and, as that may be behind, by the API server's own word."""
        self._in_mirror = True
        try:
            if not condition():
                return False
        finally:
            self._in_mirror = False
        return condition()

    def _has_failed(self) -> bool:
        def failed() -> bool:
            status = self.status()
            return status is not None and status.phase is JobPhase.FAILED

        return self._holds(failed)

    def wait_for_running(self, role: str, count: int, timeout_s: float = 360.0) -> float:
        return self.wait_until(
            f"{count} running pods of role {role}", lambda: len(self.running(role)) == count, timeout_s
        )

    def wait_for_pod(self, name: str, timeout_s: float = 240.0) -> float:
        return self.wait_until(f"{name} to run", lambda: name in self.running(""), timeout_s)

    def wait_for_progress(self, minibatches: int = 8, timeout_s: float = 180.0) -> float:
        """Wait until this number of further minibatches is committed."""
        goal = self.version() + minibatches
        with self.brisk():
            return self.wait_until(f"model version {goal}", lambda: self.version() >= goal, timeout_s)

    def wait_for_loss(self, pod_name: str, timeout_s: float = 180.0) -> float:
        """Until a worker has computed something."""
        with self.brisk():
            return self.wait_until(
                f"a loss in the log of {pod_name}", lambda: "Loss = " in self.log(pod_name), timeout_s
            )

    def wait_for_checkpoint(self, timeout_s: float = 120.0) -> float:
        with self.brisk():
            return self.wait_until("a checkpoint", lambda: bool(self.checkpoints()), timeout_s)

    def wait_for_open_checkpoint(self) -> None:
        """Until servers are writing one, which takes them some milliseconds."""
        wait_until("a checkpoint being written", self.has_open_checkpoint, 60, self.story, look_s=0.001)

    def wait_for_end(self, timeout_s: float = 300.0) -> JobStatus:
        def ended() -> bool:
            status, master = self.status(), self.pod(self.master)
            return status is not None and status.phase in ENDED and (master is None or not master.running)

        self._wait("the end of the job", lambda: self._holds(ended), timeout_s)
        status = self.status()
        assert status is not None
        return status

    def assert_ends_exactly(self, timeout_s: float = 300.0) -> None:
        """Lets the job finish: exit code 0, and each record of each epoch in the model exactly once."""
        self.hurry()
        status = self.wait_for_end(timeout_s)
        print(f"{self.name}: {total(status.coverage)} (exit code {status.exit_code})", flush=True)
        assert (status.phase, status.exit_code) == (JobPhase.SUCCEEDED, 0), self.story()
        assert self.the_pod(self.master).state == "Succeeded", self.story()
        assert self.manifest(self.master)["metadata"]["labels"][names.STATUS_LABEL] == "Finished"
        assert len(status.coverage) == self.flags["num_epochs"], self.story()
        for epoch in status.coverage:
            counted = (epoch.records, epoch.committed, epoch.repeated, epoch.lost)
            assert counted == (self.num_records, self.num_records, 0, 0), f"{epoch}\n{self.story()}"

    def events(self) -> list[dict[str, Any]]:
        """Return the output of `elasticdl events`."""
        found: list[dict[str, Any]] = json.loads(self.client("events", "--output=json").stdout)
        return found

    def troubles(self, *options: str) -> dict[str, dict[str, Any]]:
        """Return the diagnoses of `elasticdl explain`, by kind; the newest of each kind."""
        found = json.loads(self.client("explain", "--output=json", *options).stdout)["troubles"]
        return {diagnosis["trouble"]: diagnosis for diagnosis in reversed(found)}

    def shown_events(self, kind: str) -> list[tuple[str, str]]:
        """Return the objects of a kind of event, and the type, as kubectl shows them."""
        text = kubectl("get", "events", "--namespace", self.namespace, f"--field-selector=reason={kind}", "-o", "json")
        ours = [one for one in json.loads(text)["items"] if one["source"].get("component") == "elasticdl"]
        return sorted((one["involvedObject"]["name"], one["type"]) for one in ours)

    def metrics(self) -> dict[str, float]:
        """Of the final evaluation, as the master has printed it; the recorder has a line a moment later."""

        found: list[str] = []

        def printed() -> bool:
            _, started, log = self.log(self.master).rpartition("Starting the final evaluation")
            found[:] = re.findall(r"Evaluation metrics\[step=\d+\]: (\{.*\})", log) if started else []
            return bool(found)

        self.wait_until("the final evaluation in the master's log", printed, 10)
        return dict(json.loads(found[-1].replace("'", '"')))

    def story(self) -> str:
        """Everything that is known of it, for a failed test."""
        try:
            now = f"{describe_events(self.namespace)}\n--- status\n{self.status()}"
        except (ApiException, HTTPError, OSError) as error:
            now = f"the API server does not answer: {error}"
        parts = ["--- client", *self.output[-60:], "--- pods", self.recorder.timeline(), "--- events", now]
        return "\n".join([*parts, self.recorder.ends_of_logs()])


def total(epochs: tuple[EpochCoverage, ...]) -> str:
    """The coverage of all epochs together, in the words of the master's own line."""
    records, committed, repeated, lost = (
        sum(getattr(epoch, name) for epoch in epochs) for name in ("records", "committed", "repeated", "lost")
    )
    return f"{len(epochs)} epochs, records {records}, committed {committed}, repeated {repeated}, lost {lost}"
