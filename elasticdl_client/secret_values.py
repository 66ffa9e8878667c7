"""Which parts of flags and texts are secret, and how they are hidden: the one place that decides both.

Secret are the values of `--envs`, all of `--on_end` but its host, passwords in URLs, and values whose names say so, in
the query of a URL, in ``name=value;…``, in JSON and on a command line.  `JobSpec.public` and `JobSpec.secrets` apply it
to a whole job.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from elasticdl_client.errors import FlagError
from elasticdl_client.params import parse_envs, split_params

HIDDEN = "***"

_LAST_WORD = (
    r"(?:passw(?:or)?d|passphrase|secret|pwd|token|credentials?|signature"
    r"|(?:api|access|private|account|secret|auth)[_.-]?key)"
)
_SHORT = r"(?:sig|pass|auth)"  # not as a part of a word
_NAME = rf"(?:[\w.-]*{_LAST_WORD}|{_SHORT})"
# No pattern below may begin at each letter of a long word and read it to its end: a line of dots would take minutes.
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
# Up to the last @ before another URL begins: a password may hold an @ of its own.
_URL_PASSWORD = re.compile(r"(://[^\s:/?#@]*:)(?:(?!(?:(?<=[A-Za-z])|(?<=[A-Za-z]\d))://)\S)*@")
_NAMED_VALUE = re.compile(
    rf"((?:{_LAST_WORD}|(?<![A-Za-z0-9]){_SHORT})\s*=\s*)(?:{_QUOTED}|[^&;\s\"']+)", re.IGNORECASE
)
_JSON_VALUE = re.compile(rf"(([\"']){_NAME}\2\s*:\s*)(?:{_QUOTED}|[^,}}\s]+)", re.IGNORECASE)
_ARGUMENT = re.compile(
    rf"((?:(?<![\w.-])(?=[\w.-]*--)[\w.-]*{_LAST_WORD}|--{_SHORT})\s+)(?!--)(?:{_QUOTED}|[^\s\"']+)", re.IGNORECASE
)
_ENV_OF_JSON = re.compile(rf"(\"value\"\s*:\s*)(?:{_QUOTED})")
_REFERENCE = re.compile(r"\$\([A-Za-z_][A-Za-z0-9_.-]*\)")
_ENDPOINT = re.compile(
    r"(https?://)([^/?#\s]*@)?([\w.-]+(?::\d+)?|\[[\da-f:.]+\](?::\d+)?)([/?#].*)?", re.IGNORECASE | re.DOTALL
)
_WITH_VALUES = ("env", "httpHeaders")  # of a container and of a probe: lists of names and values
_PARAMS = ("data_reader_params", "model_params")
_LONGEST = 1 << 16  # characters of a secret; keys and tokens have some thousands


def hide(text: str) -> str:
    """Return a text without the passwords, tokens and keys in it."""
    text = _URL_PASSWORD.sub(rf"\1{HIDDEN}@", text)
    text = _JSON_VALUE.sub(rf'\1"{HIDDEN}"', text)
    text = _ARGUMENT.sub(rf"\1{HIDDEN}", text)
    return _NAMED_VALUE.sub(rf"\1{HIDDEN}", text)


def hide_in_ends(text: str, longest: int) -> str:
    """Hide secrets, and shorten a text with more characters than `longest` to its beginning and end.

    It is cut before secrets are looked for, which takes a second for some megabytes.  What is hidden otherwise with
    more of the text around it may be a part of a secret at the cut, and is left out.
    """
    if len(text) <= longest:
        return hide(text)
    half = longest // 2
    begin = _common_start(hide(text[:half]), hide(text[: half + _LONGEST]))
    end = _common_start(hide(text[-half:])[::-1], hide(text[-half - _LONGEST :])[::-1])[::-1]
    return f"{begin} … {end}"


def _common_start(one: str, other: str) -> str:
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def hide_in_flag(name: str, value: object) -> object:
    """Return the value of the flag `name` with its secrets hidden; a value that is no text is returned unchanged."""
    if type(value) is not str:
        return value
    if name == "envs":
        return _hidden_envs(value)
    if name == "on_end":
        return _hidden_endpoint(value)
    if name in _PARAMS:
        return ";".join(_hidden_param(part) for part in split_params(value))
    if name.endswith("pod_template"):
        return _hidden_template(value)
    if name == "cluster_spec_json":
        value = _ENV_OF_JSON.sub(rf'\1"{HIDDEN}"', value)
    return hide(value)


def is_secret_env(value: str) -> bool:
    """Return whether a variable's value is secret: all are, except references to other variables, `$(NAME)`.

    Kubernetes resolves references only in what stands in the pod itself.
    """
    return _REFERENCE.search(value) is None


def _hidden_envs(value: str) -> str:
    try:
        envs = parse_envs(value)
    except FlagError:  # it is to be shown in an error
        return HIDDEN
    return ",".join(f"{name}={HIDDEN if is_secret_env(text) else text}" for name, text in envs.items())


def _hidden_endpoint(value: str) -> str:
    """Return a URL without its user, and without its path and query: that of a webhook is its password."""
    found = _ENDPOINT.fullmatch(value)
    if found is None:  # it is to be shown in an error
        return HIDDEN if value else ""
    scheme, user, host, rest = found.groups()
    return f"{scheme}{f'{HIDDEN}@' if user else ''}{host}{f'/{HIDDEN}' if rest not in (None, '', '/') else rest or ''}"


def _hidden_template(value: str) -> str:
    """A pod template, as JSON or the path of a file; what only refers to a Secret is none, and JSON stays JSON."""
    try:
        template = json.loads(value)
    except ValueError:
        return hide(value)
    hidden = _hidden_node(template)
    return value if hidden == template else json.dumps(hidden, separators=(",", ":"))


def _hidden_node(node: Any, key: str = "", inside: str = "") -> Any:
    """Return a part of a template.

    Args:
        node: the part.
        key: whose value it is, also of each entry of a list.
        inside: the key of the list whose entry has it.
    """
    if isinstance(node, dict):
        return {name: _hidden_node(one, name, key) for name, one in node.items()}
    if isinstance(node, list):
        return [_hidden_node(one, key, inside) for one in node]
    if not isinstance(node, str):
        return node
    if key == "value" and inside in _WITH_VALUES:
        return HIDDEN if is_secret_env(node) else node
    return HIDDEN if re.fullmatch(_NAME, key, re.IGNORECASE) else hide(node)


def _hidden_param(part: str) -> str:
    name, equals, _ = part.partition("=")
    if equals and re.fullmatch(_NAME, name.strip(), re.IGNORECASE):
        return f"{name}={HIDDEN}"
    return hide(part)
