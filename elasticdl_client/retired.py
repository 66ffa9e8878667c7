"""Older spellings of flags, and flags of the original that have no place any more.

An older spelling is taken as the new one.  A retired flag with the value that is always true now is dropped with a
note; with any other value it is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl_client.errors import FlagError

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


def resolve(mapping: Mapping[str, object]) -> dict[str, object]:
    """The flags under their present names, without those that say what always holds.

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


def notes(mapping: Mapping[str, object]) -> list[str]:
    """Return the notes on flags that `resolve` drops."""
    return [f"--{name} is not needed any more: {_RETIRED[name].reason}." for name in mapping if name in _RETIRED]
