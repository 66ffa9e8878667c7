"""Calls of a job with a certificate: admission, and the bytes on the wire."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from elasticdl.rpc import channels
from elasticdl.rpc.job_secret import TOKEN_FILE_VARIABLE, read_certificate, read_token, whole_spec
from elasticdl.rpc.servers import serve
from elasticdl_client.certificates import make_certificate
from elasticdl_client.choices import Tls
from elasticdl_client.errors import FlagError, JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.objects import public_manifests
from elasticdl_client.secret_values import HIDDEN
from tests.rpc.tap import tap

TOKEN = "the token of this job"
Enter = Callable[[Path | None], None]
"""Makes this process one of the job with that directory; None: of none."""


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    def change(directory: Path | None) -> None:
        monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)
        if directory is not None:
            monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(directory / "token"))

    return change


def job(directory: Path, files: dict[str, str] | None = None) -> Path:
    directory.mkdir()
    for name, text in (make_certificate() if files is None else files).items():
        (directory / name).write_text(text)
    return directory


@contextmanager
def echo_server() -> Iterator[int]:
    say = grpc.unary_unary_rpc_method_handler(lambda request, context: b"heard " + request)
    handlers = grpc.method_handlers_generic_handler("elasticdl.Echo", {"Say": say})
    server, port = serve(lambda it: it.add_generic_rpc_handlers((handlers,)), "127.0.0.1", 0, TOKEN, 4)
    try:
        yield port
    finally:
        server.stop(0).wait()


def say(channel: grpc.Channel) -> bytes:
    with channel:
        return bytes(channel.unary_unary("/elasticdl.Echo/Say")(b"it", timeout=5))


def refused(channel: grpc.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        say(channel)
    return caught.value.code()


def test_a_job_with_a_certificate_shows_neither_token_nor_message_on_the_wire(tmp_path: Path, enter: Enter) -> None:
    for directory, is_hidden in ((job(tmp_path / "open", {}), False), (job(tmp_path / "tls"), True)):
        enter(directory)
        with echo_server() as port, tap(port) as wire:
            assert say(channels.connect(f"127.0.0.1:{wire.port}", TOKEN)) == b"heard it"
        assert [word in wire.seen for word in (b"heard it", TOKEN.encode())] == [not is_hidden] * 2


def test_the_token_is_still_asked_for(tmp_path: Path, enter: Enter) -> None:
    enter(job(tmp_path / "job"))
    with echo_server() as port:
        assert refused(channels.connect(f"127.0.0.1:{port}", "another")) is grpc.StatusCode.UNAUTHENTICATED


def test_strangers_with_the_token_and_without_the_certificate_are_not_let_in(tmp_path: Path, enter: Enter) -> None:
    own, other = job(tmp_path / "job"), job(tmp_path / "other")
    with contextlib.ExitStack() as stack:
        enter(own)
        port = stack.enter_context(echo_server())
        address = f"127.0.0.1:{port}"
        enter(None)
        assert refused(channels.connect(address, TOKEN)) is grpc.StatusCode.UNAVAILABLE
        enter(other)
        assert refused(channels.connect(address, TOKEN)) is grpc.StatusCode.UNAVAILABLE
        authority = (own / names.AUTHORITY_KEY).read_bytes()  # public, and no certificate of its own
        options = (("grpc.ssl_target_name_override", names.TLS_NAME),)
        nameless = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
        with pytest.raises(grpc.RpcError) as caught:
            nameless.unary_unary("/elasticdl.Echo/Say")(b"", timeout=5, metadata=channels.token_metadata(TOKEN))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        nameless.close()
        enter(own)
        assert say(channels.connect(address, TOKEN)) == b"heard it"


def test_a_client_speaks_to_no_server_but_its_jobs(tmp_path: Path, enter: Enter) -> None:
    own, other = job(tmp_path / "job"), job(tmp_path / "other")
    for directory in (other, None):
        enter(directory)
        with echo_server() as port:
            enter(own)
            assert refused(channels.connect(f"127.0.0.1:{port}", TOKEN)) is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_without_its_key_is_no_reason_to_speak_in_clear(tmp_path: Path, enter: Enter) -> None:
    files = make_certificate()
    del files[names.PRIVATE_KEY_KEY]
    enter(job(tmp_path / "job", files))
    with pytest.raises(JobError, match=r"certificate cannot be read.*tls\.key"):
        channels.connect("127.0.0.1:1", TOKEN)


def test_what_a_dry_run_prints_makes_no_job(tmp_path: Path, enter: Enter) -> None:
    enter(job(tmp_path / "job", {"token": HIDDEN}))
    with pytest.raises(JobError, match="--dry_run"):
        read_token()


def test_a_job_that_wants_tls_does_not_begin_without_its_certificate(tmp_path: Path) -> None:
    spec = JobSpec(job_name="job", tls=Tls.ON).to_json()
    with pytest.raises(JobError, match="there is no certificate"):
        whole_spec(spec, job(tmp_path / "job", {}))
    with pytest.raises(JobError, match="has --encrypt, and there is no certificate"):
        whole_spec(JobSpec(job_name="job", encrypt=True).to_json(), tmp_path / "job")
    old = JobSpec(job_name="job").to_json()  # of a client before there were certificates
    assert whole_spec(old, tmp_path / "job").job_name == "job"
    assert read_certificate(tmp_path / "job") is None


ANALYSIS = {"job_name": "job", "data": "x.csv", "output": "y.json", "runtime": "local"}


def test_the_certificate_is_of_the_job_alone_and_names_no_machine() -> None:
    files, others = make_certificate(), make_certificate()
    assert set(files) == set(names.CERTIFICATE_KEYS)
    authority = x509.load_pem_x509_certificate(files[names.AUTHORITY_KEY].encode())
    certificate = x509.load_pem_x509_certificate(files[names.CERTIFICATE_KEY].encode())
    certificate.verify_directly_issued_by(authority)
    key = load_pem_private_key(files[names.PRIVATE_KEY_KEY].encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp256r1"
    assert key.public_key() == certificate.public_key() != authority.public_key()
    alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == [names.TLS_NAME]
    now = datetime.datetime.now(datetime.UTC)
    assert certificate.not_valid_before_utc < now - datetime.timedelta(hours=23)
    assert certificate.not_valid_after_utc > now + datetime.timedelta(days=3649)
    assert not any(files[name] == others[name] for name in files)


@pytest.mark.parametrize(
    ("flags", "uses"),
    [
        ({"runtime": "local"}, False),
        ({"runtime": "local", "tls": "true"}, True),
        ({"runtime": "kubernetes", "image_name": "i"}, True),
        ({"runtime": "kubernetes", "image_name": "i", "tls": "false"}, False),
        ({"runtime": "local", "encrypt": "true"}, True),
    ],
)
def test_tls_is_for_clusters_unless_the_flag_says_otherwise(flags: dict[str, str], uses: bool) -> None:
    assert JobSpec.from_flags("analyze", ANALYSIS | flags).uses_tls is uses


@pytest.mark.parametrize(
    ("job_type", "flags", "words"),
    [
        ("analyze", ANALYSIS | {"encrypt": "true", "tls": "false"}, "--encrypt with --tls=false: calls between pods"),
        (
            "train",
            {"job_name": "j", "runtime": "local", "job_command": "python t.py", "need_tf_config": "true"}
            | {"num_ps_pods": "1", "encrypt": "true"},
            "--encrypt with --need_tf_config: TensorFlow's own servers",
        ),
    ],
)
def test_what_cannot_be_encrypted_is_refused_with_the_flag(job_type: str, flags: dict[str, str], words: str) -> None:
    with pytest.raises(FlagError, match=words):
        JobSpec.from_flags(job_type, flags)


def test_a_dry_run_shows_that_a_job_encrypts() -> None:
    flags = {"job_name": "j", "data": "x.csv", "output": "y.json", "image_name": "i", "encrypt": "true"}
    shown = json.dumps(public_manifests(JobSpec.from_flags("analyze", flags)))
    assert '\\"encrypt\\": true' in shown
    assert all(name in shown for name in names.CERTIFICATE_KEYS)
