"""From the flags that name a model definition to its callables."""

from elasticdl.model_def.definition import ModelDefinition
from elasticdl.model_def.loading import load, load_model_definition
from elasticdl_client.model_framework import framework_of

__all__ = ["ModelDefinition", "framework_of", "load", "load_model_definition"]
