"""`elasticdl run`: a command line as torchrun has it, to the flags of a job that runs the script in all workers.

Checks the script before anything starts: that it is there, that it is Python, and that it takes its data from the job.
The job is that of `elasticdl train --job_command`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticdl_client.checks import as_job_name
from elasticdl_client.choices import DistributionStrategy, JobType, Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.flag_sources import FILE, SHORT, GivenFlags, gather, infer_runtime
from elasticdl_client.flags import Group, flag_of, is_bool_word, nearest, parse
from elasticdl_client.job_spec import RUN, JobSpec, flag_defaults, flag_fields, unknown_flag
from elasticdl_client.kubernetes.resources import num_gpus
from elasticdl_client.worker_range import parse_flags
from elasticdl_client.zoo_modules import Source, sources, within

USAGE = "elasticdl run [--flag=value …] [--all] [-m] SCRIPT [ARGUMENT …]"
OPTIONS = {
    "all": "Show the output of all workers, each line after its pod's name; by default that of rank 0.",
    "module": "SCRIPT is the name of a module, as with `python -m`. Its short form is -m.",
}
_OF_TORCHRUN = {
    "nnodes": "--num_workers=N is the number of pods, each with one GPU or --processes_per_worker=P of them.",
    "nproc_per_node": "--num_workers=N starts N processes, on one machine or many; --processes_per_worker=P runs P in "
    "each pod.",
    **dict.fromkeys(
        ("standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "node_rank", "master_addr"),
        "Leave it out: workers find each other through the job's master.",
    ),
    "max_restarts": "Leave it out: lost workers are replaced; --max_task_failures counts failures of a task.",
}
_API = ("elasticdl.api", "elasticai_api")
_GROUPS = (  # APIs with which workers train one model together
    "elasticdl.api.pytorch",
    "elasticai_api.pytorch",
    "elasticdl.api.transformers",
    "elasticdl.api.accelerate",
    "elasticdl.api.lightning",
)
_TORCH = frozenset({"torch", "torchvision", "lightning", "pytorch_lightning", "accelerate", "transformers"})
_OF_FIXED_GROUPS = ("init_process_group", "DistributedDataParallel", "DistributedSampler")
_SAVING = frozenset({"save", "save_file", "save_model", "save_pretrained", "save_weights", "save_lora_weights"})
_PLACES = ("volume", "pod_template", "worker_pod_template", "cluster_spec")  # they may mount what outlives a pod
_MAX_NAMED = 4
_TORCH_LINES = """\
      from elasticdl.api.pytorch import create_elastic_controller
      controller = create_elastic_controller(batch_size=64, num_epochs=3, state=[model, optimizer])
      loader = controller.loader(dataset)   # instead of DataLoader(dataset, batch_size=64, …)
      for epoch in controller.epochs():     # instead of range(3)
          with controller.step():           # around the body of the loop over the loader"""
_KERAS = ("keras", "tensorflow")
_KERAS_LINES = """\
Put this line into it (docs/keras_models.md explains it), and start it by `python {script}`:
      history = elasticdl.fit(model, x, y, num_workers={number})   # instead of model.fit(x, y)
    For Kubernetes, put the model into a module for `elasticdl train` (docs/start/keras.md). --num_workers=1 runs the
    script as it is."""
_DATA_LINES = """\
      from elasticdl.api.data import DataShardService
      data = DataShardService(batch_size=64, num_epochs=3, dataset_size=len(samples))
      for minibatch in data:                # instead of the loops over epochs and batches
          batch = samples[minibatch.indices]"""


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """A command line of `elasticdl run`.

    Attributes:
        given: the flags of the job, as of `elasticdl train`.
        shows_all: the output of all workers is shown.
    """

    given: GivenFlags
    shows_all: bool


@dataclass(frozen=True, slots=True)
class _Command:
    """The user's command line: flags of ours, and the command of the workers."""

    flags: list[str]
    shows_all: bool
    is_module: bool
    script: str
    arguments: list[str]

    @property
    def words(self) -> list[str]:
        return ["python", *(["-m"] if self.is_module else []), self.script, *self.arguments]


