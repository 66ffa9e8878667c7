"""PyTorch model definitions, the errors for unusable ones, metrics, and the export."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elasticdl.data.reader import Metadata
from elasticdl.frameworks.devices import num_processors
from elasticdl.frameworks.framework import Batch, MetricState, Mode
from elasticdl.frameworks.torch import TorchFramework
from elasticdl.model_def import load
from elasticdl_client.errors import ModelDefinitionError

Make = Callable[..., Any]


def module_of(tmp_path: Path, text: str) -> Path:
    """A zoo with one module that is torch_conv.py but for what the text says."""
    plain = (Path(__file__).parent / "zoo" / "torch_conv.py").read_text()
    (tmp_path / "own_zoo").mkdir()
    (tmp_path / "own_zoo" / f"own_{tmp_path.name}.py").write_text(plain + "\n" + text)
    return tmp_path / "own_zoo"


def made(framework: Make, tmp_path: Path, text: str, **params: Any) -> Any:
    return framework(f"own_{tmp_path.name}.custom_model", zoo=module_of(tmp_path, text), **params)


def test_the_report_names_what_the_module_defines(framework: Make) -> None:
    report = framework(optimizer="adam").report()
    by_name = {variable.name: variable for variable in report.variables}
    assert by_name["conv.weight"].shape == (4, 1, 3, 3)
    assert by_name["conv.weight"].trainable
    assert not by_name["norm.running_mean"].trainable
    assert report.tables == ()
    assert report.metrics == ("accuracy", "loss", "recall")
    assert json.loads(report.optimizer)["class_name"] == "Adam"
    assert not report.has_callbacks


def test_initial_values_depend_on_the_seed_alone(framework: Make) -> None:
    first, second, other = framework(seed=1).initial(), framework(seed=1).initial(), framework(seed=2).initial()
    np.testing.assert_array_equal(first.trainable, second.trainable)
    assert not np.array_equal(first.trainable, other.trainable)
    tested = framework(seed=2)
    tested._built().assign(first)
    np.testing.assert_array_equal(tested.initial().trainable, first.trainable)


def test_parameter_servers_are_refused() -> None:
    definition = load(str(Path(__file__).parent / "zoo"), "torch_conv.custom_model")
    with pytest.raises(ModelDefinitionError, match=r"written for PyTorch[\s\S]*AllReduceStrategy, or Local"):
        TorchFramework(definition, 8, 0, Metadata(), on_parameter_server=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def custom_model(): return 5", "returned a int, not a torch.nn.Module"),
        ("def custom_model(): raise KeyError('x')", "raised KeyError"),
        ("def custom_model(): return nn.LazyLinear(3)", "weight has no shape yet"),
        ("def optimizer(): return 5", "takes no argument"),
        ("def optimizer(model): return 5", "returned a int"),
        ("def optimizer(model): return 'adam'", "returned a str"),
        ("optimizer = 'adam'", "optimizer is 'adam': names and configs are taken for Keras models alone"),
        ("loss = 'mse'", "loss is 'mse': names and configs are taken for Keras models alone"),
        ("def eval_metrics_fn(): return {'a': 'accuracy'}", "gives 'a' a str"),
        (
            "class Lit(Net):\n    training_step = configure_optimizers = len\ndef custom_model(): return Lit()",
            "returned a Lit with training_step, configure_optimizers, which no worker calls",
        ),
        ("def optimizer(params): return torch.optim.LBFGS(params)", "LBFGS"),
        (
            "def optimizer(model): return torch.optim.SGD(Net().parameters(), lr=1.0)",
            "parameters that are not the model",
        ),
        ("def eval_metrics_fn(): return [accuracy]", "returned a list, not a dictionary"),
        ("def eval_metrics_fn(): return {'a': 5}", "gives 'a' a int"),
        (
            "class Half:\n    def update(self, a, b): pass\ndef eval_metrics_fn(): return {'h': Half()}",
            "has no compute",
        ),
        ("def callbacks(): return 5", "returned a int"),
        ("class C:\n    def on_batch_end(self): pass\ndef callbacks(): return [C()]", "C has on_batch_end, which no"),
        ("def lr_scheduler(optimizer): return 5", "returned a int"),
        (
            "def lr_scheduler(optimizer): return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
            "ReduceLROnPlateau, whose rates depend on a metric",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(framework: Make, tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ModelDefinitionError, match=complaint):
        made(framework, tmp_path, text).report()


def test_a_learning_rate_that_is_no_number_is_refused_by_name(framework: Make, tmp_path: Path) -> None:
    schedule = "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else float('nan'))"
    tested = made(framework, tmp_path, f"def lr_scheduler(optimizer): return {schedule}")
    assert tested.learning_rate(0, 1) > 0
    with pytest.raises(ModelDefinitionError, match="lr_scheduler gives the rate nan at step 2"):
        tested.learning_rate(0, 2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("def loss(labels, predictions): return 5.0", "loss.* returned a int|loss.* returned a float"),
        (
            "plain = feed\ndef feed(*given):\n    x, labels = plain(*given)\n    return x, labels, labels * 1.0",
            "loss.* returned one number for the whole minibatch",
        ),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_at_the_first_step(
    framework: Make, tmp_path: Path, digits: Any, minibatches: Make, text: str, complaint: str
) -> None:
    tested = made(framework, tmp_path, text)
    with pytest.raises(ModelDefinitionError, match=complaint):
        tested.train(minibatches(tested, digits)[0], 1)


@pytest.mark.parametrize(
    "text",
    [
        "loss = functional.cross_entropy",
        "loss = nn.CrossEntropyLoss()",
        "def loss(predictions, labels): return functional.cross_entropy(predictions, labels)",
        "def loss(labels, predictions): return functional.cross_entropy(predictions, labels, reduction='none')",
    ],
)
def test_losses_of_pytorch_get_their_arguments_in_pytorchs_order(
    framework: Make, tmp_path: Path, digits: Any, minibatches: Make, text: str
) -> None:
    tested, plain = made(framework, tmp_path, text), framework()
    batch = minibatches(plain, digits)[0]
    assert tested.train(batch, 1) == pytest.approx(plain.train(batch, 1), abs=1e-6)


def test_weights_of_samples_weigh_their_losses(framework: Make, tmp_path: Path, digits: Any, minibatches: Make) -> None:
    text = """
    def loss(labels, predictions): return functional.cross_entropy(predictions, labels, reduction="none")
    plain = feed
    def feed(records, mode, metadata):
        images, labels = plain(records, mode, metadata)
        return images, labels, torch.arange(len(labels)) % 2
    """
    tested = made(framework, tmp_path, "\n".join(line[4:] for line in text.splitlines()), params={"dropout": 0.0})
    batch = minibatches(tested, digits)[0]
    tested._built().module.train()
    with torch.no_grad():
        losses = tested._definition.loss(batch.data.labels, tested._built().module(batch.data.features))
    assert tested.train(batch, 1) == pytest.approx(float(losses[1::2].sum() / 8), abs=1e-6)


def added(parts: list[list[MetricState]]) -> list[MetricState]:
    """As the master adds the states of tasks up."""
    return [
        MetricState(same[0].name, tuple(sum(arrays) for arrays in zip(*(s.arrays for s in same), strict=True)))
        for same in zip(*parts, strict=True)
    ]


def evaluated(tested: Any, batches: list[Batch]) -> list[MetricState]:
    evaluation = tested.evaluation()
    for batch in batches:
        evaluation.update(batch, None, {})
    return list(evaluation.states())


def test_metrics_of_two_workers_are_those_of_one_process(framework: Make, digits: Any, minibatches: Make) -> None:
    tested = framework()
    batches = minibatches(tested, digits[:77], Mode.EVALUATION)
    merged = added([evaluated(tested, batches[:3]), evaluated(tested, batches[3:]), evaluated(tested, [])])
    results = tested.evaluation().results(merged)
    images = torch.cat([batch.data.features for batch in batches])
    labels = torch.cat([batch.data.labels for batch in batches])
    module = tested._built().module.eval()
    with torch.no_grad():
        logits = module(images)
        expected = {
            "accuracy": float((logits.argmax(1) == labels).float().mean()),
            "loss": float(torch.nn.functional.cross_entropy(logits, labels)),
            "recall": float((logits[labels == 3].argmax(1) == 3).float().mean()),
        }
    assert results == pytest.approx(expected, abs=1e-5)


def test_a_metric_may_merge_states_itself(framework: Make, tmp_path: Path, digits: Any, minibatches: Make) -> None:
    text = """
