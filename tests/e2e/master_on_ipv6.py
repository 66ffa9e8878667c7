"""A master of the local runtime whose job has addresses of IPv6 alone: everything listens at ::1."""

from __future__ import annotations

import dataclasses
import os

from elasticdl.master import __main__ as master
from elasticdl.master import local_environment

_open_environment = local_environment.open_environment


def open_environment() -> local_environment.LocalEnvironment:
    found = _open_environment()
    return dataclasses.replace(found, endpoint=dataclasses.replace(found.endpoint, host="::1"))


if __name__ == "__main__":
    local_environment.open_environment = open_environment
    os._exit(master.main())
