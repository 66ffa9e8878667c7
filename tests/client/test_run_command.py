"""The command line of `elasticdl run`, and the flags that follow from what there is: checks before anything starts."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from elasticdl_client import help as help_text
from elasticdl_client import run_script
from elasticdl_client.choices import DistributionStrategy, Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.flag_sources import GivenFlags, gather, infer
from elasticdl_client.job_spec import JobSpec, flag_defaults, flag_fields
from elasticdl_client.run_script import job_name_of, read
from tests.client.test_kubernetes_submission import kubeconfig

ROOT = Path(__file__).resolve().parents[2]
ELASTIC = "from elasticdl.api.pytorch import create_elastic_controller\n"
SHARING = "from elasticdl.api.data import DataShardService\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; no cluster is configured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-cluster"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "train.py").write_text(ELASTIC)
    return tmp_path


def job(*arguments: str) -> JobSpec:
    return JobSpec.from_flags("train", read(arguments, {}).given.values)


def flags_of_train(**flags: object) -> GivenFlags:
    return infer("train", gather("train", [f"--{name}={value}" for name, value in flags.items()], {}))


def refused(*arguments: str) -> FlagError:
    with pytest.raises(FlagError) as caught:
        read(arguments, {})
    return caught.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py"], ["train.py"]),
        (["--num_workers=4", "train.py", "--lr", "3e-4"], ["train.py", "--lr", "3e-4"]),
        (["--num_workers", "4", "train.py", "--num_workers=9"], ["train.py", "--num_workers=9"]),
        (["--num-workers=4", "--shuffle", "train.py", "--help"], ["train.py", "--help"]),
        (["--shuffle", "false", "--", "train.py", "--", "a b", "'", ""], ["train.py", "--", "a b", "'", ""]),
        (["train.py", "é\n$X"], ["train.py", "é\n$X"]),
        (["--volume", "here", "--runtime=local", "--all", "train.py", "--all"], ["train.py", "--all"]),
    ],
)  # fmt: skip
def test_all_behind_the_script_is_the_scripts_own(arguments: list[str], words: list[str]) -> None:
    values = read(arguments, {}).given.values
    assert shlex.split(str(values["job_command"])) == ["python", *words]
    assert not run_script.asks_for_help(arguments)


def test_a_script_is_a_job_of_all_reduce_on_this_machine_where_there_is_no_cluster() -> None:
    found = read(["--num_workers=4", "train.py"], {"ELASTICDL_SEED": "7"})
    spec = JobSpec.from_flags("train", found.given.values)
    assert (spec.job_name, spec.num_workers, spec.seed) == ("train", 4, 7)
    assert (spec.runtime, spec.distribution_strategy) == (Runtime.LOCAL, DistributionStrategy.ALL_REDUCE)
    assert not found.shows_all
    assert [note for note in found.given.notes if "no cluster is configured" in note and "--runtime=kubernetes" in note]


def test_a_script_that_only_takes_data_has_a_model_in_each_worker(project: Path) -> None:
    (project / "share.py").write_text(SHARING)
    found = read(["share.py"], {})
    spec = JobSpec.from_flags("train", found.given.values)
    assert (spec.distribution_strategy, spec.num_ps_pods) == (DistributionStrategy.PARAMETER_SERVER, 0)
    assert "each has a model of its own" in found.given.notes[-1]
    assert "create_elastic_controller" in refused("--min_workers=2", "share.py").hint


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("a/b/Train_ResNet50.v2.py", "train-resnet50-v2"),
        ("étude.py", "etude"),
        ("训练.py", "script"),
        (f"{'x' * 39}-y.py", "x" * 39),
    ],
)
def test_a_job_has_the_name_of_its_file(script: str, name: str) -> None:
    assert job_name_of(script) == name
    assert job_name_of("recipes.train", is_module=True) == "recipes-train"


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ([], "needs a script", "elasticdl run --num_workers=4 train.py"),
        (["--all"], "needs a script", "train.py"),
        (["no.py"], "no.py does not exist in /", "path of a Python script"),
        (["."], ". is a directory", "-m MODULE"),
        (["--num_worker=2", "train.py"], "Unknown flag --num_worker.", "Did you mean --num_workers?"),
        (["--lr", "3", "train.py"], "Unknown flag --lr.", "Flags of the script stand after it"),
        (["-x", "train.py"], "Unknown flag -x.", "Flags of the script stand after it"),
        (["--nproc-per-node=4", "train.py"], "--nproc-per-node is a flag of torchrun", "--num_workers=N"),
        (["--standalone", "train.py"], "--standalone is a flag of torchrun", "Leave it out"),
        (["--model_def=a.b", "train.py"], "--model_def is a flag of train", "Leave it out"),
        (["--wait", "train.py"], "--wait is a flag of train", "Leave it out"),
        (["--runtime=kubernetes", "train.py"], "needs --image_name, an image with train.py", "zoo build"),
        (["--image_name=i", "../train.py"], "outside of the current directory", "path in the image"),
        (["--runtime=cloud", "train.py"], "--runtime is one of kubernetes, local, not 'cloud'", "Choose one"),
        (["-m", "no_such_module"], "there is no module no_such_module", "without -m"),
        (["-m", "a-b"], "-m a-b is not the name of a module", "Leave -m out"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_before_anything_starts(arguments: list[str], what: str, hint: str) -> None:
    error = refused(*arguments)
    assert what in error.what
    assert hint in error.hint


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (b"import os\n\nx = = 1\n", 'File "bad.py", line 3: SyntaxError: invalid syntax\n    x = = 1'),
        (b"if 1:\npass\n", 'File "bad.py", line 2: IndentationError'),
        (b"#!/bin/sh\nexec python train.py\n", 'File "bad.py", line 2: SyntaxError'),
        (b"x = 1\0\n", "bad.py"),
        (b"\xff\xfe", "bad.py"),
    ],
)
def test_a_file_that_is_not_python_is_named_with_its_line(project: Path, code: bytes, what: str) -> None:
    (project / "bad.py").write_bytes(code)
    assert what in refused("bad.py").what


def test_copies_that_each_train_everything_are_refused_with_the_lines_to_write(project: Path) -> None:
    (project / "loops.py").write_text("from torch.distributed import init_process_group\n\ninit_process_group()\n")
    (project / "plain.py").write_text("import loops, torch\nmodel = torch.nn.parallel.DistributedDataParallel(m)\n")
    error = refused("--num_workers=3", "plain.py")
    assert "3 workers would be 3 copies of it, each training on all of the data" in error.what
    for line in ("create_elastic_controller(", "controller.loader(", "controller.epochs()", "with controller.step()"):
        assert line in error.hint
    assert "import elasticdl.api.pytorch in the script" in error.hint
    assert "Remove DistributedDataParallel: plain.py, line 2" in error.hint
    assert "Remove init_process_group: loops.py, line 3" in error.hint
    (project / "plain.py").write_text("import numpy\n")
    assert "DataShardService(" in refused("plain.py").hint
    assert "--num_workers takes a whole number" in refused("--num_workers=two", "plain.py").what
    assert job("--num_workers=1", "plain.py").num_workers == 1
    (project / "loops.py").write_text(ELASTIC)
    (project / "plain.py").write_text("import loops\n")
    assert job("plain.py").distribution_strategy is DistributionStrategy.ALL_REDUCE


def test_groups_of_a_fixed_size_that_are_left_in_an_elastic_script_are_noted(project: Path) -> None:
    code = "from torch.nn.parallel import DistributedDataParallel as DDP\nimport torch.distributed as dist\n"
    (project / "train.py").write_text(ELASTIC + code + "dist.init_process_group('gloo')\nmodel = DDP(model)\n")
    first, *others = read(["train.py"], {}).given.notes[1:]
    line = ELASTIC.count("\n") + 3
    assert (
        f"init_process_group: train.py, line {line}; DistributedDataParallel: train.py, line {line + 1}: the" in first
    )
    assert not others
    (project / "train.py").write_text(ELASTIC)
    assert len(read(["train.py"], {}).given.notes) == 1


def test_a_keras_script_is_shown_the_way_of_keras(project: Path) -> None:
    (project / "train.py").write_text("import keras\nmodel = keras.Sequential()\nmodel.fit([1], [2])\n")
    text = str(refused("--num_workers=3", "train.py"))
    assert "history = elasticdl.fit(model, x, y, num_workers=3)" in text
    assert "`python train.py`" in text
    assert "DataShardService" not in text


def test_a_module_is_looked_for_in_the_current_directory_and_among_packages(project: Path) -> None:
    (project / "recipes").mkdir()
    (project / "recipes" / "__init__.py").touch()
    (project / "recipes" / "__main__.py").write_text("from .loops import f\n")
    (project / "recipes" / "loops.py").write_text(ELASTIC)
    spec = job("-m", "recipes", "-m", "x")
    assert (spec.job_name, spec.job_command) == ("recipes", "python -m recipes -m x")
    assert spec.distribution_strategy is DistributionStrategy.ALL_REDUCE
    assert job("--module", "--num_workers=2", "json.tool").job_command == "python -m json.tool"
    assert "there is no such module" in refused("-m", "recipes.nothing").what


def test_a_cluster_that_is_configured_is_taken_and_followed_and_one_that_is_not_is_not(project: Path) -> None:
    config = kubeconfig(project / "no-cluster", "https://127.0.0.1:1")
    error = refused("train.py")
    assert "on Kubernetes (--runtime=kubernetes, since a cluster is configured (context far-away))" in error.what
    assert job("--image_name=i", "train.py").wait
    assert read(["--image_name=i", "--all", "train.py"], {}).shows_all
    assert job("--runtime=local", "train.py").runtime is Runtime.LOCAL
    assert job("--job_dir=d", "train.py").runtime is Runtime.LOCAL
    config.write_text("apiVersion: v1\nkind: Config\nclusters: null\ncontexts: null\ncurrent-context: ''\n")
    found = read(["train.py"], {}).given
    assert found.values["runtime"] is Runtime.LOCAL
    assert f"{config} names no cluster" in found.notes[0]


def test_a_script_of_the_image_is_not_looked_for_here() -> None:
    spec = job("--image_name=i", "/app/train.py", "--lr=1")
    assert (spec.job_command, spec.distribution_strategy) == (
        "python /app/train.py --lr=1",
        DistributionStrategy.ALL_REDUCE,
    )


@pytest.mark.parametrize(
    "script",
    [
        "train.py",
        "./train.py",
        "src/train.py",
        "../{name}/src/train.py",
        "{here}/src/train.py",
        "{here}/link.py",
    ],
)
def test_a_script_of_the_code_has_its_path_there_or_one_of_this_machine(project: Path, script: str) -> None:
    (project / "src").mkdir()
    (project / "train.py").rename(project / "src" / "train.py")
    (project / "link.py").symlink_to("src/train.py")
    given = script.format(here=project, name=project.name)
    spec = job("--image_name=i", "--code=src", given, "--lr=1")
    assert spec.job_command in ("python train.py --lr=1", "python ./train.py --lr=1")


@pytest.mark.parametrize("script", ["../{name}/train.py", "{here}/train.py", "x/../train.py"])
def test_a_script_is_found_where_the_code_is_the_current_directory(project: Path, script: str) -> None:
    """Also one that is a link to elsewhere, whose content is packed."""
    code = project / "code"
    code.mkdir()
    (code / "train.py").symlink_to(project / "train.py")
    (code / "x").mkdir()
    with contextlib.chdir(code):
        spec = job("--image_name=i", "--code=.", script.format(here=code, name="code"))
    assert spec.job_command == "python train.py"


def test_files_that_would_be_lost_with_a_pod_are_noted(project: Path) -> None:
    (project / "train.py").write_text(ELASTIC + "import torch\ndef end(model):\n    torch.save(model, 'best.pt')\n")
    flags = ("--image_name=i", "--code=.")

    def notes(*more: str) -> str:
        return "\n".join(read([*flags, *more, "train.py"], {}).given.notes)

    assert "train.py, line 4, calls save(): files in a pod are gone with the pod" in notes()
    assert "calls save()" not in notes("--volume=claim_name=c,mount_path=/out")
    assert "calls save()" not in "\n".join(read(["train.py"], {}).given.notes)
    (project / "train.py").write_text(ELASTIC)
    assert "calls save()" not in notes()


def test_a_script_outside_of_the_code_is_refused_and_one_of_the_image_is_not(project: Path) -> None:
    (project / "src").mkdir()
    error = refused("--image_name=i", "--code=src", f"{project}/train.py")
    assert f"{project}/train.py is not in --code=src, the directory that the pods get." in str(error)
    assert f"--code={project}" in str(error)
    kubernetes = ("--runtime=kubernetes", "--image_name=i")
    assert job(*kubernetes, f"{project}/train.py").job_command == "python train.py"  # the image is made of this folder
    assert job(*kubernetes, "--num_workers=1", __file__).job_command == f"python {__file__}"


def test_a_script_of_the_image_that_would_run_once_for_each_gpu_is_noted() -> None:
    def notes(*flags: str) -> list[str]:
        found = read(["--image_name=i", *flags, "/app/train.py"], {}).given.notes
        return [note for note in found if "gets a process" in note]

    (note,) = notes("--worker_resource_request=cpu=8,gpu=8")
    assert note.startswith("each of the 8 GPUs")
    assert not notes("--worker_resource_request=cpu=8,gpu=8", "--processes_per_worker=1")
    assert not notes("--worker_resource_request=cpu=8,gpu=1")
    assert not notes("--worker_resource_request=gpu=many")
    assert not notes()


def test_the_objects_of_a_run_are_printed_with_its_command(project: Path) -> None:
    flags = ("--image_name=i:1", "--dry_run")
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "run", *flags, "train.py", "a 'b", "ä"],
        cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    objects = {(found["kind"], found["metadata"]["name"]): found for found in yaml.safe_load_all(done.stdout)}
    spec = JobSpec.from_json(objects["ConfigMap", "elasticdl-train"]["data"]["spec.json"])
    assert shlex.split(spec.job_command) == ["python", "train.py", "a 'b", "ä"]
    assert "--runtime=kubernetes, since --image_name is given; --runtime=local overrides it." in done.stderr


def test_help_stands_before_the_script_and_lists_every_flag() -> None:
    assert run_script.asks_for_help(["--num_workers=2", "--help"])
    text = help_text.of_command("run", 100)
    heads = {line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith(("  --", "  -m"))}
    assert heads == {"--all", "-m", *(f"--{name}" for name in flag_fields("run"))}
    assert {"num_workers", "image_name", "min_workers", "model_zoo"} < set(flag_defaults("run"))


def test_train_infers_what_it_is_not_given(project: Path) -> None:
    (project / "net.py").write_text("import torch\n")
    (project / "layers.py").write_text("import keras\n")
    found = flags_of_train(model_def="net.model")
    assert found.values["runtime"] is Runtime.LOCAL
    assert found.values["distribution_strategy"] is DistributionStrategy.ALL_REDUCE
    assert [note.partition(",")[0] for note in found.notes] == [
        "--runtime=local",
        "--distribution_strategy=AllReduceStrategy",
    ]
    for given in ({"model_def": "layers.model"}, {"model_def": "net.model", "num_ps_pods": 2}, {"job_command": "x"}):
        assert "distribution_strategy" not in flags_of_train(**given).values
    no_servers = flags_of_train(model_def="layers.model", num_ps_pods=0)
    assert no_servers.values["distribution_strategy"] is DistributionStrategy.ALL_REDUCE
    all_given = {"model_def": "net.model", "distribution_strategy": "Local", "runtime": "kubernetes"}
    found = flags_of_train(**all_given)
    assert (found.values, found.notes) == (all_given, ())


def test_a_flag_of_one_runtime_chooses_it_and_a_default_of_the_environment_does_not() -> None:
    assert flags_of_train(image_name="i").values["runtime"] is Runtime.KUBERNETES
    assert flags_of_train(local_slots=1).values["runtime"] is Runtime.LOCAL
    found = infer("train", gather("train", [], {"ELASTICDL_IMAGE_NAME": "i"}))
    assert found.values["runtime"] is Runtime.LOCAL
    assert flags_of_train(job_dir="", image_name="i").values["runtime"] is Runtime.KUBERNETES
    assert flags_of_train(image_name="", local_slots=1).values["runtime"] is Runtime.LOCAL
