"""Import paths of the original ElasticDL."""

from elasticdl.original import install

install(__name__)
