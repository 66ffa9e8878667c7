"""Asks the API server, before anything is begun, whether the master may do what it will have to."""

from __future__ import annotations

import logging

from elasticdl_client.errors import JobError
from elasticdl_client.kubernetes.access import described, missing_of_user
from elasticdl_client.kubernetes.api import ClusterError, Connection
from elasticdl_client.kubernetes.commands import grant
from elasticdl_client.kubernetes.rbac import EXPIRY_RIGHTS, MASTER_RIGHTS

logger = logging.getLogger("elasticdl.master")


def check_rights(connection: Connection, namespace: str, service_account: str, expires: bool) -> None:
    """Checks all rights of a master.

    Args:
        expires: it deletes its job some time after the end.

    Raises:
        JobError: naming every verb that is missing.
        ClusterError: the API does not answer.
    """
    try:
        missing = missing_of_user(connection, namespace, (*MASTER_RIGHTS, *(EXPIRY_RIGHTS if expires else ())))
    except ClusterError as error:
        if error.unreachable:
            raise
        logger.warning("The rights of the master cannot be checked: %s", error.what)
        return
    if missing:
        raise JobError(
            f"the service account {service_account} of namespace {namespace} lacks rights that the master needs: "
            f"{described(missing)}",
            f"{grant(namespace, service_account)}  (`elasticdl rbac --print` shows them)",
        )
