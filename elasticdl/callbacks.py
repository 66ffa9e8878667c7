"""Callbacks under the import path of the original ElasticDL; those of today are in `elasticdl.api.callbacks`."""

from elasticdl.original import install

install(__name__)
