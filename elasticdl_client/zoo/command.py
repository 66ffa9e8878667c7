"""Runs `elasticdl zoo`: reads its arguments, calls what does the work, says what came of it and what comes next."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elasticdl_client import flags
from elasticdl_client.errors import FlagError, ImageError
from elasticdl_client.version import RUNTIME, VERSION
from elasticdl_client.zoo import arguments as command_line
from elasticdl_client.zoo import folder
from elasticdl_client.zoo.arguments import COMMANDS, Arguments, ImageFramework
from elasticdl_client.zoo.display import size_text

_HELP = ("--help", "-h", "--help=true")
_FAILED = 1
_INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run a zoo command.

    Args:
        arguments: Arguments after `elasticdl zoo`.

    Returns:
        The exit code: 0 if it is done, 1 if engine, builder, registry or disk refused, which is said on stderr.

    Raises:
        ElasticDLError: a mistake on the command line.
    """
    if not arguments:
        print(command_line.overview(), file=sys.stderr)
        return _FAILED
    name, rest = arguments[0], arguments[1:]
    if name in ("help", *_HELP):
        print(command_line.overview())
        return 0
    if name not in COMMANDS:
        near = flags.nearest(name, list(COMMANDS))
        hint = f"Did you mean `elasticdl zoo {near}`?" if near else f"There are {', '.join(COMMANDS)}."
        raise FlagError(f"There is no command 'zoo {name}'.", hint)
    if any(argument in _HELP for argument in rest):
        print(command_line.help_of(name, min(shutil.get_terminal_size((110, 24)).columns, 120)))
        return 0
    action: Callable[[Arguments], None] = {"init": _init, "build": _build, "push": _push}[name]
    try:
        action(command_line.split(name, rest))
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _init(given: Arguments) -> None:
    wishes = _wishes(given)
    plan = folder.plan(wishes, VERSION)
    folder.write(wishes, plan.files, ask if sys.stdin.isatty() and sys.stderr.isatty() else None)
    origin = f"the wheels in {wishes.local_pkg_dir}" if wishes.local_pkg_dir else "pip's package index"
    print(
        f"wrote {wishes.folder / 'Dockerfile'}: {RUNTIME} {plan.recipe.version} with {wishes.framework} "
        f"from {origin}, on {wishes.base_image}"
    )
    if not wishes.local_pkg_dir and not wishes.extra_pypi_index:
        print("note: if that index has no such version, put the wheels of `make wheels` in: --local_pkg_dir=dist")
    if "@" in wishes.extra_pypi_index:
        print("note: the credentials in --extra_pypi_index stand in the Dockerfile and in the image's history")
    print(f"next: elasticdl zoo build {wishes.folder} --image=[REGISTRY/]NAME[:TAG]")


def _wishes(given: Arguments) -> folder.Wishes:
    named = given.flags.get("model_zoo")
    if given.place and named and Path(given.place).resolve() != Path(named).resolve():
        raise FlagError(f"Two folders are given: {given.place} and --model_zoo={named}.", "Give one.")
    return folder.Wishes(
        folder=Path(given.place or given.text("init", "model_zoo")),
        framework=flags.parse("framework", given.text("init", "framework"), ImageFramework.TENSORFLOW),
        without=given.text("init", "without"),
        base_image=given.text("init", "base_image"),
        local_pkg_dir=given.text("init", "local_pkg_dir"),
        extra_pypi_index=given.text("init", "extra_pypi_index"),
        cluster_spec=given.text("init", "cluster_spec"),
        force=flags.parse("force", given.text("init", "force"), False),
    )


def ask(question: str) -> bool:
    """Ask for confirmation on the terminal; no is the default."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _build(given: Arguments) -> None:
    from elasticdl_client.zoo import build

    image = given.flags.get("image", "")
    if not image:
        raise FlagError("The image needs a name.", f"For example: {COMMANDS['build'].example}")
    repository, tag = command_line.split_image_name(image)
    began_at = time.monotonic()
    built = build.build(Path(given.place), repository, tag, sys.stdout)
    seconds = time.monotonic() - began_at
    identity = built.identity.removeprefix("sha256:")[:12]
    print(f"built {built.name}: {identity}, {size_text(built.size_bytes)}, in {seconds:.1f} s")
    if command_line.registry_of(repository):
        print(f"next: elasticdl zoo push {built.name}")
    print(f"next: elasticdl train --image_name={built.name} --job_name=NAME --model_def=PACKAGE.MODULE.SYMBOL …")


def _push(given: Arguments) -> None:
    from elasticdl_client.zoo import build

    repository, tag = command_line.split_image_name(given.place)
    build.push(repository, tag, sys.stdout)
    print(f"pushed {repository}:{tag}")
    print(f"next: elasticdl train --image_name={repository}:{tag} --job_name=NAME --model_def=PACKAGE.MODULE.SYMBOL …")
