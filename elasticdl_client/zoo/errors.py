"""Errors of images."""

from __future__ import annotations

from elasticdl_client.errors import ElasticDLError


class ImageError(ElasticDLError):
    """Something of the world refused: the engine, the builder, the registry, the disk; not a mistake in a flag."""
