"""Pods forked from the standby behave like plain starts, only sooner; without it everything still works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from local_agent import LocalAgent, Observer, Wire, have_ended

from elasticdl.cluster.cluster import EndReason, Pod, PodPhase, PodSpec
from elasticdl.protocol import Role

pytest.importorskip("tensorflow")

READY_S = 200.0  # importing TensorFlow on a busy machine

MODULES = {
    "step": """
import sys, time
begin = time.monotonic()
import tensorflow as tf
from elasticdl.cluster.local.standby import report_ready
tf.constant(1.0) + 1.0
report_ready()
layer = tf.keras.layers.Dense(3)
print("sum", float(tf.reduce_sum(tf.function(lambda x: layer(x) * 0.0 + 1.0)(tf.ones([4, 3])))))
print("took", time.monotonic() - begin)
sys.exit(int(sys.argv[1]))
""",
    "show": """
import os, sys, threading
from elasticdl.cluster.local.standby import report_ready
report_ready()
report_ready()
print("name", __name__, "argv", sys.argv[1:], "own", os.environ["ELASTICDL_POD_NAME"])
print("ready", "ELASTICDL_READY_FD" in os.environ)
print("group", os.getpgid(0) == os.getpid(), "nice", os.nice(0), "stdin", sys.stdin.read())
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread")), daemon=False).start()
""",
    "fail": "raise RuntimeError('the very reason')",
    "text": "import sys; sys.exit('a text')",
    "stay": """
import signal, sys
from elasticdl.cluster.local.standby import report_ready
report_ready()
with open(sys.argv[1], "w") as wire:
    wire.write("staying")
signal.pause()
""",
    "hang": """
import os, signal
if "ELASTICDL_READY_FD" in os.environ:
    print("hanging")
    signal.pause()
print("plain")
""",
    "crash": """
import os
if "ELASTICDL_READY_FD" in os.environ:
    os.abort()