@dataclass(frozen=True, slots=True)
class _Program:
    """The code of a script and of the modules beside it; none where it is not on this machine."""

    file: Path | None
    modules: list[Source]

    def imports(self, names: Sequence[str]) -> bool:
        """Return whether one of these packages or modules is imported anywhere."""
        imported = {root for module in self.modules for name in module.imported for root in within(name)}
        return not imported.isdisjoint(names)


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether --help stands before the script; behind it, it is the script's."""
    flags = split(arguments, needs_script=False).flags
    return any(flag in ("--help", "-h", "--help=true") for flag in flags)


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> ScriptJob:
    """Read and check a command line of `elasticdl run`.

    Raises:
        FlagError: a flag is wrong, or the script is not there, not Python, or would be trained by each worker alone.
    """
    command = split(arguments)
    given = gather(RUN, command.flags, environment)
    values = dict(given.values)
    for name in values:
        if name not in flag_fields(RUN):
            raise given.located(unknown_flag(name, RUN))
    notes = [*given.notes]
    if "runtime" not in values:
        values["runtime"], why = infer_runtime(RUN, given)
        other = Runtime.KUBERNETES if values["runtime"] is Runtime.LOCAL else Runtime.LOCAL
        notes.append(f"--runtime={values['runtime']}, since {why}; --runtime={other} overrides it.")
    is_local = parse("runtime", values["runtime"], Runtime.KUBERNETES) is Runtime.LOCAL
    _check_image(command, values, notes, is_local=is_local)
    base = Path(str(values.get("model_zoo" if is_local else "code") or ".")).expanduser()
    if not is_local and not command.is_module:
        command = dataclasses.replace(command, script=_within(base, command.script, is_code=bool(values.get("code"))))
    program = _find(command, base, is_local=is_local)
    values.setdefault("job_name", job_name_of(command.script, is_module=command.is_module))
    values["job_command"] = shlex.join(command.words)
    if program.modules and not program.imports(_API):
        _check_one_worker(command, program, values)
    if program.modules and not program.imports(_GROUPS):
        _check_no_group_flags(command, values)
        notes += [_sharing_note(command)] if program.imports(_API) else []
    else:
        values["distribution_strategy"] = DistributionStrategy.ALL_REDUCE
        notes += _fixed_groups_note(program)
    if not program.modules and not is_local and "processes_per_worker" not in values:
        notes += _processes_note(values)
    if not is_local and not any(values.get(name) for name in _PLACES):
        notes += _lost_files_note(program)
    if not is_local and not values.get("yaml") and not values.get("dry_run"):
        values["wait"] = True
    return ScriptJob(dataclasses.replace(given, values=values, notes=tuple(notes)), command.shows_all)


def split(arguments: Sequence[str], *, needs_script: bool = True) -> _Command:
    """Split a command line at the script: later arguments are the script's own, even if they look like flags.

    Raises:
        FlagError: a flag before the script that does not exist, or no script.
    """
    defaults = flag_defaults(RUN)
    rest, flags = list(arguments), list[str]()
    switches = {"--all": False, "--module": False}
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, _ = SHORT.get(word, word).partition("=")
        switch = "--module" if name == "-m" else name
        if switch in switches and not equals:
            switches[switch] = True
            continue
        flags.append(word)
        if name in ("--help", "-h"):
            continue
        plain = name.removeprefix("--").replace("-", "_")
        if name not in FILE and (plain not in defaults or not name.startswith("--")) and needs_script:
            raise _unknown(name, plain)
        is_bool = isinstance(defaults.get(plain), bool)
        if not equals and rest and (is_bool_word(rest[0]) if is_bool else plain in defaults or name in FILE):
            flags.append(rest.pop(0))
    if not rest and needs_script:
        raise FlagError(
            "`elasticdl run` needs a script.",
            f"For example elasticdl run --num_workers=4 train.py --lr=0.1. Usage: {USAGE}.",
        )
    return _Command(flags, switches["--all"], switches["--module"], rest[0] if rest else "", rest[1:])


def _unknown(flag: str, name: str) -> FlagError:
    if name in _OF_TORCHRUN:
        return FlagError(f"{flag} is a flag of torchrun, not of elasticdl run.", _OF_TORCHRUN[name])
    if flag.startswith("--") and (name in flag_defaults(JobType.TRAIN) or nearest(name, list(flag_defaults(RUN)))):
        return unknown_flag(name, RUN)
    return FlagError(
        f"Unknown flag {flag}.", "Flags of the script stand after it; `elasticdl run --help` lists those before it."
    )


