"""Flags: their metadata, and the conversion of text to values.

Owns the metadata of a flag, the coercion of strings and the checks of single values.  Which flags exist is said in
job_spec.py, and how they fit together in contradictions.py; of names it knows only retired ones.

`resolve_retired`: older spellings of flags, and flags of the original that have no place any more.

An older spelling is taken as the new one.  A retired flag with the value that is always true now is dropped with a
note; with any other value it is refused with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

from elasticdl_client.choices import JobType
from elasticdl_client.errors import FlagError
from elasticdl_client.secret_values import hide, hide_in_flag

T = TypeVar("T")
Check = Callable[[Any], str]
"""Given a value, says what is wrong with it, or raises a FlagError with a hint; an empty string: nothing is wrong."""

_NEAR = 0.75  # at 0.6, difflib's own, `scale` would be taken for `clean`, which deletes jobs
_SHORTEST = 3  # letters
_TRUE = frozenset({"true", "yes", "t", "y", "1"})
_FALSE = frozenset({"false", "no", "f", "n", "0"})


ALL_JOBS = frozenset(JobType)
WITH_MODEL = ALL_JOBS - {JobType.ANALYZE}
TRAIN_ONLY = frozenset({JobType.TRAIN})


class Group(StrEnum):
    """The headings of `--help`, in their order."""

    JOB = "The job"
    MODEL = "The model (symbols of the module that --model_def names)"
    DATA = "Data"
    TRAINING = "Training"
    CHECKPOINTS = "Checkpoints and output"
    PARAMETER_SERVER = "Parameter servers"
    ALL_REDUCE = "AllReduce"
    FAULTS = "Faults"
    LOCAL = "Local runtime (--runtime=local)"
    KUBERNETES = "Kubernetes (--runtime=kubernetes)"

    def flag(self, default: T, help: str, *, jobs: frozenset[JobType] | None = None, check: Check | None = None) -> T:
        """Return a dataclass field that is a flag of this group.

        Args:
            jobs: Job types with this flag; None: those with the flags of its group.
        """
        found = Flag(help, self, _JOBS.get(self, ALL_JOBS) if jobs is None else jobs, check)
        value: T = dataclasses.field(default=default, metadata={"flag": found})
        return value


_JOBS = {
    Group.MODEL: WITH_MODEL,
    **dict.fromkeys((Group.TRAINING, Group.PARAMETER_SERVER, Group.ALL_REDUCE), TRAIN_ONLY),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """The metadata of a flag, under the key ``flag`` of its dataclass field; type and default are the field's own."""

    help: str
    group: Group
    jobs: frozenset[JobType]
    check: Check | None


def flag_of(field: dataclasses.Field[Any]) -> Flag | None:
    """Return the metadata of a field; None if it is not a flag."""
    found = field.metadata.get("flag")
    return found if isinstance(found, Flag) else None


def names_of(kind: type, group: Group) -> tuple[str, ...]:
    """Return the names of the flags of a group, among the fields of a dataclass."""
    found = {field.name: flag_of(field) for field in dataclasses.fields(kind)}
    return tuple(name for name, flag in found.items() if flag is not None and flag.group is group)


