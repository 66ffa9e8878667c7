"""Members that hold the optimizer's state in shards make the same model as members that hold all of it, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks import sharded_optimizer
from elasticdl.activities import ActivityClock
from elasticdl.collective import ElasticGroup, GroupLost
from elasticdl.frameworks.framework import Share
from elasticdl.frameworks.torch.computation import Computation
from elasticdl.worker.allreduce.group_session import GroupEnded, GroupSession
from elasticdl.worker.allreduce.replica import CheckpointWriter, Replica, ShardedReplica
from elasticdl.worker.allreduce.sharded_session import ShardedSession
from elasticdl.worker.allreduce.step_header import BatchRef, StepFlag
from elasticdl.worker.checkpoint import StateCheckpoints
from elasticdl.worker.master_link import MasterLink
from elasticdl_client.choices import DistributionStrategy, Precision
from elasticdl_client.errors import ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from tests.worker.group_master import ANSWER_S, GroupMaster, name_of
from tests.worker.scripted_master import TOKEN

Make = Callable[..., Any]
State = dict[str, npt.NDArray[Any]]
SGD, ADAM, ADAGRAD = "torch_conv.optimizer", "torch_conv.adam", "torch_conv.adagrad"


def leave_when_planned(member: TrainingMember) -> None:
    """Exchange headers until the group ends."""
    with suppress(GroupEnded):
        while True:
            member.session.plan_step([])


class Killed(BaseException):
    """A member's process is gone."""


