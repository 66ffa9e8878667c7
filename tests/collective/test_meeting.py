"""Where members find each other: all learn each message, and one that leaves without a farewell is missed at once."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from elasticdl.collective.rendezvous import Rendezvous, RendezvousServer, link
from elasticdl.rpc import handshake
from elasticdl.rpc.addresses import parse
from elasticdl.rpc.handshake import HandshakeError, connecting, shake_hands
from tests.collective.members import TOKEN, until

VERSIONS = itertools.count(1000)


@pytest.fixture
def place() -> Iterator[RendezvousServer]:
    made = RendezvousServer("127.0.0.1", TOKEN)
    yield made
    made.close()


def test_what_is_reported_later_is_waited_for(place: RendezvousServer) -> None:
    first, second = (Rendezvous(place.address, TOKEN, 1, rank, 5.0) for rank in (0, 1))
    first.publish("a", b"\x00\xff")
    with ThreadPoolExecutor(1) as pool:
        learned = pool.submit(second.wait_for, ["a", "b"], 5.0)
        first.publish("b", b"")
        assert learned.result(30.0) == [b"\x00\xff", b""]
    first.close(farewell=True)
    second.publish("c", b"late")  # a farewell breaks nothing
    assert second.wait_for(["c", "a"], 5.0) == [b"late", b"\x00\xff"]
    second.close(farewell=True)


def test_groups_know_nothing_of_each_other(place: RendezvousServer) -> None:
    old, new = (Rendezvous(place.address, TOKEN, version, 0, 5.0) for version in (1, 2))
    old.publish("a", b"1")
    new.publish("a", b"2")
    assert old.wait_for(["a"], 5.0) == [b"1"]
    old.close(farewell=False)
    assert new.wait_for(["a"], 5.0) == [b"2"]
    new.close(farewell=True)
    again = Rendezvous(place.address, TOKEN, 3, 0, 5.0)
    with pytest.raises(TimeoutError):
        again.wait_for(["a"], 0.05)
    again.close(farewell=True)


def test_one_that_goes_without_a_farewell_is_missed_by_all_at_once(place: RendezvousServer) -> None:
    waiting, dying = (Rendezvous(place.address, TOKEN, 7, rank, 5.0) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool:
        learned = pool.submit(waiting.wait_for, ["never"], 60.0)
        dying.close(farewell=False)
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            learned.result(30.0)
    late = Rendezvous(place.address, TOKEN, 7, 2, 5.0)
    with pytest.raises(RuntimeError, match="rank 1 has gone"):
        late.wait_for(["never"], 60.0)
    for meeting in (waiting, late):
        meeting.close(farewell=True)


def test_a_wait_can_be_interrupted(place: RendezvousServer) -> None:
    meeting = Rendezvous(place.address, TOKEN, 1, 0, 5.0)
    with ThreadPoolExecutor(1) as pool:
        learned = pool.submit(meeting.wait_for, ["never"], 60.0)
        meeting.interrupt()
        with pytest.raises(OSError):
            learned.result(30.0)
    meeting.close(farewell=False)


def is_sound(place: RendezvousServer) -> bool:
    """A group of two meets there, as if nothing had been."""
    version = next(VERSIONS)
    one, other = (Rendezvous(place.address, TOKEN, version, rank, 5.0) for rank in (0, 1))
    one.publish("a", b"x")
    found = other.wait_for(["a"], 5.0)
    for meeting in (one, other):
        meeting.close(farewell=True)
    return found == [b"x"]


def stranger(place: RendezvousServer) -> socket.socket:
    return socket.create_connection(parse(place.address), 5.0)


def visitor(place: RendezvousServer, version: int, rank: int = 0) -> socket.socket:
    """Holds the token, and says what no member of ours would."""
    connection = stranger(place)
    shake_hands(connection, connecting(TOKEN, "meeting"))
    connection.sendall(b'{"version": %d, "rank": %d}\n' % (version, rank))
    return connection


def is_shown_out(connection: socket.socket) -> bool:
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        b'{"version": 9223372036854775807, "rank": 0}\n{"farewell": true}\n',
        b"ELDH" + bytes(32) + bytes(32),
        bytes(1 << 20),
    ],
)
def test_a_stranger_is_shown_out_before_anything_it_says_is_read(place: RendezvousServer, said: bytes) -> None:
    connection = stranger(place)
    with suppress(OSError):  # shown out before it has said all
        connection.sendall(said)
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass
    connection.close()
    assert is_sound(place)


def test_a_member_of_another_job_is_refused_by_name(place: RendezvousServer) -> None:
    with pytest.raises(HandshakeError, match="token"):
        Rendezvous(place.address, "another job's", 1, 0, 5.0)
    assert is_sound(place)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"[" * 200_000 + b"\n",
        b'{"learn": ' + b"9" * 5000 + b"}\n",
        b'{"learn": 5}\n',
        b'{"learn": [["a"]]}\n',
        b'{"tell": {"a": ["b"]}}\n',
        b'{"tell": 7}\n',
        b"\xff\n",
        b"x" * (1 << 20),
    ],
)
def test_what_no_member_of_ours_says_ends_its_visit_alone(place: RendezvousServer, rubbish: bytes) -> None:
    connection = visitor(place, 1)
    with suppress(OSError):  # shown out before it has said all
        connection.sendall(rubbish)
    assert is_shown_out(connection)
    assert is_sound(place)


@pytest.mark.parametrize("version", ["-1", '"x"', "1.5", "true", str(1 << 63), "null", "9" * 5000])
def test_a_version_that_is_none_ends_the_visit(place: RendezvousServer, version: str) -> None:
    connection = stranger(place)
    shake_hands(connection, connecting(TOKEN, "meeting"))
    connection.sendall(f'{{"version": {version}, "rank": 0}}\n'.encode())
    assert is_shown_out(connection)
    assert is_sound(place)


def test_a_huge_version_that_breaks_stops_no_other_group(place: RendezvousServer) -> None:
    visitor(place, (1 << 63) - 1).close()
    late = Rendezvous(place.address, TOKEN, (1 << 63) - 1, 1, 5.0)
    with pytest.raises(RuntimeError, match="rank 0 has gone"):
        late.wait_for(["never"], 5.0)
    late.close(farewell=True)
    assert is_sound(place)


def test_a_name_is_reported_once(place: RendezvousServer) -> None:
    first, second, third = (Rendezvous(place.address, TOKEN, 4, rank, 5.0) for rank in range(3))
    first.publish("listener/0", b"first")
    assert third.wait_for(["listener/0"], 5.0) == [b"first"]
    second.publish("listener/0", b"second")
    with pytest.raises(RuntimeError, match="rank 1 published 'listener/0' twice"):
        third.wait_for(["never"], 5.0)
    assert third.wait_for(["listener/0"], 5.0) == [b"first"]
    for meeting in (first, second, third):
        meeting.close(farewell=True)


def test_a_rank_that_is_there_is_not_taken_by_a_second(place: RendezvousServer) -> None:
    member = Rendezvous(place.address, TOKEN, 5, 1, 5.0)
    assert is_shown_out(visitor(place, 5, 1))
    member.publish("a", b"x")
    assert member.wait_for(["a"], 5.0) == [b"x"]
    member.close(farewell=True)


def test_one_that_takes_no_answers_blocks_no_other(place: RendezvousServer) -> None:
    """It asks for more than its connection holds, again and again, and reads nothing."""
    told = Rendezvous(place.address, TOKEN, 6, 0, 5.0)
    for number in range(20):
        told.publish(f"large/{number}", bytes(100_000))
    names = ", ".join(f'"large/{number}"' for number in range(20))
    greedy = visitor(place, 6, 1)
    for _ in range(10):
        greedy.sendall(f'{{"learn": [{names}]}}\n'.encode())
    assert is_sound(place)
    assert [len(value) for value in told.wait_for(["large/0"], 5.0)] == [100_000]
    greedy.close()
    told.close(farewell=True)


def test_a_connection_for_the_collectives_of_a_group_is_kept_until_it_is_taken(place: RendezvousServer) -> None:
    first, second = (link(place.address, TOKEN, 8, rank, 5.0).socket for rank in (1, 2))
    for connection in (first, second):
        connection.sendall(b"data")
    assert place.take_links(7) == {}
    kept = place.take_links(8)
    assert sorted(kept) == [1, 2]
    assert [kept[rank].socket.recv(4) for rank in (1, 2)] == [b"data"] * 2
    assert place.take_links(8) == {}
    old = link(place.address, TOKEN, 9, 1, 5.0).socket
    place.drop_links(older_than=10)
    assert is_shown_out(old)
    for connection in (first, second, *(one.socket for one in kept.values())):
        connection.close()


def test_a_connection_without_the_token_or_for_a_rank_that_has_one_is_refused(place: RendezvousServer) -> None:
    with pytest.raises(HandshakeError):
        link(place.address, "another job's", 8, 1, 5.0)
    with link(place.address, TOKEN, 8, 1, 5.0).socket as first, pytest.raises(ConnectionError):
        link(place.address, TOKEN, 8, 1, 5.0)
    assert first.fileno() < 0
    kept = place.take_links(8)
    assert sorted(kept) == [1]
    kept[1].socket.close()
    assert is_sound(place)


def test_a_thousand_idle_strangers_and_a_port_scan_keep_no_member_out(place: RendezvousServer) -> None:
    with ExitStack() as strangers:
        for number in range(1000):
            strangers.enter_context(stranger(place))
            if number % 250 == 0:
                assert is_sound(place)
        for _ in range(200):
            stranger(place).close()
        assert is_sound(place)
        assert len(place._strangers) <= 256


def test_an_idle_stranger_is_ended_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.2)
    place = RendezvousServer("127.0.0.1", TOKEN)
    silent, member = stranger(place), visitor(place, 7)
    assert is_shown_out(silent)
    member.sendall(b'{"tell": {"a": "78"}, "learn": ["a"]}\n')
    assert member.recv(64) == b'{"told": ["78"]}\n'
    member.close()
    place.close()


def test_a_closed_server_frees_all_peers(place: RendezvousServer) -> None:
    meeting = Rendezvous(place.address, TOKEN, 1, 1, 5.0)
    place.close()
    with pytest.raises(OSError):
        meeting.wait_for(["a"], 5.0)
    meeting.close(farewell=True)

    def is_closed() -> bool:
        try:
            socket.create_connection(parse(place.address), 1.0).close()
        except OSError:
            return True
        return False

    until(is_closed)