def job_name_of(script: str, *, is_module: bool = False) -> str:
    """Return the name of a script's job: that of its file or module, as far as a job's name can have its letters."""
    return as_job_name(script if is_module else Path(script).stem) or "script"


def _check_image(command: _Command, values: Mapping[str, object], notes: Sequence[str], *, is_local: bool) -> None:
    if is_local or values.get("image_name"):
        return
    why = next((f" ({note.partition(';')[0]})" for note in notes if note.startswith("--runtime=")), "")
    raise FlagError(
        f"`elasticdl run` on Kubernetes{why} needs --image_name, an image with {command.script} in it.",
        "`elasticdl zoo init` and `elasticdl zoo build . --image=REGISTRY/NAME:TAG` make one of this folder; with "
        "--code=. any image with ElasticDL will do. Or --runtime=local: processes of this machine, no image.",
    )


def _within(base: Path, script: str, *, is_code: bool) -> str:
    """Return a script's path in the pods, whose current directory holds what `base` does.

    It may be a path from `base`, or one of this machine, as shells complete it, that lies in `base`.
    """
    file, root = Path(script).expanduser(), base.resolve()
    is_of_base = not file.is_absolute() and ".." not in file.parts and (base / script).exists()
    if is_of_base or not file.exists():
        return script
    for place in (file.parent.resolve() / file.name, file.resolve()):  # a link in `base` is packed as the file
        if place.is_relative_to(root):
            return str(place.relative_to(root))
    if is_code:
        raise FlagError(
            f"{script} is not in --code={base}, the directory that the pods get.",
            f"Give the path of a script in it, or --code={file.parent}.",
        )
    return script


def _find(command: _Command, base: Path, *, is_local: bool) -> _Program:
    """Return the program, checked; without its code where that is in the image, or installed as a package."""
    if command.is_module:
        return _find_module(command.script, base, is_local=is_local)
    file = base / command.script
    if not is_local and Path(command.script).is_absolute() and not file.exists():
        return _Program(None, [])
    if not is_local and ".." in Path(command.script).parts:
        raise FlagError(
            f"{command.script} is outside of the current directory, which is the model zoo of the image.",
            "Run the command in the folder that the image was built from, or name the path in the image.",
        )
    _check_python(command.script, file)
    return _Program(file, list(sources(base, "__main__", file)))


def _find_module(module: str, base: Path, *, is_local: bool) -> _Program:
    if not all(part.isidentifier() for part in module.split(".")):
        raise FlagError(f"-m {module} is not the name of a module.", "Leave -m out to run a file.")
    for name in (f"{module}.__main__", module):
        file = base.joinpath(*name.split(".")).with_suffix(".py")
        if file.is_file():
            _check_python(str(file), file)
            return _Program(file, list(sources(base, name)))
    root = module.partition(".")[0]
    if (base / root).is_dir() and (base / root / "__init__.py").exists():
        raise FlagError(f"-m {module}: there is no such module in {base / root}.", "Name one that there is.")
    if is_local and importlib.util.find_spec(root) is None:
        raise FlagError(
            f"-m {module}: there is no module {root} in {base.absolute()}, nor is one installed.",
            "Run the command in the directory that holds it, or name a file without -m.",
        )
    return _Program(None, [])


def _check_python(script: str, file: Path) -> None:
    """Check that a file can be read and compiled.

    Raises:
        FlagError: it cannot, with the file and the line.
    """
    if not file.exists():
        raise FlagError(
            f"{script} does not exist in {file.parent.absolute()}.", "Give the path of a Python script, or -m MODULE."
        )
    if file.is_dir():
        raise FlagError(f"{script} is a directory.", "Give the path of a Python script, or -m MODULE.")
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except OSError as error:
        raise FlagError(f"{script} cannot be read: {error.strerror}.", "Check its permissions.") from error
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        where = f"\n    {line.strip()}" if line else ""
        raise FlagError(
            f'File "{file}", line {error.lineno}: {type(error).__name__}: {error.msg}{where}',
            "Correct it. Programs that are not Python: elasticdl train --job_command='PROGRAM ARGUMENT …'.",
        ) from error
    except ValueError as error:
        raise FlagError(f"{script} is not Python: {error}.", "Give the path of a Python script.") from error


