"""Where members find each other: what is told is learned, and one that goes without a farewell is missed at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticdl.collective.meeting import Meeting, MeetingPlace
from elasticdl.collective.sockets import parse
from tests.collective.members import until

pytestmark = pytest.mark.ci


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    made = MeetingPlace("127.0.0.1")
    yield made
    made.close()


def test_what_is_told_later_is_waited_for(place: MeetingPlace) -> None:
    first, second = (Meeting(place.address, 1, rank, 5.0) for rank in (0, 1))
    first.tell("a", b"\x00\xff")
    with ThreadPoolExecutor(1) as pool:
        learned = pool.submit(second.learn, ["a", "b"], 5.0)
        first.tell("b", b"")
        assert learned.result(5.0) == [b"\x00\xff", b""]
    first.close(farewell=True)
    second.tell("c", b"late")  # a farewell breaks nothing
    assert second.learn(["c", "a"], 5.0) == [b"late", b"\x00\xff"]
    second.close(farewell=True)


def test_worlds_know_nothing_of_each_other(place: MeetingPlace) -> None:
    old, new = (Meeting(place.address, version, 0, 5.0) for version in (1, 2))
    old.tell("a", b"1")
    new.tell("a", b"2")
    assert old.learn(["a"], 5.0) == [b"1"]
    old.close(farewell=False)
    assert new.learn(["a"], 5.0) == [b"2"]
    new.close(farewell=True)
    again = Meeting(place.address, 3, 0, 5.0)
    with pytest.raises(TimeoutError):
        again.learn(["a"], 0.05)
    again.close(farewell=True)


def test_one_that_goes_without_a_farewell_is_missed_by_all_at_once(place: MeetingPlace) -> None:
    waiting, dying = (Meeting(place.address, 7, rank, 5.0) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool:
        learned = pool.submit(waiting.learn, ["never"], 60.0)
        dying.close(farewell=False)
        with pytest.raises(RuntimeError, match="rank 1 has gone"):
            learned.result(5.0)
    late = Meeting(place.address, 7, 2, 5.0)
    with pytest.raises(RuntimeError, match="rank 1 has gone"):
        late.learn(["never"], 60.0)
    for meeting in (waiting, late):
        meeting.close(farewell=True)


def test_a_wait_can_be_interrupted(place: MeetingPlace) -> None:
    meeting = Meeting(place.address, 1, 0, 5.0)
    with ThreadPoolExecutor(1) as pool:
        learned = pool.submit(meeting.learn, ["never"], 60.0)
        meeting.interrupt()
        with pytest.raises(OSError):
            learned.result(5.0)
    meeting.close(farewell=False)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"version": "x"}\n',
        b'{"learn": ["a"]}\n',
        b"\xff\n",
        b'{"version": 1, "rank": 0, "learn": 5}\n',
    ],
)
def test_strangers_are_shown_out(place: MeetingPlace, rubbish: bytes) -> None:
    with socket.create_connection(parse(place.address), 5.0) as stranger:
        stranger.settimeout(5.0)
        stranger.sendall(rubbish)
        assert stranger.recv(1) == b""
    meeting = Meeting(place.address, 2, 0, 5.0)
    meeting.tell("a", b"x")
    assert meeting.learn(["a"], 5.0) == [b"x"]
    meeting.close(farewell=True)


def test_a_closed_place_lets_everybody_go(place: MeetingPlace) -> None:
    meeting = Meeting(place.address, 1, 1, 5.0)
    place.close()
    with pytest.raises(OSError):
        meeting.learn(["a"], 5.0)
    meeting.close(farewell=True)

    def is_closed() -> bool:
        try:
            socket.create_connection(parse(place.address), 1.0).close()
        except OSError:
            return True
        return False

    until(is_closed)