class TrainingMember:
    """A worker's session over a model; a thread of its own calls it."""

    def __init__(self, master: GroupMaster, worker_id: int, framework: Any, batches: list[Any], place: str) -> None:
        spec = JobSpec(
            job_name="j", checkpoint_dir=place, distribution_strategy=DistributionStrategy.ALL_REDUCE, minibatch_size=8
        )
        self.framework = framework
        self._batches = batches
        self.link = MasterLink(master.address, TOKEN, worker_id, f"pod-{worker_id}", ActivityClock(), ANSWER_S)
        self.link.register()
        self.group = ElasticGroup("127.0.0.1", TOKEN)
        checkpoints = StateCheckpoints.of_module(spec, "model.npz")
        self.session: GroupSession
        self.model: Replica
        if framework._computation.shards_optimizer:
            self.model = sharded = ShardedReplica(framework, checkpoints, "", self.link.clock)
            self.session = ShardedSession(self.link, self.group, sharded, framework, ANSWER_S)
        else:
            self.model = Replica(framework, checkpoints, "", self.link.clock)
            self.session = GroupSession(self.link, self.group, self.model, ANSWER_S)
        self.writer = CheckpointWriter(self.model, checkpoints, 1)
        self.session.start()
        self._thread = ThreadPoolExecutor(1)

    def does(self, verb: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._thread.submit(verb, self, *arguments)

    def close(self) -> None:
        self.group.abandon("the test is over")
        self._thread.shutdown()
        self.group.close()

    def step(self, number: int, others: Semaphore | None = None, num_awaited: int = 0) -> None:
        """A step with the minibatch of this rank.

        Args:
            others: counts members that update.
            num_awaited: this one dies when as many others do, before it has sent any parameter; 0: it lives.
        """
        session, framework = self.session, self.framework
        plan = session.plan_step([BatchRef(name_of(10 * number + session.rank), 8)])
        batch = self._batches[(number + session.rank) % len(self._batches)]
        reductions: list[Any] = []
        share = Share(batch, number, 1.0 / session.size, session.size == 1)
        gradient = framework.local_gradient([share], lambda buffer: reductions.append(session.begin_reduce(buffer)))
        if gradient.buffers:
            reductions.append(session.begin_reduce(gradient.buffers[-1]))
            session.finish_reduce(reductions)

        def update() -> None:
            if others is not None:
                for _ in range(num_awaited):
                    others.acquire()
                others.release()
            if num_awaited:
                raise Killed
            framework.apply_gradient(gradient, framework.learning_rate(0, session.ledger.steps))
            session.commit(plan)

        try:
            session.complete(update)
        except Killed:
            self.group.abandon("killed")
            raise

    def leave_together(self, wishes: StepFlag = StepFlag.NOTHING) -> None:
        with pytest.raises(GroupEnded):
            self.session.plan_step([], wishes)

    def save(self) -> None:
        shards = self.session.collect()
        if self.session.rank == 0:
            self.writer.save(self.session.ledger, shards, is_last=True)


Members = list[TrainingMember]


@contextmanager
def training_members(
    framework: Make, minibatches: Make, digits: list[bytes], count: int, place: Path, is_sharded: bool, **options: Any
) -> Iterator[tuple[GroupMaster, Members]]:
    master = GroupMaster()
    computation = Computation(shards_optimizer=is_sharded, **options.pop("computation", {}))
    made = []
    for number in range(count):
        one = framework("torch_conv.custom_model", {"dropout": 0.0}, computation=computation, **options)
        made.append(TrainingMember(master, number, one, minibatches(one, digits), str(place)))
    try:
        yield master, made
    finally:
        master.end()
        for member in made:
            member.close()
        master.stop()


def all_do(members: Members, verb: Callable[..., Any], *arguments: Any) -> None:
    for one in [member.does(verb, *arguments) for member in members]:
        one.result(ANSWER_S)


def enter(master: GroupMaster, members: Members, *sources: int) -> None:
    begun = [member.does(lambda member: member.session.enter()) for member in members]
    ids = [member.link.worker_id for member in members]
    master.await_outside(*ids)
    master.plan(*ids, sources=sources)
    assert [one.result(ANSWER_S) for one in begun] == [True] * len(members)


def steps(members: Members, first: int, last: int) -> None:
    for number in range(first, last):
        all_do(members, TrainingMember.step, number)


def step_with_a_kill(members: Members, number: int, victim: TrainingMember) -> None:
    """One member is killed between the sums and its update; the others lose their group at this step or the next."""
    updating, num_others = Semaphore(0), len(members) - 1
    begun = {m: m.does(TrainingMember.step, number, updating, num_others if m is victim else 0) for m in members}
    for member, one in begun.items():
        if member is victim:
            with pytest.raises(Killed):
                one.result(ANSWER_S)
        elif one.exception(ANSWER_S) is None:
            member.does(TrainingMember.leave_together).result(ANSWER_S)
        else:
            assert isinstance(one.exception(), GroupEnded)


def life(master: GroupMaster, members: Members) -> State:
    """Three members; one joins; one leaves; one is killed in a step; that which has left comes back; a checkpoint."""
    zero, one, two, three = members
    enter(master, [zero, one, two])
    steps([zero, one, two], 0, 3)
    all_do([zero, one, two], lambda member: member.session.leave())
    enter(master, members, 0, 1, 2)
    steps(members, 3, 6)
    begun = [m.does(TrainingMember.leave_together, StepFlag.LEAVING * (m is one)) for m in members]
    for each in begun:
        each.result(ANSWER_S)
    enter(master, [zero, two, three], 0, 2, 3)
    steps([zero, two, three], 6, 8)
    step_with_a_kill([zero, two, three], 8, victim=two)
    enter(master, [zero, three], 0, 3)
    assert zero.session.ledger.steps == 9
    steps([zero, three], 9, 11)
    all_do([zero, three], lambda member: member.session.leave())
    enter(master, [zero, three, one], 0, 3)
    steps([zero, three, one], 11, 13)
    all_do([zero, three, one], TrainingMember.save)
    digests = {member.session.digest() for member in (zero, three, one)}
    assert len(digests) == 1
    newest = zero.model._checkpoints.newest()
    assert newest is not None
    return newest.arrays


@pytest.mark.parametrize("optimizer", [SGD, ADAM, ADAGRAD])
def test_a_life_with_a_join_a_leave_and_a_kill_makes_the_same_bits_as_without_shards(
    optimizer: str, framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    states = {}
    for is_sharded in (True, False):
        with training_members(
            framework, minibatches, digits, 4, tmp_path / str(is_sharded), is_sharded, optimizer=optimizer
        ) as (master, members):
            states[is_sharded] = life(master, members)
    assert states[True].keys() == states[False].keys()
    assert any(name.startswith("optimizer/") for name in states[True])
    for name, array in states[False].items():
        np.testing.assert_array_equal(states[True][name], array, err_msg=name)
    plain = framework("torch_conv.custom_model", {"dropout": 0.0}, optimizer=optimizer)
    plain.load_state(states[True])  # and a job without shards continues from it
    for name, array in plain.state().items():
        np.testing.assert_array_equal(array, states[False][name], err_msg=name)


def test_members_hold_two_shares_of_the_state_and_one_takes_all_when_it_is_alone(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    with training_members(framework, minibatches, digits, 4, tmp_path, True) as (master, members):
        sizes = members[0].framework.shard_sizes()
        enter(master, members)
        steps(members, 0, 2)
        for member in members:
            session = member.session
            assert isinstance(session, ShardedSession)
            held = sum(sizes[number] for number in session._held)
            assert member.framework.shard_bytes() == 4 * held < 4 * sum(sizes)
            assert not session.holds_all
        begun = [m.does(TrainingMember.leave_together, StepFlag.LEAVING * (m is not members[0])) for m in members]
        for one in begun:
            one.result(ANSWER_S)
        enter(master, members[:1], 0)
        assert members[0].framework.shard_bytes() == 4 * sum(sizes)
        assert members[0].session.holds_all


def test_when_both_holders_of_a_shard_are_gone_training_continues_from_the_checkpoint(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training_members(framework, minibatches, digits, 3, tmp_path, True, optimizer=ADAM) as (master, members):
        enter(master, members)
        steps(members, 0, 2)
        all_do(members, TrainingMember.save)
        saved = members[0].model._checkpoints.newest()
        assert saved is not None
        steps(members, 2, 4)
        all_do(members, lambda member: member.session.leave())
        caplog.set_level("INFO")
        enter(master, members[2:], 0, 1, 2)
        survivor = members[2]
        assert survivor.session.ledger.steps == 2
        assert f"are gone: training continues from {saved.directory}" in caplog.text
        for name, array in survivor.framework.state().items():
            np.testing.assert_array_equal(array, saved.arrays[name], err_msg=name)
        assert survivor.framework.state().keys() == saved.arrays.keys()
        assert master.hears("GroupFormed", 2)[-1].restored_from == str(saved.directory)


def test_without_a_checkpoint_the_start_has_no_shard_of_the_model_that_is_given_up(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    with training_members(framework, minibatches, digits, 4, tmp_path, True, optimizer=ADAM) as (master, members):
        initial = members[0].framework.state()
        enter(master, members)
        steps(members, 0, 2)
        all_do(members, lambda member: member.session.leave())
        survivors = [members[0], members[3]]  # 1 and 2 hold the kernel of the convolution
        enter(master, survivors, 0, 3)
        for member in survivors:
            state = member.framework.state()
            assert state.keys() == initial.keys()
            for name, array in initial.items():
                np.testing.assert_array_equal(state[name], array, err_msg=name)


def test_state_that_an_optimizer_makes_when_it_is_constructed_is_there_for_owned_parameters_alone(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    with training_members(framework, minibatches, digits, 4, tmp_path, True, optimizer=ADAGRAD) as (master, members):
        plain = framework("torch_conv.custom_model", {"dropout": 0.0}, optimizer=ADAGRAD).state()
        assert not any(name.startswith("optimizer/") for name in members[0].framework.state())
        enter(master, members)
        for member in members:
            state = member.framework.state()
            slots = [name for name in state if name.startswith("optimizer/")]
            assert 0 < len(slots) < sum(name.startswith("optimizer/") for name in plain)
            for name in slots:
                np.testing.assert_array_equal(state[name], plain[name], err_msg=name)


def test_members_with_shards_continue_from_a_checkpoint_of_one_without(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    states = {}
    for is_sharded in (True, False):
        place = tmp_path / str(is_sharded)
        with training_members(framework, minibatches, digits, 1, place, False, optimizer=ADAM) as (master, alone):
            enter(master, alone)
            steps(alone, 0, 3)
            all_do(alone, TrainingMember.save)
        with training_members(framework, minibatches, digits, 3, place, is_sharded, optimizer=ADAM) as (
            master,
            members,
        ):
            enter(master, members)
            assert [member.session.ledger.steps for member in members] == [3, 3, 3]
            steps(members, 3, 5)
            all_do(members, TrainingMember.save)
            newest = members[0].model._checkpoints.newest()
            assert newest is not None
            states[is_sharded] = newest.arrays
    assert states[True].keys() == states[False].keys()
    for name, array in states[False].items():
        np.testing.assert_array_equal(states[True][name], array, err_msg=name)


def test_two_that_leave_together_take_no_shard_with_them(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four members two hold the same shard; only one of them says that it leaves, before both have gone."""
    with training_members(framework, minibatches, digits, 4, tmp_path, True, optimizer=ADAM) as (master, members):
        enter(master, members)
        steps(members, 0, 3)
        begun = [m.does(TrainingMember.leave_together, StepFlag.LEAVING * (m is members[2])) for m in members]
        for one in begun:
            one.result(ANSWER_S)
        before = members[0].framework.shared_state()
        caplog.set_level("INFO")
        enter(master, [members[0], members[3]], 0, 3)
        assert members[0].session.ledger.steps == 3
        steps([members[0], members[3]], 3, 4)
        assert members[0].session.digest() == members[3].session.digest()
        slots = [name for name in members[0].framework.state() if name.startswith("optimizer/")]
        assert len(slots) == 3 * len(members[0].framework.shard_sizes())
        assert "are gone" not in caplog.text
        assert before.keys() == members[0].framework.shared_state().keys()


def test_one_that_takes_shards_over_may_be_the_next_to_leave(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four members two leave, and the oldest of the others, which has their shards, goes before the next group."""
    with training_members(framework, minibatches, digits, 4, tmp_path, True, optimizer=ADAM) as (master, members):
        enter(master, members)
        steps(members, 0, 2)
        begun = [m.does(TrainingMember.leave_together, StepFlag.LEAVING * (m in members[1:3])) for m in members]
        for one in begun:
            one.result(ANSWER_S)
        enter(master, members[3:], 3)
        assert members[3].session.ledger.steps == 2
        slots = [name for name in members[3].framework.state() if name.startswith("optimizer/")]
        assert len(slots) == 3 * len(members[3].framework.shard_sizes())
        assert "are gone" not in caplog.text


def test_one_that_leaves_hands_over_what_it_holds_and_no_more(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    with training_members(framework, minibatches, digits, 4, tmp_path, True, optimizer=ADAM) as (master, members):
        enter(master, members)
        steps(members, 0, 1)
        sessions: list[Any] = [member.session for member in members]
        held = [session._held for session in sessions]
        begun = [m.does(TrainingMember.leave_together, StepFlag.LEAVING * (m is members[2])) for m in members]
        for one in begun:
            one.result(ANSWER_S)
        spare = [frozenset(session._spare) for session in sessions]
        assert spare == [held[2] - held[0], frozenset(), frozenset(), held[2] - held[3]]
        assert all(array.size for one in sessions[0]._spare.values() for array in one.values())


def test_the_log_has_the_size_of_the_state_that_the_first_step_has_made(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with training_members(framework, minibatches, digits, 3, tmp_path, True, optimizer=ADAM) as (master, members):
        caplog.set_level("INFO")
        enter(master, members)
        steps(members, 0, 2)
        lines = [record.args for record in caplog.records if str(record.msg).startswith("Optimizer state: ")]
        assert len(lines) == 3
        assert all(isinstance(args, tuple) and args[-1] > 0 for args in lines)


def test_a_step_that_one_survivor_has_made_is_made_by_the_others_when_they_meet_again(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member sees its group break after all have the sums, before it has updated its part."""
    with training_members(framework, minibatches, digits, 3, tmp_path / "a", False, optimizer=ADAM) as (master, plain):
        enter(master, plain)
        steps(plain, 0, 4)
        wanted = plain[0].framework.state()
    with training_members(framework, minibatches, digits, 3, tmp_path / "b", True, optimizer=ADAM) as (master, members):
        enter(master, members)
        steps(members, 0, 2)
        gather, calls, updating = members[1].group.gather, count(), Semaphore(0)

        def gather_and_break(values: Any) -> Any:
            found = gather(values)
            if next(calls) == 1:  # after the header
                updating.acquire()
                updating.acquire()
                raise GroupLost("the test breaks the group")
            return found

        monkeypatch.setattr(members[1].group, "gather", gather_and_break)
        begun = [member.does(TrainingMember.step, 2, updating) for member in members]
        for one in begun:
            assert isinstance(one.exception(ANSWER_S), GroupEnded)
        assert [member.session.ledger.steps for member in members] == [3, 2, 3]
        enter(master, members, 0, 1, 2)
        assert [member.session.ledger.steps for member in members] == [3, 3, 3]
        steps(members, 3, 4)
        all_do(members, TrainingMember.save)
        newest = members[0].model._checkpoints.newest()
        assert newest is not None
        for name, array in wanted.items():
            np.testing.assert_array_equal(newest.arrays[name], array, err_msg=name)


def test_members_that_a_newer_group_lacks_hand_their_shards_over_before_it(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    """As when a job is scaled down: the master plans without them, and they live."""
    with training_members(framework, minibatches, digits, 4, tmp_path, True, optimizer=ADAM) as (master, members):
        enter(master, members)
        steps(members, 0, 2)
        master.plan(0, 3, sources=[0, 3])
        begun = [member.does(leave_when_planned) for member in members]
        for one in begun:
            one.result(ANSWER_S)
        survivors = [members[0], members[3]]
        begun = [member.does(lambda member: member.session.enter()) for member in survivors]
        assert [one.result(ANSWER_S) for one in begun] == [True, True]
        assert [member.session.ledger.steps for member in survivors] == [2, 2]
        steps(survivors, 2, 3)
        for member in survivors:
            assert len([name for name in member.framework.state() if name.startswith("optimizer/")]) == 3 * 6


def test_loss_scale_clipping_parts_and_schedules_are_those_of_members_without_shards(
    framework: Make, minibatches: Make, digits: Any, tmp_path: Path
) -> None:
    """And the optimizer holds two groups of parameters, and some parameters in none."""
    options = {"precision": Precision.FP16, "clip_gradient_norm": 0.1, "part_size": 4}
    symbols = {"optimizer": "scheduled.optimizer", "lr_scheduler": "scheduled.lr_scheduler"}
    states = {}
    for is_sharded in (True, False):
        with training_members(
            framework, minibatches, digits, 3, tmp_path / str(is_sharded), is_sharded, computation=options, **symbols
        ) as (master, members):
            enter(master, members)
            steps(members, 0, 3)
            all_do(members, TrainingMember.save)
            newest = members[0].model._checkpoints.newest()
            assert newest is not None
            states[is_sharded] = newest.arrays
    assert "loss_scale/steps" in states[True]
    for name, array in states[False].items():
        np.testing.assert_array_equal(states[True][name], array, err_msg=name)


@pytest.mark.full  # 9 s of CPU time: three processes that import PyTorch
def test_the_benchmark_measures_what_members_hold() -> None:
    figures = sharded_optimizer.measure([3], width=64, device="cpu", num_turns=2)
    assert figures["members_3_state_share_of_whole"] == pytest.approx(2 / 3, abs=0.02)
    assert figures["members_3_steps_per_second_ratio_to_whole"] > 0


class OwnAdam(torch.optim.Adam):
    """Not PyTorch's."""


def test_optimizers_that_are_not_known_to_treat_each_parameter_by_itself_are_refused(framework: Make) -> None:
    tested = framework("torch_conv.custom_model", computation=Computation(shards_optimizer=True))
    tested._definition = tested._definition.__class__(
        **{
            **{name: getattr(tested._definition, name) for name in tested._definition.__dataclass_fields__},
            "optimizer": lambda model: OwnAdam(model.parameters()),
        }
    )
    with pytest.raises(ModelDefinitionError, match="OwnAdam, which is none of"):
        tested.report()


def test_parameters_wider_than_what_is_sent_are_refused(framework: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = framework("torch_conv.custom_model", computation=Computation(shards_optimizer=True))
    tested._built().module.double()
    with pytest.raises(ModelDefinitionError, match=r"sends parameters in float32, and conv\.weight is float64"):
        tested.report()
