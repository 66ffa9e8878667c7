"""The user that a job's pods run as, within the restricted Pod Security profile."""

from __future__ import annotations

import re
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes import names

DEFAULT_USER = "auto"
CHOSEN_BY_CLUSTER = "none"
UID_RANGE = "openshift.io/sa.scc.uid-range"  # annotation of a namespace whose admission gives each pod a user


def parse_user(text: str) -> int | None:
    """The id of --run_as_user; None: the cluster chooses.

    Raises:
        FlagError: it is none, or root's.
    """
    if text == CHOSEN_BY_CLUSTER:
        return None
    if text == DEFAULT_USER:
        return names.USER_ID
    if not re.fullmatch(r"[1-9][0-9]{0,9}", text):
        raise FlagError("is not a user id above 0", "For example 1000, or none: the cluster chooses.")
    return int(text)


def pod_security(user: int | None) -> dict[str, Any]:
    """Return the security context of a pod; a chosen user is the group of its volumes, too."""
    own = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {
        "runAsNonRoot": True,
        **own,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
