"""A PS process and its checkpoints: damaged ones, stuck volumes, kills in the middle; and the content of heartbeats."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from elasticdl.ps.client import PsClient
from elasticdl.ps.part_file import TAIL
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc import elasticdl_pb2_grpc as pb_grpc
from elasticdl.rpc.channels import connect
from tests.ps.masters import OnePsMaster, connected, save, save_into, serving, start
from tests.ps.parts import flip
from tests.ps.scenes import ADAM, TABLES, TOKEN, assert_same_model, initial_parameters, make_push, ps_cluster, push_all

PART = "variables-0-of-1.ckpt"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def trained(stack: ExitStack, tmp_path: Path, master: OnePsMaster) -> PsClient:
    """A PS process with version-3 and version-5 behind it and two more pushes in it; the caller kills it."""
    master.wait(lambda: master.readies)
    client = connected(stack, master)
    client.initialize(initial_parameters(), TABLES, ADAM, 7)
    push_all(client, range(3))
    assert not save(master, tmp_path / "version-3").error
    push_all(client, range(3, 5))
    assert not save(master, tmp_path / "version-5").error
    push_all(client, range(5, 7))
    return client


def killed_after_training(stack: ExitStack, tmp_path: Path) -> tuple[OnePsMaster, int]:
    """The master, and its port, of such a PS that was killed."""
    master = OnePsMaster(tmp_path)
    port = stack.enter_context(serving(master))
    process = start(stack, port, tmp_path)
    trained(stack, tmp_path, master)
    process.kill()
    process.wait()
    return master, port


def test_a_damaged_checkpoint_is_passed_over_and_what_it_held_is_trained_again(
    stack: ExitStack, tmp_path: Path
) -> None:
    master, port = killed_after_training(stack, tmp_path)
    flip(tmp_path / "version-5" / PART, -TAIL.size - 100)
    master.restore_from = str(tmp_path / "version-5")
    successor = start(stack, port, tmp_path)
    master.wait(lambda: len(master.readies) == 2)
    ready = master.readies[1]
    assert (ready.restored_from, ready.error) == (str(tmp_path / "version-3"), "")
    (reason,) = ready.damaged
    assert f"version-5: the checkpoint part {tmp_path}/version-5/{PART} is damaged" in reason
    client = connected(stack, master)
    assert client.standing(2, 0, 0) == {0, 1, 2}
    push_all(client, range(7), lease=2)
    undisturbed = stack.enter_context(ps_cluster(1))
    push_all(undisturbed.client, range(7))
    assert_same_model(client, undisturbed.client)
    successor.kill()
    output, _ = successor.communicate()
    assert "WARNING A damaged checkpoint is passed over: version-5: " in output
    assert f"Restored {tmp_path}/version-3" in output


def test_a_ps_that_can_restore_nothing_says_so_and_ends(stack: ExitStack, tmp_path: Path) -> None:
    master, port = killed_after_training(stack, tmp_path)
    (tmp_path / "version-5" / PART).write_bytes(b"half")
    (tmp_path / "version-3" / PART).unlink()
    master.restore_from = str(tmp_path / "version-5")
    process = start(stack, port, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    ready = master.readies[1]
    assert ready.error == f"no checkpoint in {tmp_path} can be restored"
    assert [reason.split(":")[0] for reason in ready.damaged] == ["version-5", "version-3"]
    assert not ready.initialized
    assert f"version-5/{PART} is damaged: it has 4 bytes" in output
    assert f"version-3/{PART} cannot be read: No such file or directory" in output
    assert "Traceback" not in output


def test_another_jobs_damaged_checkpoint_is_an_error_that_names_the_file(stack: ExitStack, tmp_path: Path) -> None:
    master, port = killed_after_training(stack, tmp_path)
    flip(tmp_path / "version-5" / PART, 2000)  # a row: nothing but reading everything finds it
    master.restore_from, master.parameters_only = str(tmp_path / "version-5"), True
    process = start(stack, port, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{tmp_path}/version-5/{PART} is damaged: the checksum of the block at" in master.readies[1].error
    assert master.readies[1].error in output
    assert "Traceback" not in output


def test_a_stuck_volume_holds_up_neither_heartbeats_nor_pushes(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster(tmp_path)
    process = start(stack, stack.enter_context(serving(master)), tmp_path)
    client = trained(stack, tmp_path, master)
    directory = tmp_path / "version-7"
    directory.mkdir()
    temporary = directory / f".{PART}.1.tmp"
    os.mkfifo(temporary)  # opening it for writing waits for a reader
    replies: list[pb.SaveCheckpointReply] = []
    saving = threading.Thread(target=lambda: replies.append(save_into(master, directory)))
    saving.start()
    beats = master.beats
    push_all(client, range(7, 12))
    master.wait(lambda: master.beats >= beats + 2)
    assert saving.is_alive()
    with open(temporary, "rb") as reader:
        while reader.read(1 << 20):
            pass
    saving.join(60)
    assert "cannot be written" in replies[0].error
    assert list(directory.iterdir()) == []
    assert not save(master, tmp_path / "version-12").error
    assert process.poll() is None


def test_a_ps_that_is_killed_while_it_writes_continues_from_the_checkpoint_before(
    stack: ExitStack, tmp_path: Path
) -> None:
    master = OnePsMaster(tmp_path)
    port = stack.enter_context(serving(master))
    process = start(stack, port, tmp_path)
    trained(stack, tmp_path, master)
    directory = tmp_path / "version-7"
    directory.mkdir()
    os.mkfifo(directory / f".{PART}.1.tmp")
    pipe = os.open(directory / f".{PART}.1.tmp", os.O_RDONLY | os.O_NONBLOCK)
    stack.callback(os.close, pipe)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)  # less than a part: the writer waits in its middle
    failures: list[grpc.RpcError] = []

    def save_in_vain() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            save_into(master, directory)
        failures.append(caught.value)

    saving = threading.Thread(target=save_in_vain)
    saving.start()
    assert select.select([pipe], [], [], 20)[0]
    process.send_signal(signal.SIGKILL)
    process.wait()
    saving.join(60)
    assert failures
    assert [path.name for path in directory.iterdir()] == [f".{PART}.1.tmp"]
    master.restore_from = str(tmp_path / "version-5")
    start(stack, port, tmp_path)
    master.wait(lambda: len(master.readies) == 2)
    assert (master.readies[1].restored_from, list(master.readies[1].damaged)) == (str(tmp_path / "version-5"), [])


def test_a_heartbeat_tells_the_load_and_brings_the_partition(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster(tmp_path)
    start(stack, stack.enter_context(serving(master)), tmp_path)
    trained(stack, tmp_path, master)
    master.wait(lambda: master.heard.load.pushes == 7)
    assert master.heard.load.table_rows > 0
    assert master.heard.partition_version == 0
    master.is_partition_told = True
    master.wait(lambda: master.heard.partition_version == master.partition().version)


def test_a_round_that_waits_makes_heartbeats_more_frequent(stack: ExitStack, tmp_path: Path) -> None:
    master = OnePsMaster()
    master.spec = replace(master.spec, use_async=False, grads_to_wait=2)
    master.num_pushing = 2
    start(stack, stack.enter_context(serving(master)), tmp_path, beats_rarely=True)
    master.wait(lambda: master.readies)
    client = connected(stack, master)
    client.initialize(initial_parameters(), TABLES, ADAM, 7)
    client.exchange(make_push(0), None)
    name = pb.MinibatchName(epoch=0, task=0, n=0)
    request = pb.CloseRoundRequest(incarnation=1, lease=1, name=name)
    with connect(master.registrations[-1].address, TOKEN) as channel:
        stub = pb_grpc.ParameterServerStub(channel)
        assert master.beats == 0
        assert stub.CloseRound(request, timeout=20).wait
        master.wait(lambda: master.beats >= 3)
        master.num_pushing = 1  # the other worker has left
        while (reply := stub.CloseRound(request, timeout=20)).wait:
            pass
    assert [round.number for round in reply.rounds.rounds] == [1]
