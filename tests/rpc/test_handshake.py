"""The handshake before every connection of ours: attempts of a stranger with real sockets, and the answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from elasticdl.rpc import handshake
from elasticdl.rpc.handshake import (
    Handshake,
    HandshakeError,
    HandshakeStep,
    Lobby,
    accepting,
    connected,
    connecting,
    shake_hands,
)

TOKEN = "9b1f-of-the-job"
WITHIN_S = 30.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    for end in (one, other):
        end.settimeout(WITHIN_S)
    with one, other:
        yield one, other


def accepted(end: socket.socket, token: str = TOKEN, purpose: str = "tests") -> Future[None]:
    """The accepting end's part, in a thread; it closes what it refuses, as servers do."""
    outcome: Future[None] = Future()

    def serve() -> None:
        try:
            shake_hands(end, accepting(token, purpose))
        except OSError as error:
            end.close()
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=serve, daemon=True).start()
    return outcome


def read(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (some := end.recv(size - len(found))):
        found += some
    return found


def test_two_ends_with_the_token_begin_and_what_follows_is_untouched(pair: Pair) -> None:
    one, other = pair
    welcome = accepted(other)
    shake_hands(one, connecting(TOKEN, "tests"))
    one.sendall(b"what follows")
    welcome.result(WITHIN_S)
    assert read(other, 12) == b"what follows"
    assert one.gettimeout() == WITHIN_S


@pytest.mark.parametrize(("token", "purpose"), [("", "tests"), ("another", "tests"), (TOKEN, "other tests")])
def test_another_token_or_another_purpose_is_refused_by_the_end_that_connects(
    pair: Pair, token: str, purpose: str
) -> None:
    one, other = pair
    welcome = accepted(other)
    with pytest.raises(HandshakeError, match="token"):
        shake_hands(one, connecting(token, purpose))
    one.close()
    with pytest.raises(OSError):
        welcome.result(WITHIN_S)


def test_the_token_never_travels_and_no_nonce_is_used_twice() -> None:
    seen = set()
    for _ in range(2):
        one, other = connecting(TOKEN, "tests"), accepting(TOKEN, "tests")
        sent, _ = next(one).sent, next(other)
        wire = [sent]
        ends = [other, one]
        while True:
            step = ends[0].send(sent)
            if not step.sent:
                break
            sent = step.sent
            wire.append(sent)
            ends.reverse()
        assert [len(message) for message in wire] == [36, 64, 32, 4]
        assert TOKEN.encode() not in b"".join(wire)
        seen |= {wire[0][4:], wire[1][:32], wire[1][32:], wire[2]}
    assert len(seen) == 8


def test_a_proof_sent_back_to_the_end_that_made_it_is_refused(pair: Pair) -> None:
    one, other = pair
    welcome = accepted(other)
    one.sendall(b"ELDH" + bytes(32))
    reply = read(one, 64)
    one.sendall(reply[32:])
    with pytest.raises(HandshakeError):
        welcome.result(WITHIN_S)
    assert read(one, 1) == b""


def test_a_server_that_answers_with_the_clients_own_nonce_is_refused(pair: Pair) -> None:
    one, other = pair
    with ThreadPoolExecutor(1) as pool:
        shaken = pool.submit(shake_hands, one, connecting(TOKEN, "tests"))
        nonce = read(other, 36)[4:]
        other.sendall(nonce + nonce)
        with pytest.raises(HandshakeError):
            shaken.result(WITHIN_S)


def test_a_recorded_handshake_opens_nothing() -> None:
    recorded = [b"", b""]
    for attempt in range(2):
        one, other = socket.socketpair()
        one.settimeout(WITHIN_S)
        with one, other:
            welcome = accepted(other)
            if attempt == 0:
                client = connecting(TOKEN, "tests")
                recorded[0] = next(client).sent
                one.sendall(recorded[0])
                recorded[1] = client.send(read(one, 64)).sent
                one.sendall(recorded[1])
                assert read(one, 4) == b"ELDH"
                welcome.result(WITHIN_S)
            else:
                one.sendall(b"".join(recorded))
                assert len(read(one, 65)) == 64
                with pytest.raises(HandshakeError):
                    welcome.result(WITHIN_S)


def test_a_stranger_that_sends_a_byte_now_and_then_is_ended_by_the_deadline(pair: Pair) -> None:
    one, other = pair
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.05):
            one.send(b"E")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            shake_hands(other, accepting(TOKEN, "tests"), timeout_s=0.4)
    finally:
        is_over.set()
        dripping.join()


def test_an_end_that_closes_right_after_its_welcome_has_given_it(pair: Pair) -> None:
    one, other = pair

    def last_step() -> Handshake:
        other.close()
        yield HandshakeStep(b"", 0)

    shake_hands(one, last_step())


def test_strangers_that_stay_are_driven_out_oldest_first() -> None:
    lobby = Lobby(3)
    pairs = [socket.socketpair() for _ in range(5)]
    for _, other in pairs:
        lobby.enter(other)
    assert len(lobby) == 3
    assert [one.recv(1) for one, _ in pairs[:2]] == [b"", b""]
    for one, _ in pairs[2:]:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)
    lobby.leave(pairs[3][1])
    lobby.enter(pairs[0][1])
    assert len(lobby) == 3
    for one, other in pairs:
        one.close()
        other.close()


def test_a_member_that_is_driven_out_with_strangers_comes_again() -> None:
    ends: list[socket.socket] = []
    welcomes: list[Future[None]] = []

    def connect(timeout_s: float) -> socket.socket:
        one, other = socket.socketpair()
        if len(ends) < 3:
            other.close()
        else:
            welcomes.append(accepted(other))
        ends.append(one)
        return one

    with connected(connect, TOKEN, "tests", WITHIN_S).socket:
        welcomes[0].result(WITHIN_S)
    assert len(ends) == 4


def test_a_server_that_ends_every_handshake_is_given_up() -> None:
    ends: list[socket.socket] = []

    def connect(timeout_s: float) -> socket.socket:
        one, other = socket.socketpair()
        other.close()
        ends.append(one)
        return one

    with pytest.raises(HandshakeError, match="refuses"):
        connected(connect, TOKEN, "tests", WITHIN_S)
    assert len(ends) == handshake._ATTEMPTS