class Largest:
    largest = -1.0
    def update(self, labels, predictions): self.largest = max(self.largest, float(predictions.max()))
    def compute(self): return {"logit": self.largest}
    def state_dict(self): return {"largest": self.largest}
    def load_state_dict(self, state): self.largest = state["largest"]
    def merge_state(self, states): self.largest = max(state["largest"] for state in states)

def eval_metrics_fn(): return {"largest": Largest()}
"""
    tested = made(framework, tmp_path, text)
    batches = minibatches(tested, digits, Mode.EVALUATION)
    first, second = evaluated(tested, batches[:2])[0], evaluated(tested, batches[2:])[0]
    assert not first.additive
    both = MetricState("largest", (*first.arrays, *second.arrays), additive=False, num_states=2)
    expected = max(float(tested.predictions(batch, None).max()) for batch in batches)
    assert tested.evaluation().results([both]) == pytest.approx({"largest_logit": expected})


def test_a_metric_whose_state_does_not_add_up_is_refused_by_name(
    framework: Make, tmp_path: Path, digits: Any, minibatches: Make
) -> None:
    text = """
class Mean:
    mean, count = 0.0, 0.0
    def update(self, labels, predictions):
        total = self.mean * self.count + float(predictions.sum())
        self.count += len(labels)
        self.mean = total / self.count
    def compute(self): return self.mean
    def state_dict(self): return {"mean": self.mean, "count": self.count}
    def load_state_dict(self, state): self.mean, self.count = state["mean"], state["count"]

