"""The commands `elasticdl zoo init|build|push`: from a folder of models to an image that jobs run in."""

from __future__ import annotations

from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Runs a zoo command.

    Args:
        arguments: those after `elasticdl zoo`.

    Returns:
        The exit code: 0 if it is done, 1 if the builder or the registry refused.

    Raises:
        ElasticDLError: a mistake of the user's.
    """
    raise NotImplementedError(arguments)
