"""The models of the zoo as jobs: on which data, with which flags, how good each becomes.

The one table behind `make zoo`, the tests that train the zoo, and model_zoo/README.md.  Owns no process and no file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = Path(os.environ.get("ELASTICDL_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
README_DATA = "build/data"


@dataclass(frozen=True, slots=True)
class Data:
    """A data set of `scripts/gen_dataset.py`.

    Attributes:
        source: the folder of the original files below `SOURCES`; empty: it is generated.
        about: for the README.
    """

    name: str
    about: str
    source: str = ""

    def available(self) -> bool:
        return not self.source or (SOURCES / self.source).is_dir()

    def generator(self, output: str, sources: str = "SOURCES") -> list[str]:
        """The arguments of the command that makes it."""
        source = ["--source", f"{sources}/{self.source}"] if self.source else []
        return ["scripts/gen_dataset.py", self.name, *source, "--output", output]


DIGITS = Data("digits", "scikit-learn's digits of 8 × 8 pixels: 1,437 and 360")
MNIST = Data("mnist", "MNIST's test images: 9,000 and 1,000", "mnist")
CIFAR10 = Data("cifar10", "generated gratings in CIFAR-10's shape, or its python batches: 10,000 and 2,000")
IMAGENET = Data("imagenet", "generated patterns as image files, or ImageNet's folders: 1,600 and 400")
FRAPPE = Data("frappe", "the frappe app-usage log: 57,722 and 28,860", "frappe")
CENSUS = Data("census", "UCI's Adult: 32,561 and 16,281", "census")
CRITEO = Data("criteo", "a generated log in the columns of Criteo's, or Kaggle's file: 40,000 and 8,000")
CLICKS = Data("clicks", "a generated log of ten categories among a million ids: 100,000 and 10,000")
IRIS = Data("iris", "Fisher's iris: 120 and 30", "iris")
DATA = (DIGITS, MNIST, CIFAR10, IMAGENET, FRAPPE, CENSUS, CRITEO, CLICKS, IRIS)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo and the job that trains it.

    Attributes:
        module: below model_zoo.
        quality: (metric, least value of it).
        expected: the usual value of the metric, for the README; may be empty.
        flags: of the job, besides its name, its model and its data.
        script: arguments of the module as a script of its own, in the words of `command`; empty: a --model_def.
        rows: the file of `Data.source` that is read as it is; empty: the generator's output.
        every_change: it is so quick that every change trains it.
        estimator: it needs TensorFlow 2.15.
    """

    module: str
    data: Data
    quality: tuple[str, float]
    expected: str
    flags: dict[str, object] = field(default_factory=dict)
    script: str = ""
    rows: str = ""
    every_change: bool = False
    estimator: bool = False

    def available(self) -> bool:
        return self.data.available() and (not self.rows or (SOURCES / self.data.source).is_dir())

    def command(self, data: str = README_DATA, sources: str = "SOURCES", directory: str = "build") -> list[str]:
        """`elasticdl train …` as words.

        Args:
            data: the directory that holds the generated data sets.
            sources: that of the original files.
            directory: for what the job makes.
        """
        splits = (f"{data}/{self.data.name}/train", f"{data}/{self.data.name}/validation")
        if self.rows:
            splits = (f"{sources}/{self.data.source}/{self.rows}",) * 2
        flags: dict[str, object] = {"runtime": "local", "job_name": self.module.split(".")[-1].replace("_", "-")}
        if self.script:
            words = self.script.format(train=splits[0], validation=splits[1], directory=directory)
            flags["job_command"] = words
        else:
            flags |= {"model_zoo": "model_zoo", "model_def": f"{self.module}.custom_model"}
        flags |= {"training_data": splits[0], "validation_data": splits[1], **self.flags}
        return ["elasticdl", "train", *(f"--{name}={value}" for name, value in flags.items())]


ALL_REDUCE: dict[str, object] = {"distribution_strategy": "AllReduceStrategy"}
_CIFAR10 = ALL_REDUCE | {"minibatch_size": 32, "num_epochs": 2}
_MNIST: dict[str, object] = {"num_epochs": 3}
_FRAPPE: dict[str, object] = {"minibatch_size": 256, "num_minibatches_per_task": 16, "num_epochs": 5}
_CRITEO: dict[str, object] = {"minibatch_size": 256, "num_epochs": 4}
_ESTIMATOR: dict[str, object] = {"need_tf_config": "true"}