def eval_metrics_fn(): return {"logit": Mean()}
"""
    tested = made(framework, tmp_path, text)
    for _ in range(2):  # a task is tried again
        with pytest.raises(ModelDefinitionError, match=r"'logit' \(Mean\) of several tasks cannot be added") as caught:
            evaluated(tested, minibatches(tested, digits, Mode.EVALUATION)[:1])
        assert "merge_state" in caught.value.hint


TENSOR_STATES = """
class Summed:
    def __init__(self): self.total = torch.zeros((), device=HERE)
    def update(self, labels, predictions):
        assert predictions.device == labels.device == self.total.device, (predictions.device, self.total.device)
        self.total += predictions.sum()
    def compute(self): return self.total
    def state_dict(self): return {"total": self.total}
    def load_state_dict(self, state): self.total = state["total"]

class Movable(Summed):
    def to(self, device):
        assert device == THERE, device
        self.total = self.total.to(device)

class Metric(nn.Module):
    \"\"\"As torchmetrics has them: a module, whose states are no part of its state_dict() until asked for.\"\"\"
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), device=HERE), persistent=False)
    def persistent(self, mode=False): self._non_persistent_buffers_set.clear()
    def update(self, labels, predictions): self.total = self.total + predictions.sum()
    def compute(self): return self.total

