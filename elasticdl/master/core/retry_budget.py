"""RetryBudget: what counts against a job: tasks whose user code raised, pods that ended by their own fault.

A lost worker, a preemption or a lost lease is never charged.  This module decides when it is enough and how long a
successor waits; it ends nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elasticdl.master.core.leases import TaskKey
from elasticdl.master.core.pods import Place
from elasticdl.master.core.values import TaskType

MAX_DELAY = 60.0
OWN_FAULTS = frozenset({"Error", "OOMKilled", "Completed"})  # Completed: it left although the job continues

# Errors of code, which another life meets again.  Not RuntimeError: PyTorch raises it for devices and processes, too.
_OF_CODE = re.compile(
    r"exit code \d+: (?:AssertionError|AttributeError|ImportError|IndentationError|IndexError|KeyError"
    r"|ModuleNotFoundError|NameError|NotImplementedError|RecursionError|SyntaxError|TabError|TypeError"
    r"|UnboundLocalError|ValueError|ZeroDivisionError)(?::|$)",
    re.MULTILINE,
)
_OF_ARGUMENTS = re.compile(r"exit code 2; its last lines:\n(?:.*\n)*\S+: error: .*$")  # argparse
_OF_SURROUNDINGS = re.compile(r"CUDA|cuDNN|NCCL|gloo|memory|connect|timed? ?out|unavailable|killed by", re.IGNORECASE)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class RetryBudget:
    """Failures per task with the worker that must not have it next, and ends of pods since the last commit.

    Successors wait the longer the more pods of their slot have ended: many pods that are lost at once all come back at
    once.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._failures: dict[TaskKey, int] = {}
        self._avoided: dict[TaskKey, int] = {}
        self.num_faults = 0  # pods in a row that ended by their own fault before a commit
        self._errors: set[str] = set()  # of code, since the last commit
        self._num_fruitless: dict[Place, int] = {}  # pods of a slot in a row that ended, whatever the reason

    def task_failed(self, key: TaskKey, worker_id: int) -> int:
        """Charges a task; how often it has failed."""
        self._failures[key] = self._failures.get(key, 0) + 1
        self._avoided[key] = worker_id
        return self._failures[key]

    def task_finished(self, key: TaskKey) -> None:
        self._failures.pop(key, None)
        self._avoided.pop(key, None)

    def may_have(self, key: TaskKey, worker_id: int, is_alone: bool) -> bool:
        """A task that failed on a worker goes to another one, if there is another."""
        return is_alone or self._avoided.get(key) != worker_id

    def is_enough(self, failures: int) -> bool:
        return failures >= self._max_failures

    def committed(self) -> None:
        """Something is done: what went before is forgiven."""
        self.num_faults = 0
        self._errors.clear()
        self._num_fruitless.clear()

    def pod_ended(self, reason: str, place: Place, has_committed: bool) -> float:
        """Charges the end of a pod if it is to be charged; seconds until its successor may start."""
        if has_committed:
            return 0.0
        self._num_fruitless[place] = num_fruitless = self._num_fruitless.get(place, 0) + 1
        if reason in OWN_FAULTS:
            self.num_faults += 1
        elif num_fruitless == 1:
            return 0.0
        return min(MAX_DELAY, 2.0 ** min(10, num_fruitless - 1))

    def is_known_error(self, message: str) -> bool:
        """Return whether a pod ended with the same error of the user's code before, since the last commit.

        Args:
            message: how a pod ended, as the cluster says; an error that another life may not meet is not remembered.
        """
        is_of_code = _OF_CODE.match(message) and not _OF_SURROUNDINGS.search(message.partition("\n")[0])
        if not is_of_code and not _OF_ARGUMENTS.match(message):
            return False
        error = _ADDRESS.sub("", message)
        is_known = error in self._errors
        self._errors.add(error)
        return is_known

    def snapshot(self) -> dict[str, Any]:
        failures = [[*key, count, self._avoided[key]] for key, count in self._failures.items()]
        return {"failures": failures, "num_faults": self.num_faults, "errors": sorted(self._errors)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for task_type, epoch, task, count, worker_id in saved["failures"]:
            key = (TaskType(task_type), epoch, task)
            self._failures[key], self._avoided[key] = count, worker_id
        self.num_faults = saved["num_faults"]
        self._errors = set(saved.get("errors", ()))
