"""Precision, memory layout, compilation, clipping and accumulation against plain loops of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from elasticdl.frameworks.framework import Batch, NotFiniteStep, Share
from elasticdl.frameworks.torch.computation import Computation, LossScale
from elasticdl.frameworks.torch.samples import TensorSamples
from elasticdl_client.choices import DistributionStrategy, Precision
from elasticdl_client.errors import ElasticDLError, ModelDefinitionError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.zoo_modules import check_framework
from tests.chaos.job import REPOSITORY
from tests.torch.test_torch_steps import largest_difference, nothing, plain, reduce, weights

Make = Callable[..., Any]
TRAIN = {"job_name": "j", "model_def": "a.b.c", "training_data": "d", "runtime": "local", "framework": "torch"}
ALL_REDUCE = {**TRAIN, "distribution_strategy": "AllReduceStrategy"}
NO_DROPOUT = {"dropout": 0.0}


def plain_step(
    module: Any, optimizer: Any, batch: Batch, seed: int, dtype: Any = None, part_size: int = 0, clip: float = 0.0
) -> float:
    """A step as PyTorch's documentation writes it; the loss."""
    module.train()
    optimizer.zero_grad()
    torch.manual_seed(seed)
    total = 0.0
    size = part_size or batch.size
    for features, labels in zip(batch.data.features.split(size), batch.data.labels.split(size), strict=True):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = module(features)
        loss = functional.cross_entropy(outputs.float(), labels) * (len(labels) / batch.size)
        loss.backward()
        total += loss.item()
    if clip:
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    return total


def all_reduce_step(tested: Any, batch: Batch, seed: int, is_alone: bool = False) -> float:
    """A step of one member, of a group or alone."""
    gradient = tested.local_gradient([Share(batch, seed, 1.0, is_alone)], nothing)
    assert gradient.repeat() is None
    tested.apply_gradient(gradient, None)
    return float(gradient.told()[0])


@pytest.mark.parametrize("step", ["train", "all_reduce", "alone"])
@pytest.mark.parametrize(
    ("computation", "as_plain"),
    [
        pytest.param({"precision": Precision.BF16}, {"dtype": torch.bfloat16}, id="bf16"),
        pytest.param({"part_size": 3}, {"part_size": 3}, id="accumulation"),
        pytest.param({"clip_gradient_norm": 0.05}, {"clip": 0.05}, id="clipping"),
        pytest.param(
            {"precision": Precision.BF16, "part_size": 3, "clip_gradient_norm": 0.05},
            {"dtype": torch.bfloat16, "part_size": 3, "clip": 0.05},
            id="together",
        ),
    ],
)
def test_a_step_is_that_of_a_plain_loop(
    framework: Make, digits: Any, minibatches: Make, step: str, computation: Any, as_plain: Any
) -> None:
    tested = framework(computation=Computation(**computation))
    module, optimizer = plain(tested)
    for batch in minibatches(tested, digits[:29])[-2:]:  # of 8 samples, and the last one of 5
        expected = plain_step(module, optimizer, batch, batch.n, **as_plain)
        if step == "train":
            loss = tested.train(batch, batch.n)
        else:
            loss = all_reduce_step(tested, batch, batch.n, is_alone=step == "alone")
        assert loss == pytest.approx(expected, abs=1e-6)
    assert largest_difference(tested, module) < (1e-6 if step == "all_reduce" else 1e-7)


def test_an_uneven_last_part_counts_by_its_samples(framework: Make, digits: Any, minibatches: Make) -> None:
    whole = framework("plain.custom_model")
    batch = minibatches(whole, digits)[0]
    parts = framework("plain.custom_model", computation=Computation(part_size=3))
    assert [len(part.labels) for _, part in batch.data.parts(8, 3)] == [3, 3, 2]
    assert parts.train(batch, 1) == pytest.approx(whole.train(batch, 1), abs=1e-6)
    for name, value in weights(whole).items():
        np.testing.assert_allclose(weights(parts)[name], value, atol=1e-7)


def test_parts_keep_samples_together_whatever_they_are_made_of() -> None:
    texts = ["a", "b", "c"]
    samples = TensorSamples({"x": torch.arange(3), "text": texts, "pair": (torch.ones(3, 2), None)}, torch.arange(3))
    (first, one), (second, two) = samples.parts(3, 2)
    assert (first, second) == (2 / 3, 1 / 3)
    assert (one.features["text"], two.features["text"]) == (["a", "b"], ["c"])
    assert two.features["pair"][0].shape == (1, 2)
    assert two.labels.tolist() == [2]
    with pytest.raises(ModelDefinitionError, match=r"of shape \[2, 3\]"):
        TensorSamples(torch.ones(2, 3), torch.arange(3)).parts(3, 2)


