"""A master of the local runtime whose job has addresses of IPv6 alone: everything listens at ::1."""

from __future__ import annotations

import dataclasses
import os

from elasticdl.master import __main__ as master
from elasticdl.master import local_place

_open_place = local_place.open_place


def open_place() -> local_place.LocalPlace:
    return dataclasses.replace(_open_place(), host="::1")


if __name__ == "__main__":
    local_place.open_place = open_place
    os._exit(master.main())