def eval_metrics_fn(): return {"summed": Summed(), "movable": Movable(), "module": Metric()}
"""
CPU, GPU = "HERE, THERE = torch.device('cpu'), torch.device('cpu')", "HERE, THERE = 'cpu', torch.device('cuda:0')"


@pytest.mark.parametrize(
    "devices",
    [CPU, pytest.param(GPU, marks=pytest.mark.gpu)],
    ids=["cpu", "gpu"],
)
def test_metrics_whose_state_is_tensors_and_predictions_meet_on_one_device(
    framework: Make, tmp_path: Path, digits: Any, minibatches: Make, devices: str
) -> None:
    tested = made(framework, tmp_path, f"{devices}\n{TENSOR_STATES}")
    assert tested.report().metrics == ("summed", "movable", "module")
    batches = minibatches(tested, digits, Mode.EVALUATION)
    merged = added([evaluated(tested, batches[:4]), evaluated(tested, batches[4:])])
    expected = sum(float(tested.predictions(batch, None).sum()) for batch in batches)
    results = tested.evaluation().results(merged)
    assert results == pytest.approx(dict.fromkeys(["summed", "movable", "module"], expected), rel=1e-4)


WITHOUT_US = """
import sys
import torch
images = torch.load(sys.argv[2], weights_only=True)
program = torch.export.load(sys.argv[1] + "/model.pt2")
state = torch.load(sys.argv[1] + "/model.pt", weights_only=True)
torch.save((program.module()(images), state), sys.argv[3])
assert not [name for name in sys.modules if name.startswith("elasticdl")]
"""


def test_an_export_loads_without_the_users_code_and_gives_the_same(
    framework: Make, digits: Any, minibatches: Make, tmp_path: Path
) -> None:
    tested = framework()
    batches = minibatches(tested, digits)
    for batch in batches[:3]:
        tested.train(batch, batch.n)
    tested.export(str(tmp_path / "model"), None, [])
    expected = tested.predictions(batches[-1], None)
    torch.save(batches[-1].data.features[:5], tmp_path / "images.pt")
    argv = [sys.executable, "-c", WITHOUT_US, str(tmp_path / "model"), tmp_path / "images.pt", tmp_path / "out.pt"]
    printed = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert printed.returncode == 0, printed.stderr[-2000:]
    outputs, state = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(outputs, expected[:5].clone(), rtol=1e-5, atol=1e-6)
    fresh = tested._definition.model()
    fresh.load_state_dict(state)
    assert int(fresh.norm.num_batches_tracked) == 3


def test_a_model_that_no_program_can_hold_is_exported_as_values(
    framework: Make, digits: Any, minibatches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tested = made(
        framework,
        tmp_path,
        """
class Odd(Net):
    def forward(self, images):
        return super().forward(images) * (2 if float(images.sum()) > 0 else eval("1"))

def custom_model(): return Odd()
""",
    )
    tested.train(minibatches(tested, digits)[0], 1)
    tested.export(str(tmp_path / "model"), None, [])
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.pt"]
    assert "Only the model's values are exported" in caplog.text


def test_callbacks_are_called_with_the_model_and_the_output(framework: Make, tmp_path: Path) -> None:
    tested = made(
        framework,
        tmp_path,
        """
class Note:
    def on_train_end(self, model, output): self.seen = (type(model).__name__, model.training, output)

def callbacks(note=Note()): return [note]
""",
    )
    assert tested.report().has_callbacks
    tested.end_training(None, "/out")
    assert tested._definition.callbacks()[0].seen == ("Net", False, "/out")


def test_features_may_be_several_by_place_or_by_name(
    framework: Make, tmp_path: Path, digits: Any, minibatches: Make
) -> None:
    plain = framework()
    expected = plain.train(minibatches(plain, digits)[0], 1)
    for kind, features in (("tuple", "(images, images)"), ("named", "{'images': images, 'extra': images}")):
        (tmp_path / kind).mkdir()
        tested = made(
            framework,
            tmp_path / kind,
            f"""
class Two(Net):
    def forward(self, images, extra): return super().forward((images + extra) / 2)

def custom_model(): return Two()
plain = feed
def feed(records, mode, metadata):
    images, labels = plain(records, mode, metadata)
    return {features}, labels
""",
        )
        assert tested.train(minibatches(tested, digits)[0], 1) == pytest.approx(expected, abs=1e-6)


def test_a_compiled_module_has_the_names_of_the_plain_one(framework: Make, tmp_path: Path) -> None:
    tested = made(framework, tmp_path, "def custom_model(): return torch.compile(Net())")
    assert [v.name for v in tested.report().variables] == [v.name for v in framework().report().variables]


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, None),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "150000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 2),
        ("0::/elsewhere", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        (
            "3:cpu,cpuacct:/a",
            {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000"},
            1,
        ),
    ],
)
def test_threads_are_as_many_as_the_container_has_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], expected: int | None
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    for name, text in {"proc/self/cgroup": group, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert num_processors(tmp_path) == (expected or 64)