def _check_one_worker(command: _Command, program: _Program, values: Mapping[str, object]) -> None:
    """Check that a script without our API has one worker, as several would each train on all of the data."""
    flags, default = parse_flags(values), JobSpec()
    num_workers, max_workers, num_processes = (
        parse(name, flags.get(name, getattr(default, name)), getattr(default, name))
        for name in ("num_workers", "max_workers", "processes_per_worker")
    )
    number = max(num_workers, max_workers) * max(1, num_processes)
    if number == 1:
        return
    processes = "processes" if num_processes > 1 else "workers"
    what = (
        f"{command.script} does not use ElasticDL's API: {number} {processes} would be {number} copies of it, "
        "each training on all of the data."
    )
    if program.imports(_KERAS) and _first_call(program, frozenset({"fit"})):
        raise FlagError(what, _KERAS_LINES.format(number=number, script=command.script))
    is_torch = program.imports(tuple(_TORCH))
    removed = "".join(f"    Remove {named}\n" for named in _fixed_groups(program) if is_torch)
    module, page = (_GROUPS[0], "docs/start/pytorch.md") if is_torch else ("elasticdl.api.data", "docs/estimator.md")
    raise FlagError(
        what,
        f"Put these lines into it ({page} explains them):\n{_TORCH_LINES if is_torch else _DATA_LINES}\n{removed}"
        f"    If a package that it imports does so: import {module} in the script, too. --num_workers=1 runs it as it "
        "is.",
    )


def _first_call(program: _Program, methods: frozenset[str]) -> tuple[str, str] | None:
    """Return the place of the first call of one of these methods, and its name."""
    for module in program.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                return f"{module.file}, line {node.lineno}", node.func.attr
    return None


def _fixed_groups(program: _Program) -> list[str]:
    """Return the first uses of PyTorch's groups of a fixed size, with their lines."""
    found = []
    for module in program.modules:
        named = set()
        imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)]
        meant = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}
        for node in ast.walk(module.tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            name = meant.get(name, name)
            if name in _OF_FIXED_GROUPS and name not in named and isinstance(node, ast.expr):
                named.add(name)
                found.append(f"{name}: {module.file}, line {node.lineno}")
    return found[:_MAX_NAMED]


def _fixed_groups_note(program: _Program) -> list[str]:
    """Return which uses of groups of a fixed size are left in a script with an elastic controller."""
    found = _fixed_groups(program) if program.imports(_GROUPS[:2]) else []
    text = "the controller does this in a job, whose workers come and go: leave it out, or for torchrun alone"
    return [f"{'; '.join(found)}: {text}."] if found else []


def _check_no_group_flags(command: _Command, values: Mapping[str, object]) -> None:
    for name, field in flag_fields(RUN).items():
        flag = flag_of(field)
        if name in values and flag is not None and flag.group is Group.ALL_REDUCE:
            raise FlagError(
                f"--{name} is for workers that train one model, and {command.script} has no elastic controller.",
                f"Leave --{name} out, or use elasticdl.api.pytorch.create_elastic_controller (docs/start/pytorch.md).",
            )


def _processes_note(values: Mapping[str, object]) -> list[str]:
    """Return what follows from several GPUs, where it is not known whether the script uses our API."""
    resources = (str(values.get(f"worker_resource_{name}", "")) for name in ("request", "limit"))
    try:
        number = num_gpus(*resources)
    except FlagError:  # it is reported with the place of the flag, when all are checked
        return []
    text = f"each of the {number} GPUs gets a process that runs the script; --processes_per_worker=1 starts it once."
    return [text] if number > 1 else []


def _lost_files_note(program: _Program) -> list[str]:
    """Return where the script saves a file, if it does so by the means of its framework."""
    found = _first_call(program, _SAVING)
    if found is None:
        return []
    text = "{}, calls {}(): files in a pod are gone with the pod".format(*found)
    return [f"{text}, unless they lie on a mount (--volume='claim_name=NAME,mount_path=/out') or in storage."]


def _sharing_note(command: _Command) -> str:
    return (
        f"workers share the records of {command.script}, and each has a model of its own: it has no elastic controller."
    )
