"""`elasticdl completion`: prints the script by which a shell completes commands, flags, their values and jobs.

The script calls `elasticdl completion jobs WORD…` for the names of jobs: `print_jobs`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum

from elasticdl_client import run_script
from elasticdl_client.checks import check_job_name
from elasticdl_client.choices import Runtime
from elasticdl_client.errors import ElasticDLError, FlagError
from elasticdl_client.help import COMMANDS, JOBS
from elasticdl_client.job_spec import RUN, flag_fields
from elasticdl_client.jobs.options import FORMATS, MAY_HAVE_JOB, WITH_JOB, options_of, parse
from elasticdl_client.jobs.stores import JobStores
from elasticdl_client.kubernetes.rbac import FLAGS as RBAC_FLAGS
from elasticdl_client.simulate import FLAGS as SIMULATE_FLAGS
from elasticdl_client.sql.arguments import BOOLEAN as SQL_BOOLEAN
from elasticdl_client.sql.arguments import FLAGS as SQL_FLAGS
from elasticdl_client.zoo.arguments import COMMANDS as ZOO_COMMANDS

SHELLS = ("bash", "zsh", "fish")
USAGE = "elasticdl completion bash|zsh|fish"
JOBS_OF = "jobs"  # instead of a shell: for the scripts
MOST_S = 0.8  # for the names of jobs; with the start of Python about a second, for which a shell can be held up
_WHERE = ("namespace", "context", "runtime", "job_dir")
_BOOLEAN = ("true", "false")
Flags = dict[str, tuple[str, ...]]
"""Values by flag; none: a value of one's own, or a path."""

_BASH = """\
_elasticdl_jobs() {
    elasticdl completion jobs "$@" < /dev/null 2> /dev/null | while read -r name; do echo "$name "; done
}
_elasticdl() {
    local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flag="" prefix="" words=""
    COMPREPLY=()
    case "$word" in
        =) flag="$before"; word="" ;;
        --*=*) flag="${word%%=*}"; prefix="$flag="; word="${word#*=}" ;;
        --*) ;;
        *) case "$before" in
            =) flag="${COMP_WORDS[COMP_CWORD-2]}" ;;
            --*=*) ;;
            --*) flag="$before" ;;
        esac ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words=$'@COMMANDS@'
    else
        case "${COMP_WORDS[1]} $flag" in
@VALUES@
        esac
        [ "$words" = $'@BOOLEAN@' ] && [ -z "${COMP_WORDS[COMP_CWORD]}" ] && [ "$before" = "$flag" ] && flag=""
    fi
    if [ "$COMP_CWORD" -ne 1 ] && [ -z "$flag" ]; then
        case "${COMP_WORDS[1]}" in
@FLAGS@
        esac
        case "${COMP_WORDS[1]} $word" in
            *' -'*) ;;
            @JOBS@) words+=$'\\n'"$(_elasticdl_jobs "${COMP_WORDS[@]:1}")" ;;
        esac
    fi
    COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$word"))
}
complete -o default -o nospace -F _elasticdl elasticdl
"""
_FISH_JOBS = "elasticdl completion jobs (commandline -opc) < /dev/null 2> /dev/null"
_ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def run(arguments: Sequence[str]) -> int:
    """Print the script for a shell; return the exit code.

    Raises:
        FlagError: not one of the shells.
    """
    if arguments[:1] and arguments[0] == JOBS_OF:
        return print_jobs(arguments[1:])
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        given = " ".join(arguments)
        raise FlagError(f"`elasticdl completion` takes one shell, not '{given}'.", f"Write {USAGE}.")
    shell = arguments[0]
    print(_fish() if shell == "fish" else (_ZSH if shell == "zsh" else "") + _bash(), end="")
    return 0


def print_jobs(words: Sequence[str], most_s: float = MOST_S) -> int:
    """Print the names of jobs, one per line, local ones first; return the exit code: 0, even if no store answers.

    Args:
        words: of the command line so far, as a shell splits them; of its flags those count that say where jobs are.
        most_s: after it the process ends, with the names that are printed by then.
    """
    deadline = threading.Timer(most_s, os._exit, (0,))
    deadline.daemon = True
    deadline.start()
    given = _where(words)
    names = set[str]()
    for runtime in (Runtime.LOCAL, Runtime.KUBERNETES):
        if given.get("runtime", runtime) != runtime or (runtime is Runtime.LOCAL and "namespace" in given):
            continue
        with suppress(ElasticDLError):  # nothing is offered then, and the command itself will say why
            options = parse(
                "list",
                [f"--{name}={value}" for name, value in (given | {"runtime": runtime.value}).items()],
                os.environ,
            )
            found = {job.name for job in JobStores.of(options).list()}
            new = sorted(name for name in found - names if not check_job_name(name))  # a shell may expand others
            sys.stdout.write("".join(f"{name}\n" for name in new))
            sys.stdout.flush()
            names |= found
    deadline.cancel()
    return 0