ENTRIES = (
    Entry("digits.digits_functional", DIGITS, ("accuracy", 0.95), "0.97", {"minibatch_size": 32, "num_epochs": 12}),
    Entry("mnist.mnist_functional_api", MNIST, ("accuracy", 0.95), "0.97", _MNIST),
    Entry("mnist.mnist_sequential", MNIST, ("accuracy", 0.95), "0.98", _MNIST),
    Entry("mnist.mnist_subclass", MNIST, ("accuracy", 0.95), "0.97", _MNIST),
    Entry("mnist.mnist_pytorch", MNIST, ("accuracy", 0.95), "0.98", ALL_REDUCE | _MNIST),
    Entry(
        "mnist.mnist_pytorch_script", MNIST, ("accuracy", 0.95), "0.96–0.97", ALL_REDUCE,
        script="python model_zoo/mnist/mnist_pytorch_script.py --training_data={train} --validation_data={validation}"
        " --num_epochs=3",
    ),
    Entry("cifar10.cifar10_functional_api", CIFAR10, ("accuracy", 0.8), "0.92", _CIFAR10),
    Entry("cifar10.cifar10_resnet20", CIFAR10, ("accuracy", 0.6), "0.91", _CIFAR10),
    Entry(
        "cifar10.cifar10_mobilenetv2", CIFAR10, ("accuracy", 0.4), "0.53",
        _CIFAR10 | {"model_params": "width=0.35"},
    ),
    Entry("cifar10.resnet20_pytorch", CIFAR10, ("accuracy", 0.6), "0.92", _CIFAR10),
    Entry(
        "imagenet.imagenet_resnet50", IMAGENET, ("accuracy", 0.4), "0.95",
        ALL_REDUCE | {"minibatch_size": 32, "num_epochs": 4, "model_params": "num_classes=8;image_size=64;width=0.5"},
    ),
    Entry("deepfm.deepfm_functional_api", FRAPPE, ("auc", 0.93), "0.939", _FRAPPE),
    Entry("deepfm.deepfm_edl_embedding", FRAPPE, ("auc", 0.93), "0.937", _FRAPPE),
    Entry("deepfm.deepfm_subclass", FRAPPE, ("auc", 0.93), "0.936", _FRAPPE),
    Entry("deepfm.deepfm_large", CLICKS, ("auc", 0.7), "0.73", {"minibatch_size": 256, "num_epochs": 2}),
    Entry(
        "census.census_wide_deep", CENSUS, ("auc", 0.90), "0.918", {"minibatch_size": 128, "num_epochs": 4},
        every_change=True,
    ),
    Entry("census.census_dnn", CENSUS, ("auc", 0.90), "0.918", {"minibatch_size": 128, "num_epochs": 4}),
    Entry("criteo.wide_deep", CRITEO, ("auc", 0.8), "0.83", _CRITEO),
    Entry("criteo.deepfm", CRITEO, ("auc", 0.8), "0.83", _CRITEO),
    Entry("criteo.dcn", CRITEO, ("auc", 0.8), "0.83", _CRITEO),
    Entry("criteo.xdeepfm", CRITEO, ("auc", 0.8), "0.82–0.83", _CRITEO),
    Entry(
        "iris.iris_dnn", IRIS, ("accuracy", 0.9), "0.97–1",
        {"minibatch_size": 16, "num_minibatches_per_task": 2, "num_epochs": 20}, every_change=True,
    ),
    Entry(
        "iris.dnn_estimator", Data("iris", "", "iris"), ("accuracy", 0.95), "0.98", _ESTIMATOR,
        script="python -m model_zoo.iris.dnn_estimator --model_dir={directory}/iris", rows="iris.csv", estimator=True,
    ),
    Entry(
        "deepfm.deepfm_estimator", Data("criteo", "", "criteo"), ("auc", 0.9), "1 on the rows it learned", _ESTIMATOR,
        script="python -m model_zoo.deepfm.deepfm_estimator --model_dir={directory}/deepfm", rows="criteo_sample.txt",
        estimator=True,
    ),
)  # fmt: skip
