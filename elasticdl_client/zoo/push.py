"""`elasticdl zoo push`: an image from Docker Engine to its registry."""

from __future__ import annotations

import re
from typing import TextIO

from elasticdl_client.zoo import messages
from elasticdl_client.zoo.arguments import registry_of
from elasticdl_client.zoo.display import shown
from elasticdl_client.zoo.engine import connected
from elasticdl_client.zoo.errors import ImageError


def push(repository: str, tag: str, out: TextIO) -> None:
    """Pushes an image, showing what the registry says; credentials are those of `docker login`.

    Args:
        repository: of the image's name; begins with the registry.
        tag: of the image's name.
        out: where the progress goes.

    Raises:
        ImageError: no engine, no such image, or the registry refuses.
    """
    name = f"{repository}:{tag}"
    with connected() as engine:
        from docker.errors import ImageNotFound

        try:
            engine.images.get(name)
        except ImageNotFound as error:
            raise ImageError(
                f"The engine has no image {name}.", f"`elasticdl zoo build PATH --image={name}` makes it."
            ) from error
        with shown(out) as display:
            for message in messages.read(engine.api.push(repository, tag=tag, stream=True, decode=True)):
                if isinstance(message, messages.Failure):
                    raise ImageError(f"{name} was not pushed: {message.text}", _hint(repository, message.text))
                display.show(message)


def _hint(repository: str, text: str) -> str:
    registry = registry_of(repository)
    if re.search(r"denied|unauthorized|authentication|no basic auth", text, re.IGNORECASE):
        if not registry:
            return "That name has no registry in front, so it went to Docker Hub: build and push REGISTRY/NAME:TAG."
        return f"`docker login {registry}`; may you write there?"
    if "HTTP response to HTTPS" in text:
        return f"{registry} speaks plain HTTP: let the engine's daemon.json name it under insecure-registries."
    if re.search(r"connection refused|no such host|timeout|deadline|dial tcp", text, re.IGNORECASE):
        return f"The engine cannot reach {registry or 'Docker Hub'}: is that the registry's address?"
    return "These are the registry's own words."
