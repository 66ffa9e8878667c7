"""A script's place in its job: the link to the master and the job's flags, or neither if the script runs by itself.

There is one session per process.  It does not depend on a framework.

`AloneLink`: a job of one process without a master, with the same tasks in the same order, assigned and counted in
memory.  It replaces the link to a master, so that a script written for ElasticDL also runs by itself.
"""

from __future__ import annotations

import atexit
import builtins
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from elasticdl.activities import ActivityClock
from elasticdl.protocol import REPORT_S, Shard, task_order
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.rpc.channels import read_master_timeout_s
from elasticdl.rpc.job_secret import read_token, whole_spec
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.tasks import HeldLease, LeaseBook, TaskProgress
from elasticdl_client.errors import ElasticDLError, JobError
from elasticdl_client.job_spec import JobSpec

_OUR_THREADS = ("heartbeat", "reporter", "group watch")
_HOLDER = "ELASTICDL_HOLDER"  # a place in a job, and the process that holds it; child processes inherit it
_joined: tuple[str, ScriptSession] | None = None  # with its `_HOLDER`: a worker that registers again loses its place


@dataclass(slots=True)
class ScriptSession:
    """The job as a script sees it.

    Attributes:
        link: None: this process runs by itself.
        spec: The job's flags; defaults without a job.
        clock: Counts the time per activity; the heartbeat sends it.
        is_server: This pod is one of TensorFlow's parameter servers: it runs the script and takes no data.
        takes_data: The script has stated its training data.
        rank: The rank of this process in its current or last group; 0 before the first one.
    """

    link: MasterLink | None
    spec: JobSpec
    clock: ActivityClock
    is_server: bool = False
    takes_data: bool = False
    rank: int = 0

    @property
    def is_alone(self) -> bool:
        return self.link is None

    @classmethod
    def join(cls) -> ScriptSession:
        """Register with the master named by the environment, once per process; the link is None without a master.

        Raises:
            JobError: The master cannot be reached, or has replaced this worker; or the place in the job belongs to the
                parent process: it has registered already, or this child only imports its script.
        """
        global _joined  # one per process
        clock, address = ActivityClock(), os.environ.get("MASTER_ADDR", "")
        if address and "PS_ID" in os.environ:
            return cls(None, JobSpec(), clock, is_server=True)
        if address and "WORKER_ID" not in os.environ:
            raise JobError("MASTER_ADDR is set, and WORKER_ID is not", "unset MASTER_ADDR to run alone")
        place = f"worker {os.environ['WORKER_ID']} of {address}, process " if address else "alone, process "
        holder, before = f"{place}{os.getpid()}", os.environ.get(_HOLDER, "")
        if _joined is not None and _joined[0] == holder:
            return _joined[1]
        if not address:
            _joined = holder, cls(None, JobSpec(), clock)
            return _joined[1]
        if before.startswith(place) and before != holder:
            raise _second_process(f"{before.removeprefix(place)} is the process that has joined the job, and has")
        if (importer := process_of_script()) != os.getpid():
            raise _second_process(f"{importer} is the process of the script, and has")
        link = MasterLink(
            address,
            read_token(),
            int(os.environ["WORKER_ID"]),
            os.environ.get("ELASTICDL_POD_NAME", ""),
            clock,
            read_master_timeout_s(),
        )
        spec = whole_spec(link.register().job_spec)
        logging.getLogger("elasticdl").setLevel(spec.log_level)
        _end_with_our_threads()
        link.start_heartbeat()
        if spec.num_processes_per_worker > 1:
            _report_end(link)
        os.environ[_HOLDER] = holder
        _joined = holder, cls(link, spec, clock)
        return _joined[1]

    def take_data(self) -> None:
        """Record that the script trains on data of the job; the job assigns them only once.

        Raises:
            JobError: The script has called this before; a process without a job only gets a warning.
        """
        if self.takes_data:
            error = JobError(
                "this script has a second trainer, controller or DataShardService; a job deals its data once",
                "make one for training, and start another job for another model; validation data need none: "
                "take a DataLoader, or read_records of elasticdl.api.data",
            )
            if not self.is_alone:
                raise error
            logging.getLogger("elasticdl").warning("A job would refuse what runs here alone: %s", error)
        self.takes_data = True


def process_of_script() -> int:
    """Return the id of this process, or of its parent while `multiprocessing` imports the script again in a child."""
    # `multiprocessing` gives the script's module this name only in a child; `parent_process()` is set later.
    is_imported = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    is_importing = is_imported and multiprocessing.parent_process() is None
    return os.getppid() if is_importing else os.getpid()