def test_a_layout_with_channels_last_changes_no_value(framework: Make, digits: Any, minibatches: Make) -> None:
    usual = framework(params={"channels": 3, **NO_DROPOUT})
    tested = framework(params={"channels": 3, **NO_DROPOUT}, computation=Computation(channels_last=True))
    batch = minibatches(usual, digits)[0]
    seen: list[Any] = []
    kernel = tested._built().parameters["conv.weight"]
    tested._optimizer().register_step_pre_hook(lambda *_: seen.append(kernel.grad.stride()))
    for each in (usual, tested):
        all_reduce_step(each, batch, 1)
        all_reduce_step(each, batch, 2)
    assert kernel.stride() == (27, 1, 9, 3)
    assert seen == [kernel.stride()] * 2  # the buffers of gradients lie as the parameters do
    for name, value in usual.state().items():
        other = tested.state()[name]
        assert other.flags.c_contiguous
        np.testing.assert_allclose(other, value, atol=1e-6)
    with pytest.raises(ModelDefinitionError, match="without a convolution"):
        framework("plain.custom_model", computation=Computation(channels_last=True)).report()


def fp16(framework: Make, seed: int = 3, **computation: Any) -> Any:
    return framework(loss="flaws.loss_steep", seed=seed, computation=Computation(Precision.FP16, **computation))


@pytest.mark.parametrize("step", ["train", "all_reduce", "alone"])
def test_a_gradient_that_overflows_is_computed_again_at_half_the_scale(
    framework: Make, digits: Any, minibatches: Make, step: str
) -> None:
    usual, tested = framework(loss="flaws.loss_steep"), fp16(framework)
    batch = minibatches(usual, digits)[0]
    batch.data.labels[:] = 99  # steep
    repeats = 0
    if step == "train":
        usual.train(batch, 1)
        tested.train(batch, 1)
    else:
        all_reduce_step(usual, batch, 1)
        compute = tested.local_gradient
        while compute is not None:
            gradient = compute([Share(batch, 1, 1.0, step == "alone")], nothing)
            assert gradient.told()[2] == 0
            assert not gradient.not_finite
            compute = gradient.repeat()
            repeats += compute is not None
        tested.apply_gradient(gradient, None)
        assert repeats > 3
    scale = tested.state()["loss_scale/scale"]
    assert 1 < scale < 65536 / 8
    for name, value in weights(usual).items():
        np.testing.assert_allclose(weights(tested)[name], value, rtol=0.02, atol=0.05)
    assert weights(tested)["norm.num_batches_tracked"] == 1


def test_a_sparse_gradient_is_trained_in_16_bits(framework: Make, digits: Any, minibatches: Make) -> None:
    usual = framework("sparse.custom_model", optimizer="sgd")
    tested = framework("sparse.custom_model", optimizer="sgd", computation=Computation(Precision.FP16))
    first, second, *_ = minibatches(usual, digits)
    assert tested.train(first, 1) == pytest.approx(usual.train(first, 1), rel=0.02)
    next(tested._built().module.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NotFiniteStep, match="The gradient is not finite"):
        tested.train(second, 2)


def test_members_repeat_a_step_together_and_keep_one_scale(framework: Make, digits: Any, minibatches: Make) -> None:
    members = [fp16(framework), fp16(framework)]
    steep, flat = minibatches(members[0], digits)[:2]
    steep.data.labels[:] = 99
    computes: list[Any] = [member.local_gradient for member in members]
    while computes[0] is not None:
        gradients = [
            compute([Share(batch, 1, 0.5)], nothing) for compute, batch in zip(computes, (steep, flat), strict=True)
        ]
        reduce(gradients)
        computes = [gradient.repeat() for gradient in gradients]
        assert (computes[0] is None) == (computes[1] is None)
    for member, gradient in zip(members, gradients, strict=True):
        member.apply_gradient(gradient, None)
    one, two = (member.state() for member in members)
    assert one["loss_scale/scale"] < 65536
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name])


