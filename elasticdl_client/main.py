"""The command `elasticdl`: arguments to a `JobSpec`, and the job it describes.

Fire chooses the command and nothing more; it never sees a flag, so none of its guesses about values can damage one.
Errors of the user are printed as what and hint, with exit code 2; bugs keep their traceback.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from elasticdl_client import help as help_text
from elasticdl_client import retired, support
from elasticdl_client.choices import JobType
from elasticdl_client.errors import ElasticDLError, FlagError
from elasticdl_client.flags import nearest, split_arguments
from elasticdl_client.job_spec import JobSpec, flag_defaults

USAGE_ERROR = 2


@dataclass(frozen=True, slots=True)
class Commands:
    """What Fire shows as commands; `arguments` are those after the command, untouched."""

    arguments: tuple[str, ...]

    def train(self) -> NoReturn:
        """Trains a model, evaluating it on the way."""
        self._run(JobType.TRAIN)

    def evaluate(self) -> NoReturn:
        """Evaluates a trained model."""
        self._run(JobType.EVALUATE)

    def predict(self) -> NoReturn:
        """Runs a trained model over data."""
        self._run(JobType.PREDICT)

    def _run(self, job_type: JobType) -> NoReturn:
        if _asks_for_help(self.arguments):
            print(help_text.of_command(job_type, min(shutil.get_terminal_size((110, 24)).columns, 120)))
            sys.exit(0)
        flags = split_arguments(list(self.arguments), flag_defaults(job_type))
        spec = JobSpec.from_flags(job_type, flags)
        support.check(spec)
        for note in [*retired.notes(flags), *support.notes(spec)]:
            print(f"note: {note}", file=sys.stderr)
        from elasticdl_client import local

        sys.exit(local.run(spec))


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument in ("--help", "-h", "--help=true") for argument in arguments)


def run(arguments: Sequence[str]) -> NoReturn:
    """Runs a command line, without the program's name, and exits.

    Raises:
        ElasticDLError: a mistake of the user's.
    """
    if not arguments:
        print(help_text.overview(), file=sys.stderr)
        sys.exit(1)
    command = arguments[0]
    if command in ("help", "--help", "-h"):
        print(help_text.overview())
        sys.exit(0)
    if command not in help_text.COMMANDS:
        near = nearest(command, list(help_text.COMMANDS))
        known = ", ".join(help_text.COMMANDS)
        raise FlagError(
            f"There is no command '{command}'.",
            f"Did you mean `elasticdl {near}`?" if near else f"The commands are {known}; see `elasticdl --help`.",
        )
    import fire

    fire.Fire(Commands(tuple(arguments[1:])), command=[command], name="elasticdl")
    raise AssertionError(f"command {command} returned")


def main() -> None:
    """The console script."""
    exit_with(lambda: run(sys.argv[1:]))


def exit_with(action: Callable[[], NoReturn]) -> NoReturn:
    """Does something that exits; a mistake of the user's is printed and exits with 2."""
    try:
        action()
    except ElasticDLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
