"""The output of `--help`: commands, and each command's flags by group with their defaults."""

from __future__ import annotations

import textwrap
from enum import StrEnum

from elasticdl_client import run_script
from elasticdl_client.flags import Group, flag_of
from elasticdl_client.job_spec import RUN, flag_fields

JOBS = {
    "train": "train a model, evaluating it on the way",
    "run": "run a training script of your own in all workers, as torchrun does",
    "evaluate": "evaluate a trained model",
    "predict": "run a trained model over data",
    "analyze": "compute statistics of a table's columns",
}
_STATEMENTS = {
    "sql": "train, evaluate and use models on the tables of a database, by SQL statements",
}
_PREPARATION = {
    "zoo": "make an image of a folder of models and push it: zoo init, zoo build, zoo push",
    "rbac": "print the service account and the rights that a job's master needs",
    "simulate": "estimate how long a job would take and cost on a cluster, elastic and as a gang",
    "completion": "print what makes a shell complete commands and flags: completion bash, zsh or fish",
}
_AFTERWARDS = {
    "list": "list jobs",
    "top": "show all jobs and their pods as they are now, until Ctrl-C",
    "status": "show a job's progress, its pods, and why it waits or failed",
    "logs": "print what a job's pods have printed",
    "events": "list the events of a job, each with its cause",
    "explain": "explain the troubles of a job: causes, costs, and remedies",
    "scale": "change the number of a running job's workers",
    "chaos": "kill and stop pods of a running job, and show how it recovers",
    "delete": "end a job and remove all its objects",
    "clean": "remove the jobs that have ended",
    "stop": "end all pods of a job after a checkpoint; `resume` continues it",
    "resume": "start a new master for a job whose master is gone; the job continues where it was",
    "tensorboard": "show a job's losses and metrics in TensorBoard",
    "dashboard": "show jobs on a page in the browser: pods over time, charts, events, logs",
}
COMMANDS = {**JOBS, **_STATEMENTS, **_PREPARATION, **_AFTERWARDS}
_MORE = {
    "run": "All that follows SCRIPT belongs to it, flags too. --distribution_strategy follows from what the script "
    "imports. Without --runtime it runs on this machine where no cluster is configured, else on Kubernetes, with "
    "SCRIPT as a path in the image's model zoo. The job is followed to its end, and its exit code is the command's.",
    "sql": "Statements: SELECT … LABEL column INTO model; SELECT … TO TRAIN estimator WITH key = value, … COLUMN …, … "
    "LABEL column INTO model; SELECT … TO PREDICT table.column USING model; SELECT … TO EVALUATE metric, … USING model "
    "INTO table; SHOW MODELS; DESCRIBE model; DROP MODEL model. docs/sql.md has the grammar. JOBFLAGS are those of "
    "`elasticdl train`, `evaluate` or `predict` that do not follow from the statement; jobs run on this machine.",
    "list": "A job is Pending, Running, Succeeded, Failed, or Stopped: not ended, but without a master; see `resume`.",
    "top": "Where the output is no terminal, and with --output, what is seen now is printed once.",
    "status": "WORKERS and PS count pods that run. --output=json has the keys that docs/jobs.md lists.",
    "logs": "With --output=json each line is an object: pod and line.",
    "events": "Oldest first, each with the number of the event that it follows from. docs/events.md lists the kinds.",
    "explain": "The newest trouble first, also after the job has ended. docs/troubles.md lists all troubles.",
    "scale": "New workers join as soon as there is room for them; those that are not wanted any more finish their "
    "minibatch and leave, the youngest first. 0 pauses a job with parameter servers. On Kubernetes the number is the "
    "annotation elasticdl-num-workers of the ConfigMap elasticdl-JOB, which scripts may set, too.",
    "chaos": "Each round has every fault once, in a random order. Asks for confirmation. Prints each fault and the "
    "recovery from it, and a table at the end: 0 if the job has recovered from all, 1 if it failed, or has lost or "
    "repeated a record. Ctrl-C ends the chaos, not the job: pods that are stopped continue. See docs/chaos.md.",
    "delete": "On Kubernetes: pods, ConfigMaps, Secret and Services. Local: all its processes, then its directory with "
    "the logs and checkpoints in it; an exported model, predictions and metrics in it stay. Deletes without asking for "
    "confirmation.",
    "clean": "Removes jobs that succeeded or failed, as `delete` does; running and stopped jobs stay.",
    "stop": "A checkpoint is written first where there is a --checkpoint_dir, and waited for at most a minute. On "
    "Kubernetes the request is the annotation elasticdl-stop of the ConfigMap elasticdl-JOB; the pods' resources "
    "are freed, journal and checkpoints stay. A local job ends as by Ctrl-C.",
    "resume": "On Kubernetes it creates the master's pod again; the other pods wait for it for --master_timeout. A "
    "local job continues in the foreground, from its newest checkpoint.",
    "tensorboard": "For a job with --tensorboard_log_dir. Prints its address; Ctrl-C ends it. On Kubernetes it runs "
    "in a pod with the job's image and volumes.",
    "dashboard": "Prints the page's address, which has a token in it; Ctrl-C ends it. Needs the extra `dashboard`: "
    "pip install 'elasticdl2-client[dashboard]'.",
    "completion": "bash: `source <(elasticdl completion bash)` in ~/.bashrc; zsh: `source <(elasticdl completion zsh)` "
    "in ~/.zshrc; fish: `elasticdl completion fish > ~/.config/fish/completions/elasticdl.fish`.",
    "simulate": "Runs the master's own logic in virtual time, with simulated pods, nodes and workers; the same seed "
    "(--seed of the job) gives the same result. JOBFLAGS are those of `elasticdl train`, from a file with -f, too; see "
    "`elasticdl train --help`.",
    "rbac": "For `kubectl apply -f -`. Applying it needs the right to grant these rights.",
}
_USAGE = {
    "train": "--job_name=NAME --model_def=PACKAGE.MODULE.SYMBOL --training_data=PATH",
    "evaluate": "--job_name=NAME --model_def=MODULE.SYMBOL --validation_data=PATH --checkpoint_dir_for_init=PATH",
    "predict": "--job_name=NAME --model_def=MODULE.SYMBOL --prediction_data=PATH --checkpoint_dir_for_init=PATH",
    "analyze": "--job_name=NAME --data=PATH --output=FILE",
}
_FLAGS = (
    "--flag=value and --flag value are the same; a boolean flag alone means true. -f FILE takes flags from a YAML "
    "file, one per line; ELASTICDL_NUM_WORKERS=4 in the environment is the default of --num_workers, and so on. The "
    "command line overrides the file, the file the environment. [Defaults in brackets.]"
)
_INDENT = 30