def test_a_step_that_is_dropped_leaves_the_scale_as_it_was(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = fp16(framework)
    steep = minibatches(tested, digits)[0]
    steep.data.labels[:] = 99
    again = tested.local_gradient([Share(steep, 1, 1.0)], nothing).repeat()
    again([Share(steep, 1, 1.0)], nothing)  # and the group breaks here
    assert tested.state()["loss_scale/scale"] == 65536


def test_the_scale_is_part_of_a_restored_state(framework: Make, digits: Any, minibatches: Make) -> None:
    straight = fp16(framework, clip_gradient_norm=1.0)
    batches = minibatches(straight, digits)
    batches[1].data.labels[:] = 99
    for batch in batches[:3]:
        straight.train(batch, batch.n)
    assert straight.state()["loss_scale/scale"] < 65536
    restored = fp16(framework, seed=99, clip_gradient_norm=1.0)
    restored.load_state(straight.state())
    assert [restored.train(b, b.n) for b in batches[3:]] == [straight.train(b, b.n) for b in batches[3:]]
    for name, value in straight.state().items():
        np.testing.assert_array_equal(value, restored.state()[name])
    framework(loss="flaws.loss_steep").load_state(straight.state())  # a job in float32 has no use of it


def test_the_scale_grows_after_two_thousand_steps_and_has_a_least_value() -> None:
    scale = LossScale(is_dynamic=True)
    scale.count_step(3)
    assert scale.at(0) == 8192
    for _ in range(1999):
        scale.count_step(0)
    assert scale.at(0) == 8192
    scale.count_step(0)
    assert scale.at(0) == 16384
    assert scale.at(40) == 1.0
    assert not scale.may_overflow(14)
    assert scale.may_overflow(13)


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize(
    ("loss", "flaw"),
    [("flaws.loss_inf", "The loss is inf"), ("flaws.loss_with_a_bad_gradient", "The gradient is not finite")],
)
def test_what_no_scale_makes_finite_is_named(
    framework: Make, digits: Any, minibatches: Make, loss: str, flaw: str, is_alone: bool
) -> None:
    tested = framework("plain.custom_model", loss=loss, computation=Computation(Precision.FP16))
    ill = minibatches(tested, digits)[0]
    ill.data.labels[:] = 99
    compute = tested.local_gradient
    while compute is not None:
        gradient = compute([Share(ill, 1, 1.0, is_alone)], nothing)
        compute = gradient.repeat()
    assert gradient.told()[2] == 1
    assert "not finite" in gradient.not_finite[0]
    with pytest.raises(NotFiniteStep, match=flaw):
        tested.train(ill, 1)


@pytest.mark.full  # TorchInductor compiles C++: 28 s of CPU time
def test_a_compiled_model_trains_as_the_plain_one(framework: Make, digits: Any, minibatches: Make) -> None:
    usual = framework(params=NO_DROPOUT)
    tested = framework(params=NO_DROPOUT, computation=Computation(is_compiled=True))
    assert set(tested.state()) == set(usual.state())
    for batch in minibatches(usual, digits[:20]):
        assert all_reduce_step(tested, batch, batch.n) == pytest.approx(
            all_reduce_step(usual, batch, batch.n), abs=1e-5
        )
    for name, value in weights(usual).items():
        np.testing.assert_allclose(weights(tested)[name], value, atol=1e-5)


def test_without_a_compiler_the_flag_is_refused(
    framework: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ModelDefinitionError, match="needs a C\\+\\+ compiler"):
        framework(computation=Computation(is_compiled=True)).report()


def test_the_flags_say_what_is_computed() -> None:
    flags = {
        "precision": "fp16",
        "compile": True,
        "channels_last": True,
        "clip_gradient_norm": 1,
        "accumulate_steps": 4,
    }
    spec = JobSpec.from_flags("train", {**ALL_REDUCE, **flags})
    assert Computation.of(JobSpec.from_json(spec.to_json())) == Computation(Precision.FP16, True, True, 1.0, 16)
    assert Computation.of(JobSpec.from_flags("train", ALL_REDUCE)) == Computation()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"accumulate_steps": 5}, "does not divide --minibatch_size=64"),
        ({"precision": "fp16", "nan_policy": "skip"}, "--precision=fp16 with --nan_policy=skip"),
        ({"precision": "fp8"}, "fp8"),
        ({"input_workers": -1}, "input_workers"),
        ({"input_workers": 2, "strict_feed": True}, "--input_workers=2 with --strict_feed"),
        ({"model_def": "", "job_command": "python t.py", "input_workers": 2}, "--input_workers=2 is without effect"),
        ({"clip_gradient_norm": -1}, "clip_gradient_norm"),
        ({"model_def": "", "job_command": "python t.py", "precision": "bf16"}, "--precision is without effect"),
    ],
)
def test_flags_that_cannot_be_had_are_refused_by_the_client(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ElasticDLError, match=message):
        JobSpec.from_flags("train", {**ALL_REDUCE, **flags})


@pytest.mark.parametrize("strategy", list(DistributionStrategy))
def test_a_keras_model_has_none_of_them_but_the_precision(strategy: DistributionStrategy) -> None:
    zoo, model_def = str(REPOSITORY / "model_zoo"), "mnist.mnist_functional_api.custom_model"
    values: dict[str, Any] = {
        "precision": Precision.BF16,
        "compile": True,
        "channels_last": True,
        "clip_gradient_norm": 1.0,
        "accumulate_steps": 2,
        "input_workers": 2,
    }
    for name, value in values.items():
        spec = JobSpec(model_zoo=zoo, model_def=model_def, distribution_strategy=strategy, **{name: value})
        if name == "precision" and strategy is not DistributionStrategy.PARAMETER_SERVER:
            check_framework(spec)
            continue
        said = "parameter servers do not scale losses" if name == "precision" else f"--{name} is for PyTorch models"
        with pytest.raises(ElasticDLError, match=said):
            check_framework(spec)
