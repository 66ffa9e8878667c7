"""The arguments of the job commands: names of jobs, and options in kubectl's spelling and in ours.

Owns the options, their checks and the parsing of their values; it never looks for a job.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elasticdl_client import flags
from elasticdl_client.checks import check_job_name, check_writable_directory
from elasticdl_client.choices import Runtime
from elasticdl_client.errors import FlagError
from elasticdl_client.flag_sources import PREFIX
from elasticdl_client.secret_values import hide
from elasticdl_client.storage_kinds import is_remote

T = TypeVar("T")

FORMATS = {  # command → values of --output
    "list": ("json", "name", "wide", "yaml"),
    "top": ("json", "yaml"),
    "status": ("json", "yaml"),
    "logs": ("json",),
    "events": ("json", "yaml"),
    "explain": ("json", "yaml"),
    "scale": ("json", "name"),
    "chaos": ("json", "yaml"),
    "delete": ("json", "name"),
    "clean": ("json", "name"),
    "stop": ("json", "name"),
    "resume": ("json", "name"),
    "tensorboard": (),
    "dashboard": (),
}
WITH_JOB = ("status", "logs", "events", "explain", "scale", "chaos", "delete", "stop", "resume", "tensorboard")
MAY_HAVE_JOB = ("dashboard",)
_ROLES = ("worker", "ps", "master")
_ALL = tuple(FORMATS)
_PRINTING = tuple(command for command, formats in FORMATS.items() if formats)


@dataclass(frozen=True, slots=True)
class Option:
    """The metadata of an option, under the key ``option`` of its field; type and default are the field's own."""

    help: str
    commands: tuple[str, ...]
    short: str