def overview() -> str:
    """Return the help of `elasticdl` itself."""
    lines = ["ElasticDL trains deep-learning models with however many workers are available right now.", ""]
    lines += ["Usage: elasticdl COMMAND --flag=value …, or elasticdl --version", ""]
    for title, commands in (("Run", {**JOBS, **_STATEMENTS}), ("Prepare", _PREPARATION), ("Manage jobs", _AFTERWARDS)):
        lines += [f"{title}:", *(f"  {name:<11} {text}" for name, text in commands.items()), ""]
    lines += ["`elasticdl COMMAND --help` lists a command's flags. To try it on this machine:", ""]
    lines += ["  elasticdl train --runtime=local --job_name=digits --model_zoo=model_zoo \\"]
    lines += ["      --model_def=digits.digits_functional.custom_model --training_data=build/digits/train"]
    lines += ["  elasticdl run --num_workers=2 train.py --lr=0.1"]
    return "\n".join(lines)


def of_command(command: str, width: int) -> str:
    """Return the help of a command, lines at most `width` wide."""
    if command not in JOBS:
        return _of_later_command(command, width)
    lines = [f"elasticdl {command}: {COMMANDS[command]}.", ""]
    usage = run_script.USAGE if command == RUN else f"elasticdl {command} {_USAGE[command]} …"
    lines += textwrap.wrap(f"Usage: {usage}", width, subsequent_indent="    ")
    lines += [
        "",
        *textwrap.wrap(_FLAGS, width),
    ]
    if command == RUN:
        lines += ["", *textwrap.wrap(_MORE[RUN], width), "", "The script:"]
        for head, text in (("--all", run_script.OPTIONS["all"]), ("-m, --module", run_script.OPTIONS["module"])):
            lines += _of_flag(head, text, max(width, _INDENT + 20))
    for group in Group:
        flags = _of_group(command, group, max(width, _INDENT + 20))
        if flags:
            lines += ["", f"{group}:", *flags]
    return "\n".join(lines)


def _of_later_command(command: str, width: int) -> str:
    from elasticdl_client import simulate
    from elasticdl_client.jobs import options
    from elasticdl_client.kubernetes import rbac
    from elasticdl_client.sql import arguments as sql

    lines = [f"elasticdl {command}: {COMMANDS[command]}.", ""]
    usages = {"rbac": rbac.USAGE, "simulate": simulate.USAGE, "sql": sql.USAGE}
    usages |= {"completion": "elasticdl completion bash|zsh|fish"}
    lines += [f"Usage: {usages.get(command) or options.usage_of(command)}", ""]
    lines += [*textwrap.wrap(_MORE[command], width), ""]
    if command == "completion":
        return "\n".join(lines)
    own = {"rbac": rbac.FLAGS, "simulate": simulate.FLAGS, "sql": sql.FLAGS}
    if command in own:
        flags = own[command]
        heads = {name: f"-{name}" if len(name) == 1 else f"--{name}" for name in flags}
        return "\n".join(lines + [line for name, text in flags.items() for line in _of_flag(heads[name], text, width)])
    for name, (option, default) in options.options_of(command).items():
        head = f"-{option.short}, --{name}" if option.short else f"--{name}"
        lines += _of_flag(head, f"{option.help}{_default(default)}", max(width, _INDENT + 20))
    return "\n".join(lines)


def _of_group(command: str, group: Group, width: int) -> list[str]:
    lines: list[str] = []
    for name, field in flag_fields(command).items():
        flag = flag_of(field)
        if flag is None or flag.group is not group:
            continue
        lines += _of_flag(f"--{name}", f"{flag.help}{_default(field.default)}", width)
    return lines


def _of_flag(head: str, help: str, width: int) -> list[str]:
    indent = " " * _INDENT
    text = textwrap.wrap(help, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(head) + 2 < _INDENT - 1:
        return [f"  {head}".ljust(_INDENT) + text[0].lstrip(), *text[1:]]
    return [f"  {head}", *text]


def _default(value: object) -> str:
    if value == "" or value is None:
        return ""
    if isinstance(value, bool):
        return f" [{str(value).lower()}]"
    return f" [{value.value if isinstance(value, StrEnum) else value}]"
