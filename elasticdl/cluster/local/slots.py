"""Changes the slots of a local job: ``python -m elasticdl.cluster.local.slots SOCKET N``, for tests and demonstrations.

The youngest workers above N are preempted; waiting pods are started when N grows; ``unlimited`` removes the limit.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from elasticdl.cluster.local.adapter import ProcessCluster
from elasticdl_client.errors import ElasticDLError


def _slots(text: str) -> int | None:
    if text == "unlimited":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'unlimited'")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.cluster.local.slots")
    parser.add_argument("socket", help="the agent's socket")
    parser.add_argument("slots", type=_slots, help="PS and worker pods that may run at once, or 'unlimited'")
    arguments = parser.parse_args()
    try:
        with closing(ProcessCluster(arguments.socket)) as cluster:
            cluster.set_slots(arguments.slots)
    except ElasticDLError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
