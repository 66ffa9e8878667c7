"""Refuse a statement on Kubernetes that names a source pods cannot reach, before anything is connected or read."""

from __future__ import annotations

import ipaddress
from urllib.parse import parse_qs, urlsplit

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes.resources import mount_of, parse_volumes
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import KINDS, is_remote, scheme_of

PASSWORD_FILES = ("read_default_file", "read_default_group", "passfile")
"""Parameters of a URL that this machine finds a password by; pods get the password itself."""

_FILES = frozenset(
    {
        *("sslcert", "sslkey", "sslrootcert", "sslcrl", "service", "servicefile"),
        *("ssl_ca", "ssl_cert", "ssl_key", "ssl_capath"),
    }
)


def check_reachable(url: str) -> None:
    """Check that pods can reach the database of --datasource, as far as its URL says.

    Raises:
        FlagError: it is of this machine alone.
    """
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if parts.scheme.startswith("sqlite"):
        raise FlagError(
            f"--datasource={hide(url)} is a file of this machine, which pods cannot read.",
            "Name a server that pods reach, such as postgresql://USER@HOST/DATABASE, or give --runtime=local.",
        )
    host = query.get("unix_socket") or parts.hostname or query.get("host") or query.get("hostaddr") or ""
    if not host or host.startswith(("/", "@")):
        raise FlagError(
            f"--datasource={hide(url)} is reached by a socket of this machine, which pods do not have.",
            "Name the host by which pods reach the server: postgresql://USER@HOST/DATABASE.",
        )
    local = next((one for one in host.split(",") if _is_local(one)), "")
    if local:
        raise FlagError(
            f"--datasource={hide(url)}: {local} is this machine here, and in a pod the pod itself.",
            "Name the host by which pods reach the server, such as NAME.NAMESPACE.svc of a Service.",
        )
    file = next((name for name in query if name in _FILES), "")
    if file:
        raise FlagError(
            f"--datasource={hide(url)}: {file} names something of this machine, which pods do not have.",
            f"Leave {file} out of the URL; sslmode=require encrypts without it.",
        )


def check_place(path: str, volume: str) -> None:
    """Check that pods keep a model where --models_dir says.

    Args:
        path: of the model.
        volume: of the job.

    Raises:
        FlagError: it is on no volume that outlives pods, and no storage that can be written.
    """
    if is_remote(path):
        if reason := KINDS[scheme_of(path)].read_only:
            raise FlagError(f"--models_dir: {path} is storage that cannot be written: {reason}.", "Name another one.")
        return
    mount = mount_of(path, parse_volumes(volume))
    if mount is None or not mount.outlives_pods:
        raise FlagError(
            f"The model {path} would be in pods, on no volume that outlives them.",
            'Mount one, for example --volume="claim_name=models,mount_path=/models" with --models_dir=/models, or name '
            "storage: --models_dir=s3://BUCKET/models.",
        )


def _is_local(host: str) -> bool:
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
