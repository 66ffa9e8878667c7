"""A simulated worker process: the worker's own code from its registration to its exit code, on simulated threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import GreenletExit

import elasticdl.activities
import elasticdl.worker.allreduce.group_session
import elasticdl.worker.allreduce.loop
import elasticdl.worker.allreduce.prefetchers
import elasticdl.worker.allreduce.replica
import elasticdl.worker.checkpoint
import elasticdl.worker.master_link
import elasticdl.worker.reporter
import elasticdl.worker.tasks
import elasticdl.worker.termination
from elasticdl.activities import ActivityClock
from elasticdl.protocol import WrittenCheckpoint
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.allreduce.loop import AllReduceLoop, make_all_reduce_loop
from elasticdl.worker.checkpoint import Arrays, Checkpoint
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.master_link import MasterLink
from elasticdl.worker.reporter import TaskFailures
from elasticdl.worker.termination import Termination
from elasticdl_client.errors import CheckpointError, ElasticDLError
from tests.engine.arithmetic import VALIDATION, Arithmetic, Plan, Records, ShardedArithmetic, Troubles, Violation
from tests.engine.collectives import Links, SimulatedGroup
from tests.engine.master_calls import Channel, MasterCalls, Stream
from tests.engine.scheduler import Process, Scheduler, Threading, Time

_WRITING_S = 2.0  # a checkpoint: longer than from the last step to the end of its process
_WORKER = (
    elasticdl.activities,
    elasticdl.worker.allreduce.loop,
    elasticdl.worker.allreduce.prefetchers,
    elasticdl.worker.allreduce.replica,
    elasticdl.worker.allreduce.group_session,
    elasticdl.worker.checkpoint,
    elasticdl.worker.master_link,
    elasticdl.worker.reporter,
    elasticdl.worker.tasks,
    elasticdl.worker.termination,
)


@dataclass
class Written:
    """The checkpoints of a job, on a disk that is slow, and may be full for a time; stands for `StateCheckpoints`.

    Attributes:
        begun: the newest: by which process, its number, and its step; None: a process has read one since.
        version_of: the group that a process is in, or is forming.
        num_read: how often a process has begun with one, or with initial values.
        begun_anew: groups in which one has.
        writing_s: how long one takes.
        is_full: writing fails at its end.
        writers: processes that are writing.
        failed: numbers of those that could not be written.
        tries: the newest of each process.
    """

    scheduler: Scheduler
    is_wanted: bool
    version_of: Callable[[Process], int]
    place: str = "/checkpoints"
    begun: tuple[Process, int, int] | None = None
    num_read: int = 0
    begun_anew: set[int] = field(default_factory=set)
    writing_s: float = _WRITING_S
    is_full: bool = False
    writers: list[Process] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    found: list[Checkpoint] = field(default_factory=list)
    tries: dict[Process, WrittenCheckpoint] = field(default_factory=dict)

    @property
    def newest_try(self) -> WrittenCheckpoint | None:
        return self.tries.get(self.scheduler.running.process)

    def request(self) -> None:
        """A master that asks for checkpoints is no part of this."""

    def take_request(self) -> bool:
        return False

    def save(self, number: int, arrays: Arrays, ledger: Ledger) -> None:
        path: Any = f"{self.place}/{number}"
        state = {name: array.copy() for name, array in arrays.items()}
        made = Checkpoint(path, state, Ledger.from_bytes(ledger.to_bytes()))
        begun = (self.scheduler.running.process, number, ledger.steps)
        if begun == self.begun:
            raise Violation(f"checkpoint {number} is written twice, without a step between")
        self.begun = begun
        if any(self._is_same(one, made) for one in self.found):
            return
        self.found = [one for one in self.found if self._number(one) != number]
        self.writers.append(begun[0])
        try:
            self.scheduler.sleep(self.writing_s)
        finally:
            self.writers.remove(begun[0])
        if self.is_full:
            self.begun = None
            self.failed.add(number)
            self.tries[begun[0]] = WrittenCheckpoint(number, error="no space is left")
            raise CheckpointError("no space is left")
        self.failed.discard(number)
        self.tries[begun[0]] = WrittenCheckpoint(number, path)
        if not any(self._is_same(one, made) for one in self.found):  # several write the same files
            self.found.append(made)

    @staticmethod
    def _is_same(one: Checkpoint, other: Checkpoint) -> bool:
        are_equal = one.arrays.keys() == other.arrays.keys() and one.ledger.to_bytes() == other.ledger.to_bytes()
        return are_equal and all((array == other.arrays[name]).all() for name, array in one.arrays.items())

    @staticmethod
    def _number(checkpoint: Checkpoint) -> int:
        return checkpoint.ledger.applied.num_names

    def has(self, number: int) -> bool:
        return any(self._number(one) == number for one in self.found)

    def newest_directory(self) -> str:
        numbers = [self._number(one) for one in self.found]
        return f"{self.place}/{max(numbers)}" if numbers else ""

    def latest(self) -> Checkpoint | None:
        return max(self.found, key=self._number, default=None)

    def newest(self) -> Checkpoint | None:
        self.begun = None
        self.num_read += 1
        self.begun_anew.add(self.version_of(self.scheduler.running.process))
        newest = self.latest()
        return newest and replace(newest, ledger=newest.ledger.copy())


@dataclass
class Room:
    """State shared by all processes of a job."""

    scheduler: Scheduler
    links: Links
    calls: MasterCalls
    plan: Plan
    troubles: Troubles
    written: Written


class Member:
    """One process.

    Attributes:
        framework: its model.
        exit_code: None while it lives or if it was killed.
    """

    def __init__(self, room: Room, process: Process, worker_id: int, pod_name: str) -> None:
        self._room = room
        self.process = process
        self._worker_id = worker_id
        self._pod_name = pod_name
        make = ShardedArithmetic if room.plan.spec.shard_optimizer else Arithmetic
        self.framework = make(room.plan, room.troubles, room.scheduler.sleep)
        self.loop: AllReduceLoop | None = None
        self.sigterm: Callable[[int], None] | None = None
        room.scheduler.spawn(process, "main", self._main)

    @property
    def steps(self) -> int:
        """Of the model that it holds; -1: none, or not of its last group."""
        session = self.loop._session if self.loop is not None else None
        return session.ledger.steps if session is not None and session._holds_model else -1

    def witness(self) -> tuple[object, int]:
        """Return the model, and the number of its steps, as they are now."""
        assert self.loop is not None
        return self.framework.witness, self.loop._session.ledger.steps

    def terminate(self) -> None:
        """SIGTERM."""
        handler = self.sigterm
        if handler is not None:
            self._room.scheduler.spawn(self.process, "signal", lambda: handler(15))
        else:
            self._room.scheduler.at(0.0, lambda: self.process.on_exit(143))

    def _main(self) -> None:
        try:
            self._work()
        except ElasticDLError:
            self._exit(1)
        else:
            self._exit(0)

    def _exit(self, code: int) -> None:
        process = self.process
        self._room.scheduler.at(0.0, lambda: None if process.is_over else process.on_exit(code))
        process.is_stopped = True  # nothing more runs in it
        raise GreenletExit

    def _work(self) -> None:
        room, spec = self._room, self._room.plan.spec
        clock = ActivityClock()
        termination = Termination(clock)
        link = MasterLink("master", "", self._worker_id, self._pod_name, clock, 300.0)
        termination.install()
        link.register()
        termination.before_end(lambda is_idle: link.say_farewell())
        link.start_heartbeat()
        link.report_model(self._report())
        framework: Any = self.framework
        records: Any = Records(room.plan, room.troubles)
        failures = TaskFailures.of(spec, link)
        self.loop = make_all_reduce_loop(failures, framework, records.of, spec, termination, "master:1")
        self.framework.is_compiled = True
        termination.before_end(self.loop.leave)
        self.loop.run()
        link.report_time()

    def _report(self) -> pb.ModelReport:
        def messages(shards: Any) -> Iterator[pb.ShardMessage]:
            return (pb.ShardMessage(name=s.name, start=s.start, end=s.end) for s in shards)

        message = pb.ModelReport(metrics=["accuracy"], has_training_shards=True)
        message.training_shards.extend(messages(self._room.plan.shards))
        if (rules := self._room.plan.rules) is not None:
            message.has_callbacks, message.callbacks = True, rules.to_json()
        if self._room.plan.spec.validation_data:
            message.has_validation_shards = True
            message.validation_shards.extend(messages([VALIDATION]))
        return message


@contextmanager
def installed(room: Room, members: Callable[[Process], Member]) -> Iterator[None]:
    """The worker's modules run on the room's threads, clock and networks."""
    scheduler = room.scheduler
    threads, time = Threading(scheduler), Time(scheduler)
    quiet = SimpleNamespace(shutdown=lambda: None)

    def running() -> Process:
        return scheduler.running.process

    def leave(code: int) -> None:
        members(running())._exit(code)

    def on_signals(handler: Callable[[int], None], *numbers: int) -> None:
        members(running()).sigterm = handler

    def group(*arguments: Any) -> SimulatedGroup:
        process = running()
        return SimulatedGroup(room.links, process, lambda: members(process).witness())

    with pytest.MonkeyPatch.context() as patch:
        for module in _WORKER:
            for name, instead in (("threading", threads), ("time", time)):
                if hasattr(module, name):
                    patch.setattr(module, name, instead)
        link, termination = elasticdl.worker.master_link, elasticdl.worker.termination
        loop, replica = elasticdl.worker.allreduce.loop, elasticdl.worker.allreduce.replica
        process_calls = SimpleNamespace(_exit=leave, register_at_fork=lambda **hooks: None)
        for module in (link, termination):
            patch.setattr(module, "os", process_calls)
        patch.setattr(link, "connect", lambda *arguments: Channel(room.calls, running()))
        patch.setattr(link, "MasterStream", Stream)
        patch.setattr(link, "secrets", SimpleNamespace(randbits=scheduler.random.getrandbits))
        patch.setattr(link, "used_share", lambda: 0.1)
        patch.setattr(link, "cpu_use", lambda: None)
        patch.setattr(link, "stacks", SimpleNamespace(watch=lambda: None, take=lambda activity: None))
        patch.setattr(link, "logging", quiet)
        patch.setattr(termination, "logging", quiet)
        patch.setattr(termination, "on_signals", on_signals)
        patch.setattr(loop, "ElasticGroup", group)
        patch.setattr(loop, "own_host", lambda address: "host")
        patch.setattr(loop, "read_token", lambda: "")
        patch.setattr(replica, "StateCheckpoints", SimpleNamespace(of_module=lambda spec, file: room.written))
        yield
