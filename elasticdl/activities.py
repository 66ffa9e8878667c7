"""The activities of a worker's main thread.

Imports nothing that takes time: a worker has it before it catches SIGTERM.
"""

from __future__ import annotations

from enum import StrEnum


class Activity(StrEnum):
    """The activity of a worker's main thread; heartbeats carry it to the master."""

    START = "start"  # importing, loading and building the model
    COMPILE = "compile"  # the first minibatch
    COMPUTE = "compute"  # minibatches, and work between the other activities
    REPEAT = "repeat"  # computing a minibatch again whose gradient came too late
    PS = "ps"  # waiting for parameter servers
    WORLD = "world"  # AllReduce: waiting for the other members in a step
    JOIN = "join"  # AllReduce: waiting for a group, and taking its model over
    INPUT = "input"  # waiting for records and the user's feed
    EVALUATE = "evaluate"
    EXPORT = "export"
    CHECKPOINT = "checkpoint"
    IDLE = "idle"  # waiting for a task
