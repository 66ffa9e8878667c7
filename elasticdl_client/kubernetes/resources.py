"""Resource strings, ``cpu=1,memory=4096Mi,gpu=1``, to what Kubernetes calls them."""

from __future__ import annotations

import re

from elasticdl_client.errors import FlagError

_ALLOWED = ["memory", "disk", "ephemeral-storage", "cpu", "gpu"]
_MEMORY = re.compile(r"[1-9][0-9]*(E|P|T|G|M|K|Ei|Pi|Ti|Gi|Mi|Ki)")
_MILLI_CPU = re.compile(r"[1-9][0-9]*m")
_CPU = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)")
_NVIDIA_TYPE = re.compile(r"nvidia\.com/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VENDOR = re.compile(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?\.)+[a-z]{2,}")
_HINT = "For example cpu=1,memory=4096Mi,gpu=1."


def parse_resources(text: str) -> dict[str, str]:
    """A resource string as Kubernetes quantities by resource name; empty text is an empty dict.

    Raises:
        FlagError: with the messages of the original.
    """
    quantities: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise FlagError(f"'{part.strip()}' is not of the form name=quantity.", _HINT)
        key = _resource_name(name)
        if key in quantities:
            raise FlagError(f"The resource string contains duplicate resource names: {name}", _HINT)
        _check_quantity(name, key, value)
        quantities[key] = value
    return quantities


def _resource_name(name: str) -> str:
    if name == "gpu":
        return "nvidia.com/gpu"
    if name in _ALLOWED or _NVIDIA_TYPE.fullmatch(name):
        return name
    if name.endswith("/gpu"):
        if not _VENDOR.fullmatch(name.removesuffix("/gpu")):
            raise FlagError(
                f"gpu resource name does not have a valid vendor name: {name}", "For example amd.com/gpu=1."
            )
        return name
    raise FlagError(f"{name} is not in the allowed list of resource types: {_ALLOWED}", _HINT)


def _check_quantity(name: str, key: str, value: str) -> None:
    if key == "cpu":
        if not _MILLI_CPU.fullmatch(value) and not (_CPU.fullmatch(value) and float(value) > 0):
            raise FlagError(f"invalid cpu request spec: {value}", "For example cpu=1, cpu=0.5 or cpu=500m.")
    elif key in ("memory", "disk", "ephemeral-storage"):
        if not _MEMORY.fullmatch(value):
            raise FlagError(f"invalid {name} request spec: {value}", f"For example {name}=4096Mi; the unit is needed.")
    elif not re.fullmatch(r"[0-9]+", value):
        raise FlagError(f"invalid gpu request spec: {value}", f"A whole number, for example {name}=1.")


def check_resources(text: str) -> str:
    """The check of a resource flag: what is wrong with it, or nothing."""
    try:
        parse_resources(text)
    except FlagError as error:
        return error.what
    return ""
