"""Builds the runtime distribution `elasticdl`; what it is made of is said in pyproject.toml."""

from setuptools import setup

setup()
