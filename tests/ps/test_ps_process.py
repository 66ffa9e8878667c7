"""A PS as a process of its own: registration, restarts of the master, kills, restores, ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticdl.ps.client import LeaseRefused, PsUnavailable
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from tests.lines import line_with
from tests.ps.masters import OnePsMaster, connected, save, serving, start
from tests.ps.scenes import (
    ADAM,
    TABLES,
    TOKEN,
    assert_same_model,
    initial_parameters,
    make_push,
    ps_cluster,
    push_all,
)
from tests.rpc.signalling import signal_other_thread


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def silent_port(stack: ExitStack) -> int:
    """An address without a listener, for as long as the test runs."""
    held = stack.enter_context(socket.socket())
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])


def test_a_killed_ps_continues_from_its_checkpoint(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster(tmp_path)
    port = stack.enter_context(serving(master))
    process = start(stack, port, tmp_path)
    master.wait(lambda: master.readies)
    assert not master.readies[0].initialized
    client = connected(stack, master)
    client.initialize(initial_parameters(), TABLES, ADAM, 7)
    push_all(client, range(5))
    save(master, tmp_path / "version-5")
    push_all(client, range(5, 8))
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(PsUnavailable):
        client.exchange(make_push(8), None)

    master.restore_from = str(tmp_path / "version-5")
    start(stack, port, tmp_path)
    master.wait(lambda: len(master.readies) == 2)
    ready = master.readies[1]
    assert (ready.incarnation, ready.initialized) == (2, True)
    successor = connected(stack, master)
    assert successor.standing(2, 0, 0) == {0, 1, 2, 3, 4}
    push_all(successor, range(9), lease=2)
    undisturbed = stack.enter_context(ps_cluster(1))
    push_all(undisturbed.client, range(9))
    assert_same_model(successor, undisturbed.client)


def test_a_new_master_finds_the_state_as_it_was(stack: ExitStack, tmp_path: Path) -> None:
    with serving(OnePsMaster()) as port:
        pass
    first, second = OnePsMaster(), OnePsMaster(generation=2, incarnation=1)
    with serving(first, port):
        start(stack, port, tmp_path)
        first.wait(lambda: first.readies)
        client = connected(stack, first)
        client.initialize(initial_parameters(), TABLES, ADAM, 7)
        push_all(client, range(3), lease=5)
    push_all(client, [3], lease=5)  # the work does not need the master
    stack.enter_context(serving(second, port))
    second.wait(lambda: second.readies)
    assert second.registrations[0].held_incarnation == 1
    assert second.registrations[0].nonce == first.registrations[0].nonce
    push_all(client, [4], lease=5)
    assert client.standing(6, 0, 0) == {0, 1, 2, 3, 4}
    with pytest.raises(LeaseRefused):
        push_all(client, [5], lease=5)
    with connect(second.registrations[-1].address, TOKEN) as channel:
        question = pb.PsQuestion(generation=1, incarnation=1)
        assert pb_grpc.ParameterServerStub(channel).ReadAppliedSet(question, timeout=20).status == pb.OLD_GENERATION


class LivesAgain(OnePsMaster):
    """Has its second life when the PS says that it is ready, and wants it to register first."""

    def PsReady(self, request: pb.PsReadyRequest, context: Any) -> pb.Ack:  # noqa: N802
        if self.generation == 1:
            self.generation = 2
            return pb.Ack(accepted=False, reason="PS 0 must register first, or was replaced", generation=2)
        return super().PsReady(request, context)


def test_a_ps_that_is_ready_before_a_new_master_knows_it_registers_again(stack: ExitStack, tmp_path: Path) -> None:
    master = LivesAgain()
    process = start(stack, stack.enter_context(serving(master)), tmp_path, beats_rarely=True)
    master.wait(lambda: master.readies)
    assert [request.held_incarnation for request in master.registrations] == [0, 1]
    assert process.poll() is None


def test_a_ps_waits_for_a_master_that_comes_later(stack: ExitStack, tmp_path: Path) -> None:
    with serving(OnePsMaster()) as port:
        pass
    process = start(stack, port, tmp_path)
    line_with(process, "Waiting for the master")
    master = OnePsMaster()
    stack.enter_context(serving(master, port))
    master.wait(lambda: master.readies)


def test_a_ps_imports_no_framework() -> None:
    code = "import sys, elasticdl.ps.server.process as _; print(*{name.split('.')[0] for name in sys.modules})"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "numpy" in modules
    assert not {"tensorflow", "keras", "torch"} & set(modules)


def test_a_ps_leaves_when_told(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster()
    process = start(stack, stack.enter_context(serving(master)), tmp_path)
    master.wait(lambda: master.beats)
    master.stop = True
    assert process.wait(60) == 0


def test_a_ps_that_is_asked_to_end_serves_until_the_master_says_stop(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster(tmp_path)
    process = start(stack, stack.enter_context(serving(master)), tmp_path, beats_rarely=True)
    master.wait(lambda: master.readies)
    client = connected(stack, master)
    client.initialize(initial_parameters(), TABLES, ADAM, 7)
    process.terminate()
    master.wait(lambda: master.farewells >= 2)  # it does not wait for the next heartbeat
    push_all(client, range(3))
    save(master, tmp_path / "version-3")
    assert process.poll() is None
    master.stop = True
    assert process.wait(60) == 143


def test_a_ps_hears_a_signal_that_the_kernel_gives_to_any_of_its_threads(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster()
    process = start(stack, stack.enter_context(serving(master)), tmp_path, beats_rarely=True)
    master.wait(lambda: master.readies)
    signal_other_thread(process.pid, signal.SIGTERM)
    master.wait(lambda: master.farewells)
    master.stop = True
    assert process.wait(60) == 143


def test_a_ps_that_is_asked_to_end_does_not_wait_for_a_master_that_is_away(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster()
    with serving(master) as port:
        process = start(stack, port, tmp_path)
        master.wait(lambda: master.readies)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "leaving without a checkpoint" in output


def test_an_unused_ps_ends_at_once(stack: ExitStack, tmp_path: Path) -> None:
    process = start(stack, silent_port(stack), tmp_path)
    line_with(process, "Waiting for the master")
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "does not answer" not in output  # it was not waited for


def test_a_ps_tells_others_another_address_than_it_listens_on(stack: ExitStack, tmp_path: Path) -> None:
    environment = {"PS_HOST": "0.0.0.0", "PS_ADVERTISED_HOST": "127.0.0.2"}
    master = OnePsMaster()
    start(stack, stack.enter_context(serving(master)), tmp_path, **environment)
    master.wait(lambda: master.readies)
    assert master.registrations[0].address.startswith("127.0.0.2:")
    connected(stack, master).initialize(initial_parameters(), TABLES, ADAM, 7)


def test_a_ps_that_cannot_say_where_it_is_does_not_start(stack: ExitStack, tmp_path: Path) -> None:
    output, _ = start(stack, silent_port(stack), tmp_path, PS_HOST="0.0.0.0").communicate(timeout=60)
    assert "PS_ADVERTISED_HOST is not set" in output


def test_a_replaced_ps_leaves(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster()
    process = start(stack, stack.enter_context(serving(master)), tmp_path)
    master.wait(lambda: master.readies)
    master.incarnation += 1
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the master does not accept PS 0: replaced" in output


def test_a_ps_without_master_leaves_after_a_while(stack: ExitStack, tmp_path: Path) -> None:
    process = start(stack, silent_port(stack), tmp_path, ELASTICDL_MASTER_TIMEOUT_S="0.5")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "has not answered for 0.5 s (--master_timeout)" in output
    assert "elasticdl resume" in output


def test_a_master_timeout_that_is_no_number_is_said(stack: ExitStack, tmp_path: Path) -> None:
    process = start(stack, silent_port(stack), tmp_path, ELASTICDL_MASTER_TIMEOUT_S="soon")
    output, _ = process.communicate(timeout=60)
    assert "ELASTICDL_MASTER_TIMEOUT_S=soon is not a number of seconds" in output


def test_a_wrong_token_ends_the_ps(stack: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("guessed")
    port = stack.enter_context(serving(OnePsMaster()))
    process = start(stack, port, tmp_path, ELASTICDL_TOKEN_FILE=str(tmp_path / "other"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "does not carry the job's token" in output


def test_a_port_in_use_is_said(stack: ExitStack, tmp_path: Path) -> None:
    port = stack.enter_context(serving(OnePsMaster()))
    process = start(stack, port, tmp_path, PS_PORT=str(port))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "choose another PS_PORT" in output
