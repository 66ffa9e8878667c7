"""What `--help` prints: commands, and each command's flags by group with their defaults."""

from __future__ import annotations

import textwrap
from enum import StrEnum

from elasticdl_client.flags import Group, flag_of
from elasticdl_client.job_spec import flag_fields

COMMANDS = {
    "train": "train a model, evaluating it on the way",
    "evaluate": "evaluate a trained model",
    "predict": "run a trained model over data",
}
_USAGE = {
    "train": "--job_name=NAME --model_def=PACKAGE.MODULE.SYMBOL --training_data=PATH",
    "evaluate": "--job_name=NAME --model_def=MODULE.SYMBOL --validation_data=PATH --checkpoint_dir_for_init=PATH",
    "predict": "--job_name=NAME --model_def=MODULE.SYMBOL --prediction_data=PATH --checkpoint_dir_for_init=PATH",
}
_INDENT = 30


def overview() -> str:
    """The help of `elasticdl` itself."""
    lines = ["ElasticDL trains deep-learning models with as many workers as can be had at the moment.", ""]
    lines += ["Usage: elasticdl COMMAND --flag=value …", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    lines += ["", "`elasticdl COMMAND --help` lists a command's flags. To try it on this machine:", ""]
    lines += ["  elasticdl train --runtime=local --job_name=digits --model_zoo=model_zoo \\"]
    lines += ["      --model_def=digits.digits_functional.custom_model --training_data=data/digits/train"]
    return "\n".join(lines)


def of_command(command: str, width: int) -> str:
    """The help of a command, lines at most `width` wide."""
    lines = [f"elasticdl {command}: {COMMANDS[command]}.", ""]
    lines += textwrap.wrap(f"Usage: elasticdl {command} {_USAGE[command]} …", width, subsequent_indent="    ")
    lines += [
        "",
        "--flag=value and --flag value are the same; a boolean flag alone means true. [Defaults in brackets.]",
    ]
    for group in Group:
        flags = _of_group(command, group, max(width, _INDENT + 20))
        if flags:
            lines += ["", f"{group}:", *flags]
    return "\n".join(lines)


def _of_group(command: str, group: Group, width: int) -> list[str]:
    lines: list[str] = []
    for name, field in flag_fields(command).items():
        flag = flag_of(field)
        if flag is None or flag.group is not group:
            continue
        text = textwrap.wrap(
            f"{flag.help}{_default(field.default)}",
            width,
            initial_indent=" " * _INDENT,
            subsequent_indent=" " * _INDENT,
            break_on_hyphens=False,
        )
        head = f"  --{name}"
        if len(head) < _INDENT - 1:
            text[0] = head.ljust(_INDENT) + text[0].lstrip()
            lines += text
        else:
            lines += [head, *text]
    return lines


def _default(value: object) -> str:
    if value == "" or value is None:
        return ""
    if isinstance(value, bool):
        return f" [{str(value).lower()}]"
    return f" [{value.value if isinstance(value, StrEnum) else value}]"