def _where(words: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line that say where jobs are; bash splits words at equals signs."""
    found, rest = dict[str, str](), "\n".join(words).replace("\n=\n", "=").split("\n")
    for word, following in zip(rest, [*rest[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        name = "namespace" if flag == "-n" else flag.removeprefix("--")
        if flag.startswith("-") and name in _WHERE and (value or following):
            found[name] = value if equals else following
    return found


def flags_of(command: str) -> Flags:
    """Return the flags of a command, with the values that they may have."""
    if command in JOBS:
        options = dict.fromkeys(run_script.OPTIONS, _BOOLEAN) if command == RUN else {}
        return options | {name: _values(field.default) for name, field in flag_fields(command).items()}
    if command in FORMATS:
        found = {name: _values(default) for name, (_, default) in options_of(command).items()}
        if "output" in found:
            found["output"] = FORMATS[command]
        return found
    if command == "simulate":
        return {name: () for name in SIMULATE_FLAGS if len(name) > 1} | flags_of("train")
    if command == "sql":
        own = {name: _BOOLEAN if name in SQL_BOOLEAN else () for name in SQL_FLAGS if len(name) > 1}
        return own | flags_of("train")
    if command == "rbac":
        return {name: _BOOLEAN if name == "print" else () for name in RBAC_FLAGS}
    if command == "zoo":
        return {name: _values(flag.default) for zoo in ZOO_COMMANDS.values() for name, flag in zoo.flags.items()}
    return {}


def _values(default: object) -> tuple[str, ...]:
    if isinstance(default, bool):
        return _BOOLEAN
    return tuple(choice.value for choice in type(default)) if isinstance(default, StrEnum) else ()


def _words(command: str) -> tuple[str, ...]:
    """Return the words without a dash that may follow a command."""
    return {"zoo": tuple(ZOO_COMMANDS), "completion": SHELLS}.get(command, ())


def _bash() -> str:
    """Return the bash script: it ends a complete word with a space, and a flag that takes a value with `=`."""
    flags, values = [], []
    for command in COMMANDS:
        of_command = flags_of(command)
        words = [f"{word} " for word in _words(command)]
        words += [f"--{name}{' ' if known == _BOOLEAN else '='}" for name, known in of_command.items()]
        flags.append(f"            {command}) words+=$'\\n{_lines(words)}' ;;")
        values += [
            f"            '{command} --{name}') words=$'{_lines([f'{value} ' for value in known])}' ;;"
            for name, known in of_command.items()
            if known
        ]
    script = _BASH.replace("@COMMANDS@", _lines([f"{command} " for command in COMMANDS]))
    script = script.replace("@BOOLEAN@", _lines([f"{value} " for value in _BOOLEAN]))
    script = script.replace("@JOBS@", " | ".join(f"'{command} '*" for command in (*WITH_JOB, *MAY_HAVE_JOB)))
    return script.replace("@VALUES@", "\n".join(values)).replace("@FLAGS@", "\n".join(flags))


def _lines(words: Sequence[str]) -> str:
    return "\\n".join(words)


def _fish() -> str:
    lines = []
    for command, summary in COMMANDS.items():
        lines.append(f"complete -c elasticdl -f -n __fish_use_subcommand -a {command} -d {_quoted(summary)}")
        condition = f"-n '__fish_seen_subcommand_from {command}'"
        lines += [f"complete -c elasticdl -f {condition} -a {word}" for word in _words(command)]
        if command in (*WITH_JOB, *MAY_HAVE_JOB):
            lines.append(f"complete -c elasticdl -f {condition} -a '({_FISH_JOBS})'")
        for name, known in flags_of(command).items():
            wanted = "" if known == _BOOLEAN else f" -x -a '{' '.join(known)}'" if known else " -r"
            lines.append(f"complete -c elasticdl {condition} -l {name}{wanted}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