def at_exit(function: Callable[[], object]) -> None:
    """Register a function for the end of this process; forked children inherit the registration but do not call it."""
    process_id = os.getpid()

    def call() -> None:
        if os.getpid() == process_id:
            function()

    atexit.register(call)


def _second_process(who: str) -> JobError:
    return JobError(
        f"{who} started this one",
        "a worker is one process: train in the main one (`if __name__ == '__main__':`), or join the job in the "
        "process that trains alone",
    )


class _ScriptExit(SystemExit):
    """A script that fails by `sys.exit`: the interpreter reads `code` when it ends the process with this exception."""

    def __init__(self, status: object, failures: list[object]) -> None:
        """
        Args:
            failures: The exit code is appended to it when it is read.
        """
        super().__init__(status)
        self._status, self._failures = status, failures

    @property
    def code(self) -> Any:  # type: ignore[override]  # an attribute in SystemExit
        """See `SystemExit`."""
        self._failures.append(self._status)
        return self._status


def _report_end(link: MasterLink) -> None:
    """At the end of the process, report the end of the script to the master, unless the script has failed.

    A failed script has an exit code, which becomes that of the pod, and the supervisor of its processes ends the
    others. The code of a SystemExit that the script raises itself is unknown here.
    """
    end, failures = sys.exit, list[object]()

    def exit_with(status: Any = None, /) -> NoReturn:
        has_failed = status is not None and status != 0
        if has_failed and threading.current_thread() is threading.main_thread():
            raise _ScriptExit(status, failures)
        end(status)  # outside the main thread it only ends that thread

    def report() -> None:
        has_raised = getattr(sys, "last_value", None) is not None  # set when the interpreter prints an exception
        if not has_raised and not failures:
            link.report_end()

    # atexit functions cannot see the exit code.
    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        setattr(place, name, exit_with)
    at_exit(report)  # the first registered, so the last to be called


def _end_with_our_threads() -> None:
    """End the script if the heartbeat or reporter thread dies, with the reason in its log: its work would be lost."""
    before = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        if args.thread is None or args.thread.name not in _OUR_THREADS:
            before(args)
            return
        if isinstance(args.exc_value, ElasticDLError):
            sys.stderr.write(f"elasticdl: {args.exc_value}\n")
        else:
            before(args)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = end


class AloneLink:
    """Assigns every task of the plan once per epoch; a failure ends the script, as no other process could retry it."""

    def __init__(self, shards: Sequence[Shard], plan: pb.Plan, seed: int) -> None:
        self.leases = LeaseBook()
        self.report_s = REPORT_S
        self._tasks = tasks_of(shards, plan)
        self._plan = plan
        self._seed = seed
        self._lock = threading.Lock()
        self._num_committed = 0
        self._granted: Iterator[pb.Lease] = self._grants()

    def request_lease(self) -> HeldLease | None:
        with self._lock:
            lease = next(self._granted, None)
            return None if lease is None else self.leases.add(lease)

    def lease_at_once(self, only: pb.TaskType) -> HeldLease | None:
        return self.request_lease()

    def report(self, progress: Sequence[TaskProgress]) -> list[pb.Ack]:
        acks = []
        for one in progress:
            self._num_committed += len(one.committed)
            acks.append(pb.Ack(accepted=True, model_version=self._num_committed))
        return acks

    def fail(self, lease: int, minibatch: int, error: str, details: str, bad_records: list[int]) -> pb.Ack:
        raise JobError(f"minibatch {minibatch} failed: {error}")

    def stop_training(self, reason: str) -> pb.Ack:
        with self._lock:
            self._granted = iter(())
        return pb.Ack(accepted=True, model_version=self._num_committed)

    def _grants(self) -> Iterator[pb.Lease]:
        epoch = number = 0
        while self._plan.num_epochs <= 0 or epoch < self._plan.num_epochs:
            for task in task_order(self._seed, epoch, len(self._tasks)):
                number += 1
                shard = self._tasks[task]
                message = pb.ShardMessage(name=shard.name, start=shard.start, end=shard.end, identity=shard.identity)
                yield pb.Lease(id=number, type=pb.TRAINING, epoch=epoch, task=task, shard=message)
            epoch += 1


def tasks_of(shards: Sequence[Shard], plan: pb.Plan) -> list[Shard]:
    """Return the tasks of an epoch, cut as the master does."""
    size = plan.minibatch_size * plan.num_minibatches_per_task
    return [
        Shard(shard.name, start, min(start + size, shard.end), shard.identity)
        for shard in sorted(shards)
        for start in range(shard.start, shard.end, size)
    ]