def given_of(flags: Any, names: Iterable[str]) -> list[str]:
    """Return those of the names whose flags do not have their defaults.

    Args:
        flags: An instance of the dataclass whose fields are the flags.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    return [name for name in names if getattr(flags, name) != defaults[name]]


def parse(name: str, value: object, default: T) -> T:
    """The value of flag `name`, of its default's type; `value` is text, or already of a type whose text is right.

    Raises:
        FlagError: the text does not say such a value.
    """
    text = value if isinstance(value, str) else str(value)
    kind = type(default)
    parsed: Any
    if kind is bool:
        parsed = _parse_bool(name, text)
    elif kind is int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
            raise FlagError(f"--{name} takes a whole number, not '{text}'.", f"For example --{name}={default}.")
        parsed = int(text)
    elif kind is float:
        parsed = _parse_float(name, text, default)
    elif issubclass(kind, StrEnum):
        parsed = _parse_choice(name, text, kind)
    else:
        parsed = text
    return parsed  # type: ignore[no-any-return]


def _parse_bool(name: str, text: str) -> bool:
    if text.strip().lower() in _TRUE:
        return True
    if text.strip().lower() in _FALSE:
        return False
    raise FlagError(f"--{name} takes true or false, not '{text}'.", f"Write --{name} or --{name}=false.")


def is_bool_word(text: str) -> bool:
    """Return whether `text` can be the value of a boolean flag."""
    return text.strip().lower() in _TRUE | _FALSE


def _parse_float(name: str, text: str, default: object) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise FlagError(f"--{name} takes a number, not '{text}'.", f"For example --{name}={default}.")
    return number


def _parse_choice(name: str, text: str, choices: type[StrEnum]) -> StrEnum:
    wanted = text.strip().lower()
    for choice in choices:
        if choice.value.lower() == wanted:
            return choice
    listed = ", ".join(choice.value for choice in choices)
    near = nearest(text, [choice.value for choice in choices])
    raise FlagError(
        f"--{name} is one of {listed}, not '{text}'.",
        f"Did you mean --{name}={near}?" if near else "Choose one of these.",
    )


def check(name: str, value: object, default: object, found: Flag) -> None:
    """Check a value that differs from its default.

    Raises:
        FlagError: with the complaint of the flag's check.
    """
    if found.check is None or value == default:
        return
    hint = found.help
    try:
        complaint = found.check(value)
    except FlagError as error:
        complaint, hint = error.what.removeprefix(f"--{name}: "), error.hint or hint
    if complaint:
        raise FlagError(f"--{name}={hide_in_flag(name, value)}: {complaint.rstrip('.')}.", hint)


def parses(parse: Callable[[str], object]) -> Check:
    """A check: `parse` takes the value, or raises a FlagError that says what is wrong and what to write."""

    def check_value(value: str) -> str:
        parse(value)
        return ""

    return check_value


def nearest(name: str, known: list[str]) -> str:
    """Return the known name that `name` misspells, abbreviates or extends; empty if there is none."""
    wanted, folded = name.lower(), {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(wanted, list(folded), n=1, cutoff=_NEAR)
    if len(wanted) >= _SHORTEST:
        matches += [known for known in folded if known.startswith(wanted) or wanted.startswith(known)]
    return folded[matches[0]] if matches else ""


def split_arguments(arguments: list[str], defaults: Mapping[str, object]) -> dict[str, str]:
    """``--name value``, ``--name=value`` and bare booleans to a mapping of text, nothing coerced.

    A boolean takes the next argument only if that is a boolean word.  Dashes inside a name count as underscores.

    Args:
        arguments: after the command.
        defaults: Default values of the known flags; only their types matter here.

    Raises:
        FlagError: a stray argument, a flag without its value, or given twice.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise FlagError(f"'{hide(argument)}' is not a flag.", "Flags are written --name=value; see --help.")
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name in found:
            raise FlagError(f"--{name} is given twice.", "Give it once.")
        if not equals:
            value = _next_value(name, rest, defaults)
        found[name] = value
    return found


def _next_value(name: str, rest: list[str], defaults: Mapping[str, object]) -> str:
    if isinstance(defaults.get(name), bool) or (name not in defaults and not rest):
        return rest.pop(0) if rest and is_bool_word(rest[0]) else "true"
    if name not in defaults:
        return "true" if rest[0].startswith("--") else rest.pop(0)
    if not rest or rest[0].startswith("--"):
        raise FlagError(f"--{name} needs a value.", f"Write --{name}=VALUE.")
    return rest.pop(0)


_OLDER_NAMES = {"dataset_fn": "feed", "num_ps": "num_ps_pods"}


@dataclass(frozen=True, slots=True)
class Retired:
    """`always`: the value, in lower case, that now always holds."""

    always: str
    reason: str
    hint: str


_RETIRED = {
    "need_elasticdl_job_service": Retired(
        "true", "ElasticDL's own worker is used unless --job_command is given", "Leave it out, or give --job_command."
    ),
    "need_task_manager": Retired("true", "the master always hands out tasks", "Leave it out."),
    "need_pod_manager": Retired("true", "the master always manages the job's pods", "Leave it out."),
    "task_fault_tolerance": Retired("true", "tasks of lost workers are always handed on", "Leave it out."),
    "relaunch_timeout_worker": Retired(
        "true", "a worker that makes no progress is always replaced", "Use --lease_timeout and --step_timeout."
    ),
    "relaunch_on_worker_failure": Retired(
        "", "a worker that fails is replaced until --max_task_failures in a row", "Use --max_task_failures."
    ),
    "aux_params": Retired("", "it could only turn off the replacement of lost pods", "Leave it out."),
    "extra_pypi_index": Retired("", "it had no effect on a job", "Leave it out; it belongs to building an image."),
    "use_go_ps": Retired("", "there is one parameter server", "Leave it out."),
}


def resolve_retired(mapping: Mapping[str, object]) -> dict[str, object]:
    """Return the flags under their current names, without those whose value is always true now.

    Raises:
        FlagError: a retired flag that asks for something else, or a flag under both of its names.
    """
    given: dict[str, object] = {}
    for name, value in mapping.items():
        if name in _RETIRED:
            retired = _RETIRED[name]
            if str(value).strip().lower() != retired.always:
                raise FlagError(f"--{name}={value}: this flag is gone, {retired.reason}.", retired.hint)
            continue
        present = _OLDER_NAMES.get(name, name)
        if present in given or (present != name and present in mapping):
            older = next(old for old, new in _OLDER_NAMES.items() if new == present)
            raise FlagError(f"--{older} is the older name of --{present}; both are given.", f"Give --{present} alone.")
        given[present] = value
    return given


def notes_on_retired(mapping: Mapping[str, object]) -> list[str]:
    """Return the notes on flags that `resolve_retired` drops."""
    return [f"--{name} is not needed any more: {_RETIRED[name].reason}." for name in mapping if name in _RETIRED]
