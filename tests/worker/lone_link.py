"""A worker's link in a process of its own, where no server looks after connections: ``lone_link ADDRESS [lease]``."""

from __future__ import annotations

import sys

from elasticdl.activities import ActivityClock
from elasticdl.worker.master_link import MasterLink
from tests.worker.scripted_master import TOKEN


def main() -> None:
    address, *calls = sys.argv[1:]
    link = MasterLink(address, TOKEN, 3, "pod", ActivityClock(), 60.0)
    link.register()
    link.start_heartbeat()
    if calls:
        link.request_lease()
    sys.stdin.read()  # until the test ends


if __name__ == "__main__":
    main()
