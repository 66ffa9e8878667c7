"""Checks of single flag values: each says what is wrong with a value, or nothing.  The rest are in kubernetes/."""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from urllib.parse import parse_qs, urlsplit

from elasticdl_client.data_sources import is_table
from elasticdl_client.errors import StorageError
from elasticdl_client.flags import Check
from elasticdl_client.storage_kinds import KINDS, check_url, has_capitals, is_remote, scheme_of

_LONGEST_NAME_BYTES = 255  # NAME_MAX of Linux
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LONGEST_PATH_BYTES = 4000  # PATH_MAX, 4096, less what we put behind it


def at_least(minimum: float) -> Check:
    return lambda value: "" if value >= minimum else f"must be at least {minimum}"


def above(bound: float) -> Check:
    return lambda value: "" if value > bound else f"must be more than {bound}"


def between(low: float, high: float) -> Check:
    return lambda value: "" if low <= value <= high else f"must be between {low} and {high}"


def regular_expression(value: str) -> str:
    """A check: the value compiles as a regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        return f"is not a regular expression: {error}"
    return ""


def check_job_name(name: str) -> str:
    if re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", name):
        return ""
    problem = "is not a job name: at most 40 lower-case letters, digits and dashes, a letter or digit first and last"
    valid = as_job_name(name)
    return f"{problem}, such as {valid}" if valid else problem


def as_job_name(text: str) -> str:
    """Return the name of a job that is the most like a text; empty if no letter of it can be in one."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:40].strip("-")


def check_symbol(name: str) -> str:
    return "" if all(part.isidentifier() for part in name.split(".")) else "is not the (dotted) name of a symbol"


def check_columns(text: str) -> str:
    """Check names separated by commas, each given once."""
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(names):
        return "has an empty name; write name,name2"
    repeated = next((name for name in names if names.count(name) > 1), None)
    return f"names {repeated} twice" if repeated else ""


def check_job_command(command: str) -> str:
    """A command line that can be split into words; empty: none."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"cannot be split into words ({str(error).lower()}); no shell runs it, but quotes count as in one"
    return "is empty" if command and not words else ""


def check_path(path: str) -> str:
    """A path that a file system can hold."""
    if _URL.match(path):
        return "is a URL; mount the bucket or share as a directory, in all pods, and give that path"
    if "\0" in path:
        return "has a NUL character in it"
    if len(os.fsencode(path)) > _LONGEST_PATH_BYTES:
        return f"is longer than the {_LONGEST_PATH_BYTES} bytes that a path may have"
    if any(len(os.fsencode(name)) > _LONGEST_NAME_BYTES for name in path.split("/")):
        return f"has a name of more than {_LONGEST_NAME_BYTES} bytes in it, which no file system takes"
    return ""


def check_readable_path(path: str) -> str:
    """A path, or a URL of storage."""
    if not is_remote(path):
        return check_path(path)
    if has_capitals(path):
        return f"has a scheme in capitals; write {scheme_of(path)}://"
    try:
        check_url(path)
    except StorageError:
        return "has a credential in it, or names no bucket; give credentials by the environment, with --envs"
    return ""


def check_writable_directory(path: str) -> str:
    """A path, or the URL of a directory in storage that can be written."""
    wrong = check_readable_path(path)
    if wrong or not is_remote(path) or KINDS[scheme_of(path)].can_write:
        return wrong
    return f"is the URL of storage that cannot be written: {KINDS[scheme_of(path)].read_only}"


def check_url_of_directory(url: str) -> str:
    """The URL of a directory in storage that can be written; empty: none."""
    if url and not is_remote(url):
        return "is not a URL of storage, such as s3://bucket/directory"
    return check_writable_directory(url)


def check_outputs(place: str) -> str:
    """A path, the URL of a directory in storage, or of a table of a database."""
    if not is_table(place):
        wrong = check_writable_directory(place)
        if not wrong and place.rstrip("/").endswith((".csv", ".parquet", ".recordio")):
            wrong = (
                "is to be a directory, of a file for each task; leave the ending out: --prediction_format says the kind"
            )
        return wrong
    has_table = bool(parse_qs(urlsplit(place).query).get("table"))
    return "" if has_table else "names no table; write it after the URL: ?table=NAME"


def check_endpoint(url: str) -> str:
    """Return a URL to send to; empty: none.  Errors do not contain the URL, which may be secret."""
    if not url:
        return ""
    if any(character.isspace() or not character.isprintable() for character in url):
        return "has white space in it"
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError:
        return "has no valid host and port"
    if parts.scheme not in ("http", "https"):
        return "is not an http:// or https:// URL"
    return "" if has_host else "names no host"


def check_model_def(name: str) -> str:
    if "." in name and not check_symbol(name):
        return check_path(f"{name.replace('.', '/')}.py")
    return "is not of the form package.module.symbol, relative to --model_zoo"
