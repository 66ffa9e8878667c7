"""The commands `elasticdl zoo init|build|push`: from a folder of models to an image that jobs run in."""

from elasticdl_client.zoo.command import run

__all__ = ["run"]