print("plain")
""",
}


class Forks:
    """An agent whose standby is ready, and pods for it.

    Attributes:
        framework: that the standby imports.
    """

    def __init__(self, directory: Path, standby_timeout_s: float, framework: str = "tensorflow") -> None:
        self.framework = framework
        self._modules = directory / "modules"
        self._modules.mkdir(parents=True)
        for name, text in MODULES.items():
            (self._modules / f"{name}.py").write_text(text)
        self.agent = LocalAgent(directory, standby_timeout_s=standby_timeout_s)
        self.cluster = self.agent.cluster
        self.observer = Observer(self.cluster)
        self._created = 0
        self._wire = Wire(directory / "wire")

    def create(self, *arguments: str, **more: Any) -> str:
        name = f"w-{self._created}"
        self._created += 1
        env = {
            "PYTHONPATH": f"{self._modules}:{os.getcwd()}",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "ELASTICDL_POD_NAME": name,
            **more.pop("env", {}),
        }
        command = (sys.executable, "-P", "-m", *arguments)
        spec = PodSpec(name, Role.WORKER, 0, command, env=env, **{"framework": self.framework, **more})
        self.cluster.create(spec)
        return name

    def create_staying(self, **more: Any) -> Pod:
        """A pod that has reported progress and runs without end."""
        name = self.create("stay", self._wire.path, **more)
        assert self._wire.read() == ["staying"]
        return self.observer.phase(name, PodPhase.RUNNING)

    def run(self, *arguments: str, **more: Any) -> tuple[int | None, str]:
        """Runs a pod to its end; its exit code and what it has printed."""
        name = self.create(*arguments, **more)
        return self.observer.ended_pod(name).exit_code, self.cluster.logs(name)

    def standby(self) -> int:
        """The pid of the standby process."""
        agent = self.agent.process.pid
        for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # the sentinel of a pod that has ended just now
                if b"elasticdl.cluster.local.standby" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        raise AssertionError("there is no standby")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Forks, str]]:
    """A ready standby for the tests that leave it alone, and what a plain start has printed."""
    forks = Forks(tmp_path_factory.mktemp("standby"), standby_timeout_s=60)
    _, plain = forks.run("step", "0", framework="")
    forks.run("text")
    forks.cluster.wait_for_standby(READY_S)
    yield forks, plain
    forks.agent.stop()


@pytest.fixture
def ready(shared: tuple[Forks, str]) -> Forks:
    return shared[0]


def cheap_forks(directory: Path, standby_timeout_s: float) -> Iterator[Forks]:
    """A ready standby that may be damaged: it imports no framework, so another one is there soon."""
    forks = Forks(directory, standby_timeout_s, framework="custom")
    forks.run("text")
    forks.cluster.wait_for_standby(READY_S)
    yield forks
    forks.agent.stop()


@pytest.fixture
def cheap(tmp_path: Path) -> Iterator[Forks]:
    yield from cheap_forks(tmp_path, standby_timeout_s=60)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Forks]:
    """Its agent gives a forked child a few seconds."""
    yield from cheap_forks(tmp_path, standby_timeout_s=4)


def seconds(log: str) -> float:
    found = re.search(r"took (.*)", log)
    assert found, log
    return float(found.group(1))


def test_a_forked_pod_computes_sooner_than_a_plain_one_and_its_exit_code_comes_through(
    shared: tuple[Forks, str],
) -> None:
    forks, plain = shared
    code, forked = forks.run("step", "3")
    assert code == 3
    assert "sum 12.0" in forked
    assert seconds(forked) < seconds(plain)


def test_a_forked_pod_finds_itself_as_a_plain_one_would(ready: Forks) -> None:
    code, log = ready.run("show", "a b", "--c")
    assert code == 0
    assert "name __main__ argv ['a b', '--c'] own w-" in log
    assert "ready False" in log
    assert f"group True nice {os.nice(0)} stdin \n" in log
    assert log.endswith("thread\n")


@pytest.mark.parametrize("job", ["digits", "a-job-with-a-name-that-has-no-room-" * 6])
def test_a_forked_pod_is_found_by_its_name_among_the_processes(ready: Forks, job: str) -> None:
    pod = ready.create_staying(env={"ELASTICDL_POD_NAME": f"elasticdl-{job}-worker-1"})
    shown = Path(f"/proc/{pod.pid}/cmdline").read_bytes()
    assert shown.endswith(b"\0")
    assert f"elasticdl worker-1 of {job}".startswith(shown[:-1].decode())
    assert shown.startswith(b"elasticdl worker-1 of ")
    assert Path(f"/proc/{pod.pid}/comm").read_text() == f"worker-1 {job}"[:15] + "\n"
    listed = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pod.pid)], capture_output=True, text=True, check=True
    )
    assert listed.stdout == shown[:-1].decode() + "\n"
    assert ready.standby() != pod.pid


def test_an_exception_is_an_exit_code_and_a_traceback(ready: Forks) -> None:
    code, log = ready.run("fail")
    assert code == 1
    assert "RuntimeError: the very reason" in log


def test_a_text_at_exit_is_printed(ready: Forks) -> None:
    code, log = ready.run("text")
    assert (code, log.splitlines()[-1]) == (1, "a text")


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, EndReason.KILLED), (signal.SIGSEGV, EndReason.ERROR)])
def test_a_signal_comes_through(ready: Forks, number: signal.Signals, reason: EndReason) -> None:
    pid = ready.create_staying().pid
    assert os.getpgid(pid) == pid
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, number)
    with suppress(ProcessLookupError):  # SIGKILL does not wait for it
        os.kill(pid, signal.SIGCONT)
    ended = ready.observer.until(lambda event: event.pod.pid == 0 and event.pod.exit_code is not None).pod
    assert (ended.exit_code, ended.reason) == (128 + number, reason)


def test_a_forked_pod_can_be_deleted(ready: Forks) -> None:
    name = ready.create_staying().name
    ready.cluster.delete(name)
    assert ready.observer.deleted(name).reason is EndReason.DELETED


def test_a_pod_that_imports_under_another_environment_is_started_plainly(ready: Forks) -> None:
    _, log = ready.run("hang", env={"TF_ENABLE_ONEDNN_OPTS": "0"})
    assert log == "plain\n"


def test_a_child_that_hangs_is_replaced(impatient: Forks) -> None:
    hung = impatient.standby()
    code, log = impatient.run("hang")
    assert code == 0
    assert log.startswith("hanging\n")
    assert log.endswith("plain\n")
    assert "no progress in 4 s" in impatient.agent.log()
    assert have_ended([hung])
    impatient.cluster.wait_for_standby(READY_S)
    assert impatient.standby() != hung


def test_a_child_that_crashes_before_its_first_op_is_replaced(impatient: Forks) -> None:
    code, log = impatient.run("crash")
    assert code == 0
    assert log.endswith("plain\n")


def test_a_stopped_standby_is_replaced(impatient: Forks) -> None:
    stopped = impatient.standby()
    os.kill(stopped, signal.SIGSTOP)
    code, log = impatient.run("show")
    assert code == 0
    assert "started plainly" in log
    assert have_ended([stopped])


def test_a_killed_standby_takes_no_pod_with_it_and_is_started_again(cheap: Forks) -> None:
    living = cheap.create_staying()
    os.kill(cheap.standby(), signal.SIGKILL)
    assert cheap.run("show")[0] == 0
    cheap.cluster.wait_for_standby(READY_S)
    assert {pod.name: (pod.phase, pod.pid) for pod in cheap.cluster.list()}[living.name] == (
        PodPhase.RUNNING,
        living.pid,
    )


def test_no_forked_pod_survives_a_killed_agent(cheap: Forks) -> None:
    pid = cheap.create_staying().pid
    standby = cheap.standby()
    os.killpg(pid, signal.SIGSTOP)
    cheap.agent.process.kill()
    assert have_ended([pid, standby])
