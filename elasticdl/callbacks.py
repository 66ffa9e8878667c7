"""Callbacks under the import path of the original ElasticDL; use `elasticdl.api.callbacks` in new code."""

from elasticdl.original import install

install(__name__)
