"""Records and keys of encrypted connections: valid records, invalid ones, and that others would make the same."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from elasticdl.kernels._native import RecordError, RecordLayer
from elasticdl.rpc.handshake import (
    RECORD_OVERHEAD,
    HandshakeError,
    SecureConnection,
    accepting,
    check_encryption,
    connected,
    connecting,
    shake_hands,
)

TOKEN = "9b1f-of-the-job"
WITHIN_S = 30.0
ONE_KEY, OTHER_KEY = bytes(range(32)), bytes(range(32, 64))
MOST_BYTES = 128 << 10


def layers(records_per_key: int = 1 << 20) -> tuple[RecordLayer, RecordLayer]:
    return RecordLayer(ONE_KEY, OTHER_KEY, records_per_key), RecordLayer(OTHER_KEY, ONE_KEY, records_per_key)


@pytest.mark.parametrize("size", [0, 1, 4097, MOST_BYTES, 3 * MOST_BYTES + 5])
def test_bytes_come_through_however_the_stream_is_split(size: int) -> None:
    one, other = layers()
    data = bytes(n % 251 for n in range(size))
    stream = one.seal(data)
    assert len(stream) == size + -(-size // MOST_BYTES) * RECORD_OVERHEAD
    step = max(1, len(stream) // 7)
    assert b"".join(other.open(stream[at : at + step]) for at in range(0, len(stream), step)) == data
    assert not other.is_amid_record


def test_a_record_is_aes_256_gcm_with_its_number_as_nonce_and_its_size_authenticated() -> None:
    one, _ = layers(records_per_key=2)
    next_key = HKDFExpand(SHA256(), 32, b"elasticdl next key").derive(ONE_KEY)
    for key, number in ((ONE_KEY, 0), (ONE_KEY, 1), (next_key, 0), (next_key, 1)):
        record = one.seal(b"gradient")
        nonce = number.to_bytes(8, "little") + bytes(4)
        assert record[:4] == (8).to_bytes(4, "little")
        assert AESGCM(key).decrypt(nonce, record[4:], record[:4]) == b"gradient"


def test_both_ends_take_the_next_key_together() -> None:
    one, other = layers(records_per_key=3)
    for number in range(20):
        assert other.open(one.seal(b"%d" % number)) == b"%d" % number
        assert one.open(other.seal(b"-%d" % number)) == b"-%d" % number


Spoil = Callable[[list[bytes]], bytes]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r[0] + r[0],
        lambda r: r[1],
        lambda r: r[1] + r[0],
        lambda r: r[0] + r[2],
        lambda r: r[0][:4] + bytes([r[0][4] ^ 128]) + r[0][5:],
        lambda r: r[0][:-1] + bytes([r[0][-1] ^ 1]),
        lambda r: bytes([r[0][0] - 1]) + r[0][1:],
        lambda r: b"\0\0\0\0" + r[0],
        lambda r: b"\xff\xff\xff\xff" + r[0],
        lambda r: b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
    ],
)
def test_what_is_not_the_next_record_does_not_open(spoil: Spoil) -> None:
    one, other = layers()
    records = [one.seal(b"record %d" % number) for number in range(3)]
    with pytest.raises(RecordError, match="changed, repeated, left out or moved"):
        other.open(spoil(records))


def test_a_record_does_not_open_at_the_end_that_made_it() -> None:
    one, _ = layers()
    with pytest.raises(RecordError):
        one.open(one.seal(b"mine"))


def shaken(
    encrypts: tuple[bool, bool], tokens: tuple[str, str] = (TOKEN, TOKEN)
) -> tuple[SecureConnection, SecureConnection]:
    """Both ends of a new connection; raises what the connecting end raises."""
    one, other = socket.socketpair()
    accepted: Future[RecordLayer | None]
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(shake_hands, other, accepting(tokens[1], "tests", encrypts[1]), WITHIN_S)
        try:
            records = shake_hands(one, connecting(tokens[0], "tests", encrypts[0]), WITHIN_S)
            return SecureConnection(one, records), SecureConnection(other, accepted.result(WITHIN_S))
        except BaseException:
            one.close()
            with pytest.raises(OSError):
                accepted.result(WITHIN_S)
            other.close()
            raise


def test_two_ends_come_to_keys_that_no_other_connection_has() -> None:
    sealed = []
    for _ in range(2):
        one, other = shaken((True, True))
        assert one.records is not None
        assert other.records is not None
        sealed.append(one.records.seal(b"gradient"))
        assert other.records.open(sealed[-1]) == b"gradient"
        assert one.records.open(other.records.seal(b"parameters")) == b"parameters"
        for end in (one, other):
            end.socket.close()
    assert sealed[0] != sealed[1]


@pytest.mark.parametrize(
    ("encrypts", "words"),
    [((True, False), "does not encrypt what it sends, and this"), ((False, True), "encrypts what it sends .--encrypt")],
)
def test_an_end_that_encrypts_and_one_that_does_not_refuse_each_other_in_words(
    encrypts: tuple[bool, bool], words: str
) -> None:
    with pytest.raises(HandshakeError, match=words):
        shaken(encrypts)


def test_a_stranger_is_refused_by_ends_that_encrypt() -> None:
    with pytest.raises((HandshakeError, ConnectionError)):
        shaken((True, True), ("another job's", TOKEN))


def test_a_machine_on_the_path_cannot_make_two_ends_speak_in_clear() -> None:
    """It tells each end that the other one does not encrypt."""
    one, path = socket.socketpair()
    with one, path, ThreadPoolExecutor(2) as pool:
        welcome = pool.submit(shake_hands, one, connecting(TOKEN, "tests", True), WITHIN_S)
        greeting = path.recv(36, socket.MSG_WAITALL)
        clear, other = socket.socketpair()
        with clear, other:
            accepted = pool.submit(shake_hands, other, accepting(TOKEN, "tests", False), WITHIN_S)
            clear.sendall(b"ELDH" + greeting[4:])
            path.sendall(clear.recv(64, socket.MSG_WAITALL))
            with pytest.raises(HandshakeError):
                welcome.result(WITHIN_S)
            clear.close()
            with pytest.raises(OSError):
                accepted.result(WITHIN_S)


def test_a_key_that_all_know_is_refused() -> None:
    """X25519 of the point 0 is 0, whatever the secret."""
    from elasticdl.rpc import handshake

    with pytest.raises(HandshakeError, match="key is none"):
        handshake._KeyExchange().records(bytes(32), TOKEN, "tests", bytes(64), ("connecting", "accepting"))


def test_unix_sockets_are_not_encrypted() -> None:
    """They do not leave the machine."""
    with ThreadPoolExecutor(1) as pool:
        ends = socket.socketpair()
        accepted = pool.submit(shake_hands, ends[1], accepting(TOKEN, "tests"), WITHIN_S)
        made = connected(lambda timeout_s: ends[0], TOKEN, "tests", WITHIN_S, encrypts=True)
        assert made.records is None
        assert accepted.result(WITHIN_S) is None
        for end in ends:
            end.close()


def test_a_process_that_cannot_encrypt_says_so_at_once() -> None:
    check_encryption()
    code = "import sys; sys.modules['cryptography'] = None\n"
    code += "from elasticdl.rpc.handshake import check_encryption\ncheck_encryption()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert "the job has --encrypt, and nothing can be encrypted here" in found.stderr