def _option(default: T, help: str, commands: tuple[str, ...] = _ALL, short: str = "") -> T:
    value: T = dataclasses.field(default=default, metadata={"option": Option(help, commands, short)})
    return value


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a job command; an empty text means that the option was not given.

    Attributes:
        defaults: Of `namespace` and `context`, from the environment; they do not select a runtime.
    """

    jobs: tuple[str, ...] = ()
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    namespace: str = _option(
        "", "Namespace on Kubernetes; by default the context's. Given, local jobs are left out.", short="n"
    )
    context: str = _option("", "Context of the kubeconfig; by default the current one.")
    all_namespaces: bool = _option(False, "Jobs of all namespaces.", ("list", "top", "dashboard"), "A")
    runtime: str = _option("", "kubernetes or local; by default both are searched.")
    job_dir: str = _option("", "Directory of a local job: only the one in it. Of resume: also a URL of storage.")
    envs: str = _option(
        "", "With a --job_dir in storage: variables of the job's --envs, whose values are not kept there.", ("resume",)
    )
    cluster_spec: str = _option(
        "", "With a --job_dir in storage: the job's --cluster_spec, a file of this machine.", ("resume",)
    )
    output: str = _option("", "Instead of text for people: {formats}.", _PRINTING, "o")
    port: int = _option(
        0, "Port of this machine; 0: the first free one from 6006 (dashboard: 8265) on.", ("tensorboard", "dashboard")
    )
    listen: str = _option("127.0.0.1", "IP address to listen on; 0.0.0.0: all of this machine's.", ("dashboard",))
    hosts: str = _option(
        "", "Names by which browsers reach the page besides localhost, comma-separated.", ("dashboard",)
    )
    read_only: bool = _option(False, "Show jobs, and offer no action on them.", ("dashboard",))
    browser: bool = _option(True, "Open the page in a browser where this machine has a display.", ("dashboard",))
    follow: bool = _option(False, "Continue to the job's end, through restarts of its pods.", ("logs", "events"), "f")
    kind: str = _option(
        "", "Only events of these kinds, such as PodLost,TaskFailed; warnings: all troubles.", ("events",)
    )
    role: str = _option("", "Whose logs: master (by default), worker, ps; worker-0, ps-1, …", ("logs",))
    pod: str = _option("", "One pod by its name: worker-1, or elasticdl-JOB-worker-1.", ("logs", "explain"))
    why_pending: bool = _option(False, "Only what keeps pods from starting.", ("explain",))
    why_slow: bool = _option(False, "Only what takes time, and where the time has gone.", ("explain",))
    epoch: int = _option(0, "Only what happened in this epoch, from 1; 0: in all.", ("explain",))
    all: bool = _option(False, "The logs of all pods, each line after its pod's name.", ("logs",))
    tail: int = _option(-1, "Only the last N lines of each pod so far; -1: all.", ("logs",))
    since: str = _option("", "Only what happened since so long ago: 30s, 5m, 1h30m.", ("logs", "events"))
    timestamps: bool = _option(
        False, "The time of each line before it; of a local job as far as its lines say it.", ("logs",)
    )
    previous: bool = _option(False, "Of restarted pods: the log of the previous run.", ("logs",), "p")
    num_workers: str = _option(
        "", "How many workers the job is to have from now on: a number, or a range such as 2:16.", ("scale",)
    )
    current_num_workers: str = _option(
        "", "Scale only if this number is wanted now, as kubectl's --current-replicas.", ("scale",)
    )
    kill: str = _option(
        "", "Kill pods of these roles: worker, ps, master, comma-separated. On Kubernetes: delete them.", ("chaos",)
    )
    stop: str = _option("", "Stop the processes of pods of these roles (SIGSTOP). Local jobs only.", ("chaos",))
    fill_disk: bool = _option(
        False,
        "Fill the disk of --checkpoint_dir, which must be a small file system of its own. Local jobs only.",
        ("chaos",),
    )
    stop_for: str = _option("10s", "How long a pod stays stopped, or the disk full.", ("chaos",))
    every: str = _option("30s", "Time between two faults.", ("chaos",))
    for_: str = _option("5m", "Inject faults for so long, from the first one on.", ("chaos",))
    seed: int = _option(0, "Of the order of the faults, and of the choice of their victims.", ("chaos",))
    yes: bool = _option(False, "Do not ask for confirmation.", ("chaos",), "y")
    watch: bool = _option(
        False,
        "Show each change, of a job to its end, whose exit code is the command's. Ctrl-C ends the watching alone.",
        ("status", "list"),
        "w",
    )
    wait: bool = _option(
        True,
        "Return when nothing of the job is left (stop: runs); at once with --no_wait or --wait=false.",
        ("delete", "clean", "stop"),
    )
    timeout: float = _option(300.0, "Seconds to wait so.", ("delete", "clean", "stop"))
    dry_run: bool = _option(False, "Say which jobs would be deleted, and delete none.", ("clean",))
    force_use_kube_config_file: bool = _option(False, "Use the kubeconfig file inside a cluster, too.")


def options_of(command: str) -> dict[str, tuple[Option, object]]:
    """Return the options of a command with their defaults, by name."""
    found: dict[str, tuple[Option, object]] = {}
    for field in dataclasses.fields(Options):
        option = field.metadata.get("option")
        if option is not None and command in option.commands:
            text = option.help.format(formats=", ".join(FORMATS[command]))
            found[field.name.rstrip("_")] = dataclasses.replace(option, help=text), field.default
    return found


def parse(command: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Options:
    """Parse the options of a command line, in any order.

    Args:
        environment: May hold `ELASTICDL_NAMESPACE` and `ELASTICDL_CONTEXT`.

    Raises:
        FlagError: An unknown option, an invalid value, or a missing or additional job name.
    """
    texts, jobs = _split(command, list(arguments))
    known = options_of(command)
    fields = {field.name.rstrip("_"): field.name for field in dataclasses.fields(Options)}  # `for` is a keyword
    values = {fields[name]: flags.parse(name, text, known[name][1]) for name, text in texts.items()}
    variables = {name: f"{PREFIX}{name.upper()}" for name in ("namespace", "context")}
    found = environment or {}
    defaults = {name: found[variable] for name, variable in variables.items() if variable in found}
    options = Options(jobs=tuple(jobs), defaults=defaults, **values)  # type: ignore[arg-type]
    _check_jobs(command, options)
    _check_values(command, options)
    return options


def _split(command: str, rest: list[str]) -> tuple[dict[str, str], list[str]]:
    known = options_of(command)
    shorts = {option.short: name for name, (option, _) in known.items() if option.short}
    texts: dict[str, str] = {}
    jobs: list[str] = []
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-") or argument == "-":
            jobs.append(argument)
            continue
        name, equals, value = _name_and_value(command, argument, known, shorts)
        is_bool = isinstance(known[name][1], bool)
        if not equals and is_bool:
            value = "true"
        elif not equals:
            if not rest:
                raise FlagError(f"--{name} needs a value.", f"Write --{name}=VALUE.")
            value = rest.pop(0)
        if name in texts:
            raise FlagError(f"--{name} is given twice.", "Give it once.")
        texts[name] = value
    return texts, jobs


def _name_and_value(
    command: str, argument: str, known: dict[str, tuple[Option, object]], shorts: dict[str, str]
) -> tuple[str, bool, str]:
    if argument.startswith("--"):
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name == "no_wait" and "wait" in known and not equals:
            return "wait", True, "false"
        if name in known:
            return name, bool(equals), value
        if command == "scale" and name in ("num_ps", "num_ps_pods"):
            raise FlagError(
                "The number of parameter servers of a running job is fixed: each holds a part of the model.",
                "A new job with --checkpoint_dir_for_init continues with the model on any number of them.",
            )
        if command == "chaos" and "network" in name:
            raise FlagError(
                "A network can be cut only by the administrator of the machine or of the cluster.",
                "--stop makes a local pod as silent as a cut network does; on Kubernetes cut it off on the node.",
            )
        near = flags.nearest(name, [*known, "no_wait"] if "wait" in known else list(known))
    else:
        name, value = argument[1:2], argument[2:]
        if name in shorts and not (value and isinstance(known[shorts[name]][1], bool)):
            return shorts[name], bool(value), value.removeprefix("=")
        near = ""
    raise FlagError(
        f"Unknown flag {argument.partition('=')[0]} of `elasticdl {command}`.",
        f"Did you mean --{near}?" if near else f"`elasticdl {command} --help` lists its flags.",
    )


def _check_jobs(command: str, options: Options) -> None:
    usage = f"Usage: {usage_of(command)}"
    if command not in (*WITH_JOB, *MAY_HAVE_JOB) and options.jobs:
        raise FlagError(f"`elasticdl {command}` takes no job's name, and here is '{options.jobs[0]}'.", usage)
    if command in WITH_JOB and not options.jobs and not (command == "resume" and is_remote(options.job_dir)):
        raise FlagError(f"`elasticdl {command}` needs the name of a job.", f"{usage}; `elasticdl list` shows all jobs.")
    if command != "delete" and len(options.jobs) > 1:
        raise FlagError(f"`elasticdl {command}` takes one job, and here are {' and '.join(options.jobs)}.", usage)
    for job in options.jobs:
        if check_job_name(job):
            raise FlagError(f"'{job}' {check_job_name(job)}.", "`elasticdl list` shows all jobs.")


def _check_values(command: str, options: Options) -> None:
    runtimes = [runtime.value for runtime in Runtime]
    if options.runtime and options.runtime not in runtimes:
        raise FlagError(f"--runtime is one of {', '.join(runtimes)}, not '{options.runtime}'.", "Choose one of these.")
    if not 0 <= options.port <= 65535:
        raise FlagError(f"--port={options.port} is not a port.", "Give one between 1 and 65535, or leave it out.")
    if options.output and options.output not in FORMATS[command]:
        raise FlagError(
            f"--output is one of {', '.join(FORMATS[command])}, not '{options.output}'.", "Choose one of these."
        )
    if command == "list" and options.watch and options.output in ("name", "yaml"):
        raise FlagError(f"--output={options.output} does not go with --watch.", "--output=json and wide do.")
    if options.runtime == Runtime.LOCAL and (options.namespace or options.all_namespaces):
        raise FlagError("Local jobs have no namespace.", "Leave out --namespace, or --runtime=local.")
    if options.runtime == Runtime.LOCAL and options.context:
        raise FlagError("Local jobs are in no cluster.", "Leave out --context, or --runtime=local.")
    if is_remote(options.job_dir):
        _check_stored(command, options)
    elif options.envs or options.cluster_spec:
        name = "envs" if options.envs else "cluster_spec"
        raise FlagError(
            f"--{name} is for a job with its --job_dir in storage.", "Leave it out, or give that --job_dir."
        )
    elif options.job_dir and (options.runtime == Runtime.KUBERNETES or options.namespace or options.all_namespaces):
        raise FlagError("--job_dir is the directory of a local job.", "Leave it out for jobs of a cluster.")
    if options.namespace and options.all_namespaces:
        raise FlagError("--namespace and --all_namespaces exclude each other.", "Give one of them.")
    if options.epoch < 0:
        raise FlagError(f"--epoch={options.epoch} is not an epoch.", "Epochs are counted from 1; 0: all of them.")
    if options.why_pending and options.why_slow:
        raise FlagError("--why_pending and --why_slow exclude each other.", "Give one of them.")
    _check_whose(options)
    _check_numbers(command, options)
    if command == "chaos":
        _check_chaos(options)
    if options.since and seconds_of(options.since) is None:
        raise FlagError(f"--since={options.since} is not a duration.", "For example 30s, 5m or 1h30m.")
    if options.previous and options.follow:
        raise FlagError("--previous is of runs that have ended: there is nothing to follow.", "Leave out one of them.")


def _check_stored(command: str, options: Options) -> None:
    if command != "resume":
        raise FlagError(
            f"--job_dir={options.job_dir} is a directory in storage, which only `elasticdl resume` takes.",
            f"`elasticdl {command} JOB` finds the job where it runs.",
        )
    if wrong := check_writable_directory(options.job_dir):
        raise FlagError(f"--job_dir={hide(options.job_dir)}: {wrong}.")


def _check_numbers(command: str, options: Options) -> None:
    if command == "scale" and not options.num_workers:
        raise FlagError("`elasticdl scale` needs --num_workers.", f"Usage: {usage_of(command)}")
    current = options.current_num_workers
    if current and not (current.isascii() and current.isdecimal()):
        raise FlagError(f"--current_num_workers={current} is not a number of workers.", "Give 0 or more.")


def _check_chaos(options: Options) -> None:
    if not (options.kill or options.stop or options.fill_disk):
        raise FlagError(
            "`elasticdl chaos` needs a fault.", "For example --kill=worker, or --kill=worker,ps --stop=worker."
        )
    for name in ("kill", "stop"):
        for role in filter(None, getattr(options, name).split(",")):
            if role not in _ROLES:
                raise FlagError(f"--{name}={role}: there is no such role.", f"The roles are {', '.join(_ROLES)}.")
    for name, text in (("every", options.every), ("for", options.for_), ("stop_for", options.stop_for)):
        if seconds_of(text) is None:
            raise FlagError(f"--{name}={text} is not a duration.", "For example 30s, 5m or 1h30m.")


def _check_whose(options: Options) -> None:
    given = [name for name in ("role", "pod", "all") if getattr(options, name)]
    if len(given) > 1:
        raise FlagError(f"--{given[0]} and --{given[1]} exclude each other.", "Give one of them.")
    if options.role and not re.fullmatch(r"master|(worker|ps)(-[0-9]+)?", options.role):
        raise FlagError(
            f"--role={options.role} is not a pod of a job.", "For example master, worker, worker-0 or ps-1."
        )
    if options.pod and not re.fullmatch(r"master|(worker|ps)-[0-9]+", role_of(options)):
        raise FlagError(f"--pod={options.pod} is not a pod of job {options.jobs[0]}.", "For example worker-0 or ps-1.")


def role_of(options: Options) -> str:
    """Return the role whose logs are requested: master, worker-0, ps, …; empty: all pods."""
    if options.pod:
        return options.pod.removeprefix(f"elasticdl-{options.jobs[0]}-")
    return "" if options.all else options.role or "master"


def seconds_of(text: str) -> float | None:
    """Parse a duration as kubectl writes it, 1h30m or 45s, or a number of seconds; return None if it is neither."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not text or parts is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    total = 3600.0 * hours + 60.0 * minutes + seconds
    return total or None


def usage_of(command: str) -> str:
    """Return the usage line of a command."""
    jobs = {"delete": " JOB…", "dashboard": " [JOB]"}.get(command, " JOB" if command in WITH_JOB else "")
    needed = {"scale": " --num_workers=N", "chaos": " --kill=ROLE"}.get(command, "")
    return f"elasticdl {command}{jobs}{needed} [--flag=value …]"
