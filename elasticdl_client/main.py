"""The command `elasticdl`: arguments to a `JobSpec`, and the job it describes; later commands, and images.

Fire chooses the command and nothing more; it never sees a flag, so none of its guesses about values can damage one.
Errors of the user are printed as what and hint, with exit code 2 if the command line or the job is wrong and 1 if
a later command fails; bugs keep their traceback.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from elasticdl_client import flag_sources, progress
from elasticdl_client import help as help_text
from elasticdl_client.choices import JobType, Runtime
from elasticdl_client.errors import ElasticDLError, FlagError
from elasticdl_client.flag_sources import GivenFlags, gather
from elasticdl_client.flags import nearest
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.script_output import Shown

FAILURE = 1
USAGE_ERROR = 2


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands that Fire shows; `arguments` are those after the command, untouched."""

    arguments: tuple[str, ...]

    def train(self) -> NoReturn:
        """Train a model, and evaluate it in between."""
        self._run(JobType.TRAIN)

    def run(self) -> NoReturn:
        """Run a script of the user in all workers."""
        from elasticdl_client import run_script

        if run_script.asks_for_help(self.arguments):
            print_help("run")
        job = run_script.read(self.arguments, os.environ)
        _start(JobType.TRAIN, job.given, Shown.ALL_WORKERS if job.shows_all else Shown.RANK_0)

    def evaluate(self) -> NoReturn:
        """Evaluate a trained model."""
        self._run(JobType.EVALUATE)

    def predict(self) -> NoReturn:
        """Compute predictions of a trained model."""
        self._run(JobType.PREDICT)

    def analyze(self) -> NoReturn:
        """Compute statistics of a table's columns."""
        self._run(JobType.ANALYZE)

    def sql(self) -> NoReturn:
        """Train and use models by SQL statements."""
        from elasticdl_client.sql import command

        self._print("sql", lambda: command.run(self.arguments))

    def zoo(self) -> NoReturn:
        """Build an image of a folder of models, and push it."""
        from elasticdl_client import zoo

        sys.exit(zoo.run(self.arguments))

    def rbac(self) -> NoReturn:
        """Print the service account and the rights that a master needs."""
        from elasticdl_client.kubernetes import rbac

        self._print("rbac", lambda: rbac.run(self.arguments))

    def simulate(self) -> NoReturn:
        """Estimate how long a job would take on a cluster, and its cost."""
        from elasticdl_client import simulate

        self._print("simulate", lambda: simulate.run(self.arguments))

    def completion(self) -> NoReturn:
        """Print a shell's completion script."""
        from elasticdl_client import completion

        self._print("completion", lambda: completion.run(self.arguments))

    def list(self) -> NoReturn:
        """List jobs."""
        self._act("list")

    def top(self) -> NoReturn:
        """Show the current state of all jobs and their pods."""
        self._act("top")

    def status(self) -> NoReturn:
        """Show a job."""
        self._act("status")

    def logs(self) -> NoReturn:
        """Print the logs of a job's pods."""
        self._act("logs")

    def events(self) -> NoReturn:
        """List the events of a job."""
        self._act("events")

    def explain(self) -> NoReturn:
        """Explain the problems of a job."""
        self._act("explain")

    def scale(self) -> NoReturn:
        """Change the number of a job's workers."""
        self._act("scale")

    def chaos(self) -> NoReturn:
        """Inject faults into a running job."""
        self._act("chaos")

    def delete(self) -> NoReturn:
        """End and remove jobs."""
        self._act("delete")

    def clean(self) -> NoReturn:
        """Remove the jobs that have ended."""
        self._act("clean")

    def stop(self) -> NoReturn:
        """End the pods of a job so that it can continue later."""
        self._act("stop")

    def resume(self) -> NoReturn:
        """Start a new master for a job that has none."""
        self._act("resume")

    def tensorboard(self) -> NoReturn:
        """Show a job in TensorBoard."""
        self._act("tensorboard")

    def dashboard(self) -> NoReturn:
        """Show jobs on a page in the browser."""
        self._act("dashboard")

    def _run(self, job_type: JobType) -> NoReturn:
        if _asks_for_help(self.arguments):
            print_help(job_type)
        given = gather(job_type, self.arguments, os.environ)
        try:
            inferred = flag_sources.infer(job_type, given)
        except FlagError as error:
            raise given.located(error) from None
        _start(job_type, inferred, Shown.GLANCE)

    def _act(self, command: str) -> NoReturn:
        from elasticdl_client.jobs import commands

        self._print(command, lambda: commands.run(command, self.arguments))

    def _print(self, command: str, action: Callable[[], int]) -> NoReturn:
        """Run an action that prints, and exit."""
        if _asks_for_help(self.arguments):
            print_help(command)
        try:
            code = action()
            sys.stdout.flush()
        except FlagError:
            raise
        except ElasticDLError as error:
            _print_error(error)
            code = FAILURE
        sys.exit(code)


def _start(job_type: JobType, given: GivenFlags, shown: Shown) -> NoReturn:
    """Run or submit the job that flags describe, and exit."""
    try:
        spec = JobSpec.from_flags(job_type, given.values)
    except FlagError as error:
        raise given.located(error) from None
    flag_sources.check(spec)
    for note in [*given.notes, *flag_sources.notes(spec)]:
        print(f"note: {note}", file=sys.stderr)
    if spec.runtime is Runtime.KUBERNETES:
        from elasticdl_client.kubernetes import submit

        sys.exit(submit.run(spec, shown=shown))
    from elasticdl_client import local

    sys.exit(local.run(spec, shown=shown))


def print_help(command: str = "") -> NoReturn:
    """Print the help of a command, or of all, and exit."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    print(help_text.of_command(command, width) if command else help_text.overview(), flush=True)
    sys.exit(0)


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument in ("--help", "-h", "--help=true") for argument in arguments)


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command line, without the program's name, and exit.

    Raises:
        ElasticDLError: a mistake of the user's.
    """
    if not arguments:
        print(help_text.overview(), file=sys.stderr)
        sys.exit(1)
    command = arguments[0]
    if command in ("version", "--version"):
        from elasticdl_client.version import VERSION

        print(f"elasticdl {VERSION}")
        sys.exit(0)
    if command in ("help", "--help", "-h"):
        if arguments[1:] and arguments[1] in help_text.COMMANDS and arguments[1] != "zoo":
            print_help(arguments[1])
        print_help()
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


def _print_error(error: ElasticDLError) -> None:
    print(f"{progress.paint('error:', progress.Color.RED, sys.stderr)} {error}", file=sys.stderr)


def main() -> None:
    """Run the console script `elasticdl`."""
    exit_with(lambda: run(sys.argv[1:]))


def exit_with(action: Callable[[], NoReturn]) -> NoReturn:
    """Run an action that exits; exit with 2 after an error of the user, and quietly if the reader of the output ends.

    Ctrl-C exits with 130 and prints nothing; an action that has more to do on Ctrl-C handles it itself.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow or a user's text that the locale lacks must end no job
    try:
        action()
    except ElasticDLError as error:
        _print_error(error)
        sys.exit(USAGE_ERROR)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
