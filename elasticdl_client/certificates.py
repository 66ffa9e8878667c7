"""The certificate of a job, made by the client: by it the job's pods know each other, and encrypt their calls.

An authority made for this job alone signs one certificate for all of its pods, and its key is thrown away, so there is
never another one.  It names no machine: at any address it proves that a pod belongs to the job, no more.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from elasticdl_client.errors import JobError
from elasticdl_client.kubernetes import names

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_LIFETIME = datetime.timedelta(days=3650)  # it ends with the job's Secret; a job must not end with its certificate
_BACKDATED = datetime.timedelta(days=1)  # clocks of nodes may be behind this machine's


def make_certificate() -> dict[str, str]:
    """Return the files of a new certificate, as PEM by name: the authority's and the pods' certificate, and its key.

    Raises:
        JobError: the package for it is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise JobError(
            f"The job's certificate cannot be made: {error}.",
            "Install the package: pip install cryptography; or, in a network that you trust, give --tls=false.",
        ) from error
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = (
        _builder("elasticdl job authority", authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        _builder(names.TLS_NAME, key, authority.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(names.TLS_NAME)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {
        names.AUTHORITY_KEY: authority.public_bytes(pem).decode(),
        names.CERTIFICATE_KEY: certificate.public_bytes(pem).decode(),
        names.PRIVATE_KEY_KEY: plain.decode(),
    }


def _builder(subject: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name | None = None) -> x509.CertificateBuilder:
    """For a certificate that is its own issuer, unless another is given."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]), datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer or name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _LIFETIME)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
