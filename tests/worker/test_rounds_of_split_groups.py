"""A member's round in a group in which no member holds all of the model; without other members."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from elasticdl.activities import Activity, ActivityClock
from elasticdl.worker.allreduce.loop import AllReduceLoop
from elasticdl.worker.allreduce.step_header import StepFlag, StepPlan
from elasticdl.worker.ledger import Ledger
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_spec import JobSpec


class SplitSession:
    """Rank 0 of such a group, and what it was doing at each call."""

    is_split, holds_all, has_handed_over, is_last, rank, size, is_over = True, False, False, False, 0, 3, True

    def __init__(self, clock: ActivityClock) -> None:
        self.ledger = Ledger()
        self.calls: list[tuple[str, Activity]] = []
        self._clock = clock

    def complete(self, update: Callable[[], None]) -> None:
        self._add("barrier")
        update()
        self._add("exchange")

    def commit(self, plan: StepPlan, reported: Any, skipped: Any) -> None:
        self._add("commit")

    def collect(self) -> dict[str, Any]:
        self._add("collect")
        return {}

    def shut_out(self) -> bool:
        return False

    def _add(self, name: str) -> None:
        self.calls.append((name, self._clock.read()[0]))


class SplitCheckpoints:
    """A writer that is behind until it has saved."""

    model = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_behind(self, ledger: Ledger) -> bool:
        return not self.calls

    def is_saved(self, ledger: Ledger) -> bool:
        return bool(self.calls)

    def is_due(self, ledger: Ledger) -> bool:
        return True

    def save(self, ledger: Ledger, others: Any, is_last: bool) -> None:
        self.calls.append("save")

    def save_last(self, ledger: Ledger, within_s: float, others: Any) -> None:
        self.calls.append(f"save within {within_s:g} s")

    def wait(self, timeout_s: float | None = None) -> None:
        self.calls.append("wait")


def made_loop() -> tuple[Any, SplitSession, SplitCheckpoints]:
    clock = ActivityClock()
    clock.switch(Activity.COMPUTE)
    session, checkpoints = SplitSession(clock), SplitCheckpoints()
    supply = SimpleNamespace(is_over=False, reported=lambda plan: [])
    failures = SimpleNamespace(link=None, reporter=None, clock=clock)
    tasks = SimpleNamespace(failures=failures, model=None, evaluation=SimpleNamespace(failures=failures), exports=None)
    spec = JobSpec(job_name="j", distribution_strategy=DistributionStrategy.ALL_REDUCE)
    termination = SimpleNamespace(reports_s=1.0, saving_s=5.0, rest_s=2.0, enters_groups=lambda shut_out: None)
    parts: Any = (spec, session, supply, None, checkpoints, tasks, termination)
    return AllReduceLoop(*parts), session, checkpoints


def agreed(*wishes: StepFlag) -> StepPlan:
    return StepPlan(tuple(() for _ in wishes), 0, wishes)


def test_waiting_for_others_in_a_step_is_no_computing() -> None:
    loop, session, _ = made_loop()
    loop._update(agreed(StepFlag.NOTHING), None, ())
    assert session.calls == [
        ("barrier", Activity.COLLECTIVE),
        ("commit", Activity.COMPUTE),
        ("exchange", Activity.COLLECTIVE),
    ]


def test_the_last_checkpoint_needs_no_member_to_know_of_the_end_but_rank_0() -> None:
    loop, session, checkpoints = made_loop()
    wishes = loop._wishes_if_split()
    assert wishes == StepFlag.OVER | StepFlag.CHECKPOINT
    assert loop._end_or_save(agreed(wishes, StepFlag.OVER, StepFlag.NOTHING))
    assert session.calls == [("collect", Activity.CHECKPOINT)]
    assert checkpoints.calls == ["save"]
    assert loop._wishes_if_split() == StepFlag.OVER
    loop._save_last()
    assert checkpoints.calls == ["save", "wait"]


def test_a_model_that_is_saved_is_not_saved_again_when_a_checkpoint_is_due() -> None:
    loop, session, _ = made_loop()
    session.is_over = False
    assert loop._wishes_if_split() == StepFlag.CHECKPOINT
    loop._end_or_save(agreed(StepFlag.CHECKPOINT, StepFlag.NOTHING))
    assert loop._wishes_if_split() == StepFlag.NOTHING


def test_the_last_checkpoint_is_on_disk_before_the_farewell_that_brings_a_successor() -> None:
    loop, session, checkpoints = made_loop()
    session.holds_all = session.has_handed_over = session.is_last = True
    loop._reporter = SimpleNamespace(drain=lambda seconds: checkpoints.calls.append(f"reports within {seconds:g} s"))
    loop._link = SimpleNamespace(say_farewell=lambda: checkpoints.calls.append("farewell"))
    loop.leave(is_idle=True)
    assert checkpoints.calls == ["reports within 1 s", "save within 5 s", "farewell", "wait"]
